"""A counter on a line. A plain gymnasium environment: it draws at every step and offers no snapshot."""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_eval.types import Image, Info, Interface, Meaning, Observation, Vector

INSTRUCTION = "move the counter to the line"
SIZE = 16  # px
INTERFACE = Interface(
    cameras={"front": (SIZE, SIZE)},
    state={"eef_pos": Meaning.EEF_POS_WORLD_M},
    action=(Meaning.DELTA_X_WORLD, Meaning.GRIPPER_PLUS_CLOSES),
    control_hz=10.0,
)


class Counter(gymnasium.Env[Any, Any]):
    """Success is x within 5 cm of the line at 0 m; an action moves x by up to 10 cm."""

    metadata: dict[str, Any] = {"interface": INTERFACE, "render_modes": []}  # noqa: RUF012 - gymnasium declares it so

    def __init__(self, start: float = 0.5, max_steps: int = 20) -> None:
        self.start, self.max_steps = start, max_steps
        self.x, self.steps = start, 0
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict(
            images=spaces.Dict(front=spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)),
            state=spaces.Dict(eef_pos=spaces.Box(-10, 10, (3,), np.float64)),
            instruction=spaces.Text(200, charset=string.printable),
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Any]:
        super().reset(seed=seed)
        self.x, self.steps = self.start + 0.05 * self.np_random.random(), 0
        return self._observation(), self._info()

    def step(self, action: Vector) -> tuple[Observation, float, bool, bool, Any]:
        self.x += 0.1 * float(np.clip(action[0], -1, 1))
        self.steps += 1
        info = self._info()
        truncated = self.steps >= self.max_steps and not info["is_success"]
        if info["is_success"] or truncated:
            info["ended"] = "success" if info["is_success"] else "cap"
        return self._observation(), float(info["is_success"]), info["is_success"], truncated, info

    def _observation(self) -> Observation:
        picture: Image = np.full((SIZE, SIZE, 3), 40, np.uint8)
        picture[:, int(np.clip((self.x + 1) / 2 * SIZE, 0, SIZE - 1))] = 255
        return {"images": {"front": picture}, "state": {"eef_pos": np.array([self.x, 0.0, 0.0])}, "instruction": INSTRUCTION}

    def _info(self) -> Info:
        there = abs(self.x) < 0.05
        return {"is_success": there, "predicates": {"on(counter, line)": there}}


gymnasium.register("counter/Counter-v0", "counter_plugin.envs:Counter")
