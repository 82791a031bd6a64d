"""The metadata of a LeRobot v2 dataset: what it is made of, read with everything that is wrong with it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from json import JSONDecoder
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeGuard

from ..types import BadRequest
from .lerobot_rules import Finding, Steps, settled

INFO, EPISODES, TASKS, MODALITY, STATS = (
    "meta/info.json",
    "meta/episodes.jsonl",
    "meta/tasks.jsonl",
    "meta/modality.json",
    "meta/stats.json",
)
STATE, ACTION = "observation.state", "action"
INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
COLUMNS = (STATE, ACTION, *INDEX_COLUMNS)  # the seven, in order
META_LIMIT_BYTES = 1 << 30
_MOST = 1 << 40  # episodes, rows or tasks: more is a damaged number
CELL_LIMIT = 1024  # numbers; statistics take up to 2.5 MB for each
NOT_ROWS = ("video", "image")  # dtypes of features whose data is not a column of numbers

Section = Literal["state", "action"]
_DEFAULT_COLUMN: Mapping[Section, str] = {"state": STATE, "action": ACTION}
_OPTIONAL = ("codebase_version", "robot_type", "total_episodes", "total_frames", "total_tasks", "fps", "splits")
_FIELD = re.compile(r"\{(\w*)(?::0?\d{1,2}d)?\}")
_BLANK = re.compile(r"\s*")
_SPLIT = re.compile(r"(\d+):(\d+)")
_V3 = (
    "this is LeRobot v3.0, many episodes a file; GR00T N1.7 reads v2.1 only: convert it with "
    "Isaac-GR00T's scripts/lerobot_conversion/convert_v3_to_v2.py, then check the result"
)


@dataclass(frozen=True, slots=True)
class Feature:
    """One entry of info.json's features."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def width(self) -> int:
        """Numbers in a cell."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """Dimensions start … end-1 of a column, under a name: an entry of modality.json's state or action."""

    column: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Record:
    """One line of episodes.jsonl."""

    index: int
    length: int
    tasks: tuple[str, ...]
    line: int
    extra: Mapping[str, Any]  # the whole line as it stands


@dataclass(frozen=True, slots=True)
class Dataset:
    """A LeRobot v2 dataset on disk, as its metadata tells it."""

    root: Path
    info: Mapping[str, Any]
    fps: float
    chunk: int  # episodes a folder
    data_path: str
    video_path: str | None
    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    episodes: tuple[Record, ...]  # in ascending order, each index once
    groups: Mapping[Section, Mapping[str, Group]] = field(default_factory=dict)
    cameras: Mapping[str, str] = field(default_factory=dict)  # name -> video feature
    annotations: Mapping[str, str] = field(default_factory=dict)  # name -> column
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)  # section of modality.json -> every name in it, faulty ones too
    tasks_known: bool = True  # whether tasks.jsonl could be read to its end

    @property
    def columns(self) -> dict[str, Feature]:
        """The features that are columns of the parquet files."""
        return {name: feature for name, feature in self.features.items() if feature.dtype not in NOT_ROWS}

    @property
    def videos(self) -> list[str]:
        """The features that are video files."""
        return [name for name, feature in self.features.items() if feature.dtype == "video"]

    def data(self, index: int) -> str:
        """Where an episode's rows lie, relative to the root."""
        return _filled(self.data_path, index, self.chunk)

    def video(self, index: int, feature: str) -> str:
        """Where an episode's video of a feature lies, relative to the root."""
        assert self.video_path is not None
        return _filled(self.video_path, index, self.chunk, feature)


def open_dataset(root: Path) -> Dataset:
    """The dataset in a folder. Raises BadRequest for the first error in its metadata (statistics are not looked at)."""
    if not root.is_dir():
        raise BadRequest(f"{root}: no such folder; a LeRobot dataset is a folder with meta/, data/ and videos/")
    dataset = settled(metadata(root), root)
    assert dataset is not None  # whatever stops the reading is an error
    return dataset


def metadata(root: Path) -> Steps[Dataset | None]:
    """Reads info, tasks, episodes and modality. None where nothing further can be read."""
    info = yield from read_object(root, INFO)
    if info is None:
        return None
    if any("{chunk_index" in str(info.get(key)) or "{file_index" in str(info.get(key)) for key in ("data_path", "video_path")):
        yield Finding("layout-v3", INFO, f"data_path is {info.get('data_path')!r}: {_V3}")
        return None
    if info.get("codebase_version") not in ("v2.0", "v2.1", None):
        yield Finding(
            "version-claim", INFO, f"codebase_version is {info['codebase_version']!r}, but the files are laid out as v2.1; write 'v2.1'"
        )
    dataset = yield from _described(root, info)
    if dataset is None:
        return None
    tasks = yield from _tasks(root)
    episodes = yield from _episodes(root, None if tasks is None else set(tasks.values()))
    if episodes is None:
        return None
    yield from _totals(info, dataset, tasks, episodes)
    dataset = replace(dataset, tasks=tasks or {}, tasks_known=tasks is not None, episodes=tuple(episodes))
    return (yield from _modality(dataset))


def read_object(root: Path, file: str) -> Steps[dict[str, Any] | None]:
    """A file that holds one JSON object."""
    text = yield from _text(root, file)
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield Finding("json-syntax", file, f"no JSON ({error})")
        return None
    if not isinstance(data, dict):
        yield Finding("json-syntax", file, f"wants an object, holds {type(data).__name__}")
        return None
    return data


def read_lines(root: Path, file: str) -> Steps[list[tuple[int, dict[str, Any]]] | None]:
    """The objects of a .jsonl file with the number of the line each begins on. None if it could not be read to its end."""
    text = yield from _text(root, file)
    if text is None:
        return None
    if text.startswith("\ufeff"):
        yield Finding("jsonl-byte-order-mark", file, "begins with a byte-order mark (EF BB BF); write plain UTF-8", 1)
        text = text[1:]
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if windows := [n for n, line in enumerate(lines, 1) if line.endswith("\r")]:
        yield Finding("jsonl-line-ends", file, f"{len(windows)} line(s) end with \\r\\n; write \\n", windows[0])
    if blank := [n for n, line in enumerate(lines, 1) if not line.strip()]:
        yield Finding("jsonl-blank-line", file, f"{len(blank)} empty line(s), this the first; leave them out", blank[0])
    found: list[tuple[int, dict[str, Any]]] = []
    at, number, decoder = 0, 1, JSONDecoder()
    while True:
        start = _BLANK.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty string
        number += text.count("\n", at, start)
        if start == len(text):
            return found
        try:
            data, at = decoder.raw_decode(text, start)
            if rest := text[at : text.find("\n", at) % (len(text) + 1)].strip():
                raise ValueError(f"{rest[:40]!r} follows the object")
            if not isinstance(data, dict):
                raise ValueError(f"an object is wanted, not {type(data).__name__}")
        except (ValueError, RecursionError) as error:
            yield Finding("json-syntax", file, f"no JSON line ({error})", number)
            return None
        found.append((number, data))
        if lines_taken := text.count("\n", start, at):
            yield Finding("jsonl-spread", file, f"the object that begins here goes on for {lines_taken + 1} lines; write it on one", number)
            number += lines_taken


def is_int(value: object) -> TypeGuard[int]:
    """A whole number, and not a truth value, which JSON readers tell apart and Python does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _text(root: Path, file: str) -> Steps[str | None]:
    path = root / file
    try:
        if path.stat().st_size > META_LIMIT_BYTES:
            yield Finding("json-syntax", file, f"{path.stat().st_size} bytes, more than the {META_LIMIT_BYTES} allowed here")
            return None
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        yield Finding("file-missing", file, "is not there; GR00T's loader opens it")
    except OSError as error:
        yield Finding("file-missing", file, f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        yield Finding("json-syntax", file, f"is not UTF-8 ({error})")
    return None


def _described(root: Path, info: Mapping[str, Any]) -> Steps[Dataset | None]:
    """The dataset without its episodes: paths, rate and features."""
    wrong = [key for key in ("data_path", "chunks_size", "features") if key not in info]
    for key in wrong:
        yield Finding("info-field", INFO, f"{key!r} is missing; GR00T's loader needs it")
    data_path, video_path, chunk, fps = info.get("data_path"), info.get("video_path"), info.get("chunks_size"), info.get("fps", 30)
    if "chunks_size" in info and not (is_int(chunk) and chunk > 0):
        wrong.append("chunks_size")
        yield Finding("info-field", INFO, f"chunks_size is {chunk!r}; it wants a whole number above 0")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 10_000:
        wrong.append("fps")
        yield Finding("info-field", INFO, f"fps is {fps!r}; it wants a number above 0")
    features = yield from _features(info.get("features", {}))
    has_video = any(feature.dtype == "video" for feature in features.values())
    for key, template, needed in (("data_path", data_path, True), ("video_path", video_path, has_video)):
        if template is None:
            if needed and key not in wrong:
                wrong.append(key)
                yield Finding("info-field", INFO, f"{key!r} is missing, though there are features of dtype 'video'")
        elif fault := _template_fault(template, video=key == "video_path"):
            wrong.append(key)
            yield Finding("path-template", INFO, f"{key} {template!r} {fault}")
    for key in _OPTIONAL:
        if key not in info:
            yield Finding("info-optional", INFO, f"{key!r} is missing; every other dataset has it")
    if wrong:
        return None
    return Dataset(root, info, float(fps), chunk, data_path, video_path, features, {}, ())  # type: ignore[arg-type]  # checked above


def _features(data: object) -> Steps[dict[str, Feature]]:
    found: dict[str, Feature] = {}
    if not isinstance(data, dict):
        yield Finding("info-field", INFO, "features is no object")
        return found
    for name, entry in data.items():
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(is_int(n) and 0 < n < 1 << 20 for n in shape):
            yield Finding(
                "info-feature", INFO, f"features[{name!r}] has dtype {dtype!r} and shape {shape!r}; it wants a name and whole numbers"
            )
            continue
        feature = Feature(dtype, tuple(shape))
        if fault := _feature_fault(name, feature):
            yield Finding("info-feature", INFO, f"features[{name!r}] {fault}")
            continue
        found[name] = feature
        if dtype == "video" and not isinstance(entry.get("info"), dict):
            yield Finding("video-info", INFO, f"features[{name!r}] has no 'info' object (GR00T's sets write 'info', not 'video_info')")
        if name in (STATE, ACTION) and dtype != "float32":
            yield Finding("feature-dtype", INFO, f"features[{name!r}] is {dtype}; GR00T computes in float32: store float32")
    for name in COLUMNS:
        if name not in data:
            yield Finding("feature-standard", INFO, f"features has no {name!r}, one of the seven standard columns")
    return found


def _feature_fault(name: str, feature: Feature) -> str | None:
    """What keeps a feature from being read, though its entry is well formed."""
    if feature.dtype != "video":
        too_wide = feature.dtype not in NOT_ROWS and feature.width > CELL_LIMIT
        return f"has shape {list(feature.shape)}; a cell of more than {CELL_LIMIT} numbers is not read here" if too_wide else None
    if not name.isprintable() or "/" in name or name in (".", "..", ""):  # it stands for a folder in video_path
        return "is a video's name and so a folder's; it wants letters, digits and dots, no slash"
    return None if len(feature.shape) > 1 else f"has shape {list(feature.shape)}; a video wants [height, width, channels]"


def _template_fault(template: object, *, video: bool) -> str | None:
    """What is wrong with a path template; it comes with the data, so it may name nothing but an episode inside the dataset."""
    if not isinstance(template, str):
        return "is no text"
    allowed = {"episode_chunk", "episode_index"} | ({"video_key"} if video else set())
    names = [match[1] for match in _FIELD.finditer(template)]
    bare = _FIELD.sub("0", template)
    if set(names) - allowed or "{" in bare or "}" in bare:
        return f"has a field other than {', '.join(sorted(allowed))}"
    if "episode_index" not in names or (video and "video_key" not in names):
        return "names no episode" if "episode_index" not in names else "names no {video_key}"
    if PurePosixPath(bare).is_absolute() or ".." in PurePosixPath(bare).parts:
        return "leads out of the dataset's folder"
    return None


def _filled(template: str, index: int, chunk: int, key: str = "") -> str:
    return template.format(episode_chunk=index // chunk, episode_index=index, video_key=key)


def _tasks(root: Path) -> Steps[dict[int, str] | None]:
    found: dict[int, str] = {}
    all_ = yield from read_lines(root, TASKS)
    if all_ is None:
        return None
    for line, data in all_:
        index, task = data.get("task_index"), data.get("task")
        if not is_int(index) or not -_MOST < index < _MOST or not isinstance(task, str):
            yield Finding("task-field", TASKS, f"task_index is {index!r} and task {task!r}; it wants a whole number and a sentence", line)
            continue
        if not task.strip():
            yield Finding("task-empty", TASKS, f"task {index} is {task!r}; its episodes would teach without an instruction", line)
        if index in found or task in found.values():
            yield Finding("task-duplicate", TASKS, f"task_index {index} or its task {task!r} stands above already", line)
        found[index] = task  # as the loader does: the last one counts
    return found


def _episodes(root: Path, tasks: set[str] | None) -> Steps[list[Record] | None]:
    found: dict[int, Record] = {}
    all_ = yield from read_lines(root, EPISODES)
    if all_ is None:
        return None
    for line, data in all_:
        index, length, names = data.get("episode_index"), data.get("length"), data.get("tasks")
        if not is_int(index) or not 0 <= index < _MOST or not is_int(length) or not 0 < length < _MOST:
            yield Finding(
                "episode-field",
                EPISODES,
                f"episode_index is {index!r} and length {length!r}; both want whole numbers, at least 0 and 1",
                line,
            )
            continue
        if index in found:
            yield Finding("episode-duplicate", EPISODES, f"episode_index {index} stands on line {found[index].line} already", line)
            continue
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            yield Finding("episode-tasks", EPISODES, f"tasks of episode {index} is {names!r}; it wants a list of sentences", line)
            names = []
        elif tasks is not None and (strange := [name for name in names if name not in tasks]):
            yield Finding("episode-tasks", EPISODES, f"task {strange[0]!r} of episode {index} is not in {TASKS}", line)
        found[index] = Record(index, length, tuple(names), line, data)
    if not all_:
        yield Finding("episode-missing", EPISODES, "holds no episode")
    hole = next((place for place, index in enumerate(sorted(found)) if place != index), None)
    if hole is not None:
        yield Finding("episode-missing", EPISODES, f"episode_index {hole} is missing, though the numbering goes on to {max(found)}")
    return [found[index] for index in sorted(found)]


def _totals(info: Mapping[str, Any], dataset: Dataset, tasks: Mapping[int, str] | None, episodes: list[Record]) -> Steps[None]:
    count = len(episodes)
    there = {
        "total_episodes": count,
        "total_frames": sum(record.length for record in episodes),
        "total_tasks": info.get("total_tasks") if tasks is None else len(tasks),
        "total_videos": count * len(dataset.videos),
        "total_chunks": math.ceil(count / dataset.chunk),
    }
    for key, number in there.items():
        if key in info and info[key] != number:
            yield Finding("info-total", INFO, f"{key} is {info[key]!r}; there are {number}")
    splits = info.get("splits", {})
    for name, split in splits.items() if isinstance(splits, dict) else [("splits", splits)]:
        match = _SPLIT.fullmatch(split) if isinstance(split, str) else None
        if match is None or not int(match[1]) <= int(match[2]) <= count:
            yield Finding("info-splits", INFO, f"split {name!r} is {split!r}; there are {count} episodes, so at most '0:{count}'")


def _modality(dataset: Dataset) -> Steps[Dataset]:
    data = yield from read_object(dataset.root, MODALITY)
    if data is None:
        return dataset
    features = dataset.features
    groups: dict[Section, dict[str, Group]] = {}
    annotations: dict[str, str] = {}
    sections: tuple[Section, Section] = ("state", "action")
    for section in sections:
        entries = data.get(section)
        if not isinstance(entries, dict) or not entries:
            data.pop(section, None)
            yield Finding(
                "modality-section", MODALITY, f"{section!r} is missing or no object; GR00T slices {_DEFAULT_COLUMN[section]} by it"
            )
            continue
        groups[section] = yield from _groups(section, entries, features)
    for part in ("video", "annotation"):
        if not isinstance(data.get(part, {}), dict):
            data.pop(part)
            yield Finding("modality-section", MODALITY, f"{part!r} is no object")
    cameras = yield from _cameras(data.get("video", {}), features)
    for name, entry in data.get("annotation", {}).items():
        column = _original_key(entry, f"annotation.{name}")
        if column not in features or features[column].dtype in NOT_ROWS:
            yield Finding("annotation-column", MODALITY, f"annotation {name!r} reads column {column!r}, which info.json does not declare")
            continue
        annotations[name] = column
    named: dict[str, frozenset[str]] = {part: frozenset(data[part]) for part in ("state", "action", "video", "annotation") if part in data}
    return replace(dataset, groups=groups, cameras=cameras, annotations=annotations, named=named)


def _groups(section: Section, entries: Mapping[str, Any], features: Mapping[str, Feature]) -> Steps[dict[str, Group]]:
    found: dict[str, Group] = {}
    for name, entry in entries.items():
        where = f"{section}.{name}"
        start, end = (entry.get("start"), entry.get("end")) if isinstance(entry, dict) else (None, None)
        column = _original_key(entry, _DEFAULT_COLUMN[section])
        if not is_int(start) or not is_int(end):
            yield Finding("modality-group", MODALITY, f"{where} has start {start!r} and end {end!r}; both want whole numbers")
            continue
        if column not in features or features[column].dtype in NOT_ROWS:
            yield Finding("modality-column", MODALITY, f"{where} reads column {column!r}, which info.json does not declare")
            continue
        width = features[column].width
        if start < 0 or end < 0:
            yield Finding("slice-negative", MODALITY, f"{where} is {start}:{end}; a negative bound counts from the end")
        elif start > end:
            yield Finding("slice-reversed", MODALITY, f"{where} is {start}:{end}, which starts after its end: every vector comes out empty")
        elif start == end:
            yield Finding("slice-empty", MODALITY, f"{where} is {start}:{end}, which is empty")
        elif end > width:
            yield Finding(
                "slice-overrun",
                MODALITY,
                f"{where} is {start}:{end}, but {column} is {width} wide; the loader would cut it to {start}:{width}",
            )
        else:
            found[name] = Group(column, start, end)
    whole = len(found) == len(entries)  # a faulty slice leaves a gap that is no fault of its own
    for column in {group.column: None for group in found.values()}:
        end, before = 0, ""
        for name, group in sorted(((n, g) for n, g in found.items() if g.column == column), key=lambda item: (item[1].start, item[1].end)):
            if group.start < end:
                text = (
                    f"{section}.{name} is {group.start}:{group.end} and shares dimension {group.start} of {column} with {section}.{before}"
                )
                yield Finding("slice-overlap", MODALITY, text)
            elif group.start > end and whole:
                yield Finding("slice-gap", MODALITY, f"no group of {section!r} reads {column}[{end}:{group.start}]")
            if group.end > end:
                end, before = group.end, name
        if end < features[column].width and whole:
            yield Finding("slice-gap", MODALITY, f"no group of {section!r} reads {column}[{end}:{features[column].width}]")
    return found


def _cameras(entries: Mapping[str, Any], features: Mapping[str, Feature]) -> Steps[dict[str, str]]:
    found: dict[str, str] = {}
    for name, entry in entries.items():
        column = _original_key(entry, f"observation.images.{name}")
        if column not in features or features[column].dtype not in NOT_ROWS:
            yield Finding("camera-feature", MODALITY, f"camera {name!r} shows {column!r}, which info.json does not declare as a video")
            continue
        found[name] = column
    for name, column in found.items():
        other = column.removeprefix("observation.images.")
        if other != name and other in entries:
            yield Finding("camera-swapped", MODALITY, f"camera {name!r} shows {column!r}, although there is a camera {other!r}")
    return found


def _original_key(entry: object, default: str) -> str:
    key = entry.get("original_key", default) if isinstance(entry, dict) else default
    return key if isinstance(key, str) else default
