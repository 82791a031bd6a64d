"""The certificate: every line passes here, and each broken thing is named by its own line with the right cause."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from vla_eval import doctor
from vla_eval.envs import certificate as certified
from vla_eval.envs import libero as libero_env
from vla_eval.envs import machine
from vla_eval.envs.certificate import ALWAYS, LINES, Line, Recording, recordings
from vla_eval.envs.libero import LiberoEnv
from vla_eval.geometry import axis_angle
from vla_eval.types import BadRequest, EpisodeRecord, Image, Measured, Vector, VlaEvalError

Compiled = Callable[[str, int], LiberoEnv]
TURNS: dict[str, Callable[[Image], Image]] = {
    "upside down": lambda picture: picture[::-1],
    "mirrored left to right": lambda picture: picture[:, ::-1],
    "turned by 180°": lambda picture: picture[::-1, ::-1],
}
QUARTER = Rotation.from_euler("z", 90, degrees=True)
SPATIAL = (*ALWAYS["libero_spatial"], *LINES)


@pytest.fixture
def env(libero: Compiled) -> LiberoEnv:
    return libero("libero_spatial", 5)


@pytest.fixture
def recorded() -> Recording:
    return recordings()["libero_spatial"]


def played(outcome: Any, steps: int, error: str | None = None) -> EpisodeRecord:
    return EpisodeRecord("libero_spatial@openpi/5", 0, 0, outcome, steps, 1, 1, 0.0, 0.0, error)


def drawn_as(env: LiberoEnv, change: Callable[[Image], Image], monkeypatch: pytest.MonkeyPatch) -> None:
    look = env.look
    monkeypatch.setattr(env, "look", lambda cameras: {camera: change(picture) for camera, picture in look(cameras).items()})


def acting_as(env: LiberoEnv, change: Callable[[Vector], Vector], monkeypatch: pytest.MonkeyPatch) -> None:
    step = env.step
    monkeypatch.setattr(env, "step", lambda action: step(change(np.array(action, np.float32))))


def failing(env: LiberoEnv, recorded: Recording, *names: str) -> dict[str, Measured]:
    """What those of the named lines say that do not hold."""
    found = {name: measure(env, recorded) for name, _, measure in SPATIAL if name in names}
    assert set(found) == set(names)
    return {name: told for name, told in found.items() if not told.holds}


def test_the_recordings_have_the_published_step_limits() -> None:
    limits = {suite: (recording.max_steps, recording.played.max_steps) for suite, recording in recordings().items()}
    # examples/libero/main.py of openpi
    published = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    assert limits == {suite: (limit, limit) for suite, limit in published.items()}


@pytest.mark.libero
@pytest.mark.parametrize("line", SPATIAL, ids=lambda line: line[0])
def test_every_line_passes_here(env: LiberoEnv, recorded: Recording, line: Line) -> None:
    assert line[2](env, recorded).holds


@pytest.mark.libero
@pytest.mark.parametrize("turn", TURNS)
def test_a_turned_picture_is_named_by_both_lines_about_pictures_and_by_no_other(
    env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    drawn_as(env, TURNS[turn], monkeypatch)
    found = failing(env, recorded, "settling", "picture fingerprints", "camera orientation", "hand pose")
    assert set(found) == {"picture fingerprints", "camera orientation"}
    assert f"agentview is {turn}" in found["picture fingerprints"].cause
    assert found["camera orientation"].cause == f"agentview: the picture is {turn}; robot0_eye_in_hand: the picture is {turn}"


@pytest.mark.libero
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda picture: picture[..., ::-1], "red and blue exchanged"),
        (lambda picture: (0.75 * picture).astype(np.uint8), "darker by"),
        (lambda picture: np.where(np.indices(picture.shape).sum(axis=0) == 0, 255 - picture, picture), "alike but not the same bytes"),
        (lambda picture: np.roll(picture, 60, axis=1), "another camera"),
    ],
    ids=["bgr", "dark", "one pixel", "shifted"],
)
def test_another_picture_of_the_recorded_renderer_is_told_by_what_is_different(
    env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch, change: Callable[[Image], Image], cause: str
) -> None:
    drawn_as(env, change, monkeypatch)
    told = certified.pictures(env, recorded)
    assert not told.holds
    assert cause in told.cause


@pytest.mark.libero
def test_pictures_of_a_renderer_that_nobody_recorded_are_compared_by_look_and_that_is_said(
    env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "hardware", lambda: {"renderer": "EGL, Some GPU, NVIDIA 1.2.3"})
    rng = np.random.default_rng(0)
    with monkeypatch.context() as noisy:
        drawn_as(env, lambda picture: np.clip(picture + rng.integers(-8, 9, picture.shape), 0, 255).astype(np.uint8), noisy)
        told = certified.pictures(env, recorded)
    assert told.holds
    assert "Some GPU, NVIDIA 1.2.3 is not among the recorded, so no byte was compared" in told.found
    for change in (*TURNS.values(), lambda picture: picture[..., ::-1], lambda picture: (0.75 * picture).astype(np.uint8)):
        with monkeypatch.context() as wrong:
            drawn_as(env, change, wrong)
            assert not certified.pictures(env, recorded).holds


@pytest.mark.libero
def test_a_picture_of_another_moment_is_named_by_the_orientation_line(
    env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reset(seed=1)
    stale = env.look()
    monkeypatch.setattr(env, "look", lambda cameras: {camera: stale[camera] for camera in cameras})
    told = certified.orientation(env, recorded)
    assert not told.holds
    assert "not of the present state" in told.cause


@pytest.mark.libero
def test_an_inverted_gripper_is_named(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    acting_as(env, lambda action: action * [1, 1, 1, 1, 1, 1, -1], monkeypatch)
    told = certified.gripper(env, recorded)
    assert not told.holds
    assert "the sign is inverted: +1 has to close" in told.cause


@pytest.mark.libero
def test_a_gripper_that_does_not_move_is_not_called_inverted(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    acting_as(env, lambda action: action * [1, 1, 1, 1, 1, 1, 0], monkeypatch)
    told = certified.gripper(env, recorded)
    assert not told.holds
    assert "another gripper or latch" in told.cause


def euler(quaternion: Vector) -> Vector:
    return np.asarray(Rotation.from_quat(quaternion).as_euler("xyz"))


def shortened(quaternion: Vector) -> Vector:
    long = axis_angle(quaternion)
    return long * (1 - 2 * np.pi / np.linalg.norm(long))


@pytest.mark.libero
@pytest.mark.parametrize(
    ("formula", "cause"),
    [
        (lambda quaternion: axis_angle(np.roll(quaternion, 1)), "a quaternion is swapped: scalar first"),
        (lambda quaternion: axis_angle((Rotation.from_quat(quaternion) * QUARTER).as_quat()), "another frame or another convention"),
        (euler, "another frame or another convention: Euler angles"),
        (shortened, "the angle is shortened"),
    ],
    ids=["wxyz", "other frame", "euler", "shortened"],
)
def test_a_wrong_rotation_of_the_hand_is_named_by_its_line(
    env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch, formula: Callable[[Vector], Vector], cause: str
) -> None:
    monkeypatch.setattr(libero_env, "axis_angle", formula)
    found = failing(env, recorded, "hand pose", "object poses", "rotation axes")
    assert set(found) == {"hand pose"}
    assert cause in found["hand pose"].cause


@pytest.mark.libero
def test_a_hand_position_in_the_robots_base_is_named(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    observation = env._observation
    base = np.array([-0.66, 0, 0.912])

    def in_base() -> Any:
        told = observation()
        told["state"]["eef_pos"] = told["state"]["eef_pos"] - base
        return told

    monkeypatch.setattr(env, "_observation", in_base)
    told = certified.hand_pose(env, recorded)
    assert not told.holds
    assert told.cause.startswith("eef_pos is not in world axes")


@pytest.mark.libero
@pytest.mark.parametrize("source", ["info", "privileged"])
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda quaternion: np.roll(quaternion, 1), "a quaternion is swapped: scalar first (w x y z)"),
        (lambda quaternion: quaternion * [-1, -1, -1, 1], "the rotation is inverted"),
    ],
    ids=["wxyz", "inverse"],
)
def test_wrong_quaternions_of_objects_are_named_with_where_they_come_from(
    env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch, source: str, change: Callable[[Vector], Vector], cause: str
) -> None:
    def wrong(poses: dict[str, Vector]) -> dict[str, Vector]:
        return {name: np.concatenate([pose[:3], change(pose[3:])]) for name, pose in poses.items()}

    if source == "info":
        info = env._info
        monkeypatch.setattr(env, "_info", lambda: {**info(), "objects": wrong(info()["objects"])})
    else:
        truth = env.privileged
        monkeypatch.setattr(env, "privileged", lambda: {**truth(), "poses": wrong(truth()["poses"])})
    found = failing(env, recorded, "settling", "hand pose", "object poses")
    assert set(found) == {"object poses"}
    assert found["object poses"].cause.startswith(f"{source}: {cause}")
    assert re.match(r"at most \d{2,3}(\.\d)?° off", found["object poses"].found)


@pytest.mark.libero
@pytest.mark.parametrize(
    ("change", "line", "cause"),
    [
        (lambda action: action[[1, 0, 2, 3, 4, 5, 6]], "position axes", "a command in x moves y; a command in y moves x"),
        (lambda action: action * [1, 1, -1, 1, 1, 1, 1], "position axes", "z is inverted"),
        (lambda action: action * [2, 2, 2, 1, 1, 1, 1], "position axes", "times as far as under robosuite 1.4's OSC_POSE"),
        (lambda action: action * [1, 0, 1, 1, 1, 1, 1], "position axes", "a command in y does nothing"),
        (lambda action: action * [1, 1, 1, 1, -1, 1, 1], "rotation axes", "y is inverted"),
        (lambda action: action * [1, 1, 1, 0.5, 0.5, 0.5, 1], "rotation axes", "times as far"),
        (lambda action: action[[0, 1, 2, 5, 3, 4, 6]], "rotation axes", "a command in x turns about y"),
    ],
    ids=["x and y", "z inverted", "doubled", "y dead", "pitch inverted", "halved", "rotated axes"],
)
def test_wrong_axes_directions_and_units_are_named_by_their_line_alone(
    env: LiberoEnv,
    recorded: Recording,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Vector], Vector],
    line: str,
    cause: str,
) -> None:
    acting_as(env, change, monkeypatch)
    found = failing(env, recorded, "gripper", "position axes", "rotation axes")
    assert set(found) == {line}
    assert cause in found[line].cause


@pytest.mark.libero
def test_another_physics_is_named_by_how_the_bowl_settles(env: LiberoEnv, recorded: Recording) -> None:
    gravity = env._model.opt.gravity.copy()
    try:
        env._model.opt.gravity[:] = gravity + np.array([6, 0, 0])
        told = certified.settling(env, recorded)
    finally:
        env._model.opt.gravity[:] = gravity
    assert not told.holds
    assert f"mujoco {version('mujoco')}" in told.cause


@pytest.mark.libero
def test_a_reset_that_forgets_the_latch_or_the_seed_is_named(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_latch() -> None:
        for name, array in env._fresh.items():
            getattr(env._model, name)[:] = array
        env._problem.reset()

    with monkeypatch.context() as patched:
        patched.setattr(env, "_place", forgets_the_latch)
        told = certified.two_resets(env, recorded)
    assert not told.holds
    assert "something survives a reset" in told.cause
    monkeypatch.setattr(libero_env, "_seeded", lambda seed: machine.quiet())
    told = certified.two_resets(env, recorded)
    assert not told.holds
    assert "a generator that the seed does not reach" in told.cause


@pytest.mark.libero
def test_a_state_that_does_not_say_all_that_is_drawn_is_named(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = env.snapshot
    monkeypatch.setattr(env, "snapshot", lambda: np.concatenate([snapshot()[: 1 + env._model.nq], np.zeros(env._model.nv)]))
    told = certified.redrawn(env, recorded)  # without velocities nobody can step back to the substep that a live picture shows
    assert not told.holds
    assert "agentview" in told.found
    assert "a state, as recorded, does not say all that is drawn" in told.cause


@pytest.mark.libero
def test_a_process_that_cannot_draw_is_an_error(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(VlaEvalError, match="ended without pictures: exit status 1"):
        certified.redrawn(env, recorded)


@pytest.mark.libero
def test_a_replay_fails_by_the_start_or_by_what_actions_do(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        acting_as(env, lambda action: action * np.array([0.9] * 6 + [1]), patched)
        told = certified.replayed(env, recorded)
    assert not told.holds
    assert "no success at step 90 of 90; states apart by 0 at the start" in told.found
    assert "the same actions move arm or objects otherwise" in told.cause
    monkeypatch.setattr(env, "_settle_steps", 0)
    told = certified.replayed(env, recorded)
    assert not told.holds
    assert "the start is another one" in told.cause


@pytest.mark.libero
def test_success_before_the_recorded_step_does_not_hold(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_goal", {})  # nothing is asked for
    told = certified.replayed(env, recorded)
    assert not told.holds
    assert told.found.startswith("success at step 1 of 90")
    assert "success is seen too early: other success predicates" in told.cause


@pytest.mark.libero
def test_a_success_that_is_never_seen_is_laid_to_the_predicates(
    env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env._problem, "_eval_predicate", lambda conjunct: False)
    told = certified.replayed(env, recorded)
    assert not told.holds
    assert told.found.startswith("no success at step 90 of 90")
    assert "arm and objects move as recorded, and success is not seen: other success predicates" in told.cause


@pytest.mark.libero
@pytest.mark.parametrize("steps", [50, 230])
def test_a_wrong_step_limit_is_named(env: LiberoEnv, recorded: Recording, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(env, "_max_steps", steps)
    task = recorded.played
    object.__setattr__(task, "max_steps", steps)
    told = certified.no_op(doctor._play(env, task, "zero"), recorded)
    assert not told.holds
    assert told.found == f"failure after {steps} steps"
    assert f"the step limit is {steps} and @openpi's is 220" in told.cause


def test_a_success_of_the_no_op_and_a_failure_of_the_oracle_do_not_hold(recorded: Recording) -> None:
    assert certified.no_op(played("failure", 220), recorded).holds
    assert "although nothing was done" in certified.no_op(played("success", 220), recorded).cause
    assert not certified.no_op(played("success", 220), recorded).holds
    assert certified.oracle(played("success", 91)).holds
    assert not certified.oracle(played("failure", 220)).holds
    with pytest.raises(VlaEvalError, match="GLError: gone"):
        certified.oracle(played("error", 3, "GLError: gone"))
    with pytest.raises(VlaEvalError, match="GLError: gone"):
        certified.no_op(played("error", 3, "GLError: gone"), recorded)


def never(*_: object) -> EpisodeRecord:
    raise AssertionError("nothing is measured before it is asked for")


def test_what_shows_another_mujoco_first_is_measured_whatever_is_asked_for() -> None:
    names = [probe.name for probe in certified.certify(["libero_10"], never)]
    assert names[:5] == [
        "versions",
        "libero_spatial/5: build",
        "libero_spatial/5: settling",
        "libero_object/0: build",
        "libero_object/0: picture fingerprints",
    ]
    assert {name.partition(":")[0] for name in names[5:]} == {"libero_10/2"}
    assert len(set(names)) == len(names)
    for suites in ((), ("libero_spatial", "libero_spatial")):
        names = [probe.name for probe in certified.certify(suites, never)]
        assert len(set(names)) == len(names)
        assert {f"libero_spatial/5: {name}" for name, *_ in SPATIAL} < set(names)
        assert names[-1] == "libero_object/0: picture fingerprints"


def test_a_suite_without_recordings_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(BadRequest, match=r"--suite toy: nothing is recorded .* libero_spatial, libero_object"):
        certified.certify(["libero_goal", "toy"], never)


def test_a_simulator_that_cannot_be_built_is_one_error_a_task_and_versions_are_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LiberoEnv, suite: str, task: int, **_: object) -> None:
        raise RuntimeError(f"no {suite}")

    monkeypatch.setattr(LiberoEnv, "__init__", broken)
    monkeypatch.setattr(machine, "version", lambda name: "1.5.2" if name == "robosuite" else version(name))
    lines = [doctor.measured(probe) for probe in certified.certify((), never)]
    assert [(line.name, line.state) for line in lines] == [
        ("versions", "fail"),
        ("libero_spatial/5: build", "error"),
        ("libero_object/0: build", "error"),
    ]
    assert [line.measured for line in lines[1:]] == ["RuntimeError: no libero_spatial", "RuntimeError: no libero_object"]
    assert {line.cause for line in lines} == {"robosuite 1.5.2 is installed, and scores need 1.4.x; pip install 'robosuite==1.4.0'"}


def test_another_mujoco_is_named_and_measured_nevertheless_but_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda name: "3.17.0" if name == "mujoco" else version(name))
    told = certified.versions()
    assert not told.holds
    assert told.cause == "mujoco 3.17.0 is installed, and scores need 3.2.3 to 3.3.2; pip install 'mujoco==3.3.2'"
    with machine.any_version():
        machine.check_versions()
    with pytest.raises(BadRequest, match=r"mujoco 3\.17\.0"):
        machine.check_versions()


def test_a_package_that_is_not_there_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: None if name == "robosuite" else version(name))
    assert "robosuite missing" in certified.versions().found
    with machine.any_version(), pytest.raises(BadRequest, match="robosuite is not installed"):
        machine.check_versions()
