"""The one place where LIBERO's conventions meet the checkpoint's: pictures, state, gripper."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.arrays import read_npz
from vla_eval.policies.flow import draw_noise
from vla_eval.policies.gr00t.contract import from_checkpoint, parse
from vla_eval.policies.gr00t.libero import Gr00tLibero, load, to_environment, to_robot
from vla_eval.policies.gr00t.policy import Gr00tPolicy
from vla_eval.policies.gr00t.processor import Layout, Tokens
from vla_eval.policies.gr00t.runtime import Answer, Gr00tRuntime, Inputs
from vla_eval.types import ARM_ACTION, ARM_STATE, BadRequest, ContractMismatch, InvalidObservation, Observation, Request

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny/checkpoint"
SHAPE = read_npz(Path(__file__).parents[2] / "cases/conventions/l_shape.npz")
KEY = "annotation.human.action.task_description"


class Echo:
    """A runtime that remembers its rows and answers with their noise."""

    horizon, width, state_width, on_card = 40, 132, 132, False
    layout = Layout(16, 5e6, (4, 2, 2), 16, 1e4, 2304, 292)

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, rows: list[Inputs]) -> list[Answer]:
        self.rows += rows
        return [Answer(row.noise, {"visual": 0.1, "prefill": 0.2, "denoise": 0.3}) for row in rows]


def policy(tag: str = "libero_sim") -> tuple[Gr00tLibero, Echo]:
    contract = parse(from_checkpoint(GOLDEN, tag), tag)
    runtime = Echo()
    return Gr00tLibero(Gr00tPolicy(contract, Tokens(GOLDEN / "tokenizer", contract.prompt, 64), cast(Gr00tRuntime, runtime))), runtime


def seen(picture: NDArray[np.uint8] | None = None, instruction: str = "open the drawer") -> Observation:
    picture = np.zeros((256, 256, 3), np.uint8) if picture is None else picture
    return {
        "images": {"agentview": picture, "robot0_eye_in_hand": picture},
        "state": {"eef_pos": np.array([-0.2, 0.1, 1.0]), "eef_rot": np.array([3.1, 0.05, -0.3]), "gripper": np.array([0.02, -0.021])},
        "instruction": instruction,
    }


def test_pictures_arrive_as_the_checkpoint_was_trained() -> None:
    robot = to_robot(seen(SHAPE["upright"]), KEY)
    for camera in ("image", "wrist_image"):
        np.testing.assert_array_equal(robot[f"video.{camera}"][0, 0], SHAPE["policy"])
        np.testing.assert_array_equal(robot[f"video.{camera}"][0, 0], SHAPE["raw"][::-1, ::-1])  # the renderer's, turned by 180°


def test_a_picture_keeps_its_orientation_up_to_the_vision_engine() -> None:
    """From the renderer's rows to the patches: of all eight turns and mirrors only the trained one arrives."""
    played, runtime = policy()
    played.act([Request(seen(SHAPE["upright"]), seed=1, task="t", trial=0, step=0)])
    blocks = runtime.rows[0].patches[:256].reshape(8, 8, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]  # row, column, in block, channel, y, x
    arrived = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(256, 256, 3)
    distance = {}
    for turns in range(4):
        for flipped in (False, True):
            other = np.rot90(SHAPE["policy"][:, ::-1] if flipped else SHAPE["policy"], turns)
            distance[turns, flipped] = np.abs(arrived - (other.astype(np.float32) / 127.5 - 1)).mean()
    assert min(distance, key=lambda key: distance[key]) == (0, False)
    assert sorted(distance.values())[1] > 2 * distance[0, False]  # the 5 % crop moves edges a little


def test_cameras_are_not_exchanged() -> None:
    observation = seen()
    observation["images"]["robot0_eye_in_hand"] = np.full((256, 256, 3), 9, np.uint8)
    robot = to_robot(observation, KEY)
    assert (robot["video.image"].max(), robot["video.wrist_image"].min()) == (0, 9)


def test_the_state_is_split_and_stays_an_axis_angle() -> None:
    robot = to_robot(seen(), KEY)
    values = {key: robot[f"state.{key}"] for key in ("x", "y", "z", "roll", "pitch", "yaw", "gripper")}
    assert all(value.dtype == np.float32 and value.shape == (1, 1, 2 if key == "gripper" else 1) for key, value in values.items())
    np.testing.assert_array_equal(
        np.concatenate([v.ravel() for v in values.values()]), np.array([-0.2, 0.1, 1.0, 3.1, 0.05, -0.3, 0.02, -0.021], np.float32)
    )


@pytest.mark.parametrize(("model", "environment"), [(1.0, -1.0), (0.51, -1.0), (0.5, 0.0), (0.49, 1.0), (0.0, 1.0)])
def test_an_open_gripper_is_minus_one_for_the_environment(model: float, environment: float) -> None:
    actions = {key: np.full((16, 1), 0.25, np.float32) for key in ("x", "y", "z", "roll", "pitch", "yaw")}
    out = to_environment({**actions, "gripper": np.full((16, 1), model, np.float32)})
    assert out.shape == (16, 7)
    assert out.dtype == np.float32
    assert (out[:, :6] == 0.25).all()
    assert (out[:, 6] == environment).all()
    assert not np.signbit(out[:, 6]).any() or environment < 0  # no −0, which a recording would keep


def test_an_episode_can_be_played() -> None:
    played, runtime = policy()
    assert (played.name, played.horizon) == ("gr00t", 16)
    assert played.needs.cameras == {"agentview": (256, 256), "robot0_eye_in_hand": (256, 256)}
    assert (played.needs.state, tuple(played.needs.action), played.needs.control_hz) == (ARM_STATE, ARM_ACTION, 20.0)
    assert not played.needs.privileged
    requests = [
        Request(seen(instruction=text), seed=seed, task="t", trial=0, step=0) for text, seed in (("open it", 5), ("close the drawer", 6))
    ]
    first, second = played.act(requests)
    assert first.actions.shape == (16, 7)
    assert set(first.seconds) == {"pack", "visual", "prefill", "denoise", "unpack"}
    assert first.memory is None
    for row, seed in zip(runtime.rows, (5, 6), strict=True):
        np.testing.assert_array_equal(row.noise, draw_noise(seed, 40, 132))
    (alone,) = played.act(requests[1:])
    np.testing.assert_array_equal(alone.actions, second.actions)
    assert np.abs(second.actions[:, 0]).max() <= 0.7711  # x within the checkpoint's bounds


def test_every_row_of_a_batch_keeps_its_own_picture() -> None:
    played, runtime = policy()
    pictures = [np.full((256, 256, 3), grey, np.uint8) for grey in (0, 255)]
    played.act([Request(seen(picture), seed=1, task="t", trial=0, step=0) for picture in pictures])
    assert [(row.patches.min(), row.patches.max()) for row in runtime.rows] == [(-1.0, -1.0), (1.0, 1.0)]


def test_an_empty_instruction_is_refused() -> None:
    played, runtime = policy()
    with pytest.raises(InvalidObservation, match="needs an instruction"):
        played.act([Request(seen(instruction=" "), seed=1, task="t", trial=0, step=0)])
    assert not runtime.rows


def test_another_robots_bundle_is_a_mismatch_when_it_should_play() -> None:
    played, _ = policy("simpler_env_widowx")
    with pytest.raises(ContractMismatch, match="'simpler_env_widowx' has cameras \\['front'\\]"):
        _ = played.needs


def test_without_a_bundle_the_commands_are_said() -> None:
    with pytest.raises(BadRequest, match=r"vla-eval bundles.*vla-eval export --model gr00t"):
        load()


@pytest.mark.parametrize("option", [{"steps": "four"}, {"steps": True}, {"steps": 0}, {"side": "256px"}])
def test_an_option_that_is_no_number_is_refused_before_anything_is_opened(option: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"option (steps|side) is .*; it must be a whole number from 1"):
        load("nowhere", **option)
