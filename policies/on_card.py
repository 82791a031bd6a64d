"""What a captured request keeps on the card: its buffers, what feeds them, and its engines bound to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from vla_eval.engines.card import Buffer, Card
from vla_eval.types import TensorSpec, Vector

from .components import check_inputs


class Bound(Protocol):
    """A component whose shapes are fixed, with its outputs' buffers."""

    outputs: dict[str, Buffer]

    def set(self, name: str, buffer: Buffer) -> None: ...
    def close(self) -> None: ...


When = Literal["request", "prompt"]
B_co = TypeVar("B_co", bound=Bound, covariant=True)
B = TypeVar("B", bound=Bound)


class Bindable(Protocol[B_co]):
    """An engine on the card."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...
    def bind(self, shapes: Mapping[str, Sequence[int]]) -> B_co: ...


class Kept:
    """Everything that one shape of request holds until `close`."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._buffers: list[Buffer] = []
        self._pairs: dict[When, list[tuple[Vector, Buffer]]] = {"request": [], "prompt": []}  # host arrays, and where each goes
        self._pinned: list[Vector] = []
        self._bound: list[Bound] = []

    def empty(self, shape: Sequence[int], dtype: str) -> Buffer:
        """A buffer that nobody has written yet."""
        self._buffers.append(self.card.empty(shape, dtype))
        return self._buffers[-1]

    def constant(self, array: Vector) -> Buffer:
        """A buffer with this array in it."""
        self._buffers.append(self.card.load(array))
        return self._buffers[-1]

    def pinned(self, shape: Sequence[int], dtype: str) -> Vector:
        """Page-locked host memory."""
        self._pinned.append(self.card.pinned(shape, dtype))
        return self._pinned[-1]

    def fed(self, shape: Sequence[int], dtype: str, *, by: When = "request") -> tuple[Vector, Buffer]:
        """Page-locked memory and the buffer that `upload(by)` fills from it: at the start of every request, or when the prompt changes."""
        pair = self.pinned(shape, dtype), self.empty(shape, dtype)
        self._pairs[by].append(pair)
        return pair

    def bind(self, component: str, engine: Bindable[B], inputs: Mapping[str, Buffer]) -> B:
        """The engine with these inputs, outputs allocated. Raises ContractMismatch where it takes others."""
        check_inputs(component, {spec.name for spec in engine.inputs}, inputs)
        bound = engine.bind({name: buffer.shape for name, buffer in inputs.items()})
        self._bound.append(bound)
        for name, buffer in inputs.items():
            bound.set(name, buffer)
        return bound

    def upload(self, by: When = "request") -> None:
        """Every buffer that is fed then, from its host memory."""
        for host, buffer in self._pairs[by]:
            self.card.upload(host, buffer)

    def close(self) -> None:
        """Give everything back."""
        for bound in self._bound:
            bound.close()
        self.card.free(*self._buffers)
        self.card.unpin(*self._pinned)
