"""Somebody else's package, really built and installed: its suite, environment and policy are found by name and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent / "plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the plug-in is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return {**os.environ, "PYTHONPATH": str(folder / "site")}


def vla_eval(environment: dict[str, str], folder: Path, *words: str) -> tuple[int, dict[str, object], str]:
    """A command in a new process: exit code, its JSON, stderr."""
    ((code, told),), said = vla_evals(environment, folder, words)
    return code, told, said


def vla_evals(environment: dict[str, str], folder: Path, *commands: Sequence[str]) -> tuple[list[tuple[int, dict[str, object]]], str]:
    """Commands one after the other in a new process: the exit code and JSON of each, stderr. `RUN` in one is the newest run folder."""
    script = f"""
from pathlib import Path
from vla_eval.cli import main
for words in {commands!r}:
    newest = max(map(str, Path("videos").glob("*")), default="")
    print(main([newest if word == "RUN" else word for word in words] + ["--json"]), flush=True)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()  # JSON and exit code in turn
    return [(int(code), json.loads(told)) for told, code in zip(lines[::2], lines[1::2], strict=True)], done.stderr


class Told(NamedTuple):
    folder: Path  # where they were asked
    by: dict[str, tuple[int, dict[str, object]]]


@pytest.fixture(scope="module")
def told(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Exit code and JSON of short commands that do not depend on each other."""
    short = ("--trials", "1", "--workers", "0", "--policy", "steady", "--task")
    commands = {
        "list": ("list",),
        "option": ("run", *short, "counter/1", "--option", "gain=0"),
        "misspelt": ("run", *short, "counter/1", "--option", "gian=0"),
        "elsewhere": ("run", *short, "toy/0", "--out", "elsewhere"),
    }
    folder = tmp_path_factory.mktemp("told")
    answers, _ = vla_evals(environment, folder, *commands.values())
    return Told(folder, dict(zip(commands, answers, strict=True)))


def test_list_shows_what_it_brings(told: Told) -> None:
    code, listed = told.by["list"]
    assert code == 0
    assert listed["suites"]["counter"] == {"counter@v1": {"tasks": 2, "max_steps": 20, "trials": None}}  # type: ignore[index]
    assert "steady" in listed["policies"]  # type: ignore[operator]


def test_its_policy_plays_its_tasks_and_is_filmed_meanwhile(environment: dict[str, str], tmp_path: Path) -> None:
    words = ("run", "--task", "counter", "--policy", "steady", "--trials", "2", "--workers", "1", "--video", "--seed", "5")
    ((code, told), checked, (rendered, refusal)), err = vla_evals(environment, tmp_path, words, ("check", "RUN"), ("render", "RUN"))
    assert code == 0, err
    assert (told["suite"], told["episodes"], told["success"], told["complete"]) == ("counter@v1", 4, 4, True)
    folder = tmp_path / str(told["folder"])
    assert sorted(path.name for path in (folder / "episodes").glob("*.mp4")) == ["0-0.mp4", "0-1.mp4", "1-0.mp4", "1-1.mp4"]
    assert checked[0] == 0
    assert rendered == 2
    assert "run it with --video" in str(refusal["error"])


def test_its_options_arrive(told: Told) -> None:
    code, played = told.by["option"]
    assert code == 0, played
    assert played["failure"] == 1
    code, refusal = told.by["misspelt"]
    assert code == 2
    assert "did you mean 'gain'?" in str(refusal["error"])


def test_a_policy_that_needs_what_its_environment_lacks_is_refused(told: Told) -> None:
    code, refusal = told.by["elsewhere"]
    assert code == 2
    assert "front" in str(refusal["error"])
    assert not (told.folder / "elsewhere").exists() or not list((told.folder / "elsewhere").iterdir())


def test_a_plug_in_that_cannot_be_imported_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    site = shutil.copytree(environment["PYTHONPATH"], tmp_path / "site")
    (site / "counter_plugin" / "policy.py").write_text("import a_package_that_is_not_there\n")
    code, told, err = vla_eval({**environment, "PYTHONPATH": str(site)}, tmp_path, "run", "--task", "toy", "--policy", "steady")
    assert code == 2
    assert err.count("\n") == 1
    assert all(part in str(told["error"]) for part in ("'steady' of counter-plugin", "a_package_that_is_not_there"))


def test_a_name_registered_twice_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    site = shutil.copytree(environment["PYTHONPATH"], tmp_path / "site")
    other = shutil.copytree(site / "counter_plugin-1.0.dist-info", site / "impostor-1.0.dist-info")
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: impostor\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[vla_eval.policies]\nsteady = impostor:load\n")
    code, told, _ = vla_eval({**environment, "PYTHONPATH": str(site)}, tmp_path, "run", "--task", "toy", "--policy", "steady")
    assert code == 2
    assert "registered twice: counter-plugin (counter_plugin.policy:load), impostor (impostor:load)" in str(told["error"])
