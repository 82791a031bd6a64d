"""The checks for plug-in authors: what is registered passes, and each way of being wrong is found."""

from __future__ import annotations

import random as global_random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest

from vla_eval.registry import load_policy, load_tasks, suites
from vla_eval.testing import ToyExpert, Unfit, check_policy, check_tasks
from vla_eval.types import ARM_ACTION, ARM_STATE, ActionChunk, Interface, Request, VlaEvalError

NEEDS = Interface(cameras={"agentview": (64, 64)}, state=dict(ARM_STATE), action=ARM_ACTION, control_hz=20)


def good(request: Request) -> ActionChunk:
    """A pure function of everything it may look at."""
    seen = int(request.observation["images"]["agentview"].astype(np.int64).sum())
    draw = np.random.default_rng([request.seed, seen, *(request.memory or b"\x01")])
    return ActionChunk(draw.uniform(-1, 1, (8, 7)), memory=draw.bytes(2))


@dataclass
class Mine:
    answer: Callable[[Request], Any] = good
    horizon: int = 8
    name: str = "mine"
    needs: Interface = field(default_factory=lambda: NEEDS)
    count: int = 0

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [self.answer(request) for request in batch]


def test_a_pure_function_is_a_policy() -> None:
    check_policy(Mine())
    check_policy(Mine(), load_tasks("toy")[0])


@pytest.mark.parametrize("name", ["zero", "random"])
def test_registered_baselines_keep_the_rules(name: str) -> None:
    check_policy(load_policy(name))


def test_the_toys_expert_keeps_the_rules_and_needs_a_task() -> None:
    check_policy(ToyExpert(), load_tasks("toy")[3])
    with pytest.raises(VlaEvalError, match="give check_policy a task"):
        check_policy(ToyExpert())


def counting() -> Callable[[Request], ActionChunk]:
    calls = iter(range(10_000))
    return lambda request: ActionChunk(np.full((8, 7), next(calls)))


def greedy(request: Request) -> ActionChunk:
    chunk = good(request)
    request.observation["images"]["agentview"][0, 0] += 1
    return chunk


def with_numpy(request: Request) -> ActionChunk:
    np.random.random()  # noqa: NPY002
    return good(request)


def with_random(request: Request) -> ActionChunk:
    global_random.random()
    return good(request)


def once(request: Request) -> ActionChunk:
    return ActionChunk(np.full((8, 7), np.nan)) if request.memory else ActionChunk(np.zeros((8, 7)), memory=b"x")


class Mates(Mine):
    """A row looks at the last one of its batch, as a wrong mask does."""

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [ActionChunk(good(request).actions + good(batch[-1]).actions) for request in batch]


class Slots(Mine):
    """A row's answer depends on its place."""

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [ActionChunk(good(request).actions + index) for index, request in enumerate(batch)]


class Short(Mine):
    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [good(batch[0])]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Mine(counting()), "the same request had two different answers"),
        (Mine(greedy), "it writes into its observation"),
        (Mine(with_numpy), "it draws from a global random generator"),
        (Mine(with_random), "it draws from a global random generator"),
        (Mine(lambda request: ActionChunk(np.full((8, 7), int(request.task[-1])))), "its answer depends on the task"),
        (Mine(lambda request: ActionChunk(np.full((8, 7), request.trial))), "its answer depends on the trial"),
        (Mine(lambda request: ActionChunk(np.full((8, 7), request.step))), "its answer depends on the step"),
        (Mates(), "a row's answer depends on its batch mate"),
        (Slots(), "in another row its answers differ"),
        (Short(), "two requests had 1 answers"),
        (Mine(once), "with its memory handed back: its actions are not finite"),
        (Mine(lambda request: ActionChunk(np.zeros((7, 7)))), r"its actions are float64 \(7, 7\); numbers \(8, 7\) are wanted"),
        (Mine(lambda request: ActionChunk(np.full((8, 7), np.inf))), "its actions are not finite"),
        (Mine(lambda request: ActionChunk(np.zeros((8, 7)), memory=cast(Any, "text"))), "its memory is str, not bytes"),
        (Mine(lambda request: np.zeros((8, 7))), "it answers with ndarray, not with an ActionChunk"),
        (Mine(name=""), "name is ''"),
        (Mine(horizon=0), "horizon 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_way_of_being_no_policy_is_found(policy: Mine, says: str) -> None:
    with pytest.raises(Unfit, match=says):
        check_policy(policy)


def test_every_registered_suite_is_well_formed() -> None:
    for protocol in (protocol for protocols in suites().values() for protocol in protocols):
        check_tasks(load_tasks(protocol), environments=0)


@pytest.mark.parametrize("suite", ["toy@v1", "toy@free"])
def test_the_toys_environments_keep_the_rules(suite: str) -> None:
    check_tasks(load_tasks(suite), environments=4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "toy/0"}, "the id must be <suite>@<protocol>/<index>"),
        ({"id": "toy@v1/first"}, "the id must be <suite>@<protocol>/<index>"),
        ({"env": "Toy-v0"}, "must name the module to import"),
        ({"instruction": " "}, "the instruction is empty"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"trials": 0}, "trials 0"),
        ({"replan": {"zero": 0}}, "replan is"),
        ({"env_kwargs": {"size": np.zeros(2)}}, "env_kwargs are no plain data"),
        ({"env_kwargs": {"size": (1, 2)}}, "env_kwargs are not the same after they were written as JSON"),
    ],
    ids=str,
)
def test_each_way_of_being_no_task_is_found(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Unfit, match=says):
        check_tasks([replace(load_tasks("toy")[0], **change)], environments=0)
    with pytest.raises(Unfit, match="used twice"):
        check_tasks([load_tasks("toy")[0]] * 2, environments=0)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        ("instruction", "the observation says 'lift the red block', the task"),
        ("drift", "the same \\(seed, trial\\) gave two different beginnings"),
        ("trial", "trials 0 and 1 begin alike"),
        ("picture", "a picture drawn again from its recorded state is another one"),
        ("size", "camera 'agentview' is promised as uint8"),
        ("info", "must hold is_success: bool"),
        ("interface", "the interface has 3 action dimensions, the space \\(7,\\)"),
        ("space", "gymnasium's check_env"),
    ],
)
def test_each_way_of_being_no_environment_is_found(break_it: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "run/strangers")
    task = load_tasks("toy")[2]
    broken = replace(task, env=f"broken_envs:broken/{break_it}-v0")
    try:
        with pytest.raises(Unfit, match=says):
            check_tasks([broken])
    finally:
        for name in [name for name in gymnasium.registry if name.startswith("broken/")]:
            del gymnasium.registry[name]
        import sys

        sys.modules.pop("broken_envs", None)
