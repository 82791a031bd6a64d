"""One model of random weights on a GPU: built, answered as one CUDA graph a request, checked, and timed beside the same network in PyTorch.

    python benchmarks/gpu_models.py gr00t|pi05 [--routes direct,onnx] [--dtype fp16,bf16] [--batch 8] [--rival] [--parity] [--kernels]
                                    [--plans] [--size full|tiny] [--requests 500] [--leak 1000] [--minutes 8] [--work DIR] [--out DIR]

With `--batch N` a bundle of batch 1 is made and timed in the same run; precisions and routes after the first are of batch 1 alone.
`--parity` makes the float32 graphs too and runs them on the CPU: some minutes at full size, 14 GB of disk, 30 GB of memory.
`--kernels` exports the weights of our own kernels too; with `--plans` the plans are timed in their place as well. One JSON goes into
--out, by default $OUT; whatever fails, the rest stands in it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from _parts import Note, Parts, command_line
from _stages import followed

from vla_eval import registry
from vla_eval.arrays import read_npz
from vla_eval.engines import trt
from vla_eval.engines.bench import HOST, measure, rival
from vla_eval.engines.bundle import Bundle, Component
from vla_eval.engines.trt_build import build, card_here, plan_file, record_of, standing
from vla_eval.engines.trt_run import Requests
from vla_eval.engines.verify import SELFTEST, compare, score, trace
from vla_eval.results.stats import percentiles

# An instruction whose prompt is as long as the baseline's: 147 and 528 tokens with two pictures, in the words of a synthetic tokenizer.
WORDS = {"gr00t": "put the black bowl in the drawer and close it", "pi05": "put the wine bottle on the rack"}
OTHER_WORDS = "open the middle drawer of the cabinet"
OPTIONS: dict[str, dict[str, Any]] = {"gr00t": {"embodiment": "libero_sim"}, "pi05": {"policy_config": "pi05_libero"}}


class Single(NamedTuple):
    """A request for one robot, and its answer."""

    row: Any
    chunk: Any


class Truth(NamedTuple):
    """What the float32 graphs answer on ONNX Runtime."""

    calls: dict[str, Any]  # every component and denoise step, on the bundle's own inputs
    chunk: Any  # of the first request that is timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(WORDS))
    parser.add_argument("--routes", default="direct")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--leak", type=int, default=1000)
    asked, work = command_line(parser)
    flavour = trt.door()
    file = (
        asked.out / f"{asked.model}-{asked.size}-{asked.dtype.replace(',', '-')}-b{asked.batch}{'-kernels' if asked.kernels else ''}.json"
    )
    about = {"model": asked.model, "size": asked.size, "dtype": asked.dtype, "tensorrt": f"{flavour.name} {flavour.version}"}
    parts = Parts(file, minutes=asked.minutes, command=" ".join(sys.argv), sm=card_here(), support=flavour.supports(card_here()), **about)
    checkpoint = work / f"{asked.model}-{asked.size}"
    if not checkpoint.exists():
        parts("synth", lambda note: registry.load_synth(asked.model)(checkpoint, size=asked.size))
    truth = parts("float32", lambda note: float32(note, asked, checkpoint, work)) if asked.parity else None
    first, *others = itertools.product(asked.dtype.split(","), asked.routes.split(","))
    single = one_bundle(parts, asked, *first, 1, checkpoint, work, truth, rival=asked.rival)
    if asked.batch > 1:
        one_bundle(parts, asked, *first, asked.batch, checkpoint, work, None, single)
        parts("samples a second", lambda note: note.update(gain(parts, " ".join(first), asked.batch)))
    for dtype, route in others:
        one_bundle(parts, asked, dtype, route, 1, checkpoint, work, truth)
    return parts.end()


def one_bundle(
    parts: Parts, asked: argparse.Namespace, dtype: str, route: str, batch: int, checkpoint: Path, work: Path, truth: Truth | None,
    other: Single | None = None, *, rival: bool = False,
) -> Single | None:  # fmt: skip
    """Everything about one bundle, which is removed at the end: the disk is small. A request and its answer, for another batch size."""
    name, out = f"{dtype} {route} b{batch}", work / f"{asked.model}-{asked.size}-{dtype}-{route}-b{batch}"
    options = {"dtype": dtype, "batch": batch, "direct": route == "direct"}
    bundle = parts(f"{name} build", lambda note: built(note, asked, checkpoint, out, **options))
    if bundle is None:
        shutil.rmtree(out, ignore_errors=True)
        return None
    single = None
    policy = parts(f"{name} load, cold", lambda note: opened(note, bundle))
    if policy is not None:
        asked_of(parts, name, asked, policy)
        if other is None:
            single = parts(f"{name} chunk", lambda note: answered(policy, policy.rehearse(WORDS[asked.model]).rows[0]))
        else:
            parts(
                f"{name} chunk against batch 1",
                lambda note: note.update(asdict(score(answered(policy, other.row).chunk, other.chunk))),
            )
        if rival:
            rehearsal = policy.rehearse(WORDS[asked.model])
            parts(f"{name} rival", lambda note: note.update(against(parts, name, asked, dtype, rehearsal)))
            del rehearsal
        if truth is not None:
            held_against(parts, name, asked, bundle, policy, truth)
    policy = None  # frees the card
    gc.collect()
    policy = parts(f"{name} load, cached", lambda note: opened(note, bundle))
    policy = None
    gc.collect()
    if asked.plans and batch == 1:
        policy = parts(f"{name} load, plans", lambda note: opened(note, bundle, kernels="no"))
        if policy is not None:
            rehearsal = policy.rehearse(WORDS[asked.model])
            parts(f"{name} latency, plans", lambda note: note.update(latency(rehearsal, asked.requests)))
            del rehearsal
            if truth is not None:
                held_against(parts, f"{name} plans", asked, bundle, policy, truth)
        policy = None
        gc.collect()
        parts(f"{name} load, plans, cached", lambda note: opened(note, bundle, kernels="no"))
        gc.collect()
    shutil.rmtree(out)
    return single


def answered(policy: Any, row: Any) -> Single:
    """What a policy of any batch size says to one robot."""
    return Single(row, policy.model.runtime([row])[0].chunk)


def asked_of(parts: Parts, name: str, asked: argparse.Namespace, policy: Any) -> None:
    """Everything about one policy that is loaded."""
    rehearsal = policy.rehearse(WORDS[asked.model])
    parts(f"{name} first request", lambda note: note.update(ms={k: 1e3 * v for k, v in rehearsal.answer().items()}))
    parts(f"{name} latency", lambda note: note.update(latency(rehearsal, asked.requests)))
    parts(f"{name} host", lambda note: note.update(host(policy, rehearsal, asked.requests)))
    parts(f"{name} replays", lambda note: note.update(replays(policy, asked.model)))
    if len(rehearsal.rows) > 1:
        parts(f"{name} rows", lambda note: note.update(rows(policy, asked.model)))
    if asked.leak:
        parts(f"{name} leak", lambda note: note.update(leak(policy, rehearsal, asked.leak)))


def held_against(parts: Parts, name: str, asked: argparse.Namespace, bundle: Bundle, policy: Any, truth: Truth) -> None:
    """The chunk and every component against the float32 graphs."""

    def chunk(note: Note) -> None:
        found = policy.model.runtime(policy.rehearse(WORDS[asked.model]).rows)[0].chunk
        note.update(asdict(score(found, truth.chunk)))

    parts(f"{name} chunk against float32", chunk)
    parts(f"{name} components against float32", lambda note: note.update(components(bundle, policy, truth)))


def built(note: Note, asked: argparse.Namespace, checkpoint: Path, out: Path, **options: Any) -> Bundle:
    """The bundle with its plans; seconds and memory of each build, and the kernels that it runs."""
    kernels = {"kernels": True} if asked.kernels else {}
    bundle: Bundle = recipe(asked, checkpoint, out, **options, **kernels)
    if not options["direct"]:
        build(bundle)
    for component in bundle.components.values():
        plan = standing(component, new=True)
        note[component.name] = {
            "seconds": plan.seconds, "plan_bytes": plan.bytes, "weights_bytes": plan.weights, "peak_bytes": plan.peak,
            "peak_within_bound": plan.peak <= 3.3 * plan.weights + 1e9, **layers(component),
        }  # fmt: skip
    return bundle


def recipe(asked: argparse.Namespace, checkpoint: Path, out: Path, **options: Any) -> Any:
    """The model's own export; a bundle that an earlier run left is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    tiny = {"geometry": checkpoint / "geometry.json"} if asked.size == "tiny" else {}
    return registry.load_recipe(asked.model)(checkpoint, out, **OPTIONS[asked.model], **tiny, **options)


def layers(component: Component) -> dict[str, Any]:
    """How many kernels a plan runs, and the names of the first."""
    report = record_of(plan_file(component, card_here())).get("inspection")
    if not isinstance(report, dict):
        return {"kernels": str(report)[:200]}
    names = [layer if isinstance(layer, str) else str(layer.get("Name", layer)) for layer in report["Layers"]]
    return {"kernels": len(names), "first_kernels": [name[:90] for name in names[:40]]}


def opened(note: Note, bundle: Bundle, **options: Any) -> Any:
    """The policy, loaded and self-tested, and where the time went."""
    with followed() as stages:
        policy = registry.load_policy(bundle.model, bundle=bundle, backend="tensorrt", **options)
    note.update(stages.data(), engines=policy.engines)  # type: ignore[attr-defined]
    note["allocated_bytes"] = device(policy).card.allocated
    return policy


def device(policy: Any) -> Any:
    """The part of a runtime that keeps a request on the card."""
    found = policy.model.runtime._device
    assert found is not None
    return found


def latency(rehearsal: Any, requests: int) -> dict[str, Any]:
    """As `vla-eval bench` measures it."""
    found = measure(rehearsal.answer, requests=requests, on_card=True)
    ms: dict[str, dict[str, float]] = {}
    for stage, values in found.seconds.items():
        quantiles = percentiles(values)
        assert quantiles is not None
        ms[stage] = {q: round(1e3 * getattr(quantiles, q), 3) for q in ("p50", "p90", "p99")} | {"max": round(1e3 * max(values), 3)}
    return {
        **rehearsal.about, "requests": found.requests, "warm_up": found.warm_up, "ms": ms,
        "p99_over_p50": {stage: round(ms[stage]["p99"] / ms[stage]["p50"], 4) for stage in ("gpu", "whole")},
        "samples_per_second": {stage: 1e3 * rehearsal.about["batch"] / ms[stage]["p50"] for stage in ("gpu", "whole")},
    }  # fmt: skip


def host(policy: Any, rehearsal: Any, requests: int) -> dict[str, Any]:
    """Where the host's share of a replayed request goes: median milliseconds of the calls that it makes, and what none of them explains."""
    runtime, there = policy.model.runtime, device(policy)
    (ready, *_) = reversed(there.requests._kept.values())  # of the shape that was asked last
    calls = {
        "check": (runtime, "_check"), "launch": (ready.graph, "launch"), "wait": (there.card, "wait"), "read the marks": (ready, "seconds"),
    }  # fmt: skip
    taken: dict[str, list[float]] = {}

    def timed(what: str, work: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                taken.setdefault(what, []).append(1e3 * (time.perf_counter() - began))

        return call

    with ExitStack() as stack:
        for what, (owner, method) in calls.items():
            stack.enter_context(patch.object(owner, method, timed(what, getattr(owner, method))))
        for _ in range(requests):
            began = time.perf_counter()
            stages = {stage: 1e3 * seconds for stage, seconds in rehearsal.answer().items()}
            whole, gpu = 1e3 * (time.perf_counter() - began), sum(ms for stage, ms in stages.items() if stage not in HOST)
            own = {stage: stages[stage] for stage in HOST}
            known = sum(own.values()) + sum(taken[what][-1] for what in ("check", "read the marks"))
            # the GPU begins while the host still launches: what of both together is not the GPU's own time is the host's
            late = taken["launch"][-1] + taken["wait"][-1] - gpu
            for what, ms in {
                **own,
                "share": whole - gpu,
                "launch and wait beyond the GPU": late,
                "left": whole - gpu - known - late,
            }.items():
                taken.setdefault(what, []).append(ms)
    return {"requests": requests, "ms": {what: round(float(np.median(ms)), 4) for what, ms in taken.items()}}


def replays(policy: Any, model: str) -> dict[str, bool]:
    """Replays of the graph against each other, beside another length, and against the same work without a graph: bit for bit."""
    runtime, there = policy.model.runtime, device(policy)
    given, other = (policy.rehearse(words).rows for words in (WORDS[model], OTHER_WORDS))

    def chunks(rows: Any) -> Any:
        return np.stack([answer.chunk for answer in runtime(rows)])

    first, beside = chunks(given), chunks(other)
    turns = [(chunks(given), chunks(other)) for _ in range(5)]
    captured = all(ready.graph is not None for ready in there.requests._kept.values())
    graphs, there.requests = there.requests, Requests(there.card, there._make, capture=False)
    try:
        plain = [chunks(given) for _ in range(3)]
    finally:
        there.requests.close()
        there.requests = graphs
    same = {
        "every shape is captured": captured,
        "replays are equal": all(np.array_equal(first, turn) for turn, _ in turns),
        "so are another length's": all(np.array_equal(beside, turn) for _, turn in turns),
        "a replay is the plain request": all(np.array_equal(first, chunk) for chunk in plain),
    }
    assert all(same.values()), same
    return same


def rows(policy: Any, model: str) -> dict[str, bool]:
    """A row beside others, in another place, and alone in a batch that is filled with copies of it."""
    runtime, given = policy.model.runtime, list(policy.rehearse(WORDS[model]).rows)
    together, turned, (alone,) = ([answer.chunk for answer in runtime(batch)] for batch in (given, given[::-1], given[:1]))
    same = {
        "alone it is the same": bool(np.array_equal(alone, together[0])),
        "in another place it is the same": all(np.array_equal(a, b) for a, b in zip(together, turned[::-1], strict=True)),
        "other rows are others": not np.array_equal(together[0], together[1]),
    }
    assert all(same.values()), same
    return same


def leak(policy: Any, rehearsal: Any, requests: int) -> dict[str, int]:
    """Bytes of the card that requests have cost."""
    card = device(policy).card
    before = card.free_bytes()
    for _ in range(requests):
        rehearsal.answer()
    lost = before - card.free_bytes()
    assert lost == 0, f"{lost} bytes lost in {requests} requests"
    return {"requests": requests, "lost_bytes": lost}


def against(parts: Parts, name: str, asked: argparse.Namespace, dtype: str, rehearsal: Any) -> dict[str, Any]:
    """The same network in PyTorch as one CUDA graph, on the same card in the same run."""
    assert rehearsal.rival is not None, "no baseline has these sizes"
    found = rival(asked.model, {"dtype": dtype, **rehearsal.rival})
    ours = parts.found[f"{name} latency"]["said"].get("ms")
    return {**found, **({"times_faster": found["parts"]["e2e"]["p50"] / ours["gpu"]["p50"]} if ours else {})}


def gain(parts: Parts, name: str, batch: int) -> dict[str, Any]:
    """Samples a second of the large batch, in those of batch 1."""
    many, one = (parts.found[f"{name} b{b} latency"]["said"]["samples_per_second"] for b in (batch, 1))
    return {"batch": batch, **{f"by {stage} time": many[stage] / one[stage] for stage in many}}


def float32(note: Note, asked: argparse.Namespace, checkpoint: Path, work: Path) -> Truth:
    """What the float32 graphs make of the same inputs on this machine's processor."""
    out = work / f"{asked.model}-{asked.size}-float32"
    try:
        bundle = recipe(asked, checkpoint, out)
        policy: Any = registry.load_policy(asked.model, bundle=bundle, backend="onnxruntime")
        (answer, *_) = policy.model.runtime(policy.rehearse(WORDS[asked.model]).rows)
        note["seconds of a request"] = dict(answer.seconds)
        calls = trace(bundle, read_npz(bundle.path / SELFTEST), engines=policy.model.runtime._call.engines)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Truth(calls, answer.chunk)


def components(bundle: Bundle, policy: Any, truth: Truth) -> dict[str, Any]:
    """Every component, and the velocity of every denoise step, against the float32 graphs on the same inputs."""
    verdict = compare(bundle, truth.calls, engines=policy.model.runtime._call.engines)
    found: dict[str, Any] = {"gate": verdict.gate._asdict(), "passed": verdict.passed}
    for row in verdict.rows:
        worst = found.setdefault(row.component, {"least cosine": 1.0, "largest relative": 0.0, "outputs": 0})
        worst["least cosine"] = min(worst["least cosine"], row.cosine)
        worst["largest relative"] = max(worst["largest relative"], row.relative)
        worst["outputs"] += 1
    found["velocity cosine by step"] = [row.cosine for row in verdict.rows if row.component == "action"]
    found["every step is at least 0.9999"] = min(found["velocity cosine by step"]) >= 0.9999
    return found


if __name__ == "__main__":
    raise SystemExit(main())
