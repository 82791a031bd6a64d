"""One episode, in a straight line: reset, look, ask, step, until success, the cap or an error. T steps, A action dimensions, H W pixels."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np

from ..contract import Env, offers
from ..types import (
    ActionChunk,
    ContractMismatch,
    EpisodeRecord,
    Image,
    Info,
    Interface,
    InvalidAction,
    InvalidObservation,
    Observation,
    Outcome,
    Policy,
    Recorder,
    Request,
    Task,
    Vector,
    VlaEvalError,
)

T = TypeVar("T")
TIMES = ("reset", "simulation", "rendering", "policy", "recording", "waiting")  # what an episode's wall time is divided into

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """A policy's chunk, and what it took."""

    chunk: ActionChunk
    seconds: float  # of the policy's `act`
    batch: int  # rows answered together


class PolicyFailed(VlaEvalError):
    """The policy raised, or answered with something that is no chunk."""


Look = Callable[[], Request]
Ask = Callable[[Look, Callable[[], None]], Answer]  # looks, puts the question, and does what the second says while the policy computes


def rollout(
    env: Env,
    ask: Ask,
    task: Task,
    needs: Interface,
    *,
    trial: int,
    seed: int,
    replan: int,
    attempt: int = 1,
    recorders: Sequence[Recorder] = (),
) -> EpisodeRecord:
    """Play one episode; `seed` is the run's. Whatever breaks on the way makes an *error* record, never a failed episode.

    Success on any step counts, the last allowed one included; the cap is not success. Every moment of it belongs to one of `TIMES`.
    """
    so_far = _SoFar(recorders)
    outcome, error = guarded(lambda: _play(so_far, env, ask, task, needs, trial=trial, seed=seed, replan=replan))
    _, late = guarded(so_far.record)  # the last step's row
    error = late or error
    record = EpisodeRecord(
        task=task.id,
        trial=trial,
        seed=seed,
        outcome="error" if error is not None or outcome is None else outcome,
        steps=so_far.steps,
        chunks=so_far.chunks,
        attempts=attempt,
        seconds=0.0,
        policy_seconds=so_far.clock.spent["policy"],
        error=None if error is None else told(error),
    )
    for recorder in recorders:
        record = recorder.end(record)  # a full disk ends the run, not the episode: not guarded
    so_far.clock.lap("recording")
    return replace(record, seconds=sum(so_far.clock.spent.values()), timing=so_far.clock.spent)


def _play(
    so_far: _SoFar,
    env: Env,
    ask: Ask,
    task: Task,
    needs: Interface,
    *,
    trial: int,
    seed: int,
    replan: int,
) -> Outcome:
    clock, bounds = so_far.clock, _bounds(env, task)
    snapshot: Callable[[], Vector | None] = getattr(env.unwrapped, "snapshot", lambda: None)
    memory: bytes | None = None

    def look() -> Request:
        clock.lap("waiting")
        shown = observe(env, observation, needs)
        clock.lap("rendering")
        return Request(shown, seeds[so_far.chunks], task.id, trial, so_far.steps, memory)

    def meanwhile() -> None:
        clock.lap("waiting")
        so_far.record()

    observation, info = env.reset(seed=episode_seed(seed, task.id, trial), options={"trial": trial})
    clock.lap("reset")
    state = snapshot()
    for recorder in so_far.recorders:
        recorder.begin(task, trial, observation, _info(info, task), state)
    seeds = [chunk_seed(seed, task.id, trial, chunk) for chunk in range(-(-task.max_steps // replan))]  # between steps each takes longer
    clock.lap("recording")

    while True:
        answer = ask(look, meanwhile)
        clock.share("policy", answer.seconds, "waiting")
        actions = executable(answer.chunk, bounds, replan, so_far.steps)
        so_far.chunks += 1
        memory = answer.chunk.memory
        timed = ActionChunk(answer.chunk.actions, {**answer.chunk.seconds, "total": answer.seconds}, memory)
        for recorder in so_far.recorders:
            recorder.chunk(so_far.steps, timed, answer.batch)
        clock.lap("recording")

        for number, action in enumerate(actions, 1):
            observation, _, terminated, truncated, info = env.step(action)
            clock.lap("simulation")
            so_far.steps += 1
            said = _info(info, task)
            so_far.row = action, observation, said, snapshot()
            if number == len(actions):  # its row can wait until the policy has been asked
                clock.lap("recording")
            else:
                so_far.record()
            if said["is_success"]:
                return "success"
            if terminated or truncated or so_far.steps >= task.max_steps:
                return "failure"


def observe(env: Env, observation: Mapping[str, Any], needs: Interface) -> Observation:
    """What the policy is shown: the pictures and the truth it needs, drawn or read now. Raises InvalidObservation."""
    instruction = observation.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise InvalidObservation("the environment gave an empty instruction; a policy cannot be asked without one")
    state = {key: np.array(value) for key, value in observation["state"].items()}  # copies: the policy may write into them
    for key, value in state.items():
        if not np.isfinite(value).all():
            raise InvalidObservation(f"state {key!r} is not finite: {value.tolist()}")
    shown = Observation(images=_pictures(env, observation, needs.cameras), state=state, instruction=instruction)
    if needs.privileged:
        shown["privileged"] = env.unwrapped.privileged()  # type: ignore[attr-defined]
    return shown


def _pictures(env: Env, observation: Mapping[str, Any], cameras: Mapping[str, tuple[int, int]]) -> dict[str, Image]:
    if not cameras:
        return {}
    images: Mapping[str, Image] = observation.get("images", {})
    if not all(camera in images for camera in cameras) and hasattr(env.unwrapped, "look"):
        images = env.unwrapped.look(list(cameras))
    for camera, size in cameras.items():
        if camera not in images:
            raise InvalidObservation(f"the environment gave no picture of camera {camera!r}, only of {sorted(images)}")
        picture = images[camera]
        if picture.dtype != np.uint8 or picture.shape != (*size, 3):
            raise InvalidObservation(f"camera {camera!r} gave {picture.dtype} {picture.shape}, not uint8 {(*size, 3)}")
    return {camera: images[camera] for camera in cameras}


def executable(chunk: ActionChunk, bounds: tuple[Vector, Vector], replan: int, step: int) -> Vector:
    """[replan, A] float32: what is executed and recorded. Numbers beyond the action space are clamped to it. Raises InvalidAction."""
    low, high = bounds
    actions = np.asarray(chunk.actions)
    if actions.dtype.kind not in "fiu" or actions.ndim != 2 or actions.shape[1:] != low.shape:
        raise InvalidAction(
            f"at step {step} the policy answered with {actions.dtype} {actions.shape}; numbers [T, {low.shape[0]}] are wanted"
        )
    if len(actions) < replan:
        raise InvalidAction(f"at step {step} the policy answered with {len(actions)} actions; {replan} are to be executed")
    if not (finite := np.isfinite(actions)).all():
        index, dimension = np.argwhere(~finite)[0]
        raise InvalidAction(f"at step {step} action {index} of the chunk is {actions[index, dimension]} in dimension {dimension}")
    clamped: Vector = np.minimum(np.maximum(actions[:replan], low), high).astype(np.float32)
    return clamped


def _bounds(env: Env, task: Task) -> tuple[Vector, Vector]:
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
        raise ContractMismatch(f"{task.id}: the action space is {space}; a one-dimensional Box is wanted")
    return space.low, space.high


def _info(info: Mapping[str, Any], task: Task) -> Info:
    if "is_success" not in info:
        raise InvalidObservation(f"{task.env}: info lacks 'is_success', so nobody can tell how an episode ends")
    return info  # type: ignore[return-value]


def episode_seed(seed: int, task: str, trial: int) -> int:
    """The seed of an episode's reset: an episode depends on nothing that ran before it."""
    return _seed(f"{seed}/{task}/{trial}")


def chunk_seed(seed: int, task: str, trial: int, chunk: int) -> int:
    """The seed of a request, by its number in the episode."""
    return _seed(f"{seed}/{task}/{trial}/{chunk}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True, slots=True)
class Facts:
    """What an environment says about itself once it stands."""

    interface: Interface
    versions: Mapping[str, str]  # of the simulator
    hardware: Mapping[str, str]  # "renderer": what draws
    starts: str | None  # digest of the initial states
    bytes: int  # memory that one more such process needs
    draws_later: bool  # whether pictures can be drawn from recorded states


def facts_of(env: Env, task: Task) -> Facts:
    """What the manifest and the contract need to know. Raises ContractMismatch if the environment names no interface."""
    bare: Any = env.unwrapped
    interface = offers(env, task)
    _bounds(env, task)
    asked = {name: getattr(bare, name)() for name in ("versions", "hardware", "starts") if hasattr(bare, name)}
    return Facts(
        interface=interface,
        versions=asked.get("versions", {}),
        hardware=asked.get("hardware", {}),
        starts=asked.get("starts"),
        bytes=int(bare.metadata.get("worker_bytes", 0)),
        draws_later=hasattr(bare, "restore") and hasattr(bare, "look"),
    )


def answers(policy: Policy, requests: Sequence[Request]) -> list[Answer | Exception]:
    """The policy's chunk for each request, or what it raised. A batch that raised is asked row by row: mates do not pay for one another."""
    began = time.perf_counter()
    chunks, error = guarded(lambda: [_plain_chunk(chunk) for chunk in policy.act(requests)])
    seconds = time.perf_counter() - began
    if error is not None and not isinstance(error, VlaEvalError):
        error = PolicyFailed(told(error))  # whose it is: failed policies and broken simulators are sorted apart later
    if chunks is not None and len(chunks) != len(requests):
        error = PolicyFailed(f"policy {policy.name!r} answered {len(requests)} requests with {len(chunks)} chunks")
    if error is not None or chunks is None:
        return [error or PolicyFailed("no answer")] if len(requests) == 1 else [answers(policy, [request])[0] for request in requests]
    return [Answer(chunk, seconds, len(requests)) for chunk in chunks]


def in_process(policy: Policy) -> Ask:
    """Ask a policy that lives here."""

    def ask(look: Look, meanwhile: Callable[[], None]) -> Answer:
        request = look()
        meanwhile()
        (answer,) = answers(policy, [request])
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def _plain_chunk(chunk: ActionChunk) -> ActionChunk:
    if not isinstance(chunk, ActionChunk):
        raise PolicyFailed(f"the policy answered with {type(chunk).__name__}, not with an ActionChunk")
    if chunk.memory is not None and not isinstance(chunk.memory, bytes):
        raise PolicyFailed(f"the chunk's memory is {type(chunk.memory).__name__}, not bytes")
    actions = np.asarray(chunk.actions)
    if actions.dtype.kind not in "fiu":
        raise InvalidAction(f"the policy answered with actions of {actions.dtype}, not with numbers")
    return ActionChunk(actions, {str(stage): float(seconds) for stage, seconds in chunk.seconds.items()}, chunk.memory)


def guarded(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result, or what was raised: an environment, a policy and a simulator are other people's code, and may raise anything."""
    try:
        return work(), None
    except Exception as error:
        _log.debug("broke: %s", told(error), exc_info=True)
        return None, error


def told(error: Exception) -> str:
    """The message of a record: "RuntimeError: no GL context"."""
    text = str(error) if isinstance(error, PolicyRaised) else f"{type(error).__name__}: {error}"
    return text if len(text) <= MESSAGE_LIMIT else f"{text[:MESSAGE_LIMIT]}…"


class PolicyRaised(VlaEvalError):
    """The policy raised in another process; the text is already the record's."""


MESSAGE_LIMIT = 2000


class _Clock:
    """Divides an episode's wall time: each lap gives the time since the last one a name."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(TIMES, 0.0)
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.spent[name] += now - self._since
        self._since = now

    def share(self, name: str, seconds: float, rest: str) -> None:
        """A lap of which `seconds` belong to one name and what is left to another."""
        now = time.perf_counter()
        self.spent[name] += min(seconds, now - self._since)
        self.spent[rest] += max(now - self._since - seconds, 0.0)
        self._since = now


@dataclass(slots=True)
class _SoFar:
    """How far an episode got, for the record of one that broke."""

    recorders: Sequence[Recorder]
    clock: _Clock = field(default_factory=_Clock)
    steps: int = 0
    chunks: int = 0
    row: tuple[Vector, Observation, Info, Vector | None] | None = None  # of the last step, not recorded yet

    def record(self) -> None:
        """Record the last step, unless it is: before the simulator moves on, for its arrays may then hold the next one."""
        row, self.row = self.row, None
        if row is not None:
            for recorder in self.recorders:
                recorder.step(*row)
        self.clock.lap("recording")
