"""Whether a policy or a suite keeps the rules of the house: for our tests and for yours. T actions, A dimensions, H W pixels."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from .contract import Env, check_contract, offers, open_env
from .types import ARM_ACTION, ActionChunk, Interface, Meaning, Observation, Policy, Request, Task, Vector, VlaEvalError

_WIDTHS = {Meaning.EEF_POS_WORLD_M: 3, Meaning.EEF_ROT_WORLD_AXIS_ANGLE: 3, Meaning.GRIPPER_FINGERS_M: 2}


class Unfit(VlaEvalError):
    """Something registered does not keep the rules; the text has one line for each."""


def check_policy(policy: Policy, task: Task | None = None, *, tolerance: float = 1e-3) -> None:
    """Ask a policy a handful of questions and raise Unfit with everything that is wrong.

    A policy is a pure function: the same request has the same answer, whatever was asked before or beside it; without `needs.privileged`
    it cannot tell which episode it is in; it leaves its observations and the global random generators alone. Batches of two are compared
    bit for bit, a batch with a single request to `tolerance` of the chunk's maximum. Questions are made up from `needs`, or come from the
    task's environment, which a privileged policy requires.
    """
    if findings := list(_policy_findings(policy, task, tolerance)):
        raise Unfit(f"policy {policy.name!r}: " + "; ".join(findings))


def check_tasks(tasks: Sequence[Task], *, environments: int = 1) -> None:
    """Look at every task, open the environments of the first few, and raise Unfit with everything that is wrong.

    An environment passes gymnasium's own check, gives the same states for the same (seed, trial), says in `info` what it must, and draws
    what its interface promises.
    """
    findings = [finding for task in tasks for finding in _task_findings(task)]
    if len({task.id for task in tasks}) < len(tasks):
        findings.append("a task's id is used twice")
    for task in tasks[:environments]:
        env = open_env(task)
        try:
            findings += [f"{task.id}: {finding}" for finding in _env_findings(env, task)]
        finally:
            env.close()
    if findings:
        raise Unfit("; ".join(findings))


def _policy_findings(policy: Policy, task: Task | None, tolerance: float) -> Iterator[str]:
    if not policy.name or policy.horizon < 1:
        yield f"name is {policy.name!r} and horizon {policy.horizon}; both must say something"
        return
    questions = [Request(observation, seed, "suite@protocol/0", 0, 0) for seed, observation in enumerate(_observations(policy.needs, task))]
    one, other, third = (replace(question, seed=index) for index, question in enumerate(questions))
    before, drawn = copy.deepcopy(one), (random.getstate(), np.random.get_state())  # noqa: NPY002 (to see that nobody drew from it)
    (first,) = policy.act([one])
    if wrong := _chunk_finding(first, policy):
        yield wrong
        return
    if not _same(before.observation, one.observation):
        yield "it writes into its observation"
    if random.getstate() != drawn[0] or not _same(np.random.get_state(), drawn[1]):  # noqa: NPY002
        yield "it draws from a global random generator; make one from the request's seed"
    if not _equal(policy.act([one])[0], first):
        yield "the same request had two different answers"
    if not policy.needs.privileged:
        for name, elsewhere in (
            ("task", replace(one, task="suite@protocol/1")),
            ("trial", replace(one, trial=3)),
            ("step", replace(one, step=8)),
        ):
            if not _equal(policy.act([elsewhere])[0], first):
                yield f"its answer depends on the {name}; only a policy that needs `privileged` may know its episode"
    pair, mixed = policy.act([one, other]), policy.act([one, third])
    if len(pair) != 2 or len(mixed) != 2:
        yield f"two requests had {len(pair)} answers"
        return
    if not _equal(pair[0], mixed[0]):
        yield "a row's answer depends on its batch mate"
    reach = tolerance * max(float(np.abs(first.actions).max()), 1e-6)
    if np.abs(np.asarray(pair[0].actions, np.float64) - first.actions).max() > reach:
        yield f"alone and in a batch its answers differ by more than {reach:g}"
    if np.abs(np.asarray(policy.act([other, one])[1].actions, np.float64) - first.actions).max() > reach:
        yield f"in another row its answers differ by more than {reach:g}"
    later = replace(one, step=one.step + policy.horizon, memory=first.memory)
    again = policy.act([later])[0]
    if wrong := _chunk_finding(again, policy):
        yield f"with its memory handed back: {wrong}"
    elif not _equal(policy.act([later])[0], again):
        yield "with its memory handed back the same request had two different answers"


def _chunk_finding(chunk: Any, policy: Policy) -> str | None:
    if not isinstance(chunk, ActionChunk):
        return f"it answers with {type(chunk).__name__}, not with an ActionChunk"
    actions, wanted = np.asarray(chunk.actions), (policy.horizon, len(policy.needs.action))
    if actions.shape != wanted or actions.dtype.kind not in "fiu":
        return f"its actions are {actions.dtype} {actions.shape}; numbers {wanted} are wanted"
    if not np.isfinite(actions).all():
        return "its actions are not finite"
    if chunk.memory is not None and not isinstance(chunk.memory, bytes):
        return f"its memory is {type(chunk.memory).__name__}, not bytes"
    return None


def _observations(needs: Interface, task: Task | None) -> list[Observation]:
    if task is not None:
        return _seen(needs, task)
    if needs.privileged:
        raise VlaEvalError("a privileged policy is asked with a task's own observations; give check_policy a task")
    draw = np.random.default_rng(0)
    return [
        Observation(
            images={name: draw.integers(0, 256, (h, w, 3), np.uint8) for name, (h, w) in needs.cameras.items()},
            state={key: draw.uniform(-0.04, 0.04, _WIDTHS[meaning]) for key, meaning in needs.state.items()},
            instruction=instruction,
        )
        for instruction in ("pick up the red block", "pick up the red block", "open the drawer")
    ]


def _seen(needs: Interface, task: Task) -> list[Observation]:
    env = open_env(task)
    try:
        bare: Any = env.unwrapped
        check_contract("the policy", needs, task.id, offers(env, task))
        seen = []
        for seed in range(3):
            observation, _ = env.reset(seed=seed, options={"trial": 0})
            images = (
                dict(bare.look(list(needs.cameras))) if needs.cameras and hasattr(bare, "look") else dict(observation.get("images", {}))
            )
            shown = Observation(images=images, state=copy.deepcopy(observation["state"]), instruction=observation["instruction"])
            if needs.privileged:
                shown["privileged"] = bare.privileged()
            seen.append(shown)
        return seen
    finally:
        env.close()


def _task_findings(task: Task) -> Iterator[str]:
    suite, _, index = task.id.rpartition("/")
    if "@" not in suite or not index.isdecimal():
        yield f"{task.id}: the id must be <suite>@<protocol>/<index>"
    if ":" not in task.env:
        yield f"{task.id}: env {task.env!r} must name the module to import, then the id: 'my_package.envs:me/Kitchen-v0'"
    if not task.instruction.strip():
        yield f"{task.id}: the instruction is empty"
    if task.max_steps < 1 or (task.trials is not None and task.trials < 1):
        yield f"{task.id}: max_steps is {task.max_steps} and trials {task.trials}; at least 1"
    if any(actions < 1 for actions in task.replan.values()):
        yield f"{task.id}: replan is {dict(task.replan)}; at least 1"
    try:
        if json.loads(json.dumps(dict(task.env_kwargs), allow_nan=False)) != dict(task.env_kwargs):
            yield f"{task.id}: env_kwargs are not the same after they were written as JSON"
    except (TypeError, ValueError) as error:
        yield f"{task.id}: env_kwargs are no plain data ({error})"


def _env_findings(env: Env, task: Task) -> Iterator[str]:
    bare: Any = env.unwrapped
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            check_env(bare, skip_render_check=True)
        except Exception as error:
            yield f"gymnasium's check_env: {error}"
    yield from (f"gymnasium's check_env: {warning.message}" for warning in heard)
    interface = offers(env, task)
    still = np.zeros(len(interface.action), np.float32)
    if still.shape != env.action_space.shape:
        yield f"the interface has {len(interface.action)} action dimensions, the space {env.action_space.shape}"
        return
    first, info = env.reset(seed=1, options={"trial": 0})
    then = env.step(still)
    env.step(still)
    again, _ = env.reset(seed=1, options={"trial": 0})
    if not _same(first, again) or not _same(then[0], env.step(still)[0]):
        yield "the same (seed, trial) gave two different beginnings"
    if task.trials is None or task.trials > 1:
        other, _ = env.reset(seed=1 if task.trials else 2, options={"trial": 1})
        if _same(first["state"], other["state"]) and _same(info.get("objects"), env.reset(seed=1, options={"trial": 1})[1].get("objects")):
            yield "trials 0 and 1 begin alike"
    if first["instruction"] != task.instruction:
        yield f"the observation says {first['instruction']!r}, the task {task.instruction!r}"
    if set(interface.state) != set(first["state"]):
        yield f"the interface names state {sorted(interface.state)}, the observation has {sorted(first['state'])}"
    for where, told in (("reset", info), ("step", then[4])):
        if not isinstance(told.get("is_success"), bool) or not isinstance(told.get("predicates", {}), dict):
            yield f"info at {where} must hold is_success: bool and predicates: dict"
    yield from _picture_findings(env, interface)


def _picture_findings(env: Env, interface: Interface) -> Iterator[str]:
    bare: Any = env.unwrapped
    observation, info = env.reset(seed=1, options={"trial": 0})
    images = bare.look(list(interface.cameras)) if hasattr(bare, "look") else observation.get("images", {})
    for camera, size in interface.cameras.items():
        if camera not in images or images[camera].dtype != np.uint8 or images[camera].shape != (*size, 3):
            yield f"camera {camera!r} is promised as uint8 {(*size, 3)} and not drawn so"
    if hasattr(bare, "snapshot") and hasattr(bare, "restore") and hasattr(bare, "look"):
        state = bare.snapshot()
        env.reset(seed=2, options={"trial": 0})
        bare.restore(state, info.get("fixtures", {}))
        if not _same(bare.look(list(interface.cameras)), images):
            yield "a picture drawn again from its recorded state is another one"


def _equal(one: ActionChunk, other: ActionChunk) -> bool:
    return _same(one.actions, other.actions) and one.memory == other.memory


def _same(one: Any, other: Any) -> bool:
    """Equal to the bit, arrays included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


@dataclass(frozen=True, slots=True)
class ToyExpert:
    """Solves every task of the toy suite from where its hand, blocks and pad are."""

    horizon: int = 8
    name: str = "toy_expert"
    needs: Interface = field(default=Interface(cameras={}, state={}, action=ARM_ACTION, control_hz=20, privileged=True))

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [ActionChunk(self._chunk(request.observation)) for request in batch]

    def _chunk(self, observation: Observation) -> Vector:
        plan = [action for action, _ in zip(_plan(observation), range(self.horizon), strict=False)]
        rest = [np.array([0, 0, 0, 0, 0, 0, plan[-1][6] if plan else 0])] * (self.horizon - len(plan))
        return np.array([*plan, *rest], np.float32).reshape(self.horizon, len(ARM_ACTION))


def _plan(observation: Observation) -> Iterator[Vector]:
    """What is left to do, as actions: it begins anew at each request, so every stretch is passed over once it is done."""
    truth, hand = observation["privileged"], np.array(observation["state"]["eef_pos"])
    step_m, above, open_, close = 0.05, 0.25, -1.0, 1.0  # metres of a full action, metres
    closed = observation["state"]["gripper"][0] < 0.025  # m; the block leaves a finger at 0.02

    def grip(command: float) -> list[Vector]:
        return [np.array([0, 0, 0, 0, 0, 0, command])] * 3

    def move(x: float, y: float, z: float, command: float) -> Iterator[Vector]:
        """Up, across, down: nothing is knocked over."""
        nonlocal hand
        across = bool(np.abs(hand[:2] - (x, y)).max() > 1e-3)
        for target in ([hand[0], hand[1], above], [x, y, above], [x, y, z]) if across else ([x, y, z],):
            while np.abs(away := np.array(target) - hand).max() > 1e-3:
                go = np.clip(away / step_m, -1, 1)
                hand = hand + step_m * go
                yield np.array([*go, 0, 0, 0, command])

    for (predicate, what, *_), holds in zip(truth["goal"], truth["holds"], strict=True):
        pad, block = truth["poses"]["pad"], truth["poses"].get(what)
        if holds:
            continue
        if block is None:
            yield from move(pad[0], pad[1], above, open_)
            continue
        if not closed or np.abs(block[:3] - hand).max() > 1e-6:
            yield from move(block[0], block[1], block[2], open_)
            yield from grip(close)
        if predicate == "lifted":
            yield from move(hand[0], hand[1], above, close)
        else:
            side = 0.03 if what == "blue_block" else -0.03  # m; both find room
            yield from move(pad[0], pad[1] + side, 0.02, close)
            yield from grip(open_)
        closed = False
