"""LIBERO's five suites under four protocols: who evaluates how, in numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from vla_eval.types import Task

ENV = "vla_eval.envs:vla_eval/Libero-v0"
STARTS = 50  # stored initial states of each task
SETTLE_STEPS = 10  # with the gripper open; they count towards no limit
PIXELS = 256


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way of evaluating. Scores under one protocol's name are comparable; another number is another name."""

    name: str
    max_steps: Mapping[str, int]  # suite -> policy steps
    replan: Mapping[str, int]  # policy -> actions of a chunk to execute
    settle_steps: int = SETTLE_STEPS
    start: Literal["rows", "placement"] = "rows"  # the k-th stored state, or objects placed from the seed
    seeding: Literal["episode", "ordered"] = "episode"  # each reset from its own seed, or seed 7 and k earlier resets


_OPENPI_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}

PROTOCOLS = (
    # openpi, examples/libero/main.py
    Protocol("openpi", _OPENPI_STEPS, replan={"pi05": 5, "gr00t": 8}),
    # The same with openpi's seeding, so that fixtures stand where openpi's do.
    Protocol("openpi-ordered", _OPENPI_STEPS, replan={"pi05": 5, "gr00t": 8}, seeding="ordered"),
    # Isaac-GR00T's README: no stored states, no settling, one limit (its TensorRT guide and its command line's default say 504).
    Protocol("gr00t", dict.fromkeys(_OPENPI_STEPS, 720), replan={"pi05": 5, "gr00t": 8}, settle_steps=0, start="placement"),
    # lerobot, envs/libero.py: openpi's numbers but for libero_spatial's limit; pi0.5 runs its whole chunk.
    Protocol("lerobot", _OPENPI_STEPS | {"libero_spatial": 280}, replan={"pi05": 10, "gr00t": 8}),
)


def libero_spatial() -> list[Task]:
    """The same bowl and plate, told apart by where the bowl stands."""
    return _tasks("libero_spatial")


def libero_object() -> list[Task]:
    """One of ten groceries into the basket."""
    return _tasks("libero_object")


def libero_goal() -> list[Task]:
    """One scene, ten goals."""
    return _tasks("libero_goal")


def libero_10() -> list[Task]:
    """Ten long tasks of two steps each."""
    return _tasks("libero_10")


def libero_90() -> list[Task]:
    """Ninety short tasks in kitchens, living rooms and studies."""
    return _tasks("libero_90")


def _tasks(suite: str) -> list[Task]:
    """Every task under every protocol, @openpi, the default, first."""
    return [
        Task(
            id=f"{suite}@{protocol.name}/{index}",
            env=ENV,
            instruction=instruction,
            max_steps=protocol.max_steps[suite],
            trials=STARTS if protocol.start == "rows" else None,
            replan=protocol.replan,
            env_kwargs={
                "suite": suite,
                "task": index,
                "max_steps": protocol.max_steps[suite],
                "settle_steps": protocol.settle_steps,
                "start": protocol.start,
                "seeding": protocol.seeding,
                "size": PIXELS,
                "pictures": "on_request",
            },
        )
        for protocol in PROTOCOLS
        for index, instruction in enumerate(_instructions()[suite])
    ]


@cache
def _instructions() -> dict[str, list[str]]:
    """Suite -> instructions by task index, as tools/make_libero_table.py read them from the benchmark."""
    table: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return table
