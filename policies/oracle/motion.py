"""Moves of the hand, and the servo that turns them into the arm's 7-D actions, a few steps ahead at a time.

The arm's controller is a spring and damper (critically damped) towards a goal that each action sets anew, 0.05 m and 0.5 rad at most
from where the hand is. That is simple enough to predict: a chunk is planned against the prediction and corrected at the next observation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgpack  # type: ignore[import-untyped]
import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.types import Vector

STEP = 0.05  # s, one action
STIFFNESS = np.sqrt(150.0)  # 1/s, the controller's natural frequency (kp = 150)
REACH = np.array([0.05, 0.5])  # m and rad that an action of 1 asks for
TURN_LIMIT = 0.5  # of an action: faster turns shake what the hand holds
GAIN, DAMPING = 2.0, 0.06  # puts both poles of the sampled loop near 0.35: no overshoot
EXACT = 0.0125  # m
OPEN, CLOSE = -1.0, 1.0


@dataclass(frozen=True, slots=True)
class Move:
    """Bring the hand somewhere; over when it is there or when `at_most` steps have passed."""

    pos: Vector  # [3] m
    rot: Vector  # [4] x y z w of the hand: z points out of the palm, y along the fingers' slide
    grip: float = OPEN
    speed: float = 1.0  # of an action, the largest component
    tol: float = 0.01  # m
    turn_tol: float = 0.12  # rad
    at_least: int = 0  # steps: time for the fingers
    at_most: int = 0  # steps; 0: as the way's length suggests


@dataclass(frozen=True, slots=True)
class Memory:
    """All that is carried from one chunk to the next."""

    moves: tuple[Move, ...] = ()
    spent: int = 0  # steps in the first of them
    origin: Vector = field(default_factory=lambda: np.zeros(3))  # [3] where that move began
    expected: Vector = field(default_factory=lambda: np.zeros(0))  # [3] where the hand should be now; empty at the start
    velocity: Vector = field(default_factory=lambda: np.zeros(6))  # m/s, rad/s
    lag: Vector = field(default_factory=lambda: np.zeros(3))  # m, integral of what the spring leaves
    notes: dict[str, Any] = field(default_factory=dict)  # the planner's: plain data

    def pack(self) -> bytes:
        moves = [[*m.pos.tolist(), *m.rot.tolist(), m.grip, m.speed, m.tol, m.turn_tol, m.at_least, m.at_most] for m in self.moves]
        arrays = [self.origin.tolist(), self.expected.tolist(), self.velocity.tolist(), self.lag.tolist()]
        return bytes(msgpack.packb([moves, self.spent, *arrays, self.notes]))

    @classmethod
    def unpack(cls, data: bytes | None) -> Self:
        if data is None:
            return cls()
        moves, spent, origin, expected, velocity, lag, notes = msgpack.unpackb(data)
        return cls(
            tuple(_move(numbers) for numbers in moves),
            spent,
            np.array(origin),
            np.array(expected),
            np.array(velocity),
            np.array(lag),
            notes,
        )


def _move(numbers: list[Any]) -> Move:
    return Move(np.array(numbers[:3]), np.array(numbers[3:7]), *numbers[7:])


@dataclass(slots=True)
class Hand:
    """The hand as seen or predicted."""

    pos: Vector  # [3] m
    rot: Rotation
    velocity: Vector  # [6] m/s, rad/s


def timed(moves: list[Move], hand: Hand) -> list[Move]:
    """The same moves, each with a limit that fits its length, so that an obstacle costs no more than it must."""
    limited = []
    for move in moves:
        way, turn = error(hand, move)
        needed = np.abs(way).max() / (0.013 * move.speed) + np.linalg.norm(turn) / 0.06
        limited.append(replace(move, at_most=move.at_most or 14 + int(1.3 * needed)))
        hand = Hand(move.pos, Rotation.from_quat(move.rot), hand.velocity)
    return limited


def error(hand: Hand, move: Move) -> tuple[Vector, Vector]:
    """What is missing: metres and a rotation vector, both in the world frame."""
    return move.pos - hand.pos, (Rotation.from_quat(move.rot) * hand.rot.inv()).as_rotvec()


def arrived(hand: Hand, move: Move, spent: int, seen: bool) -> bool:
    """Whether the move is over. Where it must be exact, only a hand that was `seen` counts, not a predicted one."""
    if spent >= move.at_most:
        return True
    if not seen and move.tol < EXACT:
        return False
    way, turn = error(hand, move)
    return bool(spent >= move.at_least and np.linalg.norm(way) < move.tol and np.linalg.norm(turn) < move.turn_tol)


def action(hand: Hand, move: Move, lag: Vector, origin: Vector) -> Vector:
    """[7] one action towards the move's end, along the straight line from `origin`: back to the line first, however far the end is."""
    way, turn = error(hand, move)
    line = move.pos - origin
    length = float(np.linalg.norm(line))
    along = (way @ line) / length**2 * line if length > 0.02 else way
    forward = _capped((GAIN * along - DAMPING * hand.velocity[:3]) / REACH[0], move.speed)
    shift = forward + GAIN * (way - along + lag) / REACH[0]
    spin = (GAIN * turn - DAMPING * hand.velocity[3:]) / REACH[1]
    return np.concatenate([_capped(shift, 1.0), _capped(spin, TURN_LIMIT), [move.grip]])


def after(hand: Hand, command: Vector) -> Hand:
    """The hand one step later, if nothing is in its way."""
    decay = np.exp(-STIFFNESS * STEP)
    goal = command[:6] * np.repeat(REACH, 3)  # relative to where it is
    slope = hand.velocity - STIFFNESS * goal
    moved = goal + (-goal + slope * STEP) * decay
    velocity = (hand.velocity - STIFFNESS * slope * STEP) * decay
    return Hand(hand.pos + moved[:3], Rotation.from_rotvec(moved[3:]) * hand.rot, velocity)


def _capped(vector: Vector, limit: float) -> Vector:
    largest = float(np.abs(vector).max())
    return vector * (limit / largest) if largest > limit else vector
