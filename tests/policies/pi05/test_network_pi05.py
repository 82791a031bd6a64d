"""The four graphs against openpi's own PyTorch code on golden inputs, intermediate by intermediate; and what a wrong one would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from vla_eval.engines import blocks
from vla_eval.engines.blocks import Rope
from vla_eval.engines.graph import Axis, Graph, Value
from vla_eval.engines.onnx_pen import OnnxPen
from vla_eval.engines.weights import Tensor, Weights, open_checkpoint
from vla_eval.policies.pi05 import network
from vla_eval.policies.pi05.configuration import PREFIXES, check_architecture, read_geometry
from vla_eval.policies.pi05.processor import rotary, schedule

GOLDEN = Path(__file__).parents[2] / "golden" / "pi05_tiny"
CASES = Path(__file__).parents[2] / "cases"
ROBOTS = ("pi05_libero", "pi05_droid", "pi05_aloha")
BOUND = 2e-5  # of the tensor's largest number: the goldens' own recommendation, ten times their worst rounding
A = read_geometry(GOLDEN / "geometry.json")
Array = NDArray[Any]
Run = Callable[..., dict[str, Array]]


@cache
def golden(robot: str) -> Mapping[str, Array]:
    with np.load(GOLDEN / robot / "reference.npz") as file:
        return dict(file)


def weights(robot: str) -> Weights:
    stored = open_checkpoint(GOLDEN / robot / "checkpoint", PREFIXES)
    assert check_architecture(stored, A) == 32
    return stored.weights


def draw(g: Graph, component: str, w: Weights, horizon: int = 10, hoisted: bool = True) -> None:
    tokens = Axis("S", 300, 540, 976)
    if component == "visual":
        network.visual(g, A, w, Axis("V", 1, 2, 3))
    elif component == "prefix":
        network.prefix(g, A, w, 1, tokens)
    elif component == "cond":
        network.cond(g, A, w, Axis("K", 1, 10, 64))
    else:
        network.action(g, A, w, 1, tokens, horizon, 32, hoisted=hoisted)


def drawn(folder: Path, component: str, robot: str, *, hoisted: bool = True) -> Run:
    """The component on ONNX Runtime, with every labelled tensor as a further output."""
    path = folder / f"{component}.onnx"
    with OnnxPen(path, "float32") as g:
        draw(g, component, weights(robot), golden(robot)["noise"].shape[0], hoisted)
    model = onnx.load(path, load_external_data=False)
    labels = [node.output[0] for node in model.graph.node if "." in node.output[0]]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(label) for label in labels)
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]

    def run(**feeds: Array) -> dict[str, Array]:
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run


def rope(first: int, count: int) -> dict[str, Array]:
    table = rotary(first, count, A.prefix.head_dim, A.rope_theta)
    return {"rope_rotary_cos_sin": table[None], "attention_pos_id": np.arange(count, dtype=np.int32)[None]}


def pixels_of(robot: str) -> Array:
    seen = golden(robot)["input.images_u8"][0].astype(np.float32)
    return np.ascontiguousarray((seen / np.float32(255) * 2 - 1).transpose(0, 3, 1, 2))


def off(found: Array, wanted: Array) -> float:
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float(np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max())


def visual_run(folder: Path, robot: str) -> dict[str, Array]:
    return drawn(folder, "visual", robot)(pixel_values=pixels_of(robot))


def prefix_run(folder: Path, robot: str, features: Array) -> dict[str, Array]:
    embeds = np.concatenate([features.reshape(1, -1, A.prefix.width), golden(robot)["prefix.text_embeds"]], 1)
    return drawn(folder, "prefix", robot)(inputs_embeds=embeds, **rope(0, embeds.shape[1]))


def action_feeds(robot: str, keys: Mapping[str, Array]) -> dict[str, Array]:
    length = keys["prefix_k_layer00"].shape[1]
    return {**{name: keys[name] for name in keys if name.startswith("prefix_")}, **rope(length, golden(robot)["noise"].shape[0])}


def golden_keys(robot: str = "pi05_libero") -> dict[str, Array]:
    return {f"prefix_{letter}_layer{i:02d}": golden(robot)[f"prefix.{letter}_{i:02d}"] for i in range(3) for letter in "kv"}


@pytest.mark.parametrize("robot", ROBOTS)
def test_every_component_gives_the_references_numbers(tmp_path: Path, robot: str) -> None:
    reference = golden(robot)
    found: dict[str, Array] = {}
    seen = visual_run(tmp_path, robot)
    found |= {name: array[None] for name, array in seen.items() if name.startswith("vision.")}
    found["vision.features"] = seen["image_features"][None]
    keys = prefix_run(tmp_path, robot, reference.get("vision.features", found["vision.features"]))
    found |= {name: array for name, array in keys.items() if name.startswith("prefix.")}
    found |= {f"prefix.{name[7]}_{name[-2:]}": array for name, array in keys.items() if name.startswith("prefix_")}

    made = drawn(tmp_path, "cond", robot)(timesteps=reference["step.t"][:, 0])
    found |= {name: array[:, None] for name, array in made.items() if name.startswith("step.")}
    found["step.adarms_modulation"] = made["adarms_modulation"][:, None]
    feeds = action_feeds(robot, keys)
    run = drawn(tmp_path, "action", robot)
    forced = zip(reference["step.x"], reference["step.adarms_modulation"], strict=True)
    steps = [run(noise_trajectory=x, adarms_modulation=m, **feeds) for x, m in forced]
    found |= {name: np.stack([step[name] for step in steps]) for name in steps[0]}
    found["step.velocity"] = found.pop("action_pred")

    compared = ("vision.", "prefix.k", "prefix.v_", "prefix.layer", "step.")
    wanted = {name for name in reference if name.startswith(compared)} - {"step.t", "step.x"}
    assert wanted <= set(found)
    assert len(wanted) >= 7
    errors = {name: off(found[name], reference[name]) for name in wanted}
    assert {name: error for name, error in errors.items() if error > BOUND} == {}


@pytest.mark.parametrize("robot", ROBOTS)
def test_rotary_tables_and_times_are_the_references(robot: str) -> None:
    reference = golden(robot)
    half = A.prefix.head_dim // 2
    for where, first in (("prefix", 0), ("suffix", reference["prefix.valid"].sum())):
        table = rotary(int(first), reference[f"{where}.rope_cos"].shape[1], A.prefix.head_dim, A.rope_theta)
        for name, part in (("cos", table[:, :half]), ("sin", table[:, half:])):
            np.testing.assert_allclose(np.tile(part, 2), reference[f"{where}.rope_{name}"][0], rtol=0, atol=1e-6)  # two libraries' cosines
        np.testing.assert_array_equal(reference[f"{where}.position_ids"][0], first + np.arange(len(table)))
    np.testing.assert_array_equal(schedule(10), reference["step.t"][:, 0])


def test_schedules_of_other_lengths_are_the_references() -> None:
    with np.load(GOLDEN / "processor.npz") as file:
        for steps in (1, 2, 4, 5, 10):
            np.testing.assert_array_equal(schedule(steps), file[f"schedule.{steps}"])


def embedded(folder: Path, times: Array) -> Array:
    with OnnxPen(folder / "time.onnx", "float32") as g:
        g.output(network.time_embedding(g, g.input("t", "float32", (len(times),)), 1024, 4e-3, 4.0), "embedding")
    session = onnxruntime.InferenceSession(folder / "time.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"t": times})
    return np.asarray(found)


def test_the_time_embedding_keeps_float32s_digits_at_250_turns(tmp_path: Path) -> None:
    with np.load(CASES / "engines" / "pi05_time_embedding.npz") as file:
        # times in the file are exact tenths; a float32 tenth is up to 3e-8 away, at 250 turns 5e-5 of a phase
        assert np.abs(embedded(tmp_path, file["t"].astype(np.float32)) - file["embedding"]).max() < 2e-4
    with np.load(GOLDEN / "processor.npz") as file:
        for name in ("1.0", "0.5", "0.25"):  # exact in float32, so nothing is lost before the graph
            found = embedded(tmp_path, np.array([float(name)], np.float32))[0]
            np.testing.assert_allclose(found, file[f"time_embedding.{name}"], rtol=0, atol=3e-6)


def test_the_action_that_is_not_hoisted_gives_the_same_velocities(tmp_path: Path) -> None:
    reference = golden("pi05_libero")
    run, feeds = drawn(tmp_path, "action", "pi05_libero", hoisted=False), action_feeds("pi05_libero", golden_keys())
    for k in (0, 9):
        found = run(noise_trajectory=reference["step.x"][k], timestep=reference["step.t"][k], **feeds)
        assert off(found["action_pred"], reference["step.velocity"][k]) <= BOUND


def swapped_halves(g: Graph, x: Value, turned: Rope) -> Value:
    return blocks.rotate(g, x, Rope(turned.cos, g.mul(turned.sin, -1.0)))


def in_pairs(g: Graph, x: Value, turned: Rope) -> Value:
    """Neighbours instead of halves are turned together."""
    half = A.prefix.head_dim // 2
    count = x.shape[1]
    assert isinstance(count, int)
    order = np.arange(2 * half).reshape(half, 2).T.ravel()
    apart = g.transpose(g.gather(g.transpose(x, (3, 0, 1, 2)), g.constant(order.astype(np.int64))), (1, 2, 3, 0))
    return blocks.rotate(g, apart, turned)


def sites_in(order: tuple[int, int, int]) -> Callable[..., list[Value]]:
    real = network.site

    def wrong(*given: Any) -> list[Value]:
        parts = real(*given)
        return [parts[i] for i in order]

    return wrong


def plain_gain(weight: Tensor) -> Tensor:
    return weight


def cosines_first(g: Graph, times: Value, width: int, least: float, most: float) -> Value:
    right = REAL_EMBEDDING(g, times, width, least, most)
    return g.concat([g.slice(right, 1, width // 2, width), g.slice(right, 1, 0, width // 2)], 1)


def causal(real: Callable[..., Value]) -> Callable[..., Value]:
    return lambda self, q, k, v, *, scale, mask=None, causal=False: real(self, q, k, v, scale=scale, mask=mask, causal=True)


REAL_EMBEDDING = network.time_embedding
WRONG_PARTS: dict[str, tuple[str, str, Any]] = {
    "rotary: the other way round": ("prefix", "rotate", swapped_halves),
    "rotary: adjacent pairs": ("prefix", "rotate", in_pairs),
    "norm gain w instead of 1 + w": ("prefix", "gain", plain_gain),
    "adaRMS split shift, scale, gate": ("action", "site", sites_in((1, 0, 2))),
    "adaRMS split scale, gate, shift": ("action", "site", sites_in((0, 2, 1))),
    "adaRMS without the 1 +": (
        "action", "ada_norm",
        lambda g, x, scale, shift, a: g.add(g.mul(g.rms_norm(g.cast(x, "float32"), eps=a.rms_norm_eps), scale), shift),
    ),
    "gate ignored": ("action", "gated", lambda g, x, branch, gate: g.add(x, branch)),
    "embedding cosines first": ("cond", "time_embedding", cosines_first),
    "periods up to 1e4": ("cond", "time_embedding", lambda g, t, width, least, most: REAL_EMBEDDING(g, t, width, least, 1e4)),
    "patches column by column": (
        "visual", "patches", lambda g, pixels, size: blocks.patches(g, g.transpose(pixels, (0, 1, 3, 2)), size),
    ),
}  # fmt: skip
WRONG_STROKES: dict[str, tuple[str, str, Any]] = {
    "prefix causal": ("prefix", "attention", causal(OnnxPen.attention)),
    "actions causal": ("action", "attention", causal(OnnxPen.attention)),
    "exact gelu in the prefix": ("prefix", "gelu_tanh", OnnxPen.gelu),
    "exact gelu in the expert": ("action", "gelu_tanh", OnnxPen.gelu),
    "exact gelu in the vision tower": ("visual", "gelu_tanh", OnnxPen.gelu),
    "no silu in the time MLP": ("cond", "silu", lambda self, x: x),
}


def worst(folder: Path, component: str) -> float:
    """The largest error of a component of the LIBERO golden, teacher-forced."""
    reference = golden("pi05_libero")
    if component == "visual":
        seen = visual_run(folder, "pi05_libero")
        return max(
            off(seen["image_features"][None], reference["vision.features"]),
            off(seen["vision.layer_00"][None], reference["vision.layer_00"]),
        )
    if component == "prefix":
        found = prefix_run(folder, "pi05_libero", reference["vision.features"])
        return max(
            *(off(found[name], array) for name, array in golden_keys().items()), off(found["prefix.layer_00"], reference["prefix.layer_00"])
        )
    if component == "cond":
        made = drawn(folder, "cond", "pi05_libero")(timesteps=reference["step.t"][:, 0])
        return off(made["adarms_modulation"][:, None], reference["step.adarms_modulation"])
    feeds = action_feeds("pi05_libero", golden_keys())
    step = drawn(folder, "action", "pi05_libero")(
        noise_trajectory=reference["step.x"][5], adarms_modulation=reference["step.adarms_modulation"][5], **feeds
    )
    return max(off(step["action_pred"], reference["step.velocity"][5]), off(step["step.layer_00"], reference["step.layer_00"][5]))


@pytest.mark.parametrize("case", [*WRONG_PARTS, *WRONG_STROKES])
def test_a_wrong_network_is_far_from_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Each deliberate error exceeds the bound: tenfold, except exact GELU, which the goldens put at four to five times."""
    where = network if case in WRONG_PARTS else OnnxPen
    component, name, wrong = {**WRONG_PARTS, **WRONG_STROKES}[case]
    monkeypatch.setattr(where, name, wrong)
    assert worst(tmp_path, component) > (3.5 if "exact gelu" in case else 10) * BOUND
