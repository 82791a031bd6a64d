"""A pi0.5 request on the GPU, from pinned pictures to the chunk, as one CUDA graph. B rows, V views, P tokens a view, T prompt tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.trt_run import Requests, TrtEngine
from vla_eval.types import Vector

from ..components import most
from ..on_card import Kept
from ..sight import FromBytes, FromNumbers, bordered
from .expert import ExpertBound, ExpertEngine
from .processor import reading

if TYPE_CHECKING:
    from .runtime import Inputs, Shape

Places = Callable[[int, int], Mapping[str, Vector]]  # (first position, how many) -> rotary table and rows of it


@dataclass(frozen=True, slots=True)
class Tables:
    """Constants on the card: the token table, scaled as text tokens are, and what of each denoise step depends on the time alone."""

    embedding: Buffer  # [N, hidden]
    time_input: str
    times: Sequence[Buffer]  # one a step
    prepared: Sequence[dict[str, Buffer]]  # the same for kernels of our own, where they run


class Pi05OnDevice:
    """All engines in one stream. Shapes that come again are replayed."""

    def __init__(
        self, engines: Mapping[str, TrtEngine], *, batch: int, per_view: int, embedding: Vector, time: tuple[str, Sequence[Vector]],
        places: Places,
    ) -> None:  # fmt: skip
        self.card: Card = engines["visual"].card
        self._engines, self._batch, self._per_view, self._places = engines, batch, per_view, places
        name, steps = time
        action: object = engines["action"]  # or kernels of our own, which answer as it does
        prepared = action.prepare(steps) if isinstance(action, ExpertEngine) else list[dict[str, Buffer]]()
        self._tables = Tables(self.card.load(embedding), name, [self.card.load(step) for step in steps], prepared)
        self.requests = Requests(self.card, self._make)

    def __call__(self, rows: Sequence[Inputs]) -> tuple[NDArray[np.float32], dict[str, float], Pi05Body]:
        """[B, H, 32] and the seconds of each stage. The body's buffers hold everything in between, until the next request."""
        body, seconds = self.requests(rows[0].shape, lambda body: body.fill(rows))
        return body.chunk.copy(), seconds, body

    def _make(self, shape: Shape) -> Pi05Body:
        return Pi05Body(self.card, self._engines, self._tables, self._batch, self._per_view, self._places, shape)


class Pi05Body:
    """Buffers for one shape, and the work on them."""

    def __init__(
        self, card: Card, engines: Mapping[str, TrtEngine], tables: Tables, batch: int, per_view: int, places: Places, shape: Shape
    ) -> None:
        self._card, self._tables, self._seen = card, tables, shape.views * per_view
        specs = {(name, spec.name): spec for name, engine in engines.items() for spec in engine.inputs}
        length = self._seen + shape.text
        self._kept = kept = Kept(card)

        pixels = specs["visual", "pixel_values"]
        self._sight = self._sight_for(shape, (batch * shape.views, *map(most, pixels.shape[1:])), pixels.dtype)
        self.visual = kept.bind("visual", engines["visual"], {"pixel_values": self._sight.input})

        self.ids, self._ids = kept.fed((batch, length), "int64", by="prompt")
        self.ids[:] = -1  # no prompt so far
        slots = np.full((batch, length), -1, np.int32)
        slots[:, : self._seen] = np.arange(batch * self._seen, dtype=np.int32).reshape(batch, -1)  # pictures first, row by row
        self._slots = kept.constant(slots)
        self._embeds = kept.empty((batch, length, tables.embedding.shape[1]), specs["prefix", "inputs_embeds"].dtype)
        prefix = {"inputs_embeds": self._embeds, **{name: kept.constant(array) for name, array in places(0, length).items()}}
        self.prefix = kept.bind("prefix", engines["prefix"], prefix)

        noise = specs["action", "noise_trajectory"]
        self.noise, self._x = kept.fed((batch, *map(most, noise.shape[1:])), "float32")
        here = {name: kept.constant(array) for name, array in places(length, self._x.shape[1]).items()}
        action = {"noise_trajectory": self._x, tables.time_input: tables.times[0], **here, **self.prefix.outputs}
        self.action = kept.bind("action", engines["action"], action)
        self.chunk = kept.pinned(self._x.shape, "float32")
        card.wait()
        self.stages: Sequence[tuple[str, Callable[[], None]]] = (
            ("h2d", kept.upload), ("visual", self._see), ("prefill", self._prefill), ("denoise", self._denoise), ("d2h", self._download),
        )  # fmt: skip

    def fill(self, rows: Sequence[Inputs]) -> None:
        """The host's part of a request: into page-locked memory, from where the graph takes it."""
        for i, row in enumerate(rows):
            self._sight.fill(i, row.pixels)
            self.noise[i] = row.noise
        if any(not np.array_equal(ids[self._seen :], row.token_ids) for ids, row in zip(self.ids, rows, strict=True)):
            self.ids[:, : self._seen] = 0
            self.ids[:, self._seen :] = [row.token_ids for row in rows]
            self._kept.upload("prompt")  # it stays on the card until an instruction changes

    def close(self) -> None:
        """Give everything back."""
        self._kept.close()

    def _sight_for(self, shape: Shape, pixels: tuple[int, ...], dtype: str) -> FromBytes | FromNumbers:
        if shape.size is None:
            return FromNumbers(self._kept, pixels, dtype)
        how = reading(pixels[-1])
        stretch = None if shape.size == how.size else bordered(shape.size, pixels[-1])
        return FromBytes(self._kept, pixels, dtype, pixels[0], shape.size, stretch, how)

    def _see(self) -> None:
        self._sight.make()
        self.visual.enqueue()

    def _prefill(self) -> None:
        self._card.place(self._tables.embedding, self._ids, self.visual.outputs["image_features"], self._slots, self._embeds)
        self.prefix.enqueue()

    def _denoise(self) -> None:
        steps = len(self._tables.times)
        for step, time in enumerate(self._tables.times):
            if isinstance(self.action, ExpertBound):
                self.action.enqueue(self._tables.prepared[step])
            else:
                self.action.set(self._tables.time_input, time)
                self.action.enqueue()
            self._card.euler(self._x, self.action.outputs["action_pred"], -1.0 / steps)  # from noise at 1 to data at 0

    def _download(self) -> None:
        self._card.download(self._x, self.chunk)
