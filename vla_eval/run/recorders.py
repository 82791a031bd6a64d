"""What watches an episode from inside the simulator's process: its arrays, its trace, and frames where none can be drawn later.

T steps, C chunks, N state, P predicates, K objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from ..results.film import Film, beside
from ..results.folder import Episode, write_episode
from ..types import ARM_STATE, ActionChunk, EpisodeRecord, Info, Observation, Task, Vector, VlaEvalError

_NOTHING, _NO_POSES = np.empty(0), np.empty((0, 7))


class Diverged(VlaEvalError):
    """A replay of an episode is not what its first attempt was."""


class ArrayRecorder:
    """Keeps every action and state, and writes them as one file at the end. A broken episode's file ends where it broke."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[tuple[Vector, Vector, list[bool], Vector, list[bool]]] = []  # state, proprio, predicates, objects, held
        self._actions: list[Vector] = []
        self._requests: list[tuple[int, Mapping[str, float], int]] = []

    def begin(self, task: Task, trial: int, observation: Observation, info: Info, snapshot: Vector | None) -> None:
        self._predicates, self._objects = list(info.get("predicates", {})), list(info.get("objects", {}))
        self._fixtures = {name: np.array(pose, np.float64) for name, pose in info.get("fixtures", {}).items()}
        self._width = len(snapshot) if snapshot is not None else 0
        self._row(observation, info, snapshot)

    def chunk(self, step: int, chunk: ActionChunk, batch: int) -> None:
        self._requests.append((step, chunk.seconds, batch))

    def step(self, action: Vector, observation: Observation, info: Info, snapshot: Vector | None) -> None:
        self._actions.append(action)
        self._row(observation, info, snapshot)

    def end(self, record: EpisodeRecord) -> EpisodeRecord:
        if self._rows:
            write_episode(self._path, self._episode())
        return record

    def _row(self, observation: Observation, info: Info, snapshot: Vector | None) -> None:
        predicates, objects, held = info.get("predicates", {}), info.get("objects", {}), info.get("held", {})
        self._rows.append(
            (
                _NOTHING if snapshot is None else np.array(snapshot, np.float64),
                proprio(observation),
                [bool(predicates[name]) for name in self._predicates],
                np.concatenate([objects[name] for name in self._objects]).reshape(-1, 7) if self._objects else _NO_POSES,
                [bool(held.get(name, False)) for name in self._objects],
            )
        )

    def _episode(self) -> Episode:
        states, proprios, predicates, objects, held = (np.array(column) for column in zip(*self._rows, strict=True))
        stages = list(dict.fromkeys(stage for _, seconds, _ in self._requests for stage in seconds if stage != "total"))
        stages.append("total")
        return Episode(
            actions=np.stack(self._actions) if self._actions else np.empty((0, 7), np.float32),
            states=states,
            proprio=proprios,
            predicates=predicates.astype(np.bool_),  # without a name the rows were empty, and of no type
            predicate_names=_texts(self._predicates),
            objects=objects.astype(np.float32),
            object_names=_texts(self._objects),
            held=held.astype(np.bool_),
            fixture_names=_texts(list(self._fixtures)),
            fixture_poses=np.array(list(self._fixtures.values()), np.float64).reshape(-1, 7),
            request_step=np.array([step for step, _, _ in self._requests], np.int32),
            request_seconds=np.array([[seconds.get(stage, np.nan) for stage in stages] for _, seconds, _ in self._requests]).reshape(
                -1, len(stages)
            ),
            request_stages=_texts(stages),
            request_batch=np.array([batch for _, _, batch in self._requests], np.int32),
        )


class TraceRecorder:
    """Writes every state to a file that outlives this process, and holds a replay against what its first attempt left there.

    Unbuffered: what was written before a process is killed is in the file.
    """

    def __init__(self, file: IO[bytes], first: bytes = b"") -> None:
        self._file, self._first, self._at = file.fileno(), first, 0

    def begin(self, task: Task, trial: int, observation: Observation, info: Info, snapshot: Vector | None) -> None:
        os.ftruncate(self._file, 0)
        self._row(0, observation, snapshot)
        self._steps = 0

    def chunk(self, step: int, chunk: ActionChunk, batch: int) -> None: ...

    def step(self, action: Vector, observation: Observation, info: Info, snapshot: Vector | None) -> None:
        self._steps += 1
        self._row(self._steps, observation, snapshot)

    def end(self, record: EpisodeRecord) -> EpisodeRecord:
        return record

    def _row(self, step: int, observation: Observation, snapshot: Vector | None) -> None:
        row = (proprio(observation) if snapshot is None else np.asarray(snapshot, np.float64)).tobytes()
        known = self._first[self._at : self._at + len(row)]  # shorter at its end: the first attempt died here
        if known != row[: len(known)]:
            raise Diverged(
                f"the replay is not what the first attempt was: states differ at step {step}, so the environment is not deterministic"
            )
        os.pwrite(self._file, row, self._at)
        self._at += len(row)


class FrameRecorder:
    """Writes a video while the episode runs, for environments whose pictures cannot be drawn from recorded states."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._film, self._frames = path, Film(path, fps), 0

    def begin(self, task: Task, trial: int, observation: Observation, info: Info, snapshot: Vector | None) -> None:
        self._frame(observation)

    def chunk(self, step: int, chunk: ActionChunk, batch: int) -> None: ...

    def step(self, action: Vector, observation: Observation, info: Info, snapshot: Vector | None) -> None:
        self._frame(observation)

    def end(self, record: EpisodeRecord) -> EpisodeRecord:
        try:
            if self._frames == 0:
                return record
            self._film.close()
        finally:
            self._film.drop()
        return replace(record, video=f"{self._path.parent.name}/{self._path.name}")

    def _frame(self, observation: Observation) -> None:
        if images := observation.get("images"):
            self._film.add(beside(images.values()))
            self._frames += 1


def proprio(observation: Observation) -> Vector:
    """[8] float32: position, axis-angle, fingers; where an environment has another state, its vectors one after another."""
    state = observation["state"]
    keys = ARM_STATE if ARM_STATE.keys() <= state.keys() else state
    return np.concatenate([state[key] for key in keys], axis=None, dtype=np.float32, casting="same_kind")


def _texts(names: list[str]) -> Vector:
    return np.array(names, np.str_) if names else np.empty(0, "<U1")
