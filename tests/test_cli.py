"""Commands from the outside: what stands on stdout and stderr, exit codes, and what is on the disk afterwards."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import operator
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App
from docstring_parser import parse
from rich.console import Console

from vla_eval import ActionChunk, Interface, Request, cli, doctor, evaluate, registry
from vla_eval.results.folder import open_run, untimed
from vla_eval.types import ARM_ACTION, BadRequest, Check

Run = Callable[..., tuple[int, str, str]]


def commands(app: App, prefix: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command by its name, those of groups too."""
    for name in app:
        if not name.startswith("-"):
            if function := app[name].default_command:
                yield prefix + name, function
            yield from commands(app[name], f"{prefix}{name} ")


COMMANDS = dict(commands(cli.app))


@pytest.fixture
def vla_eval(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(words)
        out, err = capfd.readouterr()
        return code, out, err

    return run


@dataclass(frozen=True)
class Scripted:
    """A policy whose answer is a function of the request."""

    answer: Callable[[Request], Any]
    name: str = "scripted"
    needs: Interface = Interface(cameras={}, state={}, action=ARM_ACTION, control_hz=0)  # noqa: RUF009 - frozen
    horizon: int = 8

    def act(self, batch: Sequence[Request]) -> list[ActionChunk]:
        return [ActionChunk(self.answer(request)) for request in batch]


def still(request: Request) -> Any:
    return np.zeros((8, 7))


def test_version_says_which_distribution_answers(vla_eval: Run) -> None:
    assert vla_eval("--version") == (0, f"vla-eval-trt {version('vla-eval-trt')}\n", "")


@pytest.mark.parametrize("words", [[], ["--help"], ["run", "--help"]], ids=["nothing", "help", "run"])
def test_help_goes_to_stdout(vla_eval: Run, words: list[str]) -> None:
    code, out, err = vla_eval(*words)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: vla-eval")
    assert "--json" in out


def test_help_and_version_are_json_too_when_asked_for(vla_eval: Run) -> None:
    code, out, err = vla_eval("run", "--help", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["help"].startswith("Usage: vla-eval run")
    code, out, err = vla_eval("--version", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"version": f"vla-eval-trt {version('vla-eval-trt')}", "exit": 0}


def test_a_run_on_80_columns_loses_no_number_of_its_progress(vla_eval: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, clock = StringIO(), itertools.count()
    console = Console(file=drawn, force_terminal=True, width=80, color_system=None, soft_wrap=True, get_time=lambda: next(clock))
    monkeypatch.setattr(cli, "stderr", console)
    with cli._progress("libero_object@openpi oracle", 10) as advance:
        for _ in range(10):
            advance("", "10 success · 0 failure · 0 error")
    bar = [line for line in drawn.getvalue().splitlines() if "10/10" in line][-1]
    assert re.search(r"10/10 +[\d.]+/min +\d:\d\d:\d\d left 0:00:00 10 success · 0 failure · 0 error", bar), bar


def test_a_long_path_is_whole_on_80_columns_of_doctor(vla_eval: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "/srv/" + "very_long_folder/" * 6 + "assets"
    monkeypatch.setattr(doctor, "checks", lambda: [Check("LIBERO assets", "pass", place, ""), Check("GPU", "absent", "none", "x " * 20)])
    monkeypatch.setattr(cli, "Console", lambda **given: Console(**{**given, "width": 80}))
    _, out, _ = vla_eval("doctor")
    assert "…" not in out
    assert "".join(out.split()).count(place) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_of_every_command_is_explained(name: str) -> None:
    function = COMMANDS[name]
    told = parse(inspect.getdoc(function) or "")
    assert told.short_description
    assert told.short_description.endswith((".", ":"))
    assert {entry.arg_name for entry in told.params} == set(inspect.signature(function).parameters)


REFUSALS = {
    "rum": 'Did you mean "run"?',
    "run --task toy --polcy zero": "--polcy",
    "run --task toy --policy zero --trials many": "--trials",
    "run --task toyy --policy zero": "unknown suite 'toyy'; did you mean 'toy'?",
    "run --task toy@v2 --policy zero": "unknown protocol 'v2' of suite 'toy'; did you mean 'v1'?",
    "run --task toy@ --policy zero": "names no protocol",
    "run --task toy@v1 --protocol free --policy zero": "say it once",
    "run --task toy/9 --policy zero": "toy@v1 has no task 9; its 4 tasks are 0 to 3",
    "run --task toy/0-99999999 --policy zero": "has no task 99999999",
    "run --task toy/2-1 --policy zero": "write 1-2",
    "run --task toy/one --policy zero": "neither an index nor a range",
    "run --task toy/ --policy zero": "neither an index nor a range",
    "run --task toy --policy zeroo": "unknown policy 'zeroo'; did you mean 'zero'?",
    "run --task toy": "--policy is missing",
    "run --policy zero": "--task is missing",
    "run --task toy --policy zero --option horizon": "write NAME=VALUE",
    "run --task toy --policy zero --option horizon=3 --option horizon=4": "given twice",
    "run --task toy --policy zero --option horizn=3": "did you mean 'horizon'?",
    "run --task toy --policy zero --trials 51": "50 initial states",
    "run --task toy --policy zero --trials 0": "trials is 0",
    "run --task toy --policy zero --workers -1": "workers is -1",
    "run --task toy --policy zero --replan 9": "replan is 9",
    "run --task toy --policy zero --replan 0": "replan is 0",
    "run --task toy --policy zero --accept-revision": "goes with --resume",
    "run --task toy --policy zero --out /proc/runs --workers 0": "choose another with --out",
    "run --resume nowhere": "nowhere: no run folder",
    "render nowhere": "nowhere: no run folder",
    "render . --episode 3": "write TASK/TRIAL",
    "render . --size 1": "--size 1",
    "report nowhere": "nowhere: no run folder",
    "check nowhere": "nowhere: no run folder",
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(vla_eval: Run, tmp_path: Path, line: str) -> None:
    code, out, err = vla_eval(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith("vla-eval: ")
    assert err.count("\n") == 1
    assert REFUSALS[line] in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["rum", "run --task toyy --policy zero", "report nowhere"])
def test_a_refusal_is_json_too_when_asked_for(vla_eval: Run, line: str) -> None:
    code, out, err = vla_eval(*line.split(), "--json")
    assert code == 2
    assert json.loads(out) == {"error": err.removeprefix("vla-eval: ").strip(), "exit": 2}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_what_it_does_not_know_in_json(vla_eval: Run, tmp_path: Path, name: str) -> None:
    code, out, err = vla_eval(*name.split(), "--no-such-option", "--json")
    assert code == 2
    assert json.loads(out) == {"error": err.removeprefix("vla-eval: ").strip(), "exit": 2}
    assert list(tmp_path.iterdir()) == []


def test_run_ends_with_rates_the_folder_and_what_to_type_next(vla_eval: Run) -> None:
    code, out, _ = vla_eval("run", "--task", "toy/0-1", "--policy", "zero", "--trials", "2", "--workers", "0")
    assert code == 0
    (folder,) = Path("videos").iterdir()
    assert "0/4" in out
    assert "0.0 … 49.0 %" in out  # Wilson's interval of 0 of 4
    report, render, check = out.rstrip().splitlines()[-3:]
    assert report == f"  vla-eval report {folder}"
    assert render == f"  vla-eval render {folder} --only failures"
    assert check == f"  vla-eval check {folder}"
    assert f"\n{folder}\n" in out


def test_run_and_report_say_the_same_as_json(vla_eval: Run) -> None:
    words = (
        "--task",
        "toy@free/0,2",
        "--policy",
        "random",
        "--trials",
        "2",
        "--seed",
        "3",
        "--replan",
        "4",
        "--option",
        "horizon=6",
        "--out",
        "o",
    )
    code, out, err = vla_eval("run", *words, "--workers", "0", "--json")
    told = json.loads(out)
    assert code == told["exit"] == 0
    assert {key: told[key] for key in ("suite", "policy", "trials", "seed", "replan", "episodes", "complete", "error")} == {
        "suite": "toy@free", "policy": "random", "trials": 2, "seed": 3, "replan": 4, "episodes": 4, "complete": True, "error": 0,
    }  # fmt: skip
    assert told["success"] + told["failure"] == told["rate"]["n"] == 4
    low, high = told["rate"]["wilson"]
    assert 0 <= low <= told["rate"]["value"] <= high <= 1
    assert [line["task"] for line in told["tasks"]] == ["toy@free/0", "toy@free/2"]
    assert err.count("toy@free/0 trial") == 2
    manifest = open_run(told["folder"]).manifest
    assert manifest.options == {"horizon": 6}
    assert json.loads(vla_eval("report", told["folder"], "--json")[1]) == told


def test_several_tasks_make_one_run_each_and_the_worst_exit_code(vla_eval: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> Any:
        if request.task == "toy@v1/1":
            raise RuntimeError("the network is gone")
        return still(request)

    monkeypatch.setattr(registry, "load_policy", lambda name, **options: Scripted(answer))
    code, out, _ = vla_eval(
        "run", "--task", "toy/1", "--task", "toy/0", "--policy", "scripted", "--trials", "1", "--workers", "0", "--json"
    )
    told = json.loads(out)
    assert code == told["exit"] == 1
    assert [(run["complete"], run["error"], run["failure"]) for run in told["runs"]] == [(False, 1, 0), (True, 0, 1)]
    assert len(list(Path("videos").iterdir())) == 2
    shown = vla_eval("report", told["runs"][0]["folder"])[1]
    assert "INCOMPLETE" in shown


def test_an_error_makes_the_run_incomplete_until_it_is_resumed(vla_eval: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = True

    def answer(request: Request) -> Any:
        if broken and request.trial == 1:
            raise RuntimeError("the network is gone")
        return still(request)

    monkeypatch.setattr(registry, "load_policy", lambda name, **options: Scripted(answer))
    code, out, _ = vla_eval("run", "--task", "toy/0", "--policy", "scripted", "--trials", "3", "--workers", "0")
    (folder,) = Path("videos").iterdir()
    assert code == 1
    assert "INCOMPLETE" in out
    assert f"next:\n  vla-eval run --resume {folder}\n" in out
    broken = False
    code, out, err = vla_eval("run", "--resume", str(folder), "--workers", "0", "--json")
    assert code == 0
    assert json.loads(out)["failure"] == 3
    assert "trial 1" in err
    assert "trial 0" not in err  # finished episodes are not played again


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seed", "1"], "seed: 0 then, 1 now"),
        (["--policy", "random"], "policy: 'zero' then, 'random' now"),
        (["--task", "toy/1"], "is a run of toy@v1/0, not of --task toy/1"),
        (["--task", "toy/0", "--task", "toy/1"], "give one --task or none"),
        (["--option", "horizon=4"], "horizon"),
        (["--protocol", "free"], "is a run of toy@v1, not of --protocol free"),
        (["--out", "elsewhere"], "a resumed run stays in its folder"),
    ],
    ids=["seed", "policy", "task", "tasks", "option", "protocol", "out"],
)
def test_resume_refuses_another_run_and_names_the_difference(vla_eval: Run, words: list[str], sentence: str) -> None:
    assert vla_eval("run", "--task", "toy/0", "--policy", "zero", "--trials", "1", "--workers", "0")[0] == 0
    (folder,) = Path("videos").iterdir()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, err = vla_eval("run", "--resume", str(folder), *words, "--workers", "0")
    assert (code, out) == (2, "")
    assert sentence in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def stopped(tmp_path: Path, stop: Callable[[int], None], *words: str) -> tuple[int, str, str, Path]:
    """A run of 50 episodes that `stop` ends after its first: its exit code, what it said, and the folder."""
    command = [sys.executable, "-m", "vla_eval", "run", "--task", "toy/0", "--policy", "random", "--trials", "50", "--workers", "2", *words]
    with subprocess.Popen(
        [*command, "--out", "stopped"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert ": toy@v1/" in process.stderr.readline()
        stop(process.pid)
        out, err = process.communicate(timeout=60)
    (folder,) = (tmp_path / "stopped").iterdir()
    return process.returncode, out, err, folder


def test_ctrl_c_says_how_to_go_on_and_what_goes_on_is_the_same_run(vla_eval: Run, tmp_path: Path) -> None:
    code, out, err, folder = stopped(tmp_path, lambda pid: os.killpg(pid, signal.SIGINT))  # as a terminal does: workers get it too
    assert (code, out) == (130, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("vla-eval: interrupted after ")
    assert last.endswith(f"vla-eval run --resume stopped/{folder.name}")
    assert "Traceback" not in err
    run = open_run(folder)
    assert not run.complete
    assert run.manifest.command[:4] == ["vla-eval", "run", "--task", "toy/0"]
    # Whoever edits the code while the suite runs changes the revision, which is another test's subject.
    assert vla_eval("run", "--resume", str(folder), "--workers", "0", "--accept-revision")[0] == 0
    straight = evaluate(registry.load_policy("random"), registry.load_tasks("toy")[:1], trials=50, workers=0)
    order = operator.attrgetter("task", "trial")
    assert sorted(map(untimed, open_run(folder).records()), key=order) == sorted(map(untimed, straight), key=order)


def test_a_terminated_run_says_how_to_go_on(tmp_path: Path) -> None:
    code, out, err, folder = stopped(tmp_path, lambda pid: os.kill(pid, signal.SIGTERM), "--json")
    *_, last = err.strip().splitlines()
    said = re.fullmatch(r"vla-eval: terminated after (\d+) of 50 episodes; go on with: vla-eval run --resume stopped/(.+)", last)
    assert said is not None
    assert said[2] == folder.name
    assert int(said[1]) in (n := len(open_run(folder).records()), n - 1)  # it may have been written and not yet counted
    assert (code, json.loads(out)) == (1, {"error": last.removeprefix("vla-eval: "), "exit": 1})


def test_a_library_without_a_home_says_nothing(vla_eval: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def listed(group: str) -> list[str]:
        logging.getLogger("matplotlib").warning("Matplotlib created a temporary cache directory")
        logging.getLogger("another").warning("is heard")
        return []

    monkeypatch.setattr(registry, "names", listed)
    assert vla_eval("list")[0] == 0
    assert set(caplog.messages) == {"is heard"}


def test_nothing_but_the_answer_reaches_stdout(vla_eval: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> Any:
        print("a library that likes to talk")  # noqa: T201
        os.write(1, b"and one in C\n")
        return still(request)

    monkeypatch.setattr(registry, "load_policy", lambda name, **options: Scripted(answer))
    code, out, err = vla_eval("run", "--task", "toy/0", "--policy", "scripted", "--trials", "1", "--workers", "0", "--json")
    assert code == 0
    json.loads(out)
    assert "a library that likes to talk" in err
    assert "and one in C" in err


def test_a_bug_keeps_its_traceback_and_stdout_is_json_nevertheless(
    vla_eval: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(group: str) -> list[str]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(registry, "names", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        vla_eval("list", "--json")
    assert json.loads(capfd.readouterr().out)["exit"] == 1


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "vla_eval", "list"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_names_suites_policies_and_models(vla_eval: Run) -> None:
    told = json.loads(vla_eval("list", "--json")[1])
    assert told["suites"]["toy"]["toy@v1"] == {"tasks": 4, "max_steps": 160, "trials": 50}
    assert told["suites"]["toy"]["toy@free"]["trials"] is None
    assert next(iter(told["suites"]["libero_10"])) == "libero_10@openpi"
    assert told["suites"]["libero_90"]["libero_90@gr00t"] == {"tasks": 90, "max_steps": 720, "trials": None}
    assert {"zero", "random", "replay", "oracle"} <= set(told["policies"])
    shown = vla_eval("list")[1]
    assert all(name in shown for name in ("libero_10@openpi (default)", "libero_spatial@lerobot", "replay"))


def test_one_broken_plug_in_hides_no_other(vla_eval: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    load = registry.protocols

    def protocols(suite: str) -> list[str]:
        if suite == "libero_10":
            raise BadRequest("suite 'libero_10' cannot be imported")
        return load(suite)

    monkeypatch.setattr(registry, "protocols", protocols)
    code, out, _ = vla_eval("list", "--json")
    suites = json.loads(out)["suites"]
    assert code == 0
    assert suites["libero_10"] == {"error": "suite 'libero_10' cannot be imported"}
    assert "toy@v1" in suites["toy"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("true", True),
        ("null", None),
        ("cuda:0", "cuda:0"),
        ("NaN", "NaN"),
        ("[1]", "[1]"),
        ("a=b", "a=b"),
        ("", ""),
    ],
    ids=lambda value: repr(value),
)
def test_an_option_is_a_json_scalar_or_else_text(text: str, value: object) -> None:
    (found,) = cli._options([f"flow-steps={text}"]).items()
    assert found == ("flow_steps", value)
    assert type(found[1]) is type(value)


def test_check_names_what_does_not_hold(vla_eval: Run) -> None:
    vla_eval("run", "--task", "toy/0", "--policy", "zero", "--trials", "4", "--workers", "0", "--out", "o")
    (folder,) = Path("o").iterdir()
    assert json.loads(vla_eval("check", str(folder), "--json")[1]) == {
        "run": folder.name, "folder": str(folder), "episodes": 4, "planned": 4, "findings": [], "exit": 0,
    }  # fmt: skip
    episodes = folder / "episodes"
    (episodes / "0-0.npz").unlink()
    (episodes / "0-1.npz").write_bytes((episodes / "0-1.npz").read_bytes()[:100])
    (episodes / "stray.txt").touch()
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records[2] |= {"steps": 7}
    records[3] |= {"video": "episodes/none.mp4"}
    (folder / "episodes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, _ = vla_eval("check", str(folder), "--json")
    found = json.loads(out)["findings"]
    assert code == 1
    assert len(found) == 5
    for part, sentence in zip(
        ("0-0.npz", "0-1.npz", "its record says 7", "its film episodes/none.mp4 is not there", "stray.txt"), found, strict=True
    ):
        assert part in sentence


@pytest.mark.parametrize("option", ["--trials", "--seed", "--workers", "--replan", "--batch"])
def test_a_fraction_is_no_whole_number_and_is_not_rounded(vla_eval: Run, option: str) -> None:
    code, out, err = vla_eval("run", "--task", "toy", "--policy", "zero", option, "1.5")
    assert (code, out) == (2, "")
    assert f"{option}: '1.5' is no whole number" in err
    assert not Path("videos").exists()
