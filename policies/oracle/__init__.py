"""A scripted policy on simulator truth: it proves that tasks can be done and that their success is seen.

It knows predicates, joints and geometry, and no task, suite or object by name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.types import ARM_ACTION, ARM_STATE, ActionChunk, BadRequest, Interface, InvalidObservation, Privileged, Request, Vector

from . import arm
from .motion import STEP, Hand, Memory, action, after, arrived, timed
from .plan import decide
from .scene import Scene

HORIZON = 4  # steps until it looks again
NEEDS = Interface(cameras={}, state=ARM_STATE, action=ARM_ACTION, control_hz=20, privileged=True)


@dataclass(frozen=True, slots=True)
class Oracle:
    """A pure function: what it remembers (moves left, velocity, notes) travels in the chunk's memory."""

    name: str = "oracle"
    needs: Interface = NEEDS
    horizon: int = HORIZON

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [_answer(request) for request in batch]


def load(bundle: object = None, **options: object) -> Oracle:
    """The oracle has no weights and no options."""
    if bundle is not None:
        raise BadRequest("The oracle is a script and takes no bundle; leave out --bundle.")
    if options:
        raise BadRequest(f"The oracle has no option {sorted(options)[0]!r}; leave it out.")
    return Oracle()


def _answer(request: Request) -> ActionChunk:
    began = time.perf_counter()
    if "privileged" not in request.observation:
        raise InvalidObservation("The oracle needs the privileged observation, and this environment gave none.")
    state = request.observation["state"]
    memory = Memory.unpack(request.memory)
    pos = np.asarray(state["eef_pos"], float)
    hand = Hand(pos, Rotation.from_rotvec(np.asarray(state["eef_rot"], float)), _velocity(pos, memory))
    memory = _corrected(hand, memory)
    actions, memory = _chunk(request.observation["privileged"], hand, np.asarray(state["gripper"], float), memory)
    return ActionChunk(actions, {"plan": time.perf_counter() - began}, memory.pack())


def _velocity(pos: Vector, memory: Memory) -> Vector:
    """The expected velocity, put right by how far the hand is from where it was expected."""
    velocity = memory.velocity.copy()
    if len(memory.expected):
        velocity[:3] += (pos - memory.expected) / (HORIZON * STEP)
    return velocity


def _corrected(hand: Hand, memory: Memory) -> Memory:
    """The integral grows only near the target: it is for what the spring leaves, not for the way there."""
    if not memory.moves:
        return memory
    missing = memory.moves[0].pos - hand.pos
    lag = np.clip(memory.lag + 0.2 * missing, -0.015, 0.015) if np.linalg.norm(missing) < 0.02 else np.zeros(3)
    return replace(memory, lag=lag)


def _chunk(truth: Privileged, hand: Hand, fingers: Vector, memory: Memory) -> tuple[Vector, Memory]:
    """[HORIZON, 7] actions, planned against the predicted hand."""
    moves, spent, lag, notes = list(memory.moves), memory.spent, memory.lag, memory.notes
    origin = memory.origin
    if "base" not in notes:  # an episode starts with the arm at home, so the hand tells where the base stands
        notes = {**notes, "base": (hand.pos - arm.forward(arm.HOME[None])[0][0]).tolist()}
    actions = []
    scene = Scene(truth)
    opening = float(fingers[0] - fingers[1])
    seen = hand
    for k in range(HORIZON):
        while moves and arrived(hand, moves[0], spent, k == 0) and (len(moves) > 1 or k == 0):
            moves, spent, lag, origin = moves[1:], 0, np.zeros(3), hand.pos
        if not moves:
            planned, notes = decide(scene, seen, opening, notes)
            moves, spent, lag, origin = timed(planned, seen), 0, np.zeros(3), hand.pos
        command = action(hand, moves[0], lag, origin)
        actions.append(command)
        hand, spent = after(hand, command), spent + 1
    return np.array(actions, np.float32), Memory(tuple(moves), spent, origin, hand.pos, hand.velocity, lag, notes)
