"""A dataset of ours in LeRobot v3.0's layout, which current LeRobot reads: many episodes a file. H W pixels."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..types import BadRequest
from .folder import write_json
from .lerobot_meta import INFO, STATS, Dataset
from .lerobot_stats import Statistics
from .lerobot_video import decode

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
TASKS_PATH = "meta/tasks.parquet"
DATA_FILE_MB, VIDEO_FILE_MB, FILES_A_FOLDER = 100, 200, 1000  # LeRobot's own


def export(dataset: Dataset, stats: Statistics, out: Path) -> None:
    """Write the v3.0 form of a dataset into a folder that is there and empty. Videos are joined without being encoded again.

    Statistics of pictures, which LeRobot wants beside the others, are taken from each video's key frames, every tenth picture.
    Per-episode statistics are not written: LeRobot reads without them, and its editing tools make them anew.
    """
    rows = _data(dataset, out)
    for feature in dataset.videos:
        for row, film in zip(rows, _films(dataset, feature, out), strict=True):
            row.update(film)
    count = sum(record.length for record in dataset.episodes)
    whole: dict[str, Any] = {name: {**fields, "count": [count]} for name, fields in stats.items()}
    whole |= {feature: _picture_stats(dataset, feature) for feature in dataset.videos}
    write_json(_parent(out / STATS), whole)
    write_json(out / INFO, _info(dataset))
    _write_episodes(out / EPISODES_PATH, rows)
    _write_tasks(out / TASKS_PATH, dataset)


@dataclass(slots=True)
class _Files:
    """Numbers files: the next one begins where this one would grow beyond its limit."""

    limit: int
    chunk: int = 0
    file: int = 0
    bytes: int = 0
    members: list[int] = field(default_factory=list)

    def full(self, size: int) -> bool:
        return bool(self.members) and self.bytes + size > self.limit

    def turn(self) -> None:
        self.file += 1
        if self.file == FILES_A_FOLDER:
            self.chunk, self.file = self.chunk + 1, 0
        self.bytes, self.members = 0, []


def _data(dataset: Dataset, out: Path) -> list[dict[str, Any]]:
    """Appends the rows of each episode to the current file; returns where each episode went."""
    import pyarrow.parquet as pq

    files, start = _Files(DATA_FILE_MB << 20), 0
    writer: Any = None
    rows: list[dict[str, Any]] = []
    try:
        for record in dataset.episodes:
            table = pq.read_table(dataset.root / dataset.data(record.index))
            if files.full(table.nbytes):
                writer.close()
                writer = None
                files.turn()
            if writer is None:
                writer = pq.ParquetWriter(_parent(out / DATA_PATH.format(chunk_index=files.chunk, file_index=files.file)), table.schema)
            writer.write_table(table)
            files.bytes += table.nbytes
            files.members.append(record.index)
            rows.append(
                {
                    "episode_index": record.index,
                    "tasks": list(record.tasks),
                    "length": record.length,
                    "data/chunk_index": files.chunk,
                    "data/file_index": files.file,
                    "dataset_from_index": start,
                    "dataset_to_index": start + record.length,
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                    "source": json.dumps(record.extra.get("source", {})),
                }
            )
            start += record.length
    finally:
        if writer is not None:
            writer.close()
    return rows


def _films(dataset: Dataset, feature: str, out: Path) -> Iterator[dict[str, Any]]:
    """Joins the videos of one camera; yields where each episode's lies, and from which second to which."""
    files, found = _Files(VIDEO_FILE_MB << 20), []
    groups: list[tuple[Path, list[Path]]] = []
    seconds = 0.0
    for record in dataset.episodes:
        path = dataset.root / dataset.video(record.index, feature)
        size = path.stat().st_size
        if files.full(size):
            files.turn()
        if not files.members:
            groups.append((_parent(out / VIDEO_PATH.format(video_key=feature, chunk_index=files.chunk, file_index=files.file)), []))
            frames = 0
        groups[-1][1].append(path)
        files.members.append(record.index)
        files.bytes += size
        seconds, frames = frames / dataset.fps, frames + record.length
        found.append(
            {
                f"videos/{feature}/chunk_index": files.chunk,
                f"videos/{feature}/file_index": files.file,
                f"videos/{feature}/from_timestamp": seconds,
                f"videos/{feature}/to_timestamp": frames / dataset.fps,
            }
        )
    for target, parts in groups:
        _join(target, parts)
    yield from found


def _join(target: Path, parts: Sequence[Path]) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    listed = target.with_suffix(".ffconcat")
    lines = [f"file '{str(part.resolve()).replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}'" for part in parts]
    listed.write_text("\n".join(["ffconcat version 1.0", *lines]) + "\n", encoding="utf-8")
    command = [
        get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-loglevel", "error", "-f", "concat", "-safe", "0", "-i", str(listed),
        "-map", "0:v:0", "-c", "copy", "-fflags", "+bitexact", "-movflags", "+faststart", str(target),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed.unlink()
    frames = sum(decode(part).frames for part in parts)
    if done.returncode != 0 or decode(target).frames != frames:
        reason = (done.stderr.strip().splitlines() or ["frames were lost"])[-1]
        raise BadRequest(f"{target}: its {len(parts)} videos cannot be joined ({reason})")


def _picture_stats(dataset: Dataset, feature: str) -> dict[str, Any]:
    """[3][1][1] of 0…1, and how many pictures they are of."""
    total, squares, pixels, pictures = np.zeros(3), np.zeros(3), 0, 0
    low, high = np.full(3, 255), np.zeros(3, int)
    for record in dataset.episodes:
        for frame in _key_frames(dataset, dataset.root / dataset.video(record.index, feature), feature):
            flat = frame.reshape(-1, 3)
            total += flat.sum(axis=0, dtype=np.float64)
            squares += np.square(flat, dtype=np.float64).sum(axis=0)
            low, high = np.minimum(low, flat.min(axis=0)), np.maximum(high, flat.max(axis=0))
            pixels, pictures = pixels + len(flat), pictures + 1
    mean = total / pixels
    fields = {"min": low / 255, "max": high / 255, "mean": mean / 255, "std": np.sqrt(np.maximum(squares / pixels - mean**2, 0)) / 255}
    return {**{name: [[[float(value)]] for value in values] for name, values in fields.items()}, "count": [pictures]}


def _key_frames(dataset: Dataset, path: Path, feature: str) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    from imageio_ffmpeg import get_ffmpeg_exe

    height, width = dataset.features[feature].shape[:2]
    command = [
        get_ffmpeg_exe(), "-nostdin", "-hide_banner", "-loglevel", "error", "-skip_frame", "nokey", "-f", "mov", "-i", str(path.absolute()),
        "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-",
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while len(data := process.stdout.read(height * width * 3)) == height * width * 3:
            yield np.frombuffer(data, np.uint8).reshape(height, width, 3)


def _info(dataset: Dataset) -> dict[str, Any]:
    info = {key: value for key, value in dataset.info.items() if key not in ("total_chunks", "total_videos")}
    fps = info["fps"]
    return info | {
        "codebase_version": "v3.0",
        "data_files_size_in_mb": DATA_FILE_MB,
        "video_files_size_in_mb": VIDEO_FILE_MB,
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if dataset.videos else None,
        "features": {
            name: entry if entry["dtype"] == "video" else {**entry, "fps": fps} for name, entry in info["features"].items()
        },
    }  # fmt: skip


def _write_episodes(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows)), _parent(path))


def _write_tasks(path: Path, dataset: Dataset) -> None:
    """One row a task; the sentences are the table's index, as pandas marks it, since that is how LeRobot looks them up."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    indices = sorted(dataset.tasks)
    table = pa.table({"task_index": pa.array(indices, pa.int64()), "__index_level_0__": [dataset.tasks[index] for index in indices]})
    columns = [("task_index", "task_index", "int64", "int64"), (None, "__index_level_0__", "unicode", "object")]
    about = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [
            {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object", "metadata": {"encoding": "UTF-8"}}
        ],
        "columns": [
            {"name": name, "field_name": place, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, place, kind, numpy in columns
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(about)}), path)


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
