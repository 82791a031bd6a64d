"""Closed loops on a machine with a GPU: LIBERO's simulators draw beside engines that answer, twice the same; and the oracle over a suite.

    python benchmarks/gpu_loop.py [--models gr00t,pi05] [--bundle MODEL=DIR …] [--suite libero_spatial] [--workers 4] [--dtype fp16]
                                  [--kernels gr00t] [--size full|tiny] [--backend tensorrt] [--oracle TRIALS] [--minutes 8]
                                  [--work DIR] [--out DIR]

Engines have random weights, so no episode succeeds: every one lasts as long as the protocol lets it. A bundle that is not given is built
straight from a synthetic checkpoint and stays in --work. `loop.json` goes into --out, by default $OUT; whatever fails, the rest is in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _parts import Note, Parts, command_line
from _same import arrays, outcome

import vla_eval
from vla_eval import registry
from vla_eval.results.folder import RunFolder, open_run
from vla_eval.results.report import report
from vla_eval.run.loop import start

OPTIONS: Mapping[str, dict[str, Any]] = {"gr00t": {"embodiment": "libero_sim"}, "pi05": {"policy_config": "pi05_libero"}}
CAMERAS = {"agentview": (256, 256), "robot0_eye_in_hand": (256, 256)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gr00t,pi05", help="none: the oracle alone")
    parser.add_argument("--bundle", action="append", default=[], help="MODEL=DIR")
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--kernels", default="", help="models that are exported with our kernels' weights")
    parser.add_argument("--backend", default="tensorrt")
    parser.add_argument("--oracle", type=int, default=0, metavar="TRIALS", help="of each task of the suite")
    asked, work = command_line(parser)
    parts = Parts(asked.out / "loop.json", minutes=asked.minutes, command=" ".join(sys.argv), suite=asked.suite, workers=asked.workers)
    parts("doctor", lambda note: note.update(command(["doctor"], refused=(1,))))
    given = dict(pair.split("=", 1) for pair in asked.bundle)
    for model in () if asked.models == "none" else asked.models.split(","):
        bundle = Path(given[model]) if model in given else parts(f"{model} bundle", lambda note, m=model: made(note, asked, m, work))
        if bundle is not None:
            loop(parts, asked, model, bundle, work)
    if asked.oracle:
        parts("oracle", lambda note: note.update(oracle(asked, work)))
    return parts.end()


def made(note: Note, asked: argparse.Namespace, model: str, work: Path) -> Path:
    """A bundle of random weights; one that an earlier call left is taken as it is."""
    own = model in asked.kernels.split(",")
    out = work / f"loop-{model}-{asked.size}-{asked.dtype}{'-kernels' if own else ''}"
    checkpoint = work / f"{model}-{asked.size}"
    if (out / "visual/config.json").is_file():
        return out
    if not checkpoint.exists():
        began = time.perf_counter()
        registry.load_synth(model)(checkpoint, size=asked.size)
        note["synth_s"] = round(time.perf_counter() - began, 1)
    tiny = {"geometry": checkpoint / "geometry.json"} if asked.size == "tiny" else {}
    direct = {"direct": True} if asked.backend == "tensorrt" else {}
    kernels = {"kernels": True} if own else {}
    registry.load_recipe(model)(checkpoint, out, dtype=asked.dtype, **OPTIONS[model], **tiny, **direct, **kernels)
    return out


def loop(parts: Parts, asked: argparse.Namespace, model: str, bundle: Path, work: Path) -> None:
    """Ten episodes, twice; then what differs, and where the time went."""
    runs = [parts(f"{model} run {turn}", lambda note: played(note, asked, model, bundle, work)) for turn in (1, 2)]
    whole = [run for run in runs if run is not None]
    if len(whole) == 2:
        parts(f"{model} twice the same", lambda note: note.update(same(*whole)))
    if whole:
        parts(f"{model} time", lambda note: note.update(spent(whole[-1], asked.workers)))


def played(note: Note, asked: argparse.Namespace, model: str, bundle: Path, work: Path) -> RunFolder:
    """One run by the command line, in a process of its own."""
    words = ["run", "--task", asked.suite, "--policy", model, "--bundle", str(bundle), "--trials", str(asked.trials)]
    words += ["--workers", str(asked.workers), "--option", f"backend={asked.backend}", "--out", str(work / "runs")]
    began = time.perf_counter()
    said = command(words, refused=(1,))
    note["whole_s"] = round(time.perf_counter() - began, 1)
    note |= {name: said[name] for name in ("folder", "complete", "success", "failure", "error")}
    folder = open_run(said["folder"])
    note["errors"] = sorted({record.error for record in folder.records() if record.error})[:3]
    return folder


def same(one: RunFolder, other: RunFolder) -> dict[str, Any]:
    """Whether two runs are equal but for times."""
    found = {"episodes": len(other.manifest.ledger), "records": outcome(one) == outcome(other), "arrays": arrays(one) == arrays(other)}
    assert found["records"], "records differ"
    assert found["arrays"], "arrays differ"
    return found


def spent(folder: RunFolder, workers: int) -> dict[str, Any]:
    """Where a run's seconds went, from its folder alone: shares of the episodes' time, and the answers' milliseconds by stage."""
    records = folder.records()
    total = sum(record.seconds for record in records)
    shares = {name: round(sum(record.timing[name] for record in records) / total, 4) for name in records[0].timing}
    steps, answers = sum(record.steps for record in records), sum(record.chunks for record in records)
    latency = report(folder).latency
    assert latency is not None, "no answer was recorded"
    return {
        "backend": folder.manifest.backend, "hardware": folder.manifest.hardware, "episodes": len(records), "steps": steps,
        "answers": answers, "seconds_of_episodes": round(total, 2), "shares": shares, "steps_per_second": round(steps * workers / total, 1),
        "pictures_per_second_of_rendering": round(2 * answers / max(sum(r.timing.get("rendering", 0.0) for r in records), 1e-9), 1),
        "answer_ms": {
            stage: {q: round(1e3 * getattr(found, q), 3) for q in ("p50", "p90", "p99")} for stage, found in latency.stages.items()
        },
        "answers_in_time": round(latency.in_time, 4),
    }  # fmt: skip


def oracle(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The oracle over the whole suite, with the pictures drawn that an engine would ask for."""
    policy: Any = vla_eval.load_policy("oracle")
    looking = replace(policy, needs=replace(policy.needs, cameras=CAMERAS))
    tasks = registry.select_tasks(asked.suite)
    began = time.perf_counter()
    with start(looking, tasks, trials=asked.oracle, workers=asked.workers, replan=4, out=work / "runs") as run:
        records = list(run)
    whole = time.perf_counter() - began
    assert run.folder is not None
    missed = sorted(f"{record.task} trial {record.trial}: {record.outcome}" for record in records if record.outcome != "success")
    return {
        "tasks": len(tasks), "successes": sum(record.outcome == "success" for record in records), "missed": missed,
        "whole_s": round(whole, 1), **spent(open_run(run.folder.path), asked.workers),
    }  # fmt: skip


def command(words: Sequence[str], refused: Sequence[int] = ()) -> dict[str, Any]:
    """What a command of vla-eval answers with --json. Raises RuntimeError with its last lines, unless its exit code is 0 or `refused`."""
    done = subprocess.run([sys.executable, "-m", "vla_eval", *words, "--json"], capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr[-2000:])
    if done.returncode not in (0, *refused):
        raise RuntimeError(f"vla-eval {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    raise SystemExit(main())
