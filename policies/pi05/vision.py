"""pi0.5's `visual` component in kernels of our own. V views of P patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_eval.engines.weights import Weights
from vla_eval.types import Vector

from ..on_rows import Entry, Form, Places, RowsBound, matrices, norm
from .configuration import PROJECTOR, VISION, Geometry


@dataclass(frozen=True, slots=True)
class Vision:
    """The network as the kernels know it; stored in the component's config.json."""

    form: Form
    layers: int
    patch: int
    patches: int  # of a view
    outputs: int

    @classmethod
    def of(cls, g: Geometry) -> Vision:
        """Raises BadRequest for a network that the kernels do not take."""
        v = g.vision
        form = Form(
            v.hidden, v.heads, v.heads, v.head_dim, v.intermediate, v.layer_norm_eps, layer_norm=True, feed="gelu_tanh", turned=False
        )  # fmt: skip
        form.check()
        return cls(form, v.layers, v.patch, v.tokens_per_view, g.prefix.width)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Vision:
        """From the config.json."""
        return cls(**{**said, "form": Form(**said["form"])})

    @property
    def widths(self) -> Mapping[str, tuple[int, ...]]:
        return {"attended": (self.form.head_width,)}

    @property
    def patch_values(self) -> int:
        """Numbers of a patch, with zeros up to a multiple of eight."""
        return padded(3 * self.patch**2)

    def check(self, inputs: Mapping[str, Vector]) -> str | None:
        return None

    def place(self, places: Places, shapes: Mapping[str, Sequence[int]]) -> None:
        views = shapes["pixel_values"][0]
        rows = views * self.patches
        places.room(self.form, rows)
        places.plain("patches", (rows, self.patch_values))
        places.plain("x", (rows, self.form.width))
        places.repeat("places", "positions", (rows, self.form.width))
        places.outputs["image_features"] = places.plain("image_features", (views, self.patches, self.outputs))

    def run(self, bound: RowsBound) -> None:
        b, f = bound.buffers, self.form
        bound.kernels.patches(b["pixel_values"], b["patches"], self.patch)
        bound.product("patches", b["patches"], b["x"], base=b["places"])
        for i in range(self.layers):
            bound.layer(str(i), f, b["x"], self.patches)
        bound.norm("after", b["x"], b["normed"], eps=f.eps, layer=True)
        bound.product("projector", b["normed"], b["image_features"])


def padded(values: int) -> int:
    """A row's length for products: a multiple of eight."""
    return -(-values // 8) * 8


def entries(g: Geometry, w: Weights, kind: type) -> Iterator[tuple[str, Entry]]:
    """What `write_tensors` wants for the component's weights."""
    tower, projector, v = w.under(VISION), w.under(PROJECTOR), g.vision
    values, patches = 3 * v.patch**2, tower.under("embeddings.patch_embedding")
    kernel = np.pad(patches["weight"].floats().reshape(v.hidden, values), ((0, 0), (0, padded(values) - values)))
    yield "patches.weight", (kind, kernel.shape, [kernel])
    yield "patches.bias", (kind, (v.hidden,), patches["bias"].pieces())
    places = tower["embeddings.position_embedding.weight"]
    yield "positions", (kind, places.shape, places.pieces())
    for i in range(v.layers):
        layer = tower.under("encoder.layers").under(i)
        yield from norm(f"{i}.before", layer.under("layer_norm1"))
        yield from matrices(kind, f"{i}.asked", *(layer.under(f"self_attn.{letter}_proj") for letter in "qkv"))
        yield from matrices(kind, f"{i}.out", layer.under("self_attn.out_proj"))
        yield from norm(f"{i}.between", layer.under("layer_norm2"))
        yield from matrices(kind, f"{i}.up", layer.under("mlp.fc1"))
        yield from matrices(kind, f"{i}.down", layer.under("mlp.fc2"))
    yield from norm("after", tower.under("post_layernorm"))
    yield from matrices(kind, "projector", projector)
