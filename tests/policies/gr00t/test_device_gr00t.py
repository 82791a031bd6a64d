"""A request that stays on the card, on one that host memory plays: the CPU's numbers, captured and replayed, and nothing left behind."""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.engines.trt_build import plan_file, record_file, record_of
from vla_eval.policies.flow import draw_noise
from vla_eval.policies.gr00t.policy import Gr00tPolicy, open_policy
from vla_eval.policies.gr00t.runtime import Inputs
from vla_eval.policies.sight import Pictures
from vla_eval.types import VlaEvalError

WORDS = "annotation.human.action.task_description"
SHORT, LONG = "pick up the bowl", "put the white mug on the left plate and close the drawer"
SAME_LENGTH = "pick up the drawer"  # in tokens, as SHORT
Card = tuple[Any, Callable[[Bundle], None]]


@pytest.fixture
def own(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Bundle]:
    """A tiny bundle of this test's own: plans are put into it."""
    return lambda **options: open_bundle(shutil.copytree(tiny(**options), tmp_path / "bundle"))


def observation(seed: int, words: str = SHORT, batch: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    seen: dict[str, Any] = {f"video.{name}": rng.integers(0, 256, (batch, 1, 256, 256, 3), np.uint8) for name in ("image", "wrist_image")}
    for key, dim in {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2}.items():
        seen[f"state.{key}"] = rng.uniform(0, 0.3, (batch, 1, dim)).astype(np.float32)
    return {**seen, WORDS: words}


def chunk(policy: Gr00tPolicy, *args: Any, seed: int = 5) -> Any:
    return policy.infer(observation(*args), seed=seed)["chunk_normalized"]


@pytest.mark.parametrize(("dtype", "batch"), [("fp32", 1), ("fp16", 2)])
def test_a_request_on_the_card_gives_the_bits_of_the_same_graphs_on_the_cpu(
    own: Callable[..., Bundle], emulated: Card, dtype: str, batch: int
) -> None:
    bundle = own(dtype=dtype, batch=batch)
    plain = open_policy(bundle, backend="onnxruntime")
    emulated[1](bundle)
    policy = open_policy(bundle, backend="tensorrt")
    for seed, words in enumerate((SHORT, SHORT, LONG, SHORT)):  # plain, captured, another length, replayed
        assert np.array_equal(chunk(policy, seed, words, batch), chunk(plain, seed, words, batch))


def test_pictures_that_the_card_packs_are_those_that_the_host_packs(own: Callable[..., Bundle], emulated: Card) -> None:
    bundle = own(dtype="fp16")
    host = open_policy(bundle, backend="onnxruntime")
    emulated[1](bundle)
    policy = open_policy(bundle, backend="tensorrt")
    for seed in (0, 0, 1):
        (packed,), (bytes_,) = host.rows(observation(seed)), policy.rows(observation(seed))
        assert isinstance(packed[0], np.ndarray)
        assert isinstance(bytes_[0], Pictures)
        assert bytes_[0].size == (243, 243)  # of 256, before the last stretch
        one, other = (policy.runtime([Inputs(*row, draw_noise(5, 40, 132))])[0].chunk for row in (packed, bytes_))
        assert np.array_equal(one, other)


def test_what_the_instruction_decides_is_copied_when_it_changes(own: Callable[..., Bundle], emulated: Card) -> None:
    card, plans = emulated
    bundle = own()
    plain = open_policy(bundle, backend="onnxruntime")
    plans(bundle)
    policy = open_policy(bundle, backend="tensorrt")
    copies, chunks = [], []
    for words in (SHORT, SHORT, SHORT, SAME_LENGTH, SAME_LENGTH, SHORT):
        before = card.copies
        chunks.append(chunk(policy, 0, words))
        copies.append(card.copies - before)
        assert np.array_equal(chunks[-1], chunk(plain, 0, words))
    assert not np.array_equal(chunks[0], chunks[3])
    assert copies[2:] == [4, 4 + 5, 4, 4 + 5]  # pictures, state, noise, the chunk back; ids, slots, positions and two masks


def test_the_first_request_of_a_length_runs_plainly_and_later_ones_are_replayed(own: Callable[..., Bundle], emulated: Card) -> None:
    card, plans = emulated
    bundle = own()
    plans(bundle)
    policy = open_policy(bundle)  # auto: there are plans and a card
    card.enqueued = 0  # the self-test ran
    replays, enqueued = [], []
    for words in (SHORT, SHORT, SHORT, LONG, SHORT, LONG):
        chunk(policy, 0, words)
        replays.append(card.replays)
        enqueued.append(card.enqueued)
    once = 2 + 4  # visual, backbone and four steps
    assert replays == [0, 1, 2, 2, 3, 4]
    assert enqueued == [once, 2 * once, 2 * once, 3 * once, 3 * once, 4 * once]


def test_a_capture_that_fails_is_said_once_and_requests_go_on(
    own: Callable[..., Bundle], emulated: Card, caplog: pytest.LogCaptureFixture
) -> None:
    card, plans = emulated
    bundle = own()
    plans(bundle)
    policy = open_policy(bundle)
    card.refuse_capture = True
    with caplog.at_level(logging.WARNING):
        chunks = [chunk(policy, 0) for _ in range(4)]
    assert all(np.array_equal(chunks[0], other) for other in chunks)
    assert [record.message.partition(":")[0] for record in caplog.records if "captured" in record.message] == [
        "requests are not captured, they run a little slower"
    ]


def test_requests_of_many_lengths_keep_a_bounded_number_of_graphs(own: Callable[..., Bundle], emulated: Card) -> None:
    card, plans = emulated
    bundle = own()
    plans(bundle)
    policy = open_policy(bundle)
    used = []
    for length in range(1, 12):
        for _ in range(2):
            chunk(policy, 0, " ".join(["user"] * length))
        used.append((len(card.blocks), len(card.graphs)))
    assert max(graphs for _, graphs in used) == 8
    assert used[-1] == used[8]  # what the ninth length brought, every later one takes the place of


def test_closing_a_policy_leaves_nothing_on_the_card(own: Callable[..., Bundle], emulated: Card) -> None:
    card, plans = emulated
    bundle = own()
    plans(bundle)
    for _ in range(2):
        policy = open_policy(bundle)
        for _ in range(3):
            chunk(policy, 0)
        assert card.used() > 0
        del policy
        gc.collect()
        assert (len(card.blocks), len(card.pinned), len(card.events), len(card.graphs)) == (0, 0, 0, 0)


def test_stage_times_come_from_the_card(own: Callable[..., Bundle], emulated: Card) -> None:
    bundle = own()
    emulated[1](bundle)
    policy = open_policy(bundle)
    (row,) = policy.rows(observation(0))
    for _ in range(3):
        (answer,) = policy.runtime([Inputs(*row, np.zeros((40, 132), np.float32))])
        assert list(answer.seconds) == ["fill", "h2d", "visual", "prefill", "denoise", "d2h"]
        assert all(seconds >= 0 for seconds in answer.seconds.values())


def test_a_full_card_is_a_sentence(own: Callable[..., Bundle], emulated: Card) -> None:
    card, plans = emulated
    bundle = own()
    plans(bundle)
    card.room = 100_000
    with pytest.raises(VlaEvalError, match=r"Emulated has .* GB left"):
        chunk(open_policy(bundle), 0)


@pytest.mark.parametrize("inspected", [True, False], ids=["scratch is on record", "scratch is known once loaded"])
def test_room_for_plans_tables_scratch_and_buffers_is_made_sure_before_a_request(
    own: Callable[..., Bundle], emulated: Card, inspected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    card, plans = emulated
    bundle = own(dtype="fp16", batch=2)
    plans(bundle)
    tensors, files = dict[str, int](), list[Path]()
    for component in bundle.components.values():
        plan = plan_file(component, "sm90")
        if inspected:
            record_file(plan).write_text(json.dumps({**record_of(plan), "scratch_bytes": 1 << 20}))
        files += [plan, *(file for file in component.folder.glob("*.safetensors") if ".4." in file.name or file.stem == "embed_tokens")]
        for side in ("inputs", "outputs"):
            for name, said in component.config["tensor_contract"][side].items():
                longest = [n if isinstance(n, int) else n["max"] for n in said["axes"]]
                tensors[name] = math.prod(longest) * np.dtype(said["dtype"]).itemsize
    needed = sum(file.stat().st_size for file in files) + 3 * (1 << 20) + sum(tensors.values())

    card.room = needed - 1 if inspected else needed - sum(file.stat().st_size for file in files if file.suffix == ".engine") - 1
    with pytest.raises(VlaEvalError, match=r"takes .* GB \(.*tables .*, tensors .*\), Emulated has .* GB left; end what else uses"):
        open_policy(bundle)
    gc.collect()
    assert card.used() == 0
    card.room = needed
    with caplog.at_level(logging.INFO):
        open_policy(bundle)
    assert any("GB left" in record.message for record in caplog.records)


def test_a_component_that_overflows_is_named_at_load(own: Callable[..., Bundle], emulated: Card) -> None:
    card, plans = emulated
    bundle = own()
    plans(bundle)
    card.spoil = "vl_backbone"
    with pytest.raises(VlaEvalError, match=r"component 'vl_backbone' gives NaN or infinity in 'cross_k_layer00' \(call 0\)"):
        open_policy(bundle)
    card.spoil = "action"
    with pytest.raises(VlaEvalError, match="component 'action' gives NaN"):
        open_policy(bundle)


def test_a_component_that_overflows_later_is_named_by_the_request(own: Callable[..., Bundle], emulated: Card) -> None:
    card, plans = emulated
    bundle = own()
    plans(bundle)
    policy = open_policy(bundle)
    chunk(policy, 0)
    card.spoil = "visual"
    with pytest.raises(VlaEvalError, match="component 'visual' gave NaN"):
        chunk(policy, 1)
