"""What runs one component of a network: named tensors in, named tensors out, on whatever device the backend owns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from ..types import BadRequest, TensorSpec, Vector

if TYPE_CHECKING:
    from .bundle import Component

BACKENDS = ("tensorrt", "onnxruntime")  # in the order in which `auto` tries them
_log = logging.getLogger(__name__)


@runtime_checkable
class DeviceTensor(Protocol):
    """A tensor that lives on a device. `np.asarray` on it raises: `to_host` is the one way home."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def to_host(self) -> Vector: ...  # synchronises


Tensor = Vector | DeviceTensor


class Engine(Protocol):
    """One component, loaded. Inputs are bound by name; the outputs of one engine feed the next without a copy."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    @property
    def outputs(self) -> Sequence[TensorSpec]: ...
    @property
    def about(self) -> Mapping[str, str]: ...  # for manifests: "backend", "version", "device", "dtype" and whatever else it knows
    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]: ...


def load_engine(component: Component, backend: str = "auto") -> Engine:
    """The engine that runs this component here, as `load_engines` picks it."""
    return load_engines([component], backend)[component.name]


def load_engines(components: Iterable[Component], backend: str = "auto") -> dict[str, Engine]:
    """What runs these components here, all in one way: on TensorRT in one stream of one card.

    `auto` takes TensorRT where every component has a plan and a GPU answers. Raises BadRequest for an unknown backend, for a component
    whose precision the backend cannot run, and for a plan that is missing or does not fit.
    """
    components = list(components)
    if chosen(components, backend) == "tensorrt":
        from .card import Card
        from .trt_run import Plans

        return {**Plans(components, Card()).load()}
    from .ort import OrtEngine

    return {component.name: OrtEngine(component) for component in components}


def chosen(components: Sequence[Component], backend: str = "auto") -> str:
    """The backend that `auto` stands for here: TensorRT where there are plans and a GPU; said where there are plans and none."""
    if backend not in ("auto", *BACKENDS):
        raise BadRequest(f"unknown backend {backend!r}; known: auto, {', '.join(BACKENDS)}")
    if backend != "auto":
        return backend
    if not all(any(component.folder.glob("*.engine")) for component in components):
        return "onnxruntime"
    from .trt_build import ANY_CARD, card_here

    if card_here() != ANY_CARD:
        return "tensorrt"
    _log.warning("%s has TensorRT plans, but no GPU answers here: running its graphs on the CPU", components[0].folder.parent)
    return "onnxruntime"


def to_host(tensor: Tensor) -> Vector:
    """The tensor as a numpy array; waits for the device where there is one."""
    return tensor if isinstance(tensor, np.ndarray) else tensor.to_host()


def check_inputs(where: str, specs: Sequence[TensorSpec], inputs: Mapping[str, Tensor]) -> None:
    """Refuse inputs that do not fit: a missing or unknown name, another dtype, rank or length. Raises BadRequest."""
    unknown, missing = set(inputs) - {spec.name for spec in specs}, {spec.name for spec in specs} - set(inputs)
    if unknown or missing:
        raise BadRequest(f"{where} takes {', '.join(s.name for s in specs)}; missing: {sorted(missing)}, unknown: {sorted(unknown)}")
    for spec in specs:
        shape, dtype = tuple(inputs[spec.name].shape), str(inputs[spec.name].dtype)
        if dtype != spec.dtype:
            raise BadRequest(f"{where}: {spec.name!r} is {dtype}, wanted {spec.dtype}")
        if len(shape) != len(spec.shape) or not all(_fits(n, axis) for n, axis in zip(shape, spec.shape, strict=True)):
            raise BadRequest(f"{where}: {spec.name!r} has shape {list(shape)}, wanted {describe(spec)}")


def describe(spec: TensorSpec) -> str:
    """The shape of a specification for people: "[1, 16…148…256, 2048]" (least, tuned for, most)."""
    axes = (str(axis) if isinstance(axis, int) else "…".join(str(n) for n in dict.fromkeys(axis)) for axis in spec.shape)
    return f"[{', '.join(axes)}]"


def _fits(length: int, axis: int | tuple[int, int, int]) -> bool:
    return length == axis if isinstance(axis, int) else axis[0] <= length <= axis[2]
