"""Pictures on their way into a vision engine on the card: there bytes become the processor's numbers, bit for bit. V views, H W pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines import kernels
from vla_eval.engines.kernels import Stretch, Taps
from vla_eval.images import fit_with_border, inner_size, stretch_area
from vla_eval.types import Image, Vector

from .on_card import Kept

Size = tuple[int, int]  # height and width
MOST_SIDE = 2048  # pixels of a picture that a card shrinks: each new pixel reads all that it covers


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """A row's pictures while they are bytes: what is left to do to them is the card's."""

    views: tuple[Image, ...]  # V of [H, W, 3], all of one size

    @property
    def size(self) -> Size:
        height, width = self.views[0].shape[:2]
        return height, width


# --- stretching in whole numbers --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def area(size: Size, wanted: Size) -> Stretch | None:
    """`stretch_area` for a card, where it enlarges; None where a kernel does not give this OpenCV's bytes."""
    if size[0] > wanted[0] or size[1] > wanted[1]:
        return None  # averages in floats
    down, across = (_area_taps(*ends) for ends in zip(size, wanted, strict=True))
    edge = across.at[:, 1] == across.at[:, 0]  # OpenCV gives the last column all the weight, but the last line both its shares
    across.weight[edge] = [1 << 11, 0]
    return _proven(Stretch("stretch_area", down, across), size, lambda picture: stretch_area(picture, *wanted))


@lru_cache(maxsize=64)
def bordered(size: Size, side: int) -> Stretch | None:
    """`fit_with_border` for a card; None where a kernel does not give this Pillow's bytes, and for pictures that it would be slow with."""
    if max(size) > MOST_SIDE:
        return None
    taps = []
    for length, inner in zip(size, inner_size(size, side, side), strict=True):
        first, fitted = (side - inner) // 2, _antialiased_taps(length, inner)
        whole = Taps(*(np.zeros((side, part.shape[1]), np.int32) for part in fitted))  # no weight is black
        for part, into in zip(fitted, whole, strict=True):
            into[first : first + inner] = part
        taps.append(whole)
    return _proven(Stretch("stretch_antialiased", *taps), size, lambda picture: fit_with_border(picture, side, side))


def _proven(by: Stretch, size: Size, library: Callable[[Image], Image]) -> Stretch | None:
    """The stretch if it is the library's on a picture of noise: the order of Pillow's passes, for one, has changed with its version."""
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    return by if np.array_equal(kernels.stretch(noise[None], by)[0], library(noise)) else None


def _area_taps(length: int, wanted: int) -> Taps:
    """OpenCV's two neighbours and their weights of 2⁻¹¹ where INTER_AREA enlarges: positions in its double, shares in its float32."""
    larger, new = wanted / length, np.arange(wanted)
    first = np.floor(new * (1.0 / larger)).astype(np.int32)
    share = ((new + 1) - (first + 1) * larger).astype(np.float32)
    share = np.where(share <= 0, np.float32(0), share - np.floor(share))
    weight = np.rint(np.stack([np.float32(1) - share, share], 1) * np.float32(1 << 11)).astype(np.int32)
    return Taps(np.minimum(np.stack([first, first + 1], 1), length - 1).astype(np.int32), weight)


def _antialiased_taps(length: int, wanted: int) -> Taps:
    """Pillow's bilinear filter, widened when shrinking, in weights of 2⁻²²."""
    scale = length / wanted
    reach = max(scale, 1.0)  # pixels to either side
    taps = Taps(*(np.zeros((wanted, 2 * math.ceil(reach) + 1), np.int32) for _ in range(2)))
    for new in range(wanted):
        centre = (new + 0.5) * scale
        first, end = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), length)
        weight = [max(0.0, 1.0 - abs((pixel - centre + 0.5) * (1.0 / reach))) for pixel in range(first, end)]
        taps.at[new, : end - first] = range(first, end)
        taps.weight[new, : end - first] = [int(0.5 + share / sum(weight) * (1 << 22)) for share in weight]
    return taps


# --- into the engine --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """How a model reads pictures of one size."""

    size: Size  # once they are stretched
    order: NDArray[np.int32]  # which byte of a picture [H, W, 3] each of a view's numbers is
    numbers: NDArray[np.float32]  # [256] what a byte means


class FromNumbers:
    """Numbers that the host has made are uploaded and rounded to the engine's type."""

    def __init__(self, kept: Kept, shape: tuple[int, ...], dtype: str) -> None:
        self._card, (self.host, self._wide) = kept.card, kept.fed(shape, "float32")
        self.input = self._wide if dtype == "float32" else kept.empty(shape, dtype)

    def fill(self, row: int, numbers: Vector | Pictures) -> None:
        """A row's numbers, into page-locked memory."""
        assert not isinstance(numbers, Pictures)
        self.host[row * len(numbers) : (row + 1) * len(numbers)] = numbers

    def make(self) -> None:
        """Give the card's part to the stream."""
        if self.input is not self._wide:
            self._card.narrow(self._wide, self.input)


class FromBytes:
    """Bytes are uploaded, a quarter of the numbers or less; the card stretches them and reads them as the model does."""

    def __init__(
        self, kept: Kept, shape: tuple[int, ...], dtype: str, views: int, size: Size, stretch: Stretch | None, how: Reading
    ) -> None:
        """`shape` is the engine's input's, for all `views` together. Without a stretch the pictures have the model's size."""
        assert size == how.size or stretch is not None
        self._card, (self.host, self._bytes) = kept.card, kept.fed((views, *size, 3), "uint8")
        self._stretch, self._seen = stretch, self._bytes
        if stretch is not None:
            self._seen = kept.empty((views, *how.size, 3), "uint8")
            self._tables = [kept.constant(part) for taps in (stretch.down, stretch.across) for part in taps]
        numbers: Vector = how.numbers if dtype == "float32" else kernels.narrow(how.numbers, dtype)
        self._order, self._numbers = kept.constant(how.order), kept.constant(numbers)
        self.input = kept.empty(shape, dtype)

    def fill(self, row: int, pictures: Vector | Pictures) -> None:
        """A row's pictures, into page-locked memory."""
        assert isinstance(pictures, Pictures)
        for place, view in enumerate(pictures.views, row * len(pictures.views)):
            self.host[place] = view

    def make(self) -> None:
        """Give the card's part to the stream."""
        if self._stretch is not None:
            self._card.stretch(self._bytes, self._seen, self._stretch, self._tables)
        self._card.look_up(self._seen, self._order, self._numbers, self.input)
