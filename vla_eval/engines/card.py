"""One GPU as a runtime sees it: a stream of its own, memory that is freed on close, launches, graphs, events. Every return is checked."""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..types import BadRequest, Vector, VlaEvalError
from . import kernels
from .graph import NUMPY
from .kernels import Stretch

_log = logging.getLogger(__name__)
INSTALL = "install vla-eval-trt[tensorrt] or vla-eval-trt[rtx], which bring cuda-python"


class OutOfMemory(VlaEvalError):
    """The card has no room for what was asked."""


class Buffer:
    """A tensor in the card's memory; lives as long as its card. `np.asarray` on it raises: `to_host` is the one way home."""

    __slots__ = ("card", "dtype", "pointer", "shape")

    def __init__(self, card: Card, pointer: int, shape: tuple[int, ...], dtype: str) -> None:
        self.card, self.pointer, self.shape, self.dtype = card, pointer, shape, dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(NUMPY[self.dtype]).itemsize  # type: ignore[index]

    def part(self, first: int, shape: Sequence[int]) -> Buffer:
        """The same memory from number `first` on, in another shape; it is freed with the whole."""
        size = np.dtype(NUMPY[self.dtype]).itemsize  # type: ignore[index]
        view = Buffer(self.card, self.pointer + first * size, tuple(shape), self.dtype)
        assert view.pointer + view.bytes <= self.pointer + self.bytes
        return view

    def to_host(self) -> Vector:
        """A copy as a numpy array; waits for the stream."""
        host = np.empty(self.shape, NUMPY[self.dtype])  # type: ignore[index]
        self.card.download(self, host)
        self.card.wait()
        return host

    def __array__(self, *_: Any, **__: Any) -> Vector:
        raise TypeError("this tensor lives on the GPU; to_host() copies it to the host")


class Card:
    """The first visible GPU, with a stream of its own. Not thread-safe: one runtime, one thread, one card object."""

    def __init__(self) -> None:
        """Raises BadRequest where there is no GPU or no cuda-python."""
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise BadRequest(f"cuda-python is missing; {INSTALL}") from error
        self._runtime, self._driver = runtime, driver
        status, count = runtime.cudaGetDeviceCount()
        if int(status) or not count:
            raise BadRequest(f"no GPU answers here ({_name(status)}); run with --option backend=onnxruntime, or on a machine with one")
        self._call(runtime.cudaSetDevice(0))
        self._call(runtime.cudaFree(0))  # makes the context
        kinds = runtime.cudaDeviceAttr
        major, minor = (
            self._call(runtime.cudaDeviceGetAttribute(kind, 0))
            for kind in (kinds.cudaDevAttrComputeCapabilityMajor, kinds.cudaDevAttrComputeCapabilityMinor)
        )
        self.sm = f"sm{major}{minor}"
        name = self._call(runtime.cudaGetDeviceProperties(0)).name
        self.name = name.decode(errors="replace").strip("\0") if isinstance(name, bytes) else str(name)
        self.stream = int(self._call(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
        self.allocated = 0  # bytes in buffers
        self._owned: dict[object, tuple[Any, Any]] = {}  # how to free what, oldest first
        self._kernels = self.kernels(kernels.compiled(kernels.SOURCE, self.sm), kernels.NAMES)
        self._close = weakref.finalize(self, _release, self._owned, runtime, self.stream)

    # memory

    def free_bytes(self) -> int:
        """What the card has left."""
        return int(self._call(self._runtime.cudaMemGetInfo(), both=True)[0])

    def empty(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A buffer whose numbers are whatever was there. Raises OutOfMemory."""
        buffer = Buffer(self, 0, tuple(int(n) for n in shape), dtype)
        buffer.pointer = self.allocate(buffer.bytes)
        return buffer

    def allocate(self, size: int) -> int:
        """The address of that many bytes, aligned to 256. Raises OutOfMemory with a sentence."""
        status, pointer = self._runtime.cudaMalloc(max(size, 256))
        if status == self._runtime.cudaError_t.cudaErrorMemoryAllocation:
            self._runtime.cudaGetLastError()
            raise OutOfMemory(
                f"{self.name} has {self.free_bytes() / 1e9:.2f} GB left and cannot give {size / 1e9:.2f} GB more; end what else uses it"
            )
        self._call((status, pointer))
        self._owned[int(pointer)] = self._runtime.cudaFree, pointer
        self.allocated += size
        return int(pointer)

    def free(self, *buffers: Buffer) -> None:
        """Give buffers back before the card is closed; waits, since work that was given to the stream may still use them."""
        self.wait()
        for buffer in buffers:
            how, what = self._owned.pop(buffer.pointer)
            self._call(how(what))
            self.allocated -= buffer.bytes

    def unpin(self, *arrays: Vector) -> None:
        """Give page-locked memory back; the arrays must not be touched again."""
        self.wait()
        for array in arrays:
            how, what = self._owned.pop(array.ctypes.data)
            self._call(how(what))

    def pinned(self, shape: Sequence[int], dtype: str) -> Vector:
        """Page-locked host memory as an array: copies from and to it need no staging. Valid until the card is closed."""
        kind = np.dtype(NUMPY[dtype])  # type: ignore[index]
        size = max(math.prod(shape) * kind.itemsize, 1)
        pointer = self._call(self._runtime.cudaMallocHost(size))
        self._owned[int(pointer)] = self._runtime.cudaFreeHost, pointer
        array: Vector = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(int(pointer)))
        return array[: math.prod(shape) * kind.itemsize].view(kind).reshape(tuple(shape))

    def load(self, array: Vector) -> Buffer:
        """The array's numbers in a buffer of their own; waits."""
        array = np.ascontiguousarray(array)
        buffer = self.empty(array.shape, _dtype(array))
        self.upload(array, buffer)
        self.wait()
        return buffer

    def upload(self, array: Vector, into: Buffer) -> None:
        """Host to device, in the stream's order. The array must stay as it is until the stream has passed."""
        assert array.nbytes == into.bytes, (array.shape, array.dtype, into.shape, into.dtype)
        assert array.flags.c_contiguous
        self._copy(into.pointer, array.ctypes.data, array.nbytes, self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def download(self, buffer: Buffer, into: Vector) -> None:
        """Device to host, in the stream's order."""
        assert into.nbytes == buffer.bytes
        assert into.flags.c_contiguous
        self._copy(into.ctypes.data, buffer.pointer, buffer.bytes, self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def _copy(self, to: int, source: int, size: int, kind: Any) -> None:
        if size:
            self._call(self._runtime.cudaMemcpyAsync(to, source, size, kind, self.stream))

    # work

    def wait(self) -> None:
        """Until everything that was given to the stream is done."""
        self._call(self._runtime.cudaStreamSynchronize(self.stream))

    def launch(self, name: str, blocks: int, threads: int, *arguments: tuple[Any, Any]) -> None:
        """One of `kernels.NAMES`; arguments are (value, ctypes type)."""
        values, types = tuple(value for value, _ in arguments), tuple(kind for _, kind in arguments)
        self._call(self._driver.cuLaunchKernel(self._kernels[name], blocks, 1, 1, threads, 1, 1, 0, self.stream, (values, types), 0))

    def kernels(self, code: bytes, names: Sequence[str]) -> dict[str, Any]:
        """Kernels out of machine code for this card, by name; they stay until the card is closed."""
        module = self._call(self._driver.cuModuleLoadData(code))
        self._owned["module", len(self._owned), id(module)] = self._driver.cuModuleUnload, module
        return {name: self._call(self._driver.cuModuleGetFunction(module, name.encode())) for name in names}

    def allow_shared(self, kernel: Any, size: int) -> None:
        """Let blocks of the kernel have that many bytes of shared memory."""
        most = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call(self._driver.cuFuncSetAttribute(kernel, most, size))

    def launch_kernel(
        self, kernel: Any, argument: ctypes.Structure, blocks: int | tuple[int, int, int], threads: int, *, cluster: int = 1,
        shared: int = 0, early: bool = False,
    ) -> None:  # fmt: skip
        """A kernel with one structure as its argument; `early` lets it begin before its predecessor has ended: it must wait itself."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, self.stream
        attributes = []
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
            attributes.append(attribute)
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self._call(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(arguments), 0))

    def euler(self, x: Buffer, v: Buffer, dt: float) -> None:
        """x += dt·v, both float32."""
        count = math.prod(x.shape)
        assert x.dtype == v.dtype == "float32"
        assert count == math.prod(v.shape)
        pointer = ctypes.c_void_p
        self.launch("euler", -(-count // 256), 256, (x.pointer, pointer), (v.pointer, pointer), (dt, ctypes.c_float), (count, ctypes.c_int))

    def place(self, table: Buffer | None, ids: Buffer, features: Buffer, slots: Buffer, out: Buffer) -> None:
        """Rows of `out`: of `features` where a picture stands, else of `table`, or zeros."""
        row = out.shape[-1] * np.dtype(NUMPY[out.dtype]).itemsize  # type: ignore[index]
        rows = out.bytes // row
        assert row % kernels.WORD == 0
        assert ids.shape == slots.shape
        assert math.prod(ids.shape) == rows
        pointer, words = ctypes.c_void_p, row // kernels.WORD
        self.launch(
            "place", rows, min(256, words), (table.pointer if table else 0, pointer), (ids.pointer, pointer), (features.pointer, pointer),
            (slots.pointer, pointer), (out.pointer, pointer), (words, ctypes.c_int),
        )  # fmt: skip

    def narrow(self, x: Buffer, into: Buffer) -> None:
        """float32 to the type of `into`."""
        count, pointer = math.prod(x.shape), ctypes.c_void_p
        assert count == math.prod(into.shape)
        self.launch(f"to_{into.dtype}", -(-count // 256), 256, (x.pointer, pointer), (into.pointer, pointer), (count, ctypes.c_int))

    def stretch(self, pictures: Buffer, into: Buffer, by: Stretch, tables: Sequence[Buffer]) -> None:
        """Pictures [V, H, W, 3] to those [V, rows, columns, 3]; `tables` are the four arrays of `by` on the card."""
        (_, tall, wide, _), (_, rows, columns, _), pointer, number = pictures.shape, into.shape, ctypes.c_void_p, ctypes.c_int
        assert pictures.dtype == into.dtype == "uint8"
        assert (rows, columns) == (len(by.down.at), len(by.across.at))
        sizes = tall, wide, rows, columns, by.down.at.shape[1], by.across.at.shape[1], into.bytes
        buffers = pictures, into, *tables
        self.launch(
            by.how, -(-into.bytes // 256), 256, *((buffer.pointer, pointer) for buffer in buffers), *((size, number) for size in sizes)
        )

    def look_up(self, pictures: Buffer, order: Buffer, table: Buffer, into: Buffer) -> None:
        """Of each picture [V, …] the bytes at `order`, as `table` [256] has them; `into` has as many numbers, of the table's type."""
        views, numbers, pointer, number = pictures.shape[0], math.prod(order.shape), ctypes.c_void_p, ctypes.c_int
        count, width = math.prod(into.shape), np.dtype(NUMPY[into.dtype]).itemsize  # type: ignore[index]
        assert count == views * numbers
        assert (pictures.dtype, order.dtype, table.dtype) == ("uint8", "int32", into.dtype)
        self.launch(
            f"look_up_{width}", -(-count // 256), 256, *((buffer.pointer, pointer) for buffer in (pictures, order, table, into)),
            (pictures.bytes // views, number), (numbers, number), (count, number),
        )  # fmt: skip

    # graphs and time

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` gives to the stream as one graph; nothing of it runs. Raises VlaEvalError where something cannot be captured."""
        run = self._runtime
        self._call(run.cudaStreamBeginCapture(self.stream, run.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
        try:
            work()
        except BaseException:
            _, broken = run.cudaStreamEndCapture(self.stream)
            if broken is not None and int(broken):
                run.cudaGraphDestroy(broken)
            run.cudaGetLastError()
            raise
        graph = self._call(run.cudaStreamEndCapture(self.stream))
        try:
            ready = self._call(run.cudaGraphInstantiate(graph, 0))
        finally:
            run.cudaGraphDestroy(graph)
        return Graph(self, ready)

    def event(self) -> Any:
        """A mark in the stream whose time can be read."""
        event = self._call(self._runtime.cudaEventCreate())
        self._owned[event] = self._runtime.cudaEventDestroy, event
        return event

    def drop(self, *events: Any) -> None:
        """Give marks back."""
        for event in events:
            how, what = self._owned.pop(event)
            self._call(how(what))

    def mark(self, event: Any, *, captured: bool) -> None:
        """Put the event where the stream is now: inside a graph as a node of its own, so that every replay sets it."""
        flags = self._runtime.cudaEventRecordExternal if captured else 0
        self._call(self._runtime.cudaEventRecordWithFlags(event, self.stream, flags))

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that have passed."""
        return float(self._call(self._runtime.cudaEventElapsedTime(start, end))) / 1e3

    def close(self) -> None:
        """Free everything. What still points here must not be used again."""
        self._close()

    def _call(self, answer: Any, *, both: bool = False) -> Any:
        status, *rest = answer
        if int(status):
            raise VlaEvalError(f"CUDA on {getattr(self, 'name', 'the GPU')}: {_name(status)}; if it stays, restart the process")
        return rest if both else rest[0] if rest else None


class Graph:
    """A captured piece of work, to be launched again and again."""

    def __init__(self, card: Card, ready: Any) -> None:
        self._card, self._ready = card, ready
        self._close = weakref.finalize(self, card._runtime.cudaGraphExecDestroy, ready)

    def launch(self) -> None:
        self._card._call(self._card._runtime.cudaGraphLaunch(self._ready, self._card.stream))

    def close(self) -> None:
        self._close()


def _release(owned: dict[object, tuple[Any, Any]], runtime: Any, stream: int) -> None:
    runtime.cudaStreamSynchronize(stream)
    while owned:
        _, (free, what) = owned.popitem()
        free(what)
    runtime.cudaStreamDestroy(stream)


def _dtype(array: Vector) -> str:
    return next(name for name, kind in NUMPY.items() if array.dtype == kind)


def _name(status: Any) -> str:
    return str(getattr(status, "name", status))
