"""Which poses of the hand the arm can take: forward kinematics of the Panda and a damped least-squares search, many poses at once.

Lengths are the arm's data sheet's (modified Denavit–Hartenberg); the base stands upright and faces x. N poses.
"""

from __future__ import annotations

import numpy as np
from scipy.spatial.transform import Rotation

from vla_eval.types import Vector

LINKS = (  # a, d, alpha of each joint, metres and radians
    (0.0, 0.333, 0.0),
    (0.0, 0.0, -np.pi / 2),
    (0.0, 0.316, np.pi / 2),
    (0.0825, 0.0, np.pi / 2),
    (-0.0825, 0.384, -np.pi / 2),
    (0.0, 0.0, np.pi / 2),
    (0.088, 0.0, np.pi / 2),
)
TOOL = 0.107 + 0.097  # m from the last joint to the grip point
LOWER = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])
UPPER = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
HOME = np.array([0.0, -0.161, 0.0, -2.445, 0.0, 2.227, np.pi / 4])  # where an episode starts, and what the controller leans towards
ROUNDS = 40


def forward(q: Vector) -> tuple[Vector, Vector, Vector]:
    """Grip point [N, 3], hand axes [N, 3, 3] and Jacobian [N, 6, 7] (linear above angular) in the base's frame. `q`: [N, 7] rad."""
    n = len(q)
    pose = np.broadcast_to(np.eye(4), (n, 4, 4))
    axes, anchors = [], []
    for i, (a, d, alpha) in enumerate(LINKS):
        pose = pose @ _link(q[:, i], a, d, alpha)
        axes.append(pose[:, :3, 2])
        anchors.append(pose[:, :3, 3])
    pos = pose[:, :3, 3] + TOOL * pose[:, :3, 2]
    rot = pose[:, :3, :3] @ Rotation.from_euler("z", -np.pi / 4).as_matrix()
    jacobian = np.stack([np.concatenate([np.cross(z, pos - at), z], axis=1) for z, at in zip(axes, anchors, strict=True)], axis=2)
    return pos, rot, jacobian


def shortfall(base: Vector, pos: Vector, rot: Rotation) -> Vector:
    """[N] how far each pose (world frame, `pos` [N, 3]) is out of reach: what is missing, and a little for joints near their ends."""
    q = np.repeat(HOME[None], len(pos), axis=0)
    goal, axes = pos - base, rot.as_matrix()
    away = np.arctan2(goal[:, 1], goal[:, 0])
    q[:, 0] = np.clip(away, -1.5, 1.5)
    missing = np.zeros((len(pos), 6))
    for step in range(ROUNDS + 1):
        at, now, jacobian = forward(q)
        turn = Rotation.from_matrix(axes @ now.transpose(0, 2, 1)).as_rotvec()
        missing = np.concatenate([goal - at, turn], axis=1)
        if step == ROUNDS:
            break
        transposed = jacobian.transpose(0, 2, 1)
        inverse = transposed @ np.linalg.inv(jacobian @ transposed + 0.003 * np.eye(6))
        lean = 0.1 * (HOME - q)
        free = lean - (inverse @ (jacobian @ lean[:, :, None]))[:, :, 0]
        q = np.clip(q + np.clip((inverse @ missing[:, :, None])[:, :, 0], -0.3, 0.3) + free, LOWER + 0.01, UPPER - 0.01)
    room = np.minimum(q - LOWER, UPPER - q).min(axis=1)
    lost = np.linalg.norm(missing[:, :3], axis=1) + 0.2 * np.linalg.norm(missing[:, 3:], axis=1)
    return np.asarray(np.where(lost > 0.004, lost, 0.0) + 0.1 * np.maximum(0.0, 0.15 - room))


def _link(q: Vector, a: float, d: float, alpha: float) -> Vector:
    c, s, ca, sa = np.cos(q), np.sin(q), np.cos(alpha), np.sin(alpha)
    zero, one = np.zeros_like(q), np.ones_like(q)
    rows = [
        [c, -s, zero, a * one],
        [s * ca, c * ca, -sa * one, -d * sa * one],
        [s * sa, c * sa, ca * one, d * ca * one],
        [zero, zero, zero, one],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)
