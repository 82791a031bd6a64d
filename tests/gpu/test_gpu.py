"""What only a GPU can show: plans loaded and inspected, both routes and precisions against ONNX Runtime, replays, shapes, leaks.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.arrays import read_npz
from vla_eval.engines import kernels
from vla_eval.engines.bundle import Bundle
from vla_eval.engines.card import Card
from vla_eval.engines.trt_build import build_component, card_here, plan_file, record_of
from vla_eval.engines.verify import SELFTEST, compare, trace
from vla_eval.policies import sight
from vla_eval.policies.flow import draw_noise
from vla_eval.policies.gr00t import processor as gr00t_host
from vla_eval.policies.gr00t.policy import Gr00tPolicy, open_policy
from vla_eval.policies.gr00t.recipe import recipe as gr00t
from vla_eval.policies.gr00t.runtime import Inputs as Gr00tInputs
from vla_eval.policies.pi05 import processor as pi05_host
from vla_eval.policies.pi05.policy import open_policy as open_pi05
from vla_eval.policies.pi05.recipe import recipe as pi05
from vla_eval.policies.pi05.runtime import Inputs, Pi05Runtime
from vla_eval.policies.sight import Pictures

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "golden"
WORDS = "annotation.human.action.task_description"
SHORT, LONG = "pick up the bowl", "put the white mug on the left plate and close the drawer"
OTHER = "pick up the drawer"  # as long as SHORT in GR00T's tokens
Make = Callable[..., Bundle]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A tiny bundle by model, precision, route and batch, with plans where `plans` says so; made once a session."""

    @cache
    def one(model: str, dtype: Any, direct: bool = False, batch: int = 1, plans: bool = True) -> Bundle:
        out = tmp_path_factory.mktemp("bundles") / "bundle"
        if model == "gr00t":
            golden = GOLDEN / "gr00t_tiny"
            bundle = gr00t(
                golden / "checkpoint",
                out,
                embodiment="libero_sim",
                dtype=dtype,
                batch=batch,
                direct=direct,
                geometry=golden / "geometry.json",
            )
        else:
            golden = GOLDEN / "pi05_tiny"
            bundle = pi05(
                golden / "pi05_libero/checkpoint", out, policy_config="pi05_libero", dtype=dtype, batch=batch, direct=direct, max_steps=16,
                geometry=golden / "geometry.json", tokenizer=golden / "paligemma_tokenizer.model",
            )  # fmt: skip
        for component in bundle.components.values() if plans and not direct else ():
            build_component(component)
        return bundle

    return one


@pytest.fixture(scope="session")
def truth(made: Make) -> Callable[[str], dict[str, Any]]:
    """What the float32 graphs make of the bundle's own inputs on ONNX Runtime."""

    @cache
    def of(model: str) -> dict[str, Any]:
        bundle = made(model, "fp32", plans=False)
        return trace(bundle, read_npz(bundle.path / SELFTEST), backend="onnxruntime")

    return of


def observation(seed: int, words: str = SHORT, batch: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    seen: dict[str, Any] = {f"video.{name}": rng.integers(0, 256, (batch, 1, 256, 256, 3), np.uint8) for name in ("image", "wrist_image")}
    for key, dim in {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2}.items():
        seen[f"state.{key}"] = rng.uniform(0, 0.3, (batch, 1, dim)).astype(np.float32)
    return {**seen, WORDS: words}


def chunk(policy: Gr00tPolicy, *seen: Any, seed: int = 5) -> Any:
    return policy.infer(observation(*seen), seed=seed)["chunk_normalized"]


ROUTES = pytest.mark.parametrize("direct", [False, True], ids=["onnx", "direct"])
MODELS = pytest.mark.parametrize("model", ["gr00t", "pi05"])


@MODELS
@ROUTES
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_component_holds_its_gate_against_the_float32_graphs(
    made: Make, truth: Callable[[str], dict[str, Any]], model: str, direct: bool, dtype: str
) -> None:
    verdict = compare(made(model, dtype, direct), truth(model), backend="tensorrt")
    missed = [(row.component, row.call, row.output, row.cosine, row.relative, row.scale) for row in verdict.rows if not row.passed]
    assert missed == []
    assert verdict.not_compared == ()


@MODELS
@ROUTES
def test_the_inspector_reports_every_plan(made: Make, model: str, direct: bool) -> None:
    for component in made(model, "fp16", direct).components.values():
        said = record_of(plan_file(component, card_here()))
        assert isinstance(said["inspection"], dict), said["inspection"]
        assert said["inspection"]["Layers"]
        assert said["scratch_bytes"] >= 0  # what room is made sure for before the plan is loaded


@ROUTES
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_replay_gives_the_bits_of_the_plain_request_for_every_length(made: Make, direct: bool, dtype: str) -> None:
    policy = open_policy(made("gr00t", dtype, direct), backend="tensorrt")
    first = {words: chunk(policy, 0, words) for words in (SHORT, LONG)}
    for words in (SHORT, LONG, SHORT, SHORT, LONG):
        assert np.array_equal(chunk(policy, 0, words), first[words])


def test_pi05_replays_give_the_bits_of_the_plain_request(made: Make) -> None:
    runtime, rng = Pi05Runtime(made("pi05", "bf16"), backend="tensorrt"), np.random.default_rng(0)
    side = runtime.geometry.vision.image
    rows = [
        Inputs(
            rng.uniform(-1, 1, (2, 3, side, side)).astype(np.float32),
            rng.integers(3, 60, length),
            rng.standard_normal((runtime.horizon, runtime.width), np.float32),
        )
        for length in (9, 14)
    ]
    first = [runtime([row])[0].chunk for row in rows]
    for i in (0, 1, 0, 1, 1):
        assert np.array_equal(runtime([rows[i]])[0].chunk, first[i])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_pictures_that_the_card_packs_give_the_bits_of_those_that_the_host_packs(made: Make, dtype: str) -> None:
    policy = open_policy(made("gr00t", dtype), backend="tensorrt")
    for seed, words in ((0, SHORT), (0, SHORT), (1, LONG), (2, SHORT), (3, OTHER), (4, SHORT)):
        seen = observation(seed, words)
        ((pictures, grid, ids, state),) = policy.rows(seen)
        assert isinstance(pictures, Pictures)
        packed = gr00t_host.pack(
            [gr00t_host.see(seen[f"video.{camera}"][0, 0], policy.contract.pictures) for camera in policy.contract.cameras]
        )
        ours, theirs = (policy.runtime([Gr00tInputs(way, grid, ids, state, draw_noise(5, 40, 132))])[0].chunk for way in (pictures, packed))
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("size", [(256, 256), (30, 52), None], ids=["square", "wide", "the network's"])
def test_pi05s_pictures_that_the_card_packs_give_the_bits_of_those_that_the_host_packs(
    made: Make, dtype: str, size: tuple[int, int] | None
) -> None:
    policy, rng = open_pi05(made("pi05", dtype), backend="tensorrt"), np.random.default_rng(0)
    side = policy.runtime.geometry.vision.image
    for words in (SHORT, SHORT, LONG, SHORT, OTHER, SHORT):
        seen = [rng.integers(0, 256, (*(size or (side, side)), 3), np.uint8) for _ in range(2)]
        row = policy.row(
            {"observation/image": seen[0], "observation/wrist_image": seen[1], "observation/state": np.zeros(8), "prompt": words}
        )
        assert isinstance(row.pixels, Pictures)
        noise = draw_noise(5, policy.runtime.horizon, policy.runtime.width)
        ours, theirs = (policy.runtime([Inputs(way, row.token_ids, noise)])[0].chunk for way in (row.pixels, pi05_host.pixels(seen, side)))
        assert np.array_equal(ours, theirs)


def test_a_row_does_not_depend_on_the_rows_beside_it(made: Make) -> None:
    policy = open_policy(made("gr00t", "fp16", batch=2), backend="tensorrt")
    a, b = observation(0), observation(1)
    both = {key: a[key] if key == WORDS else np.concatenate([a[key], b[key]]) for key in a}
    noise = np.random.default_rng(0).standard_normal((2, 40, 132), np.float32)
    pair, alone = (policy.infer(seen, noise=start)["chunk_normalized"] for seen, start in ((both, noise), (a, noise[:1])))
    assert np.array_equal(pair[0], alone[0])


def test_nothing_leaks_over_a_thousand_requests_nor_from_a_closed_policy(made: Make) -> None:
    """By the card's free memory: fails where anything else takes memory there meanwhile, another process of the suite too."""
    bundle = made("gr00t", "fp16")
    card = Card()
    policy = open_policy(bundle, backend="tensorrt")
    for i in range(20):
        chunk(policy, 0, SHORT, seed=i)
    before = card.free_bytes()
    for i in range(1000):
        chunk(policy, 0, SHORT, seed=i)
    assert before - card.free_bytes() == 0
    del policy
    gc.collect()
    held = card.free_bytes()
    for _ in range(5):
        policy = open_policy(bundle, backend="tensorrt")
        chunk(policy, 0)
        del policy
        gc.collect()
    assert held - card.free_bytes() < 64 << 20  # the driver keeps a pool; a policy that stayed would be five times its plans


def test_two_policies_live_in_one_process(made: Make) -> None:
    policies = [open_policy(made("gr00t", "fp16", direct), backend="tensorrt") for direct in (False, True)]
    alone = [chunk(policy, 0) for policy in policies]
    for _ in range(3):
        for policy, wanted in zip(policies, alone, strict=True):
            assert np.array_equal(chunk(policy, 0), wanted)


def test_the_kernels_give_numpys_bits() -> None:
    card, rng = Card(), np.random.default_rng(0)
    x, v = (rng.standard_normal((3, 40, 132), np.float32) for _ in range(2))
    there = card.load(x)
    card.euler(there, card.load(v), 0.25)
    assert np.array_equal(there.to_host(), kernels.euler(x, v, 0.25))
    for dtype in ("float16", "bfloat16"):
        into = card.empty(x.shape, dtype)
        card.narrow(card.load(x * np.float32(3e4)), into)
        assert into.to_host().tobytes() == kernels.narrow(x * np.float32(3e4), dtype).tobytes()
    table, features = rng.standard_normal((50, 64), np.float32), rng.standard_normal((6, 64), np.float32)
    ids, slots = rng.integers(0, 50, (2, 9)), np.full((2, 9), -1, np.int32)
    slots[:, 2:5] = np.arange(6, dtype=np.int32).reshape(2, 3)
    for given in (table, None):
        out = card.empty((2, 9, 64), "float32")
        card.place(None if given is None else card.load(given), card.load(ids), card.load(features), card.load(slots), out)
        assert np.array_equal(out.to_host().reshape(18, 64), kernels.place(given, ids, features, slots))
    with pytest.raises(TypeError, match="to_host"):
        np.asarray(out)


@pytest.mark.parametrize(
    ("how", "size", "wanted"),
    [
        (sight.area, (243, 243), (256, 256)), (sight.area, (121, 243), (256, 256)), (sight.bordered, (256, 256), 224),
        (sight.bordered, (480, 640), 224), (sight.bordered, (7, 9), 224),
    ],
)  # fmt: skip
def test_the_card_stretches_pictures_byte_for_byte_as_numpy_does(how: Any, size: tuple[int, int], wanted: Any) -> None:
    card, rng, by = Card(), np.random.default_rng(0), how(size, wanted)
    for seen in (rng.integers(0, 256, (3, *size, 3), np.uint8), np.full((3, *size, 3), 255, np.uint8)):
        into = card.empty((3, len(by.down.at), len(by.across.at), 3), "uint8")
        card.stretch(card.load(seen), into, by, [card.load(part) for taps in (by.down, by.across) for part in taps])
        assert np.array_equal(into.to_host(), kernels.stretch(seen, by))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("how", [gr00t_host.reading((256, 256)), pi05_host.reading(224)], ids=["gr00t", "pi05"])
def test_the_card_reads_pictures_bit_for_bit_as_numpy_does(how: sight.Reading, dtype: str) -> None:
    card, seen = Card(), np.random.default_rng(0).integers(0, 256, (3, *how.size, 3), np.uint8)
    table = how.numbers if dtype == "float32" else kernels.narrow(how.numbers, dtype)
    into = card.empty((3, how.order.size), dtype)
    card.look_up(card.load(seen), card.load(how.order), card.load(table), into)
    assert into.to_host().tobytes() == kernels.look_up(seen, how.order, table).tobytes()
