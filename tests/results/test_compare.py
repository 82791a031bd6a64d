"""Pairs, refusals and manifests' differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from vla_eval.results.compare import compare, difference_markdown
from vla_eval.results.difference import ABSENT, differences, places
from vla_eval.results.folder import RunFolder, create
from vla_eval.types import BadRequest


def won(task: int, trial: int) -> str:
    return "success"


@pytest.fixture
def clerk(make_runs: ModuleType, tmp_path: Path) -> RunFolder:
    folder = make_runs.make_run(tmp_path / "a", won, trials=20, tasks=1, run_id="clerk")
    assert isinstance(folder, RunFolder)
    return folder


def test_19_of_20_against_20_of_20_is_undecided_and_names_the_episode(make_runs: ModuleType, tmp_path: Path, clerk: RunFolder) -> None:
    other = make_runs.make_run(
        tmp_path, lambda task, trial: "drop" if trial == 7 else "success", trials=20, tasks=1, run_id="b", policy="baker"
    )
    result = compare(clerk, other)
    assert result.verdict.word == "undecided"
    assert [(d.task, d.trial, d.a, d.b) for d in result.disagreements] == [("shop@fair/0", 7, "success", "failure")]
    text = result.markdown()
    assert f"needs about {result.verdict.more_pairs} more pairs" in text
    assert "| A succeeded | 19 | 1 |" in text
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert data["pairs"] == {"n": 20, "both": 19, "only_a": 1, "only_b": 0, "neither": 0}
    assert data["difference"]["value"] == -0.05


def test_an_undecided_policy_that_is_surely_worse_by_something_is_said_so(make_runs: ModuleType, tmp_path: Path, clerk: RunFolder) -> None:
    other = make_runs.make_run(tmp_path, lambda task, trial: "drop" if trial < 6 else "success", trials=20, tasks=1, run_id="b")
    sentence = compare(clerk, other, margin=0.2).sentence
    assert "undecided" in sentence
    assert "worse by something" in sentence


def test_pairs_match_by_episode_and_not_by_the_order_of_finishing(make_runs: ModuleType, tmp_path: Path) -> None:
    fails = {2, 5, 11}
    one = make_runs.make_run(tmp_path / "1", lambda task, trial: "drop" if trial in fails else "success", trials=20, tasks=1, run_id="a")
    other = create(tmp_path / "2", make_runs.manifest(trials=20, tasks=1, run_id="b"))
    for trial in reversed(range(20)):
        make_runs.play(other, "shop@fair/0", trial, "drop" if trial in fails else "success")
    assert compare(one, other).disagreements == []
    assert compare(one, other).pairs.neither == 3


def test_a_pair_with_an_error_is_not_counted_and_keeps_the_verdict_open(make_runs: ModuleType, tmp_path: Path) -> None:
    one = make_runs.make_run(tmp_path / "1", won, trials=150, tasks=1, run_id="a")
    sound = make_runs.make_run(tmp_path / "2", won, trials=150, tasks=1, run_id="b")
    broken = make_runs.make_run(
        tmp_path / "3", lambda task, trial: "error: boom" if trial == 3 else "success", trials=150, tasks=1, run_id="c"
    )
    assert compare(one, sound).verdict.word == "not worse"
    result = compare(one, broken)
    assert (result.pairs.n, result.errors, result.verdict.word) == (149, 1, "undecided")
    assert "1 pairs with an error" in result.sentence


def test_a_longer_run_is_paired_where_both_played(make_runs: ModuleType, tmp_path: Path, clerk: RunFolder) -> None:
    longer = make_runs.make_run(tmp_path, won, trials=30, tasks=2, run_id="b")
    result = compare(clerk, longer)
    assert (result.pairs.n, result.unpaired) == (20, 40)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cap": 90}, "max_steps: 120 against 90"),
        ({"seed": 1}, "seed: 0 against 1"),
        ({"suite": "shop@free"}, "suite: shop@fair against shop@free"),
        ({"versions": {"python": "3.11.7", "mujoco": "3.4.0", "robosuite": "1.4.0"}}, "versions.mujoco: 3.3.2 against 3.4.0"),
    ],
    ids=["step limit", "seed", "suite", "simulator"],
)
def test_other_episodes_are_refused_by_name(
    make_runs: ModuleType, tmp_path: Path, clerk: RunFolder, changes: dict[str, object], named: str
) -> None:
    other = make_runs.make_run(tmp_path, won, only=2, trials=20, tasks=1, run_id="b", **changes)
    with pytest.raises(BadRequest, match="cannot be paired") as refused:
        compare(clerk, other)
    assert named in str(refused.value)


@pytest.mark.parametrize("key", ["starts", "env_kwargs"])
def test_other_initial_states_or_settling_are_refused_by_name(make_runs: ModuleType, tmp_path: Path, clerk: RunFolder, key: str) -> None:
    manifest = make_runs.manifest(trials=20, tasks=1, run_id="b")
    numbers = manifest.protocol["tasks"]["shop@fair/0"]
    changed = {**numbers, key: "77aa" if key == "starts" else {**numbers["env_kwargs"], "settle_steps": 0}}
    other = create(tmp_path, replace(manifest, protocol={**manifest.protocol, "tasks": {"shop@fair/0": changed}}))
    make_runs.play(other, "shop@fair/0", 0, "success")
    with pytest.raises(BadRequest, match="starts: 4f1c against 77aa" if key == "starts" else "settle_steps: 10 against 0"):
        compare(clerk, other)


def test_replan_python_and_machine_do_not_part_episodes(make_runs: ModuleType, tmp_path: Path, clerk: RunFolder) -> None:
    versions = {"python": "3.13.1", "mujoco": "3.3.2", "robosuite": "1.4.0"}
    other = make_runs.make_run(tmp_path, won, trials=20, tasks=1, run_id="b", replan=8, versions=versions, hardware={"cpu": "other"})
    result = compare(clerk, other)
    assert {(d.key, d.a, d.b) for d in result.differences} == {
        ("replan", 4, 8), ("versions.python", "3.11.7", "3.13.1"), ("hardware.cpu", "test", "other"),
    }  # fmt: skip
    assert "replan 4" in result.sentence
    assert "replan 8" in result.sentence


def test_the_difference_of_two_manifests_names_every_difference(make_runs: ModuleType) -> None:
    a, b = make_runs.manifest(), make_runs.manifest(trials=5, options={"horizon": 4}, bundle="feed")
    found = {d.key: (d.a, d.b) for d in differences(a, b)}
    assert found == {
        "trials": (4, 5),
        "options.horizon": ("(absent)", 4),
        "bundle": (None, "feed"),
        **{f"ledger.shop@fair/{task}, trial 4": ("(absent)", "planned") for task in range(3)},
    }
    assert "| bundle | None | feed |" in difference_markdown(a, b)
    assert "nothing but their outcomes" in difference_markdown(a, replace(a, run_id="other", created="later"))


@pytest.mark.parametrize(
    ("way", "changes", "said"),
    [
        (None, {"only": 0}, "no episode in common"),
        ("error: x", {}, "every one of the 20 pairs"),
        ("success", {"stop": {"rule": "lower>0.5"}}, "without --stop-when"),
    ],
    ids=["empty", "all errors", "stopped"],
)
def test_what_cannot_be_compared_is_one_sentence(
    make_runs: ModuleType, tmp_path: Path, clerk: RunFolder, way: str | None, changes: dict[str, object], said: str
) -> None:
    other = make_runs.make_run(tmp_path, lambda task, trial: way, trials=20, tasks=1, run_id="b", **changes)
    with pytest.raises(BadRequest, match=said):
        compare(clerk, other)


def test_a_run_is_not_compared_with_itself(clerk: RunFolder) -> None:
    with pytest.raises(BadRequest, match="the same run"):
        compare(clerk, clerk)


def test_a_difference_is_named_where_it_is_and_not_above() -> None:
    before = {"options": {}, "tasks": {"a": {"cap": 60, "size": [64, 64]}}, "gone": {"deep": 1}}
    now = {"options": {"steps": 4}, "tasks": {"a": {"cap": 80, "size": (64, 64)}}, "new": {}}
    assert list(places(before, now)) == [
        (("options", "steps"), ABSENT, 4),
        (("tasks", "a", "cap"), 60, 80),
        (("gone",), {"deep": 1}, ABSENT),
        (("new",), ABSENT, {}),
    ]
