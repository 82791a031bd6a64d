"""Vision and prefill in kernels of our own, played by numpy on host memory: the float32 graphs' numbers; wrong networks; who runs what."""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import erf

from vla_eval import registry
from vla_eval.arrays import read_npz
from vla_eval.engines import few_rows, many_rows
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.engines.card import Card
from vla_eval.engines.many_rows import INSTALL, WORKSPACE
from vla_eval.engines.verify import SELFTEST, trace
from vla_eval.engines.weights import Weights, open_checkpoint
from vla_eval.policies import on_rows
from vla_eval.policies.components import most
from vla_eval.policies.gr00t import backbone as gr00t_backbone
from vla_eval.policies.gr00t import configuration as gr00t_configuration
from vla_eval.policies.gr00t import dit as gr00t_dit
from vla_eval.policies.gr00t import dit_rows as gr00t_dit_rows
from vla_eval.policies.gr00t import runtime as gr00t
from vla_eval.policies.gr00t import synthetic as gr00t_synthetic
from vla_eval.policies.gr00t import vision as gr00t_vision
from vla_eval.policies.on_rows import RowsBound, own
from vla_eval.policies.pi05 import configuration as pi05_configuration
from vla_eval.policies.pi05 import prefix as pi05_prefix
from vla_eval.policies.pi05 import vision as pi05_vision
from vla_eval.types import BadRequest

Array = NDArray[Any]
Wide = Callable[..., Path]
Change = Callable[[Any, pytest.MonkeyPatch], None]
MAKE = {
    ("gr00t", "visual"): own(gr00t_vision.Vision.read), ("gr00t", "vl_backbone"): own(gr00t_backbone.Backbone.read),
    ("gr00t", "action"): own(gr00t_dit_rows.DitRows.read),
    ("pi05", "visual"): own(pi05_vision.Vision.read), ("pi05", "prefix"): own(pi05_prefix.Prefix.read),
}  # fmt: skip
FEWEST = {"action": 2}  # robots of a bundle whose component these kernels answer
MAIN = (
    "/input",
    "/inputs_embeds",
    "/pixel_values",
    "/noise_trajectory",
    "/state",
)  # what a component looks at, rows of a batch one after the other
EXACT = 5e-6  # of an output's largest number: float32's own rounding, four layers deep, gives up to 1.3e-6


@cache
def truth_of(folder: Path, component: str) -> dict[str, Array]:
    """The bundle's own inputs of a component and what its graph makes of them."""
    bundle = open_bundle(folder)
    return trace(bundle, inputs_of(bundle, component), backend="onnxruntime")


@cache
def whole(folder: Path) -> dict[str, Array]:
    """What a bundle's components make of its own inputs, one after the other."""
    bundle = open_bundle(folder)
    return trace(bundle, read_npz(folder / SELFTEST), backend="onnxruntime")


def inputs_of(bundle: Bundle, component: str) -> dict[str, Array]:
    """The bundle's own; what another component makes of them where that is the component's input."""
    known = whole(bundle.path) if component == "action" else read_npz(bundle.path / SELFTEST)
    return {key: array for key, array in known.items() if key.startswith(f"{component}/") and "/in/" in key}


def ours(bundle: Bundle, component: str) -> Any:
    return MAKE[bundle.model, component].make(bundle.component(component), Card())


def unrounded(bundle: Bundle) -> dict[str, Array]:
    """Weights of GR00T's denoise step, folded, in float32."""
    checkpoint = bundle.path.with_name("gr00t")
    stored = open_checkpoint(checkpoint, gr00t_configuration.PREFIXES)
    a = gr00t_configuration.read_architecture(stored, gr00t_configuration.read_geometry(checkpoint / "geometry.json"))
    shape, slot = gr00t_dit.Shape.of(a, stored.weights), int(bundle.options["embodiment_id"])
    made = gr00t_dit_rows.entries(shape, stored.weights, slot, np.float32)
    return {name: np.concatenate(list(pieces)).reshape(size) for name, (_, size, pieces) in made}


def in_float32(
    model: str, component: str, wide: Wide, monkeypatch: pytest.MonkeyPatch, change: Change = lambda *_: None, *, batch: int = 0,
    inputs: Callable[[dict[str, Array]], dict[str, Array]] | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:  # fmt: skip
    """What the kernels, after a change of them, make of the bundle's own inputs if nothing is rounded, and what the graph makes of them.

    The checkpoint's numbers are bfloat16, so that the bundle's weights are the graph's, but for those of a denoise step, some of which are
    products of two.
    """
    robots = batch or FEWEST.get(component, 1)
    truth, bundle = open_bundle(wide(model, "fp32", robots)), open_bundle(wide(model, "bf16", robots))
    monkeypatch.setattr(on_rows, "PRECISIONS", {"bf16": "float32"})
    engine = ours(bundle, component)
    engine.inputs = truth.component(component).inputs
    fixed = unrounded(truth) if component == "action" else {name: buffer.to_host() for name, buffer in engine.fixed.items()}
    assert {name: numbers.shape for name, numbers in fixed.items()} == {name: buffer.shape for name, buffer in engine.fixed.items()}
    engine.fixed = {name: engine.card.load(numbers.astype(np.float32)) for name, numbers in fixed.items()}
    given = inputs_of(truth, component)
    if inputs is None:
        wanted = truth_of(truth.path, component)
    else:
        given = inputs(given)
        wanted = trace(truth, given, backend="onnxruntime")
    change(engine, monkeypatch)
    return trace(bundle, given, engines={component: engine}), wanted


def worst(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """The largest difference of an output, in parts of its largest number."""
    assert set(found) == set(wanted)
    outputs = [key for key in wanted if "/out/" in key]
    return max(float(np.abs(found[key] - wanted[key].astype(np.float64)).max() / np.abs(wanted[key]).max()) for key in outputs)


@pytest.mark.parametrize(("model", "component"), MAKE)
def test_the_room_that_is_made_sure_of_is_what_the_largest_request_takes(model: str, component: str, wide: Wide, emulated: Any) -> None:
    stored, engine = open_bundle(wide(model, "fp16", 2)).component(component), ours(open_bundle(wide(model, "fp16", 2)), component)
    before = engine.card.allocated
    bound = engine.bind({spec.name: [most(axis) for axis in spec.shape] for spec in stored.inputs})
    taken = engine.card.allocated - before
    outputs = sum(buffer.bytes for buffer in bound.outputs.values())  # counted as the component's tensors
    assert MAKE[model, component].scratch(stored) == taken - outputs + WORKSPACE
    bound.close()
    assert engine.card.allocated == before


@pytest.mark.parametrize(("model", "component"), MAKE)
@pytest.mark.parametrize(("dtype", "bits"), [("fp16", 11), ("bf16", 8)])
def test_every_output_is_the_float32_graphs_up_to_rounding(
    model: str, component: str, dtype: str, bits: int, wide: Wide, emulated: Any
) -> None:
    truth, bundle = (open_bundle(wide(model, kind, FEWEST.get(component, 1))) for kind in ("fp32", dtype))
    inputs = inputs_of(truth, component)
    found = trace(bundle, inputs, engines={component: ours(bundle, component)})
    assert (
        worst(found, truth_of(truth.path, component)) < 6 * 2.0**-bits
    )  # rows are rounded a dozen times on their way, by half of this each


@pytest.mark.parametrize(("model", "component"), MAKE)
def test_without_rounding_every_output_is_the_graphs(
    model: str, component: str, wide: Wide, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst(*in_float32(model, component, wide, monkeypatch)) < EXACT


@pytest.mark.parametrize("within", [True, False])
def test_vision_turns_its_heads_before_attention_or_within_it(
    within: bool, wide: Wide, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gr00t_vision, "turns_within", lambda *_: within)
    assert worst(*in_float32("gr00t", "visual", wide, monkeypatch)) < EXACT


def test_heads_are_turned_within_attention_where_each_of_its_blocks_has_a_processor() -> None:
    pictures = [many_rows.turns_within(256 * n, 256, 16) for n in (1, 2, 3, 16)]  # of GR00T, two a robot
    assert pictures == [True, True, False, False]


def of_form(**changes: Any) -> Change:
    """Another layer: of text or seeing blocks where a component has both, by the field's name before the double underscore."""

    def change(engine: Any, _: pytest.MonkeyPatch) -> None:
        for name, value in changes.items():
            which, __, what = name.rpartition("__")
            form = getattr(engine.network, which or "form")
            engine.network = replace(engine.network, **{which or "form": replace(form, **{what: value})})

    return change


def of_network(**changes: Any) -> Change:
    return lambda engine, _: setattr(engine, "network", replace(engine.network, **changes))


def of_weights(pattern: str, made: Callable[[Array], Array]) -> Change:
    def change(engine: Any, _: pytest.MonkeyPatch) -> None:
        names = fnmatch.filter(engine.fixed, pattern)
        assert names
        engine.fixed |= {name: engine.card.load(made(engine.fixed[name].to_host())) for name in names}

    return change


def of_calls(kernel: str, **changes: Any) -> Change:
    """Arguments of a kernel's calls, by name or by place ("_1"); a function is given the engine and what stood there."""

    def change(engine: Any, patch: pytest.MonkeyPatch) -> None:
        real = getattr(engine.kernels, kernel)

        def called(*places: Any, **named: Any) -> None:
            given = {**{f"_{i}": value for i, value in enumerate(places)}, **named}
            given |= {name: value(engine, given) if callable(value) else value for name, value in changes.items() if name in given}
            real(*(given[f"_{i}"] for i in range(len(places))), **{name: given[name] for name in named})

        patch.setattr(engine.kernels, kernel, called)

    return change


def of_arithmetic(name: str, made: Callable[..., Array]) -> Change:
    return lambda _, patch: patch.setattr(many_rows, name, made)


def without_head_norms(engine: Any, _: pytest.MonkeyPatch) -> None:
    engine.fixed = {name: buffer for name, buffer in engine.fixed.items() if "q_norm" not in name and "k_norm" not in name}


def taps_one_layer_late(_: Any, patch: pytest.MonkeyPatch) -> None:
    real, waiting = RowsBound.layer, list[Any]()

    def layer(bound: Any, *given: Any, more: Any = None, **named: Any) -> None:
        real(bound, *given, more=waiting.pop() if waiting else None, **named)
        if more is not None:
            waiting.append(more)

    patch.setattr(RowsBound, "layer", layer)


def halves_exchanged(array: Array) -> Array:
    return np.concatenate(np.split(array, 2)[::-1])


def rolled(name: str) -> Callable[[Any, Mapping[str, Any]], Any]:
    """A rotary table, every row another's."""
    return lambda engine, given: given[name] and engine.card.load(np.roll(given[name].to_host(), 1, -2))


ANOTHER_POSITION = of_calls("turn", _1=rolled("_1"))
ALL_TOGETHER = of_calls("attention", length=lambda _, given: given["rows"])
EXACT_GELU = of_arithmetic("gelu_tanh", lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5))))
WRONG: dict[tuple[str, str], dict[str, Change]] = {
    ("gr00t", "visual"): {
        "RMSNorm": of_form(layer_norm=False),
        "another eps": of_form(eps=1e-4),
        "taps one block late": of_network(taps=(1, 2, 3)),
        "exact gelu": EXACT_GELU,
        "another picture seen": ALL_TOGETHER,
        "another position": of_calls("attention", table=rolled("table")),
        "another place": of_weights("positions", lambda array: np.roll(array, 1, 0)),
        "a tap normed before its neighbours stand side by side": of_calls("norm", width=None),
        "tanh gelu where patches merge": of_arithmetic("gate", lambda x, kind, **_: few_rows.gelu_tanh(x)),
    },
    ("gr00t", "vl_backbone"): {
        "seen from before": of_form(text__causal=False),
        "LayerNorm in the text": of_form(text__layer_norm=True),
        "RMSNorm behind it": of_form(seeing__layer_norm=False),
        "another eps in the text": of_form(text__eps=1e-4),
        "another eps behind it": of_form(seeing__eps=1e-4),
        "order behind the text": of_form(seeing__causal=True),
        "taps one layer late": taps_one_layer_late,
        "heads without norms": without_head_norms,
        "another position": ANOTHER_POSITION,
        "gate and up exchanged": of_weights("text*.up.weight", halves_exchanged),
        "gelu for silu": of_form(text__feed="gated_gelu"),
        "exact gelu": EXACT_GELU,
        "keys and values of the block beside": of_weights("crosses.*", lambda array: np.roll(array, 2, 0)),
    },
    ("gr00t", "action"): {
        "RMSNorm": of_calls("norm", layer=False),
        "another eps": of_calls("norm", eps=1e-3),
        "scale for shift": of_calls("norm", modulation=lambda _, given: given["modulation"][::-1]),
        "no mask": of_calls("attention", mask=None),
        "keys of the next": of_calls("attention", mask=lambda engine, given: engine.card.load(np.roll(given["mask"].to_host(), 1, -1))),
        "a state in silu": of_calls("gate", period=1 << 20),
        "no time": of_calls("gate", more=lambda engine, given: engine.card.load(np.zeros(given["more"].shape, np.float32))),
        "another place": of_weights("places", lambda array: np.roll(array, 1, 0)),
        "exact gelu": EXACT_GELU,
        "no relu": of_calls("product", follow=lambda _, given: given["follow"].replace("RELU", "")),
    },
    ("pi05", "visual"): {
        "RMSNorm": of_form(layer_norm=False),
        "another eps": of_form(eps=1e-4),
        "exact gelu": EXACT_GELU,
        "another picture seen": ALL_TOGETHER,
        "another place": of_weights("positions", lambda array: np.roll(array, 1, 0)),
        "columns for rows": of_calls("patches", _0=lambda engine, given: engine.card.load(given["_0"].to_host().swapaxes(2, 3))),
    },
    ("pi05", "prefix"): {
        "seen from before": of_form(causal=True),
        "LayerNorm": of_form(layer_norm=True),
        "another eps": of_form(eps=1e-4),
        "another position": ANOTHER_POSITION,
        "gate and up exchanged": of_weights("*.up.weight", halves_exchanged),
        "silu for gelu": of_form(feed="gated_silu"),
        "exact gelu": EXACT_GELU,
        "gains without their one": of_weights("*.before.weight", lambda array: array - 1),
    },
}


@pytest.mark.parametrize(("part", "how"), [(part, how) for part, wrong in WRONG.items() for how in wrong])
def test_another_network_shows(part: tuple[str, str], how: str, wide: Wide, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(*in_float32(*part, wide, monkeypatch, WRONG[part][how])) > 10 * EXACT


@pytest.mark.parametrize(("model", "component"), MAKE)
def test_rows_of_a_batch_do_not_see_one_another(
    model: str, component: str, wide: Wide, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def other_rows(inputs: dict[str, Array]) -> dict[str, Array]:
        return {key: rng.uniform(-1, 1, array.shape).astype(np.float32) if key.endswith(MAIN) else array for key, array in inputs.items()}

    found, wanted = in_float32(model, component, wide, monkeypatch, batch=2, inputs=other_rows)
    assert worst(found, wanted) < EXACT
    half = {key: array[: len(array) // 2].copy() for key, array in found.items() if key.endswith(MAIN)}

    def first_half_kept(inputs: dict[str, Array]) -> dict[str, Array]:
        made = other_rows(inputs)
        for key, array in half.items():
            made[key][: len(array)] = array
        return made

    again, _ = in_float32(model, component, wide, monkeypatch, batch=2, inputs=first_half_kept)
    for key in (key for key in found if "/out/" in key):
        one, other = np.split(found[key], 2), np.split(again[key], 2)
        assert np.array_equal(one[0], other[0])
        assert not np.array_equal(one[1], other[1])


def load(model: str, bundle: Path, **options: Any) -> Any:
    return registry.load_policy(model, bundle=bundle, backend="tensorrt", **options)


@pytest.mark.parametrize(("model", "ours"), [("gr00t", {"visual", "vl_backbone", "action"}), ("pi05", {"visual", "prefix"})])
def test_of_a_batch_kernels_take_what_they_can(
    model: str, ours: set[str], wide: Wide, emulated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = wide(model, "fp16", 2)
    emulated[1](open_bundle(bundle))
    said = load(model, bundle).engines
    assert {name: about["version"] for name, about in said.items() if about["backend"] == "kernels"} == dict.fromkeys(ours, "many_rows")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # there are no kernels that could run
    if model == "pi05":
        with pytest.raises(BadRequest, match=r"action: kernels=yes cannot be: these are for one robot, .* take --option kernels=auto"):
            load(model, bundle, kernels="yes")
    assert {about["backend"] for about in load(model, bundle, kernels="no").engines.values()} == {"tensorrt_rtx"}


def test_a_batch_gives_float32s_chunks(wide: Wide, emulated: Any) -> None:
    emulated[1](open_bundle(wide("gr00t", "fp16", 2)))
    found, rng = [], np.random.default_rng(0)
    drawn = [(rng.uniform(-1, 1, (512, 1536)), rng.uniform(-1, 1, (1, 132)), rng.standard_normal((40, 132))) for _ in "ab"]
    for dtype, backend in (("fp16", "tensorrt"), ("fp32", "onnxruntime")):
        runtime = gr00t.Gr00tRuntime(open_bundle(wide("gr00t", dtype, 2)), backend=backend)
        ids = np.array([5, 6, 7, *[runtime.layout.image_token] * 128, *range(8, runtime.most_tokens - 179)], np.int64)
        rows = [tuple(array.astype(np.float32) for array in row) for row in drawn]
        answers = runtime([gr00t.Inputs(patches, (16, 16), ids, state, noise) for patches, state, noise in rows])
        found.append(np.stack([answer.chunk for answer in answers]))
    assert np.abs(found[0] - found[1]).max() / np.abs(found[1]).max() < 1e-2  # half precision, four steps
    assert np.abs(found[1][0] - found[1][1]).max() > 0.1


def test_without_cublas_plans_run_and_it_is_said_once(
    wide: Wide, emulated: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = wide("gr00t", "fp16")
    emulated[1](open_bundle(bundle))
    many_rows.blas.cache_clear()
    monkeypatch.setattr(many_rows, "find_spec", lambda name: None)
    monkeypatch.setattr("vla_eval.policies.components.blas", many_rows.blas)
    said = load("gr00t", bundle).engines
    assert {name: about["backend"] for name, about in said.items()} == {
        "visual": "tensorrt_rtx", "vl_backbone": "tensorrt_rtx", "action": "kernels",
    }  # fmt: skip
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"TensorRT's plans of visual and vl_backbone run, not our kernels: the kernels want cuBLAS: {INSTALL}"
    ]
    with pytest.raises(BadRequest, match=re.escape(f"visual: kernels=yes cannot be: the kernels want cuBLAS: {INSTALL}; ")):
        load("gr00t", bundle, kernels="yes")


def test_a_cublas_that_cannot_be_loaded_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> None:
        raise RuntimeError("libcublasLt.so.13: cannot open shared object file\nand more")

    lt = ModuleType("nvmath.bindings.cublasLt")
    lt.get_version = version  # type: ignore[attr-defined]
    bindings = ModuleType("nvmath.bindings")
    bindings.cublasLt = lt  # type: ignore[attr-defined]
    for name, module in {"nvmath": ModuleType("nvmath"), "nvmath.bindings": bindings, "nvmath.bindings.cublasLt": lt}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(many_rows, "find_spec", lambda name: "there")
    many_rows.blas.cache_clear()
    with pytest.raises(BadRequest) as refused:
        many_rows.blas()
    assert str(refused.value) == f"cuBLAS cannot be loaded (libcublasLt.so.13: cannot open shared object file); {INSTALL}"


@pytest.mark.parametrize(
    ("model", "component", "name", "made", "said"),
    [
        ("gr00t", "visual", "cu_seqlens", lambda array: np.array([0, 128, 512], np.int32), "pictures of one size"),
        ("gr00t", "vl_backbone", "attention_pos_id", lambda array: array[:, ::-1].copy(), "the rotary table's rows in order"),
        ("pi05", "prefix", "attention_pos_id", lambda array: array + 1, "the rotary table's rows in order"),
    ],
)
def test_inputs_that_the_graph_takes_otherwise_are_refused(
    model: str, component: str, name: str, made: Callable[[Array], Array], said: str, wide: Wide, emulated: Any
) -> None:
    bundle = open_bundle(wide(model, "fp16"))
    inputs, engine = inputs_of(bundle, component), ours(bundle, component)
    trace(bundle, inputs, engines={component: engine})
    inputs[f"{component}/0/in/{name}"] = made(inputs[f"{component}/0/in/{name}"])
    with pytest.raises(BadRequest, match=f"{component}: the kernels take {said}; take --option kernels=no"):
        trace(bundle, inputs, engines={component: engine})


@pytest.mark.parametrize("model", ["gr00t", "pi05"])
def test_an_export_writes_the_same_bytes_again(model: str, wide: Wide, tmp_path: Path) -> None:
    first = wide(model, "bf16")
    checkpoint = first.with_name(model)
    named = {"gr00t": {"embodiment": "libero_sim"}, "pi05": {"policy_config": "pi05_libero"}}[model]
    registry.load_recipe(model)(checkpoint, tmp_path / "again", dtype="bf16", kernels=True, geometry=checkpoint / "geometry.json", **named)
    files = sorted(file.relative_to(first) for file in first.rglob("*.safetensors"))
    assert sum(file.name == "rows.safetensors" for file in files) == 2
    for file in (*files, *(Path(component) / "config.json" for _, component in (part for part in MAKE if part[0] == model))):
        assert (tmp_path / "again" / file).read_bytes() == (first / file).read_bytes()


@dataclass(frozen=True)
class Unread:
    """A tensor of a checkpoint whose numbers take no memory."""

    name: str
    shape: tuple[int, ...]
    seen: dict[str, int]

    def floats(self) -> Array:
        self.seen[self.name] = math.prod(self.shape)
        return np.zeros(self.shape, np.float32)

    def pieces(self) -> Iterator[Array]:
        self.seen[self.name] = math.prod(self.shape)
        yield np.broadcast_to(np.float16(0), self.seen[self.name])


class Released(NamedTuple):
    """A released component: its tensors, what the kernels make of it, and how large that is in half precision."""

    shapes: Mapping[str, tuple[int, ...]]
    network: Callable[[Weights], Any]
    entries: Callable[[Weights], Iterator[Any]]
    wanted: Callable[[str], bool]
    gigabytes: float


TEXT_KEPT = tuple(f"{gr00t_configuration.TEXT}.layers.{i}." for i in range(16))
BEHIND_TEXT = (*TEXT_KEPT, "action_head.vlln.", f"{gr00t_backbone.SEEING}.")
CROSSES = tuple(f"action_head.model.transformer_blocks.{i}.attn1.to_{letter}." for i in range(0, 32, 2) for letter in "kv")
A, G = gr00t_synthetic.FULL, pi05_configuration.RELEASED
RELEASED = {
    "gr00t/visual": Released(
        gr00t_configuration.tensor_shapes(A), lambda w: gr00t_vision.Vision.of(A), lambda w: gr00t_vision.entries(A, w, np.float16),
        lambda name: name.startswith(gr00t_configuration.VISUAL), 0.81,
    ),
    "gr00t/vl_backbone": Released(
        gr00t_configuration.tensor_shapes(A), lambda w: gr00t_backbone.Backbone.of(A, w),
        lambda w: gr00t_backbone.entries(A, w, np.float16), lambda name: name.startswith((*BEHIND_TEXT, *CROSSES)), 2.22,
    ),
    "pi05/visual": Released(
        pi05_configuration.tensor_shapes(G), lambda w: pi05_vision.Vision.of(G), lambda w: pi05_vision.entries(G, w, np.float16),
        lambda name: name.startswith((pi05_configuration.VISION, pi05_configuration.PROJECTOR)), 0.83,
    ),
    "pi05/prefix": Released(
        pi05_configuration.tensor_shapes(G), lambda w: pi05_prefix.Prefix.of(G), lambda w: pi05_prefix.entries(G, w, np.float16),
        lambda name: name.startswith(f"{pi05_configuration.PREFIX}.layers.") and name not in pi05_configuration.dead_names(G), 3.75,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_network_is_taken_and_every_tensor_of_it_is_stored(name: str) -> None:
    released, seen = RELEASED[name], dict[str, int]()
    weights = Weights({name: Unread(name, shape, seen) for name, shape in released.shapes.items()})  # type: ignore[misc]
    network = released.network(weights)
    assert type(network).read(json.loads(json.dumps(asdict(network)))) == network
    size = 0
    for kind, shape, pieces in dict(released.entries(weights)).values():
        assert sum(piece.size for piece in pieces) == math.prod(shape)
        size += math.prod(shape) * np.dtype(kind).itemsize
    assert set(seen) == {name for name in released.shapes if released.wanted(name)}
    assert size / 1e9 == pytest.approx(released.gigabytes, abs=0.005)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 1028}, "rows .* not 1028"), ({"width": 16384}, "rows .* not 16384"), ({"inner": 100}, "rows .* not 100"),
        ({"head_width": 80}, "heads .* not 80"), ({"head_width": 264, "turned": False}, "heads .* not 264"),
    ],
)  # fmt: skip
def test_a_layer_that_the_kernels_do_not_take_is_refused(change: dict[str, Any], said: str) -> None:
    form = on_rows.Form(1024, 16, 16, 64, 4096, 1e-6, layer_norm=True, feed="gelu_tanh")
    form.check()
    replace(form, head_width=72, turned=False, inner=4304).check()
    with pytest.raises(BadRequest, match=r"rows .* not 36"):
        form.check(36)
    with pytest.raises(BadRequest, match=f"--kernels: they take {said}$"):
        replace(form, **change).check()


def test_a_released_denoise_step_for_several_robots_is_as_large_as_its_plan() -> None:
    shape = gr00t_dit.Shape(32, 32, 48, 1024, 6144, 132, 132, 40, 2)
    network = gr00t_dit_rows.DitRows.of(shape)
    assert gr00t_dit_rows.DitRows.read(json.loads(json.dumps(asdict(network)))) == network
    weights = Weights({name: Unread(name, shape, {}) for name, shape in gr00t_configuration.tensor_shapes(A).items()})  # type: ignore[misc]
    stored = dict(gr00t_dit_rows.entries(shape, weights, 0, np.float16))
    assert sum(math.prod(size) for _, size, _ in stored.values()) * 2 / 1e9 == pytest.approx(1.67, abs=0.005)
    assert all(size[-1] % 8 == 0 for _, size, _ in stored.values())  # cuBLASLt reads 16 bytes at a time
