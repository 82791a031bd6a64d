"""One episode: what is asked, what is executed, how it ends, and what becomes of everything that breaks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from vla_eval.contract import open_env
from vla_eval.policies.baseline import random, zero
from vla_eval.run.episode import TIMES, PolicyFailed, answers, chunk_seed, episode_seed, executable, in_process, rollout
from vla_eval.run.loop import start
from vla_eval.testing import ToyExpert
from vla_eval.types import ARM_ACTION, ActionChunk, BadRequest, EpisodeRecord, Interface, InvalidAction, Policy, Request, Task

CASES = json.loads((Path(__file__).parents[1] / "cases/conventions/numbered_chunks.json").read_text())
ANY = Interface(cameras={}, state={}, action=ARM_ACTION, control_hz=0)


pytestmark = pytest.mark.usefixtures("strangers")


def bare(max_steps: int = 12, **kwargs: Any) -> Task:
    return Task("bare@v1/0", "strange_envs:strange/Bare-v0", "wait", max_steps, env_kwargs=kwargs)


def faulty(toy: Task, fault: str, where: str, **kwargs: Any) -> Task:
    return replace(toy, env="strange_envs:strange/Faulty-v0", env_kwargs={**toy.env_kwargs, "fault": fault, "where": where, **kwargs})


@dataclass
class Says:
    """A policy that answers what it is told to, and keeps what it was asked."""

    answer: Any  # Request, number of the query -> ActionChunk
    horizon: int = 8
    needs: Interface = field(default_factory=lambda: ANY)
    name: str = "says"
    asked: list[Request] = field(default_factory=list)

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        self.asked += batch
        return [self.answer(request, len(self.asked) - 1) for request in batch]


def played(policy: Policy, task: Task, *, trial: int = 0, seed: int = 0, replan: int = 8) -> EpisodeRecord:
    env = open_env(task)
    try:
        return rollout(env, in_process(policy), task, policy.needs, trial=trial, seed=seed, replan=replan)
    finally:
        env.close()


def numbered(length: int) -> Says:
    def answer(_: Request, query: int) -> ActionChunk:
        return ActionChunk(np.repeat(1000.0 * query + np.arange(length)[:, None], 7, axis=1))

    return Says(answer, length)


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda c: f"{c['chunk_length']}-{c['replan']}")
def test_chunks_are_executed_from_their_first_action(case: dict[str, Any]) -> None:
    policy, task = numbered(case["chunk_length"]), bare(case["steps"])
    env: Any = open_env(task)
    record = rollout(env, in_process(policy), task, policy.needs, trial=0, seed=0, replan=case["replan"])
    assert [action[0] for action in env.unwrapped.actions] == case["executed"]
    assert record.chunks == len(policy.asked) == case["queries"]
    assert record.steps == case["steps"]


def test_every_replan_up_to_the_chunk_is_executed_in_order() -> None:
    for replan in range(1, 17):
        policy, task = numbered(16), bare(40)
        env: Any = open_env(task)
        rollout(env, in_process(policy), task, policy.needs, trial=0, seed=0, replan=replan)
        assert [action[0] for action in env.unwrapped.actions] == [1000 * (step // replan) + step % replan for step in range(40)]


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda c: f"{c['chunk_length']}-{c['replan']}")
def test_a_replan_beyond_the_chunk_is_refused_before_the_first_episode(case: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=f"replan is {case['replan']}"):
        start(numbered(case["chunk_length"]), [bare()], workers=0, replan=case["replan"])


def test_the_policy_is_asked_with_its_memory_and_where_it_is(toy: Task) -> None:
    policy = Says(lambda request, n: ActionChunk(np.zeros((8, 7)), memory=bytes([n])))
    played(policy, toy, trial=3, seed=7, replan=5)
    assert [request.memory for request in policy.asked[:3]] == [None, b"\x00", b"\x01"]
    assert [request.step for request in policy.asked] == list(range(0, 80, 5))
    assert {(request.task, request.trial) for request in policy.asked} == {("toy@v1/2", 3)}


def test_seeds_are_the_first_bits_of_a_digest(toy: Task) -> None:
    text = b"7/toy@v1/2/3"
    assert episode_seed(7, "toy@v1/2", 3) == int(hashlib.sha256(text).hexdigest()[:8], 16)
    assert chunk_seed(7, "toy@v1/2", 3, 2) == int(hashlib.sha256(text + b"/2").hexdigest()[:8], 16)
    policy = Says(lambda request, n: ActionChunk(np.zeros((8, 7))))
    played(policy, toy, trial=3, seed=7)
    assert [request.seed for request in policy.asked] == [chunk_seed(7, "toy@v1/2", 3, n) for n in range(10)]


def test_success_on_the_last_allowed_step_is_success() -> None:
    assert played(zero(), bare(12, success_at=12)).outcome == "success"
    assert played(zero(), bare(11, success_at=12)).outcome == "failure"


def test_a_success_ends_the_episode_within_its_chunk() -> None:
    record = played(zero(), bare(12, success_at=3))
    assert (record.outcome, record.steps, record.chunks) == ("success", 3, 1)


def test_reaching_the_cap_is_failure_and_no_error(toy: Task) -> None:
    record = played(zero(), toy)
    assert (record.outcome, record.steps, record.chunks, record.error) == ("failure", 80, 10, None)


def test_the_expert_succeeds_where_holding_still_fails(toy: Task) -> None:
    assert played(ToyExpert(), toy).outcome == "success"


@pytest.mark.parametrize(
    ("where", "at", "steps"), [("reset", 0, 0), ("step", 5, 5), ("look", 0, 0), ("look", 8, 8)], ids=lambda value: str(value)
)
def test_a_broken_simulator_is_an_error_and_not_a_failure(toy: Task, where: str, at: int, steps: int) -> None:
    policy = Says(lambda request, n: ActionChunk(np.zeros((8, 7))), needs=replace(ANY, cameras={"agentview": (64, 64)}))
    record = played(policy, faulty(toy, "raise", where, at=at))
    assert (record.outcome, record.error, record.steps) == ("error", "RuntimeError: no GL context", steps)


@dataclass
class Watches:
    """A recorder that keeps a diary."""

    diary: list[str]

    def begin(self, *_: object) -> None:
        self.diary.append("begin")

    def chunk(self, step: int, chunk: ActionChunk, batch: int) -> None: ...

    def step(self, *_: object) -> None:
        self.diary.append("row")

    def end(self, record: EpisodeRecord) -> EpisodeRecord:
        self.diary.append("end")
        return record


@pytest.mark.parametrize("at", [5, 8, 80], ids=["in a chunk", "between two", "at the end"])
def test_every_step_is_recorded_before_the_next_one_and_the_last_before_the_end(
    toy: Task, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    from vla_eval.envs.toy import ToyEnv

    diary: list[str] = []
    step = ToyEnv.step

    def noted(self: ToyEnv, action: Any) -> Any:
        diary.append("step")
        return step(self, action)

    monkeypatch.setattr(ToyEnv, "step", noted)
    policy = Says(lambda request, n: ActionChunk(np.zeros((8, 7))), needs=replace(ANY, cameras={"agentview": (64, 64)}))
    where = "look" if at == 8 else "step"
    record = rollout(
        open_env(faulty(toy, "raise", where, at=at) if at < 80 else toy),
        in_process(policy), toy, policy.needs, trial=0, seed=0, replan=8, recorders=[Watches(diary)],
    )  # fmt: skip
    assert (record.outcome, record.steps) == ("failure" if at == 80 else "error", at)
    assert diary.count("row") == record.steps
    assert diary[: 1 + 2 * record.steps] == ["begin", *["step", "row"] * record.steps]
    assert diary[-1] == "end"


def test_an_empty_instruction_is_an_error(toy: Task) -> None:
    record = played(zero(), faulty(toy, "empty instruction", "never"))
    assert record.outcome == "error"
    assert record.error is not None
    assert record.error.startswith("InvalidObservation: the environment gave an empty instruction")


def with_value(value: float, index: int = 2) -> np.ndarray[Any, Any]:
    actions = np.zeros((8, 7))
    actions[index, 4] = value
    return actions


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (with_value(np.nan), "InvalidAction: at step 0 action 2 of the chunk is nan in dimension 4"),
        (with_value(np.inf), "InvalidAction: at step 0 action 2 of the chunk is inf in dimension 4"),
        (with_value(-np.inf, 7), "InvalidAction: at step 0 action 7 of the chunk is -inf in dimension 4"),
        (np.zeros((8, 6)), r"InvalidAction: at step 0 the policy answered with float64 \(8, 6\); numbers \[T, 7\] are wanted"),
        (np.zeros(7), r"InvalidAction: .* float64 \(7,\)"),
        (np.zeros((0, 7)), "InvalidAction: .* 0 actions; 8 are to be executed"),
        (np.zeros((7, 7)), "InvalidAction: .* 7 actions; 8 are to be executed"),
        (np.zeros((8, 7), object), "InvalidAction: .* actions of object"),
        (np.zeros((8, 7), complex), "InvalidAction: .* actions of complex128"),
    ],
)
def test_an_answer_that_is_no_action_is_an_error(toy: Task, actions: Any, says: str) -> None:
    record = played(Says(lambda request, n: ActionChunk(actions)), toy)
    assert (record.outcome, record.steps) == ("error", 0)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(record.error)


def boom(request: Request, n: int) -> ActionChunk:
    if n == 2:
        raise ZeroDivisionError("no norm")
    return ActionChunk(np.zeros((8, 7)))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (boom, "PolicyFailed: ZeroDivisionError: no norm"),
        (lambda request, n: np.zeros((8, 7)), "PolicyFailed: the policy answered with ndarray, not with an ActionChunk"),
        (lambda request, n: ActionChunk(np.zeros((8, 7)), memory=cast(Any, "text")), "PolicyFailed: the chunk's memory is str, not bytes"),
    ],
)
def test_a_policy_that_breaks_is_an_error(toy: Task, answer: Any, error: str) -> None:
    record = played(Says(answer), toy)
    assert (record.outcome, record.error) == ("error", error)


def test_a_row_that_breaks_does_not_take_its_batch_mates_along(toy: Task) -> None:
    def answer(request: Request, n: int) -> ActionChunk:
        if request.trial == 1:
            raise ValueError("poison")
        return ActionChunk(np.full((8, 7), float(request.trial)))

    asked = played_requests(toy)
    good, bad, fine = answers(Says(answer), [replace(asked, trial=trial) for trial in range(3)])
    assert isinstance(bad, PolicyFailed)
    assert not isinstance(good, Exception)
    assert not isinstance(fine, Exception)
    assert fine.chunk.actions[0, 0] == 2


def played_requests(toy: Task) -> Request:
    policy = Says(lambda request, n: ActionChunk(np.zeros((8, 7))))
    played(policy, replace(toy, max_steps=1))
    return policy.asked[0]


def test_actions_are_clamped_to_the_space_and_cast_once() -> None:
    low, high = np.full(7, -1, np.float32), np.full(7, 1, np.float32)
    actions = np.array([[0.5, 2.0, -2.0, 0.0, -0.0, 1e300, 0.1]])
    found = executable(ActionChunk(actions), (low, high), 1, 0)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([[0.5, 1, -1, 0, -0.0, 1, 0.1]], np.float32))
    assert np.signbit(found[0, 4])
    with pytest.raises(InvalidAction):
        executable(ActionChunk(actions[0]), (low, high), 1, 0)


def test_the_times_of_an_episode_add_up_to_its_seconds(toy: Task) -> None:
    needs = Interface(cameras={"agentview": (64, 64)}, state={}, action=ARM_ACTION, control_hz=20)
    record = played(Says(lambda request, n: ActionChunk(np.zeros((8, 7))), needs=needs), toy)
    assert set(record.timing) == set(TIMES)
    assert sum(record.timing.values()) == pytest.approx(record.seconds, rel=1e-9)
    assert all(seconds >= 0 for seconds in record.timing.values())
    assert record.timing["rendering"] > 0
    assert record.timing["policy"] == record.policy_seconds > 0


def test_pictures_are_drawn_for_the_policy_alone(toy: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_eval.envs.toy import ToyEnv

    drawn: list[Sequence[str]] = []
    look = ToyEnv.look

    def noted(self: ToyEnv, cameras: Sequence[str]) -> Any:
        drawn.append(cameras)
        return look(self, cameras)

    monkeypatch.setattr(ToyEnv, "look", noted)
    played(zero(), toy)
    assert drawn == []
    needs = Interface(cameras={"robot0_eye_in_hand": (64, 64)}, state={}, action=ARM_ACTION, control_hz=20)
    policy = Says(lambda request, n: ActionChunk(np.zeros((8, 7))), needs=needs)
    record = played(policy, toy)
    assert drawn == [["robot0_eye_in_hand"]] * record.chunks
    assert set(policy.asked[0].observation["images"]) == {"robot0_eye_in_hand"}
    assert "privileged" not in policy.asked[0].observation


def test_a_policy_that_writes_into_its_observation_changes_nothing(toy: Task) -> None:
    def greedy(request: Request, n: int) -> ActionChunk:
        request.observation["state"]["eef_pos"] += 1
        return ActionChunk(np.full((8, 7), 0.1))

    kept = Says(lambda request, n: ActionChunk(np.full((8, 7), 0.1)))
    wild = Says(greedy)
    played(kept, toy)
    played(wild, toy)
    for one, other in zip(kept.asked, wild.asked, strict=True):
        np.testing.assert_array_equal(one.observation["state"]["eef_pos"] + 1, other.observation["state"]["eef_pos"])


def test_an_unknown_environment_is_one_sentence(toy: Task) -> None:
    with pytest.raises(BadRequest, match=r"its environment module 'no_such_module' cannot be imported"):
        open_env(replace(toy, env="no_such_module:x/Y-v0"))
    with pytest.raises(BadRequest, match="no environment 'vla_eval/Nothing-v0'"):
        open_env(replace(toy, env="vla_eval.envs:vla_eval/Nothing-v0"))


def test_random_is_the_same_for_the_same_seed(toy: Task) -> None:
    assert played(random(), toy, seed=3).steps == played(random(), toy, seed=3).steps
