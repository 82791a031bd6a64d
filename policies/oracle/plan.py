"""From a goal and a scene to the next few moves: which conjunct comes first, and which skill serves it."""

from __future__ import annotations

import numpy as np

from .grasp import OPENING
from .handling import Goal, Notes, grasped, pick, place
from .mechanisms import close_part, open_part, push, turn_part
from .motion import OPEN, Hand, Move
from .scene import Scene

FLAT = 0.0  # m: what is no higher and too wide for the fingers is dragged, not lifted
BULKY = 0.09  # m: what is wider fills a drawer
WIDE = 0.97  # of its range: how far a drawer must be out for that
AJAR = 0.75  # of its range: a drawer that far out takes things


def decide(scene: Scene, hand: Hand, opening: float, notes: Notes) -> tuple[list[Move], Notes]:
    """The next moves and what to remember. `opening`: m between the fingers."""
    if notes.get("held"):
        if grasped(scene, hand, opening, notes):
            return place(scene, hand, notes)
        notes = {key: value for key, value in notes.items() if key != "held"}
    for goal in pending(scene):
        planned = attempt(scene, hand, goal, notes)
        if planned is not None:
            return planned
    return [Move(hand.pos, hand.rot.as_quat(), OPEN, at_least=8, at_most=8)], notes


def pending(scene: Scene) -> list[Goal]:
    """Unmet conjuncts in a workable order: what must be shut and is no container first, then knobs, things, lids last."""
    unmet = [tuple(goal) for goal, holds in zip(scene.truth["goal"], scene.truth["holds"], strict=True) if not holds]
    containers = {goal[2] for goal in unmet if goal[0] == "in"}
    owners = {scene.owner(container) for container in containers} | containers
    moved = {goal[1] for goal in unmet if goal[0] in ("on", "in")}

    def rank(goal: Goal) -> float:
        if goal[0] == "close":
            return 4 if goal[1] in owners else 0
        if goal[0] in ("on", "in"):
            return 3 if goal[2] in moved else 2  # what carries something else goes first
        return 1

    return sorted(unmet, key=rank)


def attempt(scene: Scene, hand: Hand, goal: Goal, notes: Notes) -> tuple[list[Move], Notes] | None:
    """Moves towards one conjunct; None if nothing can be done for it."""
    predicate, subject = goal[:2]
    part = scene.joint_of(goal[-1])
    tries = dict(notes.get("tries", {}))
    count = tries.get(" ".join(goal[:1] + goal[-1:]), 0)
    counted = {**notes, "tries": {**tries, " ".join(goal[:1] + goal[-1:]): count + 1}}
    moves: list[Move] | None = None
    base = np.array(notes["base"])
    if predicate in ("on", "in"):
        if predicate == "in" and part is not None and not _ajar(scene, part, WIDE if _bulky(scene, subject) else AJAR):
            moves = open_part(scene, hand, part, count, base)
            return (moves, counted) if moves else None
        if predicate == "on" and goal[2] in scene.truth["regions"] and _flat(scene, subject):
            return push(scene, hand, subject, scene.box(goal[2])[0][:2]), counted
        return pick(scene, hand, goal, notes)
    if part is None:
        return None
    if predicate == "open":
        moves = open_part(scene, hand, part, count, base)
    elif predicate == "close":
        moves = close_part(scene, hand, part, count)
    elif predicate in ("turnon", "turnoff"):
        moves = turn_part(scene, hand, part, predicate == "turnon", count, base)
    return (moves, counted) if moves else None


def _ajar(scene: Scene, part: str, share: float) -> bool:
    q, low, high = (float(scene.truth["joints"][part][i]) for i in (0, 7, 8))
    return abs(q) > share * max(abs(low), abs(high))


def _flat(scene: Scene, thing: str) -> bool:
    size = np.ptp(scene.corners(thing), axis=0)
    return bool(size[2] < FLAT and size[:2].min() > OPENING)


def _bulky(scene: Scene, thing: str) -> bool:
    return bool(np.ptp(scene.corners(thing), axis=0)[:2].min() > BULKY)
