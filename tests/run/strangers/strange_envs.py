"""Environments that misbehave, or that know nothing of our extras: a module as a stranger would ship it."""

from __future__ import annotations

import os
import signal
import string
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_eval.envs.toy import ToyEnv
from vla_eval.types import ARM_ACTION, ARM_STATE, BadRequest, Interface


class Faulty(ToyEnv):
    """The toy, with a fault at one moment; with `once`, a file's path, only while that file is not there, which the fault then makes."""

    def __init__(self, fault: str, where: str, at: int = 0, once: str = "", trial: int | None = None, **kwargs: Any) -> None:
        self._fault, self._where, self._at, self._once, self._only, self._trial = fault, where, at, once, trial, -1
        self._drift, self._broken = 0.0, False
        self._strike("construct", 0)
        super().__init__(**kwargs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._trial = (options or {}).get("trial", 0)
        self._drift = 1e-12 if self._fault == "die, then drift" and Path(self._once).exists() else 0.0
        if self._broken:
            raise RuntimeError("still no GL context")
        self._strike("reset", 0)
        observation, info = super().reset(seed=seed, options=options)
        if self._fault == "empty instruction":
            observation["instruction"] = " "
        return observation, info

    def step(self, action: Any) -> Any:
        self._strike("step", self._steps)
        return super().step(action)

    def look(self, cameras: Any = ()) -> Any:
        self._strike("look", self._steps)
        return super().look(cameras)

    def snapshot(self) -> Any:
        return super().snapshot() + self._drift

    def _strike(self, where: str, at: int) -> None:
        if where != self._where or at != self._at or (self._only is not None and self._only != self._trial):
            return
        if self._once:
            if Path(self._once).exists():
                return
            Path(self._once).touch()
        match self._fault:
            case "die" | "die, then drift":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os.write(1, b"the renderer is on fire\n")
                os._exit(7)
            case "hang":
                time.sleep(3600)
            case "raise" | "break":
                self._broken = self._fault == "break"
                raise RuntimeError("no GL context")
            case "refuse":
                raise BadRequest("libEGL.so.1 is missing; apt install libegl1")


class Bare(gymnasium.Env[Any, Any]):
    """What gymnasium asks for and no more: pictures in the observation, no look, no snapshot; unbounded actions are kept."""

    def __init__(self, action: str = "arm", size: int = 33, max_steps: int = 12, success_at: int = 0) -> None:
        self._size, self._success_at = size, success_at
        meanings = ARM_ACTION if action == "arm" else ARM_ACTION[:3]
        interface = Interface(cameras={"front": (size, size)}, state=ARM_STATE, action=meanings, control_hz=20)
        self.metadata = {"render_modes": [], "interface": interface}
        self.action_space = spaces.Box(-np.inf, np.inf, (len(meanings),), np.float32)
        self.observation_space = spaces.Dict(
            {
                "images": spaces.Dict({"front": spaces.Box(0, 255, (size, size, 3), np.uint8)}),
                "state": spaces.Dict({key: spaces.Box(-10, 10, (n,), np.float64) for key, n in zip(ARM_STATE, (3, 3, 2), strict=True)}),
                "instruction": spaces.Text(20, charset=string.printable),
            }
        )
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.actions = []
        return self._observation(), {"is_success": False}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        done = len(self.actions) == self._success_at
        return self._observation(), 0.0, done, False, {"is_success": done}

    def _observation(self) -> Any:
        picture = np.full((self._size, self._size, 3), len(self.actions), np.uint8)
        state = {"eef_pos": np.zeros(3), "eef_rot": np.zeros(3), "gripper": np.zeros(2)}
        return {"images": {"front": picture}, "state": state, "instruction": "wait"}


class Mute(Bare):
    """Says nothing about what it offers."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata = {"render_modes": []}


for name in ("Faulty", "Bare", "Mute"):
    gymnasium.register(id=f"strange/{name}-v0", entry_point=f"strange_envs:{name}")
