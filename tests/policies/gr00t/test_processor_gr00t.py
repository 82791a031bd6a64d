"""GR00T's host side against arrays that NVIDIA's own processor made from the same inputs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vla_eval import registry
from vla_eval.arrays import read_npz
from vla_eval.policies.gr00t import processor
from vla_eval.policies.gr00t.configuration import RELEASED
from vla_eval.policies.gr00t.contract import Contract, Group, Pictures, Prompt, from_checkpoint, parse
from vla_eval.types import BadRequest, InvalidObservation

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny"
CHECKPOINT = GOLDEN / "checkpoint"
LAYOUT = processor.Layout.of(json.loads((GOLDEN / "geometry.json").read_text()))
REFERENCES = {"libero_sim": "reference.npz", "simpler_env_widowx": "reference_one_view.npz"}
INSTRUCTIONS = {"libero_sim": "Pick up the red_mug, please!", "simpler_env_widowx": "Put it in the drawer."}
TAGS = sorted(REFERENCES)
RECORDED = read_npz(GOLDEN / "processor.npz")
GRID = (16, 16)


@pytest.fixture(scope="module")
def contracts() -> dict[str, Contract]:
    return {tag: parse(from_checkpoint(CHECKPOINT, tag), tag) for tag in TAGS}


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, NDArray[Any]]]:
    return {tag: read_npz(GOLDEN / file) for tag, file in REFERENCES.items()}


def tokens(contract: Contract) -> processor.Tokens:
    return processor.Tokens(CHECKPOINT / "tokenizer", contract.prompt, 64)


@pytest.mark.parametrize("size", ["480x640", "320x200", "180x320", "224x224", "noise_128x128"])
def test_the_evaluation_transform_equals_the_reference(contracts: dict[str, Contract], size: str) -> None:
    seen = processor.see(RECORDED[f"image.in_{size}"], contracts["libero_sim"].pictures)
    np.testing.assert_array_equal(seen, RECORDED[f"image.out_{size}"])


def test_the_torchvision_path_equals_the_reference() -> None:
    how = Pictures("torchvision", None, (256, 256), (230, 230))
    np.testing.assert_array_equal(processor.see(RECORDED["image.in_480x640"], how), RECORDED["image.out_torchvision_480x640"])


def test_a_small_target_is_enlarged_by_the_packing() -> None:
    whole = Pictures("area", 224, (224, 224), 1.0)  # no cropping: the reference packed the picture as it is
    assert processor.seen_grid(whole) == tuple(RECORDED["pack.small_224x224_grid_thw"][0, 1:])
    patches = processor.pack([processor.see(RECORDED["image.in_224x224"], whole)])
    np.testing.assert_array_equal(patches[:8], RECORDED["pack.small_224x224_first_rows"])


@pytest.mark.parametrize(
    ("size", "packed"),
    [((256, 256), (256, 256)), ((224, 224), (256, 256)), ((255, 257), (256, 256)), ((100, 300), (160, 448)), ((8192, 4096), (5792, 2880))],
)
def test_packed_sizes_are_multiples_of_32_within_the_limits(size: tuple[int, int], packed: tuple[int, int]) -> None:
    # by hand: 100x300 grows by sqrt(65536 / 30000) = 1.478 to 147.8x443.4, rounded up; 8192x4096 shrinks by sqrt(2), rounded down
    assert processor.packed_size(*size) == packed


@pytest.mark.parametrize("tag", TAGS)
def test_patches_equal_the_reference(contracts: dict[str, Contract], references: dict[str, dict[str, NDArray[Any]]], tag: str) -> None:
    contract, reference = contracts[tag], references[tag]
    patches = processor.pack([processor.see(reference[f"obs.video.{c}"][0, 0], contract.pictures) for c in contract.cameras])
    np.testing.assert_array_equal(patches, reference["input.pixel_values"])


@pytest.mark.parametrize("tag", TAGS)
def test_tokens_and_positions_equal_the_reference(
    contracts: dict[str, Contract], references: dict[str, dict[str, NDArray[Any]]], tag: str
) -> None:
    reference, tokenizer = references[tag], tokens(contracts[tag])
    ids = tokenizer.ids(INSTRUCTIONS[tag])
    np.testing.assert_array_equal(ids, reference["input.input_ids"][0])
    np.testing.assert_array_equal(ids == tokenizer.image_token, reference["backbone.image_mask"][0])
    np.testing.assert_array_equal(processor.positions(ids, tokenizer.image_token, GRID), reference["text.position_ids"][:, 0])


CASES = json.loads((GOLDEN / "text_cases.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[c["instruction"] or "empty" for c in CASES])
def test_prompts_equal_the_reference(contracts: dict[str, Contract], case: dict[str, Any]) -> None:
    contract = contracts["libero_sim"]
    assert processor.formalize(case["instruction"]) == case["formalized"]
    assert contract.prompt.before + case["formalized"] + contract.prompt.after == case["rendered"]
    assert tokens(contract).ids(case["instruction"]).tolist() == case["token_ids"]


QWEN = Path(__file__).parents[2] / "golden/qwen3_tokens"


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"])
def test_qwens_own_ids_stand_where_the_released_model_wants_them(contracts: dict[str, Contract], suite: str) -> None:
    """LIBERO's instructions and some harder ones, by a part of Qwen3's tokenizer, as the whole one tokenises them."""
    recorded = json.loads((QWEN / "prompts.json").read_text("utf-8"))
    tokenizer = processor.Tokens(QWEN, contracts["libero_sim"].prompt, 64)
    named = {name: tokenizer.id_of(f"<|{name}|>") for name in RELEASED.token_ids if name != "pad"}
    assert {**named, "pad": tokenizer.id_of("<|endoftext|>")} == RELEASED.token_ids
    tasks = [task.instruction for task in registry.load_tasks(suite)]
    for text in (*tasks, "Pick up the red_mug, please!", "İstanbul’da çay koy", "把碗放在炉子上", "put 3 mugs on   the stove ☕"):
        ids = tokenizer.ids(text)
        view = [151652, *[151655] * 64, 151653]
        assert ids[: 3 + 2 * 66].tolist() == [151644, 872, 198, *view, *view]
        assert ids[-2:].tolist() == [151645, 198]
        once = [i for k, i in enumerate(ids.tolist()) if i != 151655 or ids[k - 1] != 151655]
        assert once == recorded[text]


def test_text_rotary_equals_the_reference(references: dict[str, dict[str, NDArray[Any]]]) -> None:
    reference = references["libero_sim"]
    table = processor.text_rotary(LAYOUT, reference["text.position_ids"][:, 0])
    cos, sin = np.split(table, 2, axis=1)
    # float32 angles up to 37 rad: cos and sin of two libraries may differ in the last bit
    np.testing.assert_allclose(np.tile(cos, 2), reference["text.rope_cos"][0], rtol=0, atol=1.2e-7)
    np.testing.assert_allclose(np.tile(sin, 2), reference["text.rope_sin"][0], rtol=0, atol=1.2e-7)


def test_frequencies_of_the_released_model_are_24_time_20_row_20_column() -> None:
    layout = processor.Layout(128, 5e6, (24, 20, 20), 64, 1e4, 2304, 151655)
    axes = [int(np.flatnonzero(np.abs(processor.text_rotary(layout, p)[0, 64:]) > 0).size) for p in np.eye(3, dtype=np.int64)[:, :, None]]
    assert axes == [24, 20, 20]


def test_vision_positions_equal_the_reference(references: dict[str, dict[str, NDArray[Any]]]) -> None:
    reference = references["libero_sim"]
    tables = processor.vision_tables(LAYOUT, 2, GRID)
    np.testing.assert_allclose(np.cos(np.tile(tables.rotary, 2)), reference["vision.rope_cos"], rtol=0, atol=1.2e-7)
    np.testing.assert_allclose(np.sin(np.tile(tables.rotary, 2)), reference["vision.rope_sin"], rtol=0, atol=1.2e-7)
    assert tables.cu_seqlens.tolist() == [0, 256, 512]
    table = stored("backbone.model.model.visual.pos_embed.weight")
    placed = reference["vision.patch_embed"] + (table[tables.position_index] * tables.position_weight[..., None]).sum(0)
    np.testing.assert_allclose(placed, reference["vision.block_input"], rtol=0, atol=2e-5 * np.abs(reference["vision.block_input"]).max())


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_position_weights_are_bilinear(views: int, rows: int, columns: int) -> None:
    tables = processor.vision_tables(LAYOUT, views, (2 * rows, 2 * columns))
    assert tables.position_weight.min() >= 0
    np.testing.assert_allclose(tables.position_weight.sum(0), 1.0, atol=1e-6)
    y = (tables.position_weight * (tables.position_index // 48)).sum(0)  # the weighted row is the patch's own place
    ends = {0.0, 47.0}
    assert ends <= set(np.round(y, 4))
    assert len(set(np.round(y, 3))) == 2 * rows


@pytest.mark.parametrize("tag", TAGS)
def test_states_equal_the_reference(contracts: dict[str, Contract], references: dict[str, dict[str, NDArray[Any]]], tag: str) -> None:
    contract, reference = contracts[tag], references[tag]
    state = {group.key: reference[f"obs.state.{group.key}"][0, 0] for group in contract.state}
    np.testing.assert_array_equal(processor.encode_state(contract, state), reference["input.state"][0])
    for group in contract.state:
        encoded = processor.encode(group, RECORDED[f"state.{tag}.raw.{group.key}"], clip=contract.clip_state)
        np.testing.assert_array_equal(encoded, RECORDED[f"state.{tag}.normalized.{group.key}"])
        assert encoded.dtype == np.float32
    for row, wanted in enumerate(RECORDED[f"state.{tag}.vector"]):
        state = {group.key: RECORDED[f"state.{tag}.raw.{group.key}"][row] for group in contract.state}
        np.testing.assert_array_equal(processor.encode_state(contract, state)[0], wanted)


@pytest.mark.parametrize("tag", TAGS)
def test_actions_equal_the_reference(contracts: dict[str, Contract], references: dict[str, dict[str, NDArray[Any]]], tag: str) -> None:
    contract, reference = contracts[tag], references[tag]
    for chunk, where, arrays in (
        (reference["chunk_normalized"], "action", reference),
        (RECORDED[f"decode.{tag}.chunk"], f"decode.{tag}", RECORDED),
    ):
        for key, actions in processor.decode_chunk(contract, chunk).items():
            np.testing.assert_array_equal(actions, arrays[f"{where}.{key}"])
            assert actions.dtype == np.float32


def test_groups_that_are_scaled_together_give_what_each_gives_alone(contracts: dict[str, Contract]) -> None:
    rng = np.random.default_rng(0)

    def group(key: str, dim: int, encoding: Any) -> Group:
        first = tuple(rng.uniform(-1, 0, dim).tolist())
        second = tuple((np.array(first) + rng.uniform(0, 1, dim) * (np.arange(dim) != 1)).tolist())  # the second number never moved
        return Group(key, dim, encoding, *((first, second) if encoding != "sin_cos" else ()))

    kinds = ["bounds", "bounds", "sin_cos", "sin_cos", "mean_std", "mean_std", "bounds"]
    groups = tuple(group(f"g{i}", 1 + i % 3, kind) for i, kind in enumerate(kinds))
    moved = tuple(one for one in groups if one.encoding != "sin_cos")
    contract = dataclasses.replace(contracts["libero_sim"], state=groups, action=moved)
    state = {one.key: rng.uniform(-2, 2, one.dim).astype(np.float32) for one in groups}
    alone = np.concatenate([processor.encode(one, state[one.key], clip=contract.clip_state) for one in groups])
    np.testing.assert_array_equal(processor.encode_state(contract, state)[0, : alone.size], alone)
    chunk, start = rng.uniform(-2, 2, (2, 40, 132)).astype(np.float32), 0
    decoded = processor.decode_chunk(contract, chunk)
    assert list(decoded) == [one.key for one in moved]
    for one in moved:
        values = chunk[:, : contract.horizon, start : start + one.dim]
        np.testing.assert_array_equal(decoded[one.key], processor.decode(one, values))
        start += one.dim


def test_an_excluded_state_is_zeros(contracts: dict[str, Contract]) -> None:
    content = from_checkpoint(CHECKPOINT, "libero_sim")
    content["state"]["exclude"] = True
    assert not processor.encode_state(parse(content, "here"), {}).any()


def test_an_instruction_cannot_smuggle_in_a_picture() -> None:
    prompt = Prompt("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>\n", "<|image_pad|>", formalize=False)
    loose = processor.Tokens(CHECKPOINT / "tokenizer", prompt, 64)
    with pytest.raises(InvalidObservation, match="itself contains"):
        loose.ids("open <|image_pad|> it")


def test_truncation_and_padding_that_a_file_carries_are_not_used(tmp_path: Path, contracts: dict[str, Contract]) -> None:
    """Whoever saved a tokenizer last may have cut and filled its prompts: training did not."""
    said = json.loads((CHECKPOINT / "tokenizer/tokenizer.json").read_text())
    said["truncation"] = {"direction": "Right", "max_length": 12, "strategy": "LongestFirst", "stride": 0}
    said["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    plain, other = (processor.Tokens(folder, contracts["libero_sim"].prompt, 64) for folder in (CHECKPOINT / "tokenizer", tmp_path))
    assert other.ids("put both moka pots on the stove").tolist() == plain.ids("put both moka pots on the stove").tolist()


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_refused_by_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadRequest, match=r"tokenizer\.json: cannot be read"):
        processor.Tokens(tmp_path, Prompt("<|image_pad|>", "", "<|image_pad|>", formalize=True), 64)


@given(st.text())
def test_a_formalized_prompt_has_word_characters_and_blanks_only(text: str) -> None:
    formal = processor.formalize(text)
    assert all(character.isspace() or re.match(r"\w", character) for character in formal)
    assert not set(formal) & set("<>|,.;!?")
    kept = [c for c in text.lower() if c.isspace() or c == "_" or c.isalnum()]
    assert [c for c in formal if c.isspace() or c == "_" or c.isalnum()] == kept  # nothing else is lost or reordered


@given(st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_any_instruction_keeps_the_prompts_layout(text: str) -> None:
    prompt = Prompt("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>\n", "<|image_pad|>", formalize=True)
    tokenizer = processor.Tokens(CHECKPOINT / "tokenizer", prompt, 64)
    ids = tokenizer.ids(text)
    assert np.flatnonzero(ids == tokenizer.image_token).tolist() == list(range(6, 70))
    places = processor.positions(ids, tokenizer.image_token, GRID)
    assert places[:, 70:].tolist() == [list(range(14, 14 + ids.size - 70))] * 3  # text goes on after the picture's eight rows


numbers = st.floats(-1e3, 1e3, width=32)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_bounds_round_trip_inside_and_clip_outside(pairs: list[tuple[float, float]], data: st.DataObject) -> None:
    low, high = np.sort(np.asarray(pairs), axis=1).T
    group = Group("g", len(pairs), "bounds", tuple(low), tuple(high))
    share = np.asarray(data.draw(st.lists(st.floats(-1, 2, width=32), min_size=len(pairs), max_size=len(pairs))))
    values = (low + share * (high - low)).astype(np.float32)
    encoded = processor.encode(group, values, clip=True)
    assert np.isfinite(encoded).all()
    assert np.abs(encoded).max() <= 1
    back = processor.decode(group, encoded)
    for i, (lo, hi) in enumerate(zip(low, high, strict=True)):
        if i in group.constant:
            assert encoded[i] == 0
        else:
            # float32: one rounding of the value, one of the share of the range, one of the result
            assert math.isclose(back[i], np.clip(values[i], lo, hi), abs_tol=4e-7 * (hi - lo + abs(lo) + abs(hi)) + 1e-12)


@given(numbers, st.floats(0, 100, width=32), numbers)
@example(1.0, 1e-42, 0.0)
def test_mean_and_deviation_round_trip(mean: float, std: float, value: float) -> None:
    group = Group("g", 1, "mean_std", (mean,), (std,))
    encoded = processor.encode(group, np.array([value], np.float32), clip=True)
    if std == 0:
        assert encoded[0] == np.float32(value)
    if std > 1e-3:
        assert math.isclose(processor.decode(group, encoded)[0], value, abs_tol=1e-6 * (abs(value) + abs(mean) + std))


def stored(name: str) -> NDArray[np.float32]:
    """One bf16 tensor of the golden checkpoint, read by hand."""
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())["weight_map"]
    data = (CHECKPOINT / index[name]).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])[name]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    wide = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(entry["shape"])
