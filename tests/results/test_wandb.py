"""Weights & Biases: what an offline run holds, read back from its file, and that no trouble with the service reaches a run."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from vla_eval import cli, registry
from vla_eval.policies.baseline import Baseline
from vla_eval.results import wandb as dashboard
from vla_eval.results.folder import RunFolder, open_run
from vla_eval.types import ARM_ACTION, BadRequest, Request, Vector

BLOCK = 32768  # of the record log that W&B writes its runs as, after seven bytes that say so


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    alone(monkeypatch, home)


def alone(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """No key, no settings, no home of anybody's."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))


def run_of(make_runs: ModuleType, out: Path, trials: int = 2) -> RunFolder:
    folder = make_runs.make_run(
        out, lambda task, trial: "error: boom" if (task, trial) == (1, 1) else "success" if trial else "drop", trials=trials, tasks=2
    )
    assert isinstance(folder, RunFolder)
    film = folder.episode_path("shop@fair/0", 0, ".mp4")
    writer = imageio_ffmpeg.write_frames(str(film), (64, 64), fps=20, ffmpeg_log_level="fatal")
    writer.send(None)
    for number in range(5):
        writer.send(np.full((64, 64, 3), 40 * number, np.uint8))
    writer.close()
    return folder


def written(folder: RunFolder) -> Path:
    (run,) = folder.path.glob("wandb/offline-run-*")
    return run


def records(run: Path) -> Iterator[Any]:
    """The records of a W&B file, as W&B's own messages."""
    from wandb.proto import wandb_internal_pb2

    message: Any = wandb_internal_pb2  # made at import time, so no type checker sees what is in it

    (file,) = run.glob("run-*.wandb")
    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        body = data[at + 7 : at + 7 + length]
        at += 7 + length
        part = body if kind in (1, 2) else part + body  # whole, first, middle, last
        if kind in (1, 4):
            record = message.Record()
            record.ParseFromString(part)
            yield record


def told(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_an_offline_run_holds_everything(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = run_of(make_runs, tmp_path)
    with dashboard.following(folder.path, "offline") as went:  # one episode more while it is followed
        make_runs.play(folder, "shop@fair/1", 1, "success")
    assert went.well
    run = written(folder)
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    artifacts: dict[str, dict[str, Path]] = {}
    for record in records(run):
        match record.WhichOneof("record_type"):
            case "run":
                config |= told(record.run.config.update)
                assert record.run.run_id == dashboard.run_id(folder.manifest.run_id)
                assert record.run.run_group == "shop@fair"
                assert record.run.project == dashboard.PROJECT
            case "config":
                config |= told(record.config.update)
            case "summary":
                summary |= told(record.summary.update)
            case "history":
                history.append(told(record.history.item))
            case "artifact":
                artifacts[record.artifact.type] = {entry.path: Path(entry.local_path) for entry in record.artifact.manifest.contents}

    assert config["protocol"]["tasks"]["shop@fair/0"]["max_steps"] == make_runs.CAP
    assert config["ledger"] == [list(key) for key in folder.manifest.ledger]
    assert {name: summary[name] for name in ("policy", "suite", "k", "n", "rate", "errors", "replan", "unranked")} == {
        "policy": "clerk", "suite": "shop@fair", "k": 2, "n": 4, "rate": 0.5, "errors": 0, "replan": 4, "unranked": None,
    }  # fmt: skip
    assert summary["answer_p99_ms"] > summary["answer_p50_ms"] > 0
    rates = [row["shop@fair/rate"] for row in history if "shop@fair/rate" in row]
    assert rates[0] == 0.0
    assert rates[-1] == 0.5
    assert [row for row in history if "shop@fair/1/rate" in row][-1]["shop@fair/1/rate"] == 0.5

    assert summary["episode_table/nrows"] == 4
    rows = json.loads(artifacts["run_table"]["episode_table.table.json"].read_text())
    assert rows["columns"] == dashboard.COLUMNS
    assert [(row[0], row[1], row[2], row[3]) for row in rows["data"]] == [
        ("shop@fair/0", 0, "failure", "grasped and lost"),
        ("shop@fair/0", 1, "success", ""),
        ("shop@fair/1", 0, "failure", "grasped and lost"),
        ("shop@fair/1", 1, "success", ""),
    ]
    video = artifacts["run_table"][rows["data"][0][8]["path"]]
    assert video.read_bytes() == folder.episode_path("shop@fair/0", 0, ".mp4").read_bytes()
    assert folder.path in video.parents  # what waits to be sent lies in the run folder, not in somebody's home
    assert artifacts["report"].keys() == {"report.md", "report.json"}
    assert {"manifest.json", "episodes.jsonl", "episodes/0-0.npz", "episodes/0-0.mp4"} <= artifacts["rollouts"].keys()


@pytest.fixture(scope="module")
def sent(make_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[str]]:
    """A run that was sent offline, by a program that calls any wait long, and what was said meanwhile."""
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    folder = run_of(make_runs, tmp_path_factory.mktemp("sent"))
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, tmp_path_factory.mktemp("home"))
        patch.setattr(dashboard, "QUIET_SECONDS", 0.01)  # nothing is sent as fast as that
        logging.getLogger(dashboard.__name__).addHandler(heard)
        try:
            assert dashboard.send(folder.path, "offline", finish_seconds=300)
        finally:
            logging.getLogger(dashboard.__name__).removeHandler(heard)
    return folder, said


def test_wandbs_own_reader_reads_the_same(sent: tuple[RunFolder, list[str]]) -> None:
    """`wandb leet inspect`, which comes with the client that the lock file names."""
    folder, _ = sent
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(written(folder))]
    read = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if "No such command" in read.stderr:
        pytest.skip("this wandb has no reader of its own")
    found = json.loads(read.stdout)
    assert (found["state"], found["exit_code"], found["step"]) == ("finished", 0, 4)
    assert found["name"] == folder.manifest.run_id
    assert found["config"]["protocol"] == json.loads((folder.path / "manifest.json").read_text())["protocol"]
    assert {name: found["summary"][name] for name in ("k", "n", "rate", "errors", "shop@fair/0/n", "unranked")} == {
        "k": 1, "n": 3, "rate": 1 / 3, "errors": 1, "shop@fair/0/n": 2, "unranked": "incomplete",
    }  # fmt: skip


def test_a_wait_that_looks_like_a_hang_is_said(sent: tuple[RunFolder, list[str]]) -> None:
    assert sent[1] == ["the rest is being handed to W&B, which takes 299.99 s at most"]


def test_the_same_run_is_the_same_on_the_dashboard() -> None:
    assert dashboard.run_id("one") == dashboard.run_id("one") != dashboard.run_id("other")


def test_a_missing_key_is_said_once_and_asks_nobody(make_runs: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run_of(make_runs, tmp_path)
    before = (folder.path / "episodes.jsonl").read_bytes()
    assert not dashboard.send(folder.path, "online")
    (said,) = [record.getMessage() for record in caplog.records if "Weights & Biases" in record.getMessage()]
    assert "key" in said.lower()
    assert f"vla-eval wandb {folder.path} sends it again" in said
    assert (folder.path / "episodes.jsonl").read_bytes() == before


@pytest.mark.parametrize("answers", [False, True], ids=["nobody there", "never answers"])
def test_a_silent_service_costs_a_bounded_wait_and_nothing_else(
    make_runs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    folder = run_of(make_runs, tmp_path)
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        if answers:
            service.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{service.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        wait = 2 if answers else 3  # W&B is asking, in vain, after one
        with dashboard.following(folder.path, "online", finish_seconds=wait) as went:
            make_runs.play(folder, "shop@fair/1", 1, "success")
            if answers:
                service.settimeout(60)
                caller, _ = service.accept()  # W&B is now waiting for an answer
        began = time.monotonic()
        if answers:
            caller.close()
    assert time.monotonic() - began < 1
    assert not went.well
    assert [record.getMessage() for record in caplog.records if f"had not finished after {wait} s" in record.getMessage()]
    assert len(open_run(folder.path).records()) == 4


def test_an_absent_package_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="pip install wandb"):
        dashboard.check_installed()


def test_a_resumed_run_goes_on_as_the_same_run_of_the_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stumbling(request: Request, horizon: int) -> Vector:
        if request.trial == 1:
            raise RuntimeError("no network")
        if request.trial == 2:
            raise KeyboardInterrupt
        return np.zeros((horizon, len(ARM_ACTION)))

    words = ["run", "--task", "toy/0", "--policy", "zero", "--trials", "3", "--workers", "0", "--out", str(tmp_path), "--wandb", "offline"]
    with monkeypatch.context() as patch:
        patch.setattr(registry, "load_policy", lambda name, **options: Baseline(name, 8, stumbling))
        assert cli.main(words) == 130
    capfd.readouterr()
    (path,) = (file.parent for file in tmp_path.glob("*/manifest.json"))
    folder = open_run(path)
    assert cli.main(["run", "--resume", str(path), "--workers", "0", "--wandb", "offline", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["complete"]

    steps = {}
    first, second = sorted(folder.path.glob("wandb/offline-run-*"))
    for part, episodes, unranked in ((first, 2, "incomplete"), (second, 3, None)):
        kept = list(records(part))
        same = dashboard.run_id(folder.manifest.run_id)
        assert {record.run.run_id for record in kept if record.WhichOneof("record_type") == "run"} == {same}
        rows = [told(record.history.item) for record in kept if record.WhichOneof("record_type") == "history"]
        steps[part] = [row["_step"] for row in rows]
        assert [row["episodes"] for row in rows if "episodes" in row][-1] == episodes
        summary: dict[str, Any] = {}
        for record in kept:
            if record.WhichOneof("record_type") == "summary":
                summary |= told(record.summary.update)
        assert (summary["episode_table/nrows"], summary["unranked"]) == (episodes, unranked)
    # The service drops a step that it has already, so what is new must have steps of its own: two episodes, one of them played again.
    assert steps[first] == [1, 2]
    assert steps[second] == [1, 2, 3, 4]
