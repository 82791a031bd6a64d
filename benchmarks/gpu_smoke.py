"""The TensorRT runtime on a GPU, as one command: tiny bundles by both routes against ONNX Runtime, replays, shapes, leaks; then full size.

    python benchmarks/gpu_smoke.py [--full] [--only tf32] [--work DIR]

Every part runs even where an earlier one failed; a list of all parts comes last, and `smoke.json` into $OUT. `--only tf32` holds
single float32 layers, built with the TF32 switch off and on, against float64, and against what operands of ten bits would give.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _parts import Note, Parts

from vla_eval.arrays import read_npz
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.policies.gr00t.policy import Gr00tPolicy, open_policy
from vla_eval.policies.gr00t.recipe import recipe

GOLDEN = Path(__file__).parents[1] / "tests/golden/gr00t_tiny"
WORDS = "annotation.human.action.task_description"
PARTS = Parts(Path(os.environ.get("OUT", "."), "smoke.json"))


def part(name: str, work: Callable[[], Any]) -> Any:
    """Run one part and note what came of it."""

    def noted(note: Note) -> Any:
        said = work()
        note.update(said if isinstance(said, dict) else {"said": said} if isinstance(said, str) else {})
        return said

    return PARTS(name, noted)


def observation(seed: int, words: str = "pick up the bowl", batch: int = 1) -> dict[str, Any]:
    """A robot's random view of nothing."""
    rng = np.random.default_rng(seed)
    seen: dict[str, Any] = {f"video.{c}": rng.integers(0, 256, (batch, 1, 256, 256, 3), np.uint8) for c in ("image", "wrist_image")}
    for key, dim in {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2}.items():
        seen[f"state.{key}"] = rng.uniform(0, 0.3, (batch, 1, dim)).astype(np.float32)
    return {**seen, WORDS: words}


def compared(found: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    a, b = found.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    return {
        "cosine": float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b)), "worst/max": float(np.abs(a - b).max() / np.abs(b).max()),
    }  # fmt: skip


def kernels_against_numpy() -> dict[str, Any]:
    import ctypes

    from vla_eval.engines import kernels
    from vla_eval.engines.card import Card

    card, rng = Card(), np.random.default_rng(0)
    x, v = (rng.standard_normal((3, 40, 132), np.float32) for _ in range(2))
    on_card = card.load(x)
    card.euler(on_card, card.load(v), 0.25)
    same = {"euler": bool(np.array_equal(on_card.to_host(), kernels.euler(x, v, 0.25)))}
    for dtype in ("float16", "bfloat16"):
        into = card.empty(x.shape, dtype)
        card.narrow(card.load(x * 3e4), into)
        same[dtype] = into.to_host().tobytes() == kernels.narrow(x * np.float32(3e4), dtype).tobytes()
    table, features = rng.standard_normal((50, 64), np.float32), rng.standard_normal((6, 64), np.float32)
    ids = rng.integers(0, 50, (2, 9))
    slots = np.full((2, 9), -1, np.int32)
    slots[:, 2:5] = np.arange(6, dtype=np.int32).reshape(2, 3)
    for name, given in (("place", table), ("place_zeros", None)):
        out = card.empty((2, 9, 64), "float32")
        card.place(None if given is None else card.load(given), card.load(ids), card.load(features), card.load(slots), out)
        same[name] = bool(np.array_equal(out.to_host().reshape(18, 64), kernels.place(given, ids, features, slots)))
    assert ctypes
    card.close()
    assert all(same.values()), same
    return {"card": card.name, "sm": card.sm, **same}


def tf32() -> dict[str, Any]:
    """Largest error of single float32 layers, of their largest number: with the switch off and on, and of products of ten-bit operands."""
    from vla_eval.engines import trt
    from vla_eval.engines.card import Card
    from vla_eval.engines.trt_build import new_network

    api, card, rng, found = trt.door().api, Card(), np.random.default_rng(0), dict[str, Any]()

    def ten_bits(x: np.ndarray) -> np.ndarray:
        bits = x.view(np.uint32)
        return ((bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)).view(np.float32)

    def product(network: Any, x: Any, w: Any) -> Any:
        return network.add_matrix_multiply(x, api.MatrixOperation.NONE, w, api.MatrixOperation.NONE)

    def softmax(network: Any, x: Any, w: Any) -> Any:
        layer = network.add_softmax(x)
        layer.axes = 2
        return layer

    def exact_softmax(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    def silu(network: Any, x: Any, w: Any) -> Any:
        sigmoid = network.add_activation(x, api.ActivationType.SIGMOID).get_output(0)
        return network.add_elementwise(x, sigmoid, api.ElementWiseOperation.PROD)

    layers = {
        "product": (product, lambda x, w: x.astype(np.float64) @ w.astype(np.float64)), "softmax": (softmax, exact_softmax),
        "silu": (silu, lambda x, w: x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))),
    }  # fmt: skip
    for name, (layer, truth) in layers.items():
        for rows, inner, columns in ((64, 64, 64), (147, 2048, 512)):
            x, w = rng.standard_normal((rows, inner), np.float32), rng.standard_normal((inner, columns), np.float32)
            wanted = truth(x, w)
            row: dict[str, Any] = {}
            for flag in (False, True):
                builder, network = new_network()
                ends = [network.add_input(end, api.DataType.FLOAT, value.shape) for end, value in (("x", x), ("w", w))]
                out = layer(network, *ends).get_output(0)
                out.name = "y"
                network.mark_output(out)
                settings = builder.create_builder_config()
                (settings.set_flag if flag else settings.clear_flag)(api.BuilderFlag.TF32)
                plan = builder.build_serialized_network(network, settings)
                assert plan is not None, trt.complaint()
                engine = api.Runtime(trt.logger()).deserialize_cuda_engine(plan)
                context, y = engine.create_execution_context(), card.empty(wanted.shape, "float32")
                for end, buffer in (("x", card.load(x)), ("w", card.load(w)), ("y", y)):
                    context.set_tensor_address(end, buffer.pointer)
                assert context.execute_async_v3(card.stream), trt.complaint()
                row["on" if flag else "off"] = float(np.abs(y.to_host() - wanted).max() / np.abs(wanted).max())
            if name == "product":
                short = ten_bits(x).astype(np.float64) @ ten_bits(w).astype(np.float64)
                row["ten bits"] = float(np.abs(short - wanted).max() / np.abs(wanted).max())
                row["float32"] = float(np.abs(x @ w - wanted).max() / np.abs(wanted).max())
            found[f"{name} {rows}x{inner}x{columns}"] = row
    return found


def tiny(work: Path, dtype: str, *, direct: bool = False, batch: int = 1) -> Bundle:
    out = work / f"tiny-{dtype}-{'direct' if direct else 'onnx'}-b{batch}"
    made = recipe(
        GOLDEN / "checkpoint", out, embodiment="libero_sim", dtype=dtype, batch=batch, geometry=GOLDEN / "geometry.json", direct=direct
    )  # type: ignore[arg-type]
    if not direct:
        from vla_eval.engines.trt_build import build_component

        for component in made.components.values():
            build_component(component)
    return made


def components(bundle: Bundle, reference: dict[str, np.ndarray]) -> dict[str, Any]:
    from vla_eval.engines.verify import compare

    verdict = compare(bundle, reference, backend="tensorrt")
    worst: dict[str, Any] = {}
    for row in verdict.rows:
        known = worst.setdefault(row.component, {"cosine": 1.0, "relative": 0.0, "failed": 0})
        known["cosine"], known["relative"] = min(known["cosine"], row.cosine), max(known["relative"], row.relative)
        known["failed"] += not row.passed
    assert verdict.passed, worst
    return worst


def whole(bundle: Bundle, truth: np.ndarray) -> dict[str, Any]:
    """The policy: against the truth, and its first, captured and replayed answers against each other."""
    policy = open_policy(bundle, backend="tensorrt")
    chunks = [policy.infer(observation(0), seed=5)["chunk_normalized"] for _ in range(4)]
    longer = [
        policy.infer(observation(1, "put the white mug on the left plate and close it"), seed=6)["chunk_normalized"] for _ in range(3)
    ]
    again = policy.infer(observation(0), seed=5)["chunk_normalized"]
    said = {
        **compared(chunks[0], truth), "replays equal": all(np.array_equal(chunks[0], chunk) for chunk in [*chunks[1:], again]),
        "other length equal": all(np.array_equal(longer[0], chunk) for chunk in longer[1:]),
        "captured": captured(policy),
    }  # fmt: skip
    close(policy)
    return said


def captured(policy: Gr00tPolicy) -> int:
    device = policy.runtime._device
    assert device is not None
    return sum(ready.graph is not None for ready in device.requests._kept.values())


def close(policy: Gr00tPolicy) -> None:
    device = policy.runtime._device
    assert device is not None
    device.requests.close()


def leaks(bundle: Bundle) -> dict[str, Any]:
    policy = open_policy(bundle, backend="tensorrt")
    device = policy.runtime._device
    assert device is not None
    for _ in range(20):
        policy.infer(observation(0), seed=1)
    before = device.card.free_bytes()
    for i in range(1000):
        policy.infer(observation(0), seed=i)
    return {"lost_bytes_in_1000": before - device.card.free_bytes()}


def two(first: Bundle, second: Bundle) -> dict[str, Any]:
    policies = [open_policy(bundle, backend="tensorrt") for bundle in (first, second)]
    alone = [policy.infer(observation(0), seed=2)["chunk_normalized"] for policy in policies]
    same = [
        np.array_equal(policy.infer(observation(0), seed=2)["chunk_normalized"], chunk)
        for _ in range(3)
        for policy, chunk in zip(policies, alone, strict=True)
    ]
    return {"equal in turns": all(same)}


def rows(bundle: Bundle) -> dict[str, Any]:
    """The same row beside other rows gives the same bits."""
    policy = open_policy(bundle, backend="tensorrt")
    a, b = observation(0), observation(1)
    both = {key: a[key] if key == WORDS else np.concatenate([a[key], b[key]]) for key in a}
    noise = np.random.default_rng(0).standard_normal((2, 40, 132), np.float32)
    pair = policy.infer(both, noise=noise)["chunk_normalized"]
    single = policy.infer(a, noise=noise[:1])["chunk_normalized"]
    return {"row 0 equal": bool(np.array_equal(pair[0], single[0]))}


def full(work: Path, requests: int) -> dict[str, Any]:
    from vla_eval.engines.trt_build import build_component
    from vla_eval.policies.gr00t.synthetic import synth

    said: dict[str, Any] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        made = function()
        said[f"{name} s"] = round(time.perf_counter() - began, 1)
        print(f"   {name} {said[f'{name} s']} s", flush=True)
        return made

    checkpoint = work / "full"
    timed("synth", lambda: synth(checkpoint, size="full"))
    bundle = timed("export", lambda: recipe(checkpoint, work / "full-fp16", embodiment="libero_sim", dtype="fp16"))
    for component in bundle.components.values():
        timed(f"build {component.name}", lambda c=component: build_component(c))
    policy = timed("load", lambda: open_policy(bundle, backend="tensorrt"))
    timed("first request", lambda: policy.infer(observation(0), seed=0))
    timed("second request", lambda: policy.infer(observation(0), seed=0))
    (row,) = policy.rows(observation(0, "put the black bowl in the drawer and close it"))
    from vla_eval.policies.flow import draw_noise
    from vla_eval.policies.gr00t.runtime import Inputs

    inputs = [Inputs(*row, draw_noise(0, 40, 132))]
    stages: dict[str, list[float]] = {}
    wall = []
    for _ in range(requests + 20):
        began = time.perf_counter()
        (answer,) = policy.runtime(inputs)
        wall.append(time.perf_counter() - began)
        for name, seconds in answer.seconds.items():
            stages.setdefault(name, []).append(seconds)
    said["tokens"] = int(row[2].size)
    said["captured"] = captured(policy)
    stages["gpu"] = [sum(stages[n][i] for n in ("h2d", "visual", "prefill", "denoise", "d2h")) for i in range(len(wall))]
    stages["wall"] = wall
    for name, values in stages.items():
        ms = 1e3 * np.asarray(values[20:])
        said[name] = {
            "p50": round(float(np.median(ms)), 3),
            "p99": round(float(np.percentile(ms, 99)), 3),
            "max": round(float(ms.max()), 3),
        }
    device = policy.runtime._device
    assert device is not None
    said["allocated GB"] = device.card.allocated / 1e9
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", choices=["tf32"])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--work", type=Path, default=None)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    work = arguments.work or Path(tempfile.mkdtemp())
    part("tf32", tf32)
    if arguments.only:
        return PARTS.end()
    part("kernels", kernels_against_numpy)
    reference = None

    def truth() -> str:
        nonlocal reference
        from vla_eval.engines.verify import SELFTEST, trace

        bundle = recipe(GOLDEN / "checkpoint", work / "truth", embodiment="libero_sim", geometry=GOLDEN / "geometry.json")
        chunk = open_policy(bundle, backend="onnxruntime").infer(observation(0), seed=5)["chunk_normalized"]
        reference = trace(bundle, read_npz(bundle.path / SELFTEST), backend="onnxruntime"), chunk
        return "ONNX Runtime, float32"

    part("truth", truth)
    bundles: dict[str, Bundle] = {}
    for dtype in ("fp32", "fp16", "bf16"):
        for direct in (False, True):
            name = f"{dtype} {'direct' if direct else 'onnx'}"

            def made(dtype: str = dtype, direct: bool = direct, name: str = name) -> dict[str, Any]:
                bundles[name] = tiny(work, dtype, direct=direct)
                from vla_eval.engines.trt_build import card_here, plan_file, record_of

                found = {c.name: record_of(plan_file(c, card_here()))["inspection"] for c in bundles[name].components.values()}
                return {
                    n: f"{type(r).__name__} {len(r.get('Layers', [])) if isinstance(r, dict) else str(r)[:80]}" for n, r in found.items()
                }

            part(f"build {name}", made)
            if name in bundles and reference is not None:
                part(f"components {name}", lambda n=name: components(bundles[n], reference[0]))
                part(f"request {name}", lambda n=name: whole(bundles[n], reference[1]))
    if "fp16 onnx" in bundles:
        part("leaks", lambda: leaks(bundles["fp16 onnx"]))
        part("two policies", lambda: two(bundles["fp16 onnx"], bundles.get("fp16 direct", bundles["fp16 onnx"])))
        part("reopened", lambda: whole(open_bundle(bundles["fp16 onnx"].path), reference[1]) if reference else "no truth")
    part("rows", lambda: rows(tiny(work, "fp16", batch=2)))
    if arguments.full:
        part("full", lambda: full(work, arguments.requests))
    return PARTS.end()


if __name__ == "__main__":
    raise SystemExit(main())
