"""From a goal and a scene to the next few moves: which conjunct, which skill, which way."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.types import Vector

from .grasp import UP, Grasp, downward, search
from .motion import CLOSE, OPEN, Hand, Move
from .scene import Scene

Notes = dict[str, Any]
Goal = tuple[str, ...]

CLEAR = 0.05  # m between what is carried and what it passes over
GRIP_STEPS = 10  # the fingers need eight from open to closed
LIFT = 0.10


def decide(scene: Scene, hand: Hand, opening: float, notes: Notes) -> tuple[list[Move], Notes]:
    """The next moves and what to remember. `opening`: m between the fingers."""
    held = notes.get("held")
    if held and grasped(scene, hand, opening, notes):
        return place(scene, hand, notes)
    notes = {key: value for key, value in notes.items() if key != "held"}
    for goal in pending(scene):
        if goal[0] in ("on", "in"):
            return pick(scene, hand, goal, notes)
    return [stay(hand, OPEN, 4)], notes


def pending(scene: Scene) -> list[Goal]:
    """Unmet conjuncts, in a workable order."""
    rank = {"close": 3, "in": 2, "on": 2, "turnon": 1, "turnoff": 1, "open": 0}
    unmet = [tuple(goal) for goal, holds in zip(scene.truth["goal"], scene.truth["holds"], strict=True) if not holds]
    return sorted(unmet, key=lambda goal: rank.get(goal[0], 4))


def stay(hand: Hand, grip: float, steps: int) -> Move:
    return Move(hand.pos, hand.rot.as_quat(), grip, at_least=steps, at_most=steps)


# --- picking up -------------------------------------------------------------------------------------------------------------------


def pick(scene: Scene, hand: Hand, goal: Goal, notes: Notes) -> tuple[list[Move], Notes]:
    thing = goal[1]
    tries = dict(notes.get("tries", {}))
    attempt = tries.get(thing, 0)
    tries[thing] = attempt + 1
    body = scene.solid(thing)
    near = np.linalg.norm(body[:, :2].max(0) - body[:, :2].min(0)) / 2 + 0.16
    around = [scene.solid(name) for name in scene.others(thing)]
    centre = (body.min(0) + body.max(0)) / 2
    walls = np.concatenate([*around, np.zeros((0, 3))])
    walls = walls[np.linalg.norm(walls[:, :2] - centre[:2], axis=1) < near]
    yaws = np.deg2rad(np.arange(-90, 90, 15))
    grasps = search(body, walls, scene.ground, [(downward(yaw), 0.01 * abs(yaw)) for yaw in yaws])
    notes = {**notes, "tries": tries}
    if not grasps:
        return [stay(hand, OPEN, 4)], notes
    grasp = distinct(grasps)[attempt % min(4, len(distinct(grasps)))]
    _, rot = scene.place(thing)
    notes |= {"held": thing, "goal": list(goal), "low": float(body[:, 2].min()), "upright": rot.as_quat().tolist()}
    return reach(scene, hand, grasp, thing), notes


def distinct(grasps: list[Grasp]) -> list[Grasp]:
    """The best grasp, then the best that is really another one, and so on."""
    kept: list[Grasp] = []
    for grasp in grasps:
        if all(np.linalg.norm(grasp.pos - other.pos) > 0.015 or (grasp.rot.inv() * other.rot).magnitude() > 0.4 for other in kept):
            kept.append(grasp)
        if len(kept) == 4:
            break
    return kept


def reach(scene: Scene, hand: Hand, grasp: Grasp, thing: str) -> list[Move]:
    rot = grasp.rot.as_quat()
    top = max(scene.top_between(hand.pos, grasp.pos, 0.08, ()), scene.corners(thing)[:, 2].max())
    high = max(grasp.pos[2] + 0.06, top + 0.03)
    over = np.append(grasp.pos[:2], high)
    rise = np.append(hand.pos[:2], max(hand.pos[2], high))
    moves = []
    if hand.pos[2] < high - 0.02:
        moves.append(Move(rise, hand.rot.as_quat(), OPEN, tol=0.02, turn_tol=9.0))
    moves += [
        Move(over, rot, OPEN, tol=0.015, turn_tol=0.1, at_most=80),
        Move(grasp.pos, rot, OPEN, tol=0.005, turn_tol=0.06, speed=0.7, at_most=40),
        Move(grasp.pos, rot, CLOSE, at_least=GRIP_STEPS, at_most=GRIP_STEPS),
        Move(grasp.pos + LIFT * UP, rot, CLOSE, tol=0.02),
    ]
    return moves


def grasped(scene: Scene, hand: Hand, opening: float, notes: Notes) -> bool:
    corners = scene.corners(notes["held"])
    close = np.linalg.norm(corners - hand.pos, axis=1).min() < 0.08
    return bool(opening > 0.002 and close and corners[:, 2].min() > notes["low"] + 0.02)


# --- putting down -----------------------------------------------------------------------------------------------------------------


def place(scene: Scene, hand: Hand, notes: Notes) -> tuple[list[Move], Notes]:
    thing, goal = notes["held"], tuple(notes["goal"])
    pos, rot = scene.place(thing)
    target = goal[2]
    upright = Rotation.from_quat(notes["upright"])
    spot = scene.box(target)[0] if target in scene.truth["regions"] else scene.place(target)[0]
    solid = rot.inv().apply(scene.solid(thing) - pos)  # in its own axes
    posed = upright.apply(solid)
    rest = rest_height(scene, posed + np.append(spot[:2], 0.0), thing)
    if goal[0] == "in":
        _, axes, half = scene.box(target)
        reach_up = np.abs(axes.apply(half))[2]
        rest = min(rest, spot[2] + reach_up - 0.02)
    end = np.array([spot[0], spot[1], rest + 0.008])
    low = float(posed[:, 2].min())
    radius = float(np.linalg.norm(posed[:, :2], axis=1).max())
    top = scene.top_between(pos, end, radius + 0.02, (thing,))
    high = max(top + CLEAR - low, end[2] + 0.05)
    carry = upright * rot.inv()  # turns thing and hand alike

    def hand_at(origin: Vector) -> tuple[Vector, Vector]:
        return origin + carry.apply(hand.pos - pos), (carry * hand.rot).as_quat()

    moves = []
    if pos[2] < high - 0.02:
        moves.append(Move(*hand_at(np.append(pos[:2], high)), CLOSE, tol=0.03, turn_tol=9.0))
    moves += [
        Move(*hand_at(np.append(end[:2], high)), CLOSE, tol=0.015, turn_tol=0.15, at_most=90),
        Move(*hand_at(end), CLOSE, tol=0.008, turn_tol=0.15, speed=0.7, at_most=50),
        Move(*hand_at(end), OPEN, at_least=8, at_most=8),
    ]
    up, quat = hand_at(end)
    moves.append(Move(up + 0.12 * UP, quat, OPEN, tol=0.03, turn_tol=9.0))
    return moves, {key: value for key, value in notes.items() if key != "held"}


def rest_height(scene: Scene, posed: Vector, thing: str) -> float:
    """How high the origin stands when the thing, moved straight down, first touches something. `posed`: its points, origin at height 0."""
    cell = 0.006
    keys = np.round(posed[:, :2] / cell).astype(int)
    under: dict[tuple[int, int], float] = {}
    for key, z in zip(map(tuple, keys), posed[:, 2], strict=True):
        under[key] = min(z, under.get(key, np.inf))
    height = scene.ground - float(posed[:, 2].min())
    for name in scene.others(thing):
        points = scene.solid(name)
        for key, z in zip(map(tuple, np.round(points[:, :2] / cell).astype(int)), points[:, 2], strict=True):
            if key in under:
                height = max(height, z - under[key])
    return height
