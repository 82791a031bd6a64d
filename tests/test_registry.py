"""Names to things: selections, near misses, options."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_eval import registry
from vla_eval.policies.baseline import zero
from vla_eval.types import BadRequest, Policy, Progress, Task, VlaEvalError, silent


def indices(spec: str, protocol: str | None = None) -> list[int]:
    return [task.index for task in registry.select_tasks(spec, protocol)]


@pytest.mark.parametrize(
    ("spec", "suite", "wanted"),
    [
        ("libero_10", "libero_10@openpi", list(range(10))),
        ("libero_10/3", "libero_10@openpi", [3]),
        ("libero_10@gr00t/0-4,7", "libero_10@gr00t", [0, 1, 2, 3, 4, 7]),
        ("libero_90/88-89", "libero_90@openpi", [88, 89]),
        ("libero_10/7,0-2,1", "libero_10@openpi", [0, 1, 2, 7]),
        ("libero_10@openpi-ordered/09", "libero_10@openpi-ordered", [9]),
    ],
)
def test_a_selection_is_in_the_suites_order_and_each_task_once(spec: str, suite: str, wanted: list[int]) -> None:
    found = registry.select_tasks(spec)
    assert [task.index for task in found] == wanted
    assert {task.suite for task in found} == {suite}


def test_the_protocol_stands_for_the_suffix() -> None:
    assert registry.select_tasks("libero_10/3", "gr00t") == registry.select_tasks("libero_10@gr00t/3")
    assert registry.select_tasks("libero_10@gr00t/3", "gr00t") == registry.select_tasks("libero_10@gr00t/3")
    with pytest.raises(BadRequest, match="say it once"):
        registry.select_tasks("libero_10@gr00t", "lerobot")


@given(st.sets(st.integers(0, 9), min_size=1))
def test_any_list_of_indices_is_understood(wanted: set[int]) -> None:
    assert indices("libero_10/" + ",".join(map(str, wanted))) == sorted(wanted)


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "1-", "-", "1--2", "0x1", "1.0", "1 2", "٣", "1,,2", "3,", "1-2-3", "10", "0-10", "5-4", "9" * 5000], ids=repr
)
def test_what_is_no_selection_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        registry.select_tasks(f"libero_10/{text}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("libero_ten", "unknown suite 'libero_ten'; did you mean 'libero_10' or 'libero_90' or"),
        ("libero_10@groot", "unknown protocol 'groot' of suite 'libero_10'; did you mean 'gr00t' or 'lerobot'?"),
        ("libero_10@", "'libero_10@' names no protocol after '@'"),
        ("", "unknown suite ''; known: "),
        ("libero_objct", "unknown suite 'libero_objct'; did you mean 'libero_object'?"),
        ("zzz", "unknown suite 'zzz'; known: "),
    ],
)
def test_an_unknown_name_gets_the_near_miss_or_all_names(name: str, sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        registry.load_tasks(name)
    assert str(caught.value).startswith(sentence)


def test_what_is_installed_or_removed_meanwhile_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert "late" not in registry.names(registry.POLICIES)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1\n")
    (tmp_path / "made" / "entry_points.txt").write_text("[vla_eval.policies]\nlate = vla_eval.policies.baseline:zero\n")
    (tmp_path / "made").rename(tmp_path / "somebodys-1.dist-info")  # whole at once, as pip does
    assert "late" in registry.names(registry.POLICIES)
    assert registry.load_policy("late").name == "zero"
    shutil.rmtree(tmp_path / "somebodys-1.dist-info")
    assert "late" not in registry.names(registry.POLICIES)


@pytest.mark.parametrize("line", ["import os; os.environ['NOBODY_SETS_THIS']", "assert False", "1 / 0", "x ="])
def test_a_plug_in_is_named_whatever_its_import_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    module = f"broken_{sum(map(ord, line))}"  # Python remembers modules by name
    (tmp_path / f"{module}.py").write_text(f"{line}\n")
    about = tmp_path / "somebodys-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vla_eval.policies]\nbroken = {module}:load\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VlaEvalError, match=r"policy 'broken' of somebodys cannot be imported .* Reinstall or remove somebodys$"):
        registry.load_policy("broken")


def test_options_are_held_against_the_signature() -> None:
    def load(bundle: object = None, *, steps: int, gain: float = 1.0) -> None: ...

    registry.check_options("policy 'mine'", load, {"bundle": None, "steps": 3})
    with pytest.raises(BadRequest, match=r"unknown option 'stpes' of policy 'mine'; did you mean 'steps'\?"):
        registry.check_options("policy 'mine'", load, {"stpes": 3})
    with pytest.raises(BadRequest, match=r"policy 'mine' needs --option steps=VALUE"):
        registry.check_options("policy 'mine'", load, {"gain": 2.0})
    registry.check_options("any", lambda **options: options, {"whatever": 1})


@pytest.mark.parametrize("suite", registry.names(registry.TASKS))
def test_every_registered_suite_names_its_tasks_by_suite_protocol_and_index(suite: str) -> None:
    for protocol in registry.protocols(suite):
        tasks = registry.load_tasks(protocol)
        assert [task.id for task in tasks] == [f"{protocol}/{index}" for index in range(len(tasks))]
        assert all(isinstance(task, Task) and task.instruction and task.max_steps > 0 for task in tasks)


def test_a_policy_without_engines_needs_no_bundle_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def load(size: int = 1) -> Policy:
        asked.append(size)
        return zero()

    monkeypatch.setattr(registry, "_load", lambda group, name: load)
    assert registry.load_policy("mine", size=2).name == "zero"
    assert asked == [2]
    with pytest.raises(BadRequest, match="unknown option 'bundle' of policy 'mine'"):
        registry.load_policy("mine", bundle="somewhere")


def test_progress_is_filled_in_and_is_no_option() -> None:
    def recipe(checkpoint: str, out: str, *, steps: int = 4, progress: Progress = silent) -> int:
        progress(checkpoint, 1, 2)
        return steps

    heard: list[tuple[str, int, int]] = []
    told = registry.with_progress(recipe, lambda *said: heard.append(said))
    assert told("c", "o", steps=8) == 8
    assert heard == [("c", 1, 2)]
    with pytest.raises(BadRequest, match="unknown option 'progress'"):
        registry.check_options("it", told, {"checkpoint": "c", "out": "o", "progress": 1})
    assert registry.with_progress(len, silent) is len
