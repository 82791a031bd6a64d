"""A suite of two tasks."""

from vla_eval import Task

from .envs import INSTRUCTION

COUNTER = [
    Task(
        f"counter@v1/{index}",
        "counter_plugin.envs:counter/Counter-v0",
        INSTRUCTION,
        max_steps=20,
        env_kwargs={"start": start, "max_steps": 20},
    )
    for index, start in enumerate((0.5, -0.8))
]
