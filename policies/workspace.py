"""What one request of kernels of our own works on: named buffers, norms' sums, and products between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from vla_eval.engines.bundle import Component
from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.engine import Tensor
from vla_eval.engines.few_rows import COPIES, FewRows, Look, Product, Tile, pack, tile_for
from vla_eval.engines.graph import NUMPY
from vla_eval.types import BadRequest, ContractMismatch, Vector

_FIELDS = ("weight", "bias", "lost", "late", "gate", "scale")


class Workspace:
    """Buffers by name: those of the request, which are freed with it, and those that are bound to it."""

    def __init__(
        self, kernels: FewRows, products: Mapping[str, Product], slots: int, looks: Mapping[str, Look] = MappingProxyType({})
    ) -> None:
        """`slots` norms are summed up in a step."""
        self.kernels, self.card, self._products, self._looks, self.slots = kernels, kernels.card, products, looks, slots
        self.buffers: dict[str, Buffer] = {}
        self._kept: list[Buffer] = []
        self._fed: dict[str, Buffer] = {}  # copies of host arrays
        self.sums = self._zeros((slots, COPIES * kernels.rows * 2), "int64")

    def rows(self, name: str, width: int, dtype: str) -> None:
        """A buffer of rows as the kernels keep them, zero so far: padding is never written again."""
        self.buffers[name] = self._zeros((width // 8, self.kernels.rows, 8), dtype)

    def plain(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """A buffer of any other shape, zero so far."""
        self.buffers[name] = self._zeros(shape, dtype)
        return self.buffers[name]

    def feed(self, name: str, tensor: Tensor) -> None:
        """Bind a buffer as it is, or a copy of a host array."""
        if isinstance(tensor, Buffer):
            self.buffers[name] = tensor
            return
        array = np.ascontiguousarray(tensor if isinstance(tensor, np.ndarray) else tensor.to_host())
        if name not in self._fed:
            self._fed[name] = self.card.load(array)
            self._kept.append(self._fed[name])
        self.card.upload(array, self._fed[name])
        self.card.wait()  # the array is the caller's again
        self.buffers[name] = self._fed[name]

    def slot(self, number: int) -> Buffer:
        """The sums of one norm."""
        return self.sums.part(number * self.sums.shape[1], self.sums.shape[1:])

    def product(
        self, name: str, vectors: Sequence[Mapping[str, Buffer]], source: str, *, eps: float, narrow: str | None = None,
        wide: str | None = None, base: str | None = None, stats: int | None = None, told: int | None = None, **numbers: int | None,
    ) -> None:  # fmt: skip
        """A product by name, its vectors taken from whichever of `vectors` has them."""
        values = self._known(name, vectors, source, eps, {k: v for k, v in numbers.items() if v is not None})
        values |= {field: self.buffers[to] for field, to in (("narrow", narrow), ("wide", wide), ("base", base)) if to is not None}
        values |= {field: self.slot(number) for field, number in (("stats", stats), ("told", told)) if number is not None}
        self.kernels.product(self._products[name], **values)

    def look(
        self, name: str, vectors: Sequence[Mapping[str, Buffer]], source: str, keys: int, *, stats: int, out: str, eps: float,
        **context: Buffer,
    ) -> None:  # fmt: skip
        """What heads see, by name, as `product`; the context is keys `k`, values `v` and the `mask` of those that are seen."""
        values = self._known(name, vectors, source, eps, {"stats": self.slot(stats), "out": self.buffers[out], **context})
        self.kernels.look(self._looks[name], keys, **values)

    def _known(
        self, name: str, vectors: Sequence[Mapping[str, Buffer]], source: str, eps: float, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The fields of a kernel whose vectors are some of `vectors`."""
        found = {field: known[f"{name}.{field}"] for field in _FIELDS for known in vectors if f"{name}.{field}" in known}
        return {"rows_in": self.buffers[source], "eps": eps, **found, **more}

    def close(self) -> None:
        """Give the buffers back."""
        self.card.free(*self._kept)

    def _zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        self._kept.append(self.card.load(np.zeros(shape, NUMPY[dtype])))  # type: ignore[index]
        return self._kept[-1]


def packed(
    plan: Mapping[str, Product], looks: Mapping[str, Look], weights: Mapping[str, Callable[[], Vector]], rows: int, kind: type
) -> Iterator[tuple[str, tuple[type, Sequence[int], Iterator[Vector]]]]:
    """What `write_tensors` wants for the products' weights [N, K]: in half precision, packed one at a time.

    Writing them raises BadRequest for weights that half precision cannot hold.
    """
    tiles = {name: tile_for(product, rows) for name, product in plan.items()}
    for name, shape in _shapes(tiles, looks).items():

        def piece(name: str = name) -> Iterator[Vector]:
            with np.errstate(over="ignore"):
                rounded: Vector = weights[name]().astype(kind)
            if not np.isfinite(rounded).all():
                raise BadRequest(f"--kernels: the weights of {name!r}, folded, are too large for float16; choose --dtype bf16")
            yield looks[name].pack(rounded) if name in looks else pack(rounded, tiles[name])

        yield f"{name}.weight", (kind, shape, piece())


def _shapes(tiles: Mapping[str, Tile], looks: Mapping[str, Look]) -> dict[str, tuple[int, ...]]:
    """How each packed weight lies."""
    return {name: tile.packed for name, tile in tiles.items()} | {name: look.packed for name, look in looks.items()}


def stored(
    component: Component, file: str, kernels: FewRows, plan: Mapping[str, Product], looks: Mapping[str, Look] = MappingProxyType({})
) -> dict[str, Vector]:
    """The artifact's arrays. Raises BadRequest if it is missing, ContractMismatch where weights are packed for other tiles."""
    arrays = component.tensors(file)
    tiles = {name: kernels.tiles[product] for name, product in plan.items()}
    for name, shape in _shapes(tiles, looks).items():
        if arrays[f"{name}.weight"].shape != shape:
            raise ContractMismatch(f"{component.folder}: {name!r} is packed for another tile; export the component again")
    return arrays


def about(component: Component, card: Card, kernels: str) -> dict[str, str]:
    """What runs, for manifests."""
    return {"backend": "kernels", "version": kernels, "device": f"{card.name} ({card.sm})", "dtype": component.dtype}


def upload(card: Card, vectors: Mapping[str, Any]) -> dict[str, Buffer]:
    """Arrays on the card, vectors with zeros up to a multiple of 64: tiles read whole."""
    return {
        name: card.load(np.pad(array, (0, -array.size % 64)) if array.ndim == 1 and array.size % 64 else array)
        for name, array in vectors.items()
    }
