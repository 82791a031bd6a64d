"""The pen that draws TensorRT layers straight from a checkpoint: the same strokes, no ONNX in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..types import Vector
from . import trt
from .graph import HIDDEN, NUMPY, Axis, DType, Shape, Stored, Value, attention_by_parts, broadcast, narrowed, reshaped, total

TYPES: dict[DType, str] = {
    "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64", "bool": "BOOL",
}  # fmt: skip
FUSED_WIDTHS = 8  # the attention layer takes head widths that are multiples of this
WIDE_HEAD, FEW_ROWS = 128, 64  # for few queries of wide heads three plain kernels take 10 us where the layer takes 26


class TrtPen:
    """Draws into `network`. The numbers of its weights must outlive the build, so the pen keeps them: let it live as long."""

    def __init__(self, network: Any, dtype: DType) -> None:
        self.dtype, self.network = dtype, network
        self.inputs: dict[str, Value] = {}
        self.outputs: dict[str, Value] = {}
        self._api = trt.door().api
        self._kept: list[Vector] = []
        self._known: dict[object, Value] = {}  # constants and weights that were drawn before

    @property
    def weights_bytes(self) -> int:
        """Of the numbers that it keeps."""
        return sum(array.nbytes for array in self._kept)

    # edges

    def input(self, name: str, dtype: DType, shape: Shape) -> Value:
        tensor = self.network.add_input(name, self._type(dtype), _lengths(shape))
        for i, length in enumerate(shape):
            if isinstance(length, Axis):
                tensor.set_dimension_name(i, length.name)
        self.inputs[name] = value = Value(tensor, dtype, shape)
        return value

    def output(self, value: Value, name: str) -> None:
        end = self._layer(self.network.add_identity(value.handle), value.dtype, value.shape)
        end.handle.name = name
        self.network.mark_output(end.handle)
        self.outputs[name] = end

    def label(self, value: Value, name: str) -> Value:
        value.handle.name = name
        return value

    def weight(self, stored: Stored, dtype: DType | None = None) -> Value:
        return self._store(stored, dtype or self.dtype)

    def constant(self, array: Vector) -> Value:
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self._write(array)
        return self._known[key]

    # products

    def linear(self, x: Value, weight: Stored, bias: Stored | None = None) -> Value:
        y = self._product(x, self._store(weight, x.dtype), transposed=True)
        return y if bias is None else self.add(y, self._store(bias, x.dtype))

    def matmul(self, a: Value, b: Value) -> Value:
        return self._product(a, b, transposed=False)

    def attention(self, q: Value, k: Value, v: Value, *, scale: float, mask: Value | None = None, causal: bool = False) -> Value:
        rows, width = q.shape[2], q.shape[3]
        fused = not isinstance(width, int) or not width % FUSED_WIDTHS
        if not fused or (isinstance(rows, int) and rows <= FEW_ROWS and isinstance(width, int) and width > WIDE_HEAD):
            return attention_by_parts(self, q, k, v, scale=scale, mask=mask, causal=causal)
        kinds, norms = self._api.CausalMaskKind, self._api.AttentionNormalizationOp
        q = q if scale == 1 else self.mul(q, scale)  # the layer itself does not scale
        kind = kinds.UPPER_LEFT if causal else kinds.NONE
        layer = self.network.add_attention_v2(q.handle, k.handle, v.handle, norms.SOFTMAX, kind)
        layer.decomposable = True  # plain layers where no fused kernel takes this width or type
        if mask is not None:
            layer.mask = self._for_queries(mask, q).handle
        return self._layer(layer, q.dtype, (*q.shape[:3], v.shape[3]))

    # norms

    def layer_norm(self, x: Value, weight: Stored | None = None, bias: Stored | None = None, *, eps: float) -> Value:
        wide, rank = self.cast(x, "float32"), len(x.shape)
        scale = self._full(x, 1.0) if weight is None else self._store(weight, "float32")
        shift = self._full(x, 0.0) if bias is None else self._store(bias, "float32")
        ends = [self._ranked(part, rank).handle for part in (scale, shift)]
        layer = self.network.add_normalization_v2(wide.handle, *ends, 1 << (rank - 1))
        layer.epsilon = eps
        return self.cast(self._layer(layer, "float32", x.shape), x.dtype)

    def rms_norm(self, x: Value, weight: Stored | None = None, *, eps: float) -> Value:
        wide = self.cast(x, "float32")
        last = 1 << (len(x.shape) - 1)
        squares = self.mul(wide, wide)
        mean = self.network.add_reduce(squares.handle, self._api.ReduceOperation.AVG, last, True)
        root = self.add(self._layer(mean, "float32", (*x.shape[:-1], 1)), eps)
        root = self._unary(root, self._api.UnaryOperation.SQRT)
        y = self._pair(self._api.ElementWiseOperation.DIV, wide, root)
        if weight is not None:
            y = self.mul(y, self._store(weight, "float32"))
        return self.cast(y, x.dtype)

    def softmax(self, x: Value) -> Value:
        wide = self.cast(x, "float32")
        layer = self.network.add_softmax(wide.handle)
        layer.axes = 1 << (len(x.shape) - 1)
        return self.cast(self._layer(layer, "float32", x.shape), x.dtype)

    def hide(self, scores: Value, mask: Value) -> Value:
        rank = len(scores.shape)
        hidden = self.cast(self.constant(np.array(HIDDEN, np.float32)), scores.dtype)
        parts = [self._ranked(mask, rank).handle, scores.handle, self._ranked(hidden, rank).handle]
        return self._layer(self.network.add_select(*parts), scores.dtype, broadcast(scores.shape, mask.shape))

    # element by element

    def gelu(self, x: Value) -> Value:
        return self._activation(x, self._api.ActivationType.GELU_ERF)

    def gelu_tanh(self, x: Value) -> Value:
        return self._activation(x, self._api.ActivationType.GELU_TANH)

    def silu(self, x: Value) -> Value:
        return self.mul(x, self._activation(x, self._api.ActivationType.SIGMOID))

    def relu(self, x: Value) -> Value:
        return self._activation(x, self._api.ActivationType.RELU)

    def sin(self, x: Value) -> Value:
        return self._unary(x, self._api.UnaryOperation.SIN)

    def cos(self, x: Value) -> Value:
        return self._unary(x, self._api.UnaryOperation.COS)

    def add(self, a: Value, b: Value | float) -> Value:
        return self._pair(self._api.ElementWiseOperation.SUM, a, b)

    def sub(self, a: Value, b: Value | float) -> Value:
        return self._pair(self._api.ElementWiseOperation.SUB, a, b)

    def mul(self, a: Value, b: Value | float) -> Value:
        return self._pair(self._api.ElementWiseOperation.PROD, a, b)

    def equal(self, a: Value, b: Value) -> Value:
        return self._pair(self._api.ElementWiseOperation.EQUAL, a, b, "bool")

    def at_least(self, a: Value, b: Value) -> Value:
        return self._unary(self._pair(self._api.ElementWiseOperation.LESS, a, b, "bool"), self._api.UnaryOperation.NOT)

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if x.dtype == dtype else self._layer(self.network.add_cast(x.handle, self._type(dtype)), dtype, x.shape)

    # moving numbers

    def sum(self, x: Value, axis: int) -> Value:
        axis %= len(x.shape)
        layer = self.network.add_reduce(x.handle, self._api.ReduceOperation.SUM, 1 << axis, True)
        return self._layer(layer, x.dtype, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        layer = self.network.add_shuffle(x.handle)
        layer.reshape_dims = tuple(shape)
        return self._layer(layer, x.dtype, reshaped(x.shape, shape))

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        layer = self.network.add_shuffle(x.handle)
        layer.first_transpose = self._api.Permutation(list(order))
        return self._layer(layer, x.dtype, tuple(x.shape[i] for i in order))

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        axis %= len(values[0].shape)
        layer = self.network.add_concatenation([v.handle for v in values])
        layer.axis = axis
        length = total([v.shape[axis] for v in values])
        return self._layer(layer, values[0].dtype, (*values[0].shape[:axis], length, *values[0].shape[axis + 1 :]))

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        axis %= len(x.shape)
        length = x.shape[axis]
        assert isinstance(length, int)
        assert 0 <= start < stop <= length
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        begin = tuple(start if i == axis else 0 for i in range(len(shape)))
        layer = self.network.add_slice(x.handle, begin, tuple(n if isinstance(n, int) else 0 for n in shape), (1,) * len(shape))
        if any(isinstance(n, Axis) for n in shape):
            layer.set_input(2, self._sizes(x, {axis: stop - start}))
        return self._layer(layer, x.dtype, shape)

    def gather(self, table: Value, rows: Value) -> Value:
        return self._layer(self.network.add_gather(table.handle, rows.handle, 0), table.dtype, (*rows.shape, *table.shape[1:]))

    def count(self, x: Value, axis: int) -> Value:
        length = x.shape[axis]
        if isinstance(length, int):
            return self.constant(np.arange(length, dtype=np.int32))
        axis %= len(x.shape)
        size = self.network.add_slice(self.network.add_shape(x.handle).get_output(0), (axis,), (1,), (1,)).get_output(0)
        layer = self.network.add_fill((1,), self._api.FillOperation.LINSPACE, self._api.DataType.INT32)
        layer.set_input(0, size)
        layer.set_input(1, self.constant(np.array(0, np.int32)).handle)
        layer.set_input(2, self.constant(np.array([1], np.int32)).handle)
        return self._layer(layer, "int32", (length,))

    # below: how a stroke becomes layers

    def _type(self, dtype: DType) -> Any:
        return getattr(self._api.DataType, TYPES[dtype])

    def _layer(self, layer: Any, dtype: DType, shape: Shape) -> Value:
        assert layer is not None, f"TensorRT refused a layer that should be {dtype} {shape}; its log says why"
        tensor = layer.get_output(0)
        assert tuple(tensor.shape) == _lengths(shape), f"{layer.name}: TensorRT sees {tuple(tensor.shape)}, we {shape}"
        assert tensor.dtype == self._type(dtype), f"{layer.name}: TensorRT sees {tensor.dtype}, we {dtype}"
        return Value(tensor, dtype, shape)

    def _product(self, a: Value, b: Value, *, transposed: bool) -> Value:
        assert a.dtype == b.dtype, (a, b)
        out = b.shape[-2] if transposed else b.shape[-1]
        shape = (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], out)
        # Half operands cast up and the product cast down become one half-precision kernel that sums in float32.
        summed: DType = "float32" if a.dtype == "float16" else a.dtype
        rank, ops = max(len(a.shape), len(b.shape)), self._api.MatrixOperation
        left, right = (self._ranked(self.cast(v, summed), rank).handle for v in (a, b))
        layer = self.network.add_matrix_multiply(left, ops.NONE, right, ops.TRANSPOSE if transposed else ops.NONE)
        return self.cast(self._layer(layer, summed, shape), a.dtype)

    def _pair(self, op: Any, a: Value, b: Value | float, dtype: DType | None = None) -> Value:
        if not isinstance(b, Value):
            b = self.cast(self.constant(np.array(b, np.float32)), a.dtype)
        assert a.dtype == b.dtype, (op, a, b)
        rank = max(len(a.shape), len(b.shape))
        layer = self.network.add_elementwise(self._ranked(a, rank).handle, self._ranked(b, rank).handle, op)
        return self._layer(layer, dtype or a.dtype, broadcast(a.shape, b.shape))

    def _unary(self, x: Value, op: Any) -> Value:
        return self._layer(self.network.add_unary(x.handle, op), x.dtype, x.shape)

    def _activation(self, x: Value, kind: Any) -> Value:
        return self._layer(self.network.add_activation(x.handle, kind), x.dtype, x.shape)

    def _ranked(self, x: Value, rank: int) -> Value:
        missing = rank - len(x.shape)
        if not missing:
            return x
        axes = self.constant(np.arange(missing, dtype=np.int64))
        return self._layer(self.network.add_unsqueeze(x.handle, axes.handle), x.dtype, (1,) * missing + x.shape)

    def _for_queries(self, mask: Value, q: Value) -> Value:
        """[B, 1, 1, S] -> [B, 1, T, S]: the layer takes one row of the mask for each query."""
        if mask.shape[2] == q.shape[2]:
            return mask
        assert mask.shape[2] == 1
        shape = (*mask.shape[:2], q.shape[2], mask.shape[3])
        layer = self.network.add_slice(mask.handle, (0,) * 4, tuple(n if isinstance(n, int) else 0 for n in shape), (1, 1, 0, 1))
        if any(isinstance(n, Axis) for n in shape):
            assert isinstance(q.shape[2], int), "a mask with one row needs a number of queries that is fixed"
            layer.set_input(2, self._sizes(mask, {2: q.shape[2]}))
        return self._layer(layer, "bool", shape)

    def _sizes(self, x: Value, instead: dict[int, int]) -> Any:
        """The shape of x as a tensor, with some of its lengths replaced."""
        shape, parts = self.network.add_shape(x.handle).get_output(0), []
        for i in range(len(x.shape)):
            if i in instead:
                parts.append(self.constant(np.array([instead[i]], np.int64)).handle)
            else:
                parts.append(self.network.add_slice(shape, (i,), (1,), (1,)).get_output(0))
        return self.network.add_concatenation(parts).get_output(0)

    def _full(self, x: Value, number: float) -> Value:
        width = x.shape[-1]
        assert isinstance(width, int)
        return self.constant(np.full(width, number, np.float32))

    def _store(self, stored: Stored, dtype: DType) -> Value:
        key = (stored.name, dtype)
        if key not in self._known:
            self._known[key] = self._write(narrowed(stored, dtype))
        return self._known[key]

    def _write(self, array: Vector) -> Value:
        array = np.ascontiguousarray(array).reshape(array.shape)  # numpy would make a vector of a scalar
        self._kept.append(array)
        dtype = next(d for d, n in NUMPY.items() if array.dtype == n)
        weights = self._api.Weights(self._type(dtype), array.ctypes.data, array.size)
        return self._layer(self.network.add_constant(array.shape, weights), dtype, array.shape)


def _lengths(shape: Shape) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else -1 for n in shape)
