"""The denoise step in kernels of our own: folded weights and order against NVIDIA's velocities, in numpy; packing; refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines import few_rows
from vla_eval.engines.bundle import open_bundle
from vla_eval.engines.few_rows import Product, pack, rows_on_card, tile_for
from vla_eval.engines.weights import Checkpoint
from vla_eval.policies.gr00t import dit, tables
from vla_eval.policies.gr00t.configuration import Architecture
from vla_eval.policies.gr00t.recipe import recipe
from vla_eval.policies.gr00t.runtime import Gr00tRuntime, Inputs
from vla_eval.policies.gr00t.synthetic import FULL
from vla_eval.types import BadRequest

GOLDEN = Path(__file__).parents[2] / "golden" / "gr00t_tiny"
BOUND = 2e-5  # of the velocity's largest number: the goldens' own recommendation
SLOT = 19
Array = NDArray[Any]
Wide = Callable[[str, str], Path]


class InNumpy:
    """`dit.Arithmetic` in float32."""

    def __init__(self, s: dit.Shape, made: Mapping[str, dit.Layer], vectors: Mapping[str, Array], given: Mapping[str, Array]) -> None:
        self.s, self.made, self.vectors = s, made, vectors
        self.buffers = {"places": vectors["places"].copy(), **{name: array[0] for name, array in given.items()}}
        self.sums: dict[int, Array] = {}

    def begin(self, source: str, *, rows: int | None = None) -> None:
        x = self.buffers[source]
        self.buffers["given"] = x if rows else np.concatenate([np.zeros_like(x[:1]), x])
        self.sums = {}

    def product(
        self, name: str, step: int, source: str, *, narrow: str | None = None, wide: str | None = None, base: str | None = None,
        stats: int | None = None, told: int | None = None, rows: int | None = None,
    ) -> None:  # fmt: skip
        def vector(what: str) -> Any:
            found = self.vectors.get(f"{name}.{what}")
            return found if found is None or found.ndim == 1 else found[step]

        given = {what: vector(what) for what in ("bias", "lost", "late") if vector(what) is not None}
        if stats is not None:
            given["stats"] = self.sums[stats]
        if base is not None:
            given["base"] = self.buffers[base]
        kind, first = dit.products(self.s)[name], 0 if rows else 1
        y = few_rows.product(self.buffers[source][:rows], self.made[name].weight(), kind, eps=dit.eps_of(name), first=first, **given)
        if told is not None:
            self.sums[told] = few_rows.sums(y)
        if wide == "places":
            self.buffers["places"][:1] = y
        elif wide is not None:
            self.buffers[wide] = y[1:] if wide == "velocity" else y
        if narrow is not None:
            self.buffers[narrow] = y * (vector("scale") if vector("scale") is not None else np.float32(1))

    def look(self, block: int, step: int, source: str, *, stats: int, narrow: str) -> None:
        context, name = None, f"{block}.in"
        if self.s.crosses(block):
            k, v = (self.buffers[f"cross_{letter}_layer{block:02d}"].reshape(-1, self.s.width) for letter in "kv")
            context = k, v, self.buffers[f"{self.s.sees(block)}_attention_mask"].ravel()
        self.buffers[narrow] = few_rows.look(
            self.buffers[source], self.made[name].weight(), self.s.look(block), bias=self.vectors[f"{name}.bias"][step],
            lost=self.vectors[f"{name}.lost"][step], stats=self.sums[stats], eps=dit.eps_of(name), context=context,
        )  # fmt: skip


def velocities(
    golden: Mapping[str, Array], a: Architecture, checkpoint: Checkpoint, change: Callable[[InNumpy], None] = lambda _: None
) -> Array:
    """Every step on the golden inputs."""
    s = dit.Shape.of(a, checkpoint.weights)
    made = dit.layers(s, checkpoint.weights, SLOT)
    vectors = {
        **dit.constants(s, checkpoint.weights, made),
        **dit.step_constants(
            s, made, tables.adanorm_modulation(a, checkpoint.weights, 4), tables.action_time_bias(a, checkpoint.weights, 4, SLOT)
        ),
    }
    image, valid = golden["backbone.image_mask"], golden["backbone.attention_mask"]
    given = {
        "state": golden["head.state_input"], "text_attention_mask": valid & ~image, "image_attention_mask": valid & image,
        **{f"cross_{letter}_layer{i:02d}": golden[f"cross.{letter}_{i:02d}"] for i in a.cross_blocks for letter in "kv"},
    }  # fmt: skip
    found = []
    for step in range(4):
        do = InNumpy(s, made, vectors, {**given, "noise_trajectory": golden["step.x"][step]})
        change(do)
        dit.state_row(do)
        dit.denoise_step(do, s, step)
        found.append(do.buffers["velocity"][None])
    return np.stack(found)


def worst(found: Array, wanted: Array) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_every_step_gives_the_references_velocity(golden: Mapping[str, Array], architecture: Architecture, checkpoint: Checkpoint) -> None:
    assert worst(velocities(golden, architecture, checkpoint), golden["step.velocity"]) <= BOUND


def without(name: str, value: Any) -> Callable[[InNumpy], None]:
    def change(do: InNumpy) -> None:
        do.vectors = {**do.vectors, name: np.full_like(do.vectors[name], value)}

    return change


@pytest.mark.parametrize(
    "change",
    [
        without("3.in.lost", 0.0), without("2.up.lost", 0.0), without("decode_in.lost", 0.0), without("encode_out.scale", 1.0),
        without("1.down.scale", 1.0), without("encode_in.late", 0.0), without("4.in.bias", 0.0),
    ],
    ids=lambda change: "another",
)  # fmt: skip
def test_a_forgotten_vector_shows(
    change: Callable[[InNumpy], None], golden: Mapping[str, Array], architecture: Architecture, checkpoint: Checkpoint
) -> None:
    assert worst(velocities(golden, architecture, checkpoint, change), golden["step.velocity"]) > 20 * BOUND


@pytest.mark.parametrize(
    "product", [Product(1536, 1536, out="RESIDUAL"), Product(1536, 6144, "LAYER", "GELU"), Product(6144, 1536, out="RESIDUAL")]
)
def test_packed_weights_are_read_back_as_wgmma_reads_them(product: Product) -> None:
    tile = tile_for(product, 48)
    weight = np.random.default_rng(0).standard_normal((product.outputs, product.inputs)).astype(np.float16)
    packed = pack(weight, tile).reshape(-1)
    share, w = product.inputs // tile.cluster, tile.width
    for block, arrival, step, output, k in [(0, 0, 0, 0, 0), (5, 1, 3, w - 1, 15), (tile.blocks - 1, 2, 7, 17, 9)]:
        # a block's arrivals of `steps` sixteens; in each, eights of K, then the outputs of eight numbers each
        at = (block * (share // 16 // tile.steps) + arrival) * w * 16 * tile.steps + ((2 * step + k // 8) * w + output) * 8 + k % 8
        row, column = block // tile.cluster * w + output, block % tile.cluster * share + (arrival * tile.steps + step) * 16 + k
        assert packed[at] == weight[row, column]
    assert np.array_equal(np.sort(packed.view(np.uint16)), np.sort(weight.ravel().view(np.uint16)))


def test_rows_and_weights_are_padded_with_zeros() -> None:
    tile = tile_for(Product(132, 128, out="SILU"), 48)
    assert (tile.inputs, tile.outputs) == (144, 128)
    packed = pack(np.ones((128, 132), np.float32), tile)
    assert packed.sum() == 128 * 132
    rows = rows_on_card(np.arange(41 * 16, dtype=np.float32).reshape(41, 16), 48)
    assert rows.shape == (2, 48, 8)
    assert rows[1, 3, 2] == 3 * 16 + 10
    assert not rows[:, 41:].any()


def test_every_product_of_the_released_model_has_a_tile_that_fits_the_card() -> None:
    s = dit.Shape(32, 32, 48, 1024, 6144, 132, 132, 40, 2)
    for name, product in dit.products(s).items():
        tile = tile_for(product, 48)
        assert tile.shared <= 227 * 1024, name
        assert tile.blocks <= 132, name
        assert tile.inputs % (16 * tile.cluster * tile.steps) == 0 == tile.steps % tile.warp_groups


@pytest.mark.parametrize("own", [True, False])
def test_what_a_heads_blocks_read_is_packed_in_their_order(own: bool) -> None:
    look = few_rows.Look(41, 1536, 48, own)
    weight = np.random.default_rng(0).standard_normal((look.asked.outputs, 1536)).astype(np.float16)
    packed, inputs = look.pack(weight).reshape(32, 3, -1), 1536 if own else 512
    for head, block, step, k, output in [(0, 0, 0, 0, 0), (5, 1, 3, 15, 47), (31, 2, inputs // 16 - 1, 9, 17)]:
        row = (block * 1536 if own else 0) + head * 48 + output
        column = (0 if own else block * 512) + step * 16 + k
        assert packed[head, block, ((2 * step + k // 8) * 48 + output) * 8 + k % 8] == weight[row, column]
    assert np.array_equal(look.unpack(look.pack(weight)), weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "fp32"}, "--dtype fp16 or bf16"),
        ({"dtype": "fp16"}, "multiples of 384"),  # the tiny network is 36 wide
    ],
)
def test_kernels_are_refused_before_anything_is_written(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=said):
        recipe(GOLDEN / "checkpoint", tmp_path / "out", embodiment="libero_sim", geometry=GOLDEN / "geometry.json", kernels=True, **change)
    assert not (tmp_path / "out").exists()


def test_the_released_network_is_taken() -> None:
    s = dit.Shape(FULL.dit_layers, FULL.dit_heads, FULL.dit_head_dim, FULL.hidden, 6144, FULL.action_dim, FULL.state_dim, FULL.horizon, 2)
    dit.check_shape(s)
    assert dit.Shape(**asdict(s)) == s
    with pytest.raises(BadRequest, match="48 rows"):
        dit.check_shape(replace(s, horizon=50))


def chunks(bundle: Path, **options: Any) -> Array:
    """Of requests of two lengths: the first plain, the second captured, the third replayed."""
    runtime, found = Gr00tRuntime(open_bundle(bundle), **options), []
    for request, spare in enumerate((56, 56, 56, 54)):
        rng = np.random.default_rng(request)
        ids = np.array([5, 6, 7, *[runtime.layout.image_token] * 128, *range(8, runtime.most_tokens - spare - 123)], np.int64)
        row = Inputs(
            rng.uniform(-1, 1, (512, 1536)).astype(np.float32), (16, 16), ids, rng.uniform(-1, 1, (1, 132)).astype(np.float32),
            rng.standard_normal((40, 132)).astype(np.float32),
        )  # fmt: skip
        found.append(runtime([row])[0].chunk)
    return np.stack(found)


def test_a_request_with_the_kernels_gives_float32s_chunk(wide: Wide, emulated: Any) -> None:
    """Everything but the kernels' own code: packed weights, buffers, order, captured and replayed."""
    card, plans = emulated
    plans(open_bundle(wide("gr00t", "fp16")))
    for plan in wide("gr00t", "fp16").glob("*/*.engine"):
        plan.unlink()  # the kernels stand in their place
    ours, wanted = chunks(wide("gr00t", "fp16"), backend="tensorrt"), chunks(wide("gr00t", "fp32"), backend="onnxruntime")
    assert card.replays == 2
    assert worst(ours, wanted) < 1e-2  # half precision, four steps


def test_a_loop_that_cannot_run_is_refused(wide: Wide, emulated: Any) -> None:
    with pytest.raises(BadRequest, match="kernels=yes cannot be: they run on a GPU"):
        Gr00tRuntime(open_bundle(wide("gr00t", "fp16")), backend="onnxruntime", kernels="yes")
    emulated[1](open_bundle(wide("gr00t", "fp32")))
    with pytest.raises(BadRequest, match="exported without --kernels"):
        Gr00tRuntime(open_bundle(wide("gr00t", "fp32")), backend="tensorrt", kernels="yes")
    with pytest.raises(BadRequest, match="unknown kernels='fast'"):
        Gr00tRuntime(open_bundle(wide("gr00t", "fp32")), kernels="fast")
