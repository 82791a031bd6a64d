"""Simulator truth as plain arrays, read from a BDDL problem: for policies whose `needs.privileged` says so.

Nothing here moves the simulation: positions are read as the last step left them, shapes from the compiled model. A moving part is
a body that hangs on a hinge or a slide; everything else of a fixture belongs to the fixture's own body.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mujoco
import numpy as np

from vla_eval.types import Privileged, Vector

POINTS_PER_PIECE = 48  # at most: a convex piece is said by its extreme points in as many directions


def read(problem: Any) -> Privileged:
    """The truth of this moment. `problem` is LIBERO's BDDL problem (a robosuite environment) after a reset."""
    model, data = problem.sim.model._model, problem.sim.data._data
    body_of, parents, shapes, extents = _anatomy(model, tuple((str(name), int(body)) for name, body in problem.obj_body_id.items()))
    parents, holders = dict(parents), {body: name for name, body in body_of.items()}
    regions: dict[str, Vector] = {}
    for name in problem.object_sites_dict:
        site = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, name)
        quat = np.empty(4)
        mujoco.mju_mat2Quat(quat, data.site_xmat[site])
        regions[name] = np.concatenate([data.site_xpos[site], quat[[1, 2, 3, 0]], model.site_size[site]])
        holder = _holder(model, int(model.site_bodyid[site]), holders)
        if holder is not None:
            parents[name] = holder
    goal = [tuple(str(word) for word in conjunct) for conjunct in problem.parsed_problem["goal_state"]]
    return Privileged(
        goal=tuple((predicate.lower(), *names) for predicate, *names in goal),
        holds=tuple(bool(problem._eval_predicate(list(conjunct))) for conjunct in goal),
        poses={name: np.concatenate([data.xpos[body], data.xquat[body][[1, 2, 3, 0]]]) for name, body in body_of.items()},
        joints={name: _joint(model, data, body) for name, body in body_of.items() if _articulated(model, body)},
        regions=regions,
        extents=dict(extents),
        shapes=dict(shapes),
        parents=parents,
    )


@lru_cache(maxsize=2)  # what a compiled model cannot change; a hard reset compiles another
def _anatomy(
    model: mujoco.MjModel, roots: tuple[tuple[str, int], ...]
) -> tuple[dict[str, int], dict[str, str], dict[str, Vector], dict[str, Vector]]:
    """Bodies by name (objects, fixtures, their moving parts), what each part belongs to, each one's shape and half-sizes.

    The arrays are read-only: every observation of an episode has the same ones.
    """
    body_of, parents = dict(roots), dict[str, str]()
    for owner, root in roots:
        for body in range(model.nbody):
            if _articulated(model, body) and _descends(model, body, root):
                part = str(model.body(body).name)
                body_of[part], parents[part] = body, owner
    named = frozenset(body_of.values())
    shapes = {name: _shape(model, body, named) for name, body in body_of.items()}
    extents = {name: _half_sizes(points) for name, points in shapes.items()}
    for array in (*shapes.values(), *extents.values()):
        array.flags.writeable = False
    return body_of, parents, shapes, extents


def _articulated(model: mujoco.MjModel, body: int) -> bool:
    """Whether the body hangs on a hinge or a slide (a free joint is no articulation)."""
    joint = model.body_jntadr[body]
    return bool(joint >= 0 and model.jnt_type[joint] in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE))


def _descends(model: mujoco.MjModel, body: int, root: int) -> bool:
    while body > 0 and body != root:
        body = int(model.body_parentid[body])
    return body == root


def _holder(model: mujoco.MjModel, body: int, part_of: dict[int, str]) -> str | None:
    """The object, fixture or moving part that carries `body`; None for what lies in the arena (a zone on a table)."""
    while body > 0 and body not in part_of:
        body = int(model.body_parentid[body])
    return part_of.get(body)


def _joint(model: mujoco.MjModel, data: mujoco.MjData, body: int) -> Vector:
    """[10] position, axis and anchor in the world, lower and upper end, 1 for a hinge and 0 for a slide."""
    joint = int(model.body_jntadr[body])
    hinge = float(model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_HINGE)
    position = data.qpos[model.jnt_qposadr[joint]]
    return np.concatenate([[position], data.xaxis[joint], data.xanchor[joint], model.jnt_range[joint], [hinge]])


def _shape(model: mujoco.MjModel, root: int, owned: frozenset[int]) -> Vector:
    """[N, 4] extreme points of each convex collision piece in the root body's axes, float32; the last column numbers the piece."""
    pieces: list[Vector] = []
    for geom in range(model.ngeom):
        if not (model.geom_contype[geom] or model.geom_conaffinity[geom]):
            continue
        place = _place_in(model, int(model.geom_bodyid[geom]), root, owned)
        if place is None:
            continue
        points = _rotated(model.geom_quat[geom], _local_points(model, geom)) + model.geom_pos[geom]
        offset, quat = place
        points = _rotated(quat, points) + offset
        pieces.append(np.column_stack([points, np.full(len(points), len(pieces))]))
    return np.concatenate(pieces).astype(np.float32) if pieces else np.zeros((0, 4), np.float32)


def _place_in(model: mujoco.MjModel, body: int, root: int, owned: frozenset[int]) -> tuple[Vector, Vector] | None:
    """Position and quaternion of `body` in `root`'s axes; None if it hangs elsewhere or on a part that has a name of its own."""
    offset, quat = np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0])
    while body != root:
        if body == 0 or body in owned:
            return None
        offset = _rotated(model.body_quat[body], offset[None])[0] + model.body_pos[body]
        product = np.empty(4)
        mujoco.mju_mulQuat(product, model.body_quat[body], quat)
        quat, body = product, int(model.body_parentid[body])
    return offset, quat


def _rotated(quat: Vector, points: Vector) -> Vector:
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, np.asarray(quat, np.float64))
    return np.asarray(points @ matrix.reshape(3, 3).T)


def _local_points(model: mujoco.MjModel, geom: int) -> Vector:
    """[N, 3] points that span the geom's convex hull, in its own axes."""
    size, kind = model.geom_size[geom], model.geom_type[geom]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = int(model.geom_dataid[geom])
        first = int(model.mesh_vertadr[mesh])
        vertices = model.mesh_vert[first : first + int(model.mesh_vertnum[mesh])].astype(np.float64)
        return np.asarray(vertices[np.unique(np.argmax(_DIRECTIONS @ vertices.T, axis=1))])
    if kind in (mujoco.mjtGeom.mjGEOM_CYLINDER, mujoco.mjtGeom.mjGEOM_CAPSULE):
        turn = np.linspace(0, 2 * np.pi, 16, endpoint=False)
        ring = np.column_stack([np.cos(turn) * size[0], np.sin(turn) * size[0]])
        half = size[1] + (size[0] if kind == mujoco.mjtGeom.mjGEOM_CAPSULE else 0.0)
        return np.concatenate([np.column_stack([ring, np.full(16, z)]) for z in (-half, half)])
    if kind in (mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_ELLIPSOID):
        return np.asarray(_DIRECTIONS * (size if kind == mujoco.mjtGeom.mjGEOM_ELLIPSOID else size[0]))
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)
    return np.asarray(corners * size)


def _half_sizes(points: Vector) -> Vector:
    return np.ptp(points[:, :3], axis=0).astype(np.float64) / 2 if len(points) else np.zeros(3)


def _sphere(count: int) -> Vector:
    """[count, 3] directions spread evenly (a Fibonacci lattice), the six axes included."""
    k = np.arange(count - 6) + 0.5
    z, turn = 1 - 2 * k / (count - 6), np.pi * (1 + np.sqrt(5)) * k
    ring = np.sqrt(1 - z**2)
    axes = np.concatenate([np.eye(3), -np.eye(3)])
    return np.concatenate([axes, np.column_stack([ring * np.cos(turn), ring * np.sin(turn), z])])


_DIRECTIONS = _sphere(POINTS_PER_PIECE)
