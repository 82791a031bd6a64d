"""What transformers are made of, drawn in the pen. B rows, S or T tokens, H heads, D a head's width; P packed patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .graph import Graph, Value
from .weights import Weights


class Rope(NamedTuple):
    """Rotary angles, cosines and sines of half a head's width, shaped to broadcast against [B, H, T, D / 2]; float32."""

    cos: Value
    sin: Value


def rope_from_table(g: Graph, table: Value, rows: Value) -> Rope:
    """Angles from a table [N, D], cosines then sines, at rows [B, S] of it."""
    width = _length(table, -1) // 2
    picked = g.gather(table, rows)  # [B, S, D]
    picked = g.reshape(picked, (0, 1, -1, 2 * width)) if len(rows.shape) == 2 else picked
    return Rope(g.slice(picked, len(picked.shape) - 1, 0, width), g.slice(picked, len(picked.shape) - 1, width, 2 * width))


def rotate(g: Graph, x: Value, rope: Rope) -> Value:
    """Rotary position by halves: [a, b] -> [a cos - b sin, b cos + a sin]; in float32."""
    axis, width = len(x.shape) - 1, _length(x, -1)
    wide = g.cast(x, "float32")
    a, b = g.slice(wide, axis, 0, width // 2), g.slice(wide, axis, width // 2, width)
    turned = g.concat(
        [g.sub(g.mul(a, rope.cos), g.mul(b, rope.sin)), g.add(g.mul(b, rope.cos), g.mul(a, rope.sin))],
        axis,
    )
    return g.cast(turned, x.dtype)


def linear(g: Graph, x: Value, w: Weights) -> Value:
    """x W^T, plus the bias where the checkpoint has one."""
    return g.linear(x, w["weight"], w["bias"] if "bias" in w else None)  # noqa: SIM401 (a missing weight is an error; w is no dict)


def split_linear(g: Graph, x: Value, w: Weights, parts: int) -> Value:
    """`linear` on [B, T, K] with K cut into parts whose products are summed in float32.

    With few rows a product has too few tiles to keep a GPU busy; parts side by side do, and their sum joins what comes next.
    """
    weight = w["weight"]
    out, width = weight.shape
    parts = math.gcd(width, parts)
    if parts == 1:
        return linear(g, x, w)
    cut = weight.changed(f"split{parts}", lambda a: a.reshape(out, parts, -1).transpose(1, 2, 0), (parts, width // parts, out))
    pieces = g.transpose(g.reshape(x, (0, 0, parts, width // parts)), (0, 2, 1, 3))  # [B, parts, T, K / parts]
    summed = g.sum(g.cast(g.matmul(pieces, g.weight(cut, x.dtype)), "float32"), 1)
    y = g.cast(g.reshape(summed, (0, -1, out)), x.dtype)
    return g.add(y, g.weight(w["bias"], x.dtype)) if "bias" in w else y


def scaled_linear(g: Graph, x: Value, w: Weights, factor: float) -> Value:
    """`linear`, times a constant that goes into the weights."""
    weight, bias = (
        w[name].changed(f"times{factor:.6g}", lambda a: (a.astype(np.float32) * np.float32(factor)).astype(np.float32))
        if name in w
        else None
        for name in ("weight", "bias")
    )
    assert weight is not None
    return g.linear(x, weight, bias)


def layer_norm(g: Graph, x: Value, w: Weights, *, eps: float) -> Value:
    """LayerNorm with its affine part."""
    return g.layer_norm(x, w["weight"], w["bias"], eps=eps)


def modulated(g: Graph, x: Value, scale: Value, shift: Value, *, eps: float) -> Value:
    """LayerNorm without weights, then * (1 + scale) + shift, all in float32."""
    normed = g.layer_norm(g.cast(x, "float32"), eps=eps)
    lifted = g.add(g.cast(scale, "float32"), 1.0)
    return g.cast(g.add(g.mul(normed, lifted), g.cast(shift, "float32")), x.dtype)


def heads(g: Graph, x: Value, width: int) -> Value:
    """[B, T, H * D] -> [B, H, T, D]."""
    count = _length(x, -1) // width
    return g.transpose(g.reshape(x, (0, 0, count, width)), (0, 2, 1, 3))


def joined(g: Graph, x: Value) -> Value:
    """[B, H, T, D] -> [B, T, H * D]."""
    count, width = _length(x, 1), _length(x, -1)
    return g.reshape(g.transpose(x, (0, 2, 1, 3)), (0, 0, count * width))


def gated_mlp(g: Graph, x: Value, w: Weights, activation: Callable[[Value], Value]) -> Value:
    """down(activation(gate x) * up x)."""
    return linear(g, g.mul(activation(linear(g, x, w.under("gate_proj"))), linear(g, x, w.under("up_proj"))), w.under("down_proj"))


def patches(g: Graph, pixels: Value, size: int) -> Value:
    """Pictures [V, C, H, W] -> [V, rows * columns, C * size * size]: what a convolution with stride = size multiplies."""
    channels, rows, columns = _length(pixels, 1), _length(pixels, 2) // size, _length(pixels, 3) // size
    cut = g.reshape(pixels, (0, channels, rows, size, columns, size))
    return g.reshape(g.transpose(cut, (0, 2, 4, 1, 3, 5)), (0, rows * columns, channels * size * size))


def segments(g: Graph, packed: Value, bounds: Value) -> Value:
    """Who may see whom when sequences lie packed behind one another: bool [1, 1, P, P] from bounds [N + 1] int32, 0 … P."""
    place = g.reshape(g.count(packed, 0), (1, 1, -1, 1))
    passed = g.cast(g.at_least(place, g.reshape(bounds, (1, 1, 1, -1))), "int32")  # [1, 1, P, N + 1]
    number = g.sum(passed, 3)  # [1, 1, P, 1]: which sequence a row is of, from 1
    return g.equal(number, g.reshape(number, (1, 1, 1, -1)))


def _length(x: Value, axis: int) -> int:
    length = x.shape[axis]
    assert isinstance(length, int), f"axis {axis} of {x.shape} is known only at run time"
    return length
