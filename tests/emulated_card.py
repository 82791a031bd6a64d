"""A card that is not there: cuda-python's calls in host memory, and plans that ONNX Runtime answers, so that the runtime runs on a CPU.

What it cannot show (kernels, real captures, TensorRT's own answers) the tests under tests/gpu do.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
import types
from collections.abc import Callable, Sequence
from enum import IntEnum
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from vla_eval.engines import few_rows, kernels, many_rows, trt
from vla_eval.engines.bundle import Bundle, Component
from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.graph import NUMPY
from vla_eval.engines.trt_build import plan_file, write_plan

LABEL = b"a plan that ONNX Runtime answers: "
Work = Callable[[], None]
PLAYED: dict[Any, tuple[Any, dict[Any, Any]]] = {}  # by the digests of a graph and its weights: its session, and outputs' shapes by inputs'


class Error(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureUnsupported = 900


class Emulated:
    """What the process's only card holds; tests make captures fail, its memory small, or a component overflow."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.events: dict[int, float] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.recording: list[Work] | None = None
        self.refuse_capture, self.room, self.launches, self.replays, self.enqueued, self.copies = False, 1 << 32, 0, 0, 0, 0
        self.spoil = ""  # the component whose answers are infinite
        self._handles = itertools.count(1000)

    # memory

    def used(self) -> int:
        return sum(ctypes.sizeof(block) for block in self.blocks.values())

    def malloc(self, size: int, into: dict[int, Any] | None = None) -> tuple[Error, int]:
        if into is None and self.used() + size > self.room:
            return Error.cudaErrorMemoryAllocation, 0
        block = (ctypes.c_ubyte * (size + 256))()
        ctypes.memset(block, 0xFF, size + 256)  # NaN: nobody may count on zeros
        address = -(-ctypes.addressof(block) // 256) * 256
        (self.blocks if into is None else into)[address] = block
        return Error.cudaSuccess, address

    def free(self, pointer: int) -> tuple[Error]:
        if pointer:
            del (self.blocks if pointer in self.blocks else self.pinned)[pointer]
        return (Error.cudaSuccess,)

    # work

    def do(self, work: Work) -> tuple[Error]:
        if self.recording is None:
            work()
        else:
            self.recording.append(work)
        return (Error.cudaSuccess,)

    def copy(self, to: int, source: int, size: int, kind: Any, stream: int) -> tuple[Error]:
        assert not isinstance(to, np.generic)

        def work() -> None:
            self.copies += 1
            ctypes.memmove(to, source, size)

        return self.do(work)

    def begin(self, stream: int, mode: Any) -> tuple[Error]:
        if self.refuse_capture:
            return (Error.cudaErrorStreamCaptureUnsupported,)
        self.recording = []
        return (Error.cudaSuccess,)

    def end(self, stream: int) -> tuple[Error, int]:
        assert self.recording is not None
        handle = next(self._handles)
        self.graphs[handle], self.recording = self.recording, None
        return Error.cudaSuccess, handle

    def instantiate(self, graph: int, flags: int) -> tuple[Error, int]:
        handle = next(self._handles)
        self.graphs[handle] = list(self.graphs[graph])
        return Error.cudaSuccess, handle

    def replay(self, graph: int, stream: int) -> tuple[Error]:
        self.replays += 1
        for work in self.graphs[graph]:
            work()
        return (Error.cudaSuccess,)

    def drop(self, graph: int) -> tuple[Error]:
        del self.graphs[graph]
        return (Error.cudaSuccess,)

    def event(self) -> tuple[Error, int]:
        handle = next(self._handles)
        self.events[handle] = 0.0
        return Error.cudaSuccess, handle

    def forget(self, event: int) -> tuple[Error]:
        del self.events[event]
        return (Error.cudaSuccess,)

    def record(self, event: int, stream: int, flags: int) -> tuple[Error]:
        assert bool(flags) == (self.recording is not None), "the external flag is for captures, and captures are for it"
        return self.do(lambda: self.events.__setitem__(event, time.perf_counter()))

    def elapsed(self, start: int, end: int) -> tuple[Error, float]:
        return Error.cudaSuccess, 1e3 * (self.events[end] - self.events[start])

    def launch(
        self, name: str, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, given: Any, extra: int
    ) -> Any:
        values, kinds = given
        assert len(values) == len(kinds)
        assert (gy, gz, by, bz, shared, extra) == (1, 1, 1, 1, 0, 0)
        return self.do(lambda: self._kernel(name, gx, values))

    def _kernel(self, name: str, blocks: int, values: Sequence[Any]) -> None:
        self.launches += 1
        if name == "euler":
            x, v, dt, count = values
            at(x, (count,), np.float32)[:] = kernels.euler(at(x, (count,), np.float32), at(v, (count,), np.float32), dt)
        elif name == "place":
            table, ids, features, slots, out, words = values
            where = at(slots, (blocks,), np.int32)
            row = words * kernels.WORD
            seen = at(features, (int(where.max()) + 1, row), np.uint8)
            names = at(ids, (blocks,), np.int64)
            known = at(table, (int(names.max()) + 1, row), np.uint8) if table else None
            at(out, (blocks, row), np.uint8)[:] = kernels.place(known, names, seen, where)
        elif name in kernels.STRETCHES:
            x, y, *tables, tall, wide, rows, columns, k, l, count = values
            pairs = [(rows, k)] * 2 + [(columns, l)] * 2
            down, down_weight, across, across_weight = (at(*table, np.int32) for table in zip(tables, pairs, strict=True))
            by = kernels.Stretch(name, kernels.Taps(down, down_weight), kernels.Taps(across, across_weight))
            views = count // (rows * columns * 3)
            pictures = at(x, (views, tall, wide, 3), np.uint8)
            at(y, (views, rows, columns, 3), np.uint8)[:] = kernels.stretch(pictures, by)
        elif name.startswith("look_up_"):
            x, order, table, y, size, numbers, count = values
            word, views = {"2": np.uint16, "4": np.uint32}[name[-1]], count // numbers
            found = kernels.look_up(at(x, (views, size), np.uint8), at(order, (numbers,), np.int32), at(table, (256,), word))
            at(y, (views, numbers), word)[:] = found
        else:
            x, y, count = values
            kind = name.removeprefix("to_")
            at(y, (count,), NUMPY[kind])[:] = kernels.narrow(at(x, (count,), np.float32), kind)  # type: ignore[index]

    def modules(self) -> dict[str, types.ModuleType]:
        """cuda.bindings as the code imports it."""
        ok = (Error.cudaSuccess,)
        runtime, driver, parent = (
            types.ModuleType("cuda.bindings.runtime"),
            types.ModuleType("cuda.bindings.driver"),
            sys.modules["cuda.bindings"],
        )
        for name, value in {
            "cudaError_t": Error, "cudaStreamNonBlocking": 1, "cudaEventRecordExternal": 1,
            "cudaMemcpyKind": types.SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2),
            "cudaStreamCaptureMode": types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=1),
            "cudaDeviceAttr": types.SimpleNamespace(cudaDevAttrComputeCapabilityMajor=9, cudaDevAttrComputeCapabilityMinor=0),
            "cudaGetDeviceCount": lambda: (*ok, 1), "cudaSetDevice": lambda n: ok, "cudaDeviceGetAttribute": lambda kind, n: (*ok, kind),
            "cudaGetDeviceProperties": lambda n: (*ok, types.SimpleNamespace(name=b"Emulated")), "cudaGetLastError": lambda: ok,
            "cudaStreamCreateWithFlags": lambda flags: (*ok, 77), "cudaStreamDestroy": lambda stream: ok,
            "cudaStreamSynchronize": lambda stream: ok, "cudaMemGetInfo": lambda: (*ok, self.room - self.used(), self.room),
            "cudaMalloc": self.malloc, "cudaFree": self.free, "cudaMallocHost": lambda size: self.malloc(size, self.pinned),
            "cudaFreeHost": self.free, "cudaMemcpyAsync": self.copy, "cudaStreamBeginCapture": self.begin, "cudaStreamEndCapture": self.end,
            "cudaGraphInstantiate": self.instantiate, "cudaGraphLaunch": self.replay, "cudaGraphDestroy": self.drop,
            "cudaGraphExecDestroy": self.drop, "cudaEventCreate": self.event, "cudaEventRecordWithFlags": self.record,
            "cudaEventElapsedTime": self.elapsed, "cudaEventDestroy": self.forget,
        }.items():  # fmt: skip
            setattr(runtime, name, value)
        for name, value in {
            "cuModuleLoadData": lambda code: (*ok, "module"), "cuModuleUnload": lambda module: ok,
            "cuModuleGetFunction": lambda module, name: (*ok, name.decode()), "cuLaunchKernel": self.launch,
        }.items():  # fmt: skip
            setattr(driver, name, value)
        both = types.ModuleType("cuda.bindings")
        both.runtime, both.driver, both.nvrtc = runtime, driver, parent.nvrtc  # type: ignore[attr-defined]
        return {"cuda.bindings": both, "cuda.bindings.runtime": runtime, "cuda.bindings.driver": driver}


def at(pointer: int, shape: Sequence[int], kind: Any) -> Any:
    """The numbers that lie there."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(pointer)).view(kind).reshape(tuple(shape))


class Context:
    """An execution context over an ONNX Runtime session."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.shapes, self.places = engine, dict[str, tuple[int, ...]](), dict[str, int]()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        spec = next(spec for spec in self.engine.component.inputs if spec.name == name)
        self.shapes[name] = shape
        return len(shape) == len(spec.shape) and all(
            n == axis if isinstance(axis, int) else axis[0] <= n <= axis[2] for n, axis in zip(shape, spec.shape, strict=True)
        )

    def infer_shapes(self) -> list[str]:
        return [spec.name for spec in self.engine.component.inputs if spec.name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        given, said = tuple(sorted(self.shapes.items())), self.engine.said
        if given not in said:
            zeros = {spec.name: np.zeros(self.shapes[spec.name], spec.dtype) for spec in self.engine.component.inputs}
            said[given] = {name: array.shape for name, array in self.engine.answer(zeros).items()}
        shape: tuple[int, ...] = said[given][name]
        return shape

    def set_tensor_address(self, name: str, pointer: int) -> bool:
        assert pointer % 256 == 0
        self.places[name] = pointer
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == 77
        places, shapes = dict(self.places), dict(self.shapes)

        def work() -> None:
            inputs = {spec.name: at(places[spec.name], shapes[spec.name], spec.dtype).copy() for spec in self.engine.component.inputs}
            for name, array in self.engine.answer(inputs).items():
                at(places[name], array.shape, array.dtype)[...] = np.inf if self.engine.component.name == self.engine.card.spoil else array

        self.engine.card.enqueued += 1
        self.engine.card.do(work)
        return True


class Engine:
    """A loaded plan."""

    device_memory_size_v2 = 1 << 20

    def __init__(self, component: Component, card: Emulated) -> None:
        import onnxruntime

        self.component, self.card = component, card
        self.specs = {
            spec.name: (mode, spec) for mode, side in (("INPUT", component.inputs), ("OUTPUT", component.outputs)) for spec in side
        }
        self.num_io_tensors = len(self.specs)
        graph = component.folder / f"{component.name}.onnx"
        of = tuple(told["sha256"] for file, told in sorted(component.config["artifacts"].items()) if ".onnx" in file)
        if of not in PLAYED:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            options.intra_op_num_threads = 1
            PLAYED[of] = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"]), {}
        self._session, self.said = PLAYED[of]

    def answer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        names = [spec.name for spec in self.component.outputs]
        return dict(zip(names, self._session.run(names, inputs), strict=True))

    def get_tensor_name(self, i: int) -> str:
        return list(self.specs)[i]

    def get_tensor_mode(self, name: str) -> Any:
        return getattr(trt.door().api.TensorIOMode, self.specs[name][0])

    def get_tensor_dtype(self, name: str) -> Any:
        from vla_eval.engines.trt_pen import TYPES

        return getattr(trt.door().api.DataType, TYPES[self.specs[name][1].dtype])  # type: ignore[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else -1 for n in self.specs[name][1].shape)

    def create_runtime_config(self) -> Any:
        return types.SimpleNamespace()  # of a TensorRT that compiles nothing at load

    def create_execution_context(self, settings: Any) -> Context:
        return Context(self)


class Api:
    """TensorRT, but for loading plans."""

    def __init__(self, real: Any, card: Emulated, components: dict[bytes, Component]) -> None:
        self._real = real
        self.Runtime = lambda logger: types.SimpleNamespace(
            deserialize_cuda_engine=lambda data: Engine(components[bytes(data)], card) if bytes(data) in components else None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def rows_from(pointer: int, width: int, padded: int, rows: int, kind: Any) -> Any:
    """Rows [T, K] out of [K / 8, R, 8]."""
    return at(pointer, (width // 8, padded, 8), kind)[:, :rows].transpose(1, 0, 2).reshape(rows, width).astype(np.float32)


def rows_to(pointer: int, padded: int, rows: Any, kind: Any) -> None:
    count, width = rows.shape
    at(pointer, (width // 8, padded, 8), kind)[:, :count] = rows.reshape(count, -1, 8).transpose(1, 0, 2).astype(kind)


class Rows(few_rows.FewRows):
    """Kernels of our own, played by their numpy twins on the same buffers, packed weights and sums included."""

    emulated: Emulated

    def __init__(
        self,
        card: Card,
        products: Sequence[few_rows.Product],
        rows: int,
        *,
        dtype: str,
        head_width: int,
        looks: Sequence[few_rows.Look] = (),
    ) -> None:
        self.card, self.rows, self._head_width = card, rows, head_width
        self.tiles = {product: few_rows.tile_for(product, self.rows) for product in products}
        self._kind = NUMPY[dtype]  # type: ignore[index]

    def _launch(self, name: str, fields: Any, values: Any, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} is not played")

    def _do(self, work: Work) -> None:
        self.emulated.launches += 1
        self.emulated.do(work)

    def product(self, product: few_rows.Product, *, rows: int | None = None, **v: Any) -> None:
        tile, count = self.tiles[product], self.rows if rows is None else rows
        named = {name: value.pointer for name, value in v.items() if isinstance(value, Buffer)}  # as they are bound now

        def work() -> None:
            x = rows_from(named["rows_in"], tile.inputs, self.rows, count, self._kind)
            cut = at(named["weight"], tile.packed, self._kind)
            weight = cut.transpose(0, 4, 1, 2, 3, 5).reshape(tile.outputs, tile.inputs).astype(np.float32)
            outputs = product.outputs // 2 if product.out == "GATE_UP" else product.outputs
            known: dict[str, Any] = {name: at(named[name], (outputs,), np.float32) for name in ("bias", "lost", "gate") if name in named}
            if product.out == "GATE_UP":
                share = tile.width // tile.cluster
                weight = weight.reshape(-1, 2, share // 2, tile.inputs).transpose(1, 0, 2, 3).reshape(tile.outputs, tile.inputs)
                known["bias"] = np.concatenate([known["bias"], known.pop("lost")])
            if "late" in named:
                known["late"] = at(named["late"], (outputs,), self._kind).astype(np.float32)
            if "stats" in named:
                whole = at(named["stats"], (few_rows.COPIES, self.rows, 2), np.int64).sum(0)[:count]
                known["stats"] = (whole / [few_rows.SUM_UNIT, few_rows.SQUARE_UNIT]).astype(np.float32)
            if "base" in named:
                known["base"] = rows_from(named["base"], outputs, self.rows, count, np.float32)
            exact = few_rows.Product(tile.inputs if product.norm == "NONE" else product.inputs, product.outputs, product.norm, product.out)
            y = few_rows.product(x, weight[: product.outputs], exact, eps=v.get("eps", 0.0), first=v.get("first", 0), **known)
            if product.out == "VELOCITY":
                at(named["wide"], (count - v["first"], outputs), np.float32)[:] = y[v["first"] :]
                return
            if "wide" in named:
                rows_to(named["wide"], self.rows, y, np.float32)
            if "told" in named:
                at(named["told"], (few_rows.COPIES, self.rows, 2), np.int64)[2, :count] += np.rint(
                    few_rows.sums(y) * [few_rows.SUM_UNIT, few_rows.SQUARE_UNIT]
                ).astype(np.int64)
            if "narrow" in named:
                y = y * at(named["scale"], (outputs,), np.float32) if "scale" in named else y
                if v.get("out_width"):
                    at(named["narrow"], (count, v["out_width"]), self._kind)[:, :outputs] = y
                else:
                    rows_to(named["narrow"], self.rows, y, self._kind)

        self._do(work)

    def look(self, look: few_rows.Look, keys: int, **v: Any) -> None:
        named = {name: value.pointer for name, value in v.items() if isinstance(value, Buffer)}
        w, n = look.width, look.asked.outputs

        def work() -> None:
            x = rows_from(named["rows_in"], w, self.rows, self.rows, self._kind)
            weight = look.unpack(at(named["weight"], look.packed, self._kind)).astype(np.float32)
            whole = at(named["stats"], (few_rows.COPIES, self.rows, 2), np.int64).sum(0)[: self.rows]
            context = None
            if not look.own:
                k, v_ = (at(named[letter], (keys, w), self._kind).astype(np.float32) for letter in "kv")
                context = k, v_, at(named["mask"], (keys,), np.bool_)
            seen = few_rows.look(
                x, weight, look, bias=at(named["bias"], (n,), np.float32), lost=at(named["lost"], (n,), np.float32),
                stats=(whole / [few_rows.SUM_UNIT, few_rows.SQUARE_UNIT]).astype(np.float32), eps=v["eps"], context=context,
            )  # fmt: skip
            rows_to(named["out"], self.rows, seen, self._kind)

        self._do(work)

    def attention_shared(self, heads: int, keys: int, **v: Any) -> None:
        own, k, v_, rotary, out = (v[name].pointer for name in ("own", "k", "v", "rotary", "out"))
        d = self._head_width

        def work() -> None:
            parts = at(own, (self.rows, heads + 2, d), self._kind).astype(np.float32)
            table = at(rotary, (self.rows, 1, d), np.float32)
            a, b, cos, sin = parts[..., : d // 2], parts[..., d // 2 :], table[..., : d // 2], table[..., d // 2 :]
            turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            both = [
                np.repeat(np.concatenate([at(pointer, (keys, d), self._kind).astype(np.float32), mine])[:, None], heads, 1).reshape(
                    -1, heads * d
                )
                for pointer, mine in ((k, turned[:, heads]), (v_, parts[:, heads + 1]))
            ]
            seen = few_rows.attention(turned[:, :heads].reshape(self.rows, -1), both[0], both[1], heads)
            rows_to(out, self.rows, seen, self._kind)

        self._do(work)

    def begin(self, **v: Any) -> None:
        named = {name: value.pointer for name, value in v.items() if isinstance(value, Buffer)}

        def work() -> None:
            at(named["stats"], (v["slots"], few_rows.COPIES, self.rows, 2), np.int64)[:] = 0
            if "x" in named:
                rows, first = v.get("rows", self.rows), v["first"]
                x = np.zeros((rows, v["padded"]), np.float32)
                x[first:, : v["width"]] = at(named["x"], (rows - first, v["width"]), np.float32)
                rows_to(named["out"], self.rows, np.concatenate([x, np.zeros((self.rows - rows, v["padded"]))]), self._kind)

        self._do(work)

    def project_in(self, inputs: int, outputs: int, **v: Any) -> None:
        named = {name: value.pointer for name, value in v.items()}

        def work() -> None:
            x = at(named["x"], (self.rows, inputs), np.float32) @ at(named["weight"], (inputs, outputs), np.float32)
            x = (x + at(named["bias"], (outputs,), np.float32)).astype(self._kind).astype(np.float32)
            rows_to(named["wide"], self.rows, x, np.float32)
            rows_to(named["narrow"], self.rows, x * at(named["scale"], (outputs,), np.float32), self._kind)
            whole = np.rint(few_rows.sums(x) * [few_rows.SUM_UNIT, few_rows.SQUARE_UNIT]).astype(np.int64)
            at(named["told"], (few_rows.COPIES, self.rows, 2), np.int64)[1, : self.rows] += whole

        self._do(work)

    def project_out(self, inputs: int, outputs: int, **v: Any) -> None:
        named = {name: value.pointer for name, value in v.items() if isinstance(value, Buffer)}

        def work() -> None:
            x = rows_from(named["wide"], inputs, self.rows, self.rows, np.float32)
            normed = x / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(v["eps"]))
            y = normed * at(named["scale"], (inputs,), np.float32) + at(named["shift"], (inputs,), np.float32)
            y = y @ at(named["weight"], (outputs, inputs), np.float32).T + at(named["bias"], (outputs,), np.float32)
            at(named["out"], (self.rows, outputs), np.float32)[:] = y

        self._do(work)


class Many(many_rows.ManyRows):
    """Products and what stands between them, played by their numpy twins on the same buffers."""

    emulated: Emulated

    def __init__(
        self, card: Card, *, dtype: str, turned: tuple[int, ...] = (), attended: tuple[int, ...] = (), turning: tuple[int, ...] = ()
    ) -> None:
        self.card, self.dtype, self._kind = card, dtype, NUMPY[dtype]  # type: ignore[index]
        self._widths = turned, attended, turning

    def _launch(self, name: str, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} is not played")

    def _do(self, work: Work) -> None:
        self.emulated.launches += 1
        self.emulated.do(work)

    def _half(self, buffer: Buffer, *shape: int) -> Any:
        return at(buffer.pointer, shape or buffer.shape, self._kind)

    def product(
        self, x: Buffer, weight: Buffer, out: Buffer, *, bias: Buffer | None = None, base: Buffer | None = None,
        follow: many_rows.Follow = "", every: int = 1,
    ) -> None:  # fmt: skip
        *many, outputs, inputs = weight.shape
        apart = many if many and len(x.shape) == len(weight.shape) else []
        rows = int(np.prod(x.shape)) // inputs // int(np.prod(apart))

        def work() -> None:
            known: dict[str, Any] = {} if bias is None else {"bias": wide(self._half(bias))[..., None, :]}
            known |= {} if base is None else {"base": wide(self._half(base, rows, outputs))}
            y = many_rows.product(wide(self._half(x, *apart, rows, inputs)), wide(self._half(weight)), follow=follow, **known)
            if every > 1:
                self._half(out, rows, every, outputs)[:, 0] = y
            else:
                self._half(out, *many, rows, outputs)[:] = y

        self._do(work)

    def norm(
        self, x: Buffer, out: Buffer, *, weight: Buffer | None = None, bias: Buffer | None = None, eps: float, layer: bool,
        more: Buffer | None = None, width: int | None = None, modulation: tuple[Buffer, Buffer] | None = None,
    ) -> None:  # fmt: skip
        width = width or x.shape[-1]
        rows = int(np.prod(x.shape)) // width
        assert int(np.prod(out.shape)) == rows * width

        def work() -> None:
            here = self._half(x, rows, width)
            if more is not None:
                here[:] = wide(here) + wide(self._half(more, rows, width))
            shift: Any = 0.0 if bias is None else at(bias.pointer, (width,), np.float32)
            scale: Any = 1.0 if weight is None else at(weight.pointer, (width,), np.float32)
            if modulation is not None:
                scale, shift = 1 + wide(self._half(modulation[0], width)), wide(self._half(modulation[1], width))
            y = many_rows.norm(wide(here), weight=scale, bias=shift, eps=eps, layer=layer)
            self._half(out, rows, width)[:] = y

        self._do(work)

    def turn(
        self, x: Buffer, table: Buffer, heads: tuple[int, int], *, q: Buffer, k: Buffer, v: Buffer | None = None, q_stride: int,
        kv_stride: int, q_norm: Buffer | None = None, k_norm: Buffer | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        d, rows = table.shape[-1], int(np.prod(table.shape[:-1]))
        assert d in self._widths[0]

        def work() -> None:
            asked = wide(self._half(x, rows, x.shape[-1])).reshape(rows, -1, d)
            numbers = at(table.pointer, (rows, d), np.float32)
            weights = [None if norm is None else at(norm.pointer, (d,), np.float32) for norm in (q_norm, k_norm)]
            parts = asked[:, : heads[0]], asked[:, heads[0] : heads[0] + heads[1]], asked[:, heads[0] + heads[1] :]
            turned = [many_rows.turn(part, numbers, weight, eps) for part, weight in zip(parts, weights, strict=False)]
            for part, into, stride in ((turned[0], q, q_stride), (turned[1], k, kv_stride), *([(parts[2], v, kv_stride)] if v else [])):
                put(into.pointer, stride, part.reshape(rows, -1), self._kind)

        self._do(work)

    def attention(
        self, q: Buffer, k: Buffer, v: Buffer, out: Buffer, *, heads: tuple[int, int], width: int, rows: int, length: int, q_stride: int,
        kv_stride: int, causal: bool = False, table: Buffer | None = None, keys: int | None = None, mask: Buffer | None = None,
    ) -> None:  # fmt: skip
        assert width in self._widths[1 if table is None else 2]

        def work() -> None:
            asked = [
                strided(x.pointer, rows // length * each, stride, count * width, self._kind).reshape(rows // length, each, count, width)
                for x, stride, count, each in (
                    (q, q_stride, heads[0], length),
                    (k, kv_stride, heads[1], keys or length),
                    (v, kv_stride, heads[1], keys or length),
                )
            ]
            if table is not None:
                numbers = at(table.pointer, (rows, width), np.float32)
                for i, count in enumerate(heads):
                    turned = many_rows.turn(asked[i].reshape(rows, count, width), numbers)
                    asked[i] = wide(turned.astype(self._kind)).reshape(asked[i].shape)
            shown = [None] * len(asked[0]) if mask is None else at(mask.pointer, (len(asked[0]), keys or length), np.bool_)
            seen = [many_rows.attention(*parts, causal=causal, mask=one) for *parts, one in zip(*asked, shown, strict=True)]
            self._half(out, rows, heads[0] * width)[:] = np.concatenate(seen).reshape(rows, -1)

        self._do(work)

    def gate(self, x: Buffer, out: Buffer, kind: many_rows.Gate, *, more: Buffer | None = None, period: int = 0) -> None:
        width = out.shape[-1]

        def work() -> None:
            given = wide(self._half(x, *out.shape[:-1], width * (2 if kind.startswith("gated") else 1)))
            added = 0.0 if more is None else wide(self._half(more, width))
            self._half(out)[:] = many_rows.gate(given, kind, more=added, period=period)

        self._do(work)

    def spread(self, x: Buffer, out: Buffer, *, per: int, skip: int) -> None:
        sequences, width = int(np.prod(x.shape[:-1])) // per, out.shape[-1]

        def work() -> None:
            given = at(x.pointer, (sequences, per, x.shape[-1]), np.float32)
            self._half(out, sequences, skip + per, width)[:] = many_rows.spread(given, width, skip=skip)

        self._do(work)

    def gather(self, x: Buffer, out: Buffer, *, per: int, skip: int) -> None:
        outputs = out.shape[-1]
        sequences = int(np.prod(out.shape)) // outputs // per

        def work() -> None:
            given = wide(self._half(x, sequences, skip + per, x.shape[-1]))
            at(out.pointer, (sequences, per, outputs), np.float32)[:] = many_rows.gather(given, outputs, skip=skip)

        self._do(work)

    def corners(self, table: Buffer, index: Buffer, share: Buffer, out: Buffer) -> None:
        def work() -> None:
            places = at(index.pointer, index.shape, np.int64)
            self._half(out)[:] = many_rows.corners(wide(self._half(table)), places, wide(self._half(share)))

        self._do(work)

    def angles(self, angles: Buffer, table: Buffer) -> None:
        def work() -> None:
            given = at(angles.pointer, angles.shape, np.float32)
            at(table.pointer, table.shape, np.float32)[:] = np.concatenate([np.cos(given), np.sin(given)], 1)

        self._do(work)

    def patches(self, x: Buffer, out: Buffer, patch: int) -> None:
        self._do(lambda: self._half(out).__setitem__(slice(None), many_rows.patches(wide(self._half(x)), patch, out.shape[-1])))


def wide(array: Any) -> Any:
    return array.astype(np.float32)


def put(pointer: int, stride: int, rows: Any, kind: Any) -> None:
    """Rows into a wider table."""
    _table(pointer, stride, rows.shape, kind)[:] = rows


def strided(pointer: int, rows: int, stride: int, width: int, kind: Any) -> Any:
    """[rows, width] of a wider table, which may end with the last row's width."""
    return _table(pointer, stride, (rows, width), kind).astype(np.float32)


def _table(pointer: int, stride: int, shape: tuple[int, int], kind: Any) -> Any:
    rows, width = shape
    flat = at(pointer, ((rows - 1) * stride + width,), kind)
    return np.lib.stride_tricks.as_strided(flat, shape, (stride * flat.itemsize, flat.itemsize))


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Emulated, Callable[[Bundle], None]]:
    """The card in cuda-python's and TensorRT's place, and a function that puts plans beside a bundle's graphs."""
    import_module("cuda.bindings.nvrtc")  # the real one: kernels are really compiled
    card, components, flavour = Emulated(), dict[bytes, Component](), trt.door()
    stands_in = trt.Flavour(flavour.name, flavour.version, Api(flavour.api, card, components))
    monkeypatch.setattr(trt, "door", lambda: stands_in)
    for name, module in card.modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    Rows.emulated = Many.emulated = card
    monkeypatch.setattr("vla_eval.policies.on_rows.ManyRows", Many)
    monkeypatch.setattr("vla_eval.policies.components.blas", object)  # as if it were installed
    for room in ("gr00t.dit", "pi05.expert"):
        monkeypatch.setattr(f"vla_eval.policies.{room}.FewRows", Rows)

    def plans(bundle: Bundle) -> None:
        for component in bundle.components.values():
            data = LABEL + str(component.folder).encode()
            components[data] = component
            write_plan(plan_file(component, "sm90"), data, {}, component.name, component.config, "sm90", 0.0, inspection="emulated")

    return card, plans
