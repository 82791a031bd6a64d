"""Policies without a network: hold still, act at random, play back. T steps, A action dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_eval.results.folder import RunFolder, open_run
from vla_eval.types import ARM_ACTION, ActionChunk, BadRequest, Interface, Policy, Request, Vector

HORIZON = 8
_OPEN = -1.0  # of the gripper; the arm's six zeros hold it still


@dataclass(frozen=True, slots=True)
class Baseline:
    """A policy that answers each request on its own."""

    name: str
    horizon: int
    answer: Callable[[Request, int], Vector]  # request, horizon -> [T, A]
    needs: Interface = field(default=Interface(cameras={}, state={}, action=ARM_ACTION, control_hz=0))

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [ActionChunk(self.answer(request, self.horizon)) for request in batch]


def zero(bundle: Any = None, *, horizon: int = HORIZON) -> Policy:
    """Hold still with an open gripper: what succeeds anyway is no test of a policy."""
    _without("zero", bundle, horizon)
    return Baseline("zero", horizon, _still)


def random(bundle: Any = None, *, horizon: int = HORIZON) -> Policy:
    """Uniform in the action space, drawn from the chunk's seed."""
    _without("random", bundle, horizon)
    return Baseline("random", horizon, _uniform)


def replay(bundle: Any = None, *, run: str, horizon: int = HORIZON) -> Policy:
    """The actions that an earlier run recorded, then hold still. Play it with that run's --seed: the same start, the same states."""
    _without("replay", bundle, horizon)
    needs = Interface(cameras={}, state={}, action=ARM_ACTION, control_hz=0, privileged=True)  # it must know which episode it is in
    return Baseline("replay", horizon, _recorded(open_run(run)), needs)


def _still(request: Request, horizon: int) -> Vector:
    actions = np.zeros((horizon, len(ARM_ACTION)), np.float32)
    actions[:, -1] = _OPEN
    return actions


def _uniform(request: Request, horizon: int) -> Vector:
    return np.random.default_rng(request.seed).uniform(-1, 1, (horizon, len(ARM_ACTION))).astype(np.float32)


def _recorded(run: RunFolder) -> Callable[[Request, int], Vector]:
    played: dict[tuple[str, int], Vector] = {}

    def answer(request: Request, horizon: int) -> Vector:
        key = request.task, request.trial
        if key not in played:
            if key not in run.manifest.ledger:
                raise BadRequest(f"{run.path}: has no trial {request.trial} of {request.task} to play back")
            played[key] = run.episode(*key).actions
        found = played[key][request.step : request.step + horizon]
        return np.concatenate([found, _still(request, horizon - len(found))])

    return answer


def _without(name: str, bundle: Any, horizon: int) -> None:
    if bundle is not None:
        raise BadRequest(f"policy {name!r} has no engines; leave --bundle away")
    if type(horizon) is not int or horizon < 1:
        raise BadRequest(f"policy {name!r}: horizon is {horizon!r}; a whole number from 1")
