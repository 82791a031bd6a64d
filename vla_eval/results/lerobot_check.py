"""Check a LeRobot dataset rule by rule, before hours of training are spent on it: metadata, every row, every frame, statistics, policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import BadRequest, Progress, silent
from .lerobot_meta import ACTION, EPISODES, INFO, MODALITY, STATE, STATS, TASKS, Dataset, Record, metadata, read_object
from .lerobot_policy import PolicyNeeds, against
from .lerobot_rows import Rows, is_pointer, not_there, read_rows
from .lerobot_rules import Finding, Steps
from .lerobot_stats import FIELDS, Summary, disagreements, read_stats
from .lerobot_video import decode

HORIZON = 16  # actions in a chunk of GR00T N1.7
RELATIVE_LIMIT = 64  # horizons nobody exceeds: a guard for nested lists


def check(
    root: Path, *, needs: PolicyNeeds | None = None, horizon: int = HORIZON, videos: bool = True, progress: Progress = silent
) -> Iterator[Finding]:
    """Everything that is wrong with the dataset in a folder. Memory does not grow with the number of rows.

    Raises BadRequest only if there is no such folder: whatever else is wrong is a finding.
    """
    if not root.is_dir():
        raise BadRequest(f"{root}: no such folder; a LeRobot dataset is a folder with meta/, data/ and videos/")
    dataset = yield from metadata(root)
    if dataset is None:
        return
    said = yield from read_stats(dataset)
    yield from _relative(dataset)
    yield from _short(dataset, needs.horizon if needs and needs.horizon else horizon)
    summaries = yield from _rows(dataset, progress)
    for name, summary in summaries.items():
        yield from disagreements(name, said.get(name, {}), summary)
        if name in (STATE, ACTION):
            yield from _constant(name, summary)
    yield from _unlisted(dataset)
    if videos:
        yield from _videos(dataset, progress)
    if needs is not None:
        yield from against(dataset, needs, said)


def _short(dataset: Dataset, horizon: int) -> Steps[None]:
    for record in dataset.episodes:
        if record.length < horizon:
            text = f"episode {record.index} has {record.length} rows, fewer than the {horizon} actions of a chunk; training skips it"
            yield Finding("episode-short", EPISODES, text, record.line)


def _rows(dataset: Dataset, progress: Progress) -> Steps[dict[str, Summary]]:
    """Reads every row twice (once for everything, once for the quantiles); returns the columns whose every cell is sound."""
    summaries = {name: Summary(feature.width) for name, feature in dataset.columns.items() if feature.is_float}
    total, start = 2 * len(dataset.episodes), 0
    for number, record in enumerate(dataset.episodes):
        progress("rows", number, total)
        rows = yield from read_rows(dataset, record.index)
        for name in [name for name in summaries if rows is None or name not in rows]:
            del summaries[name]  # no statistics from half the rows
        if rows is None:
            start += record.length
            continue
        count = len(next(iter(rows.values()), ()))
        yield from _episode(dataset, record, rows, start)
        for name, summary in summaries.items():
            summary.add(rows[name])
        start += count
    for number, record in enumerate(dataset.episodes, len(dataset.episodes)):
        progress("rows", number, total)
        again: Rows | None = yield from read_rows(dataset, record.index, frozenset(summaries)) if summaries else _nothing()
        for name, summary in summaries.items():
            assert again is not None, "a file changed while it was being checked"
            summary.refine(again[name])
    return {name: summary for name, summary in summaries.items() if summary.count}


def _nothing() -> Steps[Rows | None]:
    yield from ()
    return {}


def _episode(dataset: Dataset, record: Record, rows: Rows, start: int) -> Steps[None]:
    """The index columns of one episode against its record. `start`: rows in the episodes before."""
    file = dataset.data(record.index)
    count = len(next(iter(rows.values()), ()))
    if rows and count != record.length:
        text = f"episode {record.index} has {count} rows, but its line says length {record.length}; the loader uses the smaller"
        yield Finding("episode-length", file, text)
    counted = np.arange(count)
    for rule, name, wanted in (
        ("frame-index", "frame_index", counted),
        ("episode-index", "episode_index", np.full(count, record.index)),
        ("global-index", "index", start + counted),
    ):
        if name in rows and (row := _first(rows[name] != wanted)) is not None:
            yield Finding(rule, file, f"{name} is {rows[name][row]}; it should be {wanted[row]}", row)
    if "timestamp" in rows:
        wanted = counted / dataset.fps
        slack = np.maximum(4e-5, np.spacing(np.abs(wanted).astype(np.float32)))  # float32 holds 1000 s to 3e-5
        if (row := _first(np.abs(rows["timestamp"] - wanted) > slack)) is not None:
            yield Finding(
                "timestamps", file, f"timestamp is {rows['timestamp'][row]:.6f}; row {row} at {dataset.fps:g} fps is {wanted[row]:.6f}", row
            )
    for name in dict.fromkeys(("task_index", *dataset.annotations.values())) if dataset.tasks_known else ():
        if name in rows and rows[name].ndim == 1 and (row := _first(~np.isin(rows[name], list(dataset.tasks)))) is not None:
            yield Finding("task-index", file, f"{name} is {rows[name][row]}, which {TASKS} does not have", row)
    if "task_index" in rows and record.tasks:
        told = {dataset.tasks.get(int(index)) for index in np.unique(rows["task_index"])}
        if strange := sorted(task for task in told if task is not None and task not in record.tasks):
            yield Finding(
                "episode-tasks",
                EPISODES,
                f"the rows of episode {record.index} say {strange[0]!r}, its line says {record.tasks[0]!r}",
                record.line,
            )


def _constant(name: str, summary: Summary) -> Steps[None]:
    still = summary.low == summary.high
    for d in np.flatnonzero(still):
        yield Finding("constant-dimension", STATS, f"{name}[{d}] is {summary.low[d]:g} in every row")


def _unlisted(dataset: Dataset) -> Steps[None]:
    """Files that the reference's statistics count (every parquet two folders down) but no episode names."""
    listed = {dataset.data(record.index) for record in dataset.episodes}
    for path in sorted(dataset.root.glob("data/*/*.parquet")):
        file = path.relative_to(dataset.root).as_posix()
        if file not in listed:
            yield Finding("data-unlisted", file, f"is no episode of {EPISODES}; remove it or give it a line")


def _relative(dataset: Dataset) -> Steps[None]:
    """meta/relative_stats*.json, if there: action group -> field -> [horizon][dimension]."""
    for path in sorted(dataset.root.glob("meta/relative_stats*.json")):
        file = path.relative_to(dataset.root).as_posix()
        data = yield from read_object(dataset.root, file)
        for name, entry in (data or {}).items():
            if name.startswith("__"):
                continue
            group = dataset.groups.get("action", {}).get(name)
            if group is None:
                yield Finding("relative-stats", file, f"{name!r} is no action group of {MODALITY}")
                continue
            shapes = {field: _shape(entry.get(field) if isinstance(entry, dict) else None) for field in FIELDS}
            wanted = (next((shape[0] for shape in shapes.values() if shape), 0), group.end - group.start)
            for field, shape in shapes.items():
                if shape != wanted:
                    told = "missing or not numbers" if shape is None else f"{list(shape)}"
                    yield Finding(
                        "relative-stats", file, f"{name}.{field} is {told}; it wants {list(wanted)} finite numbers [horizon][dimension]"
                    )
                    break


def _shape(values: object) -> tuple[int, ...] | None:
    if not isinstance(values, list) or not values:
        return None
    try:
        numbers = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers.shape if np.isfinite(numbers).all() else None


def _videos(dataset: Dataset, progress: Progress) -> Steps[None]:
    """Decodes every frame of every video."""
    total, done = len(dataset.episodes) * len(dataset.videos), 0
    for record in dataset.episodes:
        for feature in dataset.videos:
            progress("videos", done, total)
            done += 1
            yield from _video(dataset, record, feature)


def _video(dataset: Dataset, record: Record, feature: str) -> Steps[None]:
    file = dataset.video(record.index, feature)
    if fault := not_there(dataset.root / file):
        yield Finding("video-missing", file, fault)
        return
    if not (dataset.root / file).is_file():
        yield Finding("video-unreadable", file, "is no file")
        return
    if is_pointer(dataset, file):
        yield Finding("video-unreadable", file, "is a Git LFS pointer; fetch the data with `git lfs pull`")
        return
    try:
        found = decode(dataset.root / file)
    except ValueError as error:
        yield Finding("video-unreadable", file, f"cannot be decoded ({error})")
        return
    if found.frames != record.length:
        yield Finding("video-frames", file, f"has {found.frames} frames; episode {record.index} has {record.length} rows")
    height, width = _picture_size(dataset, feature)
    if (found.height, found.width) != (height, width):
        yield Finding("video-size", file, f"is {found.width}x{found.height}; {INFO} says {width}x{height}")
    if found.fps is not None and abs(found.fps - dataset.fps) > 0.01 * dataset.fps:
        yield Finding("video-rate", file, f"runs at {found.fps:.4g} frames a second; {INFO} says fps {dataset.fps:g}")


def _picture_size(dataset: Dataset, feature: str) -> tuple[int, int]:
    """Height and width: the first two of the shape, unless its names say otherwise."""
    entry: Any = dataset.info["features"][feature]
    shape = dataset.features[feature].shape
    names = entry.get("names")
    if isinstance(names, list) and {"height", "width"} <= set(map(str, names)) and len(names) == len(shape):
        return shape[names.index("height")], shape[names.index("width")]
    return shape[0], shape[1]


def _first(mask: NDArray[np.bool_] | Any) -> int | None:
    return int(np.argmax(mask)) if np.any(mask) else None
