"""Kernels of our own on a GPU: products and attention against numpy, whole loops against TensorRT's engines and against float32.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines import few_rows
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.few_rows import COPIES, SQUARE_UNIT, SUM_UNIT, FewRows, Product, pack, rows_on_card
from vla_eval.engines.trt_build import build_component
from vla_eval.policies.gr00t import dit
from vla_eval.policies.gr00t.runtime import Gr00tRuntime
from vla_eval.policies.gr00t.runtime import Inputs as Gr00tInputs
from vla_eval.policies.pi05 import expert
from vla_eval.policies.pi05.configuration import RELEASED
from vla_eval.policies.pi05.runtime import Inputs as Pi05Inputs
from vla_eval.policies.pi05.runtime import Pi05Runtime

pytestmark = pytest.mark.gpu

Array = NDArray[Any]
HALF = 1e-3  # of the largest number: float16 keeps 2^-11, and an output is rounded once
GR00T = dit.Shape(32, 32, 48, 1024, 6144, 132, 132, 40, 2)
EXPERT = expert.Shape.of(RELEASED, 10, 32)
KINDS = [
    *((product, GR00T.rows, GR00T.head_width) for product in dict.fromkeys(dit.products(GR00T).values())),
    *((product, EXPERT.horizon, EXPERT.head_width) for product in dict.fromkeys(expert.products(EXPERT).values())),
]


@pytest.fixture(scope="module")
def card() -> Card:
    return Card()


@cache
def kernels(card: Card, rows: int, head_width: int) -> FewRows:
    looks = [*dit.looks(GR00T).values()] if rows == GR00T.rows else []
    return FewRows(card, [product for product, r, _ in KINDS if r == rows], rows, dtype="float16", head_width=head_width, looks=looks)


def whole_sums(x: Array, r: int) -> Array:
    """As the kernels add them up, spread over their copies."""
    found = np.zeros((COPIES, r, 2), np.int64)
    wide = x.astype(np.float64)
    found[3, : len(x), 0] = np.rint(wide.sum(1) * SUM_UNIT)
    found[6, : len(x), 1] = np.rint((wide * wide).sum(1) * SQUARE_UNIT)
    return found


def plain(buffer: Buffer, rows: int) -> Array:
    packed: Array = buffer.to_host().astype(np.float32)
    return packed[:, :rows].transpose(1, 0, 2).reshape(rows, -1)


def off(found: Array, wanted: Array) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(("product", "rows", "head_width"), KINDS, ids=lambda x: str(x))
def test_a_product_gives_what_numpy_gives(card: Card, product: Product, rows: int, head_width: int) -> None:
    made = kernels(card, rows, head_width)
    tile, rng = made.tiles[product], np.random.default_rng(0)
    n = product.outputs // 2 if product.out == "GATE_UP" else product.outputs
    weight = (rng.standard_normal((product.outputs, product.inputs)) / np.sqrt(product.inputs)).astype(np.float16)
    x = (rng.standard_normal((rows, product.inputs)) * 2 + 1).astype(np.float32)
    scale = rng.uniform(0.5, 1.5, product.inputs).astype(np.float32)
    vectors = {name: rng.standard_normal(tile.outputs).astype(np.float32) for name in ("bias", "lost", "gate")}
    base, after = rng.standard_normal((rows, n)).astype(np.float32), rng.uniform(0.5, 1.5, tile.outputs).astype(np.float32)
    fed = (x * scale if product.norm != "NONE" else x).astype(np.float16)
    padded = np.pad(fed, ((0, 0), (0, tile.inputs - product.inputs)))
    velocity = product.out == "VELOCITY"
    narrow, wide = (
        card.load(np.full((max(n, 64) // 8, made.rows, 8), 7, np.float16)),
        card.load(np.full((tile.outputs // 8, made.rows, 8), 7, np.float32)),
    )
    told = card.load(np.zeros((COPIES, made.rows, 2), np.int64))
    values: dict[str, Any] = {
        "weight": card.load(pack(weight, tile)), "rows_in": card.load(rows_on_card(padded, made.rows)),
        "bias": card.load(vectors["bias"]), "eps": 1e-5, "first": 1 if product.out in ("SILU", "VELOCITY") else 0, "wide": wide,
    }  # fmt: skip
    known: dict[str, Any] = {"bias": vectors["bias"][: product.outputs], "eps": 1e-5, "first": values["first"]}
    if product.norm != "NONE":
        values |= {"stats": card.load(whole_sums(x, made.rows)), "lost": card.load(vectors["lost"])}
        known |= {"stats": few_rows.sums(x), "lost": vectors["lost"][: product.outputs]}
    if product.out == "GATE_UP":
        known["bias"] = np.concatenate([vectors["bias"][:n], vectors["lost"][:n]])
    if product.out == "SILU":
        late = vectors["lost"].astype(np.float16)
        values["late"], known["late"] = card.load(late), late[: product.outputs].astype(np.float32)
    if product.out == "RESIDUAL":
        values |= {"base": card.load(rows_on_card(base, made.rows)), "gate": card.load(vectors["gate"])}
        values |= {"scale": card.load(after), "told": told}
        known |= {"base": base, "gate": vectors["gate"]}
    if velocity:
        values |= {"wide": card.load(np.zeros((rows - 1, n), np.float32)), "out_width": n}
    else:
        values["narrow"] = narrow
    wanted = few_rows.product(fed.astype(np.float32), weight.astype(np.float32), product, **known)
    made.product(product, **values)
    if velocity:
        assert off(values["wide"].to_host(), wanted[1:]) < 1e-5
        return
    assert off(plain(wide, rows)[:, :n], wanted) < 1e-5
    assert off(plain(narrow, rows)[:, :n], wanted * after if product.out == "RESIDUAL" else wanted) < HALF
    if product.out == "RESIDUAL":
        got, exact = told.to_host().sum(0)[:rows], few_rows.sums(plain(wide, rows))
        assert off(got / [SUM_UNIT, SQUARE_UNIT], exact) < 1e-6
    first = plain(wide, rows)
    made.product(product, **values)
    assert np.array_equal(plain(wide, rows), first)  # bit for bit


@pytest.mark.parametrize(("keys", "seen"), [(41, None), (147, 19), (147, 128), (300, 270), (512, 512), (33, 33)])
def test_what_heads_see_is_what_numpy_sees(card: Card, keys: int, seen: int | None) -> None:
    made, rng, w, rows = kernels(card, GR00T.rows, GR00T.head_width), np.random.default_rng(1), GR00T.width, GR00T.rows
    look = GR00T.look(1 if seen is None else 0)
    n = look.asked.outputs
    weight = (rng.standard_normal((n, w)) / np.sqrt(w)).astype(np.float16)
    x, scale = (rng.standard_normal((rows, w)) * 2 + 1).astype(np.float32), rng.uniform(0.5, 1.5, w).astype(np.float32)
    fed, (bias, lost) = (x * scale).astype(np.float16), rng.standard_normal((2, n)).astype(np.float32)
    values: dict[str, Any] = {
        "weight": card.load(look.pack(weight)), "bias": card.load(bias), "lost": card.load(lost),
        "stats": card.load(whole_sums(x, made.rows)), "rows_in": card.load(rows_on_card(fed, made.rows)),
        "out": card.load(np.full((w // 8, made.rows, 8), 7, np.float16)), "eps": 1e-5,
    }  # fmt: skip
    context = None
    if seen is not None:
        k, v = rng.standard_normal((2, keys, w)).astype(np.float16)
        mask = np.zeros(keys, bool)
        mask[rng.permutation(keys)[:seen]] = True
        context = k.astype(np.float32), v.astype(np.float32), mask
        values |= {"k": card.load(k), "v": card.load(v), "mask": card.load(mask)}
    made.look(look, keys, **values)
    wanted = few_rows.look(
        fed.astype(np.float32), weight.astype(np.float32), look, bias=bias, lost=lost, stats=few_rows.sums(x), eps=1e-5, context=context
    )  # fmt: skip
    assert off(plain(values["out"], rows), wanted) < 2 * HALF  # queries, keys, values and shares are rounded as well
    first = values["out"].to_host()
    made.look(look, keys, **values)
    assert np.array_equal(values["out"].to_host(), first)  # bit for bit


@pytest.mark.parametrize("keys", [300, 528, 541, 976])
def test_attention_over_shared_keys_gives_what_numpy_gives(card: Card, keys: int) -> None:
    s, rng = EXPERT, np.random.default_rng(2)
    made, d = kernels(card, s.horizon, s.head_width), s.head_width
    own = rng.standard_normal((s.horizon, s.asked)).astype(np.float16)
    k, v = (rng.standard_normal((keys, d)).astype(np.float16) for _ in range(2))
    angle = rng.uniform(0, 6, (s.horizon, d // 2)).astype(np.float32)
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    out = card.load(np.zeros((s.heads * d // 8, made.rows, 8), np.float16))
    made.attention_shared(s.heads, keys, own=card.load(own), k=card.load(k), v=card.load(v), rotary=card.load(table), out=out)
    parts = own.astype(np.float32).reshape(s.horizon, s.heads + 2, d)
    cos, sin = table[:, None, : d // 2], table[:, None, d // 2 :]
    a, b = parts[..., : d // 2], parts[..., d // 2 :]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float16).astype(np.float32)
    every_k = np.concatenate([k.astype(np.float32), turned[:, s.heads]])
    every_v = np.concatenate([v.astype(np.float32), parts[:, s.heads + 1]])
    each_k, each_v = (np.repeat(x[:, None], s.heads, 1).reshape(len(x), -1) for x in (every_k, every_v))
    wanted = few_rows.attention(turned[:, : s.heads].reshape(s.horizon, -1), each_k, each_v, s.heads)
    assert off(plain(out, s.horizon), wanted) < 2 * HALF


@pytest.fixture(scope="module")
def bundles(wide: Callable[[str, Any], Path]) -> Callable[[str, str], Bundle]:
    """By model and precision, with plans where it is not float32."""

    @cache
    def made(model: str, dtype: str) -> Bundle:
        bundle = open_bundle(wide(model, dtype))
        for component in bundle.components.values() if dtype != "fp32" else ():
            build_component(component)
        return bundle

    return made


def answers(model: str, bundle: Bundle, **options: Any) -> Array:
    """Chunks of three requests, the second of them twice."""
    rng = np.random.default_rng(4)
    found = []
    runtime: Any = (Gr00tRuntime if model == "gr00t" else Pi05Runtime)(bundle, **options)
    for request in (0, 1, 1, 2):
        rng = np.random.default_rng(request)
        if model == "gr00t":
            image = runtime.layout.image_token
            ids = np.array([5, 6, 7, *[image] * 128, *range(8, runtime.most_tokens - 179 + request)], np.int64)
            row: Any = Gr00tInputs(
                rng.uniform(-1, 1, (512, 1536)).astype(np.float32), (16, 16), ids, rng.uniform(-1, 1, (1, 132)).astype(np.float32),
                rng.standard_normal((40, 132)).astype(np.float32),
            )  # fmt: skip
        else:
            pixels = rng.uniform(-1, 1, (2, 3, 224, 224)).astype(np.float32)
            row = Pi05Inputs(pixels, np.arange(5, 20 + request), rng.standard_normal((10, 32)).astype(np.float32))
        found.append(runtime([row])[0].chunk)
    return np.stack(found)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("model", ["gr00t", "pi05"])
def test_a_loop_in_kernels_gives_what_float32_gives(bundles: Callable[[str, str], Bundle], model: str, dtype: str) -> None:
    wanted = answers(model, bundles(model, "fp32"), backend="onnxruntime")
    ours = answers(model, bundles(model, dtype), backend="tensorrt", kernels="yes")
    theirs = answers(model, bundles(model, dtype), backend="tensorrt", kernels="no")
    assert np.array_equal(ours[1], ours[2])  # a replay, bit for bit
    assert not np.array_equal(ours[0], ours[1])
    # no worse than TensorRT's engine in the same precision, and within what that precision gives
    assert off(ours, wanted) <= 1.5 * off(theirs, wanted) + 1e-4
    assert off(ours, wanted) < (2e-2 if dtype == "fp16" else 1e-1)
