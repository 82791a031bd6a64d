"""The oracle with one bad habit, in LIBERO itself: each habit lands in its bin from every start, and its successes in none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.policies.oracle import NEEDS, load
from vla_eval.registry import load_tasks
from vla_eval.results.failures import Bin, bin_of
from vla_eval.results.folder import read_episode
from vla_eval.run.episode import in_process, rollout
from vla_eval.run.recorders import ArrayRecorder
from vla_eval.types import ActionChunk, Interface, Request

SUITE, TASK = "libero_object", 0  # "pick up the alphabet soup and place it in the basket"
LIFTED_M = 0.08


@dataclass
class Habit:
    """The oracle, but for one habit; it plays one episode after another, and its state is that of the present one."""

    habit: str
    name: str = "habit"
    horizon: int = 4
    needs: Interface = NEEDS
    start: float = 0.0  # m, the target's height when the episode began
    gone_bad: bool = False

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [self._one(request) for request in batch]

    def _one(self, request: Request) -> ActionChunk:
        truth = request.observation["privileged"]
        verb, target, *rest = truth["goal"][0]
        height = float(truth["poses"][target][2])
        if request.step == 0:
            self.start, self.gone_bad = height, False
        self.gone_bad |= height > self.start + LIFTED_M
        match self.habit:
            case "never moves":
                return still(-1)
            case "drops it" if self.gone_bad:
                return still(-1)
            case "freezes" if self.gone_bad:
                return still(1)
            case "takes another":
                near = (name for name in truth["poses"] if name != target and not name.startswith("basket"))
                other = max(near, key=lambda name: float(truth["poses"][name][1]))
                truth = {**truth, "goal": [(verb, other, *rest)]}
        (chunk,) = load().act([replace(request, observation={**request.observation, "privileged": truth})])
        if self.habit == "creeps" and self.gone_bad:
            actions = chunk.actions.copy()
            actions[:, :6] = np.array([0.06, 0, 0.03, 0, 0, 0])
            return ActionChunk(actions, memory=chunk.memory)
        return chunk


def still(gripper: float) -> ActionChunk:
    return ActionChunk(np.array([[0, 0, 0, 0, 0, 0, gripper]] * 4, np.float32))


@pytest.mark.libero
@pytest.mark.parametrize(
    ("habit", "steps", "wanted"),  # the oracle lifts it within 60 steps and needs about a hundred in all
    [
        ("never moves", 30, Bin.NEVER_REACHED),
        ("takes another", 110, Bin.WRONG_OBJECT),
        ("drops it", 80, Bin.LOST),
        ("freezes", 100, Bin.NOT_PLACED),
        ("creeps", 90, Bin.SLOW),
        ("none", 160, None),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_habit_of_the_oracle_lands_in_its_bin(
    libero: Callable[[str, int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, habit: str, steps: int, wanted: Bin | None
) -> None:
    env, task = libero(SUITE, TASK), replace(load_tasks(SUITE)[TASK], max_steps=steps)
    monkeypatch.setattr(env, "_max_steps", steps)
    found = {}
    for seed in (0, 1, 2):
        file = tmp_path / f"{seed}.npz"
        record = rollout(env, in_process(Habit(habit)), task, NEEDS, trial=10 * seed, seed=seed, replan=4, recorders=[ArrayRecorder(file)])
        assert record.error is None
        found[seed] = bin_of(record, read_episode(file), 20.0)
    assert found == dict.fromkeys((0, 1, 2), wanted)
