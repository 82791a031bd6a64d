"""A denoise step of GR00T's DiT in kernels of our own: what they multiply, in which order, and the engine that runs them.

The step is the `action` component's, with what is linear after linear folded beforehand. T = 1 + horizon rows: the state, then the actions.
W wide, L blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.bundle import Component
from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.engine import Tensor, check_inputs, to_host
from vla_eval.engines.few_rows import MOST_KEYS, MOST_ROWS, WIDEST, FewRows, Look, Product, rows_on_card, tile_for
from vla_eval.engines.graph import PRECISIONS
from vla_eval.engines.weights import Weights
from vla_eval.types import BadRequest, Vector

from ..components import KERNELS
from ..workspace import Workspace, about, packed, stored, upload
from .configuration import Architecture
from .network import DIT_EPS, DIT_OUT_EPS

Array = NDArray[np.float32]
PACKED = "dit"  # {PACKED}.safetensors: packed weights and what depends on no step; {PACKED}.{steps}.safetensors: what does


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels must know of the network; stored in the component's config.json."""

    layers: int
    heads: int
    head_width: int
    hidden: int
    inner: int
    action: int
    state: int
    horizon: int
    text_every: int

    @classmethod
    def of(cls, a: Architecture, w: Weights) -> Shape:
        inner = w["action_head.model.transformer_blocks.0.ff.net.0.proj.weight"].shape[0]
        return cls(a.dit_layers, a.dit_heads, a.dit_head_dim, a.hidden, inner, a.action_dim, a.state_dim, a.horizon, a.text_every)

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @property
    def rows(self) -> int:
        return 1 + self.horizon

    def look(self, block: int) -> Look:
        """A block's first half, up to what its heads have seen."""
        return Look(self.rows, self.width, self.head_width, own=not self.crosses(block))

    def crosses(self, block: int) -> bool:
        """Whether the block looks at pictures and text, not at the actions."""
        return block % 2 == 0

    def sees(self, block: int) -> str:
        """What a block that crosses looks at."""
        return "text" if block % (2 * self.text_every) == 0 else "image"


def products(s: Shape) -> dict[str, Product]:
    """Every product by name, in the order of a request, but those of `looks`."""
    w = s.width
    found = {
        "state_in": Product(s.state, s.hidden, out="RELU"), "state_out": Product(s.hidden, w),
        "encode_in": Product(s.action, w, out="SILU"), "encode_out": Product(w, w, out="RESIDUAL"),
    }  # fmt: skip
    for i in range(s.layers):
        found[f"{i}.out"] = Product(w, w, out="RESIDUAL")
        found[f"{i}.up"] = Product(w, s.inner, "LAYER", "GELU")
        found[f"{i}.down"] = Product(s.inner, w, out="RESIDUAL")
    found["decode_in"] = Product(w, s.hidden, "LAYER", "RELU")
    found["decode_out"] = Product(s.hidden, s.action, out="VELOCITY")
    return found


def looks(s: Shape) -> dict[str, Look]:
    """Every block's first half by name."""
    return {f"{i}.in": s.look(i) for i in range(s.layers)}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights [N, K] and bias [N] of a product, read when they are asked for."""

    weight: Callable[[], Array]
    bias: Callable[[], Array]


def layers(s: Shape, w: Weights, slot: int) -> dict[str, Layer]:
    """The products' weights from the checkpoint, `slot` the embodiment's."""
    head, blocks = w.under("action_head"), w.under("action_head.model.transformer_blocks")

    def of_slot(name: str) -> Layer:  # stored [slot, in, out]
        return Layer(lambda: head[f"{name}.W"].row(slot).floats().T, lambda: head[f"{name}.b"].row(slot).floats())

    def plain(*parts: Weights) -> Layer:
        return Layer(
            lambda: np.concatenate([part["weight"].floats() for part in parts]),
            lambda: np.concatenate([part["bias"].floats() for part in parts]),
        )

    def after(first: Layer, then: Layer) -> Layer:
        """One product in place of two; the bias is the first one's alone."""
        return Layer(lambda: then.weight() @ first.weight(), lambda: then.weight() @ first.bias())

    upper = Layer(lambda: head["action_encoder.W2.W"].row(slot).rows(0, s.width).floats().T, lambda: np.zeros(s.width, np.float32))
    found = {
        "state_in": of_slot("state_encoder.layer1"), "state_out": of_slot("state_encoder.layer2"),
        "encode_in": after(of_slot("action_encoder.W1"), upper), "encode_out": of_slot("action_encoder.W3"),
    }  # fmt: skip
    for i in range(s.layers):
        block = blocks.under(i)
        attention = block.under("attn1")
        found[f"{i}.in"] = plain(*(attention.under(part) for part in (("to_q",) if s.crosses(i) else ("to_q", "to_k", "to_v"))))
        found[f"{i}.out"] = plain(attention.under("to_out.0"))
        found[f"{i}.up"] = plain(block.under("ff.net.0.proj"))
        found[f"{i}.down"] = plain(block.under("ff.net.2"))
    last, decoder = plain(head.under("model.proj_out_2")), of_slot("action_decoder.layer1")
    folded = after(last, decoder)
    found["decode_in"] = Layer(folded.weight, lambda: folded.bias() + decoder.bias())
    found["decode_out"] = of_slot("action_decoder.layer2")
    return found


def constants(s: Shape, w: Weights, made: Mapping[str, Layer]) -> dict[str, Array]:
    """Vectors that are the same in every step: biases, what a plain norm's mean takes away, and the actions' positions [T, W]."""
    normed = {*looks(s), *(name for name, product in products(s).items() if product.norm != "NONE")}
    found = {f"{name}.bias": layer.bias() for name, layer in made.items() if name not in normed or name.endswith(".up")}
    found |= {f"{name}.lost": made[name].weight().sum(1) for name in normed if name.endswith(".up")}
    there = places(s, w, found.pop("encode_out.bias"))
    return {**found, "places": there}


def places(s: Shape, w: Weights, bias: Array) -> Array:
    """The actions' positions with the bias before them [T, W]: the state's row is filled by every request, and takes none."""
    found = np.zeros((s.rows, s.width), np.float32)
    found[1:] = w["action_head.position_embedding.weight"].rows(0, s.horizon).floats() + bias
    return found


def step_constants(s: Shape, made: Mapping[str, Layer], modulation: Array, time_bias: Array) -> dict[str, Array]:
    """Vectors [steps, N] that depend on the step, from [steps, L + 1, 2 W] and [steps, W]."""
    found = {"encode_in.late": time_bias}
    for i in range(s.layers + 1):
        halves = modulation[:, i, : s.width], modulation[:, i, s.width :]
        scale, shift = halves if i < s.layers else halves[::-1]
        name = f"{i}.in" if i < s.layers else "decode_in"
        weight = made[name].weight()
        found[f"{name}.lost"] = (1 + scale) @ weight.T
        found[f"{name}.bias"] = shift @ weight.T + made[name].bias()
        found["encode_out.scale" if i == 0 else f"{i - 1}.down.scale"] = 1 + scale
    return {name: np.ascontiguousarray(numbers, np.float32) for name, numbers in found.items()}


class Arithmetic(Protocol):
    """Where a step is computed: buffers go by name, vectors by the product's name and the step."""

    def begin(self, source: str, *, rows: int | None = None) -> None: ...
    def product(
        self, name: str, step: int, source: str, *, narrow: str | None = None, wide: str | None = None, base: str | None = None,
        stats: int | None = None, told: int | None = None, rows: int | None = None,
    ) -> None: ...  # fmt: skip
    def look(self, block: int, step: int, source: str, *, stats: int, narrow: str) -> None: ...


def state_row(do: Arithmetic) -> None:
    """The state's row of `places`: once for a request."""
    do.begin("state", rows=1)
    do.product("state_in", 0, "given", narrow="head", rows=1)
    do.product("state_out", 0, "head", wide="places", rows=1)


def denoise_step(do: Arithmetic, s: Shape, step: int) -> None:
    """`noise_trajectory` to `velocity`. `rows` are what the next norm reads, `wide` the same in float32, `stats` their sums' place."""
    do.begin("noise_trajectory")
    do.product("encode_in", step, "given", narrow="seen")
    do.product("encode_out", step, "seen", base="places", wide="wide", narrow="rows", told=0)
    for i in range(s.layers):
        do.look(i, step, "rows", stats=2 * i, narrow="seen")
        do.product(f"{i}.out", step, "seen", base="wide", wide="wide", narrow="rows", told=2 * i + 1)
        do.product(f"{i}.up", step, "rows", stats=2 * i + 1, narrow="inner")
        do.product(f"{i}.down", step, "inner", base="wide", wide="wide", narrow="rows", told=2 * i + 2)
    do.product("decode_in", step, "rows", stats=2 * s.layers, narrow="head")
    do.product("decode_out", step, "head", wide="velocity")


def eps_of(name: str) -> float:
    """Of the norm before a product."""
    return DIT_OUT_EPS if name == "decode_in" else DIT_EPS


# on a card


def check_shape(s: Shape) -> None:
    """Raises BadRequest for a network that the kernels do not take."""
    try:
        if s.width % 64 or s.width > WIDEST:
            raise ValueError(f"{s.width} wide")
        for look in set(looks(s).values()):
            look.check()
        for product in set(products(s).values()):
            tile_for(product, s.rows)
    except ValueError as error:
        raise BadRequest(
            f"--kernels: they take widths in multiples of 384 up to {WIDEST}, heads in multiples of 16 up to 64, {MOST_ROWS} rows ({error})"
        ) from error


def stored_tensors(s: Shape, w: Weights, slot: int, kind: type) -> Iterator[tuple[str, tuple[type, Sequence[int], Iterator[Vector]]]]:
    """What `write_tensors` wants for {PACKED}.safetensors."""
    made = layers(s, w, slot)
    yield from packed(products(s), looks(s), {name: layer.weight for name, layer in made.items()}, s.rows, kind)
    for name, numbers in constants(s, w, made).items():
        yield name, (np.float32, numbers.shape, iter([numbers]))


class DitEngine:
    """The `action` component in kernels of our own, behind the protocol of a TensorRT engine, for one robot."""

    def __init__(self, component: Component, card: Card, modulation: Vector, time_bias: Vector) -> None:
        """Raises BadRequest for a component without packed weights, ContractMismatch for one of another network."""
        self.where, self.component, self.card = str(component.folder), component, card
        self.inputs, self.outputs = component.inputs, component.outputs
        self.shape = Shape(**component.config["builder_config"][KERNELS])
        self._modulation, self._time_bias = modulation, time_bias
        self.plan, self.looks = products(self.shape), looks(self.shape)
        self.kernels = FewRows(
            card, [*self.plan.values()], self.shape.rows, dtype=PRECISIONS[component.dtype], head_width=self.shape.head_width,
            looks=[*self.looks.values()],
        )  # fmt: skip
        fixed = stored(component, f"{PACKED}.safetensors", self.kernels, self.plan, self.looks)
        self.places = rows_on_card(fixed.pop("places"), self.kernels.rows)
        self.fixed = upload(card, fixed)
        made = component.tensors(f"{PACKED}.{len(modulation)}.safetensors")
        kinds = {name: time_bias.dtype if name.endswith(".late") else numbers.dtype for name, numbers in made.items()}
        self.steps = [upload(card, {name: made[name][k].astype(kinds[name]) for name in made}) for k in range(len(modulation))]
        self.about = about(component, card, "few_rows")
        self._asked: DitBound | None = None  # of the last call

    def bind(self, shapes: Mapping[str, Sequence[int]]) -> DitBound:
        """Buffers for a prompt's length. Raises BadRequest for more rows or tokens than the kernels take."""
        if shapes["state"][0] != 1:
            raise BadRequest(f"{self.where}: the kernels answer one robot at a time; take --option kernels=no")
        if (tokens := shapes["text_attention_mask"][-1]) > MOST_KEYS:
            raise BadRequest(
                f"{self.where}: the kernels take prompts of {MOST_KEYS} tokens, this one has {tokens}; take --option kernels=no"
            )
        return DitBound(self, tokens)

    def step_of(self, modulation: Vector, time_bias: Vector) -> int:
        """The step whose constants these are. Raises BadRequest for others: what depends on them was computed beforehand."""
        for step, (row, bias) in enumerate(zip(self._modulation, self._time_bias, strict=True)):
            if np.array_equal(row, modulation) and np.array_equal(bias, time_bias):
                return step
        raise BadRequest(f"{self.where}: these are the time constants of no step of {len(self._modulation)}; take --option kernels=no")

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        """As an engine: host arrays or buffers in, buffers out."""
        check_inputs(self.where, self.inputs, inputs)
        step = self.step_of(*(to_host(inputs[name]) for name in ("adanorm_modulation", "action_time_bias")))
        tokens = inputs["text_attention_mask"].shape[-1]
        if self._asked is None or self._asked.tokens != tokens:
            if self._asked is not None:
                self._asked.close()
            self._asked = self.bind({name: tensor.shape for name, tensor in inputs.items()})
        for name, tensor in inputs.items():
            self._asked.space.feed(name, tensor)
        self._asked.enqueue(step, fresh=True)
        return dict(self._asked.outputs)


class DitBound:
    """The buffers of one prompt length, and what is enqueued on them."""

    def __init__(self, engine: DitEngine, tokens: int) -> None:
        self._engine, self.tokens = engine, tokens
        s, kind = engine.shape, PRECISIONS[engine.component.dtype]
        self.space = space = Workspace(engine.kernels, engine.plan, 2 * s.layers + 1, engine.looks)
        self._given = -(-max(s.action, s.state) // 16) * 16
        for name, size in {"given": self._given, "seen": s.width, "rows": s.width, "inner": s.inner, "head": s.hidden}.items():
            space.rows(name, size, kind)
        space.rows("wide", s.width, "float32")
        space.rows("places", s.width, "float32")
        engine.card.upload(engine.places, space.buffers["places"])
        self.outputs = {"velocity": space.plain("velocity", (1, s.horizon, s.action), "float32")}
        engine.card.wait()

    def set(self, name: str, buffer: Buffer) -> None:
        """Bind an input, without a copy."""
        self.space.feed(name, buffer)

    def enqueue(self, step: int, *, fresh: bool) -> None:
        """Give a step's work to the stream; `fresh` where the state may be another than in the step before."""
        if fresh:
            state_row(self)
        denoise_step(self, self._engine.shape, step)

    def begin(self, source: str, *, rows: int | None = None) -> None:
        s, b = self._engine.shape, self.space.buffers
        alone = rows is not None
        self._engine.kernels.begin(
            x=b[source], out=b["given"], stats=self.space.sums, first=0 if alone else 1, padded=self._given, slots=self.space.slots,
            rows=s.rows if rows is None else rows, width=s.state if alone else s.action,
        )  # fmt: skip

    def product(
        self, name: str, step: int, source: str, *, narrow: str | None = None, wide: str | None = None, base: str | None = None,
        stats: int | None = None, told: int | None = None, rows: int | None = None,
    ) -> None:  # fmt: skip
        s, engine = self._engine.shape, self._engine
        self.space.product(
            name, [engine.fixed, engine.steps[step]], source, eps=eps_of(name), narrow=narrow, wide=wide, base=base, stats=stats, told=told,
            rows=rows, first=1 if rows is None else 0,
            out_width=s.action if wide == "velocity" else None,
        )  # fmt: skip

    def look(self, block: int, step: int, source: str, *, stats: int, narrow: str) -> None:
        s, b, name, values = self._engine.shape, self.space.buffers, f"{block}.in", dict[str, Buffer]()
        keys = s.rows
        if s.crosses(block):
            keys = self.tokens
            values = {letter: b[f"cross_{letter}_layer{block:02d}"] for letter in "kv"} | {"mask": b[f"{s.sees(block)}_attention_mask"]}
        self.space.look(name, [self._engine.fixed, self._engine.steps[step]], source, keys, stats=stats, out=narrow, eps=DIT_EPS, **values)

    def close(self) -> None:
        """Give the buffers back."""
        self.space.close()
