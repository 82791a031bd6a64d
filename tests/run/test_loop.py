"""All episodes of a run: the same records however they are played, and whatever is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imageio_ffmpeg import count_frames_and_secs

import vla_eval
from vla_eval.policies.baseline import random, replay, zero
from vla_eval.registry import load_tasks
from vla_eval.results import folder as folders
from vla_eval.results.folder import RunFolder, open_run, untimed
from vla_eval.results.report import report
from vla_eval.results.sequential import parse_rule, stopped
from vla_eval.run import loop, manifest
from vla_eval.run.loop import Limits, resume, start
from vla_eval.run.worker import Worker, facts_from, spawn
from vla_eval.testing import ToyExpert
from vla_eval.types import (
    ARM_ACTION,
    ARM_STATE,
    ActionChunk,
    BadRequest,
    ContractMismatch,
    EpisodeRecord,
    Interface,
    Policy,
    Request,
    Task,
    VlaEvalError,
)

pytestmark = pytest.mark.usefixtures("strangers")
TIMED = ("request_seconds", "request_batch")  # of an episode's arrays: how it was played, not what happened


def plays(policy: Policy, tasks: Sequence[Task], out: Path, **kwargs: Any) -> RunFolder:
    with start(policy, tasks, out=out, **kwargs) as run:
        list(run)
    assert run.folder is not None
    return run.folder


def outcome(folder: RunFolder) -> list[EpisodeRecord]:
    """What must be equal however the run was played."""
    return sorted((untimed(record) for record in folder.records()), key=lambda record: (record.task, record.trial))


def arrays(folder: RunFolder) -> dict[tuple[str, int], dict[str, Any]]:
    names = [field.name for field in fields(folders.Episode) if field.name not in TIMED]
    episodes = {key: folder.episode(*key) for key in folder.manifest.ledger}
    return {key: {name: getattr(episode, name).tobytes() for name in names} for key, episode in episodes.items()}


def faulty(toy: Task, fault: str, where: str, **kwargs: Any) -> Task:
    return replace(toy, env="strange_envs:strange/Faulty-v0", env_kwargs={**toy.env_kwargs, "fault": fault, "where": where, **kwargs})


@dataclass(frozen=True)
class Looks:
    """Acts on what it sees and remembers, so that a wrong picture, seed or memory shows in its actions."""

    horizon: int = 8
    name: str = "looks"
    pause: float = 0.0
    batches: list[int] = field(default_factory=list)
    needs: Interface = field(
        default_factory=lambda: Interface(cameras={"agentview": (64, 64)}, state=dict(ARM_STATE), action=ARM_ACTION, control_hz=20)
    )

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        time.sleep(self.pause)
        self.batches.append(len(batch))
        return [self.chunk(request) for request in batch]

    def chunk(self, request: Request) -> ActionChunk:
        seen = int(request.observation["images"]["agentview"].astype(np.int64).sum())
        told = int.from_bytes(request.memory or b"\x01", "big")
        draw = np.random.default_rng([request.seed, seen, told])
        return ActionChunk(draw.uniform(-1, 1, (self.horizon, 7)), memory=draw.bytes(4))


def test_records_and_arrays_are_the_same_for_0_1_and_3_workers_and_any_batch(tmp_path: Path) -> None:
    tasks = load_tasks("toy")
    here = plays(Looks(), tasks, tmp_path / "0", trials=3, seed=5, workers=0)
    for name, given in {"1": {"workers": 1}, "3": {"workers": 3}, "batch": {"workers": 3, "batch": 2}}.items():
        there = plays(Looks(), tasks, tmp_path / name, trials=3, seed=5, **given)
        assert outcome(there) == outcome(here)
        assert arrays(there) == arrays(here)
    assert {record.outcome for record in here.records()} == {"success", "failure"}  # the policy is random; a constant would prove little


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one, other = (plays(Looks(), load_tasks("toy")[:1], tmp_path / str(seed), trials=2, seed=seed, workers=0) for seed in (0, 1))
    assert arrays(one) != arrays(other)


def test_an_episode_does_not_depend_on_what_was_played_before(tmp_path: Path) -> None:
    tasks = load_tasks("toy")[:2]
    both = plays(Looks(), tasks, tmp_path / "both", trials=3, workers=0)
    alone = plays(Looks(), tasks[1:], tmp_path / "alone", trials=2, workers=0)
    for key in alone.manifest.ledger:
        assert arrays(both)[key] == arrays(alone)[key]


@pytest.mark.parametrize(("batch", "workers"), [(1, 2), (2, 2), (2, 3)])  # two never ask in one moment unless one waits
def test_batches_are_never_larger_than_asked_and_mates_are_waited_for(toy: Task, batch: int, workers: int) -> None:
    policy = Looks(pause=0.1)  # longer than a simulator takes to its next question
    records = list(vla_eval.evaluate(policy, [replace(toy, max_steps=16)], trials=6, workers=workers, batch=batch))
    assert len(records) == 6
    assert sum(policy.batches) == 12
    assert max(policy.batches) == batch


def test_evaluate_writes_only_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy: Task) -> None:
    monkeypatch.chdir(tmp_path)
    (record,) = vla_eval.evaluate(ToyExpert(), [toy], trials=1, workers=0)
    assert record.outcome == "success"
    assert list(tmp_path.iterdir()) == []
    (record,) = vla_eval.evaluate(ToyExpert(), [toy], trials=1, workers=0, out="runs")
    (path,) = (tmp_path / "runs").iterdir()
    assert open_run(path).records() == [record]
    assert open_run(path).complete


def test_the_manifest_and_the_ledger_stand_before_the_first_step(tmp_path: Path, toy: Task) -> None:
    with start(zero(), [toy], trials=3, seed=9, workers=1, out=tmp_path, command=["vla-eval", "run"], options={"horizon": 8}) as run:
        assert run.folder is not None
        written = open_run(run.folder.path).manifest
    assert written.ledger == [("toy@v1/2", 0), ("toy@v1/2", 1), ("toy@v1/2", 2)]
    assert (written.seed, written.trials, written.batch, written.replan, written.suite, written.policy) == (9, 3, 1, 8, "toy@v1", "zero")
    told = written.protocol["tasks"]["toy@v1/2"]
    assert told["max_steps"] == 80
    assert told["env_kwargs"]["size"] == 64
    assert len(told["starts"]) == 64
    assert written.protocol["replan"] == "horizon"
    assert {"python", "numpy", "toy"} <= written.versions.keys()
    assert written.hardware["renderer"] == "numpy"
    assert written.command == ["vla-eval", "run"]
    assert written.revision["version"] == vla_eval.__version__
    assert open_run(run.folder.path).records() == []


# Interrupted and resumed.


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of the random policy that nothing befell, to read."""
    return plays(random(), load_tasks("toy"), tmp_path_factory.mktemp("whole"), trials=2, seed=5, workers=0)


@pytest.mark.parametrize("moment", [1, 9, 33])
def test_a_run_killed_at_any_moment_and_resumed_is_the_run(tmp_path: Path, reference: RunFolder, moment: int) -> None:
    script = f"""
import os, signal
from vla_eval.policies.baseline import random
from vla_eval.registry import load_tasks
from vla_eval.run.loop import start
class Killed:
    name, horizon, needs, asked = random().name, random().horizon, random().needs, 0
    def act(self, batch):
        self.asked += 1
        if self.asked == {moment}:
            os.kill(os.getpid(), signal.SIGKILL)
        return random().act(batch)
with start(Killed(), load_tasks("toy"), trials=2, seed=5, workers=2, out={str(tmp_path / "killed")!r}) as run:
    list(run)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    (path,) = (tmp_path / "killed").iterdir()
    before = open_run(path).records()
    assert len(before) < 8
    with resume(path, random(), load_tasks("toy"), workers=2, accept_revision=True) as run:  # an edit meanwhile is not what is tested
        assert len(run.todo) == len(list(run)) == 8 - len(before)
    folder = open_run(path)
    assert folder.complete
    assert outcome(folder) == outcome(reference)
    assert arrays(folder) == arrays(reference)
    assert sorted(entry.name for entry in folder.episodes.iterdir()) == sorted(entry.name for entry in reference.episodes.iterdir())


def test_a_torn_last_line_is_cut_off_and_said(tmp_path: Path, toy: Task, caplog: pytest.LogCaptureFixture) -> None:
    folder = plays(ToyExpert(), [toy], tmp_path, trials=2, workers=0)
    whole, records = (folder.path / "episodes.jsonl").read_bytes(), outcome(folder)
    for torn in (whole[:-1], whole[:-30], whole + b'{"task": "\xc3'):
        (folder.path / "episodes.jsonl").write_bytes(torn)
        caplog.clear()
        with resume(folder.path, ToyExpert(), [toy], workers=0) as run:
            list(run)
        assert "the last line was torn" in caplog.text
        assert outcome(open_run(folder.path)) == records


def test_errors_are_played_again_and_successes_are_not(tmp_path: Path, toy: Task) -> None:
    once = tmp_path / "once"
    task = faulty(toy, "raise", "step", at=3, trial=1, once=str(once))
    folder = plays(ToyExpert(), [task], tmp_path, trials=3, workers=0)
    assert [record.outcome for record in folder.records()] == ["success", "error", "success"]
    assert not folder.complete
    with resume(folder.path, ToyExpert(), [task], workers=0) as run:
        (again,) = run
    assert (again.trial, again.outcome) == (1, "success")
    assert open_run(folder.path).complete
    with resume(folder.path, ToyExpert(), [task], workers=2) as run:
        assert list(run) == []


def test_a_second_process_on_the_same_folder_is_refused(tmp_path: Path, toy: Task) -> None:
    with start(zero(), [toy], trials=1, workers=0, out=tmp_path) as run:
        assert run.folder is not None
        with pytest.raises(BadRequest, match="another process is writing this run"):
            resume(run.folder.path, zero(), [toy], workers=0)
    with resume(run.folder.path, zero(), [toy], workers=0) as again:
        assert len(list(again)) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tasks": {"max_steps": 90}}, r"protocol\.tasks\.toy@v1/2\.max_steps: 80 then, 90 now"),
        ({"tasks": {"env_kwargs": {"task": 2}}}, r"protocol\.tasks\.toy@v1/2\.env_kwargs\.max_steps: 80 then, \(absent\) now"),
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"trials": 3}, "trials: 2 then, 3 now"),
        ({"replan": 4}, "replan: 8 then, 4 now"),
        ({"batch": 2}, "batch: 1 then, 2 now"),
        ({"bundle": "abc"}, "bundle: None then, 'abc' now"),
        ({"options": {"horizon": 8}}, r"options.horizon: \(absent\) then, 8 now"),
        ({"policy": random()}, "policy: 'zero' then, 'random' now"),
        ({"others": [0]}, r"protocol\.tasks\.toy@v1/0: \(absent\) then"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_resuming_with_something_else_is_refused_and_named(tmp_path: Path, toy: Task, change: dict[str, Any], says: str) -> None:
    folder = plays(zero(), [toy], tmp_path, trials=2, workers=0)
    (folder.path / "episodes.jsonl").write_text("")
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    tasks = [replace(toy, **change.pop("tasks", {})), *(load_tasks("toy")[index] for index in change.pop("others", []))]
    with pytest.raises(BadRequest, match=says):
        resume(folder.path, change.pop("policy", zero()), tasks, workers=0, **change)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_resuming_under_another_simulator_is_refused(tmp_path: Path, toy: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_eval.envs.toy import ToyEnv

    folder = plays(zero(), [toy], tmp_path, trials=2, workers=0)
    (folder.path / "episodes.jsonl").write_text("")
    monkeypatch.setattr(ToyEnv, "versions", lambda self: {"toy": "2"})
    with pytest.raises(BadRequest, match=r"versions\.toy: '1' then, '2' now"):
        resume(folder.path, zero(), [toy], workers=0)
    monkeypatch.undo()
    monkeypatch.setattr(ToyEnv, "starts", lambda self: "other")
    with pytest.raises(BadRequest, match="its initial states are other, and were"):
        resume(folder.path, zero(), [toy], workers=0)


def test_another_revision_must_be_accepted_and_is_written_down(tmp_path: Path, toy: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "revision", lambda: {"version": "1", "commit": "a", "dirty": False})
    folder = plays(zero(), [toy], tmp_path, trials=2, workers=0)
    (folder.path / "episodes.jsonl").write_text("")
    monkeypatch.setattr(manifest, "revision", lambda: {"version": "1", "commit": "b", "dirty": False})
    with pytest.raises(BadRequest, match=r"commit: 'a' then, 'b' now.*--accept-revision"):
        resume(folder.path, zero(), [toy], workers=0)
    with resume(folder.path, zero(), [toy], workers=0, accept_revision=True) as run:
        list(run)
    written = open_run(folder.path).manifest.revision
    assert written["commit"] == "a"
    assert [revision["commit"] for revision in written["resumed"]] == ["b"]
    with resume(folder.path, zero(), [toy], workers=0) as run:  # the same one needs no second word
        assert list(run) == []


def test_a_record_whose_arrays_are_gone_is_played_again_and_that_is_said(
    tmp_path: Path, toy: Task, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plays(Looks(), [toy], tmp_path, trials=3, workers=0)
    whole, records = arrays(folder), outcome(folder)
    folder.episode_path(toy.id, 1).unlink()
    with resume(folder.path, Looks(), [toy], workers=0) as run:
        assert run.todo == [(toy.id, 1)]
        list(run)
    (said,) = caplog.messages
    assert said == f"{folder.episode_path(toy.id, 1)} is gone, and {toy.id} trial 1 will be played again"
    assert arrays(folder) == whole
    assert outcome(folder) == records


def test_the_replan_of_an_option_is_kept_when_resumed(tmp_path: Path, toy: Task) -> None:
    folder = plays(zero(), [toy], tmp_path, trials=1, workers=0, replan=3)
    (folder.path / "episodes.jsonl").write_text("")
    with resume(folder.path, zero(), [toy], workers=0) as run:
        (record,) = run
    assert record.chunks == 27


# What dies on the way.

QUICK = Limits(construct=60, reset=60, step=0.1, look=0.2, write=0.2)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Three trials whose simulator lives, to read."""
    return plays(Looks(), load_tasks("toy")[2:3], tmp_path_factory.mktemp("unharmed"), trials=3, workers=0)


@pytest.mark.parametrize(("fault", "where"), [("die", "construct"), ("die", "reset"), ("die", "step"), ("exit", "look"), ("hang", "step")])
def test_an_episode_whose_simulator_died_is_played_once_more(
    tmp_path: Path, toy: Task, unharmed: RunFolder, fault: str, where: str
) -> None:
    at = 16 if where in ("step", "look") else 0
    task = faulty(toy, fault, where, at=at, trial=None if where == "construct" else 1, once=str(tmp_path / "once"))
    folder = plays(Looks(), [task], tmp_path / "broken", trials=3, workers=2, limits=QUICK)
    again = [] if where == "construct" else [1]  # the first simulator's death is found before there is an episode
    assert [record.trial for record in folder.records() if record.attempts == 2] == again
    assert [replace(record, attempts=1) for record in outcome(folder)] == outcome(unharmed)
    assert arrays(folder) == arrays(unharmed)


def test_a_death_in_reset_has_no_states_to_be_held_against(tmp_path: Path, toy: Task) -> None:
    task = faulty(toy, "die", "reset", trial=1, once=str(tmp_path / "once"))
    records = vla_eval_run(Looks(), [task], trials=2, workers=1)  # the one worker has played trial 0 before
    assert [(record.outcome, record.attempts) for record in records] == [("failure", 1), ("failure", 2)]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("die", "killed by SIGKILL"),
        ("exit", "exit status 7, its last words: the renderer is on fire"),
        ("hang", "no sign of life while it should"),
    ],
)
def test_a_second_death_is_an_error_record(toy: Task, fault: str, says: str) -> None:
    records = list(vla_eval_run(Looks(), [faulty(toy, fault, "step", at=16, trial=1)], trials=3, workers=1, limits=QUICK))
    (broken,) = [record for record in records if record.outcome == "error"]
    assert (broken.trial, broken.attempts, broken.steps, broken.chunks) == (1, 2, 16, 3)
    assert broken.error is not None
    assert broken.error.startswith("the simulator's process died (")
    assert says in broken.error
    assert len(records) == 3


def vla_eval_run(policy: Policy, tasks: Sequence[Task], **kwargs: Any) -> list[EpisodeRecord]:
    with start(policy, tasks, **kwargs) as run:
        return list(run)


def test_a_replay_that_differs_by_a_byte_is_an_error(tmp_path: Path, toy: Task) -> None:
    task = faulty(toy, "die, then drift", "step", at=3, once=str(tmp_path / "once"))
    (record,) = vla_eval_run(Looks(), [task], trials=1, workers=1)
    assert (record.outcome, record.attempts) == ("error", 2)
    assert record.error is not None
    assert record.error.startswith("Diverged: the replay is not what the first attempt was: states differ at step 0,")


def test_an_environment_that_cannot_be_built_is_an_error_record(toy: Task) -> None:
    for workers in (0, 1):
        records = vla_eval_run(zero(), [faulty(toy, "raise", "construct")], trials=2, workers=workers)
        assert [(record.outcome, record.error) for record in records] == [("error", "RuntimeError: no GL context")] * 2


def test_the_next_episode_is_played_in_a_fresh_environment_after_an_error(toy: Task) -> None:
    task = faulty(toy, "break", "step", at=3, trial=0)
    for workers in (0, 1):
        records = vla_eval_run(ToyExpert(), [task], trials=2, workers=workers)
        assert [record.outcome for record in records] == ["error", "success"]


def test_a_policy_that_raises_or_answers_nonsense_is_an_error_with_any_workers(toy: Task) -> None:
    wrong: list[Any] = [ValueError("no norm"), np.full((8, 7), np.nan), np.zeros((8, 3)), np.zeros((8, 7), object), None]

    @dataclass(frozen=True)
    class Wrong(Looks):
        def chunk(self, request: Request) -> ActionChunk:
            if request.step < 8:
                return super().chunk(request)
            if isinstance(said := wrong[request.trial], Exception):
                raise said
            return ActionChunk(said)

    found = [vla_eval_run(Wrong(), [toy], trials=len(wrong), workers=workers) for workers in (0, 1)]
    assert [untimed(record) for record in found[0]] == [untimed(record) for record in found[1]]
    assert [(record.outcome, record.steps) for record in found[0]] == [("error", 8)] * len(wrong)


def test_workers_are_gone_when_the_run_is_closed(toy: Task) -> None:
    with start(Looks(), load_tasks("toy"), trials=2, workers=2) as run:
        next(run)
        processes = [seat.worker.process for seat in run._seats if seat.worker is not None]
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)


def test_ctrl_c_reaches_this_process_alone_and_leaves_a_run_to_go_on_with(tmp_path: Path) -> None:
    script = f"""
from vla_eval.policies.baseline import random
from vla_eval.registry import load_tasks
from vla_eval.run.loop import start
with start(random(), load_tasks("toy"), trials=50, workers=2, out={str(tmp_path)!r}) as run:
    for record in run:
        print(run.folder.path, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout as lines, process.stderr as errors:
        path = Path(lines.readline().strip())
        os.killpg(process.pid, signal.SIGINT)
        lines.read()
        said = errors.read()
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    with resume(path, random(), load_tasks("toy"), workers=0, accept_revision=True) as run:
        assert 0 < len(run.todo) < 200


# Refused before anything stands.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trials": 51}, r"toy@v1/2 has 50 initial states, and 51 trials would repeat some; ask for 50 at most"),
        ({"trials": 0}, "trials is 0; at least 1"),
        ({"trials": -1}, "trials is -1; at least 1"),
        ({"workers": -1}, "workers is -1; at least 0"),
        ({"batch": 0}, "batch is 0; at least 1"),
        ({"seed": -1}, "seed is -1; at least 0"),
        ({"seed": 2**32}, "seed is 4294967296; it must be below 4294967296"),
        ({"replan": 9}, "replan is 9, but policy 'zero' answers with 8 actions; between 1 and 8"),
        ({"replan": 0}, "replan is 0"),
        ({"replan": -2}, "replan is -2"),
        ({"options": {"x": {1}}}, "options of a run must be plain data"),
        ({"options": {"x": float("nan")}}, "options of a run must be plain data"),
    ],
    ids=str,
)
def test_what_cannot_be_played_is_refused_in_one_sentence(tmp_path: Path, toy: Task, change: dict[str, Any], says: str) -> None:
    out = tmp_path / "runs"
    with pytest.raises(BadRequest, match=says) as refusal:
        start(zero(), [toy], out=out, **{"trials": 1, **change})
    assert "\n" not in str(refusal.value)
    assert not out.exists()


def test_tasks_that_make_no_run_are_refused(toy: Task) -> None:
    for tasks, says in (
        ([], "no tasks"),
        ([toy, toy], "named twice"),
        ([toy, load_tasks("toy@free")[0]], "one run is one suite, not toy@free, toy@v1"),
        ([replace(toy, max_steps=0)], "a limit of 0 steps lets nobody act"),
        ([replace(toy, replan={"zero": 3}), load_tasks("toy")[1]], "do not agree"),
    ):
        with pytest.raises(BadRequest, match=says):
            start(zero(), tasks, trials=1, workers=0)


def test_more_workers_than_the_memory_holds_are_refused_before_one_is_started(toy: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "free_bytes", lambda: 4 << 30)
    monkeypatch.setattr(loop, "spawn", lambda: pytest.fail("a process was started"))
    with pytest.raises(BadRequest, match=r"500 workers need about 31\.5 GB more and 4\.3 GB are free; ask for fewer"):
        start(zero(), [replace(toy, trials=None)], trials=1000, workers=500)


def test_workers_are_counted_by_what_their_environment_says_it_needs(toy: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []

    def counted() -> Worker:
        started.append(1)
        return spawn()

    monkeypatch.setattr(loop, "spawn", counted)
    monkeypatch.setattr(loop, "facts_from", lambda data: replace(facts_from(data), bytes=2_200_000_000))
    monkeypatch.setattr(loop, "free_bytes", lambda: 8_000_000_000)
    with pytest.raises(BadRequest, match=r"9 workers need about 17\.6 GB more"):
        start(zero(), [toy], trials=10, workers=9, out=tmp_path / "runs")
    assert len(started) == 1
    assert not (tmp_path / "runs").exists()


def test_workers_that_would_have_nothing_to_do_are_not_started_and_this_is_said(toy: Task, caplog: pytest.LogCaptureFixture) -> None:
    with start(zero(), [toy], trials=2, workers=500) as run:
        assert [record.outcome for record in run] == ["failure", "failure"]
    assert "2 workers are enough: that many episodes are to be played" in caplog.text


def test_free_memory_is_that_of_this_machine() -> None:
    free = loop.free_bytes()
    assert free is not None
    assert 0 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_contract_that_does_not_hold_is_refused_and_leaves_nothing(tmp_path: Path, toy: Task) -> None:
    policy = Looks(needs=Interface(cameras={"agentview": (224, 224)}, state={}, action=ARM_ACTION, control_hz=20))
    for workers in (0, 1):
        with pytest.raises(ContractMismatch, match=r"looks needs camera 'agentview' at \(224, 224\); toy@v1/2 draws it at \(64, 64\)"):
            start(policy, [toy], trials=1, workers=workers, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_what_the_user_can_mend_about_the_simulator_is_refused_at_once(tmp_path: Path, toy: Task) -> None:
    for workers in (0, 1):
        for task, says in (
            (faulty(toy, "refuse", "construct"), r"^libEGL\.so\.1 is missing; apt install libegl1$"),
            (replace(toy, env="no_such_module:x/Y-v0"), "its environment module 'no_such_module' cannot be imported"),
            (replace(toy, env="strange_envs:strange/Mute-v0", env_kwargs={}), r"metadata\['interface'\] is no vla_eval\.Interface"),
        ):
            with pytest.raises(VlaEvalError, match=says):
                start(zero(), [task], trials=1, workers=workers, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, toy: Task) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot make the run folder"):
        start(zero(), [toy], trials=1, workers=0, out=tmp_path / "file")
    folder = plays(zero(), [toy], tmp_path, trials=1, workers=0)
    with pytest.raises(BadRequest, match="is a run's own folder"):
        start(zero(), [toy], trials=1, workers=0, out=folder.path)


FULL = """
import resource, signal, sys
from vla_eval.policies.baseline import random
from vla_eval.registry import load_tasks
from vla_eval.run.loop import start
from vla_eval.types import BadRequest
with start(random(), load_tasks("toy")[2:3], trials=3, workers=0, out=sys.argv[1]) as run:
    print(run.folder.path)
    next(run)
    size = (run.folder.path / sys.argv[2]).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
    try:
        list(run)
    except BadRequest as error:
        print(error)
"""


@pytest.mark.parametrize("file", ["episodes.jsonl", "episodes/2-0.npz"])
def test_a_full_disk_ends_the_run_in_one_sentence_with_nothing_half_written(tmp_path: Path, file: str) -> None:
    """A limit on the size of files stands in for the disk: the write that does not fit fails the same way."""
    script = FULL.replace("size + 100", "size + 100" if file.endswith("jsonl") else "size // 2")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), file], capture_output=True, text=True, check=True)
    path, sentence = done.stdout.splitlines()
    assert "cannot be written" in sentence
    assert "--resume" in sentence
    assert done.stderr == ""
    folder = open_run(path)
    assert len(folder.records()) == 1
    assert (folder.path / "episodes.jsonl").read_bytes().endswith(b"\n")
    assert [p.name for p in folder.episodes.iterdir() if p.name.startswith(".")] == []
    with resume(path, random(), load_tasks("toy")[2:3], workers=0, accept_revision=True) as run:
        assert len(list(run)) == 2


def test_a_worker_that_cannot_write_ends_the_run_too(tmp_path: Path, toy: Task) -> None:
    with start(random(), [toy], trials=3, workers=1, out=tmp_path) as run:
        next(run)
        assert run.folder is not None
        run.folder.episodes.rename(tmp_path / "gone")
        with pytest.raises(
            BadRequest, match=r"cannot be written \(.*2-1.npz: No such file or directory\); make room and go on with --resume"
        ):
            list(run)


# Strangers' environments, stop rules, replay.


def test_an_environment_without_extras_is_used_as_it_is(tmp_path: Path) -> None:
    task = Task("bare@v1/0", "strange_envs:strange/Bare-v0", "wait", 12)
    policy = Looks(needs=Interface(cameras={"front": (33, 33)}, state={}, action=ARM_ACTION, control_hz=20))
    seen = replace(policy, needs=policy.needs)
    object.__setattr__(seen, "chunk", lambda request: ActionChunk(np.full((8, 7), request.observation["images"]["front"][0, 0, 0])))
    for workers in (0, 1):
        folder = plays(seen, [task], tmp_path / str(workers), trials=1, workers=workers, video=True)
        (record,) = folder.records()
        assert record.outcome == "failure"
        episode = folder.episode("bare@v1/0", 0)
        assert episode.states.shape == (13, 0)
        assert episode.objects.shape == (13, 0, 7)
        assert episode.actions[:, 0].tolist() == [0] * 8 + [8] * 4
        assert record.video == "episodes/0-0.mp4"
        assert count_frames_and_secs(folder.path / record.video)[0] == 13


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_rule_ends_a_shuffled_run_at_the_same_episode_however_it_is_played(tmp_path: Path, workers: int) -> None:
    with start(zero(), load_tasks("toy"), trials=8, workers=workers, out=tmp_path, stop=parse_rule("upper<0.5")) as run:
        records = list(run)
    assert run.stopped is not None
    assert run.folder is not None
    folder = open_run(run.folder.path)
    end = stopped(folder)
    assert end is not None
    assert end.n == 7  # seven failures, none else, leave rates below 0.5
    assert {(record.task, record.trial) for record in records} >= set(folder.manifest.ledger[:7])
    assert len({task for task, _ in folder.manifest.ledger[:8]}) > 1
    assert workers or not folder.complete  # two workers may have played all while the first episode was still going
    assert report(folder).complete
    with resume(folder, zero(), load_tasks("toy"), workers=workers) as again:
        assert list(again) == []
        assert again.stopped == run.stopped


def test_replay_plays_the_recorded_actions_to_the_same_states(tmp_path: Path) -> None:
    tasks = load_tasks("toy")
    first = plays(ToyExpert(), tasks, tmp_path / "first", trials=2, workers=0, replan=3)
    again = plays(replay(run=str(first.path)), tasks, tmp_path / "again", trials=2, workers=1)
    for key in first.manifest.ledger:
        assert first.episode(*key).states.tobytes() == again.episode(*key).states.tobytes()
        assert first.episode(*key).actions.tobytes() == again.episode(*key).actions.tobytes()
    assert {record.outcome for record in again.records()} == {"success"}


def test_command_values_beyond_one_are_recorded_as_they_were_executed(tmp_path: Path, toy: Task) -> None:
    @dataclass(frozen=True)
    class Loud(Looks):
        def chunk(self, request: Request) -> ActionChunk:
            return ActionChunk(np.array([[0, 0, 0, 0, 0, 0, grip] for grip in (0.5, 2.0, -2.0, 0.0, -0.0, 1, -1, 3)]))

    first = plays(Loud(), [toy], tmp_path / "first", trials=1, workers=0)
    episode = first.episode(toy.id, 0)
    assert episode.actions[:8, 6].tolist() == [0.5, 1.0, -1.0, 0.0, -0.0, 1.0, -1.0, 1.0]
    again = plays(replay(run=str(first.path)), [toy], tmp_path / "again", trials=1, workers=0)
    assert again.episode(toy.id, 0).states.tobytes() == episode.states.tobytes()
    gap = episode.proprio[:, 6]
    assert (gap[4], gap[5]) == (gap[3] + np.float32(0.01), gap[4] + np.float32(0.01))  # both zeros keep the last target


def test_records_are_one_json_object_a_line(tmp_path: Path, toy: Task) -> None:
    folder = plays(zero(), [toy], tmp_path, trials=2, workers=0)
    lines = [json.loads(line) for line in (folder.path / "episodes.jsonl").read_text().splitlines()]
    assert [line["trial"] for line in lines] == [0, 1]
    assert all(sum(line["timing"].values()) == pytest.approx(line["seconds"], rel=0.05) for line in lines)
