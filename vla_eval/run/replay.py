"""A dataset's actions, back into the simulator: the proof that its numbers mean what they are said to mean. T steps, S state, A action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import Env, open_env
from ..results.lerobot_convention import ACTION_GROUPS, Convention, known_convention, told_convention
from ..results.lerobot_meta import ACTION, STATE, Dataset, Record, is_int
from ..results.lerobot_rows import read_rows
from ..results.lerobot_rules import settled
from ..types import BadRequest, Task
from .episode import episode_seed, guarded, told
from .recorders import proprio


@dataclass(frozen=True, slots=True)
class Planned:
    """One episode of a dataset and where it is played again."""

    record: Record
    task: Task
    trial: int
    seed: int  # of the run it came from, or the caller's
    recorded: str | None  # its outcome, if the dataset says so: then trial and seed are its own, and the replay should be exact


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of it."""

    planned: Planned
    success: bool
    steps: int  # at which success came, or that were played
    identical: bool | None  # every state row bit for bit the recorded one; None where that cannot be: the start is another
    apart: float  # m: how far the hand ever was from the recorded one, starts taken off
    error: str | None = None

    @property
    def holds(self) -> bool:
        """Whether it went as recorded: the same outcome at the same step in the same states; elsewhere, whether it succeeded."""
        if self.error is not None or self.planned.recorded is None:
            return self.success
        return bool(self.identical) and self.success == (self.planned.recorded == "success") and self.steps == self.planned.record.length


def plan(dataset: Dataset, tasks: Sequence[Task], episodes: Sequence[int] | None = None, *, seed: int = 0) -> list[Planned]:
    """Where each episode belongs, in the tasks' order.

    An episode that a run of ours wrote goes back to its own task, trial and seed. Another one goes to the task with its instruction; its
    start is not in the dataset, so the k-th such episode begins from the task's k-th initial state. Raises BadRequest for an episode that
    does not exist, was recorded under another protocol, or has no task here.
    """
    known = {record.index: record for record in dataset.episodes}
    if missing := [index for index in episodes or () if index not in known]:
        raise BadRequest(f"{dataset.root} has no episode {missing[0]}; it has {len(known)}, 0 to {max(known, default=0)}")
    by_id = {task.id: task for task in tasks}
    by_text = {_plain(task.instruction): task for task in tasks}
    counts: dict[str, int] = {}
    found = []
    for record in dataset.episodes:
        source = record.extra.get("source")
        source = source if isinstance(source, dict) else {}
        home, trial, own_seed = source.get("task"), source.get("trial"), source.get("seed", seed)
        recorded: str | None = None
        if isinstance(home, str) and is_int(trial) and is_int(own_seed):
            task, recorded = by_id.get(home), str(source.get("outcome"))
        else:
            home = None
            task = next((by_text[text] for text in map(_plain, record.tasks) if text in by_text), None)
            number = counts.get(task.id, 0) if task else 0
            trial, own_seed = number % (task.trials or number + 1) if task else 0, seed
            if task:
                counts[task.id] = number + 1
        if episodes is not None and record.index not in episodes:
            continue
        if task is None:
            where = repr(home) if home else f"instruction {record.tasks[0] if record.tasks else ''!r}"
            raise BadRequest(
                f"{dataset.root}: episode {record.index} is of {where}, which is none of {tasks[0].suite}'s tasks asked for; see --task"
            )
        found.append(Planned(record, task, trial, own_seed, recorded))
    order = {task.id: number for number, task in enumerate(tasks)}
    return sorted(found, key=lambda one: (order[one.task.id], one.record.index))


def meaning(dataset: Dataset, convention: str | None) -> Convention:
    """The convention to replay under: the one asked for, else the dataset's own. Raises BadRequest if there is neither."""
    if convention is not None:
        return known_convention(convention)
    own = told_convention(dataset.info)
    if own is None:
        raise BadRequest(
            f"{dataset.root}/meta/info.json states no convention of ours; say what its actions mean with --convention libero_sim or env"
        )
    return own


def replay(
    dataset: Dataset, planned: Sequence[Planned], convention: Convention, watch: Callable[[Planned], None] = lambda one: None
) -> Iterator[Replayed]:
    """Play the episodes again, one environment for all neighbours of one task. One that breaks says so, and the next is played."""
    env, task, limit = None, None, 0
    try:
        for one in planned:
            watch(one)
            if one.task != task or one.record.length > limit:
                if env is not None:
                    env.close()
                limit = max([one.task.max_steps, *(other.record.length for other in planned if other.task == one.task)])
                env, task = None, one.task
                env = open_env(_allowing(one.task, limit))
            yield _played(dataset, env, one, convention)
    finally:
        if env is not None:
            env.close()


def _played(dataset: Dataset, env: Env | None, one: Planned, convention: Convention) -> Replayed:
    assert env is not None
    actions, states = _rows(dataset, one.record, convention)
    shown: list[NDArray[Any]] = []
    outcome, error = guarded(lambda: _steps(env, one, actions, shown))
    success, steps = outcome or (False, max(len(shown) - 1, 0))
    again = np.array(shown[: len(states)]).reshape(-1, len(shown[0])) if shown else np.empty((0, states.shape[1]))
    rows = min(len(again), len(states))
    comparable = rows > 0 and again.shape[1] == states.shape[1]
    identical = comparable and one.recorded is not None and again[:rows].tobytes() == states[:rows].tobytes()
    apart = 0.0
    if comparable:
        moved, recorded = (hand[:rows, :3] - hand[0, :3] for hand in (again, states))
        apart = float(np.linalg.norm(moved - recorded, axis=1).max())
    return Replayed(one, success, steps, identical if one.recorded is not None else None, apart, None if error is None else told(error))


def _steps(env: Env, one: Planned, actions: NDArray[Any], shown: list[NDArray[Any]]) -> tuple[bool, int]:
    """Whether the goal was met, and after how many actions. `shown` fills with what the hand did: [8] float32 each."""
    observation, _ = env.reset(seed=episode_seed(one.seed, one.task.id, one.trial), options={"trial": one.trial})
    shown.append(proprio(observation))
    for step, action in enumerate(actions, 1):
        observation, _, terminated, truncated, info = env.step(action)
        shown.append(proprio(observation))
        if info["is_success"]:
            return True, step
        if terminated or truncated:
            return False, step
    return False, len(actions)


def _rows(dataset: Dataset, record: Record, convention: Convention) -> tuple[NDArray[Any], NDArray[Any]]:
    """[T, A] actions for the environment, [T, S] recorded states, both float32."""
    groups = dataset.groups.get("action", {})
    ordered = [groups[name] for name in ACTION_GROUPS] if ACTION_GROUPS.keys() <= groups.keys() else []
    names = frozenset({STATE, ACTION, *(group.column for group in ordered)})
    rows = settled(read_rows(dataset, record.index, names), dataset.root)
    assert rows is not None
    if ACTION not in rows and not ordered:
        raise BadRequest(f"{dataset.root}: no column {ACTION!r} and no groups {', '.join(ACTION_GROUPS)}, so there is nothing to replay")
    stored = (
        np.concatenate([_columns(rows[group.column])[:, group.start : group.end] for group in ordered], axis=1) if ordered else rows[ACTION]
    )
    states = _columns(rows[STATE]).astype(np.float32) if STATE in rows else np.empty((len(stored), 0), np.float32)
    return convention.executed(stored), states


def _columns(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1) if len(values) else values.reshape(0, 1)


def _allowing(task: Task, steps: int) -> Task:
    """The task with a limit that a longer recording fits into."""
    kwargs = {**task.env_kwargs, **({"max_steps": steps} if "max_steps" in task.env_kwargs else {})}
    return replace(task, max_steps=steps, env_kwargs=kwargs)


def _plain(text: str) -> str:
    return " ".join(text.lower().strip().rstrip(".").split())
