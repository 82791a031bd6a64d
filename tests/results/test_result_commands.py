"""The commands that read runs, from the outside: one JSON object, one sentence, and the exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vla_eval import cli
from vla_eval.results.folder import RunFolder, open_run
from vla_eval.results.sequential import stopped

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def vla_eval(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def two(make_runs: ModuleType, tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    clerk = make_runs.make_run(tmp_path / "runs", lambda task, trial: "success", run_id="clerk")
    baker = make_runs.make_run(tmp_path / "runs", lambda task, trial: "drop" if trial == 2 else "success", run_id="baker", policy="baker")
    return clerk, baker


@pytest.mark.parametrize(
    "words",
    [
        ("report", "{b}"),
        ("compare", "{a}", "{b}"),
        ("compare", "{a}", "{b}", "--diff"),
        ("leaderboard", "{runs}"),
        ("power", "--p0", "0.9"),
    ],
)
def test_every_command_speaks_one_json_object(vla_eval: Command, two: tuple[RunFolder, RunFolder], words: tuple[str, ...]) -> None:
    places = {"a": two[0].path, "b": two[1].path, "runs": two[0].path.parent}
    code, out, _ = vla_eval(*(word.format(**places) for word in words), "--json")
    data = json.loads(out)
    assert code == data["exit"] == 0
    keys = {"report": "rate", "compare": "differences", "leaderboard": "tables", "power": "pairs"}
    assert keys[words[0]] in data


def test_compare_ends_with_a_verdict(vla_eval: Command, two: tuple[RunFolder, RunFolder]) -> None:
    code, out, _ = vla_eval("compare", two[0].path, two[1].path, "--margin", "0.1")
    assert code == 0
    assert "margin 10 points: undecided; needs about" in out
    assert out.count("| success | failure |") == 3


def test_a_table_row_stays_one_line_in_a_file(vla_eval: Command, two: tuple[RunFolder, RunFolder]) -> None:
    _, out, _ = vla_eval("leaderboard", two[0].path.parent)
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert all(line.endswith("|") and line.count("|") == rows[0].count("|") for line in rows)


def test_power_says_how_many_pairs(vla_eval: Command) -> None:
    code, out, _ = vla_eval("power", "--p0", "0.9", "--margin", "0.05", "--power", "0.8", "--json")
    data = json.loads(out)
    assert (code, data["discordant"]) == (0, pytest.approx(0.18))
    # (1.96 + 0.84)² · 0.18 / 0.05² is 565; the exact enumeration asks for a little more
    assert 565 <= data["pairs"] <= 585
    assert data["power"] >= 0.8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "{empty}"), "no episode has been played yet"),
        (("report", "{empty}", "--html"), "no episode has been played yet"),
        (("report", "{none}"), "no run folder"),
        (("report", "{newer}"), "schema 99 is newer"),
        (("compare", "{a}", "{a}"), "the same run"),
        (("compare", "{a}", "{empty}"), "no episode in common"),
        (("compare", "{a}", "{b}", "--margin", "5"), "margin 5.0"),
        (("leaderboard", "{runs}", "{copy}"), "are both run clerk"),
        (("leaderboard", "{none}"), "holds no run"),
        (("leaderboard", "{empty}"), "no episode has been played yet"),
        (("power", "--p0", "1.5"), "--p0 1.5 is no rate"),
        (("power", "--p0", "0.9", "--margin", "0"), "margin 0.0"),
        (("power", "--p0", "0.9", "--p1", "0.8"), "no number of pairs"),
        (("run", "--task", "toy", "--policy", "zero", "--stop-when", "soon"), "none of 'lower>0.9'"),
        (("run", "--task", "toy", "--policy", "zero", "--stop-when", "versus {a}"), "its episodes are not this run's"),
        (("wandb", "{none}"), "no run folder"),
        (("wandb", "{empty}"), "no episode has been played yet"),
    ],
    ids=lambda value: " ".join(value)[:48] if isinstance(value, tuple) else "",
)
def test_a_request_that_cannot_be_met_is_one_sentence_and_exit_2(
    vla_eval: Command, make_runs: ModuleType, two: tuple[RunFolder, RunFolder], tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    empty = make_runs.make_run(tmp_path / "empty", only=0, run_id="empty").path
    newer = make_runs.make_run(tmp_path / "newer", only=0, schema=99).path
    none = tmp_path / "none"
    none.mkdir()
    shutil.copytree(two[0].path, tmp_path / "copy" / "clerk")
    places = {
        "a": two[0].path,
        "b": two[1].path,
        "runs": two[0].path.parent,
        "copy": tmp_path / "copy",
        "empty": empty,
        "newer": newer,
        "none": none,
    }
    before = sorted(tmp_path.rglob("*"))
    code, out, err = vla_eval(*(word.format(**places) for word in words), "--json")
    assert code == 2
    assert said in json.loads(out)["error"]
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before  # nothing half written


@pytest.mark.parametrize(
    "words",
    [
        ("report", "{run}"),
        ("report", "{run}", "--html"),
        ("leaderboard", "{runs}"),
        ("compare", "{run}", "{other}"),
        ("compare", "{other}", "{run}", "--html"),
        ("wandb", "{run}", "--mode", "offline"),
        ("run", "--task", "toy", "--policy", "zero", "--stop-when", "versus {run}"),
    ],
    ids=" ".join,
)
def test_no_conclusion_is_drawn_from_a_run_whose_last_line_is_half_written(
    vla_eval: Command, two: tuple[RunFolder, RunFolder], tmp_path: Path, words: tuple[str, ...]
) -> None:
    clerk, baker = two
    lines = clerk.path / "episodes.jsonl"
    lines.write_bytes(lines.read_bytes()[:-30])
    before = sorted(tmp_path.rglob("*")), lines.read_bytes()
    places = {"run": clerk.path, "other": baker.path, "runs": clerk.path.parent}
    code, out, err = vla_eval(*(word.format(**places) for word in words), "--json")
    data = json.loads(out)
    assert code == data["exit"] == 2
    assert data["error"].startswith(f"{lines}: line 12 is half written; vla-eval run --resume {clerk.path} cuts it off")
    assert err.count("\n") == 1
    assert (sorted(tmp_path.rglob("*")), lines.read_bytes()) == before


def test_a_line_that_is_being_written_refuses_no_report(vla_eval: Command, two: tuple[RunFolder, RunFolder]) -> None:
    clerk, _ = two
    with clerk.locked(), (clerk.path / "episodes.jsonl").open("ab") as lines:
        lines.write(b'{"task": "shop')
        lines.flush()
        code, out, _ = vla_eval("report", clerk.path, "--json")
    assert (code, json.loads(out)["episodes"]) == (0, 12)


def test_a_killed_run_can_be_checked_and_drawn_before_it_is_resumed(
    vla_eval: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play = ("run", "--policy", "zero", "--workers", "0", "--out", "out")
    vla_eval(*play, "--task", "toy/0", "--trials", "3")
    (run,) = (tmp_path / "out").iterdir()
    lines = run / "episodes.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(whole[:-30])
    code, out, _ = vla_eval("check", run, "--json")
    assert (code, json.loads(out)["episodes"]) == (1, 2)  # the third one's arrays belong to no record
    assert [record.getMessage() for record in caplog.records if "line 3 is torn" in record.getMessage()] != []
    code, _, _ = vla_eval("render", run, "--episode", "0/0")  # appends a record: not to half a line
    assert code == 0
    assert "has been cut off; its episode will be played again" in caplog.text
    code, out, _ = vla_eval("report", run, "--json")
    assert (code, json.loads(out)["complete"], json.loads(out)["episodes"]) == (0, False, 2)
    code, out, _ = vla_eval("run", "--resume", run, "--workers", "0", "--json")
    assert (code, json.loads(out)["failure"]) == (0, 3)


def test_pages_are_written_where_the_command_says(vla_eval: Command, two: tuple[RunFolder, RunFolder]) -> None:
    clerk, baker = two
    pages: list[tuple[tuple[Any, ...], Path]] = [
        (("report", clerk.path, "--html", "--draw", "none"), clerk.path / "review" / "index.html"),
        (("compare", clerk.path, baker.path, "--html", "--draw", "none"), baker.path / "versus-clerk" / "index.html"),
        (("leaderboard", clerk.path.parent, "--html", "board.html"), Path("board.html")),
    ]
    for words, page in pages:
        code, out, _ = vla_eval(*words, "--json")
        assert code == 0
        assert json.loads(out)["html"] == str(page)
        assert page.read_text().startswith("<!doctype html>")


def test_failures_are_drawn_before_they_are_shown(vla_eval: Command, tmp_path: Path) -> None:
    vla_eval("run", "--task", "toy/0", "--policy", "zero", "--trials", "1", "--workers", "0", "--out", "out")
    (run,) = (tmp_path / "out").iterdir()
    code, _, _ = vla_eval("report", run, "--html")
    assert code == 0
    (film,) = run.glob("review/media/*/0-0.mp4")
    assert film.samefile(run / "episodes" / "0-0.mp4")
    assert film.with_suffix(".jpg").is_file()


def test_a_run_stops_by_its_rule_and_ends_well(vla_eval: Command, tmp_path: Path) -> None:
    code, out, err = vla_eval(
        "run", "--task", "toy", "--policy", "zero", "--trials", "8", "--workers", "0", "--out", "out", "--stop-when", "upper<0.5", "--json"
    )
    data = json.loads(out)
    assert (code, data["complete"], data["episodes"], data["planned"]) == (0, True, 7, 7)
    assert data["rate"]["anytime"][1] < 0.5
    assert "stopped, upper<0.5: 0/7 succeeded" in err
    folder = open_run(tmp_path / "out" / data["run"])
    assert stopped(folder) is not None
    code, _, err = vla_eval("run", "--resume", folder.path, "--stop-when", "lower>0.9")
    assert code == 2
    assert "fixed when a run begins" in err


def test_wandb_that_is_not_installed_is_refused_before_anything_is_played(
    vla_eval: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = vla_eval("run", "--task", "toy/0", "--policy", "zero", "--wandb", "online", "--out", "out")
    assert code == 2
    assert "pip install wandb" in err
    assert not (tmp_path / "out").exists()
