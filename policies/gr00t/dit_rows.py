"""GR00T's `action` component for several robots: `dit`'s step over all their rows, in kernels of our own round cuBLASLt's products.

B robots, T = 1 + horizon rows each: the state, then the actions; R = B · T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_eval.engines.weights import Weights
from vla_eval.types import BadRequest, Vector

from ..on_rows import Entry, Form, Places, RowsBound
from .dit import Array, Shape, layers, places
from .network import DIT_EPS, DIT_OUT_EPS

EIGHT = 8  # numbers: cuBLASLt wants rows in multiples of them


@dataclass(frozen=True, slots=True)
class DitRows:
    """The network as the kernels know it; stored in the component's config.json."""

    shape: Shape

    @classmethod
    def of(cls, shape: Shape) -> DitRows:
        """Raises BadRequest for a network that the kernels do not take."""
        form = Form(
            shape.width, shape.heads, shape.heads, shape.head_width, shape.inner, DIT_EPS, layer_norm=True, feed="gelu_tanh", turned=False
        )  # fmt: skip
        form.check()
        return cls(shape)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> DitRows:
        """From the config.json."""
        return cls(Shape(**said["shape"]))

    @property
    def widths(self) -> Mapping[str, tuple[int, ...]]:
        return {"attended": (self.shape.head_width,)}

    def check(self, inputs: Mapping[str, Vector]) -> str | None:
        return None

    def place(self, room: Places, shapes: Mapping[str, Sequence[int]]) -> None:
        s, robots = self.shape, shapes["state"][0]
        rows = robots * s.rows
        for name, width in {
            "given": padded(s.action), "x": s.width, "normed": s.width, "asked": 3 * s.width, "seen": s.width, "inner": s.inner,
            "head": s.hidden, "moved": padded(s.action),
        }.items():  # fmt: skip
            room.plain(name, (rows, width))
        room.plain("stated", (robots, padded(s.state)))
        room.plain("known", (robots, s.hidden))
        room.repeat("places", "places", (rows, s.width))
        room.outputs["velocity"] = room.plain("velocity", (robots, s.horizon, s.action), "float32")

    def run(self, bound: RowsBound) -> None:
        b, s, kernels = bound.buffers, self.shape, bound.kernels
        w, rows, heads = s.width, b["x"].shape[0], (s.heads, s.heads)
        kernels.spread(b["state"], b["stated"], per=1, skip=0)
        bound.product("state_in", b["stated"], b["known"], follow="RELU")
        bound.product("state_out", b["known"], b["places"], every=s.rows)  # the first row of each robot's
        kernels.spread(b["noise_trajectory"], b["given"], per=s.horizon, skip=1)
        bound.product("encode_in", b["given"], b["normed"])
        kernels.gate(b["normed"], b["seen"], "silu", more=b["action_time_bias"], period=s.rows)  # nothing but its place for the state
        bound.product("encode_out", b["seen"], b["x"], base=b["places"])
        for i in range(s.layers):
            scale, shift = (b["adanorm_modulation"].part((2 * i + k) * w, (w,)) for k in (0, 1))
            kernels.norm(b["x"], b["normed"], eps=DIT_EPS, layer=True, modulation=(scale, shift))
            asked = b["asked"].part(0, (rows, (1 if s.crosses(i) else 3) * w))
            bound.product(f"{i}.in", b["normed"], asked)
            if s.crosses(i):
                k, v = (b[f"cross_{letter}_layer{i:02d}"] for letter in "kv")
                context: dict[str, Any] = {"kv_stride": w, "keys": k.shape[1], "mask": b[f"{s.sees(i)}_attention_mask"]}
            else:
                k, v = (asked.part(n * w, (rows * 3 * w - n * w,)) for n in (1, 2))
                context = {"kv_stride": 3 * w}
            kernels.attention(
                asked, k, v, b["seen"], heads=heads, width=s.head_width, rows=rows, length=s.rows, q_stride=asked.shape[1],
                **context,
            )  # fmt: skip
            bound.product(f"{i}.out", b["seen"], b["x"], base=b["x"])
            kernels.norm(b["x"], b["normed"], eps=DIT_EPS, layer=True)
            bound.product(f"{i}.up", b["normed"], b["inner"], follow="GELU")
            bound.product(f"{i}.down", b["inner"], b["x"], base=b["x"])
        shift, scale = (b["adanorm_modulation"].part((2 * s.layers + k) * w, (w,)) for k in (0, 1))  # the other order than in the blocks
        kernels.norm(b["x"], b["normed"], eps=DIT_OUT_EPS, layer=True, modulation=(scale, shift))
        bound.product("decode_in", b["normed"], b["head"], follow="RELU")
        bound.product("decode_out", b["head"], b["moved"])
        kernels.gather(b["moved"], b["velocity"], per=s.horizon, skip=1)


def padded(width: int) -> int:
    """Numbers of a row, with zeros up to a multiple of eight."""
    return -(-width // EIGHT) * EIGHT


def entries(s: Shape, w: Weights, slot: int, kind: type) -> Iterator[tuple[str, Entry]]:
    """What `write_tensors` wants for the component's weights. Writing them raises BadRequest for what half precision cannot hold."""
    made = layers(s, w, slot)
    sizes = {
        "state_in": (s.hidden, padded(s.state)), "state_out": (s.width, s.hidden), "encode_in": (s.width, padded(s.action)),
        "encode_out": (s.width, s.width), "decode_in": (s.hidden, s.width), "decode_out": (padded(s.action), s.hidden),
    }  # fmt: skip
    for i in range(s.layers):
        sizes |= {f"{i}.in": ((1 if s.crosses(i) else 3) * s.width, s.width), f"{i}.out": (s.width, s.width)}
        sizes |= {f"{i}.up": (s.inner, s.width), f"{i}.down": (s.width, s.inner)}
    bias = made["encode_out"].bias  # is in the actions' places
    yield "places", (kind, (s.rows, s.width), held("places", lambda: places(s, w, bias()), kind, (s.rows, s.width)))
    for name, layer in made.items():
        shape = sizes[name]
        yield f"{name}.weight", (kind, shape, held(name, layer.weight, kind, shape))
        if name != "encode_out":
            yield f"{name}.bias", (kind, shape[:1], held(name, layer.bias, kind, shape[:1]))


def held(name: str, read: Callable[[], Array], kind: type, shape: Sequence[int]) -> Iterator[Vector]:
    """Numbers in half precision, with zeros up to `shape`, read when they are asked for. Raises BadRequest for those that are too large."""
    numbers = read()
    with np.errstate(over="ignore"):
        rounded: Vector = np.pad(numbers, [(0, n - m) for n, m in zip(shape, numbers.shape, strict=True)]).astype(kind)
    if not np.isfinite(rounded).all():
        raise BadRequest(f"--kernels: the weights of {name!r}, folded, are too large for float16; choose --dtype bf16")
    yield rounded
