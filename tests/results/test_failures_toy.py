"""Policies that fail on purpose, played in the toy: each lands in its bin, whatever the start; the expert lands in none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval import ActionChunk, Interface, Request, load_tasks
from vla_eval.results.failures import Bin, bins
from vla_eval.results.folder import open_run
from vla_eval.run.loop import start
from vla_eval.testing import ToyExpert
from vla_eval.types import ARM_ACTION, Policy

CARRIED_M = 0.1  # higher than any block lies
PUT_RED, PUT_BOTH = 2, 3  # the toy's tasks


@dataclass(frozen=True)
class Clumsy:
    """The expert, but for one habit. What it did before it remembers in its memory."""

    habit: str
    name: str = "clumsy"
    horizon: int = 1
    needs: Interface = field(default=Interface(cameras={}, state={}, action=ARM_ACTION, control_hz=20, privileged=True))

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [self._one(request) for request in batch]

    def _one(self, request: Request) -> ActionChunk:
        truth = request.observation["privileged"]
        goal: list[tuple[str, ...]] = [("on", "red_block", "pad")]
        holds = [False]
        lifted = truth["poses"]["red_block"][2] > CARRIED_M
        been = request.memory or b""
        match self.habit:
            case "idle":
                return self._still(0)
            case "raises":
                raise ValueError("lost my glasses")
            case "nan":
                return ActionChunk(np.full((1, 7), np.nan, np.float32))
            case "wrong block":
                goal = [("lifted", "blue_block")]
            case "drops it" if been or lifted:
                return self._still(-1, b"dropped")
            case "freezes" if been or lifted:
                return self._still(1, b"frozen")
            case "takes it away" if been or truth["holds"][0]:
                goal, been = [("lifted", "red_block")], b"placed"
            case "expert":
                goal, holds = list(truth["goal"]), list(truth["holds"])
        seen: Any = {**request.observation, "privileged": {**truth, "goal": goal, "holds": holds}}
        (chunk,) = ToyExpert(horizon=1).act([Request(seen, request.seed, request.task, request.trial, request.step)])
        actions = chunk.actions.copy()
        if self.habit == "creeps" and lifted:
            actions[:, :3] *= 0.05
        return ActionChunk(actions, memory=been or None)

    def _still(self, gripper: float, memory: bytes | None = None) -> ActionChunk:
        return ActionChunk(np.array([[0, 0, 0, 0, 0, 0, gripper]], np.float32), memory=memory)


def played(policy: Policy, task: int, seed: int, out: Path) -> tuple[Mapping[tuple[str, int], Bin], str]:
    with start(policy, [load_tasks("toy")[task]], trials=1, seed=seed, workers=0, out=out) as run:
        (record,) = list(run)
    assert run.folder is not None
    return bins(open_run(run.folder.path)), record.outcome


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("habit", "task", "wanted"),
    [
        ("idle", PUT_RED, Bin.NEVER_REACHED),
        ("wrong block", PUT_RED, Bin.WRONG_OBJECT),
        ("drops it", PUT_RED, Bin.LOST),
        ("freezes", PUT_RED, Bin.NOT_PLACED),
        ("takes it away", PUT_BOTH, Bin.UNDONE),
        ("creeps", PUT_RED, Bin.SLOW),
        ("nan", PUT_RED, Bin.POLICY_ERROR),
        ("raises", PUT_RED, Bin.POLICY_ERROR),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_habit_lands_in_its_bin(tmp_path: Path, habit: str, task: int, wanted: Bin, seed: int) -> None:
    found, _ = played(Clumsy(habit), task, seed, tmp_path)
    assert set(found.values()) == {wanted}


@pytest.mark.parametrize("task", [PUT_RED, PUT_BOTH])
def test_the_expert_lands_in_no_bin(tmp_path: Path, task: int) -> None:
    assert played(Clumsy("expert"), task, 0, tmp_path) == ({}, "success")
