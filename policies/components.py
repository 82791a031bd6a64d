"""The engines of a bundle as a runtime calls them: checked by name, each given tensors in its own types. B rows, S tokens."""

from __future__ import annotations

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
from vla_eval.engines.verify import SELFTEST, selftest
from vla_eval.types import BadRequest, ContractMismatch, TensorSpec, Vector

if TYPE_CHECKING:
    from vla_eval.engines.trt_run import TrtEngine


class Components:
    """A bundle's components, loaded; `engines` replaces loading them, `loop` says what runs the denoise steps."""

    def __init__(
        self, bundle: Bundle, names: Sequence[str], backend: str = "auto", engines: Mapping[str, Engine] | None = None,
        loop: Loop | None = None, tables: int = 0,
    ) -> None:  # fmt: skip
        """`tables`: bytes that the caller puts on a card beside them. Raises BadRequest for a component that cannot be run here."""
        self.engines = _load([bundle.component(name) for name in names], backend, loop, tables) if engines is None else dict(engines)
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


LOOPS = ("auto", "kernels", "engine")
KERNELS = "kernels"  # the option of an export that wrote weights for them


@dataclass(frozen=True, slots=True)
class Loop:
    """What runs the denoise steps on a GPU: "kernels" of our own, TensorRT's "engine", or "auto": kernels where they can."""

    said: str
    component: str
    batch: int
    make: Callable[[Component, Card], Engine]
    weights: Sequence[str]  # artifacts that they load

    def __post_init__(self) -> None:
        if self.said not in LOOPS:
            raise BadRequest(f"unknown loop {self.said!r}; known: {', '.join(LOOPS)}")

    def kernels(self, stored: Component, card: Card | None) -> bool:
        """Whether they run here, and not TensorRT's engine. Raises BadRequest where "kernels" cannot."""
        problems = [
            (card is None, "they run on a GPU with TensorRT plans beside them"),
            (not stored.config["options"].get(KERNELS), "the bundle was exported without --kernels"),
            (self.batch != 1, f"they answer one robot at a time, and the bundle's batch is {self.batch}"),
            (
                card is not None and card.sm != CARD,
                f"they are written for an H100 or H200, not for {card.name if card else 'this machine'}",
            ),
        ]
        why = [what for wrong, what in problems if wrong]
        if self.said == "kernels" and why:
            raise BadRequest(f"{stored.folder.parent}: loop=kernels cannot run: {why[0]}; take --option loop=engine")
        return self.said != "engine" and not why


def check_kernels(dtype: str, batch: int) -> None:
    """Raises BadRequest for an export whose denoise step the kernels cannot run."""
    if dtype == "fp32":
        raise BadRequest("--kernels run in half precision: choose --dtype fp16 or bf16")
    if batch != 1:
        raise BadRequest(f"--kernels answer one robot at a time, not --batch {batch}; leave one of the two out")


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


def _load(components: Sequence[Component], backend: str, loop: Loop | None, tables: int) -> dict[str, Engine]:
    backend = chosen(components, backend)
    card = Card() if backend == "tensorrt" else None
    ours = {
        component.name: (component, loop)
        for component in components
        if loop and component.name == loop.component and loop.kernels(component, card)
    }
    if card is None:
        return load_engines(components, backend)
    from vla_eval.engines.trt_run import Plans

    packed = sum(component.ahead(*loop.weights) for component, loop in ours.values())
    plans = Plans([component for component in components if component.name not in ours], card, tables + packed)
    kernels = {name: loop.make(component, card) for name, (component, loop) in ours.items()}  # while plans are read
    return {**plans.load(), **kernels}
