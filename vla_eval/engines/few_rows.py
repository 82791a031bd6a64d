"""Kernels of our own for a denoise step of one robot: `few_rows.cu`, the shapes it is compiled for, and the same arithmetic in numpy.

A chunk is a few rows, so a step is bound by reading its weights; TensorRT's kernels reach about a quarter of the card's bandwidth there.
R rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..types import Vector
from .card import Buffer, Card
from .kernels import compiled, source_of

Array = NDArray[np.float32]
Norm = Literal["NONE", "LAYER", "RMS"]
Out = Literal["LINEAR", "GELU", "SILU", "RELU", "RESIDUAL", "VELOCITY", "GATE_UP"]
CARD = "sm90"  # what the kernels are written for; another card runs the engine instead
KINDS = {"float16": "f16", "bfloat16": "bf16"}
COPIES = 8  # of a norm's sums: see few_rows.cu
SUM_UNIT, SQUARE_UNIT = 2.0**24, 2.0**18
WIDEST = 1536  # rows whose squares fit their whole number: see MOST_SQUARES in few_rows.cu
_SHARED = 227 * 1024  # bytes of shared memory that a block of such a card can have
_BLOCKS, _IN_CLUSTERS = 132, 120  # that run at once on it, the second in clusters
_READ = 92_500  # bytes that a block reads in a microsecond
_MEETING = {1: 0.0, 2: 0.1, 4: 1.1, 8: 2.7}  # microseconds that blocks of a cluster take to add up their sums, by its size
_CROWDING = 0.02  # microseconds for each block beyond half of those that run at once: the next product's begin the later
MOST_ROWS, MOST_SHARING = 48, 16  # rows; rows of which all heads share their keys
MOST_KEYS = 512  # of a context
_HEAD, _STEPS, _LOOKING = 3, 8, 576  # of looks: blocks of a head's cluster, steps of 16 inputs that arrive together, threads


@dataclass(frozen=True, slots=True)
class Product:
    """What is multiplied and what follows: outputs = follow(norm(rows) W^T + bias)."""

    inputs: int
    outputs: int
    norm: Norm = "NONE"
    out: Out = "LINEAR"


@dataclass(frozen=True, slots=True)
class Look:
    """A LayerNorm, queries, and what each head sees: of a context, or (`own`) of the rows, whose keys and values are made beside them."""

    rows: int
    width: int
    head_width: int
    own: bool

    def check(self) -> None:
        """Raises ValueError for rows and widths that the kernels do not take."""
        check_rows(self.rows)
        if self.width % (_STEPS * 16 * _HEAD) or self.width > WIDEST or self.head_width % 16 or self.head_width > 64:
            raise ValueError(f"rows of {self.width} numbers in multiples of {_STEPS * 16 * _HEAD}, heads of {self.head_width} up to 64")

    @property
    def heads(self) -> int:
        return self.width // self.head_width

    @property
    def asked(self) -> Product:
        """The product that makes queries, or queries, keys and values."""
        return Product(self.width, (3 if self.own else 1) * self.width, "LAYER")

    @property
    def arguments(self) -> str:
        """Of the templates `glance` and `Glance`."""
        return f"{self.rows}, {self.width}, {self.head_width}, {str(self.own).lower()}"

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block; the compiler checks this against the kernel's own count."""
        t, r, d = self.rows, MOST_ROWS, self.head_width
        inputs = self.width if self.own else self.width // _HEAD
        chunks, spaced, sums = inputs // 16 // _STEPS, d + 8, d + 4
        vectors = -(-(512 + COPIES * t * 16 + t * 8) // 16) * 16
        queries = -(-(vectors + 8 * d + (0 if self.own else 2 * (MOST_KEYS + 8))) // 128) * 128
        keys = queries + 32 * spaced + (4 * r * spaced if self.own else 64 * _HEAD * sums)
        rows = -(-(keys + (0 if self.own else 16 * 64 * spaced)) // 128) * 128
        ring = -(-(rows + max(inputs // 8 * t * 16, 16 * r * sums)) // 128) * 128
        return ring + min(chunks, 5) * _STEPS * 32 * d + 256

    @property
    def packed(self) -> tuple[int, ...]:
        """The shape of what `pack` makes."""
        return self.heads, _HEAD, (self.width if self.own else self.width // _HEAD) // 16, 2, self.head_width, 8

    def pack(self, weight: Vector) -> Vector:
        """[N, K] in the order in which a head's three blocks read it: by head, block, 16 inputs, 8 of them, output.

        A block has the head's queries, keys or values with all inputs, or its queries with a third of them.
        """
        h, d, k = self.heads, self.head_width, self.width
        if self.own:
            tiles = weight.reshape(3, h, d, k).transpose(1, 0, 2, 3)
        else:
            tiles = weight.reshape(h, d, _HEAD, k // _HEAD).transpose(0, 2, 1, 3)
        cut = tiles.reshape(h, _HEAD, d, -1, 2, 8)
        return np.ascontiguousarray(cut.transpose(0, 1, 3, 4, 2, 5))

    def unpack(self, packed: Vector) -> Vector:
        """What `pack` was given."""
        h, d, k = self.heads, self.head_width, self.width
        tiles = packed.transpose(0, 1, 4, 2, 3, 5).reshape(h, _HEAD, d, -1)
        return np.ascontiguousarray(tiles.transpose(1, 0, 2, 3) if self.own else tiles.transpose(0, 2, 1, 3)).reshape(-1, k)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut over a card. Names as the template's parameters in few_rows.cu have them."""

    product: Product
    rows: int  # R
    inputs: int  # K, padded to 16
    outputs: int  # N, padded to 64
    cluster: int  # C
    width: int  # TN
    warp_groups: int  # W
    steps: int  # J
    stages: int  # S
    arrivals: int  # A

    @property
    def blocks(self) -> int:
        return self.outputs // self.width * self.cluster

    @property
    def threads(self) -> int:
        return 128 * self._groups * self.warp_groups + 64

    @property
    def chunks(self) -> int:
        """Arrivals of a block's slice of the inputs."""
        return self.inputs // 16 // self.cluster // self.steps

    @property
    def packed(self) -> tuple[int, ...]:
        """The shape of what `pack` makes: it tells tiles of one product apart."""
        return self.outputs // self.width, self.cluster, self.chunks, 2 * self.steps, self.width, 8

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block; the compiler checks this against the kernel's own count."""
        finished, column = self.width // self.cluster, self.rows * 16
        stats = -(-8 * (1 + 3 * self.chunks) // 128) * 128
        far = -(-(stats + COPIES * self.rows * 16 + self.rows * 8) // 16) * 16
        x = -(-(far + 16 * finished + (finished * self.rows * 4 if self.product.out == "RESIDUAL" else 0)) // 128) * 128
        ring = -(-(x + self.arrivals * self.steps * 2 * column) // 128) * 128
        multiplied = 48 if self.rows > 16 else 16
        sums = x + multiplied * (self.width + 4) * 4 * (self.warp_groups - 1 if self.warp_groups > 2 else 1)
        return max(ring + self.stages * self.steps * self.width * 32 + (64 * self._groups - self.width) * 16, sums)

    @property
    def arguments(self) -> str:
        """Of the template `product`."""
        return f"{self._cut}, {self.product.norm}, {self.product.out}"

    @property
    def counted(self) -> str:
        """Of the template `Tile`."""
        return f"{self._cut}, {self.product.out}"

    @property
    def _cut(self) -> str:
        numbers = (self.rows, self.inputs, self.cluster, self.width, self.warp_groups, self.steps, self.stages, self.arrivals)
        return ", ".join(map(str, numbers))

    @property
    def _groups(self) -> int:
        return -(-self.width // 64)


def tile_for(product: Product, rows: int) -> Tile:
    """The tile that should be done first. Raises ValueError for rows and widths that the kernels do not take.

    Blocks take as long as the bytes that they read, larger clusters longer to meet; and the fewer blocks, the more of the next product's
    begin while this one ends. Measured over some sixty tiles on an H200: docs/performance-log.md.
    """
    check_rows(rows)
    inputs, outputs = -(-product.inputs // 16) * 16, -(-product.outputs // 64) * 64
    if product.out != "VELOCITY" and outputs != product.outputs:
        raise ValueError(f"{product.outputs} outputs are no multiple of 64")
    fitting = []
    for cluster, width in itertools.product(_MEETING, (64, 48, 32, 16)):
        if inputs // 16 % cluster or outputs % width or width % (8 * cluster):
            continue
        steps = next(n for n in range(9, 0, -1) if inputs // 16 // cluster % n == 0)
        groups = next(n for n in (4, 3, 2, 1) if steps % n == 0)
        tile = _filled(Tile(product, rows, inputs, outputs, cluster, width, groups, steps, 1, 1))
        if tile.shared <= _SHARED and tile.blocks <= (_BLOCKS if cluster == 1 else _IN_CLUSTERS):
            fitting.append(tile)
    if not fitting:
        raise ValueError(f"no tile for {product.inputs} inputs and {product.outputs} outputs")
    return min(fitting, key=_microseconds)


def _filled(tile: Tile) -> Tile:
    """With room for everything, or else for as much as fits, and one arrival of rows less than of weights, which was the quickest."""

    def filled(stages: int) -> Tile:
        return replace(tile, stages=stages, arrivals=stages if stages == tile.chunks else max(1, stages - 1))

    most = bisect_right(range(1, tile.chunks + 1), _SHARED, key=lambda stages: filled(stages).shared)  # more stages, more bytes
    return filled(most) if most else tile


def _microseconds(tile: Tile) -> float:
    """What a product takes beyond its start, as measured."""
    read = tile.inputs // tile.cluster * (tile.width + tile.rows) * 2
    return read / _READ + _MEETING[tile.cluster] + max(0, tile.blocks - _BLOCKS // 2) * _CROWDING


def pack(weight: Vector, tile: Tile) -> Vector:
    """[N, K] in the order in which blocks read it: by tile, slice of K, arrival, eights of K, output. Padding is zero.

    Of GATE_UP the rows are those of the gate, then those of up.
    """
    whole = np.zeros((tile.outputs, tile.inputs), weight.dtype)
    whole[: weight.shape[0], : weight.shape[1]] = weight[interleaved(tile)] if tile.product.out == "GATE_UP" else weight
    cut = whole.reshape(-1, tile.width, tile.cluster, tile.chunks, 2 * tile.steps, 8)
    return np.ascontiguousarray(cut.transpose(0, 2, 3, 4, 1, 5))


def interleaved(tile: Tile) -> NDArray[np.int64]:
    """Which row of (gate, up) stands where, so that who finishes an output has both: halves of each block's share."""
    share, half = tile.width // tile.cluster, tile.width // tile.cluster // 2
    block, within = np.divmod(np.arange(tile.outputs), share)
    found: NDArray[np.int64] = block * half + within % half + np.where(within < half, 0, tile.outputs // 2)
    return found


def rows_on_card(x: Vector, rows: int) -> Vector:
    """[T, K] as the kernels keep R rows: [K / 8, R, 8], rows beyond T zero."""
    out = np.zeros((x.shape[1] // 8, rows, 8), x.dtype)
    out[:, : len(x)] = x.reshape(len(x), -1, 8).transpose(1, 0, 2)
    return out


class Fields(ctypes.Structure):
    """A kernel's argument: pointers by buffer, the rest as numbers."""

    def fill(self, values: Mapping[str, Buffer | int | float | None]) -> None:
        for name, value in values.items():
            setattr(self, name, value.pointer if isinstance(value, Buffer) else value)


def fields(pointers: str, integers: str, floats: str = "") -> list[tuple[str, type]]:
    """What a structure of `Fields` holds, by names."""
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Product(Fields):
    _fields_ = fields("weight bias lost stats rows_in late gate base scale wide narrow told", "rows first out_width", "eps")


class _Look(Fields):
    _fields_ = fields("weight bias lost stats rows_in k v mask out", "rows keys", "scale eps")


class _Shared(Fields):
    _fields_ = fields("own k v rotary out", "rows keys heads", "scale")


class _Project(Fields):
    _fields_ = fields("x weight bias scale wide narrow told", "rows inputs outputs")


class _Finish(Fields):
    _fields_ = fields("wide scale shift weight bias out", "rows inputs outputs", "eps")


class _Begin(Fields):
    _fields_ = fields("x out stats", "rows first width padded slots")


class FewRows:
    """The kernels compiled for some products, on one card. Every call gives work to its stream; nothing is checked on the device."""

    def __init__(
        self, card: Card, products: Sequence[Product], rows: int, *, dtype: str, head_width: int, looks: Sequence[Look] = ()
    ) -> None:
        """Raises ValueError for rows or a product that the kernels do not take, VlaEvalError where they fail."""
        self.card, self.rows, self._head_width = card, rows, head_width
        self.tiles = {product: tile_for(product, rows) for product in dict.fromkeys(products)}
        self._names = {product: f"product_{i}" for i, product in enumerate(self.tiles)}
        self._looks = {look: f"look_{i}" for i, look in enumerate(dict.fromkeys(looks))}
        source = source_of("few_rows.cu") + entries(self._names, self.tiles, head_width, rows, self._looks)
        code = compiled(source, f"{CARD}a", f'-DKIND="{KINDS[dtype]}"', "-default-device")
        self._kernels = card.kernels(code, [*self._names.values(), *self._looks.values(), *_others(head_width, rows)])
        for product, name in self._names.items():
            card.allow_shared(self._kernels[name], self.tiles[product].shared)
        for look, name in self._looks.items():
            card.allow_shared(self._kernels[name], look.shared)
        if rows <= MOST_SHARING:
            card.allow_shared(self._kernels["attention_shared"], _SHARED)

    def product(self, product: Product, *, rows: int | None = None, **values: Buffer | int | float | None) -> None:
        """Multiply. Values are the fields of `Product` in few_rows.cu."""
        tile = self.tiles[product]
        fields = _Product(rows=self.rows if rows is None else rows)
        self._launch(self._names[product], fields, values, tile.blocks, tile.threads, cluster=tile.cluster, shared=tile.shared)

    def look(self, look: Look, keys: int, **values: Buffer | int | float | None) -> None:
        """Norm, queries and softmax(q k^T · head_width^-0.5) v, of each head. Values are the fields of `Look` in few_rows.cu."""
        fields = _Look(rows=self.rows, keys=keys, scale=self._scale)
        self._launch(self._looks[look], fields, values, _HEAD * look.heads, _LOOKING, cluster=_HEAD, shared=look.shared)

    def attention_shared(self, heads: int, keys: int, **values: Buffer | int | float | None) -> None:
        """softmax(q k^T · head_width^-0.5) v, where all heads share their keys and the rows' own come behind them: fields of `Shared`."""
        share, d, rows = math.ceil(math.ceil((keys + self.rows) / 8) / 16) * 16, self._head_width, MOST_SHARING
        halves = 2 * share * (d + 8) + rows * (d + 8) + rows * (share + 8)
        shared = 2 * halves + 4 * (rows * (share + 4) + rows * (d + 4) + 2 * rows)
        fields = _Shared(rows=self.rows, keys=keys, heads=heads, scale=self._scale)
        self._launch("attention_shared", fields, values, heads * 8, 128, cluster=8, shared=shared)

    def begin(self, **values: Buffer | int | float | None) -> None:
        """Rows for the first product, and norms' sums that are zero."""
        self._launch("begin_step", _Begin(rows=self.rows), values, 16, 256)

    def project_in(self, inputs: int, outputs: int, **values: Buffer | int | float | None) -> None:
        """A product of a few inputs, in float32. Values are the fields of `Project`."""
        blocks = -(-outputs // 4 * self.rows // 256)
        self._launch("project_in_step", _Project(rows=self.rows, inputs=inputs, outputs=outputs), values, blocks, 256)

    def project_out(self, inputs: int, outputs: int, **values: Buffer | int | float | None) -> None:
        """The last norm and a product of a few outputs, in float32. Values are the fields of `Finish`."""
        blocks = -(-self.rows * outputs // 8)
        self._launch("project_out_step", _Finish(rows=self.rows, inputs=inputs, outputs=outputs), values, blocks, 256)

    @property
    def _scale(self) -> float:
        return float(self._head_width**-0.5 * math.log2(math.e))

    def _launch(
        self, name: str, fields: Fields, values: Mapping[str, Buffer | int | float | None], blocks: int, threads: int, *, cluster: int = 1,
        shared: int = 0,
    ) -> None:  # fmt: skip
        fields.fill(values)
        self.card.launch_kernel(self._kernels[name], fields, blocks, threads, cluster=cluster, shared=shared, early=True)


def check_rows(rows: int) -> None:
    """Raises ValueError for more rows than the kernels take."""
    if rows > MOST_ROWS:
        raise ValueError(f"{rows} rows are more than {MOST_ROWS}")


def entries(
    names: Mapping[Product, str],
    tiles: Mapping[Product, Tile],
    head_width: int,
    rows: int,
    looks: Mapping[Look, str] = MappingProxyType({}),
) -> str:
    """The kernels by name, for the compiler; it refuses a tile whose shared memory is counted otherwise here."""
    text = [
        f'static_assert(Tile<{tile.counted}>::BYTES == {tile.shared}, "shared memory");\n'
        f'extern "C" __global__ void __launch_bounds__({tile.threads}, {2 if tile.threads <= 416 else 1}) '
        f"{names[product]}(const __grid_constant__ Product p) {{ product<{tile.arguments}>(p); }}\n"
        for product, tile in tiles.items()
    ]
    text += [
        f'static_assert(Glance<{look.arguments}>::BYTES == {look.shared}, "shared memory");\n'
        f'extern "C" __global__ void __launch_bounds__({_LOOKING}, 1) {name}(const __grid_constant__ Look p) '
        f"{{ glance<{look.arguments}>(p); }}\n"
        for look, name in looks.items()
    ]
    text += [
        f'extern "C" __global__ void __launch_bounds__({threads}) {name}(const __grid_constant__ {fields} p) {{ {call}(p); }}\n'
        for name, (fields, call, threads) in _others(head_width, rows).items()
    ]
    return "\n" + "".join(text)


def _others(head_width: int, rows: int) -> dict[str, tuple[str, str, int]]:
    """Kernels beside the products: fields, function and threads by name."""
    found = {"begin_step": ("Begin", f"begin<{rows}>", 256)}
    if rows > MOST_SHARING:
        return found
    return {
        **found, "attention_shared": ("Shared", f"attend_shared<{rows}, {head_width}>", 128),
        "project_in_step": ("Project", f"project_in<{rows}>", 256), "project_out_step": ("Finish", f"project_out<{rows}>", 256),
    }  # fmt: skip


# The same in numpy, in float32, without padding: rows are [T, K] and what the kernels keep packed is plain.


def product(
    x: Array, weight: Array, p: Product, *, bias: Array | float = 0.0, lost: Array | None = None, stats: Array | None = None,
    eps: float = 0.0, late: Array | float = 0.0, gate: Array | float = 1.0, base: Array | None = None, first: int = 0,
) -> Array:  # fmt: skip
    """The outputs [T, N] of a product; `x` is what its producer scaled, `stats` [T, 2] the sums and squares of what it was before."""
    y: Array = x @ weight.T
    if stats is not None:
        mean: Any = stats[:, :1] / p.inputs if p.norm == "LAYER" else 0.0
        factor = 1 / np.sqrt(stats[:, 1:] / p.inputs - mean * mean + np.float32(eps))
        y = factor * y - (factor * mean * lost if lost is not None and p.norm == "LAYER" else 0.0)
    y = np.asarray(y + bias, np.float32)
    match p.out:
        case "GELU":
            y = gelu_tanh(y)
        case "SILU":
            y = silu(np.asarray(y + late, np.float32))
            y[:first] = 0
        case "RELU":
            y = np.maximum(y, np.float32(0))
        case "GATE_UP":
            y = gelu_tanh(y[:, : p.outputs // 2]) * y[:, p.outputs // 2 :]
        case "RESIDUAL":
            y = np.asarray(y * gate + (0.0 if base is None else base), np.float32)
        case _:
            pass
    return y


def look(
    x: Array, weight: Array, p: Look, *, bias: Array, lost: Array, stats: Array, eps: float,
    context: tuple[Array, Array, NDArray[np.bool_]] | None = None,
) -> Array:  # fmt: skip
    """What `FewRows.look` gives [T, W]; the context is keys and values [S, W] and which of them are seen."""
    asked, w = product(x, weight, p.asked, bias=bias, lost=lost, stats=stats, eps=eps), p.width
    if context is None:
        return attention(asked[:, :w], asked[:, w : 2 * w], asked[:, 2 * w :], p.heads)
    return attention(asked, *context[:2], p.heads, context[2])


def sums(x: Array) -> Array:
    """[T, 2]: what a norm needs to know of rows [T, K]."""
    wide = x.astype(np.float64)
    return np.stack([wide.sum(1), (wide * wide).sum(1)], 1).astype(np.float32)


def attention(q: Array, k: Array, v: Array, heads: int, mask: NDArray[np.bool_] | None = None) -> Array:
    """[T, H·D] over keys and values [S, H·D]."""
    split = [x.reshape(len(x), heads, -1).transpose(1, 0, 2) for x in (q, k, v)]
    scores = split[0] @ split[1].transpose(0, 2, 1) * np.float32(split[0].shape[-1] ** -0.5)
    if mask is not None:
        scores = np.where(mask, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    seen: Array = (weights / weights.sum(-1, keepdims=True)) @ split[2]
    return np.ascontiguousarray(seen.transpose(1, 0, 2)).reshape(len(q), -1)


def gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x))), np.float32)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)), np.float32)
