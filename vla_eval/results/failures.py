"""Why an episode failed, from its recorded `held`, `objects` and `predicates` alone. T steps, K objects, P predicates."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import BadRequest, EpisodeRecord
from .folder import Episode, RunFolder
from .report import CONTROL_HZ, control_hz, task_order

TOUCHED_M = 0.005  # whoever leaves an object alone finds it within 1 mm of its start
MOVED_M = 0.03  # carried or pushed away, not brushed in passing
PROGRESS_M = 0.01  # carried or pushed this far in the last second, a target was still on its way
WINDOW_S = 1.0
GRASP_S = 0.25  # held for most of such a stretch, an object was grasped; for less, both fingers brushed it
POLICY_ERRORS = ("InvalidAction", "PolicyFailed", "ContractMismatch")  # beginnings of an error record's message; the rest is the harness'


class Bin(StrEnum):
    """Where a failed or broken episode goes; in this order in tables and colours."""

    NEVER_REACHED = "never reached the object"
    NOT_GRASPED = "touched, never grasped"
    WRONG_OBJECT = "wrong object moved"
    LOST = "grasped and lost"
    NOT_PLACED = "held to the end, not placed"
    UNDONE = "goal reached and undone"
    SLOW = "slow: still progressing at the cap"
    NO_OBJECT = "goal names no movable object"
    UNREADABLE = "arrays missing or damaged"
    POLICY_ERROR = "policy error"
    HARNESS_ERROR = "harness error"


def bin_of(record: EpisodeRecord, episode: Episode | None, hz: float = CONTROL_HZ) -> Bin | None:
    """The bin of an episode; None for a success. `episode` may be None for an error, which is sorted by its message."""
    if record.outcome == "success":
        return None
    if record.outcome == "error":
        return Bin.POLICY_ERROR if (record.error or "").startswith(POLICY_ERRORS) else Bin.HARNESS_ERROR
    return Bin.UNREADABLE if episode is None else sort(episode, hz)


def sort(episode: Episode, hz: float = CONTROL_HZ) -> Bin:
    """The bin of a failed episode's arrays.

    What was reached and lost again says more than what is still missing, and what is still moving more than what was dropped before:
    so the questions come in that order. The targets are the objects that the goal's unmet conjuncts begin with; where a conjunct
    begins with something that does not move by itself (a door, a stove's knob), only the predicates and the other objects can be asked.
    An object that the goal does not name is the wrong one if it was held, or pushed farther than the target was. Where the hand is, is
    not asked: whoever came close and touched nothing has not reached the object.
    """
    met = episode.predicates.astype(bool)  # [T+1, P]
    window = max(1, round(WINDOW_S * hz))
    unmet = ~met[-1]
    if np.any(met[:-1].any(axis=0) & unmet):
        return Bin.UNDONE
    targets = _targets(episode, unmet)  # [K] bool
    if np.any(met[-1] & ~met[-1 - min(window, len(met) - 1)]):
        return Bin.SLOW  # a conjunct was met within the last second, the others were to come
    held = episode.held.astype(bool)  # [T+1, K]
    place = episode.objects[..., :3].astype(np.float64)  # [T+1, K, 3] m
    recent = place[-1 - min(window, len(place) - 1) :]
    progressing = np.linalg.norm(recent[-1] - recent[0], axis=-1) >= PROGRESS_M  # [K]
    farthest = np.linalg.norm(place - place[0], axis=-1).max(axis=0)  # [K] m
    ever_held = _grasped(held, max(1, round(GRASP_S * hz)))
    held_now = ever_held & held[-3:].any(axis=0)  # contact flickers
    if np.any(targets & held_now & progressing):
        return Bin.SLOW
    if np.any(targets & held_now):
        return Bin.NOT_PLACED
    if np.any(targets & ever_held):
        return Bin.LOST
    others = ~_named(episode)
    elsewhere = (farthest >= MOVED_M) & (farthest > np.max(farthest, initial=0.0, where=targets))
    if np.any(others & (ever_held | elsewhere)):
        return Bin.WRONG_OBJECT
    if not targets.any():
        return Bin.NO_OBJECT
    if np.any(targets & (farthest >= MOVED_M) & progressing & _standing(episode)):
        return Bin.SLOW  # pushed, and still going; what was knocked over rolls by itself
    return Bin.NOT_GRASPED if np.any(targets & (farthest >= TOUCHED_M)) else Bin.NEVER_REACHED


def bins(folder: RunFolder) -> dict[tuple[str, int], Bin]:
    """The bin of every episode that did not succeed."""
    found = {}
    for record in folder.records():
        if record.outcome == "success":
            continue
        episode = None
        if record.outcome == "failure":
            try:
                episode = folder.episode(record.task, record.trial)
            except BadRequest:
                episode = None  # its bin says so
        bin_ = bin_of(record, episode, control_hz(folder.manifest, record.task))
        assert bin_ is not None
        found[record.task, record.trial] = bin_
    return found


def by_task(found: Mapping[tuple[str, int], Bin]) -> dict[str, Counter[Bin]]:
    """How many episodes of each task are in each bin."""
    counts: dict[str, Counter[Bin]] = {}
    for (task, _), bin_ in sorted(found.items(), key=lambda item: task_order(item[0][0])):
        counts.setdefault(task, Counter())[bin_] += 1
    return counts


def failures_json(found: Mapping[tuple[str, int], Bin]) -> dict[str, Any]:
    """For `--json`: counts by task, and the bin of every episode."""
    counts = {task: {str(bin_): row[bin_] for bin_ in Bin if bin_ in row} for task, row in by_task(found).items()}
    episodes = [{"task": task, "trial": trial, "bin": str(bin_)} for (task, trial), bin_ in found.items()]
    return {"by_task": counts, "episodes": sorted(episodes, key=lambda e: (task_order(str(e["task"])), e["trial"]))}


def failures_markdown(found: Mapping[tuple[str, int], Bin]) -> str:
    """Bins by task, as a table; empty bins left out. An empty text if nothing failed."""
    counts = by_task(found)
    columns = [bin_ for bin_ in Bin if any(bin_ in row for row in counts.values())]
    if not columns:
        return ""
    lines = ["| failures | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {task} | " + " | ".join(str(row[bin_]) for bin_ in columns) + " |" for task, row in counts.items()]
    return "\n".join(lines) + "\n"


def _targets(episode: Episode, unmet: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[K] the objects that unmet conjuncts begin with: "on(bowl, plate)" wants the bowl moved."""
    firsts = [_arguments(str(name))[:1] for name, is_unmet in zip(episode.predicate_names, unmet, strict=True) if is_unmet]
    return _are(episode, {first[0] for first in firsts if first})


def _grasped(held: NDArray[np.bool_], stretch: int) -> NDArray[np.bool_]:
    """[K] whether each object was held in more than half of some `stretch` states; contact flickers."""
    before = np.concatenate([np.zeros_like(held[:1], int), held.cumsum(axis=0)])  # [T+2, K] states held before each
    stretch = min(stretch, len(held))
    return np.asarray(2 * (before[stretch:] - before[:-stretch]).max(axis=0) > stretch)


def _standing(episode: Episode) -> NDArray[np.bool_]:
    """[K] whether each object's vertical at the start is within 30° of it at the end."""
    first, last = episode.objects[0, :, 3:].astype(np.float64), episode.objects[-1, :, 3:].astype(np.float64)  # [K, 4] x y z w
    turn = first[:, 3:] * last[:, :3] - last[:, 3:] * first[:, :3] - np.cross(last[:, :3], first[:, :3])  # of last · first⁻¹
    return np.asarray(1 - 2 * (turn[:, 0] ** 2 + turn[:, 1] ** 2) >= math.cos(math.radians(30)))


def _named(episode: Episode) -> NDArray[np.bool_]:
    """[K] the objects that the goal names anywhere, if only a region of them, as in "in(soup_1, basket_1_contain_region)".

    Carrying the plate under the bowl is clumsy, not a mistaken object.
    """
    arguments = [argument for name in episode.predicate_names for argument in _arguments(str(name))]
    return np.array(
        [any(argument == name or argument.startswith(f"{name}_") for argument in arguments) for name in episode.object_names], bool
    )


def _are(episode: Episode, names: Iterable[str]) -> NDArray[np.bool_]:
    wanted = set(names)
    return np.array([str(name) in wanted for name in episode.object_names], bool)


def _arguments(predicate: str) -> list[str]:
    return [part.strip() for part in re.sub(r"^[^(]*\(|\)\s*$", "", predicate).split(",") if part.strip()]
