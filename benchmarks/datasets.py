"""Write and check a dataset of 50,000 made-up frames, and ten times as many: seconds, and the memory that does not grow.

    python benchmarks/datasets.py [--video] [--out docs/datasets.json]

Each figure comes from a process of its own. `--video` adds two cameras of 256×256 to the smaller dataset and decodes every frame.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vla_eval.results.folder import Episode, RunFolder, create
from vla_eval.results.lerobot import Draw, write
from vla_eval.results.lerobot_check import check
from vla_eval.run.manifest import hardware, versions
from vla_eval.types import EpisodeRecord, Image, RunManifest

STEPS, SIDE = 300, 256
SIZES = {"50,100 frames": 167, "501,000 frames": 1670}  # episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        _part(asked.part[0], Path(asked.part[1]), asked.video)
        return
    found: dict[str, Any] = {"hardware": hardware(), "versions": versions()}
    for name, episodes in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            video = asked.video and episodes == min(SIZES.values())
            _run(Path(folder), episodes)
            found[f"{name}{', two cameras' if video else ''}"] = {part: _measured(part, Path(folder), video) for part in ("write", "check")}
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


def _measured(part: str, folder: Path, video: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", part, str(folder), *(["--video"] if video else [])]
    measured: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return measured


def _part(part: str, folder: Path, video: bool) -> None:
    from vla_eval.results.folder import open_run

    began = time.perf_counter()
    if part == "write":
        write([open_run(next((folder / "runs").iterdir()))], folder / "data", size=SIDE, studio=_studio if video else None)
    elif findings := list(check(folder / "data", videos=video)):
        raise SystemExit(f"a sound dataset has findings: {findings[0]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": round(time.perf_counter() - began, 1), "peak_mb": round(peak)}))


@contextmanager
def _studio(run: RunFolder, task: str, size: int) -> Iterator[Draw]:
    """Two moving gradients, as cheap to draw as a picture can be."""
    ramp = np.add.outer(np.arange(size), np.arange(size)).astype(np.uint8)[..., None].repeat(3, axis=2)

    def draw(episode: Episode) -> Iterator[Mapping[str, Image]]:
        for step in range(len(episode.states)):
            yield {"agentview": np.roll(ramp, step, axis=0), "robot0_eye_in_hand": np.roll(ramp, step, axis=1)}

    yield draw


def _run(folder: Path, episodes: int) -> None:
    """A run folder of arms that wander."""
    rng, text, nothing = np.random.default_rng(0), np.empty(0, "<U1"), np.empty((STEPS + 1, 0), np.bool_)
    task = {"pick@v1/0": {"instruction": "pick it up", "control_hz": 20.0}}
    manifest = RunManifest(
        schema=1, run_id="made-up", created="2026-01-01T00:00:00+00:00", command=(), suite="pick@v1", policy="none", privileged=False,
        bundle=None, backend="none", engines={}, trials=episodes, seed=0, batch=1, replan=1,
        ledger=[("pick@v1/0", trial) for trial in range(episodes)], protocol={"tasks": task}, options={}, versions={}, revision={},
        hardware={},
    )  # fmt: skip
    run = create(folder / "runs", manifest)
    for trial in range(episodes):
        actions = rng.uniform(-1, 1, (STEPS, 7)).astype(np.float32)
        proprio = np.cumsum(rng.normal(size=(STEPS + 1, 8)), axis=0).astype(np.float32)
        episode = Episode(
            actions=actions, states=np.zeros((STEPS + 1, 1)), proprio=proprio, predicates=nothing, predicate_names=text,
            objects=np.empty((STEPS + 1, 0, 7), np.float32), object_names=text, held=nothing, fixture_names=text,
            fixture_poses=np.empty((0, 7)), request_step=np.zeros(1, np.int32), request_seconds=np.zeros((1, 1)),
            request_stages=np.array(["total"]), request_batch=np.ones(1, np.int32),
        )  # fmt: skip
        run.write_episode("pick@v1/0", trial, episode)
        run.append(EpisodeRecord("pick@v1/0", trial, 0, "success", STEPS, 1, 1, 1.0, 0.0))


if __name__ == "__main__":
    main()
