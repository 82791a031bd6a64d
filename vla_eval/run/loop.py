"""All episodes of a run: the ledger, its workers, batches of requests, and what is left after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..results.folder import RunFolder
from ..types import EpisodeRecord, Policy, RunManifest, Task

StopRule = Callable[[Sequence[EpisodeRecord]], str | None]  # the finished prefix of the ledger -> why to stop, or None


def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    trials: int = 10,
    seed: int = 0,
    workers: int = 1,
    replan: int | None = None,
    batch: int = 1,
    out: str | os.PathLike[str] | None = None,
) -> Iterator[EpisodeRecord]:
    """Play every (task, trial) and yield each record as it is finished; `out` is the folder that gets a run folder."""
    with start(policy, tasks, trials=trials, seed=seed, workers=workers, replan=replan, batch=batch, out=out) as run:
        yield from run


def start(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    trials: int = 10,
    seed: int = 0,
    workers: int = 1,
    replan: int | None = None,
    batch: int = 1,
    out: str | os.PathLike[str] | None = None,
    video: bool = False,
    command: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    bundle: str | None = None,
    backend: str = "none",
    engines: Mapping[str, Any] | None = None,
    stop: StopRule | None = None,
) -> Run:
    """A new run: everything checked, the first simulator standing, the manifest written; nothing played yet.

    Raises BadRequest or ContractMismatch, and then leaves nothing behind.
    """
    raise NotImplementedError


def resume(
    folder: str | os.PathLike[str],
    policy: Policy,
    tasks: Sequence[Task],
    *,
    workers: int = 1,
    trials: int | None = None,
    seed: int | None = None,
    replan: int | None = None,
    batch: int | None = None,
    video: bool = False,
    options: Mapping[str, Any] | None = None,
    bundle: str | None = None,
    accept_revision: bool = False,
    stop: StopRule | None = None,
) -> Run:
    """A run folder's run once more: what is missing or ended in an error. `tasks` are those of the run; None means as it was.

    Raises BadRequest, naming the difference, when protocol, policy, bundle, seed, simulator versions or schema are not the run's.
    """
    raise NotImplementedError


class Run:
    """Episodes being played: a context manager, and an iterator of their records in finishing order."""

    folder: RunFolder | None  # None: nothing is written
    manifest: RunManifest
    todo: Sequence[tuple[str, int]]  # (task, trial) that this process plays, in ledger order
    path: Path | None
    stopped: str | None  # what the stop rule said

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return self

    def __next__(self) -> EpisodeRecord:
        raise NotImplementedError

    def close(self) -> None:
        """End the workers and let go of the folder; safe to call twice."""
