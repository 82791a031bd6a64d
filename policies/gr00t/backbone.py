"""GR00T's `vl_backbone` component in kernels of our own. B rows of S tokens, T = B · S."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_eval.engines.weights import Weights
from vla_eval.types import Vector

from ..on_rows import Entry, Form, Places, RowsBound, apart, matrices, norm, not_in_order
from .configuration import TEXT, Architecture
from .network import VL_EPS

SEEING = "action_head.vl_self_attention.transformer_blocks"


@dataclass(frozen=True, slots=True)
class Backbone:
    """The network as the kernels know it; stored in the component's config.json."""

    text: Form
    text_layers: int
    seeing: Form  # of the blocks in which every token sees every token
    seeing_layers: int
    taps: int
    crosses: tuple[int, ...]  # blocks of the DiT that look here
    heads: int  # of those
    head_width: int

    @classmethod
    def of(cls, a: Architecture, w: Weights) -> Backbone:
        """Raises BadRequest for a network that the kernels do not take."""
        t = a.text
        inner = w[f"{SEEING}.0.ff.net.0.proj.weight"].shape[0] if a.vl_layers else 8
        text = Form(
            t.hidden, t.heads, t.kv_heads, t.head_dim, t.intermediate, t.rms_norm_eps, layer_norm=False, feed="gated_silu", causal=True
        )  # fmt: skip
        seeing = Form(t.hidden, a.vl_heads, a.vl_heads, a.vl_head_dim, inner, VL_EPS, layer_norm=True, feed="gelu_tanh", turned=False)
        for form in (text, seeing):
            form.check()
        taps = len(a.vision.deepstack_after_blocks)
        return cls(text, t.layers_kept, seeing, a.vl_layers, taps, tuple(a.cross_blocks), a.dit_heads, a.dit_head_dim)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Backbone:
        """From the config.json."""
        return cls(**{**said, "text": Form(**said["text"]), "seeing": Form(**said["seeing"]), "crosses": tuple(said["crosses"])})

    @property
    def widths(self) -> Mapping[str, tuple[int, ...]]:
        both = self.text.head_width, self.seeing.head_width
        return {"turned": both[:1], "attended": tuple(dict.fromkeys(both))}

    def check(self, inputs: Mapping[str, Vector]) -> str | None:
        return not_in_order(inputs["attention_pos_id"])

    def place(self, places: Places, shapes: Mapping[str, Sequence[int]]) -> None:
        batch, length = shapes["inputs_embeds"][:2]
        rows = batch * length
        places.room(self.text, rows)
        places.room(self.seeing, rows, "seeing_")
        places.plain("x", (rows, self.text.width))
        places.plain("y", (rows, self.text.width))
        shape = (batch, length, self.heads, self.head_width)
        every = places.plain("crosses", (2 * len(self.crosses), rows, self.heads * self.head_width))
        for n, (block, letter) in enumerate((block, letter) for block in self.crosses for letter in "kv"):
            places.outputs[f"cross_{letter}_layer{block:02d}"] = every.part(n * math.prod(shape), shape)

    def run(self, bound: RowsBound) -> None:
        b = bound.buffers
        length = b["inputs_embeds"].shape[1]
        more = {1 + k: b[f"deepstack_embeds_{k}"] for k in range(self.taps)}  # by the layer that sees it first
        for i in range(self.text_layers):
            source = b["inputs_embeds"] if i == 0 else None
            bound.layer(f"text{i}", self.text, b["x"], length, source=source, more=more.get(i), table=b["rope_rotary_cos_sin"])
        bound.norm("vlln", b["x"], b["y"], eps=VL_EPS, layer=True, more=more.get(self.text_layers))
        for i in range(self.seeing_layers):
            bound.layer(f"seeing{i}", self.seeing, b["y"], length, room="seeing_")
        bound.product("crosses", b["y"], b["crosses"])


def entries(a: Architecture, w: Weights, kind: type) -> Iterator[tuple[str, Entry]]:
    """What `write_tensors` wants for the component's weights."""
    for i in range(a.text.layers_kept):
        layer = w.under(f"{TEXT}.layers").under(i)
        attention, mlp, name = layer.under("self_attn"), layer.under("mlp"), f"text{i}"
        yield from norm(f"{name}.before", layer.under("input_layernorm"))
        yield from matrices(kind, f"{name}.asked", *(attention.under(f"{letter}_proj") for letter in "qkv"))
        yield from norm(f"{name}.q_norm", attention.under("q_norm"))
        yield from norm(f"{name}.k_norm", attention.under("k_norm"))
        yield from matrices(kind, f"{name}.out", attention.under("o_proj"))
        yield from norm(f"{name}.between", layer.under("post_attention_layernorm"))
        yield from matrices(kind, f"{name}.up", mlp.under("gate_proj"), mlp.under("up_proj"))
        yield from matrices(kind, f"{name}.down", mlp.under("down_proj"))
    head = w.under("action_head")
    yield from norm("vlln", head.under("vlln"))
    for i in range(a.vl_layers):
        block, name = w.under(SEEING).under(i), f"seeing{i}"
        attention, ff = block.under("attn1"), block.under("ff")
        yield from norm(f"{name}.before", block.under("norm1"))
        yield from matrices(kind, f"{name}.asked", *(attention.under(part) for part in ("to_q", "to_k", "to_v")))
        yield from matrices(kind, f"{name}.out", attention.under("to_out.0"))
        yield from norm(f"{name}.between", block.under("norm3"))
        yield from matrices(kind, f"{name}.up", ff.under("net.0.proj"))
        yield from matrices(kind, f"{name}.down", ff.under("net.2"))
    crosses = [head.under(f"model.transformer_blocks.{i}.attn1").under(part) for i in a.cross_blocks for part in ("to_k", "to_v")]
    yield from apart(matrices(kind, "crosses", *crosses), len(crosses))
