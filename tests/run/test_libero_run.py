"""A real simulator in a process of its own: the same to the byte as here, also when its first process is killed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from vla_eval.policies.baseline import random
from vla_eval.registry import load_tasks
from vla_eval.results.folder import Episode, read_episode
from vla_eval.run.episode import in_process, rollout
from vla_eval.run.loop import Run, start
from vla_eval.run.recorders import ArrayRecorder
from vla_eval.types import ActionChunk, Request

TIMED = ("request_seconds", "request_batch")


class Killer:
    """Acts at random, and kills the simulator's process when it is asked for the second time."""

    name, horizon, needs = "random", random().horizon, random().needs

    def __init__(self) -> None:
        self.asked = 0
        self.run: Run | None = None

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        self.asked += 1
        if self.asked == 2 and self.run is not None:
            (worker,) = [seat.worker for seat in self.run._seats if seat.worker is not None]
            worker.process.kill()
        return random().act(batch)


@pytest.mark.libero
def test_a_killed_simulator_is_replaced_and_its_episode_is_the_same_to_the_byte(libero: Callable[[str, int], Any], tmp_path: Path) -> None:
    task = replace(load_tasks("libero_object")[0], max_steps=20)
    policy = Killer()
    with start(policy, [task], trials=1, seed=3, workers=1, out=tmp_path) as run:
        policy.run = run
        (record,) = run
    assert run.folder is not None
    assert (record.outcome, record.steps, record.attempts) == ("failure", 20, 2)

    here = tmp_path / "here.npz"
    rollout(
        libero("libero_object", 0), in_process(random()), task, random().needs, trial=0, seed=3, replan=8, recorders=[ArrayRecorder(here)]
    )
    apart = run.folder.episode(task.id, 0)
    for field in fields(Episode):
        if field.name not in TIMED:
            assert getattr(apart, field.name).tobytes() == getattr(read_episode(here), field.name).tobytes(), field.name
    assert apart.states.shape == (21, 110)
    assert {"mujoco", "robosuite"} <= run.manifest.versions.keys()
    assert "renderer" in run.manifest.hardware
    assert len(run.manifest.protocol["tasks"][task.id]["starts"]) == 64
