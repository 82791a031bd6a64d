"""The privileged observation as a scene: where things are, how they are shaped, what they carry. World frame, metres."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.spatial import ConvexHull, QhullError
from scipy.spatial.transform import Rotation

from vla_eval.types import Privileged, Vector

PITCH = 0.004  # m between the points that fill a shape


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
        return np.asarray(rot.apply(filled(self.truth["shapes"][name])) + pos)

    def family(self, name: str) -> list[str]:
        """The thing and its moving parts."""
        return [name, *(part for part, owner in self.truth["parents"].items() if owner == name and part in self.truth["poses"])]

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

    def box(self, region: str) -> tuple[Vector, Rotation, Vector]:
        """A region's centre, axes and half-sizes."""
        box = self.truth["regions"][region]
        return np.asarray(box[:3], float), Rotation.from_quat(box[3:7]), np.asarray(box[7:], float)

    def movable(self, name: str) -> bool:
        return name in self.truth["poses"] and name not in self.truth["parents"] and not self.fixed(name)

    def fixed(self, name: str) -> bool:
        return any(owner == name and part in self.truth["joints"] for part, owner in self.truth["parents"].items())

    @cached_property
    def ground(self) -> float:
        """The height of the surface that everything stands on."""
        return float(min(self.corners(name)[:, 2].min() for name in self.truth["poses"] if len(self.truth["shapes"][name])))

    def others(self, *names: str) -> list[str]:
        """Everything with a shape, but not these."""
        return [name for name in self.truth["poses"] if name not in names and len(self.truth["shapes"][name])]

    def top_between(self, start: Vector, end: Vector, reach: float, but: tuple[str, ...]) -> float:
        """How high anything reaches within `reach` of the straight way over the ground from `start` to `end`."""
        top = self.ground
        for name in self.others(*but):
            points = dense_corners(self.corners(name))
            near = _distance_to_segment(points[:, :2], start[:2], end[:2]) < reach
            if near.any():
                top = max(top, float(points[near, 2].max()))
        return top


def dense_corners(points: Vector) -> Vector:
    """Corners and the middles of a thing's bounding box edges: a long box is not missed between its corners."""
    low, high = points.min(0), points.max(0)
    grid = [np.linspace(low[i], high[i], 5) for i in range(2)]
    x, y = np.meshgrid(*grid)
    cover = np.column_stack([x.ravel(), y.ravel(), np.full(x.size, high[2])])
    return np.concatenate([points, cover])


def _distance_to_segment(points: Vector, start: Vector, end: Vector) -> Vector:
    way = end - start
    length = float(way @ way)
    share = np.clip((points - start) @ way / length, 0, 1) if length > 1e-9 else np.zeros(len(points))
    return np.asarray(np.linalg.norm(points - start - share[:, None] * way, axis=1))


def filled(shape: Vector, pitch: float = PITCH) -> Vector:
    """[N, 3] points on a grid inside the convex pieces of `shape` ([M, 4], the last column numbers the piece), their corners included."""
    inside = []
    for piece in np.unique(shape[:, 3]):
        points = np.asarray(shape[shape[:, 3] == piece, :3], float)
        inside.append(points)
        try:
            planes = ConvexHull(points).equations  # [F, 4]
        except QhullError:
            continue  # flat: its corners must do
        low, high = np.ceil(points.min(0) / pitch), np.floor(points.max(0) / pitch)
        axes = [np.arange(low[i], high[i] + 1) * pitch for i in range(3)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
        inside.append(grid[(grid @ planes[:, :3].T + planes[:, 3] < 1e-6).all(1)])
    return np.concatenate(inside) if inside else np.zeros((0, 3))
