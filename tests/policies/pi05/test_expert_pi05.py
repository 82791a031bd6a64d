"""The denoise step in kernels of our own: its order and its norms against openpi's velocities, in numpy; its packing; its refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines import few_rows
from vla_eval.engines.bundle import open_bundle
from vla_eval.engines.few_rows import tile_for
from vla_eval.engines.weights import open_checkpoint
from vla_eval.policies.pi05 import expert
from vla_eval.policies.pi05.configuration import PREFIXES, RELEASED, read_geometry
from vla_eval.policies.pi05.processor import rotary
from vla_eval.policies.pi05.recipe import recipe
from vla_eval.policies.pi05.runtime import Inputs, Pi05Runtime
from vla_eval.types import BadRequest

GOLDEN = Path(__file__).parents[2] / "golden" / "pi05_tiny"
BOUND = 2e-5  # of the velocity's largest number: the goldens' own recommendation
Array = NDArray[Any]
Vectors = dict[str, Array]
Wide = Callable[[str, str], Path]


class InNumpy:
    """`expert.Arithmetic` in float32."""

    def __init__(
        self, s: expert.Shape, made: Mapping[str, Callable[[], Array]], vectors: Vectors, given: Mapping[str, Array], table: Array
    ) -> None:
        self.s, self.made, self.vectors, self.table = s, made, vectors, table
        self.buffers = {name: array[0] for name, array in given.items()}
        self.sums: dict[int, Array] = {}

    def begin(self) -> None:
        self.sums = {}

    def project_in(self) -> None:
        x = self.buffers["noise_trajectory"] @ self.vectors["project_in.weight"] + self.vectors["project_in.bias"]
        self.sums[0] = few_rows.sums(x)
        self.buffers["wide"], self.buffers["rows"] = x, x * self.vectors["project_in.scale"]

    def product(
        self, name: str, source: str, *, narrow: str | None = None, wide: str | None = None, base: str | None = None,
        stats: int | None = None, told: int | None = None,
    ) -> None:  # fmt: skip
        kind, weight = expert.products(self.s)[name], self.made[name]()
        given: dict[str, Any] = {}
        if f"{name}.shift" in self.vectors:
            given["bias"] = weight @ self.vectors[f"{name}.shift"]
        if f"{name}.gate" in self.vectors:
            given["gate"] = self.vectors[f"{name}.gate"]
        if stats is not None:
            given["stats"] = self.sums[stats]
        if base is not None:
            given["base"] = self.buffers[base]
        y = few_rows.product(self.buffers[source], weight, kind, eps=self.s.eps, **given)
        if told is not None:
            self.sums[told] = few_rows.sums(y)
        if wide is not None:
            self.buffers[wide] = y
        if narrow is not None:
            self.buffers[narrow] = y * self.vectors.get(f"{name}.scale", np.float32(1))

    def attention(self, layer: int) -> None:
        s, d = self.s, self.s.head_width
        asked = self.buffers["asked"].reshape(s.horizon, s.heads + 2, d)
        cos, sin = self.table[:, None, : d // 2], self.table[:, None, d // 2 :]
        a, b = asked[..., : d // 2], asked[..., d // 2 :]
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        k = np.concatenate([self.buffers[f"prefix_k_layer{layer:02d}"][:, 0], turned[:, s.heads]])
        v = np.concatenate([self.buffers[f"prefix_v_layer{layer:02d}"][:, 0], asked[:, s.heads + 1]])
        k, v = np.repeat(k[:, None], s.heads, 1), np.repeat(v[:, None], s.heads, 1)
        flat = [np.ascontiguousarray(x).reshape(len(x), -1) for x in (turned[:, : s.heads], k, v)]
        self.buffers["seen"] = few_rows.attention(flat[0], flat[1], flat[2], s.heads)

    def project_out(self) -> None:
        x = self.buffers["wide"]
        normed = x / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(self.s.eps))
        y = normed * self.vectors["project_out.scale"] + self.vectors["project_out.shift"]
        self.buffers["action_pred"] = y @ self.vectors["project_out.weight"].T + self.vectors["project_out.bias"]


def velocities(robot: str, change: Callable[[Vectors], None] = lambda _: None) -> tuple[Array, Array]:
    """Every step on the golden inputs, and what openpi gave."""
    g = read_geometry(GOLDEN / "geometry.json")
    with np.load(GOLDEN / robot / "reference.npz") as file:
        reference = dict(file)
    w = open_checkpoint(GOLDEN / robot / "checkpoint", PREFIXES).weights
    horizon = reference["noise"].shape[0]
    s = expert.Shape.of(g, horizon, 32)
    keys = {f"prefix_{letter}_layer{i:02d}": reference[f"prefix.{letter}_{i:02d}"] for i in range(3) for letter in "kv"}
    table = rotary(keys["prefix_k_layer00"].shape[1], horizon, g.prefix.head_dim, g.rope_theta)
    found = []
    for x, modulation in zip(reference["step.x"], reference["step.adarms_modulation"], strict=True):
        vectors: Vectors = {**expert.projections(w), **expert.site_vectors(s, modulation[0])}
        change(vectors)
        do = InNumpy(s, expert.layers(s, w), vectors, {**keys, "noise_trajectory": x}, table)
        expert.denoise_step(do, s)
        found.append(do.buffers["action_pred"][None])
    return np.stack(found), reference["step.velocity"]


def worst(found: Array, wanted: Array) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_every_step_gives_the_references_velocity() -> None:
    assert worst(*velocities("pi05_libero")) <= BOUND


@pytest.mark.parametrize(
    "name", ["project_in.scale", "1.in.shift", "0.out.gate", "1.out.scale", "1.up.shift", "0.down.gate", "project_out.shift"]
)
def test_a_forgotten_vector_shows(name: str) -> None:
    def forget(vectors: Vectors) -> None:
        vectors[name] = np.full_like(vectors[name], 0 if name.endswith("shift") else 1)

    assert worst(*velocities("pi05_libero", forget)) > 20 * BOUND


def released(horizon: int = 10) -> expert.Shape:
    return expert.Shape.of(RELEASED, horizon, 32)


def test_every_product_of_the_released_model_has_a_tile_that_fits_the_card() -> None:
    s = released()
    expert.check_shape(s)
    for name, product in expert.products(s).items():
        tile = tile_for(product, 16)
        assert tile.shared <= 227 * 1024, name
        assert tile.blocks <= 132, name


def test_who_finishes_an_output_has_gate_and_up_of_it() -> None:
    tile = tile_for(expert.products(released())["0.up"], 16)
    order = few_rows.interleaved(tile)
    assert np.array_equal(np.sort(order), np.arange(tile.outputs))
    share = 64 // tile.cluster
    for start in range(0, tile.outputs, share):
        gate, up = np.split(order[start : start + share], 2)
        assert np.array_equal(gate, np.arange(start // 2, start // 2 + share // 2))
        assert np.array_equal(up, gate + tile.outputs // 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "fp32"}, "--dtype fp16 or bf16"),
        ({"dtype": "fp16", "no_hoist_cond": True}, "--no-hoist-cond"),
        ({"dtype": "fp16"}, "multiples of 8"),  # the tiny pictures are 36 wide
    ],
)
def test_kernels_are_refused_before_anything_is_written(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=said):
        recipe(
            GOLDEN / "pi05_libero" / "checkpoint", tmp_path / "out", policy_config="pi05_libero", geometry=GOLDEN / "geometry.json",
            tokenizer=GOLDEN / "paligemma_tokenizer.model", kernels=True, **change,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_fifty_actions_are_too_many_for_the_kernels() -> None:
    with pytest.raises(BadRequest, match="16 actions"):
        expert.check_shape(released(50))


def chunks(bundle: Path, **options: Any) -> Array:
    """Of requests of two lengths: the first plain, the second captured, the third replayed."""
    runtime, found = Pi05Runtime(open_bundle(bundle), **options), []
    for request, words in enumerate((15, 15, 15, 21)):
        rng = np.random.default_rng(request)
        pixels = rng.uniform(-1, 1, (2, 3, 224, 224)).astype(np.float32)
        row = Inputs(pixels, np.arange(5, 5 + words), rng.standard_normal((10, 32)).astype(np.float32))
        found.append(runtime([row])[0].chunk)
    return np.stack(found)


def test_a_request_with_the_kernels_gives_float32s_chunk(wide: Wide, emulated: Any) -> None:
    """Everything but the kernels' own code: packed weights, shifts that went through them, buffers, order, captured and replayed."""
    card, plans = emulated
    plans(open_bundle(wide("pi05", "fp16")))
    for component in ("visual", "prefix", "action"):
        (plan,) = (wide("pi05", "fp16") / component).glob("*.engine")
        plan.unlink()  # the kernels stand in its place
    ours, wanted = chunks(wide("pi05", "fp16"), backend="tensorrt"), chunks(wide("pi05", "fp32"), backend="onnxruntime")
    assert card.replays == 2
    assert worst(ours, wanted) < 1e-2  # half precision, ten steps
