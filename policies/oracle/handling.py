"""Picking up and putting down: which grasp, which pose of the thing at its goal, and the way between them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.types import Vector

from .arm import shortfall
from .grasp import OPENING, Grasp, distinct, from_above, from_aside, hits, lowest, search
from .motion import CLOSE, OPEN, Hand, Move
from .scene import UP, Scene, thinned, top_between

Notes = dict[str, Any]
Goal = tuple[str, ...]

CELL = 0.006  # m, of the height maps
CLEAR = 0.03  # m between what moves and what it passes over
GRIP_STEPS = 10  # the fingers need eight from open to closed
LIFT = 0.10
UNREACHED = 5.0  # what a missing metre of reach weighs against a metre of anything else
STOWS = 24  # poses at the goal are enough
PAIRS = 40  # of a grasp and such a pose, whose reach is then looked at
GAP = 0.006  # m above where a thing would rest: it is let go there
FALLING = 0.02  # m above where it would rest: a thing is on its way there, as after a reset that lets things fall
PATIENCE = 3  # times in an episode that one waits four steps for that
WAYS = np.array([[0.0, 0, -1], [1, 0, 0], [0, 1, 0], [0, -1, 0], [-1, 0, 0]])  # into a place: from above, else level


@dataclass(frozen=True, slots=True)
class Stow:
    """A pose of the thing at its goal, and the direction in which it gets there."""

    pos: Vector
    rot: Rotation
    way: Vector
    spare: float  # m that it may be let go higher
    cost: float


def pick(scene: Scene, hand: Hand, goal: Goal, notes: Notes) -> tuple[list[Move], Notes] | None:
    """Moves that lift the thing once it lies still, the grasp chosen with its goal in mind; None if no grasp is to be had."""
    thing = goal[1]
    tries = dict(notes.get("tries", {}))
    attempt = tries.get(thing, 0)
    body, walls = scene.solid(thing), scene.walls(thing)
    pos, rot = scene.place(thing)
    patience = notes.get("patience", PATIENCE)
    if patience and hangs(body, walls, scene.ground):
        return [Move(hand.pos, hand.rot.as_quat(), OPEN, at_least=4, at_most=4)], {**notes, "patience": patience - 1}
    stows = goal_poses(scene, goal, rot, walls)
    base = np.array(notes["base"])
    plans = paired(search(body, walls, scene.ground, from_above()), stows, pos, rot, walls, base)
    if not plans or plans[0][0] > 0.08:
        azimuths, tilts = np.deg2rad(np.arange(-120, 121, 30)), np.deg2rad([35, 60, 80])
        plans += paired(search(body, walls, scene.ground, from_aside(azimuths, tilts)), stows, pos, rot, walls, base)
        plans.sort(key=lambda plan: plan[0])
    if not plans:
        return None
    others = distinct([grasp for _, grasp, _ in plans], 4)
    chosen = others[attempt % len(others)]
    stow = next(stow for _, grasp, stow in plans if grasp is chosen)
    tries[thing] = attempt + 1
    notes = {
        **notes,
        "tries": tries,
        "held": thing,
        "goal": list(goal),
        "low": float(body[:, 2].min()),
        "turn": (stow.rot * rot.inv()).as_quat().tolist(),
        "upright": rot.as_quat().tolist(),
        "way": stow.way.tolist(),
        "spot": stow.pos[:2].tolist(),
    }
    return reach(hand, chosen, scene.walls(), way_out(body, walls, chosen.rot.apply([0, 0, 1]))), notes


def paired(
    grasps: Iterable[Grasp], stows: list[Stow], pos: Vector, rot: Rotation, walls: Vector, base: Vector
) -> list[tuple[float, Grasp, Stow]]:
    """Good grasps with the poses at the goal that suit them, cheapest first. `pos`, `rot`: where the thing is now."""
    options: list[tuple[float, Grasp, Stow]] = []
    if not stows:
        return []
    near_thing = thinned(walls[np.linalg.norm(walls - pos, axis=1) < 0.45])
    near_goal = thinned(walls[np.linalg.norm(walls - np.mean([stow.pos for stow in stows], axis=0), axis=1) < 0.45])
    possible = []
    for grasp in distinct(grasps, 16):
        approach = grasp.rot.apply([0, 0, 1])
        cost = grasp.cost + 0.01 * sum(hits(grasp.pos - back * approach, grasp.rot, near_thing, OPENING) for back in (0.06, 0.12, 0.18))
        possible += [(cost + stow.cost, grasp, stow) for stow in stows]
    for cost, grasp, stow in sorted(possible, key=lambda option: option[0]):
        dearest = options[-1][0] if len(options) == PAIRS else np.inf
        if cost > dearest:  # and so are all that follow
            break
        end, hand = carried(grasp, stow, pos, rot)
        cost += 0.01 * min(hits(end + rise * UP, hand, near_goal, OPENING) + 20 * rise for rise in {0.0, stow.spare})
        if cost > dearest:
            continue
        cost += 0.01 * sum(hits(end - back * stow.way + 0.01 * UP, hand, near_goal, grasp.width) for back in (0.06, 0.12))
        bisect.insort(options, (cost, grasp, stow), key=lambda option: option[0])
        del options[PAIRS:]
    if not options:
        return []
    ends = [carried(grasp, stow, pos, rot) for _, grasp, stow in options]
    there = shortfall(base, np.array([end for end, _ in ends]), Rotation.concatenate([hand for _, hand in ends]))
    here = shortfall(base, np.array([grasp.pos for _, grasp, _ in options]), Rotation.concatenate([grasp.rot for _, grasp, _ in options]))
    plans = [(cost + UNREACHED * float(a + b), grasp, stow) for (cost, grasp, stow), a, b in zip(options, here, there, strict=True)]
    return sorted(plans, key=lambda plan: plan[0])


def carried(grasp: Grasp, stow: Stow, pos: Vector, rot: Rotation) -> tuple[Vector, Rotation]:
    """The hand when what it grasped is at its goal."""
    turn = stow.rot * rot.inv()
    return stow.pos + turn.apply(grasp.pos - pos), turn * grasp.rot


def goal_poses(scene: Scene, goal: Goal, rot: Rotation, walls: Vector) -> list[Stow]:
    """Where and how the thing could stand when its goal is met."""
    thing, target = goal[1], goal[2]
    pos, _ = scene.place(thing)
    own = rot.inv().apply(scene.solid(thing) - pos)
    if target in scene.truth["regions"]:
        centre, half = scene.box(target)
    else:
        centre, half = scene.place(target)[0], np.full(3, 0.02)
    sharing = [other for other in scene.truth["goal"] if other[0] == goal[0] and other[-1] == target]
    spots = _spots(centre, half, sharing.index(goal), len(sharing))
    turns = _turns(rot.apply(own))
    top = np.inf if goal[0] == "on" else centre[2] + half[2] - 0.015  # where the origin may be let go
    tops = Tops.of(walls)
    found = _lowered(own, rot, spots, turns, tops, scene.ground, top)
    if not found:  # look everywhere in the region
        shares = np.array([0, 0.2, -0.2, 0.4, -0.4, 0.6, -0.6])
        found = _lowered(own, rot, [centre[:2] + half[:2] * [x, y] for x in shares for y in shares], turns[:1], tops, scene.ground, top)
    if not found and top_between(walls, centre, centre, 0.03) < centre[2] + half[2]:  # no roof: drop it from above
        found = _lowered(own, rot, spots, turns, tops, scene.ground, np.inf)
    if not found:
        filled, below = _boxes(walls), Tops.of(walls[walls[:, 2] < centre[2]])
        for turn in turns:
            turned = Rotation.from_euler("z", turn) * rot
            for way in WAYS[1:]:
                for depth in (0.0, float(np.abs(way[:2]) @ half[:2]) - 0.025):  # the middle, or just inside: there the hand stays out
                    spot = spots[0] - max(depth, 0.0) * way[:2]
                    posed = turned.apply(own) + np.append(spot, 0.0)
                    found.append(_inserted(posed, spot, turned, way, filled, below, scene.ground, 0.01 * abs(turn) + 0.2 * depth))
    found.sort(key=lambda stow: stow.cost)
    return [stow for stow in found[:STOWS] if stow.cost < found[0].cost + 0.3]


def _lowered(own: Vector, rot: Rotation, spots: list[Vector], turns: list[float], tops: Tops, ground: float, top: float) -> list[Stow]:
    """From above, onto what it touches first, where that leaves its origin below `top`; the first spot is the dearest to the goal."""
    found = []
    for spot in spots:
        for turn in turns:
            turned = Rotation.from_euler("z", turn) * rot
            rest = rest_height(turned.apply(own) + np.append(spot, 0.0), tops, ground)
            if rest < top:
                cost = 0.01 * abs(turn) + 0.3 * float(np.linalg.norm(spot - spots[0])) + 2.0 * rest
                spare = 0.03 if np.isinf(top) else float(np.clip(top - rest - GAP, 0.0, 0.10))
                found.append(Stow(np.append(spot, rest + GAP), turned, WAYS[0], spare, cost))
    return found


def _turns(points: Vector) -> list[float]:
    """Turns about the vertical worth trying: none, those that lay a long thing along the axes of the world, and halves."""

    def area(angle: float) -> float:
        return float(np.prod(np.ptp(Rotation.from_euler("z", angle).apply(points)[:, :2], axis=0)))

    straight = min(np.deg2rad(np.arange(-45, 45, 5)), key=area)
    turns = [0.0, *(straight + np.deg2rad([0, 90, -90, 180])), *np.deg2rad([45, -45, 90, -90])]
    return [float((turn + np.pi) % (2 * np.pi) - np.pi) for turn in turns]


def _spots(centre: Vector, half: Vector, index: int, count: int) -> list[Vector]:
    """Places [2] for one of `count` things in a region, the best first: apart from each other, as far as the walls allow."""
    if count == 1:
        asides = [np.array(axis) * share for share in (0.2, -0.2, 0.4, -0.4) for axis in ((1, 0), (0, 1))]
        return [centre[:2] + np.minimum(half[:2], 0.08) * aside for aside in [np.zeros(2), *asides]]
    square = half[:2].max() < 1.3 * half[:2].min()
    line = np.ones(2) if square else np.eye(2)[int(half[1] > half[0])]  # of a square the diagonal is longest
    side = 1 - 2 * index / (count - 1)
    return [centre[:2] + share * side * half[:2] * line for share in (0.5, 0.4, 0.3, 0.2, 0.0)]


def _inserted(posed: Vector, spot: Vector, rot: Rotation, way: Vector, filled: Vector, below: Tops, ground: float, cost: float) -> Stow:
    """Under a roof: rest on what lies `below` the region's middle, come in level along `way`."""
    rest = rest_height(posed, below, ground)
    body = np.concatenate([thinned(posed) + (rest + GAP + 0.004) * UP - step * way for step in np.arange(0.0, 0.32, 0.03)])
    shared = np.isin(_boxes(body), filled).sum()
    return Stow(np.append(spot, rest + GAP), rot, way, 0.0, cost + 0.02 + 0.002 * float(shared))


def _boxes(points: Vector, cell: float = 0.008) -> Vector:
    """The numbers of the cells of space that have points."""
    keys = np.floor(points / cell).astype(np.int64) + 4096
    return np.unique((keys[:, 0] << 26) | (keys[:, 1] << 13) | keys[:, 2])


def rest_height(posed: Vector, tops: Tops, ground: float) -> float:
    """How high the origin stands when the thing, moved straight down, first touches something. `posed`: its points, origin at height 0."""
    return float(max((tops.under(posed) - posed[:, 2]).max(), ground - posed[:, 2].min()))


@dataclass(frozen=True, slots=True)
class Tops:
    """How high points reach, cell by cell of a grid seen from above."""

    corner: Vector  # [2] the first cell's number along x and y
    heights: Vector  # [W, D] m, -inf where no point is

    @classmethod
    def of(cls, points: Vector) -> Self:
        cells = _cells(points)
        corner = cells.min(0) if len(cells) else np.zeros(2, np.int64)
        heights = np.full(np.ptp(cells, axis=0) + 1 if len(cells) else (0, 0), -np.inf)
        np.maximum.at(heights, tuple((cells - corner).T), points[:, 2])
        return cls(corner, heights)

    def under(self, points: Vector) -> Vector:
        """[N] the height at each of `points` [N, 3]."""
        cells = _cells(points) - self.corner
        known = ((cells >= 0) & (cells < self.heights.shape)).all(1)
        found = np.full(len(points), -np.inf)
        found[known] = self.heights[tuple(cells[known].T)]
        return found


def _cells(points: Vector) -> Vector:
    return np.asarray(np.round(points[:, :2] / CELL).astype(np.int64))


def hangs(body: Vector, walls: Vector, ground: float) -> bool:
    """Whether there is air under a thing's foot, so that it is about to fall."""
    low = float(body[:, 2].min())
    foot = body[body[:, 2] < low + CELL]  # its rim may reach over a neighbour that falls too
    return low - rest_height(foot - low * UP, Tops.of(walls), ground) > FALLING


def way_out(body: Vector, walls: Vector, approach: Vector) -> Vector:
    """[3] the level way, back along the hand, on which a thing leaves what hangs over it; nothing if nothing does or no way is left."""
    over = Tops.of(walls[walls[:, 2] > body[:, 2].max()])
    back = -approach * [1, 1, 0]
    for way in np.arange(0.0, 0.25, 0.01)[:, None] * back / max(float(np.linalg.norm(back)), 1e-6):
        if np.isneginf(over.under(body + way)).all():
            return np.asarray(way * 1.2)
    return np.zeros(3)


def reach(hand: Hand, grasp: Grasp, walls: Vector, out: Vector) -> list[Move]:
    """Over everything to the grasp, close, `out` from under what hangs over it, lift."""
    rot, approach = grasp.rot.as_quat(), grasp.rot.apply([0, 0, 1])
    moves = come(hand, grasp.pos, grasp.rot, walls, OPEN)
    aside = approach[2] > -0.9
    moves += [
        Move(grasp.pos, rot, OPEN, tol=0.008, turn_tol=0.08, speed=0.5 if aside else 0.7),
        Move(grasp.pos, rot, CLOSE, at_least=GRIP_STEPS, at_most=GRIP_STEPS),
    ]
    if out.any():
        moves += [Move(grasp.pos + 0.02 * UP, rot, CLOSE, tol=0.012), Move(grasp.pos + 0.02 * UP + out, rot, CLOSE, tol=0.015, speed=0.7)]
    return [*moves, Move(grasp.pos + LIFT * UP + out, rot, CLOSE, tol=0.02)]


def come(hand: Hand, pos: Vector, rot: Rotation, walls: Vector, grip: float, back: float = 0.07) -> list[Move]:
    """To a point `back` behind `pos` along the hand, over whatever stands between."""
    approach, quat = rot.apply([0, 0, 1]), rot.as_quat()
    before = pos - back * approach
    low = min(lowest(rot), lowest(hand.rot))
    high = max(top_between(walls, hand.pos, before, 0.09) + CLEAR - low, before[2])
    moves = []
    if hand.pos[2] < high - 0.02:
        moves.append(Move(np.append(hand.pos[:2], high), hand.rot.as_quat(), grip, tol=0.02, turn_tol=9.0))
    if approach[2] < -0.95:
        moves.append(Move(np.append(pos[:2], high), quat, grip, tol=0.015, turn_tol=0.1))
        return moves
    moves += [
        Move(np.append(before[:2], high), quat, grip, tol=0.04, turn_tol=0.3),
        Move(before, quat, grip, tol=0.012, turn_tol=0.1),
    ]
    return moves


def grasped(scene: Scene, hand: Hand, opening: float, notes: Notes) -> bool:
    """Whether what was to be lifted hangs in the hand."""
    points = scene.solid(notes["held"])
    close = np.linalg.norm(points - hand.pos, axis=1).min() < 0.03
    return bool(opening > 0.002 and close and points[:, 2].min() > notes["low"] + 0.02)


def place(scene: Scene, hand: Hand, notes: Notes) -> tuple[list[Move], Notes]:
    """Moves that carry what is held to its goal, let it go and draw back."""
    thing, goal = notes["held"], tuple(notes["goal"])
    pos, rot = scene.place(thing)
    walls = scene.walls(thing)
    meant = Rotation.from_quat(notes["turn"]) * Rotation.from_quat(notes["upright"])
    way = np.array(notes["way"])
    stows = [stow for stow in goal_poses(scene, goal, Rotation.from_quat(notes["upright"]), walls) if (stow.way == way).all()]
    if not stows:
        return [Move(hand.pos + 0.05 * UP, hand.rot.as_quat(), OPEN, at_least=8)], _without_hold(notes)
    spot = np.array(notes["spot"])
    stow = min(stows, key=lambda stow: (stow.rot * meant.inv()).magnitude() + 20 * np.linalg.norm(stow.pos[:2] - spot) + stow.cost)
    carry = stow.rot * rot.inv()  # turns thing and hand alike
    grip, posed = carry * hand.rot, carry.apply(scene.solid(thing) - pos)
    end = stow.pos
    offset = carry.apply(hand.pos - pos)
    if stow.spare and hits(end + offset, grip, walls, OPENING) > 3:
        end = end + min((hits(end + offset + rise * UP, grip, walls, OPENING), rise) for rise in np.arange(0, stow.spare, 0.01))[1] * UP
    before = end - (0.0 if way[2] else 0.30) * way
    low = min(float(posed[:, 2].min()), offset[2] + lowest(grip))
    radius = float(np.linalg.norm(posed[:, :2], axis=1).max())
    high = max(top_between(walls, pos, before, radius + 0.02) + CLEAR - low, before[2] + 0.04)

    def hand_at(origin: Vector) -> tuple[Vector, Vector]:
        return origin + offset, grip.as_quat()

    moves = []
    if pos[2] < high - 0.02:
        moves.append(Move(np.append(hand.pos[:2], hand.pos[2] + high - pos[2]), hand.rot.as_quat(), CLOSE, tol=0.03, turn_tol=9.0))
    moves.append(Move(*hand_at(np.append(before[:2], high)), CLOSE, tol=0.015, turn_tol=0.15))
    if not way[2]:
        moves.append(Move(*hand_at(before), CLOSE, tol=0.01, turn_tol=0.1, speed=0.7))
    moves.append(Move(*hand_at(end), CLOSE, tol=0.012, turn_tol=0.15, speed=0.7))
    moves += release(*hand_at(end), back=0.08 if way[2] else 0.16)
    return moves, _without_hold(notes)


def release(pos: Vector, quat: Vector, back: float) -> list[Move]:
    """Open, draw back the way the hand points, rise."""
    behind = pos - back * Rotation.from_quat(quat).apply([0, 0, 1])
    return [
        Move(pos, quat, OPEN, at_least=8, at_most=8),
        Move(behind, quat, OPEN, tol=0.02, turn_tol=9.0),
        Move(np.append(behind[:2], max(behind[2], pos[2] + 0.10)), quat, OPEN, tol=0.03, turn_tol=9.0),
    ]


def _without_hold(notes: Notes) -> Notes:
    return {key: value for key, value in notes.items() if key not in ("held", "goal", "low", "turn", "upright", "way", "spot")}
