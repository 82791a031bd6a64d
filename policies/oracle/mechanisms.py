"""What hangs on a joint: drawers and doors opened and closed, knobs turned; and what is pushed along because no hand can lift it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.types import Vector

from .arm import shortfall
from .grasp import FINGER, OPENING, THICK, TIP, Grasp, distinct, from_above, from_aside, hits, pointing, search
from .handling import GRIP_STEPS, UNREACHED, come, release
from .motion import CLOSE, OPEN, Hand, Move
from .scene import UP, Scene

BEYOND = (0.02, 0.15)  # m and rad that a push goes past the end of a slide and of a hinge: it must be felt


def open_part(scene: Scene, hand: Hand, part: str, attempt: int, base: Vector) -> list[Move] | None:
    """Take the handle and lead it along the joint to its far end."""
    joint = Joint(scene, part)
    handle, rest = joint.handle()
    away = joint.outward(handle.mean(0))
    around = np.concatenate([scene.walls(part), rest])
    azimuth = np.arctan2(-away[1], -away[0])
    hands = from_above() + from_aside(azimuth + np.deg2rad([0, 30, -30]), np.deg2rad([40, 60, 75, 90]))
    grasps = _reachable(search(handle, around, scene.ground, hands, slack=0.002), joint, joint.far, base)
    if not grasps:
        return None
    grasp = grasps[attempt % len(grasps)]
    return [*_take(hand, grasp, scene), *_lead(joint, grasp, joint.far)]


def turn_part(scene: Scene, hand: Hand, part: str, on: bool, attempt: int, base: Vector) -> list[Move] | None:
    """Straddle a knob and turn it."""
    joint = Joint(scene, part)
    points = scene.solid(part)
    knob = points[points[:, 2] > points[:, 2].max() - 0.035]
    around = np.concatenate([scene.walls(part), points[points[:, 2] <= points[:, 2].max() - 0.035]])
    goal = float(joint.near + 0.45 * (joint.far - joint.near) if on else joint.near - 0.15 * np.sign(joint.far))
    grasps = _reachable(search(knob, around, scene.ground, from_above(), slack=0.002), joint, goal, base)
    if not grasps:
        return None
    grasp = grasps[attempt % len(grasps)]
    return [*_take(hand, grasp, scene), *_lead(joint, grasp, goal)]


def close_part(scene: Scene, hand: Hand, part: str, attempt: int) -> list[Move]:
    """Push with closed fingers from outside until the joint is home."""
    joint = Joint(scene, part)
    handle, _ = joint.handle()
    point = (handle.min(0) + handle.max(0)) / 2
    away = joint.outward(point)
    if joint.hinge:
        rot = pointing(-UP, np.cross(UP, away))
        grip = np.append(point[:2] + 0.024 * away[:2], scene.corners(part)[:, 2].max() - 0.02)
    else:
        tilt = np.deg2rad((60, 75, 45)[attempt % 3])
        approach = -away * np.sin(tilt) - UP * np.cos(tilt)
        rot = pointing(approach, np.cross(UP, away))
        outer = point + ((handle - point) @ away).max() * away
        grip = outer - approach * (TIP + 0.004) + 0.004 * UP
    home = joint.near - BEYOND[joint.hinge] * np.sign(joint.far - joint.near)
    moves = come(hand, grip + 0.03 * away, rot, scene.walls(), CLOSE, back=0.05)
    moves.append(Move(grip + 0.02 * away, rot.as_quat(), CLOSE, tol=0.012, turn_tol=0.12))
    grasp = Grasp(grip, rot, 0.0, 0.0)
    moves += _along(joint, grasp, home, CLOSE, turning=False)
    pos, quat = moves[-1].pos, moves[-1].rot
    back = pos + 0.05 * joint.outward(pos)
    return [*moves, Move(back, quat, CLOSE, tol=0.03, turn_tol=9.0), Move(back + 0.1 * UP, quat, CLOSE, tol=0.03, turn_tol=9.0)]


def push(scene: Scene, hand: Hand, thing: str, goal: Vector) -> list[Move]:
    """Shove a thing over the table with open fingers, two points that it cannot roll off. `goal` [2]: where its origin should come."""
    pos, _ = scene.place(thing)
    points = scene.solid(thing) - pos
    way = np.append(goal - pos[:2], 0.0)
    ahead = way / max(float(np.linalg.norm(way)), 1e-6)
    aside = np.cross(UP, ahead)
    touched = np.abs(np.abs(points @ aside) - (OPENING + THICK) / 2) < FINGER
    reach = float(-(points[touched] @ ahead).min()) + FINGER
    rot = pointing(-UP, aside)
    start = np.append(pos[:2], scene.ground + TIP + 0.004) - (reach + 0.03) * ahead
    end = start + way + 0.03 * ahead
    if sum(hits(start + rise * UP, rot, scene.walls(thing), OPENING) for rise in (0.0, 0.08, 0.16)) > 3:
        return _tow(scene, hand, thing, way)
    return [
        *come(hand, start, rot, scene.walls(), OPEN),
        Move(start, rot.as_quat(), OPEN, tol=0.012, turn_tol=0.1, speed=0.6),
        Move(end, rot.as_quat(), OPEN, tol=0.006, turn_tol=0.3, speed=0.5),
        Move(end - 0.03 * ahead, rot.as_quat(), OPEN, tol=0.015, turn_tol=9.0),
        Move(end - 0.03 * ahead + 0.08 * UP, rot.as_quat(), OPEN, tol=0.03, turn_tol=9.0),
    ]


def _tow(scene: Scene, hand: Hand, thing: str, way: Vector) -> list[Move]:
    """Press closed fingers into a shallow thing just behind its rim and drag it along: where nothing fits behind it."""
    pos, _ = scene.place(thing)
    points = scene.solid(thing) - pos
    ahead = way / max(float(np.linalg.norm(way)), 1e-6)
    ray = np.linalg.norm(points - (points @ ahead)[:, None] * ahead - points[:, 2:] * UP, axis=1) < 0.008
    reach, tops = points[ray] @ ahead, points[ray, 2]
    floor = float(tops[np.abs(reach) < 0.3 * reach.max()].max())
    rim = float(reach[(reach > 0) & (tops > floor + 0.006)].min(initial=reach.max()))
    rot = pointing(-UP, np.cross(UP, ahead))
    start = pos + (rim - FINGER - 0.008) * ahead + (floor + TIP) * UP
    end = start + way + 0.008 * ahead - 0.008 * UP
    quat = rot.as_quat()
    return [
        *come(hand, start, rot, scene.walls(), CLOSE),
        Move(start, quat, CLOSE, tol=0.006, turn_tol=0.1, speed=0.6),
        Move(start - 0.008 * UP, quat, CLOSE, at_least=3, at_most=4),
        Move(end, quat, CLOSE, tol=0.008, turn_tol=0.3, speed=0.4),
        Move(end + 0.1 * UP, quat, CLOSE, tol=0.03, turn_tol=9.0),
    ]


class Joint:
    """One articulated part: which way it opens, and how a hand that holds it moves along."""

    def __init__(self, scene: Scene, part: str) -> None:
        numbers = np.asarray(scene.truth["joints"][part], float)
        self.part, self.scene = part, scene
        self.q, self.axis, self.anchor, self.hinge = float(numbers[0]), numbers[1:4], numbers[4:7], bool(numbers[9])
        ends = sorted(numbers[7:9].tolist(), key=abs)
        self.near, self.far = ends  # closed or off at the near end, which is about 0

    def outward(self, point: Vector) -> Vector:
        """The unit direction in which `point` moves when the part opens."""
        way = np.cross(self.axis, point - self.anchor) if self.hinge else self.axis
        return np.asarray(np.sign(self.far - self.near) * way / np.linalg.norm(way))

    def moved(self, pos: Vector, rot: Rotation, by: float) -> tuple[Vector, Rotation]:
        """A pose carried along by the joint."""
        if not self.hinge:
            return pos + by * self.axis, rot
        turn = Rotation.from_rotvec(by * self.axis)
        return self.anchor + turn.apply(pos - self.anchor), turn * rot

    def _lever(self, points: Vector) -> Vector:
        """The unit direction from the hinge along a door's breadth."""
        level = points - self.anchor
        level = level - (level @ self.axis)[:, None] * self.axis
        _, _, directions = np.linalg.svd(level - level.mean(0), full_matrices=False)
        return np.asarray(directions[0] * np.sign(directions[0] @ level.mean(0)))

    def handle(self) -> tuple[Vector, Vector]:
        """What sticks out furthest the way the part opens, and the rest of it."""
        points = self.scene.solid(self.part)
        away = self.outward(self.anchor + self._lever(points)) if self.hinge else self.outward(points.mean(0))
        out = (points - self.anchor) @ away > ((points - self.anchor) @ away).max() - 0.019
        return points[out], points[~out]


def _reachable(grasps: Iterable[Grasp], joint: Joint, goal: float, base: Vector) -> list[Grasp]:
    """The best few grasps, the arm's reach at both ends of the motion counted in."""
    some = distinct(grasps, 16)
    if not some:
        return []
    ends = [joint.moved(grasp.pos, grasp.rot, goal - joint.q) for grasp in some]
    here = shortfall(base, np.array([grasp.pos for grasp in some]), Rotation.concatenate([grasp.rot for grasp in some]))
    there = shortfall(base, np.array([pos for pos, _ in ends]), Rotation.concatenate([rot for _, rot in ends]))
    costs = [grasp.cost + UNREACHED * float(a + b) for grasp, a, b in zip(some, here, there, strict=True)]
    return [some[i] for i in np.argsort(costs)[:4]]


def _take(hand: Hand, grasp: Grasp, scene: Scene) -> list[Move]:
    quat = grasp.rot.as_quat()
    return [
        *come(hand, grasp.pos, grasp.rot, scene.walls(), OPEN),
        Move(grasp.pos, quat, OPEN, tol=0.006, turn_tol=0.08, speed=0.6),
        Move(grasp.pos, quat, CLOSE, at_least=GRIP_STEPS, at_most=GRIP_STEPS),
    ]


def _lead(joint: Joint, grasp: Grasp, goal: float) -> list[Move]:
    moves = _along(joint, grasp, goal, CLOSE, turning=True)
    return [*moves, *release(moves[-1].pos, moves[-1].rot, back=0.08)]


def _along(joint: Joint, grasp: Grasp, goal: float, grip: float, turning: bool) -> list[Move]:
    """Waypoints of the hand while the joint goes from where it is to `goal`."""
    way = goal - joint.q
    count = max(1, round(abs(way) / 0.2)) if joint.hinge else 1
    moves = []
    for share in np.linspace(0, 1, count + 1)[1:]:
        pos, rot = joint.moved(grasp.pos, grasp.rot, share * way)
        last = share == 1
        moves.append(
            Move(
                pos,
                (rot if turning else grasp.rot).as_quat(),
                grip,
                tol=0.008 if last else 0.03,
                turn_tol=0.1 if last else 0.3,
                at_most=60 if last else 25,
            )
        )
    return moves
