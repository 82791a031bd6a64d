"""A denoise step of pi0.5's action expert in kernels of our own: what they multiply, in which order, and the engine that runs them.

The step is the `action` component's where the time's part is hoisted out of it. H actions, W wide, L layers, M adaRMS sites.
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
from vla_eval.engines.few_rows import MOST_SHARING, WIDEST, FewRows, Product, interleaved, rows_on_card, tile_for
from vla_eval.engines.graph import NUMPY, PRECISIONS
from vla_eval.engines.weights import Weights
from vla_eval.types import BadRequest, Vector

from ..components import KERNELS
from ..workspace import Workspace, about, packed, stored, upload
from .configuration import EXPERT, Geometry

Array = NDArray[np.float32]
PACKED = "expert"  # {PACKED}.safetensors: packed weights and the two projections


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels must know of the network; stored in the component's config.json."""

    layers: int
    width: int
    heads: int
    head_width: int
    mlp: int
    horizon: int
    action: int
    eps: float

    @classmethod
    def of(cls, g: Geometry, horizon: int, action: int) -> Shape:
        e = g.expert
        return cls(e.layers, e.width, e.heads, e.head_dim, e.mlp, horizon, action, g.rms_norm_eps)

    @property
    def asked(self) -> int:
        """Queries of all heads, and the keys and values that they share."""
        return (self.heads + 2) * self.head_width


def products(s: Shape) -> dict[str, Product]:
    """Every product of a step by name, in order."""
    found = {}
    for i in range(s.layers):
        found[f"{i}.in"] = Product(s.width, s.asked, "RMS")
        found[f"{i}.out"] = Product(s.heads * s.head_width, s.width, out="RESIDUAL")
        found[f"{i}.up"] = Product(s.width, 2 * s.mlp, "RMS", "GATE_UP")
        found[f"{i}.down"] = Product(s.mlp, s.width, out="RESIDUAL")
    return found


def layers(s: Shape, w: Weights) -> dict[str, Callable[[], Array]]:
    """The products' weights [N, K] from the checkpoint, gate before up."""

    def plain(i: int, *parts: str) -> Callable[[], Array]:
        layer = w.under(EXPERT).under("layers").under(i)
        return lambda: np.concatenate([layer[f"{part}.weight"].floats() for part in parts])

    found = {}
    for i in range(s.layers):
        found[f"{i}.in"] = plain(i, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        found[f"{i}.out"] = plain(i, "self_attn.o_proj")
        found[f"{i}.up"] = plain(i, "mlp.gate_proj", "mlp.up_proj")
        found[f"{i}.down"] = plain(i, "mlp.down_proj")
    return found


def projections(w: Weights) -> dict[str, Array]:
    """Both projections in float32: the first as [K, N], the second as [N, K]."""
    given, asked = w.under("action_in_proj"), w.under("action_out_proj")
    return {
        "project_in.weight": np.ascontiguousarray(given["weight"].floats().T), "project_in.bias": given["bias"].floats(),
        "project_out.weight": asked["weight"].floats(), "project_out.bias": asked["bias"].floats(),
    }  # fmt: skip


def site_vectors(s: Shape, modulation: Array) -> dict[str, Array]:
    """Scales, shifts and gates of one step by the product that uses them, from [M, 3 W]."""
    found = {}
    for i in range(2 * s.layers + 1):
        scale, shift, gate = np.split(modulation[i], 3)
        layer, second = divmod(i, 2)
        before = "project_in" if i == 0 else f"{layer - 1}.down" if not second else f"{layer}.out"
        if i == 2 * s.layers:
            found["project_out.scale"], found["project_out.shift"] = 1 + scale, shift
            break
        found[f"{before}.scale"] = 1 + scale
        found[f"{layer}.{'up' if second else 'in'}.shift"] = shift
        found[f"{layer}.{'down' if second else 'out'}.gate"] = gate
    return {name: np.ascontiguousarray(numbers, np.float32) for name, numbers in found.items()}


class Arithmetic(Protocol):
    """Where a step is computed: buffers go by name, vectors by the product's name."""

    def begin(self) -> None: ...
    def project_in(self) -> None: ...
    def product(
        self, name: str, source: str, *, narrow: str | None = None, wide: str | None = None, base: str | None = None,
        stats: int | None = None, told: int | None = None,
    ) -> None: ...  # fmt: skip
    def attention(self, layer: int) -> None: ...
    def project_out(self) -> None: ...


def denoise_step(do: Arithmetic, s: Shape) -> None:
    """`noise_trajectory` to `action_pred`. `rows` are what the next norm reads, `wide` the same in float32, `stats` their sums' place."""
    do.begin()
    do.project_in()
    for i in range(s.layers):
        do.product(f"{i}.in", "rows", stats=2 * i, narrow="asked")
        do.attention(i)
        do.product(f"{i}.out", "seen", base="wide", wide="wide", narrow="rows", told=2 * i + 1)
        do.product(f"{i}.up", "rows", stats=2 * i + 1, narrow="inner")
        do.product(f"{i}.down", "inner", base="wide", wide="wide", narrow="rows", told=2 * i + 2)
    do.project_out()


# on a card


def check_shape(s: Shape) -> None:
    """Raises BadRequest for a network that the kernels do not take."""
    try:
        if s.width % 64 or s.width > WIDEST or s.head_width % 64 or s.horizon > MOST_SHARING:
            raise ValueError(f"{s.width} wide, heads of {s.head_width}, {s.horizon} actions")
        for product in set(products(s).values()):
            tile_for(product, s.horizon)
    except ValueError as error:
        raise BadRequest(
            f"--kernels: they take widths and heads in multiples of 64, up to {WIDEST} and {MOST_SHARING} actions ({error})"
        ) from error


def stored_tensors(s: Shape, w: Weights, kind: type) -> Iterator[tuple[str, tuple[type, Sequence[int], Iterator[Vector]]]]:
    """What `write_tensors` wants for {PACKED}.safetensors."""
    yield from packed(products(s), {}, layers(s, w), s.horizon, kind)
    for name, numbers in projections(w).items():
        yield name, (np.float32, numbers.shape, iter([numbers]))


class ExpertEngine:
    """The `action` component in kernels of our own, behind the protocol of a TensorRT engine, for one robot."""

    def __init__(self, component: Component, card: Card) -> None:
        """Raises BadRequest for a component without packed weights, ContractMismatch for one of another network."""
        self.where, self.component, self.card = str(component.folder), component, card
        self.inputs, self.outputs = component.inputs, component.outputs
        self.shape = s = Shape(**component.config["builder_config"][KERNELS])
        self.plan = products(s)
        self._shifted = {name: Product(p.inputs, p.outputs) for name, p in self.plan.items() if p.norm == "RMS"}  # of shifts, not of rows
        every = [*self.plan.values(), *self._shifted.values()]
        self.kernels = FewRows(card, every, s.horizon, dtype=PRECISIONS[component.dtype], head_width=s.head_width)
        self.fixed = upload(card, stored(component, f"{PACKED}.safetensors", self.kernels, self.plan))
        self.about = about(component, card, "few_rows")
        self._asked: tuple[ExpertBound, list[dict[str, Buffer]]] | None = None  # of the last call

    def prepare(self, modulation: Sequence[Array]) -> list[dict[str, Buffer]]:
        """The vectors of each step, from its scales, shifts and gates [1, M, 3 W]; to be freed by whoever asked for them.

        A norm's shift goes through the product beforehand, steps as rows.
        """
        found = [site_vectors(self.shape, np.asarray(step, np.float32)[0]) for step in modulation]
        space = Workspace(self.kernels, self._shifted, 1)
        kind, r = PRECISIONS[self.component.dtype], self.kernels.rows
        space.rows("shifts", self.shape.width, kind)
        for name, product in self._shifted.items():
            tile, real = self.kernels.tiles[product], self.kernels.tiles[self.plan[name]]
            assert (tile.cluster, tile.width, tile.steps) == (
                real.cluster,
                real.width,
                real.steps,
            )  # so both read the weights as they are packed
            if (into := f"made {product.outputs}") not in space.buffers:
                space.rows(into, product.outputs, "float32")
            for first in range(0, len(found), r):
                some = found[first : first + r]
                shifts = np.stack([vectors.pop(f"{name}.shift") for vectors in some]).astype(NUMPY[kind])
                self.card.upload(rows_on_card(shifts, r), space.buffers["shifts"])
                self.card.wait()
                space.product(name, [self.fixed], "shifts", eps=0.0, wide=into, rows=len(some))
                made = space.buffers[into].to_host().transpose(1, 0, 2).reshape(r, -1)
                for vectors, numbers in zip(some, made, strict=False):
                    if real.product.out == "GATE_UP":
                        halves = np.empty_like(numbers)
                        halves[interleaved(real)] = numbers
                        vectors[f"{name}.bias"], vectors[f"{name}.lost"] = np.split(halves, 2)
                    else:
                        vectors[f"{name}.bias"] = numbers.copy()
        space.close()
        return [upload(self.card, vectors) for vectors in found]

    def bind(self, shapes: Mapping[str, Sequence[int]]) -> ExpertBound:
        """Buffers for a prefix's length. Raises BadRequest for more rows than the kernels take."""
        if shapes["noise_trajectory"][0] != 1:
            raise BadRequest(f"{self.where}: the kernels answer one robot at a time; take --option kernels=no")
        return ExpertBound(self, shapes["prefix_k_layer00"][1])

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        """As an engine: host arrays or buffers in, buffers out."""
        check_inputs(self.where, self.inputs, inputs)
        if (to_host(inputs["attention_pos_id"]) != np.arange(self.shape.horizon)).any():
            raise BadRequest(f"{self.where}: the kernels take the rotary table's rows in order; take --option kernels=no")
        if self._asked is not None:
            self._asked[0].close()
            self.card.free(*self._asked[1][0].values())
        steps = self.prepare([np.asarray(to_host(inputs["adarms_modulation"]), np.float32)])
        bound = self.bind({name: tensor.shape for name, tensor in inputs.items()})
        self._asked = bound, steps
        for name, tensor in inputs.items():
            bound.space.feed(name, tensor)
        bound.enqueue(steps[0])
        return dict(bound.outputs)


class ExpertBound:
    """The buffers of one prefix length, and what is enqueued on them."""

    def __init__(self, engine: ExpertEngine, tokens: int) -> None:
        self._engine, self._tokens, self._vectors = engine, tokens, dict[str, Buffer]()
        s, kind = engine.shape, PRECISIONS[engine.component.dtype]
        self.space = space = Workspace(engine.kernels, engine.plan, 2 * s.layers + 1)
        for name, size in {"seen": s.heads * s.head_width, "rows": s.width, "inner": s.mlp}.items():
            space.rows(name, size, kind)
        space.rows("wide", s.width, "float32")
        space.plain("asked", (s.horizon, s.asked), kind)
        self.outputs = {"action_pred": space.plain("action_pred", (1, s.horizon, s.action), "float32")}

    def set(self, name: str, buffer: Buffer) -> None:
        """Bind an input, without a copy."""
        self.space.feed(name, buffer)

    def enqueue(self, vectors: dict[str, Buffer]) -> None:
        """Give a step's work to the stream."""
        self._vectors = vectors
        denoise_step(self, self._engine.shape)

    def begin(self) -> None:
        self._engine.kernels.begin(stats=self.space.sums, slots=self.space.slots)  # no rows: the first product is in float32

    def project_in(self) -> None:
        s, b, fixed = self._engine.shape, self.space.buffers, self._engine.fixed
        self._engine.kernels.project_in(
            s.action, s.width, x=b["noise_trajectory"], weight=fixed["project_in.weight"], bias=fixed["project_in.bias"],
            scale=self._vectors["project_in.scale"], wide=b["wide"], narrow=b["rows"], told=self.space.slot(0),
        )  # fmt: skip

    def product(
        self, name: str, source: str, *, narrow: str | None = None, wide: str | None = None, base: str | None = None,
        stats: int | None = None, told: int | None = None,
    ) -> None:  # fmt: skip
        s = self._engine.shape
        self.space.product(
            name, [self._engine.fixed, self._vectors], source, eps=s.eps, narrow=narrow, wide=wide, base=base, stats=stats, told=told,
            out_width=s.asked if narrow == "asked" else None,
        )  # fmt: skip

    def attention(self, layer: int) -> None:
        s, b = self._engine.shape, self.space.buffers
        self._engine.kernels.attention_shared(
            s.heads, self._tokens, own=b["asked"], k=b[f"prefix_k_layer{layer:02d}"], v=b[f"prefix_v_layer{layer:02d}"],
            rotary=b["rope_rotary_cos_sin"], out=b["seen"],
        )  # fmt: skip

    def project_out(self) -> None:
        s, b, fixed = self._engine.shape, self.space.buffers, self._engine.fixed
        self._engine.kernels.project_out(
            s.width, s.action, wide=b["wide"], scale=self._vectors["project_out.scale"], shift=self._vectors["project_out.shift"],
            weight=fixed["project_out.weight"], bias=fixed["project_out.bias"], out=b["action_pred"], eps=s.eps,
        )  # fmt: skip

    def close(self) -> None:
        """Give the buffers back."""
        self.space.close()
