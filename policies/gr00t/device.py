"""A GR00T request on the GPU, from pinned pictures to the chunk, as one CUDA graph. B rows, V views, P patches a view, S tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.trt_run import Requests, TrtEngine
from vla_eval.types import TensorSpec, Vector

from ..components import most, position_ids
from ..on_card import Kept
from ..sight import FromBytes, FromNumbers, area
from .contract import PATCH
from .dit import DitBound
from .processor import Layout, prompt_rotary, reading, vision_tables

if TYPE_CHECKING:
    from .runtime import Inputs, Shape


@dataclass(frozen=True, slots=True)
class Tables:
    """Constants of the loop on the card, one row a step, and the token table."""

    embedding: Buffer  # [N, hidden]
    modulation: Sequence[Buffer]
    time_bias: Sequence[Buffer]


class Gr00tOnDevice:
    """All three engines in one stream. Shapes that come again are replayed."""

    def __init__(
        self, engines: Mapping[str, TrtEngine], layout: Layout, batch: int, embedding: Vector, modulation: Vector, time_bias: Vector
    ) -> None:
        self.card: Card = engines["visual"].card
        assert all(engine.card is self.card for engine in engines.values())
        self._engines, self._layout, self._batch = engines, layout, batch
        rows = [[self.card.load(step) for step in table] for table in (modulation, time_bias)]
        self._tables = Tables(self.card.load(embedding), *rows)
        self.requests = Requests(self.card, self._make)

    def __call__(self, rows: Sequence[Inputs]) -> tuple[NDArray[np.float32], dict[str, float], Gr00tBody]:
        """[B, 40, 132] and the seconds of each stage. The body's buffers hold everything in between, until the next request."""
        body, seconds = self.requests(rows[0].shape, lambda body: body.fill(rows))
        return body.chunk.copy(), seconds, body

    def _make(self, shape: Shape) -> Gr00tBody:
        return Gr00tBody(self.card, self._engines, self._tables, self._layout, self._batch, shape)


class Gr00tBody:
    """Buffers for one shape, and the work on them."""

    def __init__(self, card: Card, engines: Mapping[str, TrtEngine], tables: Tables, layout: Layout, batch: int, shape: Shape) -> None:
        self._card, self._tables, self._layout, self._shape = card, tables, layout, shape
        specs = {(name, spec.name): spec for name, engine in engines.items() for spec in engine.inputs}
        b, s = batch, shape.tokens
        patches = b * shape.patches
        self._kept = kept = Kept(card)

        made = vision_tables(layout, patches // (shape.grid[0] * shape.grid[1]), shape.grid)
        self._sight = self._sight_for(specs["visual", "input"], patches)
        visual_inputs = {
            "input": self._sight.input, "rotary_pos_emb": kept.constant(made.rotary), "cu_seqlens": kept.constant(made.cu_seqlens),
            "fast_pos_embed_idx": kept.constant(made.position_index), "fast_pos_embed_weight": kept.constant(made.position_weight),
        }  # fmt: skip
        weights = visual_inputs["fast_pos_embed_weight"]
        if (kind := specs["visual", "fast_pos_embed_weight"].dtype) != "float32":
            visual_inputs["fast_pos_embed_weight"] = kept.empty(weights.shape, kind)
            card.narrow(weights, visual_inputs["fast_pos_embed_weight"])
        self.visual = kept.bind("visual", engines["visual"], visual_inputs)

        hidden, kind = tables.embedding.shape[1], specs["vl_backbone", "inputs_embeds"].dtype
        self.ids, self._ids = kept.fed((b, s), "int64", by="prompt")
        self.ids[:] = -1  # no prompt so far
        self.slots, self._slots = kept.fed((b, s), "int32", by="prompt")
        self.rotary, rotary = kept.fed((b, s, layout.text_head_dim), "float32", by="prompt")
        taps = [name for name in self.visual.outputs if name.startswith("deepstack_features_")]
        self._embeds = {name: kept.empty((b, s, hidden), kind) for name in ("inputs_embeds", *taps)}
        backbone_inputs = {
            "inputs_embeds": self._embeds["inputs_embeds"], "rope_rotary_cos_sin": rotary,
            "attention_pos_id": kept.constant(position_ids(b, s)),
            **{name.replace("features", "embeds"): self._embeds[name] for name in taps},
        }  # fmt: skip
        self.backbone = kept.bind("vl_backbone", engines["vl_backbone"], backbone_inputs)

        self.noise, self._x = kept.fed((b, *map(most, specs["action", "noise_trajectory"].shape[1:])), "float32")
        self.state, state = kept.fed((b, 1, *map(most, specs["action", "state"].shape[2:])), "float32")
        self.text, text = kept.fed((b, 1, 1, s), "bool", by="prompt")
        self.image, image = kept.fed((b, 1, 1, s), "bool", by="prompt")
        action_inputs = {
            "noise_trajectory": self._x, "state": state, "text_attention_mask": text, "image_attention_mask": image,
            "adanorm_modulation": tables.modulation[0], "action_time_bias": tables.time_bias[0], **self.backbone.outputs,
        }  # fmt: skip
        self.action = kept.bind("action", engines["action"], action_inputs)
        self.chunk = kept.pinned(self._x.shape, "float32")
        card.wait()
        self.stages: Sequence[tuple[str, Callable[[], None]]] = (
            ("h2d", kept.upload), ("visual", self._see), ("prefill", self._prefill), ("denoise", self._denoise), ("d2h", self._download),
        )  # fmt: skip

    def fill(self, rows: Sequence[Inputs]) -> None:
        """The host's part of a request: into page-locked memory, from where the graph takes it."""
        for i, row in enumerate(rows):
            self._sight.fill(i, row.patches)
            self.state[i], self.noise[i] = row.state, row.noise
        if any(not np.array_equal(ids, row.token_ids) for ids, row in zip(self.ids, rows, strict=True)):
            self._prompt(rows)

    def _prompt(self, rows: Sequence[Inputs]) -> None:
        """What depends on the instructions alone: it stays on the card until they change."""
        for i, row in enumerate(rows):
            self.ids[i] = row.token_ids
            self.rotary[i] = prompt_rotary(self._layout, row.token_ids, row.grid)
        image = self.ids == self._layout.image_token
        self.image[:, 0, 0], self.text[:, 0, 0] = image, ~image
        counted = np.cumsum(image.ravel(), dtype=np.int32).reshape(image.shape) - np.int32(1)
        self.slots[:] = np.where(image, counted, np.int32(-1))  # which feature stands there; text has none
        self._kept.upload("prompt")

    def close(self) -> None:
        """Give everything back."""
        self._kept.close()

    def _sight_for(self, spec: TensorSpec, patches: int) -> FromBytes | FromNumbers:
        shape, size, grid = (patches, most(spec.shape[1])), self._shape.size, self._shape.grid
        if size is None:
            return FromNumbers(self._kept, shape, spec.dtype)
        how = reading((grid[0] * PATCH, grid[1] * PATCH))
        return FromBytes(
            self._kept, shape, spec.dtype, patches // (grid[0] * grid[1]), size, None if size == how.size else area(size, how.size), how
        )

    def _see(self) -> None:
        self._sight.make()
        self.visual.enqueue()

    def _prefill(self) -> None:
        features = self.visual.outputs
        self._card.place(self._tables.embedding, self._ids, features["output"], self._slots, self._embeds["inputs_embeds"])
        for name, into in self._embeds.items():
            if name in features:  # the graph adds the whole tensor: zeros where text stands
                self._card.place(None, self._ids, features[name], self._slots, into)
        self.backbone.enqueue()

    def _denoise(self) -> None:
        steps = len(self._tables.modulation)
        for step, (modulation, bias) in enumerate(zip(self._tables.modulation, self._tables.time_bias, strict=True)):
            if isinstance(self.action, DitBound):
                self.action.enqueue(step, fresh=step == 0)
            else:
                self.action.set("adanorm_modulation", modulation)
                self.action.set("action_time_bias", bias)
                self.action.enqueue()
            self._card.euler(self._x, self.action.outputs["velocity"], 1.0 / steps)  # time runs from noise to data

    def _download(self) -> None:
        self._card.download(self._x, self.chunk)
