"""The toy, broken in one way each, so that the checks for plug-in authors have something to find."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import gymnasium
import numpy as np

from vla_eval.envs.toy import ToyEnv

_calls = count()


class Instruction(ToyEnv):
    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return {**observation, "instruction": "lift the red block"}, info


class Drift(ToyEnv):
    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        observation["state"]["eef_pos"][0] += 1e-12 * next(_calls)
        return observation, info


class Trial(ToyEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)


class Picture(ToyEnv):
    def restore(self, state: Any, fixtures: Any) -> None:
        super().restore(state, {"pad": np.zeros(7)})


class Size(ToyEnv):
    def look(self, cameras: Any = ()) -> Any:
        return {camera: picture[1:] for camera, picture in super().look(cameras).items()}


class Info(ToyEnv):
    def _info(self) -> Any:
        return {**super()._info(), "is_success": 0.0}


class Interface(ToyEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        interface = self.metadata["interface"]
        self.metadata["interface"] = replace(interface, action=interface.action[:3])


class Space(ToyEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_space = gymnasium.spaces.Box(-1, 1, (3,))


for kind in (Instruction, Drift, Trial, Picture, Size, Info, Interface, Space):
    gymnasium.register(id=f"broken/{kind.__name__.lower()}-v0", entry_point=f"broken_envs:{kind.__name__}")
