"""The engines of a bundle as a runtime calls them: checked by name, each given tensors in its own types. B rows, S tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from vla_eval.arrays import read_npz
from vla_eval.engines.bundle import Bundle, Component
from vla_eval.engines.card import Card
from vla_eval.engines.engine import Engine, Tensor, chosen, load_engines
from vla_eval.engines.few_rows import CARD
from vla_eval.engines.many_rows import blas
from vla_eval.engines.verify import SELFTEST, selftest
from vla_eval.types import BadRequest, ContractMismatch, TensorSpec, Vector

if TYPE_CHECKING:
    from vla_eval.engines.trt_run import TrtEngine

_log = logging.getLogger(__name__)


class Components:
    """A bundle's components, loaded; `engines` replaces loading them, `kernels` says which of them are our own."""

    def __init__(
        self, bundle: Bundle, names: Sequence[str], backend: str = "auto", engines: Mapping[str, Engine] | None = None,
        kernels: Kernels | None = None, tables: int = 0,
    ) -> None:  # fmt: skip
        """`tables`: bytes that the caller puts on a card beside them. Raises BadRequest for a component that cannot be run here."""
        self.engines = _load([bundle.component(name) for name in names], backend, kernels, tables) if engines is None else dict(engines)
        self._specs = {name: {spec.name: spec for spec in engine.inputs} for name, engine in self.engines.items()}
        self.about = {name: dict(engine.about) for name, engine in self.engines.items()}
        if (plans := self.plans) is not None and (file := bundle.path / SELFTEST).is_file():
            selftest(bundle, read_npz(file), plans)  # half precision may overflow, and kernels are picked by others' code

    def __call__(self, component: str, **tensors: Tensor) -> dict[str, Tensor]:
        """What the component makes of these tensors. Raises ContractMismatch where the engine takes others."""
        specs = self._specs[component]
        check_inputs(component, specs, tensors)
        return self.engines[component](**{name: _cast(tensor, specs[name]) for name, tensor in tensors.items()})

    @property
    def plans(self) -> Mapping[str, TrtEngine] | None:
        """The engines where TensorRT runs every one of them, in one stream: a request can then stay on the card."""
        if {about["backend"] for about in self.about.values()} - {"tensorrt", "tensorrt_rtx", "kernels"}:
            return None
        return cast("Mapping[str, TrtEngine]", self.engines)

    def spec(self, component: str, name: str) -> TensorSpec:
        """An input of a component. Raises ContractMismatch if it has none of that name."""
        if name not in self._specs[component]:
            raise ContractMismatch(f"component {component!r} has no input {name!r}; export the checkpoint again with this version")
        return self._specs[component][name]


class Buffer:
    """Memory for tensors [..., width] that is allocated once and only grows."""

    def __init__(self, width: int, dtype: str) -> None:
        self._width = width
        self._memory = np.empty(0, np.dtype(dtype))

    def shaped(self, *shape: int) -> Vector:
        """[*shape, width], contiguous; what it held before is still in it."""
        size = int(np.prod(shape)) * self._width
        if self._memory.size < size:
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(*shape, self._width)


KERNELS = "kernels"  # the option of an export that wrote weights for them, and the entry of a component's config.json that describes them
_SAID = ("auto", "yes", "no")


@dataclass(frozen=True, slots=True)
class Own:
    """A component in kernels of our own: its engine, and the artifacts that it loads."""

    make: Callable[[Component, Card], Engine]
    artifacts: Sequence[str]
    blas: bool = True  # whether it multiplies with cuBLAS
    scratch: Callable[[Component], int] = lambda _: 0  # bytes beside its inputs, outputs and weights


@dataclass(frozen=True, slots=True)
class Kernels:
    """What answers on a GPU: kernels of our own ("yes"), TensorRT's plans ("no"), or "auto": kernels where they can."""

    said: str
    components: Mapping[str, Own]

    def __post_init__(self) -> None:
        if self.said not in _SAID:
            raise BadRequest(f"unknown kernels={self.said!r}; known: {', '.join(_SAID)}")

    def chosen(self, components: Sequence[Component], card: Card | None) -> dict[str, Own]:
        """Those of the components that they answer for. Raises BadRequest where they cannot and must."""
        found, without = dict[str, Own](), dict[str, list[str]]()
        for component in components if self.said != "no" else ():
            if (own := self.components.get(component.name)) is None:
                continue
            why = _hindrance(component, own, card)
            if why is None:
                found[component.name] = own
            elif self.said == "yes":
                raise BadRequest(f"{component.folder}: kernels=yes cannot be: {why}; take --option kernels=auto")
            elif card is not None and KERNELS in component.config["builder_config"]:
                without.setdefault(why, []).append(component.name)
        for why, names in without.items():
            _log.warning("TensorRT's plans of %s run, not our kernels: %s", " and ".join(names), why)
        return found


def _hindrance(component: Component, own: Own, card: Card | None) -> str | None:
    """Why a component cannot be answered by our kernels here."""
    if card is None:
        return "they run on a GPU with TensorRT plans beside them"
    if KERNELS not in component.config["builder_config"]:
        one = component.config["options"].get(KERNELS)
        return "these are for one robot, and the bundle's batch is larger" if one else "the bundle was exported without --kernels"
    if card.sm != CARD:
        return f"they are written for an H100 or H200, not for {card.name}"
    if own.blas:
        try:
            blas()
        except BadRequest as error:
            return str(error)
    return None


def check_kernels(dtype: str) -> None:
    """Raises BadRequest for an export in a precision that the kernels do not have."""
    if dtype == "fp32":
        raise BadRequest("--kernels run in half precision: choose --dtype fp16 or bf16")


def check_inputs(component: str, wanted: Collection[str], given: Collection[str]) -> None:
    """Raises ContractMismatch unless an engine is given just the inputs that it takes."""
    if set(wanted) != set(given):
        raise ContractMismatch(
            f"component {component!r} takes {', '.join(sorted(wanted))}; this runtime offers {', '.join(sorted(given))}. "
            "Export the checkpoint again with this version"
        )


def most(axis: int | tuple[int, int, int]) -> int:
    """The largest length of an axis of a TensorSpec."""
    return axis if isinstance(axis, int) else axis[2]


def position_ids(batch: int, length: int) -> NDArray[np.int32]:
    """[B, S] rows of the rotary table: the engine flattens it over the batch, so row b begins at b·S."""
    return np.arange(batch * length, dtype=np.int32).reshape(batch, length)


def _cast(tensor: Tensor, spec: TensorSpec) -> Tensor:
    return tensor.astype(spec.dtype, copy=False) if isinstance(tensor, np.ndarray) else tensor


def _load(components: Sequence[Component], backend: str, kernels: Kernels | None, tables: int) -> dict[str, Engine]:
    backend = chosen(components, backend)
    card = Card() if backend == "tensorrt" else None
    ours = {} if kernels is None else kernels.chosen(components, card)
    if card is None:
        return load_engines(components, backend)
    from vla_eval.engines.trt_run import Plans

    own = [component for component in components if component.name in ours]
    packed = sum(component.ahead(*ours[component.name].artifacts) for component in own)
    scratch = sum(ours[component.name].scratch(component) for component in own)
    others = [component for component in components if component.name not in ours]
    plans = Plans(others, card, tables + packed, beside=own, scratch=scratch)
    made = {component.name: ours[component.name].make(component, card) for component in own}  # while plans are read
    return {**plans.load(), **made}
