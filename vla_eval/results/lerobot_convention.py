"""What the numbers and pictures of a dataset mean: the conventions we write, and how each is undone. T steps, A action dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..types import BadRequest, Vector

OURS = "vla_eval"  # the key of info.json that holds what only we write


@dataclass(frozen=True, slots=True)
class Convention:
    """What the numbers and pictures of a dataset mean. It is written into info.json, and `replay` undoes it."""

    name: str
    state: Mapping[str, tuple[int, int]]  # group -> start, end of the eight state numbers
    cameras: Mapping[str, str]  # the environment's name -> the dataset's; a camera not named keeps its own
    open_is_one: bool  # gripper: 1 open, 0 closed, instead of the environment's -1 open, +1 close
    mirrored: bool  # pictures as LIBERO checkpoints see them: the upright picture, left and right swapped

    def told(self) -> dict[str, str]:
        """For people who open info.json."""
        return {
            "convention": self.name,
            "gripper": "action: 1 open, 0 closed, (1 - a) / 2 of the simulator's a" if self.open_is_one else "action: -1 open, +1 close",
            "rotation": "axis-angle in radians, 0 to 2 pi, also where groups are called roll, pitch, yaw",
            "pictures": "upright, then mirrored left-right: the renderer's picture turned by 180 degrees" if self.mirrored else "upright",
            "rows": "row t is the observation before action t; settling after a reset is left out",
        }

    def stored(self, actions: Vector) -> Vector:
        """[T, A] float32 as executed -> as stored."""
        out = np.array(actions, np.float32)
        if self.open_is_one:
            a = out[:, -1]
            g = ((1.0 - a.astype(np.float64)) / 2.0).astype(np.float32)
            # The simulator obeys the sign alone: where rounding has eaten it, the nearest number beside one half keeps it.
            side = np.where(a > 0, np.float32(0), np.float32(1))
            out[:, -1] = np.where((g == 0.5) & (a != 0), np.nextafter(np.float32(0.5), side), g)
        return out

    def executed(self, stored: Vector) -> Vector:
        """[T, A] as stored -> float32 for the environment."""
        out = np.array(stored, np.float32)
        if self.open_is_one:
            out[:, -1] = (1.0 - 2.0 * out[:, -1].astype(np.float64)).astype(np.float32)
        return out


_AXES = {"x": (0, 1), "y": (1, 2), "z": (2, 3), "roll": (3, 4), "pitch": (4, 5), "yaw": (5, 6)}
STATE_WIDTH, ACTION_WIDTH = 8, 7  # an arm's; others are stored as one group
STATE_NAMES = ["x", "y", "z", "axis_angle_1", "axis_angle_2", "axis_angle_3", "finger_1", "finger_2"]
ACTION_NAMES = ["x", "y", "z", "axis_angle_1", "axis_angle_2", "axis_angle_3", "gripper"]
ACTION_GROUPS: Mapping[str, tuple[int, int]] = {**_AXES, "gripper": (6, 7)}
CONVENTIONS: Mapping[str, Convention] = {
    convention.name: convention
    for convention in (
        Convention(
            "libero_sim",
            state={**_AXES, "gripper": (6, 8)},
            cameras={"agentview": "image", "robot0_eye_in_hand": "wrist_image"},
            open_is_one=True,
            mirrored=True,
        ),
        Convention("env", state={"eef_pos": (0, 3), "eef_rot": (3, 6), "gripper": (6, 8)}, cameras={}, open_is_one=False, mirrored=False),
    )
}


def known_convention(convention: str) -> Convention:
    if convention not in CONVENTIONS:
        raise BadRequest(f"unknown convention {convention!r}; there are {', '.join(CONVENTIONS)}")
    return CONVENTIONS[convention]


def told_convention(info: Mapping[str, Any]) -> Convention | None:
    """The convention that a dataset's info.json states, if we wrote it."""
    ours = info.get(OURS)
    name = ours.get("convention") if isinstance(ours, dict) else None
    return CONVENTIONS.get(name) if isinstance(name, str) else None
