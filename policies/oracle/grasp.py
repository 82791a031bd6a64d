"""Where to put two fingers: a search over the collision geometry, for hands that come along given directions.

Hand axes: x across the fingers, y along their slide, z out of the palm. The grip point lies between the pads.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.types import Vector

from .scene import UP, thinned

OPENING = 0.078  # m between the open pads
PAD = 0.009  # m, half a pad's width
FINGER = 0.012  # m, half a finger's width
THICK = 0.022  # m, a finger with its pad, along the slide
TIP = 0.010  # m from the grip point to the fingertips
PALM = 0.032  # m from the grip point back to the palm
HAND = np.array([0.034, 0.105])  # m, half-sizes of the palm across and along the slide
NECK = 0.1  # m from the grip point back to where the wrist begins
WRIST = 0.055  # m, its radius
BACK = 0.24  # m from the grip point that are looked at
FOUND = 12  # grasps are enough for one orientation


@dataclass(frozen=True, slots=True)
class Grasp:
    """A pose of the hand that closes on something, and how good it looks (less is better)."""

    pos: Vector
    rot: Rotation
    cost: float
    width: float


def pointing(approach: Vector, slide: Vector) -> Rotation:
    """The hand that points along `approach` and slides its fingers along `slide`, whichever way round is nearer to how it hangs at home."""
    z = approach / np.linalg.norm(approach)
    y = slide - (slide @ z) * z
    y = y / np.linalg.norm(y)
    hands = [Rotation.from_matrix(np.column_stack([np.cross(side * y, z), side * y, z])) for side in (1, -1)]
    return min(hands, key=lambda rot: (rot * HOME.inv()).magnitude())


HOME = Rotation.from_matrix(np.diag([1.0, -1.0, -1.0]))  # pointing down, fingers along the world's y


def downward(yaw: float) -> Rotation:
    return Rotation.from_euler("z", yaw) * HOME


def from_above() -> list[tuple[Rotation, float]]:
    """Hands that point down, with what each costs: turning takes time."""
    return [(downward(yaw), 0.008 * abs(yaw)) for yaw in np.deg2rad(np.arange(-90, 90, 15))]


def from_aside(azimuths: Vector, tilts: Vector) -> list[tuple[Rotation, float]]:
    """Hands that point outward and down by `tilts` from the vertical: fingers level, or in the upright plane."""
    hands = []
    for azimuth in azimuths:
        for tilt in tilts:
            approach = np.array([np.cos(azimuth) * np.sin(tilt), np.sin(azimuth) * np.sin(tilt), -np.cos(tilt)])
            level = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
            for slide in (level, np.cross(level, approach)):
                rot = pointing(approach, slide)
                hands.append((rot, 0.008 * float((rot * HOME.inv()).magnitude())))
    return hands


def search(body: Vector, around: Vector, ground: float, hands: list[tuple[Rotation, float]], slack: float = 0.004) -> Iterator[Grasp]:
    """Grasps of `body` (filled points [N, 3]) amid `around` (others' points), best first. `hands`: orientations and what each costs.

    A candidate is tried only when its turn comes, so that whoever wants a few pays for a few.
    """
    middle = (body.min(0) + body.max(0)) / 2
    reach = np.linalg.norm(body - middle, axis=1).max() + BACK
    around = thinned(around[np.linalg.norm(around - middle, axis=1) < reach], 0.006)
    queue: list[tuple[float, int, _View | Grasp, Vector, float]] = []  # a view's candidate becomes a grasp if there is room
    for rot, dear in hands:
        floor = rot.inv().apply(UP), float(ground - middle[2])
        view = _View(rot, rot.inv().apply(body - middle), rot.inv().apply(around - middle), floor, slack)
        queue += [(cost + dear, len(queue) + i, view, pos, width) for i, (cost, pos, width) in enumerate(_slices(view.body))]
    heapq.heapify(queue)
    order = len(queue)
    while queue:
        cost, _, found, pos, width = heapq.heappop(queue)
        if isinstance(found, Grasp):
            yield found
        elif found.grasps < FOUND and (shift := found.room(pos, width)) is not None:
            found.grasps += 1
            cost, order = cost + 0.2 * abs(shift), order + 1
            grasp = Grasp(found.rot.apply(pos + np.array([0.0, shift, 0.0])) + middle, found.rot, cost, width)
            heapq.heappush(queue, (cost, order, grasp, pos, width))


def distinct(grasps: Iterable[Grasp], count: int) -> list[Grasp]:
    """The best grasp, then the best that is really another one, and so on."""
    kept: list[Grasp] = []
    for grasp in grasps:
        if all(np.linalg.norm(grasp.pos - other.pos) > 0.015 or (grasp.rot.inv() * other.rot).magnitude() > 0.4 for other in kept):
            kept.append(grasp)
        if len(kept) == count:
            break
    return kept


def hits(pos: Vector, rot: Rotation, walls: Vector, width: float, slack: float = 0.003) -> int:
    """How many points of `walls` lie inside a hand at `pos` whose pads are `width` apart."""
    off = walls - pos
    near = off[np.einsum("ni,ni->n", off, off) < BACK**2] @ rot.as_matrix()
    x, y, z = np.abs(near[:, 0]), np.abs(near[:, 1]), near[:, 2]
    fingers = (x < FINGER + slack) & (y < width / 2 + THICK + slack) & (z < TIP) & (z >= -PALM)
    palm = (x < HAND[0] + slack) & (y < HAND[1] + slack) & (z < -PALM + slack) & (z > -NECK)
    wrist = (x**2 + y**2 < (WRIST + slack) ** 2) & (z <= -NECK)
    return int((fingers | palm | wrist).sum())


def lowest(rot: Rotation) -> float:
    """How far below its grip point the hand reaches: a negative number."""
    palm = np.array([[x * HAND[0], y * HAND[1], -depth] for x in (1, -1) for y in (1, -1) for depth in (PALM, NECK)])
    wrist = -BACK * rot.apply([0, 0, 1])[2] - WRIST * np.linalg.norm(rot.inv().apply(UP)[:2])
    return float(min(rot.apply(palm)[:, 2].min(), rot.apply([0, 0, TIP])[2], wrist, 0.0))


def _slices(points: Vector) -> Iterator[tuple[float, Vector, float]]:
    """Cost, position and width of candidates, in the hand's axes: slab by slab across the fingers, level by level along the approach."""
    low, high = points.min(0), points.max(0)
    centre = points.mean(0)
    for x in np.unique(np.append(np.arange(low[0] + 0.004, high[0] - 0.003, 0.008), (low[0] + high[0]) / 2)):
        slab = points[np.abs(points[:, 0] - x) < PAD]
        if len(slab) < 4:
            continue
        first = slab[:, 2].min()  # the end that faces the palm: z points away from it
        for z in np.arange(first + 0.004, min(first + PALM, high[2] + 0.004), 0.005):
            band = slab[(slab[:, 2] > z - 0.012) & (slab[:, 2] < z + 0.005)]
            if len(band) < 4:
                continue
            for left, right in _clusters(np.sort(band[:, 1])):
                width = right - left
                if width < OPENING - 0.008:
                    inside = band[(band[:, 1] >= left - 1e-6) & (band[:, 1] <= right + 1e-6)]
                    pos = np.array([x, (left + right) / 2, z])
                    yield _cost(pos, inside, width, centre, first), pos, width


@dataclass(slots=True)
class _View:
    """The thing and its surroundings as one orientation of the hand sees them: points [N, 3] in the hand's axes."""

    rot: Rotation
    body: Vector
    walls: Vector
    floor: tuple[Vector, float]  # which way is up, and how high the ground is
    slack: float
    grasps: int = 0  # found so far
    columns: dict[float, _Column] = field(default_factory=dict)  # by x

    def room(self, pos: Vector, width: float) -> float | None:
        """How far the open hand must be shifted along its slide to fit around what is `width` wide at `pos`; None if it fits nowhere."""
        if pos[0] not in self.columns:
            self.columns[pos[0]] = _Column.at(pos[0], self.body, self.walls, self.slack)
        spare = (OPENING - width) / 2 - 0.004
        shifts = np.array([0.0, spare / 2, -spare / 2, spare, -spare])
        free = ~_blocked(pos + shifts[:, None] * [0.0, 1.0, 0.0], self.columns[pos[0]], self.floor, self.slack)
        return float(shifts[free.argmax()]) if free.any() else None


@dataclass(frozen=True, slots=True)
class _Column:
    """What a hand at some x can hit wherever it is along its other axes. Points are [N, 3], of which x is relative to the hand."""

    own: Vector  # of the thing, beside a finger
    near: Vector  # of its neighbours, beside a finger
    above: Vector  # of both, beside the palm and the wrist

    @classmethod
    def at(cls, x: float, body: Vector, walls: Vector, slack: float) -> Self:
        body, walls = body - [x, 0.0, 0.0], walls - [x, 0.0, 0.0]
        every = np.concatenate([body, walls])
        return cls(
            body[np.abs(body[:, 0]) < FINGER],
            walls[np.abs(walls[:, 0]) < FINGER + slack],
            every[np.abs(every[:, 0]) < max(HAND[0], WRIST)],
        )


def _clusters(y: Vector) -> list[tuple[float, float]]:
    gaps = np.flatnonzero(np.diff(y) > 0.010)
    return [(float(part[0]), float(part[-1])) for part in np.split(y, gaps + 1)]


def _blocked(pos: Vector, column: _Column, floor: tuple[Vector, float], slack: float) -> Vector:
    """[K] whether the open hand at each `pos` [K, 3] would hit the thing itself, its neighbours or the ground; only their y differ."""
    up, height = floor
    rise, z, y = pos @ up, pos[0, 2], pos[:, 1, None]
    blocked: Vector = rise + TIP * up[2] < height + 0.002
    blocked |= rise - PALM * up[2] - np.abs(up[:2]) @ HAND < height
    blocked |= rise - NECK * up[2] - WRIST * np.linalg.norm(up[:2]) < height
    if blocked.all():
        return blocked
    for points, extra in ((column.own, 0.0), (column.near, slack)):
        depth = points[:, 2] - z
        off = np.abs(points[(depth < TIP + extra) & (depth > -PALM), 1] - y)
        blocked |= ((off > OPENING / 2 - 0.001 - extra) & (off < OPENING / 2 + THICK + extra)).any(1)
    depth = column.above[:, 2] - z
    palm = column.above[(depth < -PALM) & (depth > -NECK) & (np.abs(column.above[:, 0]) < HAND[0])]
    blocked |= (np.abs(palm[:, 1] - y) < HAND[1]).any(1)
    wrist = column.above[(depth <= -NECK) & (depth > -BACK)]
    blocked |= (wrist[:, 0] ** 2 + (wrist[:, 1] - y) ** 2 < WRIST**2).any(1)
    return blocked


def _cost(pos: Vector, inside: Vector, width: float, centre: Vector, first: float) -> float:
    """What speaks against a grasp, in metres: far from the middle, wide, shallow, little under the pads."""
    depth = pos[2] - first
    across = float(np.ptp(inside[:, 0])) if len(inside) else 0.0
    along = float(np.ptp(inside[:, 2])) if len(inside) else 0.0
    slant, lean = _slant(inside, pos[0], 0), _slant(inside, pos[2] - 0.004, 2)
    return float(
        abs(pos[0] - centre[0])
        + 0.08 * max(0.0, slant - 0.3)
        + 0.04 * max(0.0, lean - 0.5)
        + 0.3 * abs(pos[1] - centre[1])
        + max(0.0, width - 0.066)
        + 2.5 * max(0.0, 0.02 - depth)
        + 2.0 * max(0.0, 0.012 - across)
        + 2.0 * max(0.0, 0.012 - along)
    )


def _slant(inside: Vector, at: float, axis: int) -> float:
    """How much the surface under either pad turns away from it: the fingers would slip along."""
    before, after = inside[inside[:, axis] < at - 0.003, 1], inside[inside[:, axis] > at + 0.003, 1]
    if not len(before) or not len(after):
        return 1.0
    return float(max(abs(before.max() - after.max()), abs(before.min() - after.min())) / PAD)
