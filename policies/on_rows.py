"""Components over many rows (pictures, prompts) in kernels of our own: what is stored for them, their buffers, and the layer they share.

B sequences of S rows each, T = B · S rows, W wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np

from vla_eval.engines.bundle import Component
from vla_eval.engines.card import Buffer, Card
from vla_eval.engines.engine import Tensor, check_inputs, to_host
from vla_eval.engines.graph import PRECISIONS
from vla_eval.engines.many_rows import WIDEST, WORKSPACE, Follow, ManyRows
from vla_eval.engines.weights import Weights
from vla_eval.types import BadRequest, ContractMismatch, Vector

from .components import KERNELS, Own, most
from .workspace import about

PACKED = "rows"  # {PACKED}.safetensors: matrices in half precision, norms in float32
Entry = tuple[Any, Sequence[int], Iterable[Vector]]  # of `write_tensors`


@dataclass(frozen=True, slots=True)
class Form:
    """A layer: norm, attention, norm, feed forward, each half added to what came in."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    eps: float
    layer_norm: bool  # else RMSNorm
    feed: Literal["gelu_tanh", "gated_gelu", "gated_silu"]
    causal: bool = False
    turned: bool = True  # rotary on queries and keys

    def check(self, *others: int) -> None:
        """Raises BadRequest for a layer that the kernels do not take, or other rows beside it."""
        d, normed = self.head_width, (self.width, *others)
        if odd := [width for width in (*normed, self.inner) if width % 8] + [width for width in normed if width > WIDEST]:
            raise BadRequest(f"--kernels: they take rows in multiples of 8 numbers, {WIDEST} at most where they are normed, not {odd[0]}")
        if d % 8 or d > 256 or (self.turned and d not in (16, 32, 64, 128, 256)):
            raise BadRequest(f"--kernels: they take heads in multiples of 8 numbers up to 256, powers of two with rotary, not {d}")

    @property
    def asked(self) -> int:
        """Numbers of a row's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_width


def matrices(kind: Any, name: str, *parts: Weights) -> Iterator[tuple[str, Entry]]:
    """Weights, and biases where there are any, stacked: entries `{name}.weight` [N, K] and `{name}.bias` [N]."""
    for what in ("weight", "bias"):
        tensors = [part[what] for part in parts if what in part]
        if tensors or what == "weight":
            rows = sum(tensor.shape[0] for tensor in tensors)
            columns = (math.prod(tensors[0].shape[1:]),) if what == "weight" else ()
            yield f"{name}.{what}", (kind, (rows, *columns), (piece for tensor in tensors for piece in tensor.pieces()))


def apart(entries: Iterator[tuple[str, Entry]], count: int) -> Iterator[tuple[str, Entry]]:
    """The same of `count` parts, [L, N, K] and [L, N], for one product of all of them."""
    for name, (dtype, shape, pieces) in entries:
        yield name, (dtype, (count, shape[0] // count, *shape[1:]), pieces)


def norm(name: str, w: Weights, plus: float = 0.0) -> Iterator[tuple[str, Entry]]:
    """A norm's vectors in float32; some models keep the gain less one."""
    weight = w["weight"].floats() + np.float32(plus)
    yield f"{name}.weight", (np.float32, weight.shape, [weight])
    if "bias" in w:
        bias = w["bias"].floats()
        yield f"{name}.bias", (np.float32, bias.shape, [bias])


class Network(Protocol):
    """What a model says of one of its components."""

    @property
    def widths(self) -> Mapping[str, tuple[int, ...]]: ...  # of heads, as `ManyRows` wants them
    def check(self, inputs: Mapping[str, Vector]) -> str | None: ...  # what of these inputs the kernels take otherwise than the graph
    def place(self, places: Places, shapes: Mapping[str, Sequence[int]]) -> None: ...  # all buffers, outputs too
    def run(self, bound: RowsBound) -> None: ...


def not_in_order(rows: Vector) -> str | None:
    """What the kernels take of a rotary table's rows, where these are others."""
    return None if (rows.ravel() == np.arange(rows.size)).all() else "the rotary table's rows in order"


class Places:
    """Buffers by name for inputs of some shapes, taken from `empty`."""

    def __init__(self, dtype: str, empty: Callable[[Sequence[int], str], Buffer]) -> None:
        self._dtype, self._empty = dtype, empty
        self.buffers: dict[str, Buffer] = {}
        self.outputs: dict[str, Buffer] = {}
        self.kept: list[Buffer] = []
        self.repeated: dict[str, str] = {}  # buffers that hold a stored table over and over

    def plain(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Buffer:
        """A buffer that nobody has written yet, in the component's precision."""
        self.buffers[name] = self._empty(shape, dtype or self._dtype)
        self.kept.append(self.buffers[name])
        return self.buffers[name]

    def repeat(self, name: str, table: str, shape: Sequence[int]) -> None:
        """A buffer with the rows of a stored table, over and over."""
        self.plain(name, shape)
        self.repeated[name] = table

    def room(self, form: Form, rows: int, name: str = "") -> None:
        """What `layer` needs beside its rows; smaller forms may share a larger one's."""
        for what, width in (
            ("normed", form.width), ("asked", form.asked), ("seen", form.heads * form.head_width), ("inner", form.inner),
            *([("both", 2 * form.inner)] if form.feed != "gelu_tanh" else []),
        ):  # fmt: skip
            self.plain(f"{name}{what}", (rows, width))


def own(read: Callable[[Mapping[str, Any]], Network]) -> Own:
    """A component that such a network answers for; `read` makes it of what the export wrote into config.json."""

    def network(component: Component) -> Network:
        return read(component.config["builder_config"][KERNELS])

    return Own(
        lambda component, card: RowsEngine(component, card, network(component)), (f"{PACKED}.safetensors",),
        scratch=lambda component: scratch(component, network(component)),
    )  # fmt: skip


def scratch(component: Component, network: Network) -> int:
    """Bytes that a request of the largest shape takes beside the component's inputs, outputs and weights."""
    places = Places(PRECISIONS[component.dtype], lambda shape, dtype: Buffer(cast("Card", None), 0, tuple(shape), dtype))
    network.place(places, {spec.name: [most(axis) for axis in spec.shape] for spec in component.inputs})
    return WORKSPACE + sum(buffer.bytes for buffer in places.kept) - sum(buffer.bytes for buffer in places.outputs.values())


class RowsEngine:
    """A component in kernels of our own, behind the protocol of a TensorRT engine."""

    def __init__(self, component: Component, card: Card, network: Network) -> None:
        """Raises BadRequest without cuBLAS and for a component without such weights."""
        self.where, self.component, self.card, self.network = str(component.folder), component, card, network
        self.inputs, self.outputs = component.inputs, component.outputs
        self.kernels = ManyRows(card, dtype=PRECISIONS[component.dtype], **network.widths)
        self.fixed = {name: card.load(array) for name, array in component.tensors(f"{PACKED}.safetensors").items()}
        self.about = about(component, card, "many_rows")
        self._asked: tuple[tuple[tuple[str, tuple[int, ...]], ...], RowsBound] | None = None  # the last call's shapes

    def bind(self, shapes: Mapping[str, Sequence[int]]) -> RowsBound:
        """Buffers for inputs of these shapes."""
        return RowsBound(self, shapes)

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        """As an engine: host arrays or buffers in, buffers out."""
        check_inputs(self.where, self.inputs, inputs)
        if strange := self.network.check({name: to_host(inputs[name]) for name in inputs if str(inputs[name].dtype).startswith("int")}):
            raise BadRequest(f"{self.where}: the kernels take {strange}; take --option kernels=no")
        key = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(inputs.items()))
        if self._asked is None or self._asked[0] != key:
            if self._asked is not None:
                self._asked[1].close()
            self._asked = key, self.bind(dict(key))
        bound = self._asked[1]
        for name, tensor in inputs.items():
            bound.feed(name, tensor)
        bound.enqueue()
        return dict(bound.outputs)


class RowsBound:
    """The buffers of one shape, and what is enqueued on them."""

    def __init__(self, engine: RowsEngine, shapes: Mapping[str, Sequence[int]]) -> None:
        self.engine, self.kernels, self.fixed = engine, engine.kernels, engine.fixed
        self._fed: dict[str, Buffer] = {}  # copies of host arrays
        places = Places(self.kernels.dtype, engine.card.empty)
        engine.network.place(places, shapes)
        self.buffers, self.outputs, self._kept = places.buffers, places.outputs, places.kept
        assert set(self.outputs) == {spec.name for spec in engine.outputs}
        for name, table in places.repeated.items():
            rows, into = self.fixed[table].to_host(), self.buffers[name]
            engine.card.upload(np.tile(rows, (into.shape[0] // len(rows), 1)), into)
            engine.card.wait()

    def set(self, name: str, buffer: Buffer) -> None:
        """Bind an input, without a copy."""
        self.buffers[name] = buffer

    def feed(self, name: str, tensor: Tensor) -> None:
        """Bind a buffer as it is, or a copy of a host array."""
        if isinstance(tensor, Buffer):
            self.set(name, tensor)
            return
        array = np.ascontiguousarray(to_host(tensor))
        if name not in self._fed:
            self._fed[name] = self.engine.card.load(array)
            self._kept.append(self._fed[name])
        self.engine.card.upload(array, self._fed[name])
        self.engine.card.wait()  # the array is the caller's again
        self.set(name, self._fed[name])

    def enqueue(self) -> None:
        """Give the component's work to the stream."""
        self.engine.network.run(self)

    def product(self, name: str, x: Buffer, out: Buffer, *, base: Buffer | None = None, follow: Follow = "", every: int = 1) -> None:
        """A product by the name of its weights."""
        bias = self.fixed.get(f"{name}.bias")
        self.kernels.product(x, self._weight(name), out, bias=bias, base=base, follow=follow, every=every)

    def norm(
        self, name: str, x: Buffer, out: Buffer, *, eps: float, layer: bool, more: Buffer | None = None, width: int | None = None
    ) -> None:
        """A norm by the name of its weights."""
        self.kernels.norm(
            x, out, weight=self._weight(name), bias=self.fixed.get(f"{name}.bias"), eps=eps, layer=layer, more=more, width=width
        )

    def layer(
        self, name: str, form: Form, x: Buffer, length: int, *, room: str = "", source: Buffer | None = None, more: Buffer | None = None,
        table: Buffer | None = None, within: bool = False, kept: tuple[Buffer, Buffer] | None = None,
    ) -> None:  # fmt: skip
        """A whole layer over sequences of `length` rows, from `source` (by default `x` itself, after `more` was added) into `x`.

        Rotary by `table` is a kernel before attention, or `within` it: see `turns_within`. Keys and values go to `kept` where they are
        outputs of the component.
        """
        source, b, d = source or x, self.buffers, form.head_width
        normed, asked, seen, inner = (b[f"{room}{what}"] for what in ("normed", "asked", "seen", "inner"))
        rows, stride, q = asked.shape[0], form.asked, form.heads * d
        self.norm(f"{name}.before", source, normed, eps=form.eps, layer=form.layer_norm, more=more)
        self.product(f"{name}.asked", normed, asked)
        k, v = kept or (asked.part(q, (rows * stride - q,)), asked.part(q + form.kv_heads * d, (rows * stride - q - form.kv_heads * d,)))
        kv_stride = form.kv_heads * d if kept else stride
        if table is not None and not within:
            q_norm, k_norm = (self.fixed.get(f"{name}.{letter}_norm.weight") for letter in "qk")
            self.kernels.turn(
                asked, table, (form.heads, form.kv_heads), q=asked, k=k, v=v if kept else None, q_stride=stride, kv_stride=kv_stride,
                q_norm=q_norm, k_norm=k_norm, eps=form.eps,
            )  # fmt: skip
        self.kernels.attention(
            asked, k, v, seen, heads=(form.heads, form.kv_heads), width=d, rows=rows, length=length, q_stride=stride, kv_stride=kv_stride,
            causal=form.causal, table=table if within else None,
        )  # fmt: skip
        self.product(f"{name}.out", seen, x, base=source)
        self.norm(f"{name}.between", x, normed, eps=form.eps, layer=form.layer_norm)
        if form.feed == "gelu_tanh":
            self.product(f"{name}.up", normed, inner, follow="GELU")
        else:
            self.product(f"{name}.up", normed, b[f"{room}both"])
            self.kernels.gate(b[f"{room}both"], inner, form.feed)
        self.product(f"{name}.down", inner, x, base=x)

    def _weight(self, name: str) -> Buffer:
        try:
            return self.fixed[f"{name}.weight"]
        except KeyError:
            raise ContractMismatch(f"{self.engine.where}: the kernels find no weights of {name!r}; export the component again") from None

    def close(self) -> None:
        """Give the buffers back."""
        self.engine.card.free(*self._kept)
