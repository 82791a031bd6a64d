"""A pi0.5 request that stays on the card, on one that host memory plays: the CPU's numbers, captured and replayed, and nothing left."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.policies.pi05.policy import open_policy
from vla_eval.policies.pi05.runtime import Inputs, Pi05Runtime
from vla_eval.policies.sight import Pictures

Card = tuple[Any, Callable[[Bundle], None]]
Size = tuple[int, int] | None


@pytest.fixture
def own(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Bundle]:
    """A tiny bundle of this test's own: plans are put into it."""
    return lambda **options: open_bundle(shutil.copytree(tiny(**options), tmp_path / "bundle"))


def row(runtime: Pi05Runtime, seed: int, text: int, views: int = 2) -> Inputs:
    rng, side = np.random.default_rng(seed), runtime.geometry.vision.image
    return Inputs(
        rng.uniform(-1, 1, (views, 3, side, side)).astype(np.float32),
        rng.integers(3, 60, text),
        rng.standard_normal((runtime.horizon, runtime.width), np.float32),
    )


@pytest.mark.parametrize(
    "options", [{}, {"batch": 2, "dtype": "fp16"}, {"no_hoist_cond": True}], ids=["hoisted", "two rows in half precision", "not hoisted"]
)
def test_a_request_on_the_card_gives_the_bits_of_the_same_graphs_on_the_cpu(
    own: Callable[..., Bundle], emulated: Card, options: dict[str, Any]
) -> None:
    card, plans = emulated
    bundle = own(**options)
    plain = Pi05Runtime(bundle, backend="onnxruntime", steps=3)
    plans(bundle)
    runtime = Pi05Runtime(bundle, backend="tensorrt", steps=3)
    for seed, (text, views) in enumerate([(9, 2), (9, 2), (14, 2), (9, 1), (9, 2)]):
        rows = [row(runtime, 10 * seed + i, text, views) for i in range(runtime.batch)]
        for one, other in zip(runtime(rows), plain(rows), strict=True):
            assert np.array_equal(one.chunk, other.chunk)
    assert card.replays == 2
    del runtime
    gc.collect()
    assert (len(card.blocks), len(card.pinned), len(card.events), len(card.graphs)) == (0, 0, 0, 0)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("image", "wrist", "arrives"),
    [((40, 40), (40, 40), (40, 40)), ((30, 52), (30, 52), (30, 52)), ((40, 40), (30, 52), None), (None, None, None)],
    ids=["square", "wide", "of two sizes", "of the network's size"],
)
def test_pictures_that_the_card_resizes_are_those_that_the_host_resizes(
    own: Callable[..., Bundle], emulated: Card, dtype: str, image: Size, wrist: Size, arrives: Size
) -> None:
    bundle = own(dtype=dtype)
    plain = open_policy(bundle, backend="onnxruntime", steps=2)
    emulated[1](bundle)
    policy, rng = open_policy(bundle, backend="tensorrt", steps=2), np.random.default_rng(3)
    side = (policy.runtime.geometry.vision.image,) * 2
    for words in ("pick up the bowl", "pick up the bowl", "pick up the plate", "pick up the bowl"):
        request = {
            "observation/image": rng.integers(0, 256, (*(image or side), 3), np.uint8),
            "observation/wrist_image": rng.integers(0, 256, (*(wrist or side), 3), np.uint8),
            "observation/state": np.zeros(8), "prompt": words,
        }  # fmt: skip
        row = policy.row(request)
        assert isinstance(row.pixels, Pictures)
        assert row.pixels.size == (arrives or side)
        ours, theirs = (one.infer(request, seed=4)["chunk_normalized"] for one in (policy, plain))
        assert np.array_equal(ours, theirs)
