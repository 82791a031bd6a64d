"""What can be wrong with a LeRobot dataset: every rule by name, and the finding that one of them was broken."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from ..types import BadRequest

T = TypeVar("T")
Severity = Literal["error", "warning"]

# An error: the loader stops, drops data or trains on something other than what the dataset says. A warning: nothing breaks yet.
ERRORS: Mapping[str, str] = {
    "file-missing": "a metadata file that the loader opens is absent",
    "json-syntax": "a file is not the JSON it should be",
    "jsonl-blank-line": "a .jsonl file has an empty line; the loader parses every line",
    "jsonl-byte-order-mark": "a .jsonl file begins with a byte-order mark; the loader stops there",
    "jsonl-spread": "an object stands on several lines; .jsonl wants one object a line",
    "layout-v3": "the files are laid out as LeRobot v3.0 (many episodes a file), which GR00T N1.7 cannot read",
    "info-field": "info.json lacks a field that the loader needs, or holds another type there",
    "info-feature": "a feature of info.json has no usable name, dtype and shape",
    "path-template": "a path template of info.json leads out of the dataset or names no episode",
    "task-field": "a line of tasks.jsonl is not {task_index, task}",
    "task-duplicate": "two lines of tasks.jsonl have one task_index or one task",
    "episode-field": "a line of episodes.jsonl has no usable episode_index and length",
    "episode-duplicate": "two lines of episodes.jsonl have one episode_index",
    "episode-missing": "the numbering of the episodes has a hole, or there is none at all",
    "episode-tasks": "an episode's tasks are not in tasks.jsonl or are not those of its rows",
    "episode-length": "an episode's length is not its number of rows",
    "modality-section": "modality.json lacks 'state' or 'action', or a section is no object",
    "modality-group": "a group of modality.json has no whole numbers start and end",
    "modality-column": "a group of modality.json reads a column that info.json does not declare",
    "slice-negative": "a slice starts below 0, which counts from the end",
    "slice-reversed": "a slice starts after its end and comes out empty",
    "slice-empty": "a slice is empty",
    "slice-overrun": "a slice ends past the width of its column; the loader cuts it short without a word",
    "slice-overlap": "two groups of one column share a dimension",
    "camera-feature": "a camera of modality.json has no video feature in info.json",
    "data-missing": "an episode has no parquet file",
    "data-unreadable": "a parquet file cannot be read",
    "column-missing": "a parquet file lacks a column that info.json declares",
    "column-dtype": "a column's numbers have another type than info.json declares",
    "list-cells": "the cells of a vector column are not flat arrays of numbers",
    "scalar-cells": "the cells of a vector column are single numbers",
    "cell-width": "a cell is wider or narrower than its feature",
    "not-finite": "a cell holds NaN, infinity or nothing",
    "frame-index": "frame_index does not count an episode's rows from 0",
    "episode-index": "episode_index is not the episode's own number",
    "global-index": "index does not go on from the episode before",
    "task-index": "a row's task is not in tasks.jsonl",
    "timestamps": "timestamp is not frame_index / fps, from zero in each episode",
    "stats-feature": "stats.json lacks a float feature",
    "stats-field": "a feature of stats.json lacks one of mean, std, min, max, q01, q99",
    "stats-extra-field": "a feature of stats.json has a field that the loader would slice like a vector",
    "stats-width": "a field of stats.json is not a list as long as its feature",
    "stats-not-finite": "a field of stats.json holds NaN or infinity",
    "stats-disagree": "stats.json says something else than the rows",
    "relative-stats": "a group of relative_stats.json is not [horizon][dimension] for a known action group",
    "video-missing": "an episode has no video of a camera",
    "video-unreadable": "a video cannot be decoded",
    "video-frames": "a video has more or fewer frames than its episode has rows",
    "video-size": "a video's pictures are not of the size that info.json declares",
    "policy-group": "the policy reads a group that modality.json lacks",
    "policy-camera": "the policy looks through a camera that modality.json lacks; the loader would pair cameras by position",
    "policy-language": "the policy takes its instruction from an annotation that modality.json lacks",
    "policy-width": "a group is wider or narrower than the policy was trained on",
    "policy-scale": "a dimension's q01…q99 lies far outside the policy's own bounds: other units, another gripper",
}
WARNINGS: Mapping[str, str] = {
    "jsonl-line-ends": "a .jsonl file has Windows line ends",
    "version-claim": "codebase_version is not what the files' layout is",
    "info-optional": "info.json lacks a field that every dataset has",
    "info-total": "a total of info.json is not what is there",
    "info-splits": "a split of info.json does not fit the episodes",
    "feature-standard": "one of the seven standard columns is not declared",
    "feature-dtype": "state or action is declared as something other than float32",
    "video-info": "a video feature has no 'info'",
    "task-empty": "a task is an empty sentence: its episodes teach without an instruction",
    "slice-gap": "a dimension belongs to no group of modality.json",
    "annotation-column": "an annotation of modality.json reads a column that info.json does not declare; asked for it, the loader stops",
    "camera-swapped": "a camera's name points at another camera's video",
    "episode-short": "an episode is shorter than the action horizon: it yields no whole chunk",
    "data-unlisted": "a parquet file has no line in episodes.jsonl, though the reference's statistics count it",
    "column-undeclared": "a parquet file has a column that info.json does not declare",
    "constant-dimension": "a dimension never moves: it normalises to nothing",
    "stats-unused": "stats.json has a feature that is not a declared float feature",
    "stats-fingerprint": "a fingerprint of stats.json is stale: training would recompute the statistics",
    "video-rate": "a video's frame rate is not the dataset's fps",
    "policy-range": "a dimension's q01…q99 leaves the policy's own bounds, or fills little of them",
    "policy-suite": "the episodes are of another suite than the policy was trained for",
}
RULES: Mapping[str, Severity] = {**dict.fromkeys(ERRORS, "error"), **dict.fromkeys(WARNINGS, "warning")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule, at one place."""

    rule: str
    file: str  # relative to the dataset
    text: str
    row: int | None = None  # of a parquet file, from 0; the line of a .jsonl file, from 1

    @property
    def severity(self) -> Severity:
        return RULES[self.rule]

    def __str__(self) -> str:
        place = self.file if self.row is None else f"{self.file}:{self.row}"
        told = f"{self.severity}: {place}: {self.text} [{self.rule}]"
        # Names come with the dataset, and one finding is one line of plain text.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in told)


Steps = Generator[Finding, None, T]  # says what is wrong on the way, and returns what could be read


def settled(steps: Steps[T], where: object) -> T:
    """What these steps return. Raises BadRequest for the first error among their findings."""
    try:
        while True:
            finding = next(steps)
            if finding.severity == "error":
                raise BadRequest(f"{where}/{str(finding).partition(': ')[2]}; `vla-eval dataset check {where}` lists everything")
    except StopIteration as end:
        found: T = end.value
        return found


def collected(steps: Steps[T]) -> tuple[list[Finding], T]:
    """Everything that is wrong, and what these steps return."""
    findings: list[Finding] = []
    try:
        while True:
            findings.append(next(steps))
    except StopIteration as end:
        return findings, end.value
