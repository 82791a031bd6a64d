"""The pen that networks are written with: about thirty strokes, and the shape rules that every pen shares."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ..types import BadRequest, TensorSpec, Vector

DType = Literal["float32", "float16", "bfloat16", "int32", "int64", "bool", "uint8"]
PRECISIONS: dict[str, DType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # as `--dtype` says it
NUMPY: dict[DType, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32, "int64": np.int64, "bool": np.bool_,
    "uint8": np.uint8,
}  # fmt: skip


class Axis(NamedTuple):
    """A length that is known only at run time: least, tuned for, most."""

    name: str
    min: int
    opt: int
    max: int


Dim = int | Axis
Shape = tuple[Dim, ...]


def axis(name: str, least: int, tuned: int, most: int) -> Dim:
    """An axis, or a plain length where only one is possible."""
    return most if least == most else Axis(name, least, tuned, most)


class Value(NamedTuple):
    """A tensor in the graph that is being drawn."""

    handle: Any  # the pen's own: an ONNX name, a TensorRT tensor
    dtype: DType
    shape: Shape


class Stored(Protocol):
    """A tensor that can be read when it is needed, and forgotten."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> Vector: ...


class Graph(Protocol):
    """The strokes. Every float tensor inside is of `dtype` unless a stroke says otherwise.

    Strongly typed: two operands have one type, and only `cast` changes it. Whatever the type, products are summed in float32, and norms
    and softmax are computed in float32. Operands of different rank or length broadcast as numpy's do; a number stands for a constant.
    """

    dtype: DType

    # edges
    def input(self, name: str, dtype: DType, shape: Shape) -> Value: ...
    def output(self, value: Value, name: str) -> None: ...
    def label(self, value: Value, name: str) -> Value: ...  # the same tensor under a name that inspectors and tests find it by
    def weight(self, stored: Stored, dtype: DType | None = None) -> Value: ...
    def constant(self, array: Vector) -> Value: ...  # small, int32, int64, bool or float32

    # products
    def linear(self, x: Value, weight: Stored, bias: Stored | None = None) -> Value: ...  # [..., in], weight [out, in] -> [..., out]
    def matmul(self, a: Value, b: Value) -> Value: ...  # [..., M, K] x [..., K, N]
    def attention(self, q: Value, k: Value, v: Value, *, scale: float, mask: Value | None = None, causal: bool = False) -> Value: ...

    # q [B, H, T, D], k and v [B, G, S, D] where G divides H; mask bool, True = seen, broadcast to [B, H, T, S] -> [B, H, T, D]

    # norms, over the last axis
    def layer_norm(self, x: Value, weight: Stored | None = None, bias: Stored | None = None, *, eps: float) -> Value: ...
    def rms_norm(self, x: Value, weight: Stored | None = None, *, eps: float) -> Value: ...
    def softmax(self, x: Value) -> Value: ...
    def hide(self, scores: Value, mask: Value) -> Value: ...  # scores where the mask is true, elsewhere what no softmax sees

    # element by element
    def gelu(self, x: Value) -> Value: ...  # exact, with erf
    def gelu_tanh(self, x: Value) -> Value: ...
    def silu(self, x: Value) -> Value: ...
    def relu(self, x: Value) -> Value: ...
    def sin(self, x: Value) -> Value: ...
    def cos(self, x: Value) -> Value: ...
    def add(self, a: Value, b: Value | float) -> Value: ...
    def sub(self, a: Value, b: Value | float) -> Value: ...
    def mul(self, a: Value, b: Value | float) -> Value: ...
    def equal(self, a: Value, b: Value) -> Value: ...  # -> bool
    def at_least(self, a: Value, b: Value) -> Value: ...  # a >= b -> bool
    def cast(self, x: Value, dtype: DType) -> Value: ...

    # moving numbers
    def sum(self, x: Value, axis: int) -> Value: ...  # keeps the axis, with length 1
    def reshape(self, x: Value, shape: Sequence[int]) -> Value: ...  # 0 keeps the axis in that place, one -1 takes what is left
    def transpose(self, x: Value, order: Sequence[int]) -> Value: ...
    def concat(self, values: Sequence[Value], axis: int) -> Value: ...
    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value: ...
    def gather(self, table: Value, rows: Value) -> Value: ...  # table [N, ...], rows [...] of int -> [*rows, ...]
    def count(self, x: Value, axis: int) -> Value: ...  # 0, 1, 2 … along that axis of x: [n] int32


HIDDEN = -1e30  # a score that no softmax sees; finite in float32


def attention_by_parts(g: Graph, q: Value, k: Value, v: Value, *, scale: float, mask: Value | None = None, causal: bool = False) -> Value:
    """`Graph.attention` in single strokes: product, softmax in float32, product. Query heads that share a key head are laid end to end."""
    heads, groups, width = q.shape[1], k.shape[1], v.shape[3]
    assert isinstance(heads, int)
    assert isinstance(groups, int)
    assert isinstance(width, int)
    q = q if scale == 1 else g.mul(q, scale)
    rows = q if heads == groups else g.reshape(q, (0, groups, -1, width))  # [B, G, H / G * T, D]
    scores = g.cast(g.matmul(rows, g.transpose(k, (0, 1, 3, 2))), "float32")
    scores = scores if heads == groups else g.reshape(scores, (0, heads, -1, 0))  # [B, H, T, S]
    if causal:
        scores = g.hide(scores, g.at_least(g.reshape(g.count(q, 2), (-1, 1)), g.reshape(g.count(k, 2), (1, -1))))
    if mask is not None:
        scores = g.hide(scores, mask)
    shares = g.cast(g.softmax(scores), q.dtype)
    shares = shares if heads == groups else g.reshape(shares, (0, groups, -1, 0))
    seen = g.matmul(shares, v)
    return seen if heads == groups else g.reshape(seen, (0, heads, -1, width))


def reshaped(shape: Shape, to: Sequence[int]) -> Shape:
    """The shape after `Graph.reshape`; a run-time length that was merged or divided gets a name that says so, such as "P/4" or "B*S"."""
    kept = [shape[i] if n == 0 else n for i, n in enumerate(to)]
    if -1 not in to:
        _same_size(shape, kept, to)
        return tuple(kept)
    rest = list(shape)
    for dim in kept:
        if isinstance(dim, Axis):
            rest.remove(dim)
    fixed = math.prod(n for n in kept if isinstance(n, int) and n != -1)
    axes = [dim for dim in rest if isinstance(dim, Axis)]
    whole = math.prod(dim for dim in rest if isinstance(dim, int))
    if not axes:
        _divide(whole, fixed, shape, to)
        left: Dim = whole // fixed
    else:
        least, tuned, most = (_divide(whole * math.prod(getattr(a, end) for a in axes), fixed, shape, to) for end in ("min", "opt", "max"))
        left = Axis(_scaled("*".join(a.name for a in axes), Fraction(whole, fixed)), least, tuned, most)
    return tuple(left if n == -1 else n for n in kept)


def broadcast(a: Shape, b: Shape) -> Shape:
    """The common shape of two operands, numpy's rule."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(_wider(m, n, a, b) for m, n in pairs)


def total(lengths: Sequence[Dim]) -> Dim:
    """The length of tensors laid end to end, at most one of which is known only at run time."""
    known = sum(n for n in lengths if isinstance(n, int))
    open_ends = [n for n in lengths if isinstance(n, Axis)]
    if not open_ends:
        return known
    (one,) = open_ends
    return Axis(f"{one.name}+{known}", one.min + known, one.opt + known, one.max + known) if known else one


def narrowed(stored: Stored, dtype: DType) -> Vector:
    """A stored tensor in the type that the graph wants. Raises BadRequest, naming it, where a value exceeds that type's range."""
    array = stored.read()
    with np.errstate(over="ignore"):  # looked at next
        wanted: Vector = array.astype(NUMPY[dtype], copy=False)
    if dtype == "float16" and array.dtype != np.float16 and not np.isfinite(wanted).all():
        raise BadRequest(f"{stored.name} holds a value beyond ±65504, which float16 cannot; choose --dtype bf16 or fp32")
    return wanted


def specs(values: dict[str, Value]) -> tuple[TensorSpec, ...]:
    """Inputs or outputs of a drawn graph as the contract states them."""
    return tuple(
        TensorSpec(name, v.dtype, tuple(n if isinstance(n, int) else (n.min, n.opt, n.max) for n in v.shape)) for name, v in values.items()
    )


def _scaled(name: str, by: Fraction) -> str:
    """ "S" by 2 is "S*2", "S*2" by 1/2 is "S" again."""
    base, operator, number = re.fullmatch(r"(.*?)(?:([*/])(\d+))?", name).groups()  # type: ignore[union-attr]
    if operator:
        by *= Fraction(number) if operator == "*" else Fraction(1, int(number))
    return base + (f"*{by.numerator}" if by.numerator > 1 else "") + (f"/{by.denominator}" if by.denominator > 1 else "")


def _wider(m: Dim, n: Dim, a: Shape, b: Shape) -> Dim:
    if m == n or n == 1:
        return m
    assert m == 1, f"{a} and {b} do not broadcast"
    return n


def _same_size(shape: Shape, kept: Sequence[Dim], to: Sequence[int]) -> None:
    sizes = [math.prod(n if isinstance(n, int) else n.max for n in dims) for dims in (shape, kept)]
    assert sizes[0] == sizes[1], f"{shape} cannot become {tuple(to)}"


def _divide(size: int, by: int, shape: Shape, to: Sequence[int]) -> int:
    assert size % by == 0, f"{shape} cannot become {tuple(to)}"
    return size // by
