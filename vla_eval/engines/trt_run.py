"""A plan behind the Engine protocol, and whole requests as one CUDA graph each."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..types import BadRequest, ContractMismatch, VlaEvalError
from . import trt
from .bundle import Component, impostor
from .card import Buffer, Card
from .engine import Tensor, check_inputs
from .graph import NUMPY
from .reading import Contents, begin, head_of
from .trt_build import ANY_CARD, cache_file, plan_file, record_of, replace_file

_log = logging.getLogger(__name__)
SHAPES_KEPT = 8  # execution contexts of an engine, and captured requests, kept ready; the least recently used goes


class TrtEngine:
    """One component's plan, loaded. Its outputs are buffers on the card, valid until the next call with the same shapes."""

    def __init__(self, plan: Plan, card: Card) -> None:
        """Waits for the plan. Everything that shares a `card` runs in one stream, in order. Not thread-safe.

        Raises as `Plan.take` does, ContractMismatch for a plan with other tensors, VlaEvalError where there is no room for it.
        """
        component = plan.component
        self.where, self.component = str(component.folder), component
        self.inputs, self.outputs = component.inputs, component.outputs
        self.card, self.plan, flavour = card, plan.path, trt.door()
        self._runtime = flavour.api.Runtime(trt.logger())
        self._engine = self._runtime.deserialize_cuda_engine(plan.take())
        if self._engine is None:
            raise VlaEvalError(f"{self.plan}: TensorRT cannot load it ({trt.complaint()}); build it again: {rebuild(component)}")
        self._check()
        self._settings = self._engine.create_runtime_config()
        self._cache = _runtime_cache(self._settings, cache_file(self.plan), flavour.api)
        self._bound: OrderedDict[tuple[tuple[str, tuple[int, ...]], ...], Bound] = OrderedDict()
        self.about = {
            "backend": flavour.name, "version": flavour.version, "device": f"{self.card.name} ({self.card.sm})", "dtype": component.dtype,
            "support": flavour.supports(self.card.sm), "plan": self.plan.name, "plan_sha256": str(plan.record["sha256"]),
        }  # fmt: skip

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Arrays are copied to the card, buffers are bound as they are. Returns before the work is done: `to_host` waits."""
        check_inputs(self.where, self.inputs, inputs)
        key = tuple((name, tuple(inputs[name].shape)) for name in sorted(inputs))
        bound = self._bound.pop(key, None) or self.bind(dict(key))
        self._bound[key] = bound
        while len(self._bound) > SHAPES_KEPT:
            self._bound.popitem(last=False)[1].close()
        for name, tensor in inputs.items():
            bound.feed(name, tensor)
        bound.enqueue()
        return dict(bound.outputs)

    def bind(self, shapes: Mapping[str, Sequence[int]]) -> Bound:
        """A context of its own for these input shapes: one captured request must not disturb another's."""
        return Bound(self, shapes)

    def context(self) -> Any:
        """A new execution context. Raises VlaEvalError."""
        context = self._engine.create_execution_context(self._settings)
        if context is None:
            raise VlaEvalError(f"{self.plan}: no execution context ({trt.complaint()}); the card may be full")
        return context

    def save_cache(self) -> None:
        """Keep the kernels compiled so far beside the plan: the next start need not compile them."""
        if self._cache is None:
            return
        data = bytes(memoryview(self._cache.serialize()))
        file = cache_file(self.plan)
        if not file.is_file() or file.stat().st_size != len(data):
            try:
                replace_file(file, data)
            except OSError as error:  # a bundle that may only be read still runs
                _log.warning("%s cannot be written (%s); the next start compiles again", file, error)

    def device_bytes(self) -> int:
        """Scratch memory of one context."""
        return int(self._engine.device_memory_size_v2)

    def _check(self) -> None:
        """Hold the plan's inputs and outputs against the contract's."""
        engine, api = self._engine, trt.door().api
        from .trt_pen import TYPES

        types = {getattr(api.DataType, theirs): ours for ours, theirs in TYPES.items()}
        found = {}
        for i in range(engine.num_io_tensors):
            name = engine.get_tensor_name(i)
            side = "input" if engine.get_tensor_mode(name) == api.TensorIOMode.INPUT else "output"
            found[name] = side, types.get(engine.get_tensor_dtype(name)), tuple(engine.get_tensor_shape(name))
        said = {
            spec.name: (side, spec.dtype, tuple(n if isinstance(n, int) else -1 for n in spec.shape))
            for side, specs in (("input", self.inputs), ("output", self.outputs))
            for spec in specs
        }
        if wrong := sorted(name for name in {*said, *found} if said.get(name) != found.get(name)):
            name = wrong[0]
            raise ContractMismatch(
                f"{self.plan}: {name!r} is {found.get(name)} in the plan, {said.get(name)} in config.json; {rebuild(self.component)}"
            )


class Plans:
    """The plans of components, which threads read and hash from the start; `load` brings them on the card."""

    def __init__(
        self, components: Sequence[Component], card: Card, tables: int = 0, beside: Sequence[Component] = (), scratch: int = 0
    ) -> None:
        """Makes sure first that they have room beside a request of the largest shape and `tables`, bytes that the caller loads himself.

        `beside` are the components that something else answers for, with so many bytes of `scratch`.

        Raises BadRequest, with the command that mends it, for a plan that is missing, of another card or version, or no plan at all;
        ContractMismatch for one of another export; VlaEvalError, saying what needs how much, where the card has too little left.
        """
        self._components, self._card, self._allocated = components, card, card.allocated
        found = [(component, path, plan_record(component, path)) for component in components for path in (find_plan(component, card.sm),)]
        self._needs = {
            "plans": sum(path.stat().st_size for _, path, _ in found), "tables": tables,
            "scratch": sum(int(record.get("scratch_bytes", 0)) for _, _, record in found), "kernels": scratch,
            "tensors": tensor_bytes([*components, *beside]),
        }  # fmt: skip
        self._where = [*components, *beside][0].folder.parent
        _check_room(self._where, card, self._needs)
        self._plans = [Plan.begin(*plan) for plan in found]

    def load(self) -> dict[str, TrtEngine]:
        """Every component's engine: what is read first comes first. To be called once.

        Raises as TrtEngine does, and VlaEvalError where scratch memory that no record told of has no room.
        """
        waiting, loaded = {plan.contents: plan for plan in self._plans}, dict[str, TrtEngine]()
        self._plans = []
        for contents in as_completed(list(waiting)):
            plan = waiting.pop(contents)  # its bytes go with it
            loaded[plan.component.name] = TrtEngine(plan, self._card)
        scratch = sum(plan.device_bytes() for plan in loaded.values())
        if scratch > self._needs["scratch"]:  # a plan that was built where no card could say how much it wants
            tables = max(self._needs["tables"] - (self._card.allocated - self._allocated), 0)  # that are still to come
            _check_room(self._where, self._card, {**self._needs, "plans": 0, "tables": tables, "scratch": scratch})
        return {component.name: loaded[component.name] for component in self._components}


def tensor_bytes(components: Sequence[Component]) -> int:
    """What the inputs and outputs of a request of the largest shape take; an output that feeds another component is there once."""
    specs = {spec.name: spec for component in components for spec in (*component.inputs, *component.outputs)}
    lengths = {name: [n if isinstance(n, int) else n[2] for n in spec.shape] for name, spec in specs.items()}
    sizes = [math.prod(lengths[name]) * np.dtype(NUMPY[spec.dtype]).itemsize for name, spec in specs.items()]  # type: ignore[index]
    return sum(sizes)


def _check_room(where: Path, card: Card, needs: Mapping[str, int]) -> None:
    wanted, left = sum(needs.values()), card.free_bytes()
    told = ", ".join(f"{what} {size / 1e9:.3f}" for what, size in needs.items() if size)
    _log.info("%s takes %.2f GB (%s), %s has %.2f GB left", where, wanted / 1e9, told, card.name, left / 1e9)
    if wanted > left:
        raise VlaEvalError(
            f"{where} takes {wanted / 1e9:.3f} GB ({told}), {card.name} has {left / 1e9:.3f} GB left; end what else uses the card, or "
            "export again in half precision or with a smaller --batch or --max-text"
        )


class Bound:
    """A context whose input shapes are set once, with its outputs' buffers."""

    def __init__(self, engine: TrtEngine, shapes: Mapping[str, Sequence[int]]) -> None:
        self._engine, self._card = engine, engine.card
        self._context = engine.context()
        self._fed: dict[str, Buffer] = {}  # copies of host arrays
        self._fresh = True
        specs = {spec.name: spec for spec in engine.inputs}
        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, tuple(shape)):
                raise BadRequest(
                    f"{engine.plan}: input {name!r} cannot be {list(shape)}: outside optimization_profile ({trt.complaint()}); "
                    "export again with wider limits"
                )
        if left := self._context.infer_shapes():
            raise VlaEvalError(f"{engine.plan}: the shapes of {', '.join(left)} stay open; {rebuild(engine.component)}")
        self._specs = specs
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.outputs: dict[str, Buffer] = {}
        for spec in engine.outputs:
            self.outputs[spec.name] = self._card.empty(tuple(self._context.get_tensor_shape(spec.name)), spec.dtype)
            self.set(spec.name, self.outputs[spec.name])

    def set(self, name: str, buffer: Buffer) -> None:
        """Bind a buffer, without a copy."""
        if not self._context.set_tensor_address(name, buffer.pointer):
            raise VlaEvalError(f"{self._engine.plan}: {name!r} cannot be bound ({trt.complaint()})")

    def feed(self, name: str, tensor: Tensor) -> None:
        """Bind a buffer as it is, or a copy of a host array."""
        if isinstance(tensor, Buffer):
            self.set(name, tensor)
            return
        array = tensor if isinstance(tensor, np.ndarray) else tensor.to_host()
        if name not in self._fed:
            self._fed[name] = self._card.empty(array.shape, self._specs[name].dtype)
        self._card.upload(np.ascontiguousarray(array), self._fed[name])
        self._card.wait()  # the array is the caller's again
        self.set(name, self._fed[name])

    def enqueue(self) -> None:
        """Give the component's work to the stream."""
        if not self._context.execute_async_v3(self._card.stream):
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape in self._shapes.items())
            raise VlaEvalError(f"{self._engine.plan} did not run on {shapes} ({trt.complaint()})")
        if self._fresh:
            self._fresh = False
            self._engine.save_cache()

    def close(self) -> None:
        """Give the context and its buffers back."""
        self._card.wait()
        del self._context
        self._card.free(*self.outputs.values(), *self._fed.values())


class Body(Protocol):
    """A request of one shape: buffers that stay where they are, and what is done with them, stage by stage."""

    @property
    def stages(self) -> Sequence[tuple[str, Callable[[], None]]]: ...
    def close(self) -> None: ...


B = TypeVar("B", bound=Body)


class Requests(Generic[B]):
    """Requests by shape: the first one of a shape runs stage by stage, the second is captured, all later ones are replayed."""

    def __init__(self, card: Card, make: Callable[[Any], B], *, capture: bool = True) -> None:
        self._card, self._make, self._capture = card, make, capture
        self._kept: OrderedDict[Hashable, _Ready[B]] = OrderedDict()

    def __call__(self, key: Hashable, fill: Callable[[B], None]) -> tuple[B, dict[str, float]]:
        """The body after it has run, its results on the host, and the GPU's seconds by stage; "fill" is the host's part."""
        ready = self._kept.pop(key, None) or _Ready(self._card, self._make(key))
        self._kept[key] = ready
        while len(self._kept) > SHAPES_KEPT:
            self._kept.popitem(last=False)[1].close()
        began = time.perf_counter()
        fill(ready.body)
        filled = time.perf_counter() - began
        if ready.graph is None and ready.calls and self._capture:
            try:
                ready.graph = self._card.capture(lambda: ready.enqueue(captured=True))
            except VlaEvalError as error:
                self._capture = False
                _log.warning("requests are not captured, they run a little slower: %s", error)
        if ready.graph is not None:
            ready.graph.launch()
        else:
            ready.enqueue(captured=False)
        self._card.wait()
        ready.calls += 1
        return ready.body, {"fill": filled, **ready.seconds()}

    def close(self) -> None:
        """Free every request."""
        while self._kept:
            self._kept.popitem()[1].close()


class _Ready(Generic[B]):
    """A body with its marks and its graph."""

    def __init__(self, card: Card, body: B) -> None:
        self.card, self.body, self.calls = card, body, 0
        self.graph: Any = None
        self.marks = [card.event() for _ in range(len(body.stages) + 1)]

    def enqueue(self, *, captured: bool) -> None:
        self.card.mark(self.marks[0], captured=captured)
        for (_, work), mark in zip(self.body.stages, self.marks[1:], strict=True):
            work()
            self.card.mark(mark, captured=captured)

    def seconds(self) -> dict[str, float]:
        pairs = zip(self.body.stages, self.marks, self.marks[1:], strict=False)
        return {name: self.card.seconds(start, end) for (name, _), start, end in pairs}

    def close(self) -> None:
        self.card.wait()
        if self.graph is not None:
            self.graph.close()
        self.card.drop(*self.marks)
        self.body.close()


def find_plan(component: Component, sm: str) -> Path:
    """The plan of a component for this card and this TensorRT. Raises BadRequest with what there is instead, and the command."""
    wanted = [plan_file(component, sm), *([plan_file(component, ANY_CARD)] if trt.door().name == "tensorrt_rtx" else [])]
    for path in wanted:
        if path.is_file():
            return path
    others = sorted(path.name for path in component.folder.glob("*.engine"))
    has = f"there is {', '.join(others)}" if others else "there is none"
    raise BadRequest(f"{component.folder} has no plan for {trt.door().short} on {sm}: {has}; build it: {rebuild(component)}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A component's plan that is being read."""

    component: Component
    path: Path
    record: Mapping[str, Any]
    contents: Future[Contents]

    @classmethod
    def begin(cls, component: Component, path: Path, record: Mapping[str, Any]) -> Plan:
        """Read it from now on, in threads."""
        return cls(component, path, record, begin(path, record["bytes"], record["sha256"]))

    def take(self) -> NDArray[np.uint8]:
        """Its bytes, which are what the record says. Raises BadRequest for what is no plan, ContractMismatch for another one."""
        again = f"build it again: {rebuild(self.component)}"
        try:
            head, data = self.contents.result()
        except OSError as error:
            raise BadRequest(f"{self.path} cannot be read ({error.strerror}); {again}") from error
        if strange := impostor(self.path, head):
            raise BadRequest(f"{self.path} is {strange}; or {again}")
        if data is None:
            raise ContractMismatch(f"{self.path} is not the plan that was built (its SHA-256 differs); {again}")
        return data


def plan_record(component: Component, path: Path) -> dict[str, Any]:
    """The record of a plan, which is of this export and version. Raises BadRequest or ContractMismatch."""
    again = f"build it again: {rebuild(component)}"
    said, flavour = record_of(path), trt.door()
    if not isinstance(said.get("bytes"), int) or not isinstance(said.get("sha256"), str):
        if strange := impostor(path, head_of(path)):
            raise BadRequest(f"{path} is {strange}; or {again}")
        raise BadRequest(f"{path} has no record beside it that says what it was built from; {again}")
    if (said.get("flavour"), said.get("version")) != (flavour.name, flavour.version):
        raise BadRequest(
            f"{path} was built by {said.get('flavour')} {said.get('version')}, here is {flavour.name} {flavour.version}; {again}"
        )
    if said.get("export_id") != component.config["export_id"]:
        raise ContractMismatch(f"{path} is of export {said.get('export_id')}, the bundle of {component.config['export_id']}; {again}")
    if said.get("optimization_profile") != component.config["optimization_profile"]:
        raise ContractMismatch(f"{path} was built for another optimization_profile than config.json has; {again}")
    return said


def rebuild(component: Component) -> str:
    """The command that makes a component's plan."""
    if component.config["frontend"] == "onnx":
        return f"vla-eval build {component.folder.parent} --components {component.name} --force"
    return f"vla-eval build --direct --model {component.config['model']} --checkpoint DIR --out {component.folder.parent}"


def _runtime_cache(settings: Any, file: Any, api: Any) -> Any:
    """The settings' cache of compiled kernels, filled from the file; None where this TensorRT compiles nothing at load."""
    if not hasattr(settings, "create_runtime_cache"):
        return None
    # All kernels for a shape before its first run, none exchanged later: a captured request would keep the first ones.
    settings.dynamic_shapes_kernel_specialization_strategy = api.DynamicShapesKernelSpecializationStrategy.EAGER
    settings.cuda_graph_strategy = api.CudaGraphStrategy.DISABLED
    cache = settings.create_runtime_cache()
    if file.is_file() and not cache.deserialize(file.read_bytes()):
        _log.info("%s is of another card or version and is made anew", file)
    settings.set_runtime_cache(cache)
    return cache
