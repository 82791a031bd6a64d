"""Small run folders with made-up arms, something that draws them, and a dataset without a fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from vla_eval.results import lerobot_check, lerobot_v3
from vla_eval.results.folder import Episode, RunFolder, create
from vla_eval.results.lerobot import Draw, Written, write
from vla_eval.results.lerobot_video import Decoded, decode
from vla_eval.types import EpisodeRecord, Image, Outcome, RunManifest

INSTRUCTIONS = ("put the bowl on the plate", "öffne die Schublade")
CAMERAS = ("agentview", "robot0_eye_in_hand")
Played = tuple[int, int, Outcome, int]  # task index, trial, outcome, steps
PLAYED: tuple[Played, ...] = ((1, 0, "failure", 23), (0, 1, "success", 20), (0, 0, "success", 31), (1, 1, "error", 5))
MakeRun = Callable[..., RunFolder]


def arm(steps: int, seed: int) -> Episode:
    """An arm that wanders: every number moves, the gripper opens, closes and holds."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    actions[:, 6] = rng.choice([-1.0, 1.0, 0.0], steps)
    proprio = (rng.normal(size=8) + np.cumsum(rng.normal(size=(steps + 1, 8)), axis=0) * 0.05).astype(np.float32)
    text, none = np.empty(0, "<U1"), np.empty((steps + 1, 0), np.bool_)
    return Episode(
        actions=actions, states=rng.normal(size=(steps + 1, 5)), proprio=proprio, predicates=none, predicate_names=text,
        objects=np.empty((steps + 1, 0, 7), np.float32), object_names=text, held=none, fixture_names=text,
        fixture_poses=np.empty((0, 7)), request_step=np.array([0], np.int32), request_seconds=np.array([[0.1]]),
        request_stages=np.array(["total"]), request_batch=np.array([1], np.int32),
    )  # fmt: skip


def view(step: int, camera: int, size: int) -> Image:
    """A picture that says where its upper left corner is, which step and which camera it shows."""
    picture = np.zeros((size, size, 3), np.uint8)
    picture[: size // 2, : size // 2] = 200
    picture[size // 2 :] = 20 + 8 * (step % 16) + 4 * camera
    return picture


@contextmanager
def studio(run: RunFolder, task: str, size: int) -> Iterator[Draw]:
    """Stands where the simulator would: one view a recorded state."""

    def draw(episode: Episode) -> Iterator[Mapping[str, Image]]:
        for step in range(len(episode.states)):
            yield {name: view(step, number, size) for number, name in enumerate(CAMERAS)}

    yield draw


@pytest.fixture(scope="session")
def make_run() -> MakeRun:
    """A function that writes a run folder: make_run(folder, played=…, run_id=…, control_hz=…)."""

    def make(
        out: Path, played: Sequence[Played] = PLAYED, run_id: str = "20260101T000000Z-pick@v1-oracle-0001", control_hz: float | None = 20.0
    ) -> RunFolder:
        tasks = {
            f"pick@v1/{index}": {"env": "none", "instruction": text, "max_steps": 99, "trials": None, "env_kwargs": {}, "starts": None}
            | ({} if control_hz is None else {"control_hz": control_hz})
            for index, text in enumerate(INSTRUCTIONS)
        }
        manifest = RunManifest(
            schema=1, run_id=run_id, created="2026-01-01T00:00:00+00:00", command=(), suite="pick@v1", policy="oracle", privileged=True,
            bundle=None, backend="none", engines={}, trials=2, seed=7, batch=1, replan=4,
            ledger=[(f"pick@v1/{task}", trial) for task, trial, _, _ in played], protocol={"tasks": tasks}, options={}, versions={},
            revision={}, hardware={},
        )  # fmt: skip
        run = create(out, manifest)
        for number, (task, trial, outcome, steps) in enumerate(played):
            run.write_episode(f"pick@v1/{task}", trial, arm(steps, number + 1000 * len(run_id)))
            run.append(
                EpisodeRecord(f"pick@v1/{task}", trial, 7, outcome, steps, 1, 1, 1.0, 0.1, error="lost" if outcome == "error" else None)
            )
        return run

    return make


@pytest.fixture(autouse=True, scope="session")
def videos_decoded_once() -> Iterator[None]:
    """The same video, to the last byte, is decoded once: most copies of the dataset are spoilt elsewhere."""
    found = dict[bytes, Decoded]()

    def once(path: Path) -> Decoded:
        key = path.read_bytes()
        if key not in found:
            found[key] = decode(path)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (lerobot_check, lerobot_v3):
            patch.setattr(module, "decode", once)
        yield


@pytest.fixture(scope="session")
def draw_views() -> object:
    """The studio."""
    return studio


@pytest.fixture(scope="session")
def _sound(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun) -> tuple[Path, Written]:
    folder = tmp_path_factory.mktemp("sound")
    return folder / "data", write([make_run(folder)], folder / "data", size=32, studio=studio)


@pytest.fixture
def dataset(_sound: tuple[Path, Written], tmp_path: Path) -> Path:
    """A dataset of three episodes (31, 20, 23 rows), two tasks and two cameras, without a fault; yours to spoil."""
    return Path(shutil.copytree(_sound[0], tmp_path / "dataset"))
