"""The pen that writes ONNX: plain protobuf with standard operators, every large tensor streamed to a file beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..types import Vector
from .graph import HIDDEN, NUMPY, DType, Shape, Stored, Value, attention_by_parts, broadcast, narrowed, reshaped, total

OPSET = 23
IR_VERSION = 11  # the one that goes with opset 23
INLINE_BYTES = 1024  # smaller tensors stay in the protobuf
_ALIGN = 4096  # offsets of streamed tensors, so that a runtime can map them

_TYPES: dict[DType, int] = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32, "int64": TensorProto.INT64, "bool": TensorProto.BOOL,
}  # fmt: skip


class OnnxPen:
    """Draws one graph into `path`, and `path` + ".data" if it has large weights; leaving the `with` block writes and checks it."""

    def __init__(self, path: Path, dtype: DType) -> None:
        self.dtype, self.path, self.data = dtype, path, path.with_name(path.name + ".data")
        self.inputs: dict[str, Value] = {}
        self.outputs: dict[str, Value] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._stored: list[TensorProto] = []
        self._known: dict[object, Value] = {}  # constants and weights that were drawn before
        self._count = 0

    def __enter__(self) -> Self:
        self._file = self.data.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if not self.data.stat().st_size:
            self.data.unlink()
        if error is None:
            self._save()

    # edges

    def input(self, name: str, dtype: DType, shape: Shape) -> Value:
        self.inputs[name] = value = Value(name, dtype, shape)
        return value

    def output(self, value: Value, name: str) -> None:
        self.outputs[name] = self._draw("Identity", [value], value.dtype, value.shape, name=name)

    def label(self, value: Value, name: str) -> Value:
        last = self._nodes[-1]
        assert list(last.output) == [value.handle], f"{name!r}: a tensor is labelled where it is drawn"
        last.output[0] = last.name = name
        return value._replace(handle=name)

    def weight(self, stored: Stored, dtype: DType | None = None) -> Value:
        return self._store(stored, dtype or self.dtype)

    def constant(self, array: Vector) -> Value:
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self._write(f"constant_{len(self._known)}", array)
        return self._known[key]

    # products

    def linear(self, x: Value, weight: Stored, bias: Stored | None = None) -> Value:
        y = self.matmul(x, self._store(weight, x.dtype, transposed=True))
        return y if bias is None else self.add(y, self._store(bias, x.dtype))

    def matmul(self, a: Value, b: Value) -> Value:
        assert a.dtype == b.dtype, (a, b)
        shape = (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        summed = "float32" if a.dtype == "float16" else a.dtype  # bfloat16 products are summed in float32 as they are
        y = self._draw("MatMul", [self.cast(a, summed), self.cast(b, summed)], summed, shape)
        return self.cast(y, a.dtype)

    def attention(self, q: Value, k: Value, v: Value, *, scale: float, mask: Value | None = None, causal: bool = False) -> Value:
        # Not the Attention operator: TensorRT's parser knows no softmax precision for it and builds it for few widths and types.
        return attention_by_parts(self, q, k, v, scale=scale, mask=mask, causal=causal)

    # norms

    def layer_norm(self, x: Value, weight: Stored | None = None, bias: Stored | None = None, *, eps: float) -> Value:
        parts = [self.cast(x, "float32"), self._ones(x) if weight is None else self._store(weight, "float32")]
        if bias is not None:
            parts.append(self._store(bias, "float32"))
        return self.cast(self._draw("LayerNormalization", parts, "float32", x.shape, axis=-1, epsilon=eps), x.dtype)

    def rms_norm(self, x: Value, weight: Stored | None = None, *, eps: float) -> Value:
        parts = [self.cast(x, "float32"), self._ones(x) if weight is None else self._store(weight, "float32")]
        return self.cast(self._draw("RMSNormalization", parts, "float32", x.shape, axis=-1, epsilon=eps), x.dtype)

    def softmax(self, x: Value) -> Value:
        y = self._draw("Softmax", [self.cast(x, "float32")], "float32", x.shape, axis=-1)
        return self.cast(y, x.dtype)

    def hide(self, scores: Value, mask: Value) -> Value:
        hidden = self.cast(self.constant(np.array(HIDDEN, np.float32)), scores.dtype)
        return self._draw("Where", [mask, scores, hidden], scores.dtype, broadcast(scores.shape, mask.shape))

    # element by element

    def gelu(self, x: Value) -> Value:
        return self._draw("Gelu", [x], x.dtype, x.shape)

    def gelu_tanh(self, x: Value) -> Value:
        return self._draw("Gelu", [x], x.dtype, x.shape, approximate="tanh")

    def silu(self, x: Value) -> Value:
        return self.mul(x, self._draw("Sigmoid", [x], x.dtype, x.shape))

    def relu(self, x: Value) -> Value:
        return self._draw("Relu", [x], x.dtype, x.shape)

    def sin(self, x: Value) -> Value:
        return self._draw("Sin", [x], x.dtype, x.shape)

    def cos(self, x: Value) -> Value:
        return self._draw("Cos", [x], x.dtype, x.shape)

    def add(self, a: Value, b: Value | float) -> Value:
        return self._pair("Add", a, b)

    def sub(self, a: Value, b: Value | float) -> Value:
        return self._pair("Sub", a, b)

    def mul(self, a: Value, b: Value | float) -> Value:
        return self._pair("Mul", a, b)

    def equal(self, a: Value, b: Value) -> Value:
        return self._pair("Equal", a, b)._replace(dtype="bool")

    def at_least(self, a: Value, b: Value) -> Value:
        return self._pair("GreaterOrEqual", a, b)._replace(dtype="bool")

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if x.dtype == dtype else self._draw("Cast", [x], dtype, x.shape, to=_TYPES[dtype])

    # moving numbers

    def sum(self, x: Value, axis: int) -> Value:
        shape = list(x.shape)
        shape[axis] = 1
        return self._draw("ReduceSum", [x, self.constant(np.array([axis], np.int64))], x.dtype, tuple(shape), keepdims=1)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return self._draw("Reshape", [x, self.constant(np.array(shape, np.int64))], x.dtype, reshaped(x.shape, shape))

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        return self._draw("Transpose", [x], x.dtype, tuple(x.shape[i] for i in order), perm=list(order))

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        lengths = [v.shape[axis] for v in values]
        shape = list(values[0].shape)
        shape[axis] = total(lengths)
        return self._draw("Concat", list(values), values[0].dtype, tuple(shape), axis=axis)

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        length = x.shape[axis]
        assert isinstance(length, int)
        assert 0 <= start < stop <= length
        shape = list(x.shape)
        shape[axis] = stop - start
        ends = [self.constant(np.array([n], np.int64)) for n in (start, stop, axis)]
        return self._draw("Slice", [x, *ends], x.dtype, tuple(shape))

    def gather(self, table: Value, rows: Value) -> Value:
        return self._draw("Gather", [table, rows], table.dtype, (*rows.shape, *table.shape[1:]), axis=0)

    def count(self, x: Value, axis: int) -> Value:
        axis %= len(x.shape)
        length = self._draw("Shape", [x], "int64", (1,), start=axis, end=axis + 1)
        ends = [self.constant(np.array(0, np.int64)), self.reshape(length, ()), self.constant(np.array(1, np.int64))]
        return self.cast(self._draw("Range", ends, "int64", (x.shape[axis],)), "int32")

    # below: how a stroke becomes protobuf

    def _draw(self, op: str, values: Sequence[Value], dtype: DType, shape: Shape, *, name: str | None = None, **attributes: Any) -> Value:
        self._count += 1
        name = name or f"{op.lower()}_{self._count}"
        self._nodes.append(helper.make_node(op, [v.handle for v in values], [name], name=name, **attributes))
        return Value(name, dtype, shape)

    def _pair(self, op: str, a: Value, b: Value | float) -> Value:
        if not isinstance(b, Value):
            b = self.cast(self.constant(np.array(b, np.float32)), a.dtype)
        assert a.dtype == b.dtype, (op, a, b)
        return self._draw(op, [a, b], a.dtype, broadcast(a.shape, b.shape))

    def _ones(self, x: Value) -> Value:
        width = x.shape[-1]
        assert isinstance(width, int)
        return self.constant(np.ones(width, np.float32))

    def _store(self, stored: Stored, dtype: DType, *, transposed: bool = False) -> Value:
        key = (stored.name, dtype, transposed)
        if key not in self._known:
            array = narrowed(stored, dtype)
            self._known[key] = self._write(stored.name + ("|transposed" if transposed else ""), array.T if transposed else array)
        return self._known[key]

    def _write(self, name: str, array: Vector) -> Value:
        dtype = next(d for d, n in NUMPY.items() if array.dtype == n)
        proto = TensorProto(name=name, data_type=_TYPES[dtype], dims=array.shape)
        if array.nbytes <= INLINE_BYTES:
            proto.raw_data = array.tobytes()
        else:
            self._file.seek(-self._file.tell() % _ALIGN, os.SEEK_CUR)
            place = {"location": self.data.name, "offset": self._file.tell(), "length": array.nbytes}
            proto.data_location = TensorProto.EXTERNAL
            for key, value in place.items():
                proto.external_data.add(key=key, value=str(value))
            _stream(self._file, array)
        self._stored.append(proto)
        return Value(name, dtype, array.shape)

    def _save(self) -> None:
        def edges(values: dict[str, Value]) -> list[onnx.ValueInfoProto]:
            return [
                helper.make_tensor_value_info(name, _TYPES[v.dtype], [n if isinstance(n, int) else n.name for n in v.shape])
                for name, v in values.items()
            ]

        graph = helper.make_graph(self._nodes, self.path.stem, edges(self.inputs), edges(self.outputs), self._stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="vla-eval")
        onnx.save(model, self.path)
        onnx.checker.check_model(str(self.path))


def _stream(file: IO[bytes], array: Vector, rows_bytes: int = 64 << 20) -> None:
    """Write the array in pieces, so that a transposed one is never held twice."""
    rows = max(1, rows_bytes // max(1, array.nbytes // max(1, len(array))))
    for start in range(0, len(array), rows):
        np.ascontiguousarray(array[start : start + rows]).tofile(file)
