"""The privileged observation against the simulator it is read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from vla_eval.types import Privileged, Vector

if TYPE_CHECKING:
    from vla_eval.envs.libero import LiberoEnv

Compiled = Callable[[str, int], "LiberoEnv"]
pytestmark = pytest.mark.libero
SOUP, KNOB, POTS = ("libero_object", 0), ("libero_goal", 7), ("libero_10", 8)


def fresh(libero: Compiled, task: tuple[str, int]) -> LiberoEnv:
    env = libero(*task)
    env.reset(seed=3, options={"trial": 1})
    return env


def world(truth: Privileged, name: str) -> Vector:
    pose = truth["poses"][name]
    return np.asarray(Rotation.from_quat(pose[3:]).apply(truth["shapes"][name][:, :3]) + pose[:3])


@pytest.mark.parametrize("task", [SOUP, KNOB, POTS], ids=lambda task: "/".join(map(str, task)))
def test_shapes_cover_what_collides_and_nothing_else(libero: Compiled, task: tuple[str, int]) -> None:
    """The bounding box of each thing's points is that of its collision geoms, as MuJoCo has them."""
    env = fresh(libero, task)
    model, data, truth = env._model, env._data, env.privileged()
    parts = {name: env._model.body(name).id for name in truth["joints"]} | dict(env._problem.obj_body_id)
    assert set(parts) == set(truth["poses"])
    for name, root in parts.items():
        boxes = []
        for geom in range(model.ngeom):
            body = int(model.geom_bodyid[geom])
            while body not in (0, *parts.values()):
                body = int(model.body_parentid[body])
            if body == root and (model.geom_contype[geom] or model.geom_conaffinity[geom]):
                centre, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
                corners = centre + half * np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
                boxes.append(corners @ data.geom_xmat[geom].reshape(3, 3).T + data.geom_xpos[geom])
        if not boxes:
            assert not len(truth["shapes"][name])
            continue
        around, points = np.concatenate(boxes), world(truth, name)
        # a box around a turned mesh is larger than the mesh, so only one side is sharp
        assert (points.min(0) > around.min(0) - 1e-4).all(), name
        assert (points.max(0) < around.max(0) + 1e-4).all(), name
        assert (np.ptp(points, axis=0) > 0.6 * np.ptp(around, axis=0)).all(), name
        np.testing.assert_allclose(2 * truth["extents"][name], np.ptp(truth["shapes"][name][:, :3], axis=0), atol=1e-6)


def test_goal_and_truth_are_the_simulators_own(libero: Compiled) -> None:
    env = fresh(libero, POTS)
    truth, (_, info) = env.privileged(), env.reset(seed=3, options={"trial": 1})
    assert [goal[0] for goal in truth["goal"]] == ["on", "on", "turnon"]
    assert list(truth["holds"]) == list(info["predicates"].values()) == [False, False, True]


def test_poses_are_quaternions_with_w_last_and_follow_the_things(libero: Compiled) -> None:
    env = fresh(libero, SOUP)
    truth, body = env.privileged(), env._problem.obj_body_id["alphabet_soup_1"]
    pose = truth["poses"]["alphabet_soup_1"]
    np.testing.assert_array_equal(pose[:3], env._data.xpos[body])
    np.testing.assert_allclose(Rotation.from_quat(pose[3:]).as_matrix().ravel(), env._data.xmat[body], atol=1e-9)


def test_a_regions_box_and_owner_are_those_of_its_site(libero: Compiled) -> None:
    env = fresh(libero, KNOB)
    truth = env.privileged()
    for name, region in truth["regions"].items():
        site = env._model.site(name).id
        np.testing.assert_array_equal(region[:3], env._data.site_xpos[site])
        np.testing.assert_array_equal(region[7:], env._model.site_size[site])
        np.testing.assert_allclose(Rotation.from_quat(region[3:7]).as_matrix().ravel(), env._data.site_xmat[site], atol=1e-9)
    assert truth["parents"]["wooden_cabinet_1_top_region"] == "wooden_cabinet_1_cabinet_top"
    assert truth["parents"]["wooden_cabinet_1_cabinet_top"] == "wooden_cabinet_1"
    assert truth["parents"]["flat_stove_1_cook_region"] == "flat_stove_1"
    assert "main_table_plate_region" not in truth["parents"]


def test_a_joint_is_said_with_its_state_axis_and_range(libero: Compiled) -> None:
    env = fresh(libero, KNOB)
    joints = env.privileged()["joints"]
    assert set(joints) == {"flat_stove_1_button", *(f"wooden_cabinet_1_cabinet_{level}" for level in ("top", "middle", "bottom"))}
    knob, drawer = joints["flat_stove_1_button"], joints["wooden_cabinet_1_cabinet_top"]
    np.testing.assert_allclose(knob[1:4], [0, 0, 1], atol=1e-9)
    assert (knob[8], knob[9]) == (2.1, 1)
    np.testing.assert_allclose(drawer[1:4], [0, -1, 0], atol=1e-6)  # the cabinet stands turned by 180°
    assert (drawer[7], drawer[8], drawer[9]) == (-0.16, 0.01, 0)


def test_reading_moves_nothing(libero: Compiled) -> None:
    env = fresh(libero, KNOB)
    before, colours = env.snapshot(), env._model.site_rgba.copy()
    acceleration = env._data.qacc.copy()
    env.privileged()
    np.testing.assert_array_equal(env.snapshot(), before)
    np.testing.assert_array_equal(env._data.qacc, acceleration)
    np.testing.assert_array_equal(env._model.site_rgba, colours)
