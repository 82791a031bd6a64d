"""GR00T's `visual` component in kernels of our own. P patches of all pictures, N pictures of one size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_eval.engines.weights import Weights
from vla_eval.types import Vector

from ..on_rows import Entry, Form, Places, RowsBound, matrices, norm
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
    def turned(self) -> tuple[int, ...]:
        return (self.form.head_width,)

    attended = turned

    def check(self, inputs: Mapping[str, Vector]) -> str | None:
        lengths = np.diff(inputs["cu_seqlens"])
        return None if (lengths == lengths[0]).all() else "pictures of one size"

    def place(self, places: Places, shapes: Mapping[str, Sequence[int]]) -> None:
        rows, f, square = shapes["input"][0], self.form, self.merge**2
        places.room(f, rows)
        places.plain("x", (rows, f.width))
        places.plain("table", (rows, f.head_width), "float32")
        places.plain("places", (rows, f.width))
        for name in ("merged", "opened"):
            places.plain(name, (rows // square, square * f.width))
        for name in ("output", *(f"deepstack_features_{k}" for k in range(len(self.taps)))):
            places.outputs[name] = places.plain(name, (rows // square, self.outputs))

    def run(self, bound: RowsBound) -> None:
        b, f, square = bound.buffers, self.form, self.merge**2
        length = b["x"].shape[0] // (b["cu_seqlens"].shape[0] - 1)
        bound.kernels.angles(b["rotary_pos_emb"], b["table"])
        bound.kernels.corners(bound.fixed["positions"], b["fast_pos_embed_idx"], b["fast_pos_embed_weight"], b["places"])
        bound.product("patches", b["input"], b["x"], base=b["places"])
        for i in range(self.depth):
            bound.layer(str(i), f, b["x"], length, table=b["table"])
            if i in self.taps:
                name = f"deepstack_features_{self.taps.index(i)}"
                bound.norm(f"{name}.norm", b["x"], b["normed"], eps=f.eps, layer=True, width=square * f.width)
                self._merge(bound, name)
        bound.norm("output.norm", b["x"], b["normed"], eps=f.eps, layer=True)
        self._merge(bound, "output")

    def _merge(self, bound: RowsBound, name: str) -> None:
        """Neighbours side by side, which a norm has left in `normed`, to an output."""
        b = bound.buffers
        bound.product(f"{name}.open", b["normed"].part(0, b["merged"].shape), b["merged"])
        bound.kernels.gate(b["merged"], b["opened"], "gelu")
        bound.product(f"{name}.close", b["opened"], b[name])


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
    mergers = {"output": w.under("merger")}  # by what they give
    mergers |= {f"deepstack_features_{k}": w.under("deepstack_merger_list").under(k) for k in range(len(a.vision.deepstack_after_blocks))}
    for name, part in mergers.items():
        yield from norm(f"{name}.norm", part.under("norm"))
        yield from matrices(kind, f"{name}.open", part.under("linear_fc1"))
        yield from matrices(kind, f"{name}.close", part.under("linear_fc2"))
