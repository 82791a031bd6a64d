"""All episodes of a run: the ledger, its workers, batches of requests, and what is left after an interruption."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract import Env, check_contract
from ..results import folder as folders
from ..results.folder import RunFolder
from ..types import SEED_LIMIT, BadRequest, EpisodeRecord, Interface, Policy, Request, RunManifest, Task, VlaEvalError
from . import manifest as manifests
from .episode import Answer, Facts, answers, in_process, told
from .wire import Message, WireError, record_from, request_from, shallow
from .worker import Ending, Order, Worker, facts_from, opened, play, spawn

if TYPE_CHECKING:
    from ..results.sequential import Rule


ATTEMPTS = 2  # an episode whose simulator died is played once more
PROCESS_BYTES = 60 << 20  # of a simulator's process that holds next to nothing
_SEND_SECONDS = 60.0
_DYING_SECONDS = 5.0  # between a process's last byte and its exit status

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a simulator may be silent, in seconds, before it is taken for dead. Generous: a loaded machine draws five times slower."""

    construct: float = 300.0
    reset: float = 300.0
    step: float = 30.0
    look: float = 120.0
    write: float = 120.0


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
    stop: Rule | None = None,
    limits: Limits | None = None,
) -> Run:
    """A new run: everything checked, the first simulator standing, the manifest written; nothing played yet.

    Raises BadRequest or ContractMismatch, and then leaves nothing behind.
    """
    _check_tasks(tasks, trials)
    _check_numbers(trials=trials, seed=seed, workers=workers, batch=batch)
    executed, source = _replan(policy, tasks, replan)
    if video and out is None:
        raise BadRequest("a video needs a run folder; say with `out` where")
    ledger = [(task.id, trial) for task in tasks for trial in range(trials)]
    if stop is not None:  # any prefix is then a fair sample of all tasks
        ledger = [ledger[index] for index in np.random.default_rng(seed).permutation(len(ledger))]
    manifest = manifests.build(
        policy,
        tasks,
        ledger,
        trials=trials,
        seed=seed,
        batch=batch,
        replan=executed,
        replan_source=source,
        command=command,
        options=_json(options or {}, "options"),
        bundle=bundle,
        backend=backend,
        engines=_json(engines or {}, "engines"),
    )
    _json(manifest.protocol, "protocol")
    if stop is not None:
        manifest = replace(manifest, stop=stop.to_json())
    run = Run(policy, tasks, manifest, workers=workers, video=video, stop=stop, limits=limits or Limits())
    try:
        run._stand()
        if stop is not None:
            stop.admit(run.manifest)
        if out is not None:
            run._keep(folders.create(Path(out), run.manifest))
    except BaseException:
        run.close()
        raise
    return run


def resume(
    folder: str | os.PathLike[str] | RunFolder,
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
    backend: str = "none",
    engines: Mapping[str, Any] | None = None,
    accept_revision: bool = False,
    limits: Limits | None = None,
) -> Run:
    """A folder's run once more: what is missing or ended in an error. Numbers that are None are the run's.

    Raises BadRequest, naming the difference, when protocol, policy, bundle, engines, seed, simulator versions or schema are not the run's.
    """
    kept = folder if isinstance(folder, RunFolder) else folders.open_run(folder)
    old = kept.manifest
    trials, seed, batch = (
        (old.trials if trials is None else trials),
        (old.seed if seed is None else seed),
        (old.batch if batch is None else batch),
    )
    if replan is None and old.protocol.get("replan") == "option":
        replan = old.replan
    _check_tasks(tasks, trials)
    _check_numbers(trials=trials, seed=seed, workers=workers, batch=batch)
    executed, source = _replan(policy, tasks, replan)
    now = manifests.build(
        policy,
        tasks,
        old.ledger,
        trials=trials,
        seed=seed,
        batch=batch,
        replan=executed,
        replan_source=source,
        command=old.command,
        options=old.options if options is None else options,
        bundle=bundle,
        backend=backend,
        engines=engines or {},
    )
    if changes := manifests.changed(old, now):
        raise BadRequest(
            f"{kept.path}: cannot be resumed, it would no longer be one run: {'; '.join(changes[:3])}. Start a new run instead"
        )
    if set(old.ledger) != {(task.id, trial) for task in tasks for trial in range(trials)}:
        raise BadRequest(f"{kept.path}: its manifest's ledger is not {trials} trials of its tasks; it has been edited")
    then = {key: value for key, value in old.revision.items() if key != "resumed"}
    latest = old.revision.get("resumed", [then])[-1]
    if latest != now.revision:
        if not accept_revision:
            differs = "; ".join(manifests.differences(latest, now.revision))
            raise BadRequest(f"{kept.path}: was played by another vla-eval ({differs}); go on with --accept-revision, or start a new run")
        old = replace(old, revision={**old.revision, "resumed": [*old.revision.get("resumed", []), now.revision]})
    stop = None
    if old.stop:
        from ..results.sequential import Rule  # brings scipy along

        stop = Rule.from_json(old.stop)
    run = Run(policy, tasks, old, workers=workers, video=video, stop=stop, limits=limits or Limits())
    try:
        run._keep(kept)
        if run.todo:
            run._stand()
            run._amend(run.manifest)
    except BaseException:
        run.close()
        raise
    return run


@dataclass(slots=True)
class _Job:
    """An episode that is being played, or to be played again."""

    index: int  # in the ledger
    task: Task
    trial: int
    attempt: int = 1
    first: bytes = b""  # the states that its first attempt left
    chunks: int = 0
    steps: int = 0
    began: float = 0.0


@dataclass(slots=True)
class _Seat:
    """One of the places at which episodes are played at the same time."""

    worker: Worker | None = None
    job: _Job | None = None
    asked: Request | None = None
    since: float = 0.0


class Run:
    """Episodes being played: a context manager, and an iterator of their records in finishing order.

    `todo` is what this process plays, `before` the records that an interrupted run left; `stopped` is what the stop rule said.
    """

    def __init__(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        manifest: RunManifest,
        *,
        workers: int,
        video: bool,
        stop: Rule | None,
        limits: Limits,
    ) -> None:
        self.manifest, self.folder = manifest, None
        self.todo: list[tuple[str, int]] = list(manifest.ledger)
        self.before: list[EpisodeRecord] = []
        self.stopped: str | None = None
        self._policy, self._tasks, self._needs = policy, {task.id: task for task in tasks}, _interface(policy)
        self._video, self._stop, self._limits = video, stop, limits
        self._facts: dict[str, Facts] = {}
        self._done: dict[tuple[str, int], EpisodeRecord] = {}
        self._seats = [_Seat() for _ in range(workers)]
        self._here: tuple[str, Env] | None = None  # with no workers: the task whose environment stands in this process
        self._again: list[_Job] = []
        self._open = contextlib.ExitStack()
        self._last_answer = 0.0  # seconds
        self._records: Iterator[EpisodeRecord] | None = None

    folder: RunFolder | None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return self

    def __next__(self) -> EpisodeRecord:
        if self._records is None:
            self._records = self._play_here() if not self._seats else self._play_apart()
        return next(self._records)

    def close(self) -> None:
        """End the workers and let go of the folder; safe to call twice."""
        for seat in self._seats:
            if seat.worker is not None:
                if seat.job is None:
                    seat.worker.close()
                else:
                    seat.worker.end()
                seat.worker = None
        if self._here is not None:
            self._here[1].close()
            self._here = None
        self._open.close()

    # What must be known before the first step.

    def _stand(self) -> None:
        """Let the first simulator stand, so that what it needs, offers and is can be checked and written down."""
        task = self._tasks[self.todo[0][0]]
        workers = min(len(self._seats), len(self.todo))
        if workers < len(self._seats):
            _log.warning("%d workers are enough: that many episodes are to be played", workers)
        _check_memory(workers, workers * PROCESS_BYTES)
        if not self._seats:
            env, message = opened(task)
            self._here = (task.id, env) if env is not None else None
        else:
            worker = self._seats[0].worker = spawn()
            try:
                worker.connection.send({"kind": "open", "task": shallow(task)}, _SEND_SECONDS)
                message = worker.connection.receive(self._limits.construct)
            except WireError as error:  # it will be tried again, as the first episode's simulator
                _log.warning("%s: the first simulator did not stand (%s; %s)", task.id, error, worker.end().told)
                self._seats[0].worker = None
                return
            worker.task = task.id if message["kind"] == "opened" else None
        if message["kind"] == "opened":
            facts = facts_from(message["facts"])
            self._admit(task, facts)
            _check_memory(workers, (workers - 1) * max(facts.bytes, PROCESS_BYTES))
        elif message["mend"]:
            raise BadRequest(message["mend"])
        else:
            _log.warning("%s: the first simulator did not stand (%s)", task.id, message["error"])

    def _admit(self, task: Task, facts: Facts) -> None:
        """Check an environment against the policy and the run, and write down what it is. Raises ContractMismatch or BadRequest."""
        check_contract(self._policy.name, self._needs, task.id, facts.interface)
        self._facts[task.id] = facts
        tasks = self.manifest.protocol["tasks"]
        known = tasks[task.id]["starts"]
        if known is not None and known != facts.starts:
            raise BadRequest(
                f"{task.id}: its initial states are {facts.starts}, and were {known} when this run began; start a new run instead"
            )
        versions = {**self.manifest.versions, **facts.versions}
        if differs := manifests.differences(self.manifest.versions, {name: versions[name] for name in self.manifest.versions}, "versions"):
            raise BadRequest(f"{task.id}: the simulator is not what this run began with: {'; '.join(differs)}. Start a new run instead")
        said = {"starts": facts.starts, "control_hz": facts.interface.control_hz}
        protocol = {**self.manifest.protocol, "tasks": {**tasks, task.id: {**tasks[task.id], **said}}}
        amended = replace(self.manifest, protocol=protocol, versions=versions, hardware={**self.manifest.hardware, **facts.hardware})
        if amended != self.manifest:
            self._amend(amended)

    def _amend(self, manifest: RunManifest) -> None:
        self.manifest = manifest
        if self.folder is not None and manifest != self.folder.manifest:
            self.folder = folders.amend(self.folder, manifest)

    def _keep(self, folder: RunFolder) -> None:
        """Hold a run folder: what it has of the ledger need not be played."""
        self._open.enter_context(folder.locked())
        folder.sweep()
        self.folder = folder
        self.before = [record for record in folder.records() if record.outcome != "error" and self._whole(folder, record)]
        self._done = {(record.task, record.trial): record for record in self.before}
        self.todo = [key for key in self.manifest.ledger if key not in self._done]
        if self._stop is not None and (why := self._stop.of(self.before, self.manifest.ledger)):
            self.stopped, self.todo = why, []

    @staticmethod
    def _whole(folder: RunFolder, record: EpisodeRecord) -> bool:
        """Whether a record's arrays are there too: without them nothing can be drawn, checked or sorted."""
        arrays = folder.episode_path(record.task, record.trial)
        if not arrays.exists():
            _log.warning("%s is gone, and %s trial %d will be played again", arrays, record.task, record.trial)
            return False
        return True

    # Episodes in this process, for a debugger.

    def _play_here(self) -> Iterator[EpisodeRecord]:
        for index, (task_id, trial) in enumerate(self.todo):
            job = _Job(index, self._tasks[task_id], trial, began=time.monotonic())
            yield self._finish(self._played_here(job))
            if self.stopped:
                return

    def _played_here(self, job: _Job) -> EpisodeRecord:
        if self._here is None or self._here[0] != job.task.id:
            if self._here is not None:
                self._here[1].close()
                self._here = None
            env, message = opened(job.task)
            if env is None:
                return self._error(job, message["error"])
            self._here = job.task.id, env
            try:
                self._admit(job.task, facts_from(message["facts"]))
            except VlaEvalError as error:
                return self._error(job, told(error))
        try:
            record = play(self._here[1], in_process(self._policy), self._order(job))
        except OSError as error:
            raise self._unwritable(str(error.strerror or error)) from error
        if record.outcome == "error":  # whatever broke must not reach the next episode
            self._here[1].close()
            self._here = None
        return record

    # Episodes in processes of their own.

    def _play_apart(self) -> Iterator[EpisodeRecord]:
        waiting = {key: index for index, key in enumerate(self.todo)}
        while waiting or self._again or any(seat.job for seat in self._seats):
            for seat in self._seats:
                if seat.job is None and (job := self._next(seat, waiting)) is not None:
                    self._give(seat, job)
            for record in self._hear():
                yield self._finish(record)
                if self.stopped:
                    return
            self._answer()

    def _next(self, seat: _Seat, waiting: dict[tuple[str, int], int]) -> _Job | None:
        """What to play next: what died, else more of the task whose environment stands here, else of a task that nobody holds, else any."""
        if self._again:
            return self._again.pop(0)
        if not waiting:
            return None
        held = {other.job.task.id for other in self._seats if other.job is not None}
        mine = seat.worker.task if seat.worker is not None else None
        key = next(iter(waiting))
        if self._stop is None:  # a stop rule reads the ledger's finished prefix, so it is played in order
            key = next((k for k in waiting if k[0] == mine), None) or next((k for k in waiting if k[0] not in held), None) or key
        return _Job(waiting.pop(key), self._tasks[key[0]], key[1])

    def _give(self, seat: _Seat, job: _Job) -> None:
        seat.job, seat.asked = job, None
        job.began, job.steps, job.chunks = time.monotonic(), 0, 0
        if seat.worker is None:
            seat.worker = spawn()
        seat.worker.forget()
        try:
            if seat.worker.task == job.task.id:
                self._begin(seat.worker, job)
            else:
                seat.worker.task = None
                seat.worker.connection.send({"kind": "open", "task": shallow(job.task)}, _SEND_SECONDS)
                seat.worker.expect(self._limits.construct)
        except WireError as error:  # it died while it had nothing to do: that costs no attempt
            _log.debug("worker: %s; %s", error, seat.worker.end().told)
            seat.worker, seat.job = None, None
            self._again.insert(0, job)

    def _begin(self, worker: Worker, job: _Job) -> None:
        order = self._order(job)
        message = {"kind": "play", "order": {**shallow(order), "task": shallow(order.task), "needs": shallow(order.needs)}}
        worker.connection.send(message, _SEND_SECONDS)
        worker.expect(self._limits.reset + self._limits.look)

    def _order(self, job: _Job) -> Order:
        arrays = video = None
        if self.folder is not None:
            arrays = str(self.folder.episode_path(job.task.id, job.trial).absolute())
            if self._video and job.task.id in self._facts and not self._facts[job.task.id].draws_later:
                video = str(self.folder.episode_path(job.task.id, job.trial, ".mp4").absolute())
        return Order(job.task, job.trial, self.manifest.seed, self.manifest.replan, self._needs, arrays, video, job.attempt, job.first)

    def _hear(self) -> Iterator[EpisodeRecord]:
        """Wait until a worker says something, or falls silent for too long."""
        busy = {seat.worker.connection.fileno(): seat for seat in self._seats if seat.worker is not None and seat.job is not None}
        if not busy:
            return
        poll = select.poll()
        for fileno in busy:
            poll.register(fileno, select.POLLIN)
        heard = {fileno for fileno, _ in poll.poll(1000 * max(self._wait_seconds(), 0.0))}
        for fileno, seat in busy.items():
            worker, job = seat.worker, seat.job
            if worker is None or job is None:
                continue
            try:
                if fileno in heard:
                    messages = worker.connection.arrived()
                    if not messages:  # half a picture is a sign of life too
                        worker.deadline = max(worker.deadline, time.monotonic() + _SEND_SECONDS)
                    for message in messages:
                        if (record := self._handle(seat, worker, job, message)) is not None:
                            yield record
                elif seat.asked is None and time.monotonic() > worker.deadline:
                    raise WireError(f"no sign of life while it should {self._doing(seat)}")
            except WireError as error:
                hangs = fileno not in heard
                if (record := self._bury(seat, job, str(error), worker.end(0.0 if hangs else _DYING_SECONDS))) is not None:
                    yield record

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        asked = [seat.since for seat in self._seats if seat.asked is not None]
        if asked:
            return 0.0 if self._full() else min(asked) + self._last_answer - now
        return min(seat.worker.deadline for seat in self._seats if seat.worker is not None and seat.job is not None) - now + 0.01

    def _full(self) -> bool:
        asked = sum(seat.asked is not None for seat in self._seats)
        return asked >= min(self.manifest.batch, sum(seat.job is not None for seat in self._seats))

    def _handle(self, seat: _Seat, worker: Worker, job: _Job, message: Message) -> EpisodeRecord | None:
        match message:
            case {"kind": "ask", "request": request}:
                seat.asked, seat.since = request_from(request, worker.known), time.monotonic()
                job.steps, job.chunks = seat.asked.step, job.chunks + 1
            case {"kind": "soon"}:  # it looks now and asks then: this process is awake, which is all that was wanted
                pass
            case {"kind": "record", "record": record}:
                seat.job, seat.asked = None, None
                found = record_from(record)
                if found.outcome == "error":  # whatever broke must not reach the next episode
                    worker.task = None
                return found
            case {"kind": "opened", "facts": facts}:
                worker.task = job.task.id
                try:
                    self._admit(job.task, facts_from(facts))
                except VlaEvalError as error:
                    seat.job = None
                    return self._error(job, told(error))
                self._begin(worker, job)
            case {"kind": "broken", "error": str(error)}:
                seat.job = None
                return self._error(job, error)
            case {"kind": "unwritable", "error": str(error)}:
                raise self._unwritable(error)
            case _:
                raise WireError(f"it sent a message of kind {message['kind']!r}, which nobody asked for")
        return None

    def _answer(self) -> None:
        """Ask the policy for those who wait, up to the batch; with more than one row, mates are waited for as long as one answer takes."""
        asking = sorted((seat for seat in self._seats if seat.asked is not None), key=lambda seat: seat.since)[: self.manifest.batch]
        if not asking or not (self._full() or time.monotonic() - asking[0].since >= self._last_answer):
            return
        asking.sort(key=lambda seat: seat.job.index if seat.job else 0)
        requests = [seat.asked for seat in asking if seat.asked is not None]
        began = time.monotonic()
        given = answers(self._policy, requests)
        self._last_answer = time.monotonic() - began
        for seat in self._seats:
            if seat.worker is not None:
                seat.worker.deadline += self._last_answer  # this process did not listen, and may have taken every core
        for seat, answer in zip(asking, given, strict=True):
            seat.asked = None
            if seat.worker is None:
                continue
            with contextlib.suppress(WireError):  # the next look at its socket finds it dead
                if isinstance(answer, Answer):
                    chunk = shallow(answer.chunk) | {"seconds": dict(answer.chunk.seconds)}
                    reply = {"kind": "chunk", "chunk": chunk, "seconds": answer.seconds, "batch": answer.batch}
                else:
                    reply = {"kind": "raised", "error": told(answer)}
                seat.worker.connection.send(reply, _SEND_SECONDS)
            seat.worker.expect(self.manifest.replan * self._limits.step + self._limits.look + self._limits.write)

    def _bury(self, seat: _Seat, job: _Job, why: str, ending: Ending) -> EpisodeRecord | None:
        """A worker died or hangs: its episode is played once more by the next one, and is an error after that."""
        seat.worker, seat.job, seat.asked = None, None, None
        reason = f"the simulator's process died ({', '.join(part for part in (why, ending.told) if part)})"
        _log.warning("%s trial %d, attempt %d: %s", job.task.id, job.trial, job.attempt, reason)
        if job.attempt < ATTEMPTS:
            self._again.append(replace(job, attempt=job.attempt + 1, first=ending.states))
            return None
        return self._error(job, reason)

    def _doing(self, seat: _Seat) -> str:
        assert seat.worker is not None
        assert seat.job is not None
        if seat.worker.task is None:
            return f"build the environment within {self._limits.construct:g} s"
        return f"reset within {self._limits.reset:g} s" if not seat.job.chunks else f"step after step {seat.job.steps}"

    # What becomes of an episode.

    def _finish(self, record: EpisodeRecord) -> EpisodeRecord:
        if self.folder is not None:
            self.folder.append(record)
        self._done[record.task, record.trial] = record
        if self._stop is not None:
            self.stopped = self._stop.of(self._done.values(), self.manifest.ledger)
        return record

    def _error(self, job: _Job, error: str) -> EpisodeRecord:
        seconds = time.monotonic() - job.began
        return EpisodeRecord(
            task=job.task.id,
            trial=job.trial,
            seed=self.manifest.seed,
            outcome="error",
            steps=job.steps,
            chunks=job.chunks,
            attempts=job.attempt,
            seconds=seconds,
            policy_seconds=0.0,
            error=error,
            timing={"waiting": seconds},
        )

    def _unwritable(self, why: str) -> BadRequest:
        path = self.folder.path if self.folder is not None else "?"
        return BadRequest(f"{path}: cannot be written ({why}); make room and go on with --resume {path}")


def _check_tasks(tasks: Sequence[Task], trials: int) -> None:
    if not tasks:
        raise BadRequest("no tasks to play; name at least one")
    if len(suites := {task.suite for task in tasks}) > 1:
        raise BadRequest(f"one run is one suite, not {', '.join(sorted(suites))}; make a run of each")
    if len({task.id for task in tasks}) < len(tasks):
        raise BadRequest("a task is named twice; each (task, trial) is played once")
    for task in tasks:
        if task.max_steps < 1:
            raise BadRequest(f"{task.id}: a limit of {task.max_steps} steps lets nobody act; at least 1")
        if task.trials is not None and trials > task.trials:
            raise BadRequest(
                f"{task.id} has {task.trials} initial states, and {trials} trials would repeat some; ask for {task.trials} at most"
            )


def _check_numbers(*, trials: int, seed: int, workers: int, batch: int) -> None:
    for name, number, least in (("trials", trials, 1), ("workers", workers, 0), ("batch", batch, 1), ("seed", seed, 0)):
        if number < least:
            raise BadRequest(f"{name} is {number}; at least {least}")
    if seed >= SEED_LIMIT:
        raise BadRequest(f"seed is {seed}; it must be below {SEED_LIMIT}")


def _replan(policy: Policy, tasks: Sequence[Task], replan: int | None) -> tuple[int, str]:
    """How many actions of a chunk are executed, and who says so."""
    if replan is not None:
        executed, source = replan, "option"
    else:
        said = {task.replan.get(policy.name) for task in tasks}
        if len(said) > 1:
            raise BadRequest(
                f"the tasks of {tasks[0].suite} do not agree on how much of {policy.name}'s chunk is executed; say it with --replan"
            )
        (known,) = said
        executed, source = (policy.horizon, "horizon") if known is None else (known, "protocol")
    if not 1 <= executed <= policy.horizon:
        raise BadRequest(
            f"replan is {executed}, but policy {policy.name!r} answers with {policy.horizon} actions; between 1 and {policy.horizon}"
        )
    return executed, source


def _check_memory(workers: int, wanted: int) -> None:
    """Refuse workers that this machine's memory cannot hold, before they freeze it."""
    free = free_bytes()
    if free is not None and wanted > free:
        raise BadRequest(
            f"{workers} workers need about {wanted / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free; ask for fewer with --workers"
        )


def free_bytes() -> int | None:
    """Memory that this process and its children may still take: the machine's or the container's, whichever is less; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = Path("/sys/fs/cgroup")
        cached = next(line for line in (group / "memory.stat").read_text().splitlines() if line.startswith("inactive_file"))
        used = int((group / "memory.current").read_text()) - int(cached.split()[1])  # cached files give way
        found.append(int((group / "memory.max").read_text()) - used)
    return min(found, default=None)


def _interface(policy: Policy) -> Interface:
    needs = policy.needs
    return replace(needs, cameras=dict(needs.cameras), state=dict(needs.state), action=list(needs.action))


def _json(data: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The data as JSON will give it back. Raises BadRequest for what is no plain data."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(data, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{what} of a run must be plain data to be written down ({error})") from error
    return plain
