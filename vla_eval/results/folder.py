"""The run folder: the only place that knows its file names and array schema.

T steps, C chunks, N state, P predicates, K objects, F fixtures, S stages.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..arrays import read_npz, write_npz
from ..types import BadRequest, EpisodeRecord, RunManifest, Vector

T = TypeVar("T")
SCHEMA = 1
MANIFEST, RECORDS, EPISODES, LOCK = "manifest.json", "episodes.jsonl", "episodes", ".lock"
EPISODE_LIMIT_BYTES = 1 << 30  # a 10,000-step episode stays below 100 MB

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Episode:
    """The arrays of one episode, settling excluded: row t of `states` is the state before action t, the last one the end."""

    actions: Vector  # [T, 7] float32, as executed
    states: Vector  # [T+1, N] float64: time, positions, velocities; N = 0 without a simulator
    proprio: Vector  # [T+1, 8] float32: position 3 m, axis-angle 3 rad, fingers 2 m
    predicates: Vector  # [T+1, P] bool
    predicate_names: Vector  # [P] text
    objects: Vector  # [T+1, K, 7] float32: xyz m, quaternion x y z w
    object_names: Vector  # [K] text
    held: Vector  # [T+1, K] bool
    fixture_names: Vector  # [F] text: every model body that reset moved
    fixture_poses: Vector  # [F, 7] float64: xyz m, quaternion w x y z as MuJoCo stores it
    request_step: Vector  # [C] int32: before which action the policy was asked
    request_seconds: Vector  # [C, S] float64
    request_stages: Vector  # [S] text: "pack", "visual", …, "total" (the policy's whole answer)
    request_batch: Vector  # [C] int32: rows answered together

    @property
    def fixtures(self) -> dict[str, Vector]:
        """The bodies that reset moved, for `restore`."""
        return {str(name): pose for name, pose in zip(self.fixture_names, self.fixture_poses, strict=True)}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run on disk."""

    path: Path
    manifest: RunManifest

    @property
    def episodes(self) -> Path:
        return self.path / EPISODES

    def records(self) -> list[EpisodeRecord]:
        """The last record of each (task, trial), in finishing order: a replayed error is followed by what replaced it.

        A torn last line (a killed writer's) is left out and said. Raises BadRequest for any other line that is no record.
        """
        found: dict[tuple[str, int], EpisodeRecord] = {}
        for record in _lines(self.path / RECORDS):
            found.pop((record.task, record.trial), None)
            found[record.task, record.trial] = record
        return list(found.values())

    @property
    def complete(self) -> bool:
        """Whether every episode of the ledger has been played and none ended in an error."""
        done = {(r.task, r.trial) for r in self.records() if r.outcome != "error"}
        return all((task, trial) in done for task, trial in self.manifest.ledger)

    def append(self, record: EpisodeRecord) -> None:
        """Add one line, flushed and on the disk when this returns."""
        with (self.path / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def episode_path(self, task: str, trial: int, suffix: str = ".npz") -> Path:
        """Where an episode's arrays (or its video) lie."""
        return self.episodes / f"{task.rpartition('/')[2]}-{trial}{suffix}"

    def write_episode(self, task: str, trial: int, episode: Episode) -> Path:
        """Store the arrays of an episode."""
        return write_episode(self.episode_path(task, trial), episode)

    def episode(self, task: str, trial: int) -> Episode:
        """The arrays of an episode. Raises BadRequest if they are missing or damaged."""
        return read_episode(self.episode_path(task, trial))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for writing. Raises BadRequest if another process does."""
        with (self.path / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise BadRequest(f"{self.path}: another process is writing this run; wait for it or choose another folder") from error
            yield

    def repair(self) -> str | None:
        """Cut a torn last line off `episodes.jsonl`; says what was cut, or None. Only under `locked`."""
        path = self.path / RECORDS
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole == data:
            return None
        with path.open("r+b") as file:
            file.truncate(len(whole))
            os.fsync(file.fileno())
        return f"{path}: the last line was torn after {len(data) - len(whole)} bytes and has been cut off; its episode will be played again"


def create(out: Path, manifest: RunManifest) -> RunFolder:
    """A new run folder `out/<run id>`, manifest written. Raises BadRequest if it cannot be written or exists."""
    path = out / manifest.run_id
    try:
        (path / EPISODES).mkdir(parents=True, exist_ok=False)
        write_json(path / MANIFEST, asdict(manifest))
        (path / RECORDS).touch()
    except OSError as error:
        raise BadRequest(f"{path}: cannot make the run folder ({error.strerror}); choose another with --out") from error
    return RunFolder(path, manifest)


def open_run(path: str | os.PathLike[str]) -> RunFolder:
    """An existing run folder. Raises BadRequest for a folder that is none, or that a newer vla-eval wrote."""
    path = Path(path)
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"{path}: no run folder ({MANIFEST}: {error.strerror})") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{path / MANIFEST}: no JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise BadRequest(f"{path / MANIFEST}: no manifest of a run (no 'schema')")
    if data["schema"] > SCHEMA:
        raise BadRequest(f"{path}: schema {data['schema']} is newer than {SCHEMA}, which this vla-eval reads; upgrade vla-eval-trt")
    return RunFolder(path, _built(RunManifest, data | {"ledger": [(t, n) for t, n in data.get("ledger", [])]}, path / MANIFEST))


def write_episode(path: Path, episode: Episode) -> Path:
    """Store an episode's arrays at `path`, in one piece or not at all."""
    write_npz(path, {field.name: getattr(episode, field.name) for field in fields(Episode)})
    return path


def read_episode(path: Path) -> Episode:
    """An episode's arrays. Raises BadRequest if the file is missing, damaged or lacks an array."""
    arrays = read_npz(path, EPISODE_LIMIT_BYTES)
    return _built(Episode, arrays, path)


def write_json(path: Path, data: Any) -> None:
    """JSON under a temporary name, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def untimed(record: EpisodeRecord) -> EpisodeRecord:
    """The record without its times: what must be equal however the run was played."""
    return replace(record, seconds=0.0, policy_seconds=0.0, timing={})


def stack(rows: list[Mapping[str, Vector]], names: list[str], width: int) -> Vector:
    """[len(rows), len(names), width] float32 from one mapping a row."""
    return np.array([[row[name] for name in names] for row in rows], np.float32).reshape(len(rows), len(names), width)


def _lines(path: Path) -> Iterator[EpisodeRecord]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            _log.warning("%s: line %d is torn and left out", path, number)
            return
        try:
            data = json.loads(line)
        except ValueError as error:
            raise BadRequest(f"{path}: line {number} is no JSON ({error})") from error
        yield _built(EpisodeRecord, data, f"{path}: line {number}")


def _built(kind: type[T], data: Any, where: object) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(data, dict):
        raise BadRequest(f"{where}: no {kind.__name__}")
    if extra := sorted(set(data) - known):
        raise BadRequest(f"{where}: unknown field {extra[0]!r}; was it written by a newer vla-eval?")
    try:
        return kind(**data)
    except TypeError as error:
        raise BadRequest(f"{where}: {str(error).partition('__init__() ')[2]}") from error
