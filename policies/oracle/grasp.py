"""Where to put two fingers: a search over the collision geometry, for hands that come along given directions.

Hand axes: x across the fingers, y along their slide, z out of the palm. The grip point lies between the pads.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def search(body: Vector, around: Vector, ground: float, hands: list[tuple[Rotation, float]], slack: float = 0.004) -> list[Grasp]:
    """Grasps of `body` (filled points [N, 3]) amid `around` (others' points), best first. `hands`: orientations and what each costs."""
    found: list[Grasp] = []
    middle = (body.min(0) + body.max(0)) / 2
    reach = np.linalg.norm(body - middle, axis=1).max() + BACK
    around = thinned(around[np.linalg.norm(around - middle, axis=1) < reach], 0.006)
    for rot, dear in hands:
        points, walls = rot.inv().apply(body - middle), rot.inv().apply(around - middle) if len(around) else np.zeros((0, 3))
        floor = rot.inv().apply(UP), ground - middle[2]
        found += [Grasp(rot.apply(pos) + middle, rot, cost + dear, width) for pos, cost, width in _slices(points, walls, floor, slack)]
    return sorted(found, key=lambda grasp: grasp.cost)


def distinct(grasps: list[Grasp], count: int) -> list[Grasp]:
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
    near = rot.inv().apply(walls[np.linalg.norm(walls - pos, axis=1) < BACK] - pos)
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


def _slices(points: Vector, walls: Vector, floor: tuple[Vector, float], slack: float) -> list[tuple[Vector, float, float]]:
    """Candidates for one orientation, in the hand's axes: slab by slab across the fingers, level by level along the approach."""
    wanted: list[tuple[float, float, Vector]] = []
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
                    wanted.append((_cost(pos, inside, width, centre, first), width, pos))
    found: list[tuple[Vector, float, float]] = []
    for cost, width, pos in sorted(wanted, key=lambda candidate: candidate[0]):
        spare = (OPENING - width) / 2 - 0.004
        swath = points[np.abs(points[:, 0] - pos[0]) < FINGER]
        nearby = walls[np.abs(walls[:, 0] - pos[0]) < FINGER + slack]
        for shift in (0.0, spare / 2, -spare / 2, spare, -spare):
            aside = pos + np.array([0.0, shift, 0.0])
            if not _blocked(aside, swath, points, nearby, walls, floor, slack):
                found.append((aside, cost + 0.2 * abs(shift), width))
                break
        if len(found) == FOUND:
            break
    return found


def _clusters(y: Vector) -> list[tuple[float, float]]:
    gaps = np.flatnonzero(np.diff(y) > 0.010)
    return [(float(part[0]), float(part[-1])) for part in np.split(y, gaps + 1)]


def _blocked(pos: Vector, swath: Vector, body: Vector, nearby: Vector, walls: Vector, floor: tuple[Vector, float], slack: float) -> bool:
    """Whether the open hand at `pos` would hit the thing itself, its neighbours or the ground."""
    up, height = floor
    tip, palm, wrist = (pos + depth * UP for depth in (TIP, -PALM, -NECK))
    if tip @ up < height + 0.002:
        return True
    if (palm @ up) - np.abs(up[:2]) @ HAND < height or (wrist @ up) - WRIST * np.linalg.norm(up[:2]) < height:
        return True
    for points, extra in ((swath, 0.0), (nearby, slack)):
        if len(points):
            off = np.abs(points[:, 1] - pos[1])
            depth = points[:, 2] - pos[2]
            if ((off > OPENING / 2 - 0.001 - extra) & (off < OPENING / 2 + THICK + extra) & (depth < TIP + extra) & (depth > -PALM)).any():
                return True
    for points in (body, walls):
        if len(points):
            off = points - pos
            off = off[(off[:, 2] < -PALM) & (off[:, 2] > -BACK)]
            palm = (np.abs(off[:, 0]) < HAND[0]) & (np.abs(off[:, 1]) < HAND[1]) & (off[:, 2] > -NECK)
            if (palm | ((off[:, 0] ** 2 + off[:, 1] ** 2 < WRIST**2) & (off[:, 2] <= -NECK))).any():
                return True
    return False


def _cost(pos: Vector, inside: Vector, width: float, centre: Vector, first: float) -> float:
    """What speaks against a grasp, in metres: far from the middle, wide, shallow, little under the pads."""
    depth = pos[2] - first
    across = float(np.ptp(inside[:, 0])) if len(inside) else 0.0
    along = float(np.ptp(inside[:, 2])) if len(inside) else 0.0
    slant = max(_slant(inside, pos[0], side, 0) for side in (1, -1))
    lean = max(_slant(inside, pos[2] - 0.004, side, 2) for side in (1, -1))
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


def _slant(inside: Vector, at: float, side: int, axis: int) -> float:
    """How much the surface under one pad turns away from it: the fingers would slip along."""
    before, after = inside[inside[:, axis] < at - 0.003, 1], inside[inside[:, axis] > at + 0.003, 1]
    if not len(before) or not len(after):
        return 1.0
    return float(abs((side * before).max() - (side * after).max()) / PAD)
