"""The run folder: the only place that knows its file names and array schema.

T steps, C chunks, N state, P predicates, K objects, F fixtures, S stages.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..arrays import read_npz, write_npz
from ..types import BadRequest, EpisodeRecord, RunManifest, Vector

T = TypeVar("T")
SCHEMA = 1
MANIFEST, RECORDS, EPISODES, LOCK = "manifest.json", "episodes.jsonl", "episodes", ".lock"
EPISODE_LIMIT_BYTES = 1 << 30  # a 10,000-step episode stays below 100 MB
TEXT_LIMIT_BYTES = 256 << 20  # of a manifest, or of all records: a million episodes stay below

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
        for record in self.written():
            found.pop((record.task, record.trial), None)
            found[record.task, record.trial] = record
        return list(found.values())

    def written(self) -> Iterator[EpisodeRecord]:
        """Every record, one a line, those that were replaced later included: the lines of a folder only ever become more."""
        return _lines(self.path / RECORDS)

    def played(self) -> list[EpisodeRecord]:
        """The records of a run that has any. Raises BadRequest for one in which no episode has been played yet."""
        if not (found := self.records()):
            raise BadRequest(f"{self.path}: no episode has been played yet; vla-eval run --resume {self.path} goes on")
        return found

    @property
    def complete(self) -> bool:
        """Whether every episode of the ledger has been played and none ended in an error."""
        done = {(r.task, r.trial) for r in self.records() if r.outcome != "error"}
        return all((task, trial) in done for task, trial in self.manifest.ledger)

    def append(self, record: EpisodeRecord) -> None:
        """Add one line, on the disk when this returns, as the episode's arrays are then.

        Raises BadRequest if it does not fit there, and then leaves nothing of it.
        """
        line = (json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        arrays = self.episode_path(record.task, record.trial)
        try:
            if arrays.exists():
                _sync(arrays)
            with (self.path / RECORDS).open("ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    written = file.write(line)
                    if written != len(line):
                        file.write(line[written:])  # says why
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise BadRequest(f"{self.path / RECORDS}: cannot be written ({error.strerror}); make room and go on with --resume") from error

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
        """Hold the folder for writing, a torn last line cut off. Raises BadRequest if another process does."""
        try:
            file = (self.path / LOCK).open("a")
        except OSError as error:
            raise BadRequest(f"{self.path}: cannot be written ({error.strerror})") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise BadRequest(f"{self.path}: another process is writing this run; wait for it or choose another folder") from error
            if cut := self.repair():  # what is appended to half a line is no line either
                _log.warning("%s", cut)
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

    def torn(self) -> int | None:
        """The number of the last line if it is half written and nobody is writing it: a killed run's. Else None."""
        try:
            *whole, rest = _text(self.path / RECORDS).split("\n")
        except FileNotFoundError:
            return None
        if not rest:
            return None
        with suppress(FileNotFoundError), (self.path / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return None
        return len(whole) + 1

    def sweep(self) -> None:
        """Remove what a killed writer left under temporary names. Only under `locked`."""
        for left in [*self.path.glob(".*.tmp"), *self.episodes.glob(".*.tmp"), *self.episodes.glob(".*.part.mp4")]:
            with suppress(OSError):
                left.unlink()


def create(out: Path, manifest: RunManifest) -> RunFolder:
    """A new run folder `out/<run id>`, manifest written. Raises BadRequest if it cannot be written or exists, and then leaves nothing."""
    path = out / manifest.run_id
    if (out / MANIFEST).exists():
        raise BadRequest(f"{out}: is a run's own folder; choose with --out the folder that holds runs, or go on with --resume {out}")
    made = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        (path / EPISODES).mkdir(parents=True, exist_ok=False)
        write_json(path / MANIFEST, asdict(manifest))
        (path / RECORDS).touch()
        _sync(path)
    except OSError as error:
        if path in made:
            shutil.rmtree(path, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise BadRequest(f"{path}: cannot make the run folder ({error.strerror}); choose another with --out") from error
    return RunFolder(path, manifest)


def amend(folder: RunFolder, manifest: RunManifest) -> RunFolder:
    """The folder with another manifest: what became known since. Raises BadRequest if it cannot be written."""
    try:
        write_json(folder.path / MANIFEST, asdict(manifest))
    except OSError as error:
        raise BadRequest(f"{folder.path / MANIFEST}: cannot be written ({error.strerror}); make room and go on with --resume") from error
    return RunFolder(folder.path, manifest)


def open_run(path: str | os.PathLike[str]) -> RunFolder:
    """An existing run folder. Raises BadRequest for a folder that is none, or that a newer vla-eval wrote."""
    path = Path(path)
    try:
        data = json.loads(_text(path / MANIFEST))
    except FileNotFoundError as error:
        raise BadRequest(f"{path}: no run folder (it has no {MANIFEST})") from error
    except ValueError as error:
        raise BadRequest(f"{path / MANIFEST}: no JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise BadRequest(f"{path / MANIFEST}: no manifest of a run (no 'schema')")
    if data["schema"] > SCHEMA:
        raise BadRequest(f"{path}: schema {data['schema']} is newer than {SCHEMA}, which this vla-eval reads; upgrade vla-eval-trt")
    manifest = _built(RunManifest, data, path / MANIFEST)
    return RunFolder(path, replace(manifest, ledger=[(task, trial) for task, trial in manifest.ledger]))


def open_result(path: str | os.PathLike[str]) -> RunFolder:
    """An existing run folder to draw conclusions from. Raises BadRequest as `open_run`, and for one that was killed in mid-line."""
    folder = open_run(path)
    if line := folder.torn():
        raise BadRequest(
            f"{folder.path / RECORDS}: line {line} is half written; vla-eval run --resume {folder.path} cuts it off and plays its episode "
            "again (to read the run without that episode, delete the line)"
        )
    return folder


def write_episode(path: Path, episode: Episode) -> Path:
    """Store an episode's arrays at `path`, in one piece or not at all. Raises OSError if they do not fit there.

    They are brought to the disk by `append`, so that a simulator need not wait for it.
    """
    arrays = {field.name: getattr(episode, field.name) for field in fields(Episode)}
    _check_layout(arrays, path)
    write_npz(path, arrays, sync=False)
    return path


def read_episode(path: Path) -> Episode:
    """An episode's arrays. Raises BadRequest if the file is missing, damaged, lacks an array or has one of another shape or type."""
    arrays = read_npz(path, EPISODE_LIMIT_BYTES)
    episode = _built(Episode, arrays, path)
    _check_layout(arrays, path)
    return episode


_LAYOUT: Mapping[str, tuple[str, str]] = {  # array -> dtype (U: text of any length), lengths
    "actions": ("f4", "T A"),
    "states": ("f8", "T+1 N"),
    "proprio": ("f4", "T+1 D"),
    "predicates": ("b1", "T+1 P"),
    "predicate_names": ("U", "P"),
    "objects": ("f4", "T+1 K 7"),
    "object_names": ("U", "K"),
    "held": ("b1", "T+1 K"),
    "fixture_names": ("U", "F"),
    "fixture_poses": ("f8", "F 7"),
    "request_step": ("i4", "C"),
    "request_seconds": ("f8", "C S"),
    "request_stages": ("U", "S"),
    "request_batch": ("i4", "C"),
}


def _check_layout(arrays: Mapping[str, Vector], path: Path) -> None:
    lengths: dict[str, int] = {"7": 7}
    for name, (dtype, shape) in _LAYOUT.items():
        array, letters = arrays[name], shape.split()
        if (array.dtype.kind if dtype == "U" else array.dtype.str[1:]) != dtype:
            raise BadRequest(f"{path}: {name!r} is {array.dtype}; {dtype} is wanted")
        if array.ndim != len(letters):
            raise BadRequest(f"{path}: {name!r} has the shape {array.shape}; [{', '.join(letters)}] is wanted")
        for letter, length in zip(letters, array.shape, strict=True):
            expected = lengths["T"] + 1 if letter == "T+1" else lengths.setdefault(letter, length)
            if length != expected:
                raise BadRequest(f"{path}: {name!r} has the shape {array.shape}; {letter} is {expected} by the arrays before it")


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


def _lines(path: Path) -> Iterator[EpisodeRecord]:
    try:
        text = _text(path)
    except FileNotFoundError:
        return
    *whole, torn = text.split("\n")  # at nothing else: a message may hold other separators
    for number, line in enumerate(whole, 1):
        try:
            data = json.loads(line)
        except ValueError as error:
            mend = f"delete that line, and vla-eval run --resume {path.parent} plays its episode again"
            raise BadRequest(f"{path}: line {number} is no JSON ({error}); {mend}") from error
        yield _built(EpisodeRecord, data, f"{path}: line {number}")
    if torn:
        _say_torn(path, len(whole) + 1)


@lru_cache(maxsize=1024)  # a command reads the records several times and says it once
def _say_torn(path: Path, line: int) -> None:
    _log.warning("%s: line %d is torn and left out; vla-eval run --resume %s plays its episode again", path, line, path.parent)


def _text(path: Path) -> str:
    """A text file's content. Raises FileNotFoundError, and BadRequest for anything else that keeps it from being read."""
    try:
        with path.open("rb") as file:
            data = file.read(TEXT_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > TEXT_LIMIT_BYTES:
        raise BadRequest(f"{path}: has more than the {TEXT_LIMIT_BYTES} bytes allowed here")
    end = len(data) if path.name == MANIFEST else data.rfind(b"\n") + 1  # a torn line may end inside a letter
    try:
        return data[:end].decode("utf-8") + data[end:].decode("utf-8", "replace")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path}: is no text ({error})") from error


def _built(kind: type[T], data: Any, where: object) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(data, dict):
        raise BadRequest(f"{where}: no {kind.__name__}")
    if extra := sorted(set(data) - known):
        raise BadRequest(f"{where}: unknown field {extra[0]!r}; was it written by a newer vla-eval?")
    try:
        built = kind(**data)
    except TypeError as error:
        raise BadRequest(f"{where}: {str(error).partition('__init__() ')[2]}") from error
    if kind is not Episode:  # its arrays have a layout of their own
        for name, hint in get_type_hints(kind).items():
            if not _fits(getattr(built, name), hint):
                raise BadRequest(f"{where}: {name!r} is {getattr(built, name)!r:.80}, which it cannot be")
    if isinstance(built, EpisodeRecord) and built.video is not None and not _inside(built.video):
        raise BadRequest(f"{where}: 'video' is {built.video!r}, which leaves the run folder")
    return built


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return value in inner
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is Mapping:
        return isinstance(value, dict) and all(isinstance(key, str) and _fits(item, inner[1]) for key, item in value.items())
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # JSON's whole numbers have no limit
    return value is None if hint is type(None) else type(value) is hint


def _inside(relative: str) -> bool:
    path = PurePosixPath(relative)
    return not path.is_absolute() and ".." not in path.parts


def _sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    entry = os.open(path, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)
