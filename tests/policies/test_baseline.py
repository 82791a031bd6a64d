"""Policies without a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vla_eval.policies.baseline import random, replay, zero
from vla_eval.registry import load_policy, load_tasks
from vla_eval.run.loop import evaluate, start
from vla_eval.testing import ToyExpert
from vla_eval.types import BadRequest, Observation, Request


def request(seed: int = 0, trial: int = 0, step: int = 0, task: str = "toy@v1/2") -> Request:
    return Request(Observation(images={}, state={}, instruction="lift"), seed, task, trial, step)


def test_zero_holds_the_arm_still_and_the_gripper_open() -> None:
    (chunk,) = zero(horizon=3).act([request()])
    np.testing.assert_array_equal(chunk.actions, [[0, 0, 0, 0, 0, 0, -1]] * 3)


def test_zero_fails_every_task_of_the_toy() -> None:
    for suite in ("toy@v1", "toy@free"):
        assert {record.outcome for record in evaluate(zero(), load_tasks(suite), trials=10, workers=0)} == {"failure"}


def test_random_is_uniform_and_comes_from_the_seed() -> None:
    policy = random(horizon=1000)
    one, same, other = (chunk.actions for chunk in policy.act([request(5), request(5, trial=3), request(6)]))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert one.dtype == np.float32
    assert np.abs(one).max() <= 1
    assert np.abs(one.mean(axis=0)).max() < 0.1  # standard error 0.018
    assert one.std(axis=0) == pytest.approx(3**-0.5, abs=0.05)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with start(ToyExpert(), load_tasks("toy")[2:3], trials=2, workers=0, out=tmp_path_factory.mktemp("runs")) as played:
        list(played)
    assert played.folder is not None
    return played.folder.path


def test_replay_gives_the_actions_from_where_the_episode_is_and_then_holds_still(run: Path) -> None:
    from vla_eval.results.folder import open_run

    recorded = open_run(run).episode("toy@v1/2", 1).actions
    policy = load_policy("replay", run=str(run))
    assert policy.needs.privileged
    assert policy.horizon == 8
    first, later, last, after = (
        chunk.actions for chunk in policy.act([request(trial=1, step=step) for step in (0, 5, len(recorded) - 3, len(recorded) + 10)])
    )
    np.testing.assert_array_equal(first, recorded[:8])
    np.testing.assert_array_equal(later, recorded[5:13])
    np.testing.assert_array_equal(last, [*recorded[-3:], *[[0, 0, 0, 0, 0, 0, -1]] * 5])
    np.testing.assert_array_equal(after, [[0, 0, 0, 0, 0, 0, -1]] * 8)


def test_replay_of_an_episode_that_was_not_recorded_is_refused(run: Path) -> None:
    policy = replay(run=str(run))
    for asked in (request(trial=2), request(task="toy@v1/0")):
        with pytest.raises(BadRequest, match=r"has no trial \d of toy@v1/\d to play back"):
            policy.act([asked])


def test_options_that_will_not_do_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="needs --option run=VALUE"):
        load_policy("replay")
    with pytest.raises(BadRequest, match="no run folder"):
        load_policy("replay", run=str(tmp_path))
    for horizon in (0, -1, 2.5, True, "8"):
        with pytest.raises(BadRequest, match="horizon is"):
            load_policy("zero", horizon=horizon)
    with pytest.raises(BadRequest, match="policy 'random' has no engines"):
        load_policy("random", bundle="bundles/x")
    with pytest.raises(BadRequest, match="unknown option 'horizont' of policy 'zero'; did you mean 'horizon'"):
        load_policy("zero", horizont=3)
