"""What stands between the products of vision and prompts, and cuBLASLt's products, against numpy.

pytest -m gpu tests/gpu/test_many_rows.py
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines import many_rows
from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.many_rows import ManyRows

pytestmark = pytest.mark.gpu

Array = NDArray[Any]
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FOLLOW: dict[str, many_rows.Follow] = {"gelu": "GELU", "relu": "RELU"}
ROUNDED = {"float16": 1e-3, "bfloat16": 8e-3}  # of the largest number: an output is rounded once to 11 or 8 bits


@pytest.fixture(scope="module")
def card() -> Card:
    return Card()


@cache
def made(card: Card, dtype: str) -> ManyRows:
    return ManyRows(card, dtype=dtype, turned=(64, 128, 256), attended=(64, 72, 128, 256))


def numbers(dtype: str, *shape: int, seed: int = 0, scale: float = 1.0) -> tuple[Array, Array]:
    """In the card's type, and the same as float32."""
    given = (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(KINDS[dtype])
    return given, given.astype(np.float32)


def off(found: Buffer | Array, wanted: Array) -> float:
    got = (found.to_host() if isinstance(found, Buffer) else found).astype(np.float32)
    assert np.isfinite(got).all()
    return float(np.abs(got.reshape(wanted.shape) - wanted).max() / np.abs(wanted).max())


def poisoned(card: Card, dtype: str, *shape: int) -> Buffer:
    return card.load(np.full(shape, np.nan, KINDS[dtype]))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(512, 1024, 3072), (148, 6144, 2048), (536, 592, 1152), (1, 4304, 1152)])
@pytest.mark.parametrize("form", ["plain", "bias", "gelu", "relu", "base", "in place"])
def test_a_product_gives_what_numpy_gives(card: Card, dtype: str, rows: int, inputs: int, outputs: int, form: str) -> None:
    x, wide = numbers(dtype, rows, inputs)
    weight, wide_weight = numbers(dtype, outputs, inputs, scale=inputs**-0.5)
    bias, wide_bias = numbers(dtype, outputs)
    base, wide_base = numbers(dtype, rows, outputs, seed=1)
    on: dict[str, Any] = {"bias": card.load(bias)} if form != "plain" else {}
    known: dict[str, Any] = {"bias": wide_bias} if form != "plain" else {}
    out = card.load(base) if form == "in place" else poisoned(card, dtype, rows, outputs)
    if form in ("base", "in place"):
        on["base"], known["base"] = out if form == "in place" else card.load(base), wide_base
    made(card, dtype).product(card.load(x), card.load(weight), out, follow=FOLLOW.get(form, ""), **on)
    assert off(out, many_rows.product(wide, wide_weight, follow=FOLLOW.get(form, ""), **known)) < ROUNDED[dtype]


def test_products_that_share_their_rows(card: Card) -> None:
    x, wide = numbers("float16", 148, 2048)
    weight, wide_weight = numbers("float16", 6, 1536, 2048, scale=2048**-0.5)
    bias, wide_bias = numbers("float16", 6, 1536)
    out = poisoned(card, "float16", 6, 148, 1536)
    made(card, "float16").product(card.load(x), card.load(weight), out, bias=card.load(bias))
    assert off(out, many_rows.product(wide, wide_weight, bias=wide_bias[:, None])) < 1e-3


def test_products_with_rows_of_their_own(card: Card) -> None:
    x, wide = numbers("float16", 4, 128, 4096)
    weight, wide_weight = numbers("float16", 4, 2048, 4096, scale=4096**-0.5)
    bias, wide_bias = numbers("float16", 4, 2048)
    out = poisoned(card, "float16", 4, 128, 2048)
    made(card, "float16").product(card.load(x), card.load(weight), out, bias=card.load(bias))
    assert off(out, many_rows.product(wide, wide_weight, bias=wide_bias[:, None])) < 1e-3


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(512, 1024), (148, 2048), (3, 4096), (5, 1152), (2, 32)])
@pytest.mark.parametrize(("layer", "more"), [(True, False), (False, True), (False, False)])
def test_a_norm_gives_what_numpy_gives(card: Card, dtype: str, rows: int, width: int, layer: bool, more: bool) -> None:
    x, wide = numbers(dtype, rows, width, scale=3.0)
    extra, wide_extra = numbers(dtype, rows, width, seed=1)
    rng = np.random.default_rng(2)
    weight, bias = (rng.standard_normal(width).astype(np.float32) for _ in "ab")
    on, out = card.load(x + KINDS[dtype](1)), poisoned(card, dtype, rows, width)
    wide = (x + KINDS[dtype](1)).astype(np.float32)
    if more:
        wide = (wide + wide_extra).astype(KINDS[dtype]).astype(np.float32)
    made(card, dtype).norm(
        on, out, weight=card.load(weight), bias=card.load(bias) if layer else None, eps=1e-6, layer=layer,
        more=card.load(extra) if more else None,
    )  # fmt: skip
    wanted = many_rows.norm(wide, weight=weight, bias=bias if layer else 0.0, eps=1e-6, layer=layer)
    assert off(out, wanted) < ROUNDED[dtype]
    assert np.array_equal(on.to_host().astype(np.float32), wide)


@pytest.mark.parametrize(
    ("width", "heads", "normed", "copied"), [(64, (16, 16), False, False), (128, (16, 8), True, False), (256, (8, 1), False, True)]
)
def test_rotary_gives_what_numpy_gives(card: Card, width: int, heads: tuple[int, int], normed: bool, copied: bool) -> None:
    rows, all_heads = 147, heads[0] + 2 * heads[1]
    x, wide = numbers("float16", rows, all_heads, width)
    rng = np.random.default_rng(3)
    table, *norms = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), width, width))
    on = card.load(x.reshape(rows, -1))
    k, v = (poisoned(card, "float16", rows, heads[1] * width) for _ in "kv")
    first = heads[0] * width
    made(card, "float16").turn(
        on, card.load(table), heads, q=on, k=k if copied else on.part(first, (rows * all_heads * width - first,)), v=v if copied else None,
        q_stride=all_heads * width, kv_stride=heads[1] * width if copied else all_heads * width,
        q_norm=card.load(norms[0]) if normed else None, k_norm=card.load(norms[1]) if normed else None, eps=1e-6,
    )  # fmt: skip
    wanted = [
        many_rows.turn(part, table, norm if normed else None, 1e-6)
        for part, norm in zip(np.split(wide, np.cumsum(heads), 1), norms, strict=False)
    ]
    got = on.to_host().reshape(rows, all_heads, width)
    assert off(got[:, : heads[0]], wanted[0]) < 1e-3
    assert off(k if copied else got[:, heads[0] : heads[0] + heads[1]], wanted[1]) < 1e-3
    assert np.array_equal((v.to_host() if copied else got[:, -heads[1] :]).reshape(rows, -1), x[:, -heads[1] :].reshape(rows, -1))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("width", "heads", "length", "sequences", "causal"), [
    (64, (16, 16), 256, 2, False), (72, (16, 16), 256, 2, False), (128, (16, 8), 148, 1, True), (128, (16, 8), 65, 3, True),
    (64, (32, 32), 147, 2, False), (256, (8, 1), 528, 1, False), (256, (8, 1), 33, 2, False),
])  # fmt: skip
def test_attention_gives_what_numpy_gives(
    card: Card, dtype: str, width: int, heads: tuple[int, int], length: int, sequences: int, causal: bool
) -> None:
    rows, stride = length * sequences, (heads[0] + 2 * heads[1]) * width
    x, wide = numbers(dtype, rows, heads[0] + 2 * heads[1], width, scale=1.5)
    on, out = card.load(x.reshape(rows, -1)), poisoned(card, dtype, rows, heads[0] * width)
    made(card, dtype).attention(
        on, on.part(heads[0] * width, (1,)), on.part((heads[0] + heads[1]) * width, (1,)), out, heads=heads, width=width, rows=rows,
        length=length, q_stride=stride, kv_stride=stride, causal=causal,
    )  # fmt: skip
    parts = [np.split(part, sequences) for part in np.split(wide, np.cumsum((heads[0], heads[1])), 1)]
    wanted = np.concatenate([many_rows.attention(q, k, v, causal=causal) for q, k, v in zip(*parts, strict=True)])
    assert off(out, wanted.reshape(rows, -1)) < 2 * ROUNDED[dtype]  # weights are rounded as well


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("length", "keys", "sequences"), [(41, 147, 8), (41, 300, 2), (64, 64, 1), (5, 33, 3)])
def test_attention_to_a_context_sees_what_the_mask_shows(card: Card, dtype: str, length: int, keys: int, sequences: int) -> None:
    kernels, width, heads = ManyRows(card, dtype=dtype, attended=(48,)), 48, 32
    q, wide_q = numbers(dtype, sequences, length, heads, width)
    (k, wide_k), (v, wide_v) = (numbers(dtype, sequences, keys, heads, width, seed=seed) for seed in (1, 2))
    mask = np.random.default_rng(3).random((sequences, keys)) < 0.2
    mask[:, keys // 2] = True
    out = poisoned(card, dtype, sequences * length, heads * width)
    for shown in (mask, None):
        kernels.attention(
            card.load(q), card.load(k), card.load(v), out, heads=(heads, heads), width=width, rows=sequences * length, length=length,
            q_stride=heads * width, kv_stride=heads * width, keys=keys, mask=None if shown is None else card.load(shown),
        )  # fmt: skip
        some = np.ones_like(mask) if shown is None else shown
        wanted = np.stack([many_rows.attention(*one[:3], mask=one[3]) for one in zip(wide_q, wide_k, wide_v, some, strict=True)])
        assert off(out, wanted.reshape(sequences * length, -1)) < 2 * ROUNDED[dtype]


@pytest.mark.parametrize("dtype", KINDS)
def test_a_modulated_norm_and_a_plain_one(card: Card, dtype: str) -> None:
    x, wide = numbers(dtype, 328, 1536, scale=3.0)
    (scale, wide_scale), (shift, wide_shift) = (numbers(dtype, 1536, seed=seed, scale=0.3) for seed in (1, 2))
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"modulation": (card.load(scale), card.load(shift))}, {"weight": 1 + wide_scale, "bias": wide_shift}), ({}, {}),
    ]  # fmt: skip
    for how, known in ways:
        out = poisoned(card, dtype, 328, 1536)
        made(card, dtype).norm(card.load(x), out, eps=1e-5, layer=True, **how)
        assert off(out, many_rows.norm(wide, eps=1e-5, layer=True, **known)) < ROUNDED[dtype]


@pytest.mark.parametrize("dtype", KINDS)
def test_rows_are_spread_made_silent_and_gathered(card: Card, dtype: str) -> None:
    kernels, x = made(card, dtype), np.random.default_rng(0).standard_normal((3, 40, 132)).astype(np.float32)
    (more, wide_more), there = numbers(dtype, 136), poisoned(card, dtype, 3 * 41, 136)
    kernels.spread(card.load(x), there, per=40, skip=1)
    assert off(there, many_rows.spread(x, 136, skip=1).reshape(-1, 136)) < ROUNDED[dtype]
    spread, out = there.to_host().astype(np.float32), poisoned(card, dtype, 3 * 41, 136)
    kernels.gate(there, out, "silu", more=card.load(more), period=41)
    wanted = many_rows.gate(spread, "silu", more=wide_more, period=41)
    assert off(out, wanted) < ROUNDED[dtype]
    assert not out.to_host().astype(np.float32)[::41].any()
    back = card.load(np.full((3, 40, 132), np.nan, np.float32))
    kernels.gather(there, back, per=40, skip=1)
    assert np.array_equal(back.to_host(), spread.reshape(3, 41, 136)[:, 1:, :132])


def test_a_product_leaves_the_rows_between_its_own(card: Card) -> None:
    (x, wide), (weight, wide_weight) = numbers("float16", 8, 1024), numbers("float16", 1536, 1024, seed=1, scale=1 / 32)
    out = card.load(np.full((8, 41, 1536), 7, np.float16))
    made(card, "float16").product(card.load(x), card.load(weight), out, every=41)
    found = out.to_host()
    assert off(found[:, 0], many_rows.product(wide, wide_weight)) < 1e-3
    assert (found[:, 1:] == 7).all()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("width", "heads", "length", "sequences"), [(64, (16, 16), 256, 2), (64, (4, 2), 300, 3), (16, (4, 4), 33, 1)])
def test_attention_that_turns_gives_the_bits_of_rotary_and_attention(
    card: Card, dtype: str, width: int, heads: tuple[int, int], length: int, sequences: int
) -> None:
    kernels = ManyRows(card, dtype=dtype, turned=(width,), attended=(width,), turning=(width,))
    rows, stride = length * sequences, (heads[0] + 2 * heads[1]) * width
    x, wide = numbers(dtype, rows, heads[0] + 2 * heads[1], width, scale=1.5)
    table = np.random.default_rng(4).standard_normal((rows, width)).astype(np.float32)
    there, found = card.load(table), []
    for apart in (True, False):
        on, out = card.load(x.reshape(rows, -1)), poisoned(card, dtype, rows, heads[0] * width)
        k, v = (on.part(n * width, (rows * stride - n * width,)) for n in (heads[0], heads[0] + heads[1]))
        if apart:
            kernels.turn(on, there, heads, q=on, k=k, q_stride=stride, kv_stride=stride)
        kernels.attention(
            on, k, v, out, heads=heads, width=width, rows=rows, length=length, q_stride=stride, kv_stride=stride,
            table=None if apart else there,
        )  # fmt: skip
        found.append(out.to_host())
    assert np.array_equal(found[0], found[1])
    parts = np.split(wide, np.cumsum(heads), 1)
    parts[:2] = [many_rows.turn(part, table).astype(KINDS[dtype]).astype(np.float32) for part in parts[:2]]
    split = [np.split(part, sequences) for part in parts]
    wanted = np.concatenate([many_rows.attention(*one) for one in zip(*split, strict=True)])
    assert off(found[1], wanted.reshape(rows, -1)) < 2 * ROUNDED[dtype]


@pytest.mark.parametrize("kind", ["gelu", "gated_gelu", "gated_silu"])
def test_a_gate_gives_what_numpy_gives(card: Card, kind: many_rows.Gate) -> None:
    x, wide = numbers("float16", 147, 2 * 6144, scale=2.0)
    out = poisoned(card, "float16", 147, 2 * 6144 if kind == "gelu" else 6144)
    made(card, "float16").gate(card.load(x), out, kind)
    assert off(out, many_rows.gate(wide, kind)) < 1e-3


def test_corners_angles_and_patches(card: Card) -> None:
    table, wide = numbers("float16", 2304, 1024)
    rng = np.random.default_rng(4)
    index, share = rng.integers(0, 2304, (4, 512)), rng.uniform(0, 1, (4, 512)).astype(np.float16)
    out = poisoned(card, "float16", 512, 1024)
    made(card, "float16").corners(card.load(table), card.load(index), card.load(share), out)
    assert off(out, many_rows.corners(wide, index, share.astype(np.float32))) < 1e-3
    angles, tables = rng.uniform(-300, 300, (512, 32)).astype(np.float32), card.load(np.full((512, 64), np.nan, np.float32))
    made(card, "float16").angles(card.load(angles), tables)
    exact = np.concatenate([np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))], 1)
    assert np.abs(tables.to_host() - exact).max() < 1e-6
    pictures, wide = numbers("float16", 2, 3, 224, 224)
    rows = poisoned(card, "float16", 512, 592)
    made(card, "float16").patches(card.load(pictures), rows, 14)
    assert np.array_equal(rows.to_host().astype(np.float32), many_rows.patches(wide, 14, 592))
