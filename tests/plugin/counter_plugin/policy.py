"""A policy that walks towards the line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vla_eval import ActionChunk, Interface, Request

from .envs import INTERFACE


@dataclass(frozen=True)
class Steady:
    """Proportional control on x, one action a chunk."""

    gain: float
    name: str = "steady"
    needs: Interface = INTERFACE
    horizon: int = 1

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [ActionChunk(np.array([[-self.gain * r.observation["state"]["eef_pos"][0], -1.0]]).clip(-1, 1)) for r in batch]


def load(bundle: str | None = None, *, gain: float = 10.0) -> Steady:
    """`--option gain=0` stands still."""
    return Steady(gain)
