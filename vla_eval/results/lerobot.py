"""A run's episodes as a LeRobot v2.1 dataset, laid out as GR00T N1.7 reads it. T steps, S state and A action dimensions, H W pixels."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import __version__
from ..types import BadRequest, EpisodeRecord, Image, Progress, Vector, silent
from .folder import Episode, RunFolder, write_json
from .lerobot_convention import (
    ACTION_GROUPS,
    ACTION_NAMES,
    ACTION_WIDTH,
    OURS,
    STATE_NAMES,
    STATE_WIDTH,
    Convention,
    known_convention,
    told_convention,
)
from .lerobot_meta import ACTION, COLUMNS, EPISODES, INFO, MODALITY, STATE, TASKS, Dataset, Record, open_dataset
from .lerobot_rows import not_there
from .lerobot_stats import write_stats
from .lerobot_v3 import export
from .lerobot_video import CODEC, PIXELS, write_videos

CHUNK = 1000  # episodes a folder
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
ANNOTATION = "human.action.task_description"

Draw = Callable[[Episode], Iterator[Mapping[str, Image]]]  # the T+1 upright views of an episode, camera -> [H, W, 3]
Studio = Callable[[RunFolder, str, int], AbstractContextManager[Draw]]  # for all episodes of one task, in that size


@dataclass(frozen=True, slots=True)
class Written:
    """What a call of `write` has done."""

    path: Path
    episodes: int  # added
    frames: int  # added
    total_episodes: int
    total_frames: int
    left_out: Mapping[str, int]  # why -> how many episodes


def write(
    runs: Sequence[RunFolder],
    out: Path,
    *,
    convention: str = "libero_sim",
    only: Literal["all", "successes", "failures"] = "all",
    size: int = 256,
    studio: Studio | None = None,
    fps: float | None = None,
    robot: str = "panda",
    append: bool = False,
    version: Literal["v2.1", "v3.0"] = "v2.1",
    progress: Progress = silent,
) -> Written:
    """The episodes of these runs as a dataset in `out`, or added to the one that is there. GR00T N1.7 reads v2.1, current LeRobot v3.0.

    Episodes that broke (outcome "error") are left out. `studio` draws the pictures; None writes none. `fps` must be the control rate and is
    needed only for runs that do not say it. Everything is made beside `out` and renamed: a write that is killed leaves nothing, or the old
    dataset. Raises BadRequest, before anything is written where it can, for what does not fit together.
    """
    meaning = known_convention(convention)
    chosen, left_out = _chosen(runs, only)
    rate = _rate(chosen, fps)
    if not chosen:
        raise BadRequest(f"{', '.join(str(run.path) for run in runs)}: no episode to write ({_told(left_out) or 'nothing was played'})")
    if studio is not None and (size < 2 or size % 2):
        raise BadRequest(f"--size {size}: pictures are stored as {CODEC}, which needs an even size")
    if append and version != "v2.1":
        raise BadRequest(f"{out}: episodes can be added to a v2.1 dataset only; write the v3.0 one anew from all its runs")
    with _beside(out, append=append) as (new, old):
        book = _Book(new if version == "v2.1" else new / "v2.1", meaning, rate, robot, with_video=studio is not None)
        if old is not None:
            book.take_over(old, [run for run, _ in chosen])
        for number, (run, record, draw) in enumerate(_drawn(chosen, studio, size)):
            progress("episodes", number, len(chosen))
            book.add(run, record, draw)
        book.close()
        dataset = open_dataset(book.root)
        stats = write_stats(dataset, progress)
        if version == "v3.0":
            export(dataset, stats, new)
            shutil.rmtree(book.root)
        return Written(out, len(chosen), book.frames - book.frames_before, len(book.episodes), book.frames, left_out)


class _Book:
    """A dataset while it is being written."""

    def __init__(self, root: Path, convention: Convention, fps: float, robot: str, *, with_video: bool) -> None:
        self.root, self._convention, self._fps, self._robot, self._with_video = root, convention, fps, robot, with_video
        self.episodes: list[dict[str, Any]] = []
        self.frames = self.frames_before = 0
        self._tasks: dict[str, int] = {}  # instruction -> index
        self._runs: dict[str, dict[str, Any]] = {}
        self._widths: tuple[int, int] | None = None
        self._videos: dict[str, tuple[int, int]] | None = None if with_video else {}  # feature -> height, width

    def take_over(self, old: Dataset, runs: Sequence[RunFolder]) -> None:
        """Begin with the episodes of a dataset that was written before. Raises BadRequest if the new ones would not fit to them."""
        where = old.root
        said = told_convention(old.info)
        if said is not self._convention:
            found = f"convention {said.name!r}" if said else "no convention of ours"
            raise BadRequest(f"{where} has {found}, the new episodes {self._convention.name!r}; write them into a dataset of their own")
        if old.fps != self._fps:
            raise BadRequest(
                f"{where} has {old.fps:g} frames a second, the new episodes {self._fps:g}; write them into a dataset of their own"
            )
        if bool(old.videos) != self._with_video:
            told = "videos" if old.videos else "no videos"
            raise BadRequest(f"{where} has {told}; {'leave out' if old.videos else 'give'} --no-video")
        self._widths = (old.features[STATE].width, old.features[ACTION].width)
        self._videos = {name: (old.features[name].shape[0], old.features[name].shape[1]) for name in old.videos}
        self._tasks = {task: index for index, task in old.tasks.items()}
        told = old.info[OURS].get("runs")
        if not isinstance(told, list) or not all(isinstance(run, dict) and isinstance(run.get("run"), str) for run in told):
            raise BadRequest(f"{where}/{INFO}: {OURS}.runs does not say which runs it holds; write all runs into a dataset of their own")
        self._runs = {run["run"]: run for run in told}
        if again := sorted({run.manifest.run_id for run in runs} & self._runs.keys()):
            raise BadRequest(f"{where} holds run {again[0]} already; nothing was added")
        for record in old.episodes:
            place = {"episode_chunk": record.index // CHUNK, "episode_index": record.index}
            _share(_whole(old, record), self.root / DATA_PATH.format(**place))
            for name in old.videos:
                _share(old.root / old.video(record.index, name), self.root / VIDEO_PATH.format(video_key=name, **place))
            self.episodes.append(dict(record.extra))
            self.frames += record.length
        self.frames_before = self.frames

    def add(self, run: RunFolder, record: EpisodeRecord, draw: Draw | None) -> None:
        """One more episode: its rows, its videos, its line."""
        episode, index = run.episode(record.task, record.trial), len(self.episodes)
        steps = len(episode.actions)
        self._check_widths(run, record, episode)
        instruction = _instruction(run, record.task)
        task_index = self._tasks.setdefault(instruction, max(self._tasks.values(), default=-1) + 1)
        if draw is not None:
            self._film(index, draw(episode), steps, f"{run.path}: episode {record.task} trial {record.trial}")
        counted = np.arange(steps, dtype=np.int64)
        _write_rows(
            self.root / DATA_PATH.format(episode_chunk=index // CHUNK, episode_index=index),
            {
                STATE: episode.proprio[:steps],
                ACTION: self._convention.stored(episode.actions),
                "timestamp": (counted / self._fps).astype(np.float32),  # divided in double precision: a running sum drifts
                "frame_index": counted,
                "episode_index": np.full(steps, index, np.int64),
                "index": self.frames + counted,
                "task_index": np.full(steps, task_index, np.int64),
            },
        )
        manifest = run.manifest
        self._runs.setdefault(
            manifest.run_id, {"run": manifest.run_id, "suite": manifest.suite, "policy": manifest.policy, "bundle": manifest.bundle}
        )
        source = {"run": manifest.run_id, "task": record.task, "trial": record.trial, "seed": record.seed, "outcome": record.outcome}
        self.episodes.append({"episode_index": index, "tasks": [instruction], "length": steps, "source": source})
        self.frames += steps

    def close(self) -> None:
        """Write the metadata, statistics aside."""
        assert self._widths is not None
        state, action = self._widths
        is_arm = self._widths == (STATE_WIDTH, ACTION_WIDTH)
        fps = int(self._fps) if self._fps.is_integer() else self._fps
        count, videos = len(self.episodes), self._videos or {}
        features: dict[str, Any] = {
            STATE: {"dtype": "float32", "shape": [state], "names": STATE_NAMES if is_arm else None},
            ACTION: {"dtype": "float32", "shape": [action], "names": ACTION_NAMES if is_arm else None},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **{name: {"dtype": "int64", "shape": [1], "names": None} for name in COLUMNS[3:]},
            **{name: _video_feature(height, width, fps) for name, (height, width) in videos.items()},
        }
        meta = self.root / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        write_json(
            self.root / INFO,
            {
                "codebase_version": "v2.1",
                "robot_type": self._robot,
                "total_episodes": count,
                "total_frames": self.frames,
                "total_tasks": len(self._tasks),
                "total_videos": count * len(videos),
                "total_chunks": -(-count // CHUNK),
                "chunks_size": CHUNK,
                "fps": fps,
                "splits": {"train": f"0:{count}"},
                "data_path": DATA_PATH,
                **({"video_path": VIDEO_PATH} if videos else {}),
                "features": features,
                OURS: {"version": __version__, **self._convention.told(), "runs": list(self._runs.values())},
            },
        )
        _write_lines(self.root / TASKS, ({"task_index": index, "task": task} for task, index in self._tasks.items()))
        _write_lines(self.root / EPISODES, self.episodes)
        groups = self._convention.state if is_arm else {"state": (0, state)}
        moves = ACTION_GROUPS if is_arm else {"action": (0, action)}
        write_json(
            self.root / MODALITY,
            {
                "state": {name: {"start": start, "end": end} for name, (start, end) in groups.items()},
                "action": {name: {"start": start, "end": end} for name, (start, end) in moves.items()},
                **({"video": {name.removeprefix("observation.images."): {"original_key": name} for name in videos}} if videos else {}),
                "annotation": {ANNOTATION: {"original_key": "task_index"}},
            },
        )

    def _check_widths(self, run: RunFolder, record: EpisodeRecord, episode: Episode) -> None:
        widths = (episode.proprio.shape[1], episode.actions.shape[1])
        where = f"{run.path}: episode {record.task} trial {record.trial} has {widths[0]} state and {widths[1]} action numbers"
        if self._convention.name == "libero_sim" and widths != (STATE_WIDTH, ACTION_WIDTH):
            raise BadRequest(f"{where}; convention 'libero_sim' has 8 and 7: write it with --convention env")
        if self._widths is not None and widths != self._widths:
            raise BadRequest(f"{where}; the dataset has {self._widths[0]} and {self._widths[1]}: write it into a dataset of its own")
        self._widths = widths

    def _film(self, index: int, pictures: Iterator[Mapping[str, Image]], steps: int, where: str) -> None:
        first = next(pictures, None)
        assert first is not None, "a drawn episode has at least one state"
        names = {camera: f"observation.images.{self._convention.cameras.get(camera, camera)}" for camera in first}
        sizes = {names[camera]: (picture.shape[0], picture.shape[1]) for camera, picture in first.items()}
        if self._videos is not None and sizes != self._videos:
            raise BadRequest(f"{where} is drawn as {sizes}, the dataset has {self._videos}; choose the same --size, or another dataset")
        self._videos = sizes
        paths = {
            camera: self.root / VIDEO_PATH.format(episode_chunk=index // CHUNK, video_key=name, episode_index=index)
            for camera, name in names.items()
        }
        from ..images import mirror  # OpenCV: only where pictures are

        turn = mirror if self._convention.mirrored else (lambda picture: picture)
        shown = islice(chain([first], pictures), steps)  # the picture after the last action belongs to no row
        drawn = write_videos(paths, ({camera: turn(picture) for camera, picture in views.items()} for views in shown), self._fps)
        if drawn != steps:
            raise BadRequest(f"{where} has {steps} actions, but only {drawn} pictures could be drawn")


def _chosen(runs: Sequence[RunFolder], only: str) -> tuple[list[tuple[RunFolder, EpisodeRecord]], dict[str, int]]:
    """The episodes to write, run by run and by (task, trial), so that neither workers nor resuming change the dataset."""
    if only not in ("all", "successes", "failures"):
        raise BadRequest(f"--only {only!r}: there are all, successes, failures")
    ids = [run.manifest.run_id for run in runs]
    if again := sorted({name for name in ids if ids.count(name) > 1}):
        raise BadRequest(f"run {again[0]} is named twice")
    chosen, left_out = [], {"error": 0, "not chosen": 0}
    for run in runs:
        for record in sorted(run.records(), key=lambda record: (int(record.task.rpartition("/")[2]), record.trial)):
            if record.outcome == "error" or record.steps == 0:
                left_out["error"] += 1
            elif only != "all" and record.outcome != {"successes": "success", "failures": "failure"}[only]:
                left_out["not chosen"] += 1
            else:
                chosen.append((run, record))
    return chosen, {why: count for why, count in left_out.items() if count}


def _told(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in left_out.items())


def _task_protocol(run: RunFolder, task: str) -> Mapping[str, Any]:
    found = run.manifest.protocol.get("tasks", {}).get(task)
    if not isinstance(found, dict):
        raise BadRequest(f"{run.path}: manifest.json says nothing about task {task!r} (protocol.tasks)")
    return found


def _instruction(run: RunFolder, task: str) -> str:
    text = _task_protocol(run, task).get("instruction")
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(f"{run.path}: manifest.json gives no instruction for task {task!r}")
    return text


def _rate(chosen: Iterable[tuple[RunFolder, EpisodeRecord]], fps: float | None) -> float:
    """The control rate, which is the dataset's frame rate: a row an action."""
    said: dict[float, str] = {}
    for run, record in chosen:
        rate = _task_protocol(run, record.task).get("control_hz")
        if rate is not None:
            said.setdefault(float(rate), f"{run.path} ({record.task})")
        elif fps is None:
            raise BadRequest(
                f"{run.path}: manifest.json does not say how many actions a second task {record.task!r} takes; say it with --fps"
            )
    if fps is not None:
        said.setdefault(float(fps), "--fps")
    if len(said) > 1:
        told = " and ".join(f"{rate:g} ({where})" for rate, where in said.items())
        raise BadRequest(f"one dataset has one rate, but here are {told}; frames are stored at the control rate, one an action")
    rate = next(iter(said), 0.0)
    if said and not 0 < rate < 10_000:
        raise BadRequest(f"--fps {rate:g} is no rate")
    return rate


def _drawn(
    chosen: Iterable[tuple[RunFolder, EpisodeRecord]], studio: Studio | None, size: int
) -> Iterator[tuple[RunFolder, EpisodeRecord, Draw | None]]:
    """Each episode with what draws it; one environment serves all neighbours of one task."""
    for (_, task), group in groupby(chosen, key=lambda item: (item[0].path, item[1].task)):
        episodes = list(group)
        with ExitStack() as stack:
            draw = stack.enter_context(studio(episodes[0][0], task, size)) if studio is not None else None
            for run, record in episodes:
                yield run, record, draw


def _video_feature(height: int, width: int, fps: float) -> dict[str, Any]:
    return {
        "dtype": "video",
        "shape": [height, width, 3],
        "names": ["height", "width", "channels"],
        "info": {
            "video.height": height,
            "video.width": width,
            "video.codec": CODEC,
            "video.pix_fmt": PIXELS,
            "video.is_depth_map": False,
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": False,
        },
    }


def _write_rows(path: Path, columns: Mapping[str, Vector]) -> None:
    """One episode's parquet file; vectors become arrays of fixed length, never lists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: pa.array(values) if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays), path)


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _whole(old: Dataset, record: Record) -> Path:
    """The file with an episode's rows. Raises BadRequest unless it has as many as its line says: indices go on from there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = old.root / old.data(record.index)
    hint = f"`vla-eval dataset check {old.root}` lists what is wrong with it"
    if fault := not_there(path):
        raise BadRequest(f"{path}: {fault}; {hint}")
    try:
        count = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise BadRequest(f"{path}: no parquet file that can be read; {hint}") from error
    if count != record.length:
        raise BadRequest(f"{path} has {count} rows, {EPISODES} says {record.length}; {hint}")
    return path


def _share(source: Path, target: Path) -> None:
    """The same file under another name; nobody changes it in place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


@contextmanager
def _beside(out: Path, *, append: bool) -> Iterator[tuple[Path, Dataset | None]]:
    """A folder to make the dataset in, which takes the place of `out` when the block ends well and vanishes when it does not.

    What an earlier, killed write left there is cleared away. Raises BadRequest if `out` is taken, or is being written by someone else.
    """
    if (exists := out.exists()) and not append and (not out.is_dir() or any(out.iterdir())):
        raise BadRequest(f"{out} exists; add to it with --append, or choose another --out")
    if append and not exists:
        raise BadRequest(f"{out} does not exist, so nothing can be added to it; leave out --append")
    old = open_dataset(out) if append else None
    place = out.resolve()  # a link is not replaced, but what it names
    if Path.cwd().is_relative_to(place):
        raise BadRequest(f"{out} is or holds the folder you are in, which would be replaced; go out of it, or choose another --out")
    new = place.with_name(f".{place.name}.partial")
    try:
        new.mkdir(parents=True, exist_ok=True)
        with _held(new, out):
            _clear(new)
            try:
                yield new, old
                if old is None:
                    new.rename(place)
                else:
                    _exchange(new, place)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        told = ": ".join(str(part) for part in (error.filename, error.strerror) if part) or str(error)
        raise BadRequest(f"{out}: the dataset cannot be written ({told}); nothing was changed") from error


@contextmanager
def _held(folder: Path, out: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadRequest(f"{out}: another process is writing this dataset; wait for it or choose another --out") from error
        if not folder.exists() or os.fstat(handle).st_ino != folder.stat().st_ino:
            raise BadRequest(f"{out}: another process has just written this dataset; try again")
        yield
    finally:
        os.close(handle)


def _clear(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def _exchange(new: Path, out: Path) -> None:
    """Swap two folders in one step, so that there is no moment without a dataset; where the disk cannot, in two."""
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and renameat2(here, os.fsencode(new), here, os.fsencode(out), swap) == 0:
        return
    aside = out.with_name(f".{out.name}.old")
    out.rename(aside)
    try:
        new.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside)
