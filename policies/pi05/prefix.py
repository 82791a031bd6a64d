"""pi0.5's `prefix` component in kernels of our own. B rows of S tokens, all of which see one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_eval.engines.weights import Weights
from vla_eval.types import Vector

from ..on_rows import Entry, Form, Places, RowsBound, matrices, norm, not_in_order
from .configuration import PREFIX, Geometry


@dataclass(frozen=True, slots=True)
class Prefix:
    """The network as the kernels know it; stored in the component's config.json."""

    form: Form
    layers: int

    @classmethod
    def of(cls, g: Geometry) -> Prefix:
        """Raises BadRequest for a network that the kernels do not take."""
        t = g.prefix
        form = Form(t.width, t.heads, t.kv_heads, t.head_dim, t.mlp, g.rms_norm_eps, layer_norm=False, feed="gated_gelu")
        form.check()
        return cls(form, t.layers)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Prefix:
        """From the config.json."""
        return cls(**{**said, "form": Form(**said["form"])})

    @property
    def widths(self) -> Mapping[str, tuple[int, ...]]:
        return {"turned": (self.form.head_width,), "attended": (self.form.head_width,)}

    def check(self, inputs: Mapping[str, Vector]) -> str | None:
        return not_in_order(inputs["attention_pos_id"])

    def place(self, places: Places, shapes: Mapping[str, Sequence[int]]) -> None:
        batch, length = shapes["inputs_embeds"][:2]
        f = self.form
        places.room(f, batch * length)
        places.plain("x", (batch * length, f.width))
        places.plain("last", (batch * length, 2 * f.kv_heads * f.head_width))
        for name in (f"prefix_{letter}_layer{i:02d}" for i in range(self.layers) for letter in "kv"):
            places.outputs[name] = places.plain(name, (batch, length, f.kv_heads, f.head_width))

    def run(self, bound: RowsBound) -> None:
        b, f = bound.buffers, self.form
        length, table, last = b["inputs_embeds"].shape[1], b["rope_rotary_cos_sin"], self.layers - 1
        kept = [(b[f"prefix_k_layer{i:02d}"], b[f"prefix_v_layer{i:02d}"]) for i in range(self.layers)]
        source = b["inputs_embeds"]
        for i in range(last):
            bound.layer(str(i), f, b["x"], length, source=source, table=table, kept=kept[i])
            source = b["x"]
        bound.norm(f"{last}.before", source, b["normed"], eps=f.eps, layer=False)
        bound.product(f"{last}.asked", b["normed"], b["last"])  # keys and values alone: nobody reads what the layer would go on to compute
        k, v = kept[last]
        stride = f.kv_heads * f.head_width
        bound.kernels.turn(b["last"], table, (0, f.kv_heads), q=k, k=k, v=v, q_stride=stride, kv_stride=stride)


def entries(g: Geometry, w: Weights, kind: type) -> Iterator[tuple[str, Entry]]:
    """What `write_tensors` wants for the component's weights."""
    for i in range(g.prefix.layers):
        layer = w.under(PREFIX).under("layers").under(i)
        last = i == g.prefix.layers - 1
        yield from norm(f"{i}.before", layer.under("input_layernorm"), plus=1.0)
        yield from matrices(kind, f"{i}.asked", *(layer.under(f"self_attn.{letter}_proj") for letter in ("kv" if last else "qkv")))
        if last:
            return
        yield from matrices(kind, f"{i}.out", layer.under("self_attn.o_proj"))
        yield from norm(f"{i}.between", layer.under("post_attention_layernorm"), plus=1.0)
        yield from matrices(kind, f"{i}.up", layer.under("mlp.gate_proj"), layer.under("mlp.up_proj"))
        yield from matrices(kind, f"{i}.down", layer.under("mlp.down_proj"))
