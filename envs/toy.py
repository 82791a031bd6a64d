"""A hand on a plane with blocks to carry: the whole loop without a simulator. H W pixels, K blocks."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_eval.types import (
    ARM_ACTION,
    ARM_STATE,
    BadRequest,
    Image,
    Info,
    Interface,
    InvalidAction,
    Observation,
    Privileged,
    Vector,
)

CAMERAS = ("agentview", "robot0_eye_in_hand")
CONTROL_HZ = 20
STEP_M = 0.05  # of a full action, as LIBERO's controller moves
REACH_M, HEIGHT_M = 0.5, 0.4  # the hand's workspace: ± in x and y, 0 … in z
OPEN_M, FINGER_STEP_M = 0.04, 0.01  # a finger's travel; four steps from open to closed
GRASP_M = 0.03  # the hand holds a block whose centre is as near as this while it closes
BLOCK_M = 0.02  # half a block's edge
FALL_M = 0.1  # a released block falls this much each step
LIFTED_M = 0.15
PAD_M = 0.06  # half the pad's edge
ROWS = 50  # stored starts of each task
COLORS: Mapping[str, tuple[int, int, int]] = {"red_block": (200, 40, 40), "blue_block": (40, 60, 200)}
GOALS: Sequence[tuple[str, tuple[tuple[str, ...], ...]]] = (
    ("move the hand over the pad", (("over", "hand", "pad"),)),
    ("lift the red block", (("lifted", "red_block"),)),
    ("put the red block on the pad", (("on", "red_block", "pad"),)),
    ("put both blocks on the pad", (("on", "red_block", "pad"), ("on", "blue_block", "pad"))),
)


class ToyEnv(gymnasium.Env[Observation, Vector]):
    """A hand that carries blocks, with LIBERO's observations, actions and extras.

    `start="rows"`: trial k begins as row k says; "placement": everything is placed from the seed. The pad's place, as LIBERO's fixtures',
    comes from the seed in both. `pictures="on_request"` leaves images out of observation and space, and `look` draws them.
    `scene="mujoco"` has MuJoCo draw the same scene. Raises BadRequest for a task or number that does not exist.
    """

    metadata: dict[str, Any] = {"render_modes": [], "render_fps": CONTROL_HZ}  # noqa: RUF012 - gymnasium declares it so

    def __init__(
        self,
        task: int = 2,
        *,
        max_steps: int = 80,
        start: Literal["rows", "placement"] = "rows",
        size: int = 64,
        pictures: Literal["always", "on_request"] = "always",
        scene: Literal["numpy", "mujoco"] = "numpy",
    ) -> None:
        if not 0 <= task < len(GOALS):
            raise BadRequest(f"the toy has tasks 0 to {len(GOALS) - 1}, not {task}")
        if max_steps < 1 or not 8 <= size <= 1024:
            raise BadRequest(f"max_steps is {max_steps} and size {size}; at least 1, and 8 to 1024")
        for name, word, words in (
            ("start", start, ("rows", "placement")),
            ("pictures", pictures, ("always", "on_request")),
            ("scene", scene, ("numpy", "mujoco")),
        ):
            if word not in words:
                raise BadRequest(f"{name} is {word!r}; {' or '.join(words)}")
        self._task, self._max_steps, self._size = task, max_steps, size
        self._rows = rows(task) if start == "rows" else None
        self._draws, self._scene = pictures == "always", scene
        self._instruction, self._goal = GOALS[task]
        self._blocks = list(COLORS)
        self._drawer: Any = None
        self._may_step = False
        self._hand, self._finger, self._steps = np.zeros(3), OPEN_M, 0
        self._closing = False
        self._places = np.zeros((len(self._blocks), 3))  # centres, m
        self._held = -1
        self._pad = np.zeros(2)
        interface = Interface(cameras=dict.fromkeys(CAMERAS, (size, size)), state=ARM_STATE, action=ARM_ACTION, control_hz=CONTROL_HZ)
        self.metadata = {**type(self).metadata, "interface": interface}
        self.action_space = spaces.Box(-1.0, 1.0, (len(ARM_ACTION),), np.float32)
        self.observation_space: Any = _space(self._instruction, size if self._draws else None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin trial `options={"trial": k}` (0 without). Raises BadRequest for a trial that does not exist."""
        super().reset(seed=seed)
        trial = (options or {}).get("trial", 0)
        if trial < 0 or (self._rows is not None and trial >= len(self._rows)):
            raise BadRequest(f"trial is {trial}; this task has {ROWS} stored starts")
        draw = np.random.default_rng(self.np_random.integers(2**63) if seed is None else seed)
        self._pad = draw.uniform(-0.05, 0.05, 2)
        row = _placement(draw) if self._rows is None else self._rows[trial]
        self._hand, self._places = row[:3].copy(), row[3:].reshape(-1, 3).copy()
        self._finger, self._closing, self._held, self._steps, self._may_step = OPEN_M / 2, False, -1, 0, True
        return self._observation(), {**self._info(), "fixtures": {"pad": np.array([*self._pad, 0, 1, 0, 0, 0], np.float64)}}

    def step(self, action: Vector) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move the hand, then the fingers, then what it holds or let go. Rotations do nothing."""
        action = np.asarray(action, np.float32)
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise InvalidAction(f"an action is {len(ARM_ACTION)} finite numbers, not {action.shape}: {action.tolist()}")
        if not self._may_step:
            raise BadRequest("no episode is under way, or its state was replaced by restore(); call reset() first")
        executed = np.clip(action, -1, 1)
        self._move(executed.astype(np.float64))
        self._steps += 1
        info: dict[str, Any] = {**self._info()}
        success = info["is_success"]
        truncated = not success and self._steps >= self._max_steps
        if success or truncated:
            info["ended"] = "success" if success else "cap"
        return self._observation(), float(success), success, truncated, {**info, "action": executed}

    def look(self, cameras: Sequence[str] = CAMERAS) -> dict[str, Image]:
        """Draw the present state, upright, [size, size, 3] each."""
        if unknown := [camera for camera in cameras if camera not in CAMERAS]:
            raise BadRequest(f"the toy has cameras {', '.join(CAMERAS)}, not {unknown[0]!r}")
        if self._scene == "mujoco":
            if self._drawer is None:
                self._drawer = _MujocoScene(self._size)
            return {camera: self._drawer.draw(camera, self._hand, self._finger, self._places, self._pad) for camera in cameras}
        return {camera: self._drawn(camera) for camera in cameras}

    def privileged(self) -> Privileged:
        """Where everything is."""
        pad, top = np.array([*self._pad, 0, 0, 0, 0, 1]), np.array([*self._pad, 0, 0, 0, 0, 1, PAD_M, PAD_M, 0.001])
        corners = np.array([[x, y, z, 0] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * BLOCK_M
        return Privileged(
            goal=self._goal,
            holds=list(self._info()["predicates"].values()),
            poses={name: np.array([*place, 0, 0, 0, 1]) for name, place in zip(self._blocks, self._places, strict=True)} | {"pad": pad},
            joints={},
            regions={"pad_top": top},
            extents={name: np.full(3, BLOCK_M) for name in self._blocks},
            shapes=dict.fromkeys(self._blocks, corners),
            parents={"pad_top": "pad"},
        )

    def snapshot(self) -> Vector:
        """[N] float64: time, hand, finger, closing, what is held, steps, blocks."""
        head = [self._steps / CONTROL_HZ, *self._hand, self._finger, self._closing, self._held, self._steps]
        return np.concatenate([np.array(head, np.float64), self._places.ravel()])

    def restore(self, state: Vector, fixtures: Mapping[str, Vector]) -> None:
        """Show a recorded state; the next episode needs a reset. Raises BadRequest if it is none of this environment's."""
        state = np.asarray(state, np.float64)
        if state.shape != (8 + 3 * len(self._blocks),) or not np.isfinite(state).all() or set(fixtures) != {"pad"}:
            raise BadRequest(f"the toy's states are {8 + 3 * len(self._blocks)} finite numbers beside the pose of 'pad', not {state.shape}")
        self._hand, self._finger, self._closing = state[1:4].copy(), float(state[4]), bool(state[5])
        self._held, self._steps = int(state[6]), int(state[7])
        self._places, self._pad = state[8:].reshape(-1, 3).copy(), np.asarray(fixtures["pad"], np.float64)[:2].copy()
        self._may_step = False

    def versions(self) -> dict[str, str]:
        return {"toy": "1"}

    def hardware(self) -> dict[str, str]:
        return {"renderer": self._scene}

    def starts(self) -> str:
        """Digest of the stored starts, or how they are made."""
        return "placement" if self._rows is None else hashlib.sha256(self._rows.tobytes()).hexdigest()

    def close(self) -> None:
        if self._drawer is not None:
            self._drawer.close()
            self._drawer = None

    def _move(self, action: Vector) -> None:
        low, high = np.array([-REACH_M, -REACH_M, 0.0]), np.array([REACH_M, REACH_M, HEIGHT_M])
        self._hand = np.clip(self._hand + STEP_M * action[:3], low, high)
        if action[6] != 0:  # zero keeps the last target
            self._closing = bool(action[6] > 0)
        self._finger = float(np.clip(self._finger + (-FINGER_STEP_M if self._closing else FINGER_STEP_M), 0, OPEN_M))
        if not self._closing:
            self._held = -1
        elif self._held < 0 and 0 < self._finger < OPEN_M:
            near = np.linalg.norm(self._places - self._hand, axis=1)
            self._held = int(near.argmin()) if near.min() <= GRASP_M else -1
        for index, place in enumerate(self._places):
            if index == self._held:
                place[:] = self._hand
                self._finger = max(self._finger, BLOCK_M)
            else:
                place[2] = max(place[2] - FALL_M, BLOCK_M)

    def _observation(self) -> Observation:
        state = {"eef_pos": self._hand.copy(), "eef_rot": np.array([np.pi, 0, 0]), "gripper": np.array([self._finger, -self._finger])}
        return Observation(images=self.look(), state=state, instruction=self._instruction) if self._draws else self._without(state)

    def _without(self, state: dict[str, Vector]) -> Observation:
        return {"state": state, "instruction": self._instruction}  # type: ignore[typeddict-item]

    def _info(self) -> Info:
        predicates = {f"{name}({', '.join(of)})": self._holds(name, *of) for name, *of in self._goal}
        objects = {name: np.array([*place, 0, 0, 0, 1]) for name, place in zip(self._blocks, self._places, strict=True)}
        held = {name: index == self._held for index, name in enumerate(self._blocks)}
        return Info(is_success=all(predicates.values()), predicates=predicates, objects=objects, held=held)

    def _holds(self, predicate: str, what: str, where: str = "") -> bool:
        place = self._hand if what == "hand" else self._places[self._blocks.index(what)]
        if predicate == "lifted":
            return bool(place[2] > LIFTED_M)
        over = bool((np.abs(place[:2] - self._pad) <= PAD_M).all())
        if predicate == "over":
            return over
        let_go = self._held < 0 or self._blocks[self._held] != what
        return over and let_go and bool(place[2] <= BLOCK_M)

    def _drawn(self, camera: str) -> Image:
        """From above; the hand's camera looks at a quarter of the plane around the hand. Up is +x, left is +y, as on LIBERO's table."""
        reach, middle = (REACH_M, np.zeros(2)) if camera == CAMERAS[0] else (REACH_M / 4, self._hand[:2])
        line = (np.arange(self._size) + 0.5) / self._size * 2 - 1
        x, y = middle[0] - reach * line[:, None], middle[1] - reach * line[None, :]  # of each row, of each column
        picture = np.empty((self._size, self._size, 3), np.uint8)
        picture[:] = 210, 205, 190
        picture[(np.abs(x - self._pad[0]) <= PAD_M) & (np.abs(y - self._pad[1]) <= PAD_M)] = 90, 160, 90
        for index in np.argsort(self._places[:, 2], kind="stable"):
            edge, place = BLOCK_M * (1 + self._places[index, 2]), self._places[index]
            picture[(np.abs(x - place[0]) <= edge) & (np.abs(y - place[1]) <= edge)] = COLORS[self._blocks[index]]
        away = np.hypot(x - self._hand[0], y - self._hand[1])
        picture[np.abs(away - (0.03 + self._finger / 2)) <= 0.008 * (1 + 2 * self._hand[2])] = 40, 40, 40
        return picture


def rows(task: int) -> Vector:
    """[50, 9] m: the hand's place, then the blocks', of each stored start."""
    return np.stack([_placement(np.random.default_rng([task, trial])) for trial in range(ROWS)])


def _placement(draw: np.random.Generator) -> Vector:
    hand = np.array([*draw.uniform([-0.3, -0.1], [-0.15, 0.1]), 0.25])  # never over the pad
    red, blue = draw.uniform([0.12, 0.1], [0.3, 0.3]), draw.uniform([0.12, -0.3], [0.3, -0.1])
    return np.concatenate([hand, red, [BLOCK_M], blue, [BLOCK_M]])


def _space(instruction: str, size: int | None) -> spaces.Dict:
    def box(bound: float, width: int) -> spaces.Box:
        return spaces.Box(-bound, bound, (width,), np.float64)

    parts: dict[str, spaces.Space[Any]] = {
        "state": spaces.Dict({"eef_pos": box(10, 3), "eef_rot": box(2 * np.pi, 3), "gripper": box(0.1, 2)}),
        "instruction": spaces.Text(len(instruction), charset=string.printable),
    }
    if size is not None:
        parts["images"] = spaces.Dict({camera: spaces.Box(0, 255, (size, size, 3), np.uint8) for camera in CAMERAS})
    return spaces.Dict(parts)


class _MujocoScene:
    """The same scene, drawn by MuJoCo from two cameras, through the context that LIBERO's pictures come from."""

    def __init__(self, size: int) -> None:
        from . import machine
        from .drawer import Drawer

        choice, mujoco = machine.choose(), machine.mujoco()
        self._forward = mujoco.mj_forward
        self._model = mujoco.MjModel.from_xml_string(_scene_xml())
        self._data = mujoco.MjData(self._model)
        self._drawer = Drawer(self._model, size, choice)

    def draw(self, camera: str, hand: Vector, finger: float, places: Vector, pad: Vector) -> Image:
        aside = np.array([0, finger + 0.01, 0])
        poses = {"hand": hand, "left": hand + aside, "right": hand - aside, "pad": np.array([*pad, 0.001])}
        for name, place in {**poses, **dict(zip(COLORS, places, strict=True))}.items():
            self._data.mocap_pos[self._model.body(name).mocapid[0]] = place
        self._forward(self._model, self._data)
        return self._drawer.draw(self._data, camera)

    def close(self) -> None:
        self._drawer.close()


def _scene_xml() -> str:
    def geom(kind: str, extent: str, color: Sequence[int], where: str = "0 0 0") -> str:
        rgba = " ".join(f"{channel / 255:.3f}" for channel in color)
        return f'<geom group="1" type="{kind}" size="{extent}" pos="{where}" rgba="{rgba} 1"/>'

    def body(name: str, parts: str) -> str:
        return f'<body name="{name}" mocap="true">{parts}</body>'

    block, finger, dark = f"{BLOCK_M} {BLOCK_M} {BLOCK_M}", "0.01 0.004 0.03", (40, 40, 40)
    return f"""
    <mujoco>
      <worldbody>
        <light pos="0 0 2" dir="0 0 -1"/>
        {geom("plane", "1 1 0.1", (210, 205, 190))}
        <camera name="{CAMERAS[0]}" pos="-0.8 0 0.8" xyaxes="0 -1 0 0.7 0 0.7"/>
        {body("pad", geom("box", f"{PAD_M} {PAD_M} 0.001", (90, 160, 90)))}
        {"".join(body(name, geom("box", block, color)) for name, color in COLORS.items())}
        {body("left", geom("box", finger, dark))}
        {body("right", geom("box", finger, dark))}
        <body name="hand" mocap="true">
          {geom("sphere", "0.02", dark, "0 0 0.05")}
          <camera name="{CAMERAS[1]}" pos="-0.12 0 0.12" xyaxes="0 -1 0 0.7 0 0.7"/>
        </body>
      </worldbody>
    </mujoco>"""
