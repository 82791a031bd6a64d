"""Pictures, prompts and numbers of three robots against openpi's own transforms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.arrays import read_npz
from vla_eval.images import fit_with_border
from vla_eval.policies.pi05 import adapters
from vla_eval.policies.pi05.adapters import ADAPTERS, read
from vla_eval.policies.pi05.contracts import CONFIGURATIONS, Range, read_statistics
from vla_eval.policies.pi05.processor import Tokens, bins, clean, normalise, picture, pixels, unnormalise
from vla_eval.types import BadRequest, InvalidObservation

GOLDEN = Path(__file__).parents[2] / "golden/pi05_tiny"
CASES = Path(__file__).parents[2] / "cases"
PROCESSOR = read_npz(GOLDEN / "processor.npz")
TEXTS = json.loads((GOLDEN / "text_cases.json").read_text())["cases"]
ROBOTS = ("pi05_libero", "pi05_droid", "pi05_aloha")
Array = NDArray[Any]


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(GOLDEN / "paligemma_tokenizer.model")


def request(robot: str) -> dict[str, Any]:
    arrays = read_npz(GOLDEN / robot / "reference.npz")
    seen = {key.removeprefix("obs.").replace("images.", "images/"): value for key, value in arrays.items() if key.startswith("obs.")}
    return {**seen, "prompt": json.loads((GOLDEN / robot / "prompt.json").read_text())["prompt"]}


def statistics_of(robot: str) -> Any:
    (file,) = (GOLDEN / robot / "checkpoint/assets").rglob("norm_stats.json")
    return read_statistics(file, CONFIGURATIONS[robot])


@pytest.mark.parametrize("robot", ROBOTS)
def test_a_request_becomes_the_references_inputs(robot: str, tokens: Tokens) -> None:
    reference, c = read_npz(GOLDEN / robot / "reference.npz"), CONFIGURATIONS[robot]
    seen = read(ADAPTERS[c.adapter], c, request(robot))
    shown = [fit_with_border(one, 224, 224) for one in seen.pictures.values()]
    np.testing.assert_array_equal(np.stack(shown), reference["input.images_u8"][0])
    sampled = pixels(list(seen.pictures.values()), 224)[:, :, ::16, ::16]
    np.testing.assert_allclose(sampled, reference["input.pixel_sample"][0], rtol=0, atol=2e-7)  # float32 next to 1
    state = normalise(seen.state, statistics_of(robot).state)
    np.testing.assert_allclose(state, reference["input.state_normalized"], rtol=1e-12, atol=1e-12)
    ids = tokens.ids(seen.prompt, state if c.discrete_state_input else None)
    np.testing.assert_array_equal(ids, reference["input.token_ids"][reference["input.token_mask"]])
    if c.discrete_state_input:
        assert bins(state) == reference["input.state_bins"].tolist()


@pytest.mark.parametrize("size", ["480x640", "720x1280", "479x641", "256x256", "100x60"])
def test_pictures_are_resized_and_padded_as_pillow_does(size: str) -> None:
    np.testing.assert_array_equal(fit_with_border(PROCESSOR[f"resize.in_{size}"], 224, 224), PROCESSOR[f"resize.out_{size}"])


@pytest.mark.parametrize("size", ["128x128", "224x224", "256x256", "120x160"])
def test_zone_plates_go_through_the_right_filter(size: str) -> None:
    plates = read_npz(CASES / "conventions/pictures.npz")
    given = np.repeat(plates[f"in_{size}" if f"in_{size}" in plates else size][..., None], 3, -1)
    found = (pixels([given], 224)[0, 0] + 1) / 2 * 255
    assert np.abs(found - plates[f"pi05_{size}"]).max() <= 1.001  # one grey level, as the case allows


def test_padding_is_minus_one() -> None:
    seen = pixels([np.full((100, 200, 3), 255, np.uint8)], 224)
    assert seen.shape == (1, 3, 224, 224)
    assert set(np.unique(seen[0, :, :50])) == {-1.0}
    assert set(np.unique(seen[0, :, 60:150])) == {1.0}


def test_float_pictures_are_cut_and_channels_may_come_first() -> None:
    np.testing.assert_array_equal(picture(PROCESSOR["float_image.in_chw"]), PROCESSOR["float_image.out_hwc_u8"])


@pytest.mark.parametrize("case", [case for case in TEXTS if case["length"] < 200], ids=lambda case: case["prompt"][:12] or "empty")
def test_prompts_become_the_references_ids(case: dict[str, Any], tokens: Tokens) -> None:
    state = None if case["state"] is None else np.array(case["state"])
    assert tokens.ids(case["prompt"], state).tolist() == case["ids"]


def test_a_prompt_beyond_the_limit_is_cut_as_the_reference_cuts_it_unless_its_action_marker_would_go(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    words, with_state = (case for case in TEXTS if case["length"] == 200)
    assert tokens.ids(words["prompt"]).tolist() == words["ids"]
    assert "is cut to 200" in caplog.text
    with pytest.raises(InvalidObservation, match="loses its action marker"):
        tokens.ids(with_state["prompt"], np.array(with_state["state"]))


def test_a_prompt_is_cleaned_and_keeps_its_case() -> None:
    assert clean("  Pick_up the\nRed mug. ") == "Pick up the Red mug."


def test_bins_are_minus_one_below_and_255_from_one_on() -> None:
    assert bins(PROCESSOR["bins.value"]) == PROCESSOR["bins.index"].tolist()
    assert bins(np.array([-1.0001, -1.0, 0.0, 0.9999, 1.0, 7.0])) == [-1, 0, 128, 255, 255, 255]


def test_quantiles_are_the_references_epsilon_included() -> None:
    stats = Range(PROCESSOR["quantile.q01"], PROCESSOR["quantile.q99"])
    np.testing.assert_allclose(normalise(PROCESSOR["quantile.raw"], stats), PROCESSOR["quantile.normalized"], rtol=1e-12)
    np.testing.assert_allclose(normalise(PROCESSOR["quantile.short_raw"], stats), PROCESSOR["quantile.short_normalized"], rtol=1e-12)
    np.testing.assert_allclose(unnormalise(PROCESSOR["quantile.chunk"], stats), PROCESSOR["quantile.unnormalized"], rtol=1e-12)
    without = (PROCESSOR["quantile.raw"] - stats.q01) / np.maximum(stats.q99 - stats.q01, 1e-12) * 2 - 1
    assert np.abs(without / PROCESSOR["quantile.normalized"] - 1).max() > 0.1


def test_numbers_that_never_moved_stay_finite_and_come_back_exactly(caplog: pytest.LogCaptureFixture) -> None:
    stats = read_statistics(CASES / "checkpoints/constant/norm_stats.json", CONFIGURATIONS["pi05_libero"])
    case = json.loads((CASES / "checkpoints/constant/expected.json").read_text())
    expected = case["pi05"]
    found = normalise(np.array(expected["state"]), stats.state)
    np.testing.assert_allclose(found, expected["state_normalized"], rtol=0, atol=case["atol"])
    back = unnormalise(np.array(expected["chunk_normalized"]), stats.action)
    np.testing.assert_allclose(back, expected["chunk"], rtol=0, atol=case["atol"])
    constant = unnormalise(np.full((1, 7), -1.0), stats.action)[0, 4]
    assert constant == stats.action.q01[4]
    assert "state[3], actions[4] never moved" in caplog.text


def test_alohas_joints_and_grippers_are_the_references() -> None:
    for robot, model in zip(PROCESSOR["aloha.state_robot"], PROCESSOR["aloha.state_model"], strict=True):
        np.testing.assert_allclose(adapters.aloha_state(robot), model, rtol=0, atol=1e-12)
    chunk = PROCESSOR["aloha.actions_unnormalized"][:, :14]
    state = PROCESSOR["aloha.actions_state_model"]
    np.testing.assert_allclose(adapters.aloha_actions(chunk, state), PROCESSOR["aloha.actions_robot"], rtol=0, atol=1e-12)
    opened = adapters.gripper_to_angle(np.array([0, 0.25, 0.5, 0.75, 1]))
    np.testing.assert_allclose(opened, [-1.079866, -0.513078, -0.140056, 0.223328, 0.945653], rtol=0, atol=1e-6)  # six digits are given


def test_the_request_of_a_robot_is_not_changed_by_reading_it() -> None:
    given = request("pi05_aloha")
    before = given["state"].copy()
    read(ADAPTERS["aloha"], CONFIGURATIONS["pi05_aloha"], given)
    np.testing.assert_array_equal(given["state"], before)


def test_a_camera_that_may_be_left_out_is_dropped_and_an_ignored_one_too() -> None:
    given, c = request("pi05_aloha"), CONFIGURATIONS["pi05_aloha"]
    given["images/cam_low"] = given["images/cam_high"]
    del given["images/cam_left_wrist"]
    assert list(read(ADAPTERS["aloha"], c, given).pictures) == ["cam_high", "cam_right_wrist"]


def test_pictures_come_in_the_order_of_slots_whatever_the_requests_order() -> None:
    given, c = request("pi05_libero"), CONFIGURATIONS["pi05_libero"]
    shuffled = dict(sorted(given.items(), reverse=True))
    assert list(read(ADAPTERS["libero"], c, shuffled).pictures) == ["image", "wrist_image"]


def test_openpis_own_shapes_of_a_request_are_taken() -> None:
    given = request("pi05_aloha")
    nested = {
        "images": {key.removeprefix("images/"): value for key, value in given.items() if key.startswith("images/")},
        "state": given["state"], "prompt": given["prompt"],
    }  # fmt: skip
    c = CONFIGURATIONS["pi05_aloha"]
    for ours, theirs in zip(
        read(ADAPTERS["aloha"], c, nested).pictures.values(), read(ADAPTERS["aloha"], c, given).pictures.values(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    droid = {**request("pi05_droid"), "observation/gripper_position": 0.4, "prompt": b"close the drawer"}
    for gripper in (0.4, np.float64(0.4), np.array(0.4), np.array([0.4])):
        assert read(ADAPTERS["droid"], CONFIGURATIONS["pi05_droid"], {**droid, "observation/gripper_position": gripper}).state[-1] == 0.4
    assert (
        read(ADAPTERS["droid"], CONFIGURATIONS["pi05_droid"], {**droid, "observation/gripper_position": np.float32(0.5)}).state[-1] == 0.5
    )


WRONG: dict[str, tuple[str, dict[Any, Any], str]] = {
    "a required camera is missing": ("pi05_libero", {"observation/wrist_image": ...}, "lacks observation/wrist_image"),
    "an unknown camera": ("pi05_aloha", {"images/cam_back": np.zeros((3, 8, 8), np.uint8)}, "has images/cam_back, which pi05_aloha"),
    "a camera twice": ("pi05_aloha", {"images": {"cam_high": np.zeros((3, 8, 8), np.uint8)}}, "images/cam_high twice"),
    "channels last for ALOHA": ("pi05_aloha", {"images/cam_high": np.zeros((8, 8, 3), np.uint8)}, r"wanted \[3, H, W\]"),
    "a batch of pictures": ("pi05_libero", {"observation/image": np.zeros((1, 8, 8, 3), np.uint8)}, "observation/image is uint8"),
    "grey pictures": ("pi05_libero", {"observation/image": np.zeros((8, 8), np.uint8)}, "observation/image is uint8"),
    "int pictures": ("pi05_libero", {"observation/image": np.zeros((8, 8, 3), np.int32)}, "wanted uint8, or floats"),
    "floats to 255": ("pi05_libero", {"observation/image": np.full((8, 8, 3), 9.0)}, "outside 0 … 1"),
    "a state of another width": ("pi05_libero", {"observation/state": np.zeros(7)}, r"observation/state is float64 \[7\], wanted 8"),
    "NaN in the state": ("pi05_libero", {"observation/state": np.full(8, np.nan)}, "observation/state holds NaN"),
    "a state of text": ("pi05_libero", {"observation/state": np.array(["a"] * 8)}, "wanted 8 numbers"),
    "no prompt": ("pi05_droid", {"prompt": ...}, "lacks prompt"),
    "a blank prompt": ("pi05_droid", {"prompt": " \n"}, "needs an instruction"),
    "a key that is no name": ("pi05_libero", {5: 1}, "the request holds 5, wanted a table"),
    "a number for a prompt": ("pi05_droid", {"prompt": 5}, "no text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_by_key(case: str) -> None:
    robot, change, says = WRONG[case]
    given = {key: value for key, value in {**request(robot), **change}.items() if value is not ...}
    with pytest.raises(InvalidObservation, match=says):
        read(ADAPTERS[CONFIGURATIONS[robot].adapter], CONFIGURATIONS[robot], given)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="is no file; PaliGemma's"):
        Tokens(tmp_path / "none.model")
    (tmp_path / "x.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadRequest, match="no SentencePiece model"):
        Tokens(tmp_path / "x.model")
