"""One simulator in a process of its own: `python -m vla_eval.run.worker SOCKET TRACE`, both inherited, and the handle on it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..contract import Env, open_env
from ..types import EpisodeRecord, Interface, Recorder, Task, VlaEvalError
from .episode import Answer, Ask, Facts, Look, PolicyRaised, facts_of, guarded, rollout, told
from .recorders import ArrayRecorder, FrameRecorder, TraceRecorder
from .wire import Connection, Known, Message, WireError, chunk_from, interface_from, request_map, shallow, task_from

ANSWER_SECONDS = 3600.0  # a worker's patience with the policy's process: its first answer may build engines
SEND_SECONDS = 60.0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class Order:
    """One episode to play, as a worker is told."""

    task: Task
    trial: int
    seed: int  # the run's
    replan: int
    needs: Interface
    arrays: str | None  # where the episode's arrays go
    video: str | None  # where its frames go, if the environment cannot draw them later
    attempt: int = 1
    first: bytes = b""  # the states that the first attempt left


def play(env: Env, ask: Ask, order: Order, trace: Any = None) -> EpisodeRecord:
    """Play an order. Raises OSError if its files cannot be written."""
    recorders: list[Recorder] = []
    if trace is not None:
        recorders.append(TraceRecorder(trace, order.first))
    if order.arrays is not None:
        recorders.append(ArrayRecorder(Path(order.arrays)))
    if order.video is not None:
        recorders.append(FrameRecorder(Path(order.video), order.needs.control_hz or 20))
    return rollout(
        env,
        ask,
        order.task,
        order.needs,
        trial=order.trial,
        seed=order.seed,
        replan=order.replan,
        attempt=order.attempt,
        recorders=recorders,
    )


def main() -> None:
    """Serve the process that holds the other end of the socket, until it closes it."""
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    with open(int(sys.argv[2]), "r+b", buffering=0) as trace, contextlib.suppress(WireError):
        _serve(connection, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a simulator's destructors have nothing left to say


def _serve(connection: Connection, trace: Any) -> None:
    env: Env | None = None
    known: Known = {}

    def ask(look: Look, meanwhile: Callable[[], None]) -> Answer:
        nonlocal known
        connection.send({"kind": "soon"}, SEND_SECONDS)  # that process wakes while this one looks
        asked, told_now = request_map(look(), known)
        connection.send({"kind": "ask", "request": asked}, SEND_SECONDS)
        known = told_now  # only now: what could not be sent is not known
        try:
            meanwhile()
        finally:  # whatever broke: an answer that nobody heard would be taken for the next message
            reply = connection.receive(ANSWER_SECONDS)
        if reply["kind"] == "raised":
            raise PolicyRaised(reply["error"])
        return Answer(chunk_from(reply["chunk"]), reply["seconds"], reply["batch"])

    while (message := connection.receive(ANSWER_SECONDS))["kind"] != "close":
        if message["kind"] == "open":
            if env is not None:
                env.close()
            task = task_from(message["task"])
            env, reply = opened(task)
            connection.send(reply, SEND_SECONDS)
        elif message["kind"] == "play" and env is not None:
            order = order_from(message["order"])
            try:
                record = play(env, ask, order, trace)
            except OSError as error:
                connection.send({"kind": "unwritable", "error": f"{order.arrays}: {error.strerror or error}"}, SEND_SECONDS)
                continue
            connection.send({"kind": "record", "record": shallow(record)}, SEND_SECONDS)
    if env is not None:
        env.close()


def opened(task: Task) -> tuple[Env | None, Message]:
    """The task's environment, and what to say about it: its facts, or why there is none."""
    env, error = guarded(lambda: open_env(task))
    if env is None:
        return None, broken(error)
    facts, error = guarded(lambda: facts_of(env, task))
    if facts is None:
        env.close()
        return None, broken(error)
    return env, {"kind": "opened", "facts": shallow(facts) | {"interface": shallow(facts.interface)}}


def broken(error: Exception | None) -> Message:
    mendable = isinstance(error, VlaEvalError)
    return {"kind": "broken", "error": told(error) if error else "", "mend": str(error) if mendable else None}


def facts_from(data: Mapping[str, Any]) -> Facts:
    try:
        return Facts(**{**data, "interface": interface_from(data["interface"])})
    except (TypeError, KeyError) as error:
        raise WireError(f"a message holds no facts ({error})") from error


def order_from(data: Mapping[str, Any]) -> Order:
    return Order(**{**data, "task": task_from(data["task"]), "needs": interface_from(data["needs"])})


class Ending(NamedTuple):
    """What is left of a simulator's process."""

    told: str  # how it ended by itself, and its last words
    states: bytes  # of the episode that it played


@dataclass(slots=True)
class Worker:
    """The handle on a simulator's process."""

    process: subprocess.Popen[bytes]
    connection: Connection
    trace: Any  # a file without a name, that the process writes its states to
    words: Any  # a file without a name: what the process printed
    task: str | None = None  # whose environment it holds
    deadline: float = field(default=float("inf"))  # by when it must have said something
    known: Known = field(default_factory=dict)  # what it told with its requests

    def forget(self) -> None:
        """Empty the trace: what an earlier episode left there is no attempt at the next one."""
        os.ftruncate(self.trace.fileno(), 0)

    def expect(self, seconds: float) -> None:
        """Something must come within `seconds`."""
        self.deadline = time.monotonic() + seconds

    def close(self, seconds: float = 5.0) -> None:
        """Let it go in peace, or end it."""
        with contextlib.suppress(WireError):
            self.connection.send({"kind": "close"}, 1.0)
        self.end(seconds)

    def end(self, patience: float = 0.0) -> Ending:
        """End it, at once or when it has not ended itself for `patience` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        fate = "" if self.process.returncode is None else _fate(self.process.returncode)
        self.process.kill()
        self.process.wait()
        self.connection.close()
        with self.trace as trace, self.words as words:
            trace.seek(0)
            return Ending(", ".join(part for part in (fate, last_words(words)) if part), trace.read())


def spawn() -> Worker:
    """Start a simulator's process: it finds the modules that this one finds, and Ctrl-C is not for it."""
    here, there = socket.socketpair()
    trace = os.fdopen(os.memfd_create("states"), "r+b", buffering=0)  # in memory: a full disk must not break a replay
    words = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the worker)
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONHASHSEED": "0"}
    with there:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vla_eval.run.worker", str(there.fileno()), str(trace.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            pass_fds=(there.fileno(), trace.fileno()),
            process_group=0,
        )
    return Worker(process, Connection(here), trace, words)


def last_words(file: Any) -> str:
    """The last line that a process printed."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 2000, 0))
    lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f"its last words: {lines[-1]}" if lines else ""


def _fate(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


if __name__ == "__main__":
    main()
