"""One full-size model of random weights on a GPU: built, run as one CUDA graph a request, beside the same network in PyTorch.

    python benchmarks/gpu_models.py gr00t|pi05 [--routes direct,onnx] [--dtype fp16] [--requests 500] [--rival] [--work DIR]

Writes `MODEL.json` into $OUT; everything before a part that fails stands in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vla_eval.engines import trt
from vla_eval.engines.bundle import Bundle
from vla_eval.engines.trt_build import build_component
from vla_eval.policies.flow import draw_noise

HERE = Path(__file__).parent
WARM = 20  # requests that are not counted: the first compiles, the second is captured
GPU = ("h2d", "visual", "prefill", "denoise", "d2h")
said: dict[str, Any] = {}


def save() -> None:
    if out := os.environ.get("OUT"):
        Path(out, f"{said['model']}.json").write_text(json.dumps(said, indent=1, default=str))


def timed(into: dict[str, Any], name: str, function: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    made = function()
    into[f"{name}_s"] = round(time.perf_counter() - began, 1)
    print(f"   {name} {into[f'{name}_s']} s", flush=True)
    return made


def gr00t(bundle: Bundle, seed: int) -> tuple[Any, list[Any]]:
    """The runtime, and one row for each robot of its batch: two pictures and a prompt of LIBERO's length."""
    from vla_eval.policies.gr00t.policy import open_policy
    from vla_eval.policies.gr00t.runtime import Inputs

    policy, rng = open_policy(bundle, backend="tensorrt"), np.random.default_rng(seed)
    batch = policy.runtime.batch
    seen: dict[str, Any] = {f"video.{c}": rng.integers(0, 256, (batch, 1, 256, 256, 3), np.uint8) for c in ("image", "wrist_image")}
    for key, dim in {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2}.items():
        seen[f"state.{key}"] = rng.uniform(0, 0.3, (batch, 1, dim)).astype(np.float32)
    rows = policy.rows({**seen, "annotation.human.action.task_description": "put the black bowl in the drawer and close it"})
    return policy.runtime, [Inputs(*row, draw_noise(i, 40, 132)) for i, row in enumerate(rows)]


def pi05(bundle: Bundle, seed: int) -> tuple[Any, list[Any]]:
    """The same: two pictures, 16 tokens of text, 528 in all."""
    from vla_eval.policies.pi05.runtime import Inputs, Pi05Runtime

    runtime, rng = Pi05Runtime(bundle, backend="tensorrt"), np.random.default_rng(seed)
    side = runtime.geometry.vision.image
    return runtime, [
        Inputs(
            rng.uniform(-1, 1, (2, 3, side, side)).astype(np.float32),
            rng.integers(3, 250_000, 16),
            draw_noise(i, runtime.horizon, runtime.width),
        )
        for i in range(runtime.batch)
    ]


def measured(runtime: Any, rows: list[Any], requests: int) -> dict[str, Any]:
    stages: dict[str, list[float]] = {"wall": []}
    for _ in range(requests + WARM):
        began = time.perf_counter()
        answers = runtime(rows)
        stages["wall"].append(time.perf_counter() - began)
        for name, seconds in answers[0].seconds.items():
            stages.setdefault(name, []).append(seconds)
    stages["gpu"] = [sum(stages[name][i] for name in GPU) for i in range(requests + WARM)]
    stages["host"] = [wall - gpu for wall, gpu in zip(stages["wall"], stages["gpu"], strict=True)]
    table = {}
    for name, values in stages.items():
        ms = 1e3 * np.asarray(values[WARM:])
        table[name] = {
            q: round(float(v), 3) for q, v in zip(("p50", "p90", "p99", "max"), [*np.percentile(ms, [50, 90, 99]), ms.max()], strict=True)
        }
    return table


def route(name: str, checkpoint: Path, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from vla_eval.policies.gr00t.recipe import recipe as make_gr00t

    row: dict[str, Any] = {"batch": arguments.batch}
    out, direct = work / f"{arguments.model}-{name}-b{arguments.batch}", name == "direct"
    options: dict[str, Any] = {"dtype": arguments.dtype, "batch": arguments.batch, "direct": direct}
    if arguments.model == "gr00t":
        bundle = timed(row, "export", lambda: make_gr00t(checkpoint, out, embodiment="libero_sim", **options))
    else:
        from vla_eval.policies.pi05.recipe import recipe as make_pi05

        bundle = timed(row, "export", lambda: make_pi05(checkpoint, out, policy_config="pi05_libero", **options))
    if not direct:
        for component in bundle.components.values():
            timed(row, f"build_{component.name}", lambda c=component: build_component(c))
    opened = gr00t if arguments.model == "gr00t" else pi05
    runtime, rows = timed(row, "load_cold", lambda: opened(bundle, 0))
    timed(row, "first_request", lambda: runtime(rows))
    row["ms"] = measured(runtime, rows, arguments.requests)
    row["about"] = runtime.about
    row["layers"] = {c.name: layers(c) for c in bundle.components.values()}
    runtime = rows = None  # frees the card
    gc.collect()
    _, rows = timed(row, "load_with_cache", lambda: opened(bundle, 0))
    shutil.rmtree(out)  # the disk is small
    return row


def layers(component: Any) -> dict[str, Any]:
    """How many kernels a plan runs, and the names of the commonest."""
    from vla_eval.engines.trt_build import card_here, plan_file, record_of

    report = record_of(plan_file(component, card_here())).get("inspection")
    if not isinstance(report, dict):
        return {"report": str(report)[:200]}
    names = [layer if isinstance(layer, str) else str(layer.get("Name", layer)) for layer in report["Layers"]]
    return {"count": len(names), "first": [name[:90] for name in names[:40]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["gr00t", "pi05"])
    parser.add_argument("--routes", default="direct")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--work", type=Path, default=None)
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    flavour = trt.door()
    said.update(model=arguments.model, dtype=arguments.dtype, tensorrt=f"{flavour.name} {flavour.version}", routes={})
    if arguments.rival:  # first, while the card is empty; the same card and the same call
        command = [sys.executable, str(HERE / f"rivals/torch_baseline_{arguments.model}.py"), "--arms", "lean-graph", "--batch", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout[-2500:], done.stderr[-1500:], flush=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("JSON ")]
        said["rival"] = json.loads(lines[-1][5:]) if lines else done.stderr[-1000:]
        save()
    checkpoint = work / "checkpoint"
    if not checkpoint.exists():
        if arguments.model == "gr00t":
            from vla_eval.policies.gr00t.synthetic import synth
        else:
            from vla_eval.policies.pi05.synthetic import synth
        timed(said, "synth", lambda: synth(checkpoint, size="full"))
    failed = 0
    for name in arguments.routes.split(","):
        try:
            said["routes"][name] = route(name, checkpoint, work, arguments)
        except Exception as error:  # the other route still tells something
            traceback.print_exc()
            said["routes"][name] = {"error": f"{type(error).__name__}: {error}"[:800]}
            failed += 1
        save()
        print(name, json.dumps({k: v for k, v in said["routes"][name].items() if k != "layers"}, default=str), flush=True)
    print("JSON", json.dumps(said, default=str)[:9000])
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
