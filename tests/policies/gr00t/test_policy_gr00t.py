"""GR00T as a robot sees it: which observations it takes, which it names and refuses, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.arrays import read_npz
from vla_eval.policies.flow import draw_noise
from vla_eval.policies.gr00t.contract import from_checkpoint, parse
from vla_eval.policies.gr00t.policy import Gr00tPolicy
from vla_eval.policies.gr00t.processor import Layout, Tokens
from vla_eval.policies.gr00t.runtime import Answer, Gr00tRuntime, Inputs
from vla_eval.types import ContractMismatch, InvalidObservation

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny"
LAYOUT = Layout.of(json.loads((GOLDEN / "geometry.json").read_text()))
REFERENCE = read_npz(GOLDEN / "reference.npz")
CASES = json.loads((Path(__file__).parents[2] / "cases/conventions/observations.json").read_text())
KEY = "annotation.human.action.task_description"


class Echo:
    """A runtime that remembers what it was given and answers with the noise."""

    horizon, width, state_width, layout, on_card = 40, 132, 132, LAYOUT, False

    def __init__(self) -> None:
        self.rows: list[Inputs] = []

    def __call__(self, rows: list[Inputs]) -> list[Answer]:
        self.rows += rows
        return [Answer(row.noise, {"denoise": 0.0}) for row in rows]


def policy(tag: str = "libero_sim", **changed: Any) -> tuple[Gr00tPolicy, Echo]:
    contract = parse(from_checkpoint(GOLDEN / "checkpoint", tag) | changed, tag)
    runtime = Echo()
    tokens = Tokens(GOLDEN / "checkpoint/tokenizer", contract.prompt, 64)
    return Gr00tPolicy(contract, tokens, cast(Gr00tRuntime, runtime)), runtime


def observation(batch: int = 1) -> dict[str, Any]:
    seen: dict[str, Any] = {
        key.removeprefix("obs."): np.repeat(value, batch, 0)
        for key, value in REFERENCE.items()
        if key.startswith(("obs.video", "obs.state"))
    }
    return {**seen, KEY: "Pick up the red_mug, please!"}


def random_of(dtype: str, shape: list[int]) -> NDArray[Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, shape, np.uint8) if dtype == "uint8" else rng.random(shape).astype(dtype)


def test_an_observation_becomes_the_references_inputs() -> None:
    asked, runtime = policy()
    asked.infer(observation(), noise=REFERENCE["noise"])
    (row,) = runtime.rows
    np.testing.assert_array_equal(row.patches, REFERENCE["input.pixel_values"])
    np.testing.assert_array_equal(row.token_ids, REFERENCE["input.input_ids"][0])
    np.testing.assert_array_equal(row.state, REFERENCE["input.state"][0])
    np.testing.assert_array_equal(row.noise, REFERENCE["noise"][0])


def test_a_chunk_comes_back_in_robot_units() -> None:
    asked, _ = policy()
    answer = asked.infer(observation(), noise=REFERENCE["chunk_normalized"])  # the echo answers with the reference's chunk
    for key in ("x", "y", "z", "roll", "pitch", "yaw", "gripper"):
        np.testing.assert_array_equal(answer[f"action.{key}"], REFERENCE[f"action.{key}"])
    assert answer["action.gripper"].shape == (1, 16, 1)
    assert 0 <= answer["action.gripper"].min() <= answer["action.gripper"].max() <= 1
    np.testing.assert_array_equal(answer["chunk_normalized"], REFERENCE["chunk_normalized"])


def test_several_robots_are_answered_at_once_each_with_its_own_noise() -> None:
    asked, runtime = policy()
    answer = asked.infer({**observation(2), KEY: ["open it", "close it"]}, seed=7)
    assert answer["action.x"].shape == (2, 16, 1)
    for b, row in enumerate(runtime.rows):
        np.testing.assert_array_equal(row.noise, draw_noise(7 + b, 40, 132))
    assert runtime.rows[0].token_ids.tolist() != runtime.rows[1].token_ids.tolist()


GOOD = {key: random_of(*spec) for key, spec in CASES["good"].items()}


def test_the_good_case_runs() -> None:
    asked, runtime = policy()
    asked.infer({**GOOD, KEY: "open it"})
    assert len(runtime.rows) == 1


@pytest.mark.parametrize("case", CASES["refused"])
def test_a_wrong_array_is_refused_by_key_with_what_it_has_and_what_is_wanted(case: str) -> None:
    ((key, (dtype, shape)),) = CASES["refused"][case].items()
    asked, runtime = policy()
    with pytest.raises(InvalidObservation) as refused:
        asked.infer({**GOOD, KEY: "open it", key: random_of(dtype, shape)})
    assert str(refused.value).startswith(f"{key} is {dtype} {shape}, wanted ")
    assert not runtime.rows


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state.x": None}, r"^state\.x is NoneType"),
        ({"state.x": np.full((1, 1, 1), np.nan, np.float32)}, r"^state\.x holds NaN"),
        ({"state.gripper": np.array([[[0, np.inf]]], np.float32)}, r"^state\.gripper holds NaN or infinity"),
        ({"state.wrist": np.zeros((1, 1, 1), np.float32)}, r"has state\.wrist, which this policy does not take"),
        ({"video.image": np.zeros((2, 1, 256, 256, 3), np.uint8)}, r"with B = 2"),
        ({"video.image": np.zeros((1, 1, 0, 256, 3), np.uint8)}, r"^video\.image is uint8 \[1, 1, 0, 256, 3\]"),
        ({KEY: ""}, "needs an instruction"),
        ({KEY: " \n ?!"}, "needs an instruction"),
        ({KEY: ["one", "two"]}, "holds 2 instructions for 1 robots"),
        ({KEY: np.array([5])}, "holds 5, which is no text"),
        ({KEY: [b"open"]}, "holds b'open', which is no text"),
        ({KEY: "open \ud800 it"}, "which is no text"),
    ],
)
def test_a_bad_observation_is_refused_before_the_runtime(change: dict[str, Any], says: str) -> None:
    asked, runtime = policy()
    with pytest.raises(InvalidObservation, match=says):
        asked.infer({**observation(), **change})
    assert not runtime.rows


@pytest.mark.parametrize("key", ["video.wrist_image", "state.gripper", KEY])
def test_a_missing_key_is_named(key: str) -> None:
    asked, _ = policy()
    seen = observation()
    del seen[key]
    with pytest.raises(InvalidObservation, match=f"lacks {key}"):
        asked.infer(seen)


@pytest.mark.parametrize("noise", [np.zeros((40, 7), np.float32), np.zeros((2, 40, 132), np.float32), np.zeros((40, 132)), [[0.0]], 5])
def test_noise_of_another_kind_shape_or_precision_is_refused(noise: Any) -> None:
    asked, _ = policy()
    with pytest.raises(InvalidObservation, match=r"noise is .*, wanted float32 \[1, 40, 132\]"):
        asked.infer(observation(), noise=noise)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None])
def test_a_seed_that_is_no_number_of_32_bits_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidObservation, match=f"seed is {seed!r}"):
        policy()[0].infer(observation(), seed=seed)


def test_a_picture_is_measured_before_it_is_padded_to_a_square() -> None:
    """A line of 300 kB would become 30 GB."""
    asked, runtime = policy()
    with pytest.raises(InvalidObservation, match=r"video\.wrist_image is 1 × 100000 pixels; a side may have 8192"):
        asked.infer({**observation(), "video.wrist_image": np.zeros((1, 1, 1, 100_000, 3), np.uint8)})
    assert not runtime.rows


@pytest.mark.parametrize("change", [np.ascontiguousarray, lambda p: p[..., ::-1][..., ::-1], lambda p: np.asfortranarray(p)])
def test_the_memory_layout_of_a_picture_changes_nothing(change: Any) -> None:
    asked, runtime = policy()
    asked.infer({**observation(), "video.image": change(observation()["video.image"])}, noise=REFERENCE["noise"])
    np.testing.assert_array_equal(runtime.rows[0].patches, REFERENCE["input.pixel_values"])


def test_another_embodiment_is_asked_by_its_own_keys() -> None:
    reference = read_npz(GOLDEN / "reference_one_view.npz")
    asked, runtime = policy("simpler_env_widowx")
    seen = {key.removeprefix("obs."): value for key, value in reference.items() if key.startswith(("obs.video", "obs.state"))}
    answer = asked.infer({**seen, KEY: np.array(["Put it in the drawer."])}, noise=reference["chunk_normalized"])
    np.testing.assert_array_equal(runtime.rows[0].patches, reference["input.pixel_values"])
    np.testing.assert_array_equal(runtime.rows[0].state, reference["input.state"][0])
    np.testing.assert_array_equal(answer["action.arm"], reference["action.arm"])
    np.testing.assert_array_equal(answer["action.finger"], reference["action.finger"])


def test_a_contract_for_other_engines_is_a_mismatch() -> None:
    contract = parse(from_checkpoint(GOLDEN / "checkpoint", 19), "here")
    tokens = Tokens(GOLDEN / "checkpoint/tokenizer", contract.prompt, 64)
    ten_steps = SimpleNamespace(horizon=10, width=132, state_width=132, layout=LAYOUT)
    with pytest.raises(ContractMismatch, match=r"action\.model_horizon is 40 in policy\.json and tokenizer, 10 in the engines"):
        Gr00tPolicy(contract, tokens, cast(Gr00tRuntime, ten_steps))
