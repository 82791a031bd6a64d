"""The toy's suite: four tasks that need no simulator, from stored starts (`@v1`) or placed from the seed (`@free`)."""

from __future__ import annotations

from vla_eval.types import Task

ENV = "vla_eval.envs:vla_eval/Toy-v0"
SIZE = 64
INSTRUCTIONS = ("move the hand over the pad", "lift the red block", "put the red block on the pad", "put both blocks on the pad")
STEP_LIMITS = (40, 40, 80, 160)
TRIALS = 50


def toy() -> list[Task]:
    """`toy@v1`, then `toy@free`."""
    return [*_protocol("v1", "rows", TRIALS), *_protocol("free", "placement", None)]


def _protocol(name: str, start: str, trials: int | None) -> list[Task]:
    return [
        Task(
            id=f"toy@{name}/{index}",
            env=ENV,
            instruction=instruction,
            max_steps=limit,
            trials=trials,
            env_kwargs={"task": index, "max_steps": limit, "start": start, "size": SIZE, "pictures": "on_request"},
        )
        for index, (instruction, limit) in enumerate(zip(INSTRUCTIONS, STEP_LIMITS, strict=True))
    ]
