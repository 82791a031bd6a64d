"""The three graphs against NVIDIA's own PyTorch code on golden inputs, intermediate by intermediate; and what a wrong one would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from vla_eval.engines import blocks
from vla_eval.engines.blocks import Rope
from vla_eval.engines.graph import Axis, DType, Graph, Stored, Value
from vla_eval.engines.onnx_pen import OnnxPen
from vla_eval.engines.weights import Checkpoint, Weights
from vla_eval.policies.gr00t import network, tables
from vla_eval.policies.gr00t.configuration import TEXT, Architecture
from vla_eval.policies.gr00t.processor import Layout, vision_tables

GOLDEN = Path(__file__).parents[2] / "golden" / "gr00t_tiny"
BOUND = 2e-5  # of the tensor's largest number: the goldens' own recommendation, seven times their worst rounding
SLOT = 19  # of the golden request's embodiment
Array = NDArray[Any]
Run = Callable[..., dict[str, Array]]

COMPARED = {
    "visual": [
        "vision.patch_embed", "vision.block_input", "vision.rope_cos", "vision.rope_sin", "vision.block_00_q_rotated",
        "vision.block_00_k_rotated", "vision.block_00", "vision.block_01", "vision.deepstack_0", "vision.deepstack_1",
        "vision.deepstack_2", "vision.block_05", "vision.features",
    ],
    "vl_backbone": [
        "text.layer_00_q_norm", "text.layer_00_k_norm", "text.layer_00_q_rotated", "text.layer_00_k_rotated", "text.layer_00_output",
        "text.layer_01_input", "text.layer_01_output", "text.layer_02_input", "text.layer_02_output", "text.layer_03_input",
        "backbone.features", "vl.after_vlln", "vl.block_0", "vl.block_1",
        *(f"cross.{letter}_{i:02d}" for i in (0, 2, 4, 6) for letter in "kv"),
    ],
    "action": [
        "head.state_features", "step.action_encoded", "step.dit_tokens", *(f"step.block_{i:02d}" for i in range(8)), "step.dit_output",
        "step.velocity",
    ],
}  # fmt: skip


def drawn(folder: Path, component: str, a: Architecture, w: Weights, slot: int = SLOT) -> Run:
    """The component on ONNX Runtime, with every labelled tensor as a further output under the golden's name and layout."""
    path = folder / f"{component}.onnx"
    with OnnxPen(path, "float32") as g:
        if component == "visual":
            network.visual(g, a, w, Axis("P", 256, 512, 512), Axis("N", 2, 3, 3))
        elif component == "vl_backbone":
            network.vl_backbone(g, a, w, 1, Axis("S", 140, 150, 203))
        else:
            network.action(g, a, w, slot, 1, Axis("S", 140, 150, 203))
    model = onnx.load(path, load_external_data=False)
    labels = [node.output[0] for node in model.graph.node if "." in node.output[0]]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(label) for label in labels)
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]

    def run(**feeds: Array) -> dict[str, Array]:
        return dict(_as_golden(name, array) for name, array in zip(names, session.run(names, feeds), strict=True))

    return run


def _as_golden(name: str, array: Array) -> tuple[str, Array]:
    if name.startswith("vision.rope"):
        return name, np.concatenate([array[0, 0]] * 2, -1)  # [P, D / 2] repeated
    if name.startswith("vision.") and name.endswith("_rotated"):
        return name, array[0].swapaxes(0, 1)  # [P, H, D]
    if name.startswith("vision.block"):
        return name, array[0]
    if name.startswith("text.") and name.endswith("_norm"):
        return name, array.swapaxes(1, 2)  # [B, S, H, D]
    if name == "text.layer_03_output":
        return "backbone.features", array
    renamed = {"output": "vision.features", "velocity": "step.velocity"}
    renamed |= {f"deepstack_features_{i}": f"vision.deepstack_{i}" for i in range(3)}
    renamed |= {f"cross_{letter}_layer{i:02d}": f"cross.{letter}_{i:02d}" for i in (0, 2, 4, 6) for letter in "kv"}
    return renamed.get(name, name), array


def feeds_of(component: str, golden: Mapping[str, Array], a: Architecture) -> dict[str, Array]:
    """Golden inputs, teacher-forced; of the action's steps the first."""
    if component == "visual":
        geometry = {
            "text": {"head_dim": a.text.head_dim, "rope_theta": a.text.rope_theta, "mrope_section": a.text.mrope_section},
            "vision": {"hidden": a.vision.hidden, "heads": a.vision.heads, "rope_theta": a.vision.rope_theta, "num_positions": 2304},
            "token_ids": a.geometry.token_ids,
        }
        made = vision_tables(Layout.of(geometry), 2, (16, 16))
        return {
            "input": golden["input.pixel_values"], "rotary_pos_emb": made.rotary, "cu_seqlens": made.cu_seqlens,
            "fast_pos_embed_idx": made.position_index, "fast_pos_embed_weight": made.position_weight,
        }  # fmt: skip
    image = golden["backbone.image_mask"]
    if component == "vl_backbone":
        half = a.text.head_dim // 2
        packed = np.concatenate([golden["text.rope_cos"][..., :half], golden["text.rope_sin"][..., :half]], -1)
        taps = {}
        for i in range(3):
            taps[f"deepstack_embeds_{i}"] = np.zeros_like(golden["text.inputs_embeds"])
            taps[f"deepstack_embeds_{i}"][image] = golden[f"vision.deepstack_{i}"]
        rows = np.arange(packed.shape[1], dtype=np.int32)[None]
        return {"inputs_embeds": golden["text.inputs_embeds"], "rope_rotary_cos_sin": packed, "attention_pos_id": rows, **taps}
    return step_of(golden, a, 0)


def step_of(golden: Mapping[str, Array], a: Architecture, step: int) -> dict[str, Array]:
    image, valid = golden["backbone.image_mask"], golden["backbone.attention_mask"]
    return {
        "noise_trajectory": golden["step.x"][step], "state": golden["head.state_input"],
        "adanorm_modulation": golden["step.adanorm_modulation"][step], "action_time_bias": golden["step.time_bias"][step],
        "text_attention_mask": (valid & ~image)[:, None, None], "image_attention_mask": (valid & image)[:, None, None],
        **{f"cross_{letter}_layer{i:02d}": golden[f"cross.{letter}_{i:02d}"] for i in a.cross_blocks for letter in "kv"},
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def time_bias(golden: dict[str, Array], checkpoint: Checkpoint) -> None:
    """The goldens hold the waves of the time; what W2 makes of them is one product."""
    encoder = checkpoint.weights.under("action_head.action_encoder")
    lower, bias = (encoder[name].read()[SLOT].astype(np.float32) for name in ("W2.W", "W2.b"))
    golden["step.time_bias"] = (golden["step.action_sinusoid"] @ lower[36:] + bias)[:, 0]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint, architecture: Architecture) -> Callable[[str], Run]:
    folder, runs = tmp_path_factory.mktemp("graphs"), dict[str, Run]()

    def of(component: str) -> Run:
        if component not in runs:
            runs[component] = drawn(folder, component, architecture, checkpoint.weights)
        return runs[component]

    return of


def error(found: Array, wanted: Array) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("component", "name"), [(c, n) for c, names in COMPARED.items() if c != "action" for n in names], ids=lambda part: str(part)
)
def test_every_intermediate_of_the_prefill_is_the_references(
    component: str, name: str, right: Callable[[str], Run], golden: Mapping[str, Array], architecture: Architecture, found: dict[Any, Any]
) -> None:
    if component not in found:
        found[component] = right(component)(**feeds_of(component, golden, architecture))
    assert error(found[component][name], golden[name]) <= BOUND


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("name", COMPARED["action"])
def test_every_intermediate_of_every_denoise_step_is_the_references(
    step: int, name: str, right: Callable[[str], Run], golden: Mapping[str, Array], architecture: Architecture, found: dict[Any, Any]
) -> None:
    if ("action", step) not in found:
        found["action", step] = right("action")(**step_of(golden, architecture, step))
    wanted = golden[name] if name == "head.state_features" else golden[name][step]
    assert error(found["action", step][name], wanted) <= BOUND


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    """What the right graphs gave, asked once."""
    return {}


def test_the_constant_tables_are_the_references(checkpoint: Checkpoint, architecture: Architecture, golden: Mapping[str, Array]) -> None:
    assert tables.buckets(4, 1000) == golden["step.bucket"].ravel().tolist() == [0, 250, 500, 750]
    modulation = tables.adanorm_modulation(architecture, checkpoint.weights, 4)
    assert error(modulation, golden["step.adanorm_modulation"]) <= BOUND
    assert error(tables.action_time_bias(architecture, checkpoint.weights, 4, SLOT), golden["step.time_bias"]) <= BOUND


def test_tables_of_another_number_of_steps_are_other_tables(checkpoint: Checkpoint, architecture: Architecture) -> None:
    four, eight = (tables.adanorm_modulation(architecture, checkpoint.weights, n) for n in (4, 8))
    assert tables.buckets(8, 1000) == [0, 125, 250, 375, 500, 625, 750, 875]
    assert np.array_equal(eight[::2], four)  # the times of four are every other of eight's
    assert error(eight[:4], four) > 1e4 * BOUND


# --- deliberately wrong -----------------------------------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """A mistake, the first tensor that shows it, and its error there when the reference itself is altered that way."""

    what: str
    component: str
    shows: str
    error: float
    patch: Callable[[pytest.MonkeyPatch, Weights], None] = lambda monkeypatch, w: None
    feeds: Callable[[dict[str, Array], Mapping[str, Array]], dict[str, Array]] = lambda feeds, golden: {}
    slot: int = SLOT


def rotating(turn: Callable[[Graph, Value, Value, Value], list[Value]]) -> Callable[[pytest.MonkeyPatch, Weights], None]:
    """Another rotation of two halves."""

    def rotate(g: Graph, x: Value, rope: Rope) -> Value:
        width = x.shape[-1]
        assert isinstance(width, int)
        a, b = g.slice(x, 3, 0, width // 2), g.slice(x, 3, width // 2, width)
        cos, sin = rope
        return g.concat([g.sub(g.mul(a, cos), turn(g, a, b, sin)[0]), g.add(g.mul(b, cos), turn(g, a, b, sin)[1])], 3)

    return lambda monkeypatch, w: monkeypatch.setattr(network, "rotate", rotate)


def adjacent_pairs(monkeypatch: pytest.MonkeyPatch, w: Weights) -> None:
    right = blocks.rotate

    def rotate(g: Graph, x: Value, rope: Rope) -> Value:
        width = x.shape[-1]
        assert isinstance(width, int)
        pairs = g.reshape(x, (0, 0, -1, width // 2, 2))
        halves = right(g, g.reshape(g.transpose(pairs, (0, 1, 2, 4, 3)), (0, 0, -1, width)), rope)
        return g.reshape(g.transpose(g.reshape(halves, (0, 0, -1, 2, width // 2)), (0, 1, 2, 4, 3)), (0, 0, -1, width))

    monkeypatch.setattr(network, "rotate", rotate)


def another_gelu(taken: str, instead: str) -> Callable[[pytest.MonkeyPatch, Weights], None]:
    return lambda monkeypatch, w: monkeypatch.setattr(OnnxPen, taken, getattr(OnnxPen, instead))


def final_norm(monkeypatch: pytest.MonkeyPatch, w: Weights) -> None:
    right = blocks.layer_norm

    def layer_norm(g: Graph, x: Value, part: Weights, *, eps: float) -> Value:
        if part.prefix.endswith("vlln."):
            x = g.rms_norm(x, w[f"{TEXT}.norm.weight"], eps=1e-6)
        return right(g, x, part, eps=eps)

    monkeypatch.setattr(network, "layer_norm", layer_norm)


def scaled_by_width(monkeypatch: pytest.MonkeyPatch, w: Weights) -> None:
    right = OnnxPen.attention
    monkeypatch.setattr(OnnxPen, "attention", lambda *parts, scale, **more: right(*parts, scale=scale * (12 / 36) ** 0.5, **more))


def no_positions(monkeypatch: pytest.MonkeyPatch, w: Weights) -> None:
    right = OnnxPen.weight

    def without(g: OnnxPen, stored: Stored, dtype: DType | None = None) -> Value:
        return g.mul(right(g, stored, dtype), 0.0 if "position_embedding" in stored.name else 1.0)

    monkeypatch.setattr(OnnxPen, "weight", without)


def late(feeds: dict[str, Array], golden: Mapping[str, Array]) -> dict[str, Array]:
    first, second = feeds["deepstack_embeds_0"], feeds["deepstack_embeds_1"]
    return {"deepstack_embeds_0": np.zeros_like(first), "deepstack_embeds_1": first, "deepstack_embeds_2": second}


def swapped_halves(rows: slice) -> Callable[[dict[str, Array], Mapping[str, Array]], dict[str, Array]]:
    def swap(feeds: dict[str, Array], golden: Mapping[str, Array]) -> dict[str, Array]:
        modulation = feeds["adanorm_modulation"].copy()
        modulation[rows] = np.roll(modulation[rows], 36, -1)
        return {"adanorm_modulation": modulation}

    return swap


def fences_as_pictures(feeds: dict[str, Array], golden: Mapping[str, Array]) -> dict[str, Array]:
    fence = np.isin(golden["input.input_ids"], [289, 290])[:, None, None]
    return {"text_attention_mask": feeds["text_attention_mask"] & ~fence, "image_attention_mask": feeds["image_attention_mask"] | fence}


WRONG = [
    Wrong("vision rope: rows and columns swapped", "visual", "vision.rope_cos", 2.0,
          feeds=lambda feeds, golden: {"rotary_pos_emb": np.roll(feeds["rotary_pos_emb"], 4, -1)}),
    Wrong("vision rope: rotation sign", "visual", "vision.block_00_q_rotated", 1.6,
          rotating(lambda g, a, b, sin: [g.mul(g.mul(b, sin), -1.0), g.mul(g.mul(a, sin), -1.0)])),
    Wrong("vision attention across pictures", "visual", "vision.block_00", 3.3e-1,
          feeds=lambda feeds, golden: {"cu_seqlens": np.array([0, 512], np.int32)}),
    Wrong("vision MLP: erf GELU", "visual", "vision.block_00", 1.1e-4, another_gelu("gelu_tanh", "gelu")),
    Wrong("mergers: tanh GELU", "visual", "vision.deepstack_0", 1.2e-4, another_gelu("gelu", "gelu_tanh")),
    Wrong("text rope: rotation sign", "vl_backbone", "text.layer_00_q_rotated", 1.8,
          rotating(lambda g, a, b, sin: [g.mul(g.mul(b, sin), -1.0), g.mul(g.mul(a, sin), -1.0)])),
    Wrong("text rope: adjacent pairs", "vl_backbone", "text.layer_00_q_rotated", 0.0, adjacent_pairs),
    Wrong("DeepStack a layer late", "vl_backbone", "text.layer_01_input", 7.1e-1, feeds=late),
    Wrong("DeepStack taps in reverse", "vl_backbone", "text.layer_01_input", 9.7e-1,
          feeds=lambda feeds, golden: {f"deepstack_embeds_{i}": feeds[f"deepstack_embeds_{2 - i}"] for i in range(3)}),
    Wrong("DeepStack omitted", "vl_backbone", "text.layer_01_input", 7.1e-1,
          feeds=lambda feeds, golden: {f"deepstack_embeds_{i}": np.zeros_like(feeds["inputs_embeds"]) for i in range(3)}),
    Wrong("final text norm applied", "vl_backbone", "vl.after_vlln", 0.0, final_norm),
    Wrong("VL self-attention: erf GELU", "vl_backbone", "vl.block_0", 1.0e-4, another_gelu("gelu_tanh", "gelu")),
    Wrong("VL self-attention omitted", "vl_backbone", "cross.k_00", 8.5e-1,
          lambda monkeypatch, w: monkeypatch.setattr(network, "vl_block", lambda g, x, w, a, name: x)),
    Wrong("cross-attention masks swapped", "action", "step.block_00", 0.0,
          feeds=lambda feeds, golden: {"text_attention_mask": feeds["image_attention_mask"],
                                       "image_attention_mask": feeds["text_attention_mask"]}),
    Wrong("cross-attention masks ignored", "action", "step.block_00", 6.6e-1,
          feeds=lambda feeds, golden: {name: np.ones_like(feeds[name]) for name in ("text_attention_mask", "image_attention_mask")}),
    Wrong("fences of pictures taken for pictures", "action", "step.block_00", 3.7e-1, feeds=fences_as_pictures),
    Wrong("blocks: scale and shift swapped", "action", "step.block_00", 4.9e-1, feeds=swapped_halves(slice(0, 8))),
    Wrong("output: shift and scale swapped", "action", "step.dit_output", 0.0, feeds=swapped_halves(slice(8, 9))),
    Wrong("embodiment slot 0", "action", "head.state_features", 1.2, slot=0),
    Wrong("embodiment slot 2", "action", "head.state_features", 1.8, slot=2),
    Wrong("DiT: erf GELU", "action", "step.block_00", 9.0e-5, another_gelu("gelu_tanh", "gelu")),
    Wrong("action positions omitted", "action", "step.block_00", 3.9e-1, no_positions),
    Wrong("attention scaled by the hidden width", "action", "step.block_00", 1.5e-1, scaled_by_width),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.what)
def test_a_wrong_network_misses_its_bound_by_as_much_as_a_wrong_reference(
    wrong: Wrong, checkpoint: Checkpoint, architecture: Architecture, golden: Mapping[str, Array],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    wrong.patch(monkeypatch, checkpoint.weights)
    run = drawn(tmp_path, wrong.component, architecture, checkpoint.weights, wrong.slot)
    wanted = golden[wrong.shows]
    if wrong.component == "action":
        steps = [step_of(golden, architecture, step) for step in range(4)]
        found = np.stack([run(**feeds | wrong.feeds(feeds, golden))[wrong.shows] for feeds in steps])
        wanted = np.broadcast_to(wanted, found.shape)
    else:
        feeds = feeds_of(wrong.component, golden, architecture)
        found = run(**feeds | wrong.feeds(feeds, golden))[wrong.shows]
    missed = error(found, wanted)
    assert missed > 4 * BOUND  # a wrong GELU is the least of them; all others are off by a thousand times the bound
    if wrong.error:  # two digits in the goldens' README; a wrong reference starts its later steps from other numbers than ours does
        assert missed == pytest.approx(wrong.error, rel=0.15 if wrong.component != "action" else 0.35)


@pytest.mark.parametrize("waves", ["_cos_sin", "_sin_cos"])
def test_waves_in_the_other_order_are_seen_in_their_table(
    waves: str, checkpoint: Checkpoint, architecture: Architecture, golden: Mapping[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(tables, waves)

    def swapped(*parts: Any) -> Array:
        made = right(*parts)
        return np.roll(made, made.shape[-1] // 2, -1)

    monkeypatch.setattr(tables, waves, swapped)
    if waves == "_cos_sin":
        made, wanted = tables.adanorm_modulation(architecture, checkpoint.weights, 4), golden["step.adanorm_modulation"]
    else:
        made, wanted = tables.action_time_bias(architecture, checkpoint.weights, 4, SLOT), golden["step.time_bias"]
    assert error(made, wanted) > 1000 * BOUND
