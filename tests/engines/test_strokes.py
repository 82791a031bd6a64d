"""Every stroke, drawn by both pens: ONNX Runtime's answer against a few lines of numpy, and a network that TensorRT builds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from scipy.special import erf

from vla_eval.engines import trt as tensorrt
from vla_eval.engines.graph import Axis, DType, Graph, Shape, Value, reshaped, total
from vla_eval.engines.onnx_pen import OnnxPen
from vla_eval.engines.trt_pen import TrtPen
from vla_eval.types import BadRequest

Array = NDArray[Any]
trt = tensorrt.door().api
S, P = Axis("S", 2, 5, 9), Axis("P", 4, 8, 12)


class Kept(NamedTuple):
    """A weight that is already here."""

    name: str
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self) -> Array:
        return self.array


class Case(NamedTuple):
    name: str
    draw: Callable[..., Value]  # (graph, *inputs) -> value
    truth: Callable[..., Array]  # (*inputs) -> array
    inputs: Mapping[str, tuple[DType, Shape]]


rng = np.random.default_rng(4)
W = rng.normal(size=(6, 8)).astype(np.float32)  # [out, in]
WIDE = rng.normal(size=(700, 8)).astype(np.float32)  # too large for the protobuf: goes to the file beside it
BIAS = rng.normal(size=6).astype(np.float32)
GAIN, SHIFT = rng.normal(1, 0.3, size=8).astype(np.float32), rng.normal(size=8).astype(np.float32)
TABLE = rng.normal(size=(11, 8)).astype(np.float32)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def attend(q: Array, k: Array, v: Array, mask: Array | bool = True, scale: float = 0.3) -> Array:
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    return np.asarray(softmax(np.where(mask, q @ k.swapaxes(-1, -2) * scale, -1e30)) @ v)


def causal(q: Array) -> Array:
    return np.tril(np.ones((q.shape[2], q.shape[2]), bool))


def normed(x: Array, eps: float) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps))


F: DType = "float32"
X: dict[str, tuple[DType, Shape]] = {"x": (F, (2, S, 8))}
AB: dict[str, tuple[DType, Shape]] = {"a": (F, (2, S, 8)), "b": (F, (2, S, 8))}
GQA: dict[str, tuple[DType, Shape]] = {"q": (F, (2, 4, S, 8)), "k": (F, (2, 2, S, 8)), "v": (F, (2, 2, S, 8))}
ODD: dict[str, tuple[DType, Shape]] = {"q": (F, (2, 3, 7, 12)), "k": (F, (2, 3, S, 12)), "v": (F, (2, 3, S, 12))}
CASES = [
    Case("input_and_output", lambda g, x: x, lambda x: x, X),
    Case("label", lambda g, x: g.label(g.add(x, x), "here"), lambda x: x + x, X),
    Case("weight", lambda g, x: g.add(x, g.weight(Kept("gain", GAIN))), lambda x: x + GAIN, X),
    Case("constant", lambda g, x: g.add(x, g.constant(np.float32(2.5).reshape(1))), lambda x: x + 2.5, X),
    Case("linear", lambda g, x: g.linear(x, Kept("w", W)), lambda x: x @ W.T, X),
    Case("linear_with_bias", lambda g, x: g.linear(x, Kept("w", W), Kept("b", BIAS)), lambda x: x @ W.T + BIAS, X),
    Case("linear_of_a_matrix", lambda g, x: g.linear(x, Kept("w", W), Kept("b", BIAS)), lambda x: x @ W.T + BIAS, {"x": (F, (P, 8))}),
    Case("linear_streamed", lambda g, x: g.linear(x, Kept("wide", WIDE)), lambda x: x @ WIDE.T, X),
    Case("matmul", lambda g, a, b: g.matmul(a, g.transpose(b, (0, 2, 1))), lambda a, b: a @ b.swapaxes(1, 2), AB),
    Case("matmul_broadcast", lambda g, a, b: g.matmul(a, b), lambda a, b: a @ b, {"a": (F, (2, 3, 5, 8)), "b": (F, (8, 4))}),
    Case("attention", lambda g, q, k, v: g.attention(q, k, v, scale=0.3), attend, ODD),
    Case("attention_grouped", lambda g, q, k, v: g.attention(q, k, v, scale=0.3), attend, GQA),
    Case(
        "attention_causal",
        lambda g, q, k, v: g.attention(q, k, v, scale=0.3, causal=True),
        lambda q, k, v: attend(q, k, v, causal(q)),
        GQA,
    ),
    Case(
        "attention_masked_by_row",
        lambda g, q, k, v, m: g.attention(q, k, v, scale=0.3, mask=m),
        attend,
        {**ODD, "m": ("bool", (2, 1, 1, S))},
    ),
    Case(
        "attention_masked_by_pair",
        lambda g, q, k, v, m: g.attention(q, k, v, scale=0.3, mask=m),
        attend,
        {**GQA, "m": ("bool", (1, 1, S, S))},
    ),
    Case(
        "attention_fused_width_masked_by_row",
        lambda g, q, k, v, m: g.attention(q, k, v, scale=0.3, mask=m),
        attend,
        {"q": (F, (1, 2, 7, 16)), "k": (F, (1, 2, S, 16)), "v": (F, (1, 2, S, 16)), "m": ("bool", (1, 1, 1, S))},
    ),
    Case("layer_norm", lambda g, x: g.layer_norm(x, eps=0.1), lambda x: normed(x, 0.1), X),
    Case(
        "layer_norm_affine",
        lambda g, x: g.layer_norm(x, Kept("gain", GAIN), Kept("shift", SHIFT), eps=0.1),
        lambda x: normed(x, 0.1) * GAIN + SHIFT,
        X,
    ),
    Case("rms_norm", lambda g, x: g.rms_norm(x, eps=0.1), lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1), X),
    Case(
        "rms_norm_weighted",
        lambda g, x: g.rms_norm(x, Kept("gain", GAIN), eps=0.1),
        lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1) * GAIN,
        X,
    ),
    Case("softmax", lambda g, x: g.softmax(x), softmax, X),
    Case(
        "hide",
        lambda g, x, m: g.hide(x, m),
        lambda x, m: np.where(m, x, np.float32(-1e30)),
        {**X, "m": ("bool", (2, 1, 8))},
    ),
    Case("gelu", lambda g, x: g.gelu(x), lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))), X),
    Case(
        "gelu_tanh",
        lambda g, x: g.gelu_tanh(x),
        lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        X,
    ),
    Case("silu", lambda g, x: g.silu(x), lambda x: x / (1 + np.exp(-x)), X),
    Case("relu", lambda g, x: g.relu(x), lambda x: np.maximum(x, 0), X),
    Case("sin", lambda g, x: g.sin(x), np.sin, X),
    Case("cos", lambda g, x: g.cos(x), np.cos, X),
    Case("add", lambda g, a, b: g.add(a, b), np.add, AB),
    Case("add_a_number", lambda g, x: g.add(x, 1.5), lambda x: x + 1.5, X),
    Case("sub", lambda g, a, b: g.sub(a, b), np.subtract, AB),
    Case("mul", lambda g, a, b: g.mul(a, b), np.multiply, {"a": (F, (2, S, 8)), "b": (F, (8,))}),
    Case("equal", lambda g, a, b: g.equal(a, b), np.equal, {"a": ("int32", (3, S)), "b": ("int32", (3, 1))}),
    Case("at_least", lambda g, a, b: g.at_least(a, b), np.greater_equal, {"a": ("int32", (3, S)), "b": ("int32", (3, 1))}),
    Case("cast", lambda g, x: g.cast(g.cast(x, "int32"), "float32"), np.trunc, X),
    Case("sum", lambda g, x: g.sum(x, 1), lambda x: x.sum(1, keepdims=True), X),
    Case("sum_of_whole_numbers", lambda g, a: g.sum(a, 1), lambda a: a.sum(1, keepdims=True, dtype=np.int32), {"a": ("int32", (3, S))}),
    Case("reshape_keeping", lambda g, x: g.reshape(x, (0, 0, 2, 4)), lambda x: x.reshape(*x.shape[:2], 2, 4), X),
    Case("reshape_merging", lambda g, x: g.reshape(x, (-1, 32)), lambda x: x.reshape(-1, 32), {"x": (F, (P, 8))}),
    Case("transpose", lambda g, x: g.transpose(x, (2, 0, 1)), lambda x: x.transpose(2, 0, 1), X),
    Case("concat", lambda g, a, b: g.concat([a, b], -1), lambda a, b: np.concatenate([a, b], -1), AB),
    Case(
        "concat_of_an_open_end",
        lambda g, a, b: g.concat([a, b], 1),
        lambda a, b: np.concatenate([a, b], 1),
        {"a": (F, (2, S, 8)), "b": (F, (2, 3, 8))},
    ),
    Case("slice", lambda g, x: g.slice(x, -1, 2, 5), lambda x: x[..., 2:5], X),
    Case("slice_of_the_first_axis", lambda g, x: g.slice(x, 0, 1, 2), lambda x: x[1:2], X),
    Case(
        "gather",
        lambda g, rows: g.gather(g.weight(Kept("table", TABLE)), rows),
        lambda rows: TABLE[rows],
        {"rows": ("int64", (4, S))},
    ),
    Case("gather_by_int32", lambda g, t, rows: g.gather(t, rows), lambda t, rows: t[rows], {"t": (F, (P, 8)), "rows": ("int32", (2, S))}),
    Case("count", lambda g, x: g.count(x, 1), lambda x: np.arange(x.shape[1], dtype=np.int32), X),
    Case("count_of_a_fixed_axis", lambda g, x: g.count(x, -1), lambda x: np.arange(8, dtype=np.int32), X),
]
STROKES = {name for name in vars(Graph) if not name.startswith("_")} - {"dtype", "input", "output"}


def test_every_stroke_has_a_case() -> None:
    assert set().union(*(case.draw.__code__.co_names for case in CASES)) >= STROKES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_onnx_pen_drew_computes_what_numpy_does(case: Case, tmp_path: Path) -> None:
    with OnnxPen(tmp_path / "g.onnx", "float32") as pen:
        pen.output(case.draw(pen, *(pen.input(n, *edge) for n, edge in case.inputs.items())), "y")
    session = onnxruntime.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    for end in ("min", "opt", "max"):
        feeds = {name: _numbers(dtype, _at(shape, end)) for name, (dtype, shape) in case.inputs.items()}
        (found,) = session.run(["y"], feeds)
        wanted = np.asarray(case.truth(*feeds.values()))
        assert found.shape == wanted.shape == _at(pen.outputs["y"].shape, end)
        assert str(found.dtype) == pen.outputs["y"].dtype
        if wanted.dtype.kind == "f":
            assert np.abs(found - wanted).max() <= 2e-6 * max(np.abs(wanted).max(), 1e-30)  # float32 keeps 24 bits; sums of at most 12
        else:
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensorrt_builds_what_the_trt_pen_drew(dtype: DType) -> None:
    """All strokes in one network: a build takes a second, whatever is in it. The pen holds every layer's type and shape against its own."""
    builder, network = _network()
    pen = TrtPen(network, dtype)
    for case in CASES:
        edges = {n: (dtype if d == "float32" else d, shape) for n, (d, shape) in case.inputs.items()}
        if case.name in ("constant", "cast", "hide") and dtype != "float32":
            edges = dict(case.inputs)  # these name float32 themselves
        relabelled = [pen.input(f"{case.name}.{n}", *edge) for n, edge in edges.items()]
        pen.output(case.draw(pen, *relabelled), f"{case.name}.y")
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for name, value in pen.inputs.items():
        profile.set_shape(name, *(_at(value.shape, end) for end in ("min", "opt", "max")))
    config.add_optimization_profile(profile)
    assert {network.get_output(i).name for i in range(network.num_outputs)} == set(pen.outputs)
    for i in range(network.num_outputs):
        tensor = network.get_output(i)
        assert tuple(n if isinstance(n, int) else -1 for n in pen.outputs[tensor.name].shape) == tuple(tensor.shape)
    assert builder.build_serialized_network(network, config) is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_and_softmax_stay_in_float32_and_half_products_are_summed_there(dtype: DType) -> None:
    _, network = _network()
    pen = TrtPen(network, dtype)
    x = pen.input("x", dtype, (2, 3, 8))
    for y in (pen.layer_norm(x, Kept("gain", GAIN), Kept("shift", SHIFT), eps=1e-5), pen.softmax(x), pen.rms_norm(x, eps=1e-5)):
        assert y.dtype == dtype
    pen.linear(x, Kept("w", W))
    kinds = {trt.LayerType.NORMALIZATION, trt.LayerType.SOFTMAX, trt.LayerType.REDUCE, trt.LayerType.MATRIX_MULTIPLY}
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    found = {layer.type: layer.get_input(0).dtype for layer in layers if layer.type in kinds}
    products = trt.DataType.BF16 if dtype == "bfloat16" else trt.DataType.FLOAT  # bfloat16 products are summed in float32 as they are
    assert found == {kind: products if kind is trt.LayerType.MATRIX_MULTIPLY else trt.DataType.FLOAT for kind in kinds}


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("width", [12, 48, 64, 128, 256])
def test_attention_builds_at_every_width_and_grouping(width: int, heads: tuple[int, int]) -> None:
    builder, network = _network()
    pen = TrtPen(network, "float16")
    q = pen.input("q", "float16", (1, heads[0], 10, width))
    k, v = (pen.input(n, "float16", (1, heads[1], S, width)) for n in "kv")
    pen.output(pen.attention(q, k, v, scale=0.1), "y")
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for name, value in pen.inputs.items():
        profile.set_shape(name, *(_at(value.shape, end) for end in ("min", "opt", "max")))
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None


def test_large_weights_lie_beside_the_graph_and_small_ones_in_it(tmp_path: Path) -> None:
    with OnnxPen(tmp_path / "g.onnx", "float32") as pen:
        x = pen.input("x", "float32", (1, 8))
        pen.output(pen.linear(pen.linear(x, Kept("wide", WIDE)), Kept("back", np.ascontiguousarray(WIDE.T))), "y")
    assert (tmp_path / "g.onnx").stat().st_size < 2000
    assert (tmp_path / "g.onnx.data").stat().st_size >= 2 * WIDE.nbytes


def test_half_precision_weights_that_overflow_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"heavy.*65504"), OnnxPen(tmp_path / "g.onnx", "float16") as pen:
        pen.linear(pen.input("x", "float16", (1, 8)), Kept("heavy", np.full((6, 8), 7e4, np.float32)))


def test_lengths_that_were_merged_or_divided_say_so() -> None:
    s, b = Axis("S", 4, 8, 12), Axis("B", 1, 2, 3)
    assert reshaped((s, 8), (-1, 32)) == (Axis("S/4", 1, 2, 3), 32)
    assert reshaped((b, s, 8), (-1, 8)) == (Axis("B*S", 4, 16, 36), 8)
    assert reshaped(reshaped((1, 2, s, 8), (0, 1, -1, 8)), (0, 2, -1, 8)) == (1, 2, s, 8)
    assert total([s, 10]) == Axis("S+10", 14, 18, 22)
    with pytest.raises(AssertionError, match="cannot become"):
        reshaped((s, 8), (-1, 24))


def _network() -> tuple[Any, Any]:
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    return builder, builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def _at(shape: Shape, end: str) -> tuple[int, ...]:
    return tuple(n if isinstance(n, int) else getattr(n, end) for n in shape)


def _numbers(dtype: str, shape: tuple[int, ...]) -> Array:
    numbers = np.random.default_rng(math.prod(shape))
    if dtype == "float32":
        return numbers.normal(size=shape).astype(np.float32)
    if dtype == "bool":
        drawn = numbers.random(shape) > 0.4
        drawn[..., 0] = True  # something to see in every row
        return drawn
    return numbers.integers(0, 4, shape).astype(dtype)
