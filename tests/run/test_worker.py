"""A simulator's process: what it is started with, and what reaches it."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - to see it refused
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.policies.baseline import zero
from vla_eval.run.wire import MAGIC, Message, WireError, shallow
from vla_eval.run.worker import ONE_THREAD, Order, Worker, facts_from, spawn
from vla_eval.types import Task


@pytest.fixture
def worker() -> Iterator[Worker]:
    spawned = spawn()
    yield spawned
    spawned.close()


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("framed", [False, True])
def test_a_worker_refuses_a_pickle_and_ends(worker: Worker, tmp_path: Path, framed: bool) -> None:
    body = pickle.dumps(Bomb(tmp_path / "exploded"))
    os.write(worker.connection.fileno(), MAGIC + len(body).to_bytes(8, "big") + body if framed else body)
    assert worker.process.wait(60) == 0
    assert not (tmp_path / "exploded").exists()
    with pytest.raises(WireError, match="closed the connection"):
        worker.connection.receive(5)


def test_a_worker_listens_on_nothing_but_what_it_inherited(worker: Worker, toy: Task) -> None:
    worker.connection.send({"kind": "open", "task": shallow(toy)}, 5)
    worker.connection.receive(60)
    held = [os.readlink(f"/proc/{worker.process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{worker.process.pid}/fd")]
    assert sum(name.startswith("socket:") for name in held) == 1
    pid_sockets = Path(f"/proc/{worker.process.pid}/net/tcp").read_text()
    ours = [name.removeprefix("socket:[").removesuffix("]") for name in held if name.startswith("socket:")]
    assert not any(inode in pid_sockets for inode in ours)


def test_a_worker_has_one_thread_for_each_library_and_knows_our_modules(worker: Worker, toy: Task) -> None:
    environment = dict(line.split("=", 1) for line in Path(f"/proc/{worker.process.pid}/environ").read_text().split("\0") if "=" in line)
    assert {name: environment[name] for name in ONE_THREAD} == dict.fromkeys(ONE_THREAD, "1")
    worker.connection.send({"kind": "open", "task": shallow(toy)}, 5)
    facts = facts_from(worker.connection.receive(60)["facts"])
    assert facts.versions == {"toy": "1"}
    assert facts.interface.cameras["agentview"] == (64, 64)
    assert facts.draws_later


def test_a_worker_says_why_an_environment_cannot_be_built(worker: Worker, toy: Task) -> None:
    worker.connection.send({"kind": "open", "task": shallow(replace(toy, env_kwargs={"task": 9}))}, 5)
    reply = worker.connection.receive(60)
    assert (reply["kind"], reply["mend"]) == ("broken", "the toy has tasks 0 to 3, not 9")
    worker.connection.send({"kind": "open", "task": shallow(toy)}, 5)  # and is there for the next
    assert worker.connection.receive(60)["kind"] == "opened"


def test_a_worker_whose_parent_is_gone_ends(toy: Task) -> None:
    orphan = spawn()
    orphan.connection.close()
    assert orphan.process.wait(60) == 0
    orphan.end()


def played(worker: Worker, order: Order) -> list[Message]:
    """What a worker says while it plays an order and each of its questions is answered with holding still."""
    message = {**shallow(order), "task": shallow(order.task), "needs": shallow(order.needs)}
    worker.connection.send({"kind": "play", "order": message}, 5)
    said = [worker.connection.receive(60)]
    while said[-1]["kind"] != "record":
        if said[-1]["kind"] == "ask":
            chunk = {"actions": np.zeros((8, 7)), "seconds": {}, "memory": None}
            worker.connection.send({"kind": "chunk", "chunk": chunk, "seconds": 0.0, "batch": 1}, 5)
        said.append(worker.connection.receive(60))
    return said


def test_an_episode_that_breaks_while_the_policy_computes_leaves_no_answer_behind(worker: Worker, toy: Task) -> None:
    worker.connection.send({"kind": "open", "task": shallow(toy)}, 5)
    worker.connection.receive(60)
    order = Order(toy, 0, 0, 8, zero().needs, None, None)
    whole = played(worker, order)
    assert [message["kind"] for message in whole] == ["soon", "ask"] * 10 + ["record"]
    worker.trace.seek(0)
    states = np.frombuffer(worker.trace.read()).reshape(81, -1).copy()  # the start's and 80 steps'
    states[8] += 1  # recorded when the second chunk has been asked for
    *said, last = played(worker, replace(order, first=states.tobytes()))
    assert [message["kind"] for message in said] == ["soon", "ask"] * 2
    assert last["record"]["error"].startswith("Diverged: the replay is not what the first attempt was: states differ at step 8,")
    again = played(worker, order)
    assert [message["request"]["step"] for message in again if message["kind"] == "ask"] == list(range(0, 80, 8))
    assert again[-1]["record"]["outcome"] == "failure"
