"""What transformers are made of, against plain numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from vla_eval.engines.blocks import (
    Rope,
    gated_mlp,
    heads,
    joined,
    modulated,
    patches,
    rope_from_table,
    rotate,
    scaled_linear,
    segments,
    split_linear,
)  # fmt: skip
from vla_eval.engines.graph import Axis, Graph, Shape, Value
from vla_eval.engines.onnx_pen import OnnxPen
from vla_eval.engines.weights import open_checkpoint

Array = NDArray[Any]
S = Axis("S", 1, 6, 20)
rng = np.random.default_rng(0)


@dataclass(frozen=True)
class Desk:
    """Draw a block on the given inputs and run it."""

    folder: Path

    def __call__(self, draw: Callable[..., Value], inputs: Mapping[str, tuple[Array, Shape]]) -> Array:
        with OnnxPen(self.folder / "g.onnx", "float32") as g:
            edges = [g.input(name, str(array.dtype), shape) for name, (array, shape) in inputs.items()]  # type: ignore[arg-type]
            g.output(draw(g, *edges), "y")
        session = onnxruntime.InferenceSession(self.folder / "g.onnx", providers=["CPUExecutionProvider"])
        (found,) = session.run(["y"], {name: array for name, (array, _) in inputs.items()})
        return np.asarray(found)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def numbers(*shape: int) -> Array:
    return rng.normal(size=shape).astype(np.float32)


def test_rotation_by_halves_is_a_product_of_complex_numbers(desk: Desk) -> None:
    x, angles = numbers(2, 3, 6, 8), rng.uniform(-9, 9, (2, 6, 4)).astype(np.float32)
    table = np.concatenate([np.cos(angles), np.sin(angles)], -1)  # [B, S, D]: cosines, then sines

    def draw(g: Graph, x: Value, table: Value, rows: Value) -> Value:
        return rotate(g, x, rope_from_table(g, g.reshape(table, (-1, 8)), rows))

    rows = np.arange(12, dtype=np.int32).reshape(2, 6)  # of the table with both robots' rows end to end
    found = desk(draw, {"x": (x, (2, 3, S, 8)), "table": (table, (2, S, 8)), "rows": (rows, (2, S))})
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles[:, None].astype(np.float64))
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), atol=2e-6)


def test_rotation_is_done_in_float32_whatever_the_networks_type_is(tmp_path: Path) -> None:
    with OnnxPen(tmp_path / "g.onnx", "float16") as g:
        x, cos, sin = g.input("x", "float16", (1, 1, 2, 4)), g.input("c", "float32", (1, 1, 2, 2)), g.input("s", "float32", (1, 1, 2, 2))
        y = rotate(g, x, Rope(cos, sin))
        assert (y.dtype, y.shape) == ("float16", (1, 1, 2, 4))
        g.output(y, "y")


def test_patches_are_what_a_convolution_of_that_stride_multiplies(desk: Desk) -> None:
    pixels, kernel = numbers(2, 3, 28, 42), numbers(5, 3, 14, 14)
    cut = desk(lambda g, x: patches(g, x, 14), {"x": (pixels, (Axis("V", 1, 2, 3), 3, 28, 42))})
    found = cut @ kernel.reshape(5, -1).T
    for view in range(2):
        for row in range(2):
            for column in range(3):
                window = pixels[view, :, 14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
                np.testing.assert_allclose(found[view, 3 * row + column], (kernel * window).sum((1, 2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bounds", [[0, 6], [0, 1, 6], [0, 2, 4, 6]], ids=str)
def test_packed_sequences_see_themselves_alone(bounds: list[int], desk: Desk) -> None:
    packed, ends = numbers(6, 4), np.array(bounds, np.int32)
    found = desk(segments, {"x": (packed, (S, 4)), "bounds": (ends, (Axis("N", 2, 3, 4),))})
    number = [sum(place >= end for end in bounds) for place in range(6)]
    assert np.array_equal(found, np.equal.outer(number, number)[None, None])


def test_heads_are_split_and_joined_again(desk: Desk) -> None:
    x = numbers(2, 6, 12)
    split = desk(lambda g, x: heads(g, x, 4), {"x": (x, (2, S, 12))})
    assert np.array_equal(split, x.reshape(2, 6, 3, 4).transpose(0, 2, 1, 3))
    assert np.array_equal(desk(lambda g, x: joined(g, heads(g, x, 4)), {"x": (x, (2, S, 12))}), x)


def test_a_modulated_norm_scales_by_one_more_than_its_scale(desk: Desk) -> None:
    x, scale, shift = numbers(2, 6, 8), numbers(1, 8), numbers(1, 8)
    found = desk(
        lambda g, x, scale, shift: modulated(g, x, scale, shift, eps=1e-5),
        {"x": (x, (2, S, 8)), "scale": (scale, (1, 8)), "shift": (shift, (1, 8))},
    )
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, normed * (1 + scale) + shift, atol=5e-6)


def test_the_gate_is_activated_and_the_other_half_is_not(desk: Desk, tmp_path: Path) -> None:
    w = {f"{name}_proj.weight": numbers(*shape) for name, shape in (("gate", (6, 4)), ("up", (6, 4)), ("down", (4, 6)))}
    save_file(w, tmp_path / "model.safetensors")
    stored, x = open_checkpoint(tmp_path).weights, numbers(2, 4)
    found = desk(lambda g, x: gated_mlp(g, x, stored, g.silu), {"x": (x, (2, 4))})
    gate = x @ w["gate_proj.weight"].T
    np.testing.assert_allclose(
        found, (gate / (1 + np.exp(-gate)) * (x @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("parts", [1, 4, 8, 7], ids=str)
def test_a_product_cut_into_parts_is_the_product(desk: Desk, tmp_path: Path, parts: int, bias: bool) -> None:
    weight, shift, x = numbers(6, 24), numbers(6), numbers(2, 5, 24)
    save_file({"p.weight": weight} | ({"p.bias": shift} if bias else {}), tmp_path / "model.safetensors")
    w = open_checkpoint(tmp_path).weights.under("p")
    found = desk(lambda g, v: split_linear(g, v, w, parts), {"x": (x, (2, 5, 24))})  # seven parts do not divide 24: one is left
    np.testing.assert_allclose(found, x @ weight.T + (shift if bias else 0), atol=2e-6 * 24)


def test_a_factor_in_the_weights_scales_product_and_bias(desk: Desk, tmp_path: Path) -> None:
    weight, shift, x = numbers(6, 24), numbers(6), numbers(2, 5, 24)
    save_file({"p.weight": weight, "p.bias": shift}, tmp_path / "model.safetensors")
    w = open_checkpoint(tmp_path).weights.under("p")
    found = desk(lambda g, v: scaled_linear(g, v, w, 0.3), {"x": (x, (2, 5, 24))})
    np.testing.assert_allclose(found, 0.3 * (x @ weight.T + shift), atol=2e-6 * 24)
