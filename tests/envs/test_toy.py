"""The toy environment: LIBERO's manners without a simulator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_eval.envs.toy import CAMERAS, GOALS, ToyEnv, rows
from vla_eval.registry import load_tasks
from vla_eval.types import BadRequest, InvalidAction


@pytest.fixture
def env() -> Iterator[ToyEnv]:
    made = ToyEnv(3, pictures="on_request")
    yield made
    made.close()


def act(env: ToyEnv, x: float = 0, y: float = 0, z: float = 0, grip: float = 0, times: int = 1) -> Any:
    for _ in range(times):
        told = env.step(np.array([x, y, z, 0, 0, 0, grip], np.float32))
    return told


@pytest.mark.parametrize("pictures", ["always", "on_request"])
@pytest.mark.parametrize("task", range(len(GOALS)))
def test_both_kinds_of_pictures_pass_gymnasiums_check_without_a_warning(task: int, pictures: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(ToyEnv(task, pictures=pictures), skip_render_check=True)


def test_the_same_seed_and_trial_are_the_same_states_whatever_ran_before(env: ToyEnv) -> None:
    draw = np.random.default_rng(0)
    actions = draw.uniform(-1, 1, (30, 7)).astype(np.float32)

    def states() -> bytes:
        _, info = env.reset(seed=5, options={"trial": 7})
        seen = [env.snapshot(), info["fixtures"]["pad"]]
        for action in actions:
            env.step(action)
            seen.append(env.snapshot())
        return b"".join(state.tobytes() for state in seen)

    first = states()
    env.reset(seed=6, options={"trial": 1})
    act(env, 1, 1, -1, 1, times=9)
    env.restore(env.snapshot() + 0.01, {"pad": np.zeros(7)})
    assert states() == first


def test_trials_begin_in_their_rows_and_the_pad_comes_from_the_seed(env: ToyEnv) -> None:
    stored = rows(3)
    begun = [env.reset(seed=1, options={"trial": k})[0]["state"]["eef_pos"] for k in range(50)]
    np.testing.assert_array_equal(begun, stored[:, :3])
    assert len({row.tobytes() for row in stored}) == 50
    one, other = (env.reset(seed=seed, options={"trial": 0})[1]["fixtures"]["pad"] for seed in (1, 2))
    assert not np.array_equal(one, other)
    with pytest.raises(BadRequest, match="trial is 50; this task has 50 stored starts"):
        env.reset(options={"trial": 50})


def test_a_block_is_held_between_closed_fingers_and_falls_when_let_go(env: ToyEnv) -> None:
    env.reset(seed=0, options={"trial": 0})
    block = env.privileged()["poses"]["red_block"][:3]
    while (away := block - env.snapshot()[1:4]).any() and np.abs(away).max() > 1e-3:
        x, y, z = np.clip(away / 0.05, -1, 1)
        act(env, x, y, z, grip=-1)
    info = act(env, grip=1, times=3)[4]
    assert info["held"] == {"red_block": True, "blue_block": False}
    observation, *_, info = act(env, z=1, times=4)
    assert info["objects"]["red_block"][2] == pytest.approx(observation["state"]["eef_pos"][2]) == pytest.approx(0.22)
    assert observation["state"]["gripper"][0] == pytest.approx(0.02)  # the block keeps the fingers apart
    info = act(env, grip=-1, times=3)[4]
    assert info["held"]["red_block"] is False
    assert info["objects"]["red_block"][2] == pytest.approx(0.02)


def test_a_zero_keeps_the_grippers_target_and_its_size_does_not_matter(env: ToyEnv) -> None:
    def gap(*commands: float) -> float:
        env.reset(seed=0, options={"trial": 0})
        for command in commands:
            observation = act(env, grip=command)[0]
        return float(observation["state"]["gripper"][0])

    assert gap(0.5) == gap(1) == gap(2) == pytest.approx(0.01)
    assert gap(1, 0) == gap(1, -0.0) == gap(1, 1)
    assert gap(-1, 0) == gap(-1, -1)


def test_the_cap_and_success_say_how_it_ended() -> None:
    env = ToyEnv(0, max_steps=3)
    env.reset(seed=0, options={"trial": 0})
    *_, terminated, truncated, info = act(env, times=3)
    assert (terminated, truncated, info["ended"], info["is_success"]) == (False, True, "cap", False)
    env = ToyEnv(0, max_steps=100)
    _, info = env.reset(seed=0, options={"trial": 0})
    pad = info["fixtures"]["pad"]
    while not info["is_success"]:
        *_, terminated, truncated, info = act(env, *np.clip((pad[:2] - env.snapshot()[1:3]) / 0.05, -1, 1))
    assert (terminated, truncated, info["ended"], info["predicates"]) == (True, False, "success", {"over(hand, pad)": True})


@pytest.mark.parametrize("action", [np.zeros(6), np.full(7, np.nan), np.zeros((1, 7))], ids=str)
def test_what_is_no_action_is_refused(env: ToyEnv, action: Any) -> None:
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match="7 finite numbers"):
        env.step(action)


@pytest.mark.parametrize("scene", ["numpy", pytest.param("mujoco", marks=pytest.mark.libero)])
def test_pictures_drawn_again_from_recorded_states_are_the_same_bytes(scene: Any) -> None:
    live, later = ToyEnv(3, pictures="on_request", scene=scene), ToyEnv(3, pictures="on_request", scene=scene)
    _, info = live.reset(seed=3, options={"trial": 2})
    later.reset(seed=9, options={"trial": 4})
    pictures = set()
    for action in np.random.default_rng(1).uniform(-1, 1, (6, 7)):
        live.step(action)
        later.restore(live.snapshot(), info["fixtures"])
        for camera in CAMERAS:
            drawn = live.look([camera])[camera]
            assert (drawn.dtype.name, drawn.shape) == ("uint8", (64, 64, 3))
            np.testing.assert_array_equal(drawn, later.look([camera])[camera])
            pictures.add(drawn.tobytes())
    assert len(pictures) > 6  # every moment looks different, to the hand's camera only where there is something to see
    live.close()
    later.close()


def test_looking_moves_nothing_and_a_restored_state_cannot_be_stepped(env: ToyEnv) -> None:
    env.reset(seed=0)
    before = env.snapshot().tobytes()
    env.look()
    assert env.snapshot().tobytes() == before
    env.restore(env.snapshot(), {"pad": np.zeros(7)})
    with pytest.raises(BadRequest, match="call reset"):
        act(env)
    for state, fixtures in ((np.zeros(3), {"pad": np.zeros(7)}), (env.snapshot() * np.nan, {"pad": np.zeros(7)}), (env.snapshot(), {})):
        with pytest.raises(BadRequest, match="the toy's states are 14 finite numbers"):
            env.restore(state, fixtures)


def test_the_truth_says_what_is_where(env: ToyEnv) -> None:
    env.reset(seed=0)
    truth = env.privileged()
    assert truth["goal"] == (("on", "red_block", "pad"), ("on", "blue_block", "pad"))
    assert truth["holds"] == [False, False]
    assert {name: pose.shape for name, pose in truth["poses"].items()} == {"red_block": (7,), "blue_block": (7,), "pad": (7,)}


def test_numbers_that_do_not_exist_are_refused() -> None:
    for given, says in (
        ({"task": 4}, "the toy has tasks 0 to 3, not 4"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"size": 4}, "size 4"),
        ({"start": "anywhere"}, "start is 'anywhere'; rows or placement"),
        ({"pictures": "never"}, "pictures is 'never'"),
        ({"scene": "unreal"}, "scene is 'unreal'"),
    ):
        with pytest.raises(BadRequest, match=says):
            ToyEnv(**given)


def test_the_suites_table_is_the_environments() -> None:
    for task in load_tasks("toy@v1") + load_tasks("toy@free"):
        env = ToyEnv(**dict(task.env_kwargs))
        observation, _ = env.reset(seed=0)
        assert observation["instruction"] == task.instruction
        assert env.metadata["interface"].cameras == dict.fromkeys(CAMERAS, (64, 64))
