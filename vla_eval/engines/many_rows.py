"""Networks over many rows (pictures, prompts) on a card without TensorRT: cuBLASLt's products, `many_rows.cu` between them, in numpy too.

T rows of W numbers in half precision, row after row; products are [T, K] by weights [N, K], summed in float32.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from ..types import BadRequest, VlaEvalError
from .card import Buffer, Card
from .few_rows import KINDS, Fields, fields, gelu_tanh, silu
from .few_rows import attention as attention_of_heads
from .kernels import compiling, source_of

Array = NDArray[np.float32]
Gate = Literal["gelu", "gated_gelu", "gated_silu", "silu"]
Follow = Literal["", "GELU", "RELU"]  # what cuBLASLt makes of a product
_GATES: tuple[Gate, ...] = ("gelu", "gated_gelu", "gated_silu", "silu")  # in the order of the enumeration in many_rows.cu
WIDEST = 8192  # numbers of a row that a norm takes
INSTALL = "pip install 'vla-eval-trt[kernels]' brings it"
_PLAIN = (
    "norm_narrow",
    "norm_wide",
    "gate_rows",
    "mix_corners",
    "table_of",
    "cut_patches",
    "spread_rows",
    "gather_rows",
)  # kernels of no head's width
WORKSPACE = 32 << 20  # bytes that cuBLASLt may use
_PROCESSORS = 132  # of an H200
_THREADS, _BLOCKS = 256, 8 * _PROCESSORS  # of kernels that go through their numbers in strides
_QUERIES = 64  # rows of a block of `attend`


class _Shape(NamedTuple):
    """What cuBLASLt's choice of an algorithm depends on."""

    rows: int
    inputs: int
    outputs: int
    products: int
    apart: bool  # each product with rows of its own
    epilogue: str
    adds: bool
    every: int  # rows of the output lie so many rows apart


class _Norm(Fields):
    _fields_ = fields("x more weight bias scale shift out", "width layer", "eps")


class _Turn(Fields):
    _fields_ = fields("x table q_norm k_norm q k v", "rows stride q_heads k_heads q_stride kv_stride", "eps")


class _Attention(Fields):
    _fields_ = fields("q k v table mask out", "q_stride kv_stride out_stride queries length groups causal", "scale")


class _Gate(Fields):
    _fields_ = fields("x more out", "rows width kind period")


class _Corners(Fields):
    _fields_ = fields("table index share out", "rows width")


class _Angles(Fields):
    _fields_ = fields("angles table", "rows half")


class _Spread(Fields):
    _fields_ = fields("x out", "rows inputs width per skip")


class _Gather(Fields):
    _fields_ = fields("x out", "rows outputs width per skip")


class _Patches(Fields):
    _fields_ = fields("x out", "views side patch width")


class ManyRows:
    """Products and what stands between them, on one card, in its stream. Buffers are checked for their sizes, not for their numbers."""

    def __init__(
        self, card: Card, *, dtype: str, turned: tuple[int, ...] = (), attended: tuple[int, ...] = (), turning: tuple[int, ...] = ()
    ) -> None:
        """Widths of heads that rotary, attention and both in one are compiled for, in a thread.

        Raises BadRequest without cuBLAS; the first launch raises VlaEvalError where the kernels fail.
        """
        self.card, self.dtype = card, dtype
        self._attentions = [f"attend_{d}" for d in attended] + [f"attend_turning_{d}" for d in turning]
        self._names = [*(f"turn_{d}" for d in turned), *self._attentions, *_PLAIN]
        source = source_of("many_rows.cu") + entries(turned, attended, turning)
        self._code = compiling(source, card.sm, f'-DKIND="{KINDS[dtype]}"', "-default-device")
        self._blas = blas()
        self._handle = self._blas.create()
        weakref.finalize(self, self._blas.destroy, self._handle).atexit = False
        self._workspace = card.empty((WORKSPACE,), "uint8")
        self._numbers = np.array([0.0, 1.0], np.float32)  # what cuBLASLt multiplies products and bases with
        self._algorithms: dict[_Shape, NDArray[Any]] = {}

    def product(
        self, x: Buffer, weight: Buffer, out: Buffer, *, bias: Buffer | None = None, base: Buffer | None = None, follow: Follow = "",
        every: int = 1,
    ) -> None:  # fmt: skip
        """out = x Wᵀ + bias + base, or gelu_tanh or relu of it; `base` may be `out`.

        With weights [L, N, K] and out [L, T, N], L products of the same rows, or of rows [L, T, K]. With `every`, out [T, every, N] keeps
        all rows but the first of each `every`.
        """
        *many, outputs, inputs = weight.shape
        count, apart = math.prod(many), bool(many) and len(x.shape) == len(weight.shape)
        rows = math.prod(x.shape) // inputs // (count if apart else 1)
        assert math.prod(out.shape) == count * rows * outputs * every, (x.shape, weight.shape, out.shape)
        epilogue = "_".join(filter(None, (follow, "BIAS" if bias is not None else ""))) or "DEFAULT"
        shape = _Shape(rows, inputs, outputs, count, apart, epilogue, base is not None, every)
        call = _Call(self._blas, self.dtype, shape, bias)
        try:
            algorithm = self._algorithms.get(shape)
            if algorithm is None:
                algorithm = self._algorithms[shape] = call.algorithm(self._handle)
            call(self._handle, algorithm, x, weight, base or out, out, self._numbers, self._workspace, self.card.stream)
        finally:
            call.close()

    def norm(
        self, x: Buffer, out: Buffer, *, weight: Buffer | None = None, bias: Buffer | None = None, eps: float, layer: bool,
        more: Buffer | None = None, width: int | None = None, modulation: tuple[Buffer, Buffer] | None = None,
    ) -> None:  # fmt: skip
        """A LayerNorm (`layer`) or RMSNorm of rows, after `more` was added to `x` for good. `width` where it is not x's last axis.

        `modulation` is a scale, to which one is added, and a shift, in half precision, in the place of weight and bias.
        """
        width = width or x.shape[-1]
        rows = math.prod(x.shape) // width
        threads, argument = min(_THREADS, -(-width // 8 // 32) * 32), _Norm(width=width, layer=int(layer), eps=eps)
        name = "norm_narrow" if width <= 8 * threads else "norm_wide"
        scale, shift = modulation or (None, None)
        values = {"x": x, "out": out, "weight": weight, "bias": bias, "more": more, "scale": scale, "shift": shift}
        self._launch(name, argument, values, rows, threads)

    def turn(
        self, x: Buffer, table: Buffer, heads: tuple[int, int], *, q: Buffer, k: Buffer, v: Buffer | None = None, q_stride: int,
        kv_stride: int, q_norm: Buffer | None = None, k_norm: Buffer | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """Rotary by halves on queries and keys that lie side by side in rows of `x`, after RMSNorms of each head; values are copied."""
        rows, width = math.prod(table.shape[:-1]), table.shape[-1]
        argument = _Turn(rows=rows, stride=x.shape[-1], q_heads=heads[0], k_heads=heads[1], q_stride=q_stride, kv_stride=kv_stride, eps=eps)
        threads = rows * (heads[0] + heads[1] * (1 if v is None else 2)) * width // 16
        values = {"x": x, "table": table, "q": q, "k": k, "v": v, "q_norm": q_norm, "k_norm": k_norm}
        self._launch(f"turn_{width}", argument, values, -(-threads // _THREADS), _THREADS)

    def attention(
        self, q: Buffer, k: Buffer, v: Buffer, out: Buffer, *, heads: tuple[int, int], width: int, rows: int, length: int, q_stride: int,
        kv_stride: int, causal: bool = False, table: Buffer | None = None, keys: int | None = None, mask: Buffer | None = None,
    ) -> None:  # fmt: skip
        """softmax(q kᵀ · width^-0.5) v over sequences of `length` rows; heads are those of queries and of keys.

        With `keys`, each sequence looks at so many rows of its own context, those that the mask [sequences, keys] shows.
        With a table [T, width], which must stand before the kernel in front begins, queries and keys are turned by it here.
        """
        argument = _Attention(
            q_stride=q_stride, kv_stride=kv_stride, out_stride=heads[0] * width, queries=length, length=keys or length,
            groups=heads[0] // heads[1], causal=int(causal), scale=width**-0.5 * math.log2(math.e),
        )  # fmt: skip
        grid = -(-length // _QUERIES), heads[0], rows // length
        name = f"attend_{width}" if table is None else f"attend_turning_{width}"
        values = {"q": q, "k": k, "v": v, "out": out, "table": table, "mask": mask}
        self._launch(name, argument, values, grid, _THREADS, shared=shared_of(width))

    def gate(self, x: Buffer, out: Buffer, kind: Gate, *, more: Buffer | None = None, period: int = 0) -> None:
        """gelu(x) with the error function, or gelu_tanh(gate) · up, silu(gate) · up where rows of `x` are gate, then up.

        Of "silu" it is silu(x + more), but zero in the first of every `period` rows.
        """
        width = out.shape[-1]
        argument = _Gate(rows=math.prod(out.shape) // width, width=width, kind=_GATES.index(kind), period=period)
        self._stride("gate_rows", argument, {"x": x, "out": out, "more": more}, math.prod(out.shape) // 8)

    def spread(self, x: Buffer, out: Buffer, *, per: int, skip: int) -> None:
        """Rows [B, per, K] in float32 as rows [B, skip + per, W] in half precision, zeros before and behind them."""
        width = out.shape[-1]
        argument = _Spread(rows=math.prod(out.shape) // width, inputs=x.shape[-1], width=width, per=per, skip=skip)
        self._stride("spread_rows", argument, {"x": x, "out": out}, math.prod(out.shape))

    def gather(self, x: Buffer, out: Buffer, *, per: int, skip: int) -> None:
        """The way back: of rows [B, skip + per, W] those [B, per, K] that `spread` has put there, in float32."""
        outputs = out.shape[-1]
        argument = _Gather(rows=math.prod(out.shape) // outputs, outputs=outputs, width=x.shape[-1], per=per, skip=skip)
        self._stride("gather_rows", argument, {"x": x, "out": out}, math.prod(out.shape))

    def corners(self, table: Buffer, index: Buffer, share: Buffer, out: Buffer) -> None:
        """The sum of four rows of a table, each times its share; index and share are [4, T]."""
        argument = _Corners(rows=out.shape[0], width=out.shape[1])
        self._stride("mix_corners", argument, {"table": table, "index": index, "share": share, "out": out}, math.prod(out.shape) // 8)

    def angles(self, angles: Buffer, table: Buffer) -> None:
        """Cosines, then sines, of angles [T, H]."""
        argument = _Angles(rows=angles.shape[0], half=angles.shape[1])
        self._stride("table_of", argument, {"angles": angles, "table": table}, math.prod(angles.shape))

    def patches(self, x: Buffer, out: Buffer, patch: int) -> None:
        """Pictures [V, 3, S, S] as rows of patches, channel by channel, zeros behind."""
        argument = _Patches(views=x.shape[0], side=x.shape[-1], patch=patch, width=out.shape[-1])
        self._stride("cut_patches", argument, {"x": x, "out": out}, math.prod(out.shape))

    @cached_property
    def _kernels(self) -> Mapping[str, Any]:
        """Loaded by the first launch: until then others may be compiled and weights come in."""
        kernels = self.card.kernels(self._code.result(), self._names)
        for name in self._attentions:
            self.card.allow_shared(kernels[name], shared_of(int(name.rpartition("_")[2])))
        return kernels

    def _stride(self, name: str, argument: Fields, values: Mapping[str, Buffer | None], items: int) -> None:
        self._launch(name, argument, values, min(_BLOCKS, -(-items // _THREADS)), _THREADS)

    def _launch(
        self, name: str, argument: Fields, values: Mapping[str, Buffer | None], blocks: int | tuple[int, int, int], threads: int, *,
        shared: int = 0,
    ) -> None:  # fmt: skip
        argument.fill(values)
        self.card.launch_kernel(self._kernels[name], argument, blocks, threads, shared=shared, early=True)


class _Call:
    """One product as cuBLASLt is told of it. It thinks in columns: out is [N, T] to it, the weights come first and are transposed."""

    def __init__(self, blas: Any, dtype: str, shape: _Shape, bias: Buffer | None) -> None:
        self._blas, self._shape = blas, shape
        half, wide = {"float16": 2, "bfloat16": 14}[dtype], 0  # of cudaDataType
        self._description = blas.matmul_desc_create(68, wide)  # sums in float32
        said = blas.MatmulDescAttribute
        self._say(said.TRANSA, 1, np.int32)
        self._say(said.EPILOGUE, int(getattr(blas.Epilogue, shape.epilogue)), np.uint32)
        if bias is not None:
            self._say(said.BIAS_POINTER, bias.pointer, np.uint64)
            if shape.products > 1:
                self._say(said.BIAS_BATCH_STRIDE, shape.outputs, np.int64)
        n, k, t = shape.outputs, shape.inputs, shape.rows
        self._layouts = [
            self._layout(half, k, n, n * k),
            self._layout(half, k, t, k * t if shape.apart else 0),
            self._layout(half, n, t, n * t, shape.every),
        ]

    def algorithm(self, handle: int) -> NDArray[Any]:
        """What cuBLASLt suggests first. Raises VlaEvalError where it has no suggestion."""
        blas = self._blas
        wanted = blas.matmul_preference_create()
        size, most_bytes = np.array([WORKSPACE], np.uint64), blas.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
        blas.matmul_preference_set_attribute(wanted, int(most_bytes), size.ctypes.data, size.nbytes)
        found, count = np.zeros(1, blas.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        a, b, d = self._layouts
        blas.matmul_algo_get_heuristic(handle, self._description, a, b, d, d, wanted, 1, found.ctypes.data, count.ctypes.data)
        blas.matmul_preference_destroy(wanted)
        if not count[0]:
            raise VlaEvalError(f"cuBLASLt has no way to multiply {self._shape}")
        return found

    def __call__(
        self, handle: int, algorithm: NDArray[Any], x: Buffer, weight: Buffer, base: Buffer, out: Buffer, numbers: Array, workspace: Buffer,
        stream: int,
    ) -> None:  # fmt: skip
        """Give the product to the stream."""
        a, b, d = self._layouts
        zero, one = numbers.ctypes.data, numbers.ctypes.data + 4
        self._blas.matmul(
            handle, self._description, one, weight.pointer, a, x.pointer, b, one if self._shape.adds else zero, base.pointer, d,
            out.pointer, d, algorithm.ctypes.data, workspace.pointer, WORKSPACE, stream,
        )  # fmt: skip

    def close(self) -> None:
        """Give cuBLASLt's objects back."""
        for layout in self._layouts:
            self._blas.matrix_layout_destroy(layout)
        self._blas.matmul_desc_destroy(self._description)

    def _say(self, attribute: Any, value: int, kind: Any) -> None:
        held = np.array([value], kind)
        self._blas.matmul_desc_set_attribute(self._description, int(attribute), held.ctypes.data, held.nbytes)

    def _layout(self, kind: int, rows: int, columns: int, between: int, every: int = 1) -> int:
        blas = self._blas
        layout: int = blas.matrix_layout_create(kind, rows, columns, every * rows)
        if self._shape.products > 1:
            said, count, stride = blas.MatrixLayoutAttribute, np.array([self._shape.products], np.int32), np.array([between], np.int64)
            for attribute, held in ((said.BATCH_COUNT, count), (said.STRIDED_BATCH_OFFSET, stride)):
                blas.matrix_layout_set_attribute(layout, int(attribute), held.ctypes.data, held.nbytes)
        return layout


@cache
def blas() -> Any:
    """cuBLASLt's functions. Raises BadRequest where they are not installed."""
    if find_spec("nvmath") is None:
        raise BadRequest(f"the kernels want cuBLAS: {INSTALL}")
    from nvmath.bindings import cublasLt

    try:
        cublasLt.get_version()
    except Exception as error:  # whatever a loader says of a library that is not there
        raise BadRequest(f"cuBLAS cannot be loaded ({str(error).splitlines()[0]}); {INSTALL}") from error
    return cublasLt


def entries(turned: tuple[int, ...], attended: tuple[int, ...], turning: tuple[int, ...] = ()) -> str:
    """The kernels by name, for the compiler."""
    text = [
        f'extern "C" __global__ void __launch_bounds__({_THREADS}) turn_{d}(const __grid_constant__ Turn p) {{ turn<{d}>(p); }}\n'
        for d in turned
    ]
    text += [
        f'static_assert(Room<{d}>::BYTES == {shared_of(d)}, "shared memory");\n'
        f'extern "C" __global__ void __launch_bounds__({_THREADS}) attend_{how}{d}(const __grid_constant__ Attention p) '
        f"{{ attend<{d}, {str(bool(how)).lower()}>(p); }}\n"
        for how, d in (*(("", d) for d in attended), *(("turning_", d) for d in turning))
    ]
    return "\n" + "".join(text)


def turns_within(rows: int, length: int, heads: int) -> bool:
    """Whether attention that turns queries and keys is quicker than a kernel before it: where each of its blocks has a processor alone.

    Every block of a head turns all of its keys. Measured: docs/performance-log.md.
    """
    return -(-length // _QUERIES) * heads * (rows // length) <= _PROCESSORS


def shared_of(width: int) -> int:
    """Bytes of shared memory of a block of `attend`; the compiler checks this against the kernel's own count."""
    padded, keys = -(-width // 16) * 16 + 8, 32 if width > 128 else 64
    return (_QUERIES + 8 * keys) * padded * 2


# The same in numpy, in float32: rows are [T, K].


def product(x: Array, weight: Array, *, bias: Array | float = 0.0, base: Array | float = 0.0, follow: Follow = "") -> Array:
    """What `ManyRows.product` gives."""
    y: Array = x @ weight.swapaxes(-1, -2) + bias + base
    return gelu_tanh(y) if follow == "GELU" else np.maximum(y, np.float32(0)) if follow == "RELU" else y


def norm(x: Array, *, weight: Array | float = 1.0, bias: Array | float = 0.0, eps: float, layer: bool) -> Array:
    """A LayerNorm or an RMSNorm."""
    centred = x - x.mean(-1, keepdims=True) if layer else x
    return np.asarray(centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(eps)) * weight + bias, np.float32)


def turn(x: Array, table: Array, weight: Array | None = None, eps: float = 0.0) -> Array:
    """Heads [T, H, D] after an RMSNorm of each, where there is one, and rotary by halves; table [T, D]."""
    if weight is not None:
        x = norm(x, weight=weight, eps=eps, layer=False)
    half = x.shape[-1] // 2
    a, b, cos, sin = x[..., :half], x[..., half:], table[:, None, :half], table[:, None, half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: Array, k: Array, v: Array, *, causal: bool = False, mask: NDArray[np.bool_] | None = None) -> Array:
    """[T, H, D] over [S, H / G, D] of one sequence, those that the mask [S] shows."""
    rows, heads = q.shape[:2]
    k, v = (np.repeat(x, heads // k.shape[1], 1).reshape(len(x), -1) for x in (k, v))
    seen = attention_of_heads(q.reshape(rows, -1), k, v, heads, np.tri(rows, dtype=bool) if causal else mask)
    return seen.reshape(q.shape)


def gate(x: Array, kind: Gate, *, more: Array | float = 0.0, period: int = 0) -> Array:
    """What `ManyRows.gate` gives."""
    if kind == "silu":
        y = silu(np.asarray(x + more, np.float32))
        y[::period] = 0
        return y
    if kind == "gelu":
        return np.asarray(0.5 * x * (1 + erf(x * math.sqrt(0.5))), np.float32)
    opened, up = np.split(x, 2, -1)
    return (gelu_tanh if kind == "gated_gelu" else silu)(opened) * up


def spread(x: Array, width: int, *, skip: int) -> Array:
    """What `ManyRows.spread` gives of [B, per, K]."""
    return np.pad(x, ((0, 0), (skip, 0), (0, width - x.shape[-1])))


def gather(x: Array, outputs: int, *, skip: int) -> Array:
    """What `ManyRows.gather` gives of [B, skip + per, W]."""
    return x[:, skip:, :outputs]


def corners(table: Array, index: NDArray[np.int64], share: Array) -> Array:
    """What `ManyRows.corners` gives."""
    mixed: Array = (table[index] * share[..., None]).sum(0)
    return mixed


def patches(x: Array, patch: int, width: int) -> Array:
    """What `ManyRows.patches` gives."""
    views, channels, side, _ = x.shape
    cut = (
        x.reshape(views, channels, side // patch, patch, side // patch, patch).transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch**2)
    )
    return np.pad(cut, ((0, 0), (0, width - cut.shape[1])))
