"""The privileged observation as a scene: where things are, how they are shaped, what they carry. World frame, metres."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from scipy.spatial import ConvexHull, QhullError
from scipy.spatial.transform import Rotation

from vla_eval.types import Privileged, Vector

PITCH = 0.004  # m between the points that fill a shape
UP = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True)
class Scene:
    """One moment. Points are [N, 3]."""

    truth: Privileged

    def place(self, name: str) -> tuple[Vector, Rotation]:
        pose = self.truth["poses"][name]
        return np.asarray(pose[:3], float), Rotation.from_quat(pose[3:])

    def corners(self, name: str) -> Vector:
        """Points that span the thing's collision geometry: cheap, good for heights and widths."""
        pos, rot = self.place(name)
        points = np.asarray(self.truth["shapes"][name][:, :3], float)
        return np.asarray(rot.apply(points) + pos if len(points) else pos[None])

    def solid(self, name: str) -> Vector:
        """Points that fill the thing's collision geometry, so that what is hollow stays hollow."""
        pos, rot = self.place(name)
        shape = np.ascontiguousarray(self.truth["shapes"][name], np.float32)
        return np.asarray(rot.apply(filled(shape.tobytes())) + pos)

    def pieces(self, name: str) -> list[Vector]:
        """The corners of each convex piece."""
        numbers = self.truth["shapes"][name][:, 3]
        corners = self.corners(name)
        return [corners[numbers == piece] for piece in np.unique(numbers)]

    def owner(self, name: str) -> str | None:
        """The object or fixture at the root of a region or part; None for a zone on the table."""
        parents = self.truth["parents"]
        while name in parents:
            name = parents[name]
        return name if name in self.truth["poses"] else None

    def joint_of(self, name: str) -> str | None:
        """The moving part that a region belongs to, or the one that a fixture has."""
        parents, joints = self.truth["parents"], self.truth["joints"]
        if name in joints:
            return name
        if name in self.truth["regions"]:
            holder = parents.get(name)
            return holder if holder in joints else None
        parts = [part for part in joints if self.owner(part) == name]
        return parts[0] if parts else None

    def box(self, region: str) -> tuple[Vector, Vector]:
        """A region's centre and its half-sizes along the world's axes."""
        box = self.truth["regions"][region]
        return np.asarray(box[:3], float), np.abs(Rotation.from_quat(box[3:7]).apply(box[7:]))

    @cached_property
    def ground(self) -> float:
        """The height of the surface that everything stands on."""
        return float(min(self.corners(name)[:, 2].min() for name in self.truth["poses"] if len(self.truth["shapes"][name])))

    def others(self, *names: str) -> list[str]:
        """Everything with a shape, but not these."""
        return [name for name in self.truth["poses"] if name not in names and len(self.truth["shapes"][name])]

    def walls(self, *but: str) -> Vector:
        """Points that fill everything but these."""
        return np.concatenate([np.zeros((0, 3)), *(self.solid(name) for name in self.others(*but))])


def top_between(walls: Vector, start: Vector, end: Vector, reach: float) -> float:
    """How high anything reaches within `reach` of the straight way over the ground from `start` to `end`; -inf if nothing does."""
    near = _distance_to_segment(walls[:, :2], start[:2], end[:2]) < reach
    return float(walls[near, 2].max()) if near.any() else -np.inf


def _distance_to_segment(points: Vector, start: Vector, end: Vector) -> Vector:
    way = end - start
    length = float(way @ way)
    share = np.clip((points - start) @ way / length, 0, 1) if length > 1e-9 else np.zeros(len(points))
    return np.asarray(np.linalg.norm(points - start - share[:, None] * way, axis=1))


def thinned(points: Vector, cell: float = 0.008) -> Vector:
    """One point for each cell that has any."""
    keys = np.floor(points / cell).astype(np.int64) + 4096
    _, first = np.unique((keys[:, 0] << 26) | (keys[:, 1] << 13) | keys[:, 2], return_index=True)
    return points[first]


@cache  # of a few hundred shapes at most: what LIBERO has
def filled(shape: bytes) -> Vector:
    """[N, 3] points on a grid inside the convex pieces of a shape ([M, 4] float32, the last column numbers the piece), corners included."""
    rows = np.frombuffer(shape, np.float32).reshape(-1, 4)
    inside = [np.zeros((0, 3))]
    for piece in np.unique(rows[:, 3]):
        points = np.asarray(rows[rows[:, 3] == piece, :3], float)
        inside.append(points)
        low, high = points.min(0), points.max(0)
        axes = [_inner(low[i], high[i]) for i in range(3)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
        try:
            planes = ConvexHull(points).equations  # [F, 4]
        except QhullError:
            continue  # flat: its corners must do
        inside.append(grid[(grid @ planes[:, :3].T + planes[:, 3] < 1e-6).all(1)])
    return np.concatenate(inside)


def _inner(low: float, high: float) -> Vector:
    """Grid values within (low, high), at least the middle: a thin wall must not fall between two."""
    steps = np.arange(np.ceil(low / PITCH), np.floor(high / PITCH) + 1) * PITCH
    return steps if len(steps) else np.array([(low + high) / 2])
