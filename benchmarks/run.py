"""What the harness costs, what drawing on demand and a second worker gain, and whether a run is the same however it is played.

`python benchmarks/run.py` measures on real LIBERO and on the toy, and writes docs/run.json and the table of docs/run.md; every ratio comes
from one go.
`--only harness drawing workers same killed` picks parts; what docs/run.json has of the others stays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _same import arrays, outcome
from _tables import fill, table

import vla_eval
from vla_eval.contract import open_env
from vla_eval.policies.baseline import random
from vla_eval.results.folder import RunFolder, open_run
from vla_eval.run.episode import episode_seed
from vla_eval.run.loop import resume, start
from vla_eval.run.manifest import hardware, versions
from vla_eval.types import ARM_ACTION, ARM_STATE, ActionChunk, Interface, Policy, Request, Task

DOCS = Path(__file__).parents[1] / "docs"
OUT, PAGE = DOCS / "run.json", DOCS / "run.md"
SUITE, REPLAN, CHUNK = "libero_object", 4, 8
TRIALS, MOMENTS = 24, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[Path], Any]] = {"harness": harness, "drawing": drawing, "workers": workers, "same": same, "killed": killed}
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in parser.parse_args().only:
            began = time.perf_counter()
            found[name] = parts[name](Path(folder))
            print(f"{name}, {time.perf_counter() - began:.0f} s", json.dumps(found[name], indent=1), flush=True)
    found |= {"command": "python benchmarks/run.py", "hardware": hardware(), "versions": versions()}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    rows = [(what, measured(found[name]), wanted) for name, (what, measured, wanted) in LINES.items() if name in found]
    fill(PAGE, {"run": table(("what", "measured", "wanted"), rows)})


def _harness_line(part: Mapping[str, Any]) -> str:
    waiting, recording = part["shares"]["waiting"], part["shares"]["recording"]
    return f"{part['harness_share']:.2%}: {waiting:.2%} on the way to the policy's process and back, {recording:.2%} recording"


def _drawing_line(part: Mapping[str, Any]) -> str:
    same = "same" if part["identical_states_and_pictures"] else "OTHER"
    return f"{part['gain']:.2f} times as fast, {part['share_of_limit']:.1%} of the limit; {same} states and pictures"


def _same_line(part: Mapping[str, Any]) -> str:
    ways = part["identical_to_no_worker"]
    return f"{sum(ways.values())} of {len(ways)} ways identical, {part['episodes']} episodes each"


LINES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str], str]] = {  # part -> what it is, how its numbers are said, what is wanted
    "harness": (f"time outside environment and policy: `oracle`, {SUITE}, replan {REPLAN}", _harness_line, "< 1 % of an episode"),
    "drawing": (
        f"drawing when the policy looks, once in {CHUNK} steps, against both cameras at each step",
        _drawing_line,
        f"90 % of the limit (step + pictures) / (step + pictures / {CHUNK})",
    ),
    "workers": (
        f"steps a second with two workers against one: recorded actions, chunks of {CHUNK}, no pictures",
        lambda part: f"{part['gain']:.2f} times as many",
        "1.8",
    ),
    "same": ("records and arrays with 1 worker, with 3, with 3 and batches of 2, against no worker: the toy", _same_line, "all"),
    "killed": (
        "a run of the toy killed (SIGKILL) at a random moment and resumed, against one left alone",
        lambda part: f"{part['identical']} of {part['moments']} identical, {part['episodes']} episodes each",
        "all",
    ),
}


def harness(folder: Path) -> dict[str, Any]:
    """Time outside the environment and the policy, of oracle episodes without pictures."""
    run = _oracle(folder)
    records = run.records()
    spent = {name: sum(record.timing[name] for record in records) for name in records[0].timing}
    total = sum(record.seconds for record in records)
    return {
        "suite": run.manifest.suite,
        "episodes": len(records),
        "outcomes": sorted({record.outcome for record in records}),
        "seconds_per_episode": total / len(records),
        "shares": {name: seconds / total for name, seconds in spent.items()},
        "harness_share": (spent["recording"] + spent["waiting"]) / total,
        "limit": 0.01,
    }


def drawing(folder: Path) -> dict[str, Any]:
    """Drawing when the policy looks, once in eight steps, against drawing at every step: the same actions, alternately."""
    task = vla_eval.load_tasks(SUITE)[0]
    run = _oracle(folder)
    actions = run.episode(task.id, 0).actions
    seen: dict[str, list[tuple[bytes, dict[str, bytes]]]] = {}
    times: dict[str, list[float]] = {"always": [], "on_request": [], "step": [], "look": []}
    for pictures in ("always", "on_request", "always", "on_request"):
        env = open_env(replace(task, env_kwargs={**task.env_kwargs, "pictures": pictures}))
        bare: Any = env.unwrapped
        observation, _ = env.reset(seed=episode_seed(0, task.id, 0), options={"trial": 0})
        bare.look()  # the first picture sets the drawing up
        kept, began = [], time.perf_counter()
        for number, action in enumerate(actions):
            if number % CHUNK == 0:
                looked = time.perf_counter()
                images = observation["images"] if pictures == "always" else bare.look()
                times["look"] += [time.perf_counter() - looked] if pictures == "on_request" else []
                kept.append((bare.snapshot().tobytes(), {name: image.tobytes() for name, image in images.items()}))
            stepped = time.perf_counter()
            observation, *_ = env.step(action)
            times["step"] += [time.perf_counter() - stepped] if pictures == "on_request" else []
        times[pictures].append(time.perf_counter() - began)
        same_before = seen.setdefault(pictures, kept) == kept
        env.close()
        assert same_before
    step, look = float(np.mean(times["step"])), float(np.mean(times["look"]))
    gain, limit = sum(times["always"]) / sum(times["on_request"]), (step + look) / (step + look / CHUNK)
    return {
        "task": task.id, "steps": len(actions), "chunk": CHUNK, "step_ms": 1e3 * step, "two_pictures_ms": 1e3 * look,
        "gain": gain, "limit": limit, "share_of_limit": gain / limit, "identical_states_and_pictures": seen["always"] == seen["on_request"],
    }  # fmt: skip


def workers(folder: Path) -> dict[str, Any]:
    """Steps a second with two workers against one, no pictures, recorded actions in chunks of eight."""
    tasks = vla_eval.load_tasks(SUITE)[:1]
    source = _oracle(folder)
    policy = vla_eval.load_policy("replay", run=str(source.path), horizon=CHUNK)
    trials = source.manifest.trials
    rates: dict[int, list[float]] = {}
    episodes: dict[int, list[int]] = {}  # measured
    for count in (1, 2, 1, 2):
        times, steps = [], []
        with start(policy, tasks, trials=trials, workers=count) as run:
            for record in run:
                if all(seat.worker is not None and seat.worker.task for seat in run._seats):  # compiling the second one takes a while
                    times.append(time.perf_counter())
                    steps.append(record.steps)
        # From the first episode that ended while all simulators stood, until one has no more to play.
        rates.setdefault(count, []).append(sum(steps[1 : len(steps) + 1 - count]) / (times[-count] - times[0]))
        episodes.setdefault(count, []).append(len(steps) - count)
    one, two = (float(np.mean(rates[count])) for count in (1, 2))
    return {
        "task": tasks[0].id,
        "episodes": episodes,
        "steps_per_second": {"1": one, "2": two},
        "gain": two / one,
        "all": rates,
        "wanted": 1.8,
    }


def same(folder: Path) -> dict[str, Any]:
    """Records and arrays of 0, 1 and 3 workers, and of batches of two."""
    tasks, given = vla_eval.load_tasks("toy"), {"trials": 10, "seed": 5}
    reference = _played(Looks(), tasks, folder / "0", workers=0, **given)
    found = {}
    for name, how in {"1 worker": {"workers": 1}, "3 workers": {"workers": 3}, "3 workers, batch 2": {"workers": 3, "batch": 2}}.items():
        other = _played(Looks(), tasks, folder / name, **how, **given)
        found[name] = outcome(other) == outcome(reference) and arrays(other) == arrays(reference)
    return {"episodes": len(reference.manifest.ledger), "identical_to_no_worker": found}


def killed(folder: Path) -> dict[str, Any]:
    """A run killed at random moments and resumed, against one that was left alone."""
    tasks = vla_eval.load_tasks("toy")
    reference = _played(random(), tasks, folder / "whole", trials=5, seed=5, workers=0)
    script = """
import sys, time
from vla_eval.policies.baseline import random
from vla_eval.registry import load_tasks
from vla_eval.run.loop import start
class Slow:
    name, horizon, needs = random().name, random().horizon, random().needs
    def act(self, batch):
        time.sleep(0.005)
        return random().act(batch)
with start(Slow(), load_tasks("toy"), trials=5, seed=5, workers=2, out=sys.argv[1]) as run:
    print(run.folder.path, flush=True)
    list(run)
"""
    draw, moments = np.random.default_rng(0), []
    for number in range(MOMENTS):
        process = subprocess.Popen([sys.executable, "-c", script, str(folder / f"killed{number}")], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process, process.stdout as lines:
            path = Path(lines.readline().strip())
            time.sleep(draw.uniform(0, 1.5))
            process.kill()
        before = len(open_run(path).records())
        with resume(path, random(), tasks, workers=2, accept_revision=True) as run:  # an edit meanwhile is not what is measured
            list(run)
        now = open_run(path)
        moments.append({"finished_before": before, "identical": outcome(now) == outcome(reference) and arrays(now) == arrays(reference)})
    return {
        "episodes": len(reference.manifest.ledger),
        "moments": len(moments),
        "identical": sum(moment["identical"] for moment in moments),
        "finished_before": [moment["finished_before"] for moment in moments],
    }


class Looks:
    """Acts on what it sees, remembers and is seeded with, so that anything wrong on the way shows in its actions."""

    name, horizon = "looks", 8
    needs = Interface(cameras={"agentview": (64, 64)}, state=dict(ARM_STATE), action=ARM_ACTION, control_hz=20)

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [self._chunk(request) for request in batch]

    def _chunk(self, request: Request) -> ActionChunk:
        seen = int(request.observation["images"]["agentview"].astype(np.int64).sum())
        draw = np.random.default_rng([request.seed, seen, *(request.memory or b"\x01")])
        return ActionChunk(draw.uniform(-1, 1, (self.horizon, 7)), memory=draw.bytes(4))


def _oracle(folder: Path) -> RunFolder:
    """Some trials of the first task, played once for all parts."""
    out = folder / "oracle"
    if out.exists():
        return open_run(next(out.iterdir()))
    return _played(vla_eval.load_policy("oracle"), vla_eval.load_tasks(SUITE)[:1], out, trials=TRIALS, workers=1, replan=REPLAN)


def _played(policy: Policy, tasks: Sequence[Task], out: Path, **given: Any) -> RunFolder:
    with start(policy, tasks, out=out, **given) as run:
        list(run)
    assert run.folder is not None
    return run.folder


if __name__ == "__main__":
    main()
