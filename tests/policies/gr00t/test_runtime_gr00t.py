"""The order, the buffers and the loop around three engines that answer recorded reference values, or simple sums of what they are given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.arrays import read_npz
from vla_eval.engines.bundle import Bundle
from vla_eval.engines.engine import Tensor
from vla_eval.policies.flow import draw_noise, full_batches
from vla_eval.policies.gr00t.runtime import Gr00tRuntime, Inputs
from vla_eval.types import BadRequest, ContractMismatch, InvalidObservation, TensorSpec, VlaEvalError

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny"
GEOMETRY = json.loads((GOLDEN / "geometry.json").read_text())
REFERENCE = read_npz(GOLDEN / "reference.npz")
HIDDEN, TOKENS, STEPS = 64, 300, 4
EMBEDDING = np.random.default_rng(0).standard_normal((300, HIDDEN), np.float32)
Arrays = dict[str, NDArray[Any]]


class Recorded:
    """An engine made of a function."""

    def __init__(self, inputs: Sequence[TensorSpec], function: Callable[[Arrays], Mapping[str, Tensor]]) -> None:
        self.inputs, self.outputs, self.about, self._function = inputs, (), {"backend": "recorded"}, function
        self.calls: list[Arrays] = []

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        arrays = {name: np.array(cast(NDArray[Any], tensor)) for name, tensor in inputs.items()}
        self.calls.append(arrays)
        return dict(self._function(arrays))


def engines(batch: int, visual: Any, backbone: Any, action: Any) -> dict[str, Recorded]:
    b, s, p = batch, (1, 150, TOKENS), (1, 512, 4096)
    cross = [TensorSpec(f"cross_{kv}_layer{i:02d}", "float32", (b, s, 3, 12)) for i in (0, 2, 4, 6) for kv in "kv"]
    return {
        "visual": Recorded(
            [
                TensorSpec("input", "float32", (p, 1536)),
                TensorSpec("rotary_pos_emb", "float32", (p, 8)),
                TensorSpec("cu_seqlens", "int32", ((2, 3, 9),)),
                TensorSpec("fast_pos_embed_idx", "int64", (4, p)),
                TensorSpec("fast_pos_embed_weight", "float32", (4, p)),
            ],
            visual,
        ),
        "vl_backbone": Recorded(
            [
                TensorSpec("inputs_embeds", "float32", (b, s, HIDDEN)),
                TensorSpec("rope_rotary_cos_sin", "float32", (b, s, 16)),
                TensorSpec("attention_pos_id", "int32", (b, s)),
                *(TensorSpec(f"deepstack_embeds_{i}", "float32", (b, s, HIDDEN)) for i in range(3)),
            ],
            backbone,
        ),
        "action": Recorded(
            [
                TensorSpec("noise_trajectory", "float32", (b, 40, 132)),
                TensorSpec("state", "float32", (b, 1, 132)),
                TensorSpec("adanorm_modulation", "float32", (9, 72)),
                TensorSpec("action_time_bias", "float32", (36,)),
                TensorSpec("text_attention_mask", "bool", (b, 1, 1, s)),
                TensorSpec("image_attention_mask", "bool", (b, 1, 1, s)),
                *cross,
            ],
            action,
        ),
    }


def bundle(batch: int = 1, steps: Sequence[int] = (STEPS,)) -> Bundle:
    """As much of a bundle as the runtime reads: options, the tables of each step count, the embedding table."""

    def component(name: str) -> SimpleNamespace:
        def tensors(file: str) -> Arrays:
            kind, *rest = file.split(".")
            if kind == "embed_tokens":
                return {"weight": EMBEDDING}
            count = int(rest[0])
            rows = REFERENCE["step.adanorm_modulation"] if kind == "adanorm_modulation" else np.arange(count * 36.0).reshape(count, 36)
            return {kind: np.resize(rows, (count, *rows.shape[1:])).astype(np.float32)}

        return SimpleNamespace(tensors=tensors, ahead=lambda *files: 0)

    options = {"steps": list(steps), "batch": batch, "geometry": GEOMETRY}
    return cast(Bundle, SimpleNamespace(path=Path("BUNDLE"), options=options, component=component))


def golden_row() -> Inputs:
    return Inputs(
        REFERENCE["input.pixel_values"], (16, 16), REFERENCE["input.input_ids"][0], REFERENCE["input.state"][0], REFERENCE["noise"][0]
    )


def sums(batch: int) -> dict[str, Recorded]:
    """Engines that mix everything of a row into its answer, and nothing of its batch mates."""

    def visual(given: Arrays) -> Arrays:
        merged = given["input"].reshape(-1, 4, 1536).mean(1)[:, :HIDDEN]
        return {"output": merged, **{f"deepstack_features_{i}": merged * (i + 2) for i in range(3)}}

    def backbone(given: Arrays) -> Arrays:
        mixed = sum(given[name] for name in given if name.startswith(("inputs", "deepstack")))
        mixed = cast(NDArray[Any], mixed) + given["rope_rotary_cos_sin"].sum(-1, keepdims=True)
        return {f"cross_{kv}_layer{i:02d}": mixed[..., :36].reshape(*mixed.shape[:2], 3, 12) for i in (0, 2, 4, 6) for kv in "kv"}

    def action(given: Arrays) -> Arrays:
        text, image = (given[f"{kind}_attention_mask"][:, 0, 0, :, None, None] for kind in ("text", "image"))
        seen = (given["cross_k_layer00"] * text).sum((1, 2, 3)) - (given["cross_v_layer02"] * image).sum((1, 2, 3))
        return {
            "velocity": given["noise_trajectory"] * np.float32(0.5)
            + given["state"]
            + seen[:, None, None].astype(np.float32) * np.float32(1e-4)
        }

    return engines(batch, visual, backbone, action)


def a_row(seed: int, words: int = 5, views: int = 1) -> Inputs:
    rng = np.random.default_rng(seed)
    ids = [281, 84, *[289, *[292] * 64, 290] * views, *rng.integers(0, 280, words), 282]
    return Inputs(
        rng.standard_normal((256 * views, 1536), np.float32),
        (16, 16),
        np.array(ids),
        rng.standard_normal((1, 132), np.float32),
        draw_noise(seed, 40, 132),
    )


def test_reference_values_flow_from_component_to_component() -> None:
    """Each engine checks that it is given the reference's own inputs, and answers with the reference's own outputs."""
    step = iter(range(STEPS))
    ids, image = REFERENCE["input.input_ids"], REFERENCE["backbone.image_mask"]

    def visual(given: Arrays) -> Arrays:
        np.testing.assert_array_equal(given["input"], REFERENCE["input.pixel_values"])
        assert given["cu_seqlens"].tolist() == [0, 256, 512]
        return {"output": REFERENCE["vision.features"], **{f"deepstack_features_{i}": REFERENCE[f"vision.deepstack_{i}"] for i in range(3)}}

    def backbone(given: Arrays) -> Arrays:
        wanted = EMBEDDING[ids]
        wanted[image] = REFERENCE["vision.features"]
        np.testing.assert_array_equal(given["inputs_embeds"], wanted)
        for i in range(3):
            np.testing.assert_array_equal(given[f"deepstack_embeds_{i}"][image], REFERENCE[f"vision.deepstack_{i}"])
            assert not given[f"deepstack_embeds_{i}"][~image].any()
        np.testing.assert_allclose(given["rope_rotary_cos_sin"][..., :8], REFERENCE["text.rope_cos"][..., :8], rtol=0, atol=1.2e-7)
        np.testing.assert_allclose(given["rope_rotary_cos_sin"][..., 8:], REFERENCE["text.rope_sin"][..., :8], rtol=0, atol=1.2e-7)
        assert given["attention_pos_id"].tolist() == [list(range(150))]
        return {f"cross_{kv}_layer{i:02d}": REFERENCE[f"cross.{kv}_{i:02d}"] for i in (0, 2, 4, 6) for kv in "kv"}

    def action(given: Arrays) -> Arrays:
        k = next(step)
        np.testing.assert_allclose(given["noise_trajectory"], REFERENCE["step.x"][k], rtol=0, atol=2e-5 * np.abs(REFERENCE["step.x"]).max())
        np.testing.assert_array_equal(given["state"], REFERENCE["head.state_input"])
        np.testing.assert_array_equal(given["adanorm_modulation"], REFERENCE["step.adanorm_modulation"][k])
        np.testing.assert_array_equal(given["action_time_bias"], np.arange(k * 36.0, (k + 1) * 36.0))
        np.testing.assert_array_equal(given["image_attention_mask"][:, 0, 0], image)
        np.testing.assert_array_equal(given["text_attention_mask"][:, 0, 0], ~image)
        np.testing.assert_array_equal(given["cross_v_layer06"], REFERENCE["cross.v_06"])
        return {"velocity": REFERENCE["step.velocity"][k]}

    runtime = Gr00tRuntime(bundle(), engines=engines(1, visual, backbone, action))
    (answer,) = runtime([golden_row()])
    wanted = REFERENCE["chunk_normalized"][0]
    np.testing.assert_allclose(answer.chunk, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert set(answer.seconds) == {"visual", "prefill", "denoise"}
    assert next(step, None) is None


def test_deepstack_is_zero_outside_pictures_after_a_longer_prompt() -> None:
    parts = sums(1)
    runtime = Gr00tRuntime(bundle(), engines=parts)
    runtime([a_row(1, words=90, views=2)])  # fills the buffers with pictures where the next prompt has text
    (dirty,) = runtime([a_row(2, words=60)])
    (clean,) = Gr00tRuntime(bundle(), engines=sums(1))([a_row(2, words=60)])
    np.testing.assert_array_equal(dirty.chunk, clean.chunk)
    image = a_row(2, words=60).token_ids == 292
    for i in range(3):
        assert not parts["vl_backbone"].calls[-1][f"deepstack_embeds_{i}"][:, ~image].any()
        assert parts["vl_backbone"].calls[-1][f"deepstack_embeds_{i}"][:, image].any()


def test_positions_of_row_b_begin_at_b_times_the_length() -> None:
    parts = sums(3)
    rows = [a_row(i) for i in range(3)]
    Gr00tRuntime(bundle(3), engines=parts)(rows)
    length = rows[0].token_ids.size
    assert parts["vl_backbone"].calls[0]["attention_pos_id"].tolist() == [list(range(b * length, (b + 1) * length)) for b in range(3)]
    assert parts["visual"].calls[0]["cu_seqlens"].tolist() == [0, 256, 512, 768]


def test_rows_of_different_lengths_are_grouped_and_short_batches_filled() -> None:
    parts = sums(2)
    rows = [a_row(1, 5), a_row(2, 9), a_row(3, 5), a_row(4, 5)]
    answers = Gr00tRuntime(bundle(2), engines=parts)(rows)
    assert [call["inputs_embeds"].shape for call in parts["vl_backbone"].calls] == [(2, 74, 64), (2, 74, 64), (2, 78, 64)]
    alone = Gr00tRuntime(bundle(2), engines=sums(2))
    for row, answer in zip(rows, answers, strict=True):
        np.testing.assert_array_equal(answer.chunk, alone([row])[0].chunk)  # whatever its batch mates are


def test_batches_keep_rows_of_a_kind_in_order_and_full() -> None:
    batches = full_batches(["a", "b", "a", "a"], 2)
    assert [(b.rows, b.real) for b in batches] == [((0, 2), 2), ((3, 3), 1), ((1, 1), 1)]


def test_the_same_noise_gives_the_same_chunk_and_other_noise_another() -> None:
    runtime = Gr00tRuntime(bundle(), engines=sums(1))
    row = a_row(1)
    first, again, other, zero = (
        runtime([dataclasses.replace(row, noise=noise)])[0].chunk
        for noise in (draw_noise(1, 40, 132), draw_noise(1, 40, 132), draw_noise(2, 40, 132), np.zeros((40, 132), np.float32))
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    assert np.isfinite(zero).all()


def test_every_number_of_the_noise_takes_part() -> None:
    noise = draw_noise(7, 40, 132)
    assert noise.shape == (40, 132)
    assert len(np.unique(noise)) > 5200  # no padded zeros, no repeated rows
    np.testing.assert_array_equal(noise, draw_noise(7, 40, 132))


def test_another_number_of_steps_takes_its_own_tables_or_is_refused_with_the_command() -> None:
    parts = sums(1)
    Gr00tRuntime(bundle(steps=(4, 8)), steps=8, engines=parts)([a_row(1)])
    assert len(parts["action"].calls) == 8
    with pytest.raises(BadRequest, match=r"tables for 4 and 8 denoise steps, not for 5; .*--steps 4,5,8"):
        Gr00tRuntime(bundle(steps=(4, 8)), steps=5, engines=sums(1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_engines_are_given_their_own_precision_and_the_flow_stays_float32(dtype: str) -> None:
    parts = sums(1)
    kept = {"rope_rotary_cos_sin", "noise_trajectory", "state", "rotary_pos_emb"}  # float32 in every contract
    for part in parts.values():
        healthy = part._function
        part.inputs = [spec._replace(dtype=dtype) if spec.dtype == "float32" and spec.name not in kept else spec for spec in part.inputs]

        def halved(given: Arrays, healthy: Any = healthy) -> Arrays:
            wide = {name: array if array.dtype.kind in "bi" else array.astype(np.float32) for name, array in given.items()}
            return {name: array if name == "velocity" else array.astype(dtype) for name, array in healthy(wide).items()}

        part._function = halved
    (answer,) = Gr00tRuntime(bundle(), engines=parts)([a_row(1)])
    assert answer.chunk.dtype == np.float32
    for part in parts.values():
        for spec in part.inputs:
            assert part.calls[0][spec.name].dtype == np.dtype(spec.dtype), spec.name
    (wide,) = Gr00tRuntime(bundle(), engines=sums(1))([a_row(1)])
    np.testing.assert_allclose(answer.chunk, wide.chunk, rtol=0, atol=0.05 * np.abs(wide.chunk).max())  # bfloat16 keeps 8 bits of each sum


BAD: dict[str, tuple[Callable[[Any], Inputs], str]] = {
    "no picture": (lambda r: dataclasses.replace(r, token_ids=r.token_ids[r.token_ids != 292], patches=r.patches[:0]), "needs a picture"),
    "no text": (lambda r: dataclasses.replace(r, token_ids=r.token_ids[r.token_ids == 292]), "needs an instruction"),
    "another picture": (lambda r: dataclasses.replace(r, patches=np.concatenate([r.patches] * 2)), "64 picture tokens, its pictures 128"),
    "half a picture": (lambda r: dataclasses.replace(r, patches=r.patches[:200]), "no whole views"),
    "too long": (
        lambda r: dataclasses.replace(r, token_ids=np.concatenate([r.token_ids, [5] * 300])),
        "374 tokens long, the bundle takes 300",
    ),
    "unknown token": (lambda r: dataclasses.replace(r, token_ids=np.append(r.token_ids, 300)), "outside the embedding table"),
    "valid noise only": (lambda r: dataclasses.replace(r, noise=r.noise[:16, :7]), r"noise is \[16, 7\], wanted \[40, 132\]"),
    "raw state": (lambda r: dataclasses.replace(r, state=r.state[:, :8]), r"state is \[1, 8\], wanted \[1, 132\]"),
    "NaN": (lambda r: dataclasses.replace(r, state=r.state * np.float32("nan")), "not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_observation_that_cannot_be_answered_is_refused_before_an_engine_runs(case: str) -> None:
    spoil, says = BAD[case]
    parts = sums(1)
    with pytest.raises(InvalidObservation, match=says):
        Gr00tRuntime(bundle(), engines=parts)([a_row(0), spoil(a_row(1))])
    assert not any(part.calls for part in parts.values())


@pytest.mark.parametrize("broken", ["visual", "vl_backbone", "action"])
def test_a_network_that_gives_nan_is_an_error_of_the_component_where_it_began(broken: str) -> None:
    parts = sums(1)
    healthy = parts[broken]._function
    parts[broken]._function = lambda given: {name: np.asarray(array) * np.float32("inf") for name, array in healthy(given).items()}
    with np.errstate(all="ignore"), pytest.raises(VlaEvalError, match=f"component '{broken}' gave NaN or infinity"):
        Gr00tRuntime(bundle(), engines=parts)([a_row(1)])


def test_an_engine_that_wants_something_else_is_a_mismatch() -> None:
    parts = sums(1)
    parts["visual"].inputs = (*parts["visual"].inputs, TensorSpec("max_seqlen_carrier", "int32", (1,)))
    with pytest.raises(ContractMismatch, match=r"component 'visual' takes .*max_seqlen_carrier"):
        Gr00tRuntime(bundle(), engines=parts)([a_row(1)])
