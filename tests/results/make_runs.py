"""Run folders for the tests of results: invented manifests and outcomes, arrays from a hand on a table that does what it is told.

`python tests/results/make_runs.py OUT` writes one to look at. The same arguments give the same bytes, times included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_eval.results.folder import Episode, RunFolder, create
from vla_eval.types import EpisodeRecord, Outcome, RunManifest

SUITE = "shop@fair"
OBJECTS = ("soup", "milk", "plate")
GOAL = "on(soup, plate)"
HZ = 20.0
CAP = 120
_written: dict[tuple[str, int], tuple[bytes, int, int]] = {}  # way to fail and seed -> the file's bytes, steps, chunks
Outcomes = Callable[[int, int], str]  # (task, trial) -> "success", "error: …" or the way to fail

TAUGHT = {
    "success": "success",
    "idle": "never reached the object",
    "nudge": "touched, never grasped",
    "wrong": "wrong object moved",
    "drop": "grasped and lost",
    "freeze": "held to the end, not placed",
    "undo": "goal reached and undone",
    "slow": "slow: still progressing at the cap",
}


def manifest(**changes: Any) -> RunManifest:
    """A complete manifest; `tasks` and `trials` make the ledger."""
    tasks, trials, suite = changes.pop("tasks", 3), changes.setdefault("trials", 4), changes.setdefault("suite", SUITE)
    cap = changes.pop("cap", CAP)
    names = [f"{suite}/{index}" for index in range(tasks)]
    protocol = {
        "seeding": "sha256",
        "replan": "asked for",
        "tasks": {
            name: {
                "env": "shop:Shop-v0",
                "instruction": f"put the soup on plate {index} & <b>smile</b>",
                "max_steps": cap,
                "trials": 50,
                "env_kwargs": {"settle_steps": 10, "size": 64},
                "starts": "4f1c",
                "control_hz": HZ,
            }
            for index, name in enumerate(names)
        },
    }
    base = RunManifest(
        schema=1,
        run_id="20260102T030405Z-shop@fair-clerk-0001",
        created="2026-01-02T03:04:05+00:00",
        command=["vla-eval", "run"],
        suite=suite,
        policy="clerk",
        privileged=False,
        bundle=None,
        backend="none",
        engines={},
        trials=trials,
        seed=0,
        batch=1,
        replan=4,
        ledger=[(name, trial) for name in names for trial in range(trials)],
        protocol=protocol,
        options={},
        versions={"python": "3.11.7", "mujoco": "3.3.2", "robosuite": "1.4.0"},
        revision={"version": "0.1.0", "commit": "abc", "dirty": False},
        hardware={"cpu": "test"},
    )
    return replace(base, **changes)


def make_run(out: Path, outcomes: Outcomes | None = None, *, only: int | None = None, **changes: Any) -> RunFolder:
    """A run folder in `out`, played in ledger order; `only` plays that many episodes and leaves the rest."""
    folder = create(out, manifest(**changes))
    for task, trial in folder.manifest.ledger[:only]:
        index = int(task.rpartition("/")[2])
        way = outcomes(index, trial) if outcomes else ("success" if (index + trial) % 3 else "drop")
        play(folder, task, trial, way)
    return folder


def play(folder: RunFolder, task: str, trial: int, way: str) -> None:
    """Add one episode. A way "error: …" records that message and no arrays."""
    common: Mapping[str, Any] = {"task": task, "trial": trial, "seed": folder.manifest.seed, "attempts": 1, "policy_seconds": 0.4}
    if way.startswith("error: "):
        folder.append(EpisodeRecord(outcome="error", steps=3, chunks=1, seconds=0.1, error=way.removeprefix("error: "), **common))
        return
    seed = 1000 * int(task.rpartition("/")[2]) + trial
    if (way, seed) not in _written:
        arrays = episode(way, seed)
        file = folder.write_episode(task, trial, arrays).read_bytes()
        _written[way, seed] = file, len(arrays.actions), len(arrays.request_step)
    file, steps, chunks = _written[way, seed]
    folder.episode_path(task, trial).write_bytes(file)
    outcome: Outcome = "success" if way == "success" else "failure"
    folder.append(EpisodeRecord(outcome=outcome, steps=steps, chunks=chunks, seconds=2.0 + trial, **common))


def episode(way: str, seed: int) -> Episode:
    """A hand that walks to an object, takes it and carries it, as `way` says; numbers are metres, 20 steps a second."""
    rng = np.random.default_rng(seed)
    steps = 60 + int(rng.integers(20)) if way == "success" else CAP
    place = np.zeros((steps + 1, 3, 3))
    place[:] = [[0.0, 0.0, 0.0], [0.2, 0.1, 0.0], [0.3, -0.2, 0.0]] + rng.normal(0, 0.02, (3, 3)) * [1, 1, 0]
    held = np.zeros((steps + 1, 3), bool)
    met = np.zeros((steps + 1, 1), bool)
    grasp = 20 + int(rng.integers(10))
    to_plate = place[0, 2] - place[0, 0]

    def carry(k: int, start: int, end: int, way: np.ndarray) -> None:
        share = np.clip((np.arange(steps + 1) - start) / max(end - start, 1), 0, 1)[:, None]
        place[:, k] += share * way
        held[start : end + 1, k] = True

    if way == "success":
        carry(0, grasp, steps, to_plate)
        met[steps] = True
    elif way == "nudge":
        place[grasp:, 0] += [0.05, 0, 0]
    elif way == "wrong":
        carry(1, grasp, grasp + 40, to_plate)
    elif way == "drop":
        carry(0, grasp, grasp + 20, 0.4 * to_plate)
    elif way == "freeze":
        carry(0, grasp, grasp + 20, 0.4 * to_plate)
        held[grasp + 20 :, 0] = True
    elif way == "undo":
        carry(0, grasp, grasp + 30, to_plate)
        met[grasp + 30 : grasp + 50] = True
        place[grasp + 50 :, 0] -= 0.5 * to_plate
    elif way == "slow":
        carry(0, steps - 60, steps, 0.7 * to_plate)
    elif way != "idle":
        raise ValueError(way)

    asked = np.arange(0, steps, 4, dtype=np.int32)
    stages = np.array(["pack", "prefill", "denoise", "unpack", "total"])
    seconds = rng.gamma(20.0, 0.001, (len(asked), 4))
    return Episode(
        actions=rng.uniform(-1, 1, (steps, 7)).astype(np.float32),
        states=np.zeros((steps + 1, 0)),
        proprio=np.zeros((steps + 1, 8), np.float32),
        predicates=met,
        predicate_names=np.array([GOAL]),
        objects=np.concatenate([place, np.tile([0.0, 0, 0, 1], (steps + 1, 3, 1))], axis=-1).astype(np.float32),
        object_names=np.array(OBJECTS),
        held=held,
        fixture_names=np.zeros(0, "U1"),
        fixture_poses=np.zeros((0, 7)),
        request_step=asked,
        request_seconds=np.concatenate([seconds, seconds.sum(axis=1, keepdims=True)], axis=1),
        request_stages=stages,
        request_batch=np.ones(len(asked), np.int32),
    )


if __name__ == "__main__":
    ways = [*TAUGHT, "error: RuntimeError: no GL context"]
    print(make_run(Path(sys.argv[1]), lambda task, trial: ways[(task + trial) % len(ways)], trials=9).path)  # noqa: T201
