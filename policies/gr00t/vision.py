"""GR00T's `visual` component in kernels of our own. P patches of all pictures, N pictures of one size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_eval.engines.card import Buffer
from vla_eval.engines.many_rows import turns_within
from vla_eval.engines.weights import Weights
from vla_eval.types import Vector

from ..on_rows import Entry, Form, Places, RowsBound, apart, matrices, norm
from .configuration import VISUAL, Architecture


@dataclass(frozen=True, slots=True)
class Vision:
    """The network as the kernels know it; stored in the component's config.json."""

    form: Form
    depth: int
    taps: tuple[int, ...]  # blocks after which a DeepStack feature is taken
    merge: int  # patches of a side that become one token
    outputs: int

    @classmethod
    def of(cls, a: Architecture) -> Vision:
        """Raises BadRequest for a network that the kernels do not take."""
        v = a.vision
        form = Form(v.hidden, v.heads, v.heads, v.head_dim, v.intermediate, v.layer_norm_eps, layer_norm=True, feed="gelu_tanh")
        form.check(v.merge**2 * v.hidden, v.patch_values, v.out_hidden)
        return cls(form, v.depth, tuple(v.deepstack_after_blocks), v.merge, v.out_hidden)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Vision:
        """From the config.json."""
        return cls(**{**said, "form": Form(**said["form"]), "taps": tuple(said["taps"])})

    @property
    def widths(self) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(("turned", "attended", "turning"), (self.form.head_width,))

    def check(self, inputs: Mapping[str, Vector]) -> str | None:
        lengths = np.diff(inputs["cu_seqlens"])
        return None if (lengths == lengths[0]).all() else "pictures of one size"

    def place(self, places: Places, shapes: Mapping[str, Sequence[int]]) -> None:
        rows, f, square = shapes["input"][0], self.form, self.merge**2
        places.room(f, rows)
        places.plain("x", (rows, f.width))
        places.plain("table", (rows, f.head_width), "float32")
        places.plain("places", (rows, f.width))
        mergers, tokens = len(self.taps) + 1, rows // square
        for name in ("squares", "opened", "closed"):
            places.plain(name, (mergers, tokens, square * f.width))
        every = places.plain("features", (mergers, tokens, self.outputs))
        for k, name in enumerate((*(f"deepstack_features_{k}" for k in range(len(self.taps))), "output")):
            places.outputs[name] = every.part(k * tokens * self.outputs, (tokens, self.outputs))

    def run(self, bound: RowsBound) -> None:
        b, f, square = bound.buffers, self.form, self.merge**2
        length = b["x"].shape[0] // (b["cu_seqlens"].shape[0] - 1)
        bound.kernels.angles(b["rotary_pos_emb"], b["table"])
        bound.kernels.corners(bound.fixed["positions"], b["fast_pos_embed_idx"], b["fast_pos_embed_weight"], b["places"])
        bound.product("patches", b["input"], b["x"], base=b["places"])
        within = turns_within(b["x"].shape[0], length, f.heads)
        for i in range(self.depth):
            bound.layer(str(i), f, b["x"], length, table=b["table"], within=within)
            if i in self.taps:
                k = self.taps.index(i)
                bound.norm(f"mergers.{k}.norm", b["x"], self._squares(b, k), eps=f.eps, layer=True, width=square * f.width)
        last = len(self.taps)
        bound.norm(f"mergers.{last}.norm", b["x"], self._squares(b, last), eps=f.eps, layer=True)
        bound.product("mergers.open", b["squares"], b["opened"])  # all at once: one alone leaves most of the card idle
        bound.kernels.gate(b["opened"], b["closed"], "gelu")
        bound.product("mergers.close", b["closed"], b["features"])

    def _squares(self, b: Mapping[str, Buffer], k: int) -> Buffer:
        """Neighbours side by side, as the norm of one merger leaves them."""
        return b["squares"].part(k * b["x"].shape[0] * self.form.width, b["x"].shape)


def entries(a: Architecture, w: Weights, kind: type) -> Iterator[tuple[str, Entry]]:
    """What `write_tensors` wants for the component's weights."""
    w = w.under(VISUAL)
    yield from matrices(kind, "patches", w.under("patch_embed.proj"))
    table = w["pos_embed.weight"]
    yield "positions", (kind, table.shape, table.pieces())
    for i in range(a.vision.depth):
        block = w.under("blocks").under(i)
        yield from norm(f"{i}.before", block.under("norm1"))
        yield from matrices(kind, f"{i}.asked", block.under("attn.qkv"))
        yield from matrices(kind, f"{i}.out", block.under("attn.proj"))
        yield from norm(f"{i}.between", block.under("norm2"))
        yield from matrices(kind, f"{i}.up", block.under("mlp.linear_fc1"))
        yield from matrices(kind, f"{i}.down", block.under("mlp.linear_fc2"))
    mergers = [*(w.under("deepstack_merger_list").under(k) for k in range(len(a.vision.deepstack_after_blocks))), w.under("merger")]
    for k, merger in enumerate(mergers):
        yield from norm(f"mergers.{k}.norm", merger.under("norm"))
    for name, part in (("open", "linear_fc1"), ("close", "linear_fc2")):
        yield from apart(matrices(kind, f"mergers.{name}", *(merger.under(part) for merger in mergers)), len(mergers))
