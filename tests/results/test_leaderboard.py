"""Which runs share a table, which rows share a rank, and what can be imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vla_eval.results import leaderboard as board
from vla_eval.results.folder import create
from vla_eval.results.leaderboard import Table, leaderboard
from vla_eval.types import BadRequest

Way = Callable[[int, int], str]


def all_but(count: int) -> Way:
    """A policy that fails the first `count` trials of each task."""
    return lambda task, trial: "drop" if trial < count else "success"


def ranks(table: Table, suite: str = "shop@fair") -> dict[str, int | None]:
    return {row.first.origin: row.ranks[suite] for row in table.rows if suite in row.cells}


def test_rates_that_cannot_be_told_apart_share_a_rank(make_runs: ModuleType, tmp_path: Path) -> None:
    for name, lost in (("best", 0), ("near", 1), ("far", 8), ("last", 9)):
        make_runs.make_run(tmp_path, all_but(lost), trials=10, run_id=name, policy=name)
    (table,) = leaderboard([tmp_path])
    assert ranks(table) == {"best": 1, "near": 1, "far": 3, "last": 3}


def test_privileged_incomplete_and_stopped_runs_have_no_rank(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path, all_but(1), run_id="plain")
    make_runs.make_run(tmp_path, all_but(0), run_id="seer", privileged=True)
    make_runs.make_run(tmp_path, all_but(0), run_id="half", only=5, policy="half")
    make_runs.make_run(tmp_path, lambda task, trial: "error: x" if trial == 0 else "success", run_id="broken", policy="broken")
    rule = {"rule": "lower>0.1", "kind": "lower", "threshold": 0.1, "against": "", "reference": None}
    make_runs.make_run(tmp_path, all_but(0), run_id="stopped", stop=rule, policy="early")
    make_runs.make_run(tmp_path, all_but(0), run_id="empty", only=0, policy="empty")
    (table,) = leaderboard([tmp_path])
    assert ranks(table) == {"plain": 1, "seer": None, "half": None, "broken": None, "stopped": None, "empty": None}
    text = board.markdown([table])
    for said in ("used privileged state", "incomplete", "stop rule lower&gt;0.1", "3 errors"):
        assert said.replace("&gt;", ">") in text


def test_other_conditions_are_other_tables(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path, run_id="a")
    make_runs.make_run(tmp_path, run_id="longer", cap=200)
    make_runs.make_run(tmp_path, run_id="newer", versions={"mujoco": "3.4.0", "robosuite": "1.4.0"})
    make_runs.make_run(tmp_path, run_id="ruled", suite="shop@free")
    make_runs.make_run(tmp_path, run_id="part", tasks=2)
    unsettled = make_runs.manifest(run_id="unsettled")
    tasks = {name: {**numbers, "env_kwargs": {"settle_steps": 0, "size": 64}} for name, numbers in unsettled.protocol["tasks"].items()}
    create(tmp_path, replace(unsettled, protocol={**unsettled.protocol, "tasks": tasks}))
    tables = leaderboard([tmp_path])
    assert sorted(row.first.origin for table in tables for row in table.rows) == ["a", "longer", "newer", "part", "ruled", "unsettled"]
    assert all(len(table.rows) == 1 for table in tables)
    assert any("shop, 3 tasks of at most 200 steps" in table.title for table in tables)


def test_suites_of_one_protocol_stand_side_by_side(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path, run_id="1", suite="shop@fair")
    make_runs.make_run(tmp_path, run_id="2", suite="bar@fair")
    (table,) = leaderboard([tmp_path])
    assert table.suites == ["bar@fair", "shop@fair"]
    assert [set(row.cells) for row in table.rows] == [{"bar@fair", "shop@fair"}]


def test_another_replan_is_another_row_and_said(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path, run_id="5", replan=5)
    make_runs.make_run(tmp_path, run_id="10", replan=10)
    (table,) = leaderboard([tmp_path])
    assert sorted(row.first.replan or 0 for row in table.rows) == [5, 10]
    assert any("differ in replan" in note for note in table.notes)


def test_pairs_tell_apart_what_two_rates_cannot(make_runs: ModuleType, tmp_path: Path) -> None:
    one = board.of_run(make_runs.make_run(tmp_path, lambda t, k: "success" if k >= 10 else "drop", trials=30, tasks=1, run_id="a"))
    other = board.of_run(make_runs.make_run(tmp_path, lambda t, k: "success" if k >= 3 else "drop", trials=30, tasks=1, run_id="b"))
    assert board.told_apart(one, other)  # seven to none
    assert not board.told_apart(replace(one, outcomes={}), other)  # 20 against 27 of 30
    assert not board.told_apart(replace(one, seed=9), other)


def test_a_copied_run_counts_once_or_is_refused(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path / "one", run_id="a")
    assert len(leaderboard([tmp_path / "one", folder.path])[0].rows) == 1
    shutil.copytree(folder.path, tmp_path / "two" / "a")
    with pytest.raises(BadRequest, match=r"one/a and .*two/a are both run a"):
        leaderboard([tmp_path / "one", tmp_path / "two"])


@pytest.mark.parametrize("sort", ["policy", "date", "latency", "shop", "shop@fair"])
def test_rows_can_be_sorted(make_runs: ModuleType, tmp_path: Path, sort: str) -> None:
    make_runs.make_run(tmp_path, all_but(0), run_id="1", policy="b", created="2026-02-01")
    make_runs.make_run(tmp_path, all_but(3), run_id="2", policy="a", created="2026-01-01")
    order = [row.first.policy for row in leaderboard([tmp_path], sort)[0].rows]
    assert order == (
        ["a", "b"] if sort in ("policy", "date") else ["b", "a"] if sort.startswith("shop") else sorted(order, key=order.index)
    )


def test_an_unknown_column_is_refused(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path)
    with pytest.raises(BadRequest, match="cannot sort by 'beauty'"):
        leaderboard([tmp_path], "beauty")


def put(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def published(**changes: Any) -> dict[str, Any]:
    result = {"policy": "pi0", "suite": "shop@fair", "rate": 0.942, "n": 500, "source": "somewhere, table 2", **changes}
    return {"vla_eval_results": 1, "results": [{name: value for name, value in result.items() if value is not None}]}


def test_a_published_result_is_marked_and_never_ranked(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path / "runs", all_but(2))
    tables = leaderboard([tmp_path / "runs", put(tmp_path / "paper.json", published())])
    assert len(tables) == 2
    (row,) = next(table for table in tables if "publishers" in table.title).rows
    assert (row.first.rate.k, row.first.rate.n) == (471, 500)
    assert row.ranks == {"shop@fair": None}
    assert "published, not played here" in board.markdown(tables)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate": 0.9417}, "cannot come from 500 episodes"),
        ({"n": None}, "'n', the number of episodes"),
        ({"n": 0}, "'n', the number of episodes"),
        ({"n": True}, "'n', the number of episodes"),
        ({"k": 501, "rate": None}, "501 successes of 500"),
        ({"k": 10}, "cannot come from"),
        ({"rate": None}, "'k' or 'rate' is missing"),
        ({"rate": "high"}, "could not convert"),
        ({"source": None}, "'source'"),
        ({"success": 0.9}, "unknown field 'success'"),
        ({"conditions": [1]}, "'conditions' is no object"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_impossible_result_cannot_be_entered(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    if changes == {"k": 10}:
        changes = {"k": 10, "rate": 0.9419}
    with pytest.raises(BadRequest, match=said):
        leaderboard([put(tmp_path / "paper.json", published(**changes))])


def test_lerobots_file_is_read_by_group(tmp_path: Path) -> None:
    tasks = [
        {
            "task_group": group,
            "task_id": task,
            "metrics": {"sum_rewards": [1.0, 0.0], "max_rewards": [1.0, 0.0], "successes": wins, "video_paths": []},
        }
        for group, task, wins in (("libero_10", 0, [True, False]), ("libero_10", 1, [True, True]), ("libero_goal", 0, [False, False]))
    ]
    path = put(
        tmp_path / "smolvla" / "eval_info.json", {"per_task": tasks, "per_group": {}, "overall": {"pc_success": 50.0, "n_episodes": 6}}
    )
    (table,) = leaderboard([path])
    (row,) = table.rows
    assert {suite: (e.rate.k, e.rate.n) for suite, e in row.cells.items()} == {"libero_10": (3, 4), "libero_goal": (0, 2)}
    assert row.first.policy == "smolvla"
    assert row.first.unranked == "played by lerobot"


def test_lerobots_older_file_is_read_too(tmp_path: Path) -> None:
    episodes = [{"episode_ix": i, "sum_reward": 0.0, "max_reward": 0.0, "success": i > 1, "seed": i} for i in range(5)]
    path = put(tmp_path / "act" / "eval_info.json", {"per_episode": episodes, "aggregated": {"pc_success": 60.0}})
    assert leaderboard([path])[0].rows[0].first.rate.k == 3


@pytest.mark.parametrize("nested", [True, False], ids=["metrics", "older"])
def test_the_other_harness_counts_crashes_as_failures_and_we_do_not(tmp_path: Path, nested: bool) -> None:
    def episode(number: int, won: bool, **more: Any) -> dict[str, Any]:
        return {"episode_id": number, "steps": 100, **({"metrics": {"success": won}} if nested else {"success": won}), **more}

    episodes = [episode(0, True), episode(1, False), episode(2, False, failure_reason="timeout")]
    task = {"task": "put the bowl on the plate", "episodes": episodes, "num_episodes": 3, "num_errors": 1, "avg_steps": 100.0}
    data = {
        "benchmark": "LIBEROBenchmark_libero_goal",
        "mode": "sync",
        "harness_version": "0.5.0",
        "tasks": [task],
        "config": {},
        "mean_success": 0.3333,
    }
    (table,) = leaderboard([put(tmp_path / "pi05-libero" / "merged.json", data)])
    entry = table.rows[0].first
    assert (entry.rate.k, entry.rate.n, entry.error) == (1, 2, 1)
    assert entry.policy == "pi05-libero"
    assert "vla-evaluation-harness 0.5.0" in table.title


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tasks": []}', '{"per_task": [{"task_group": "x"}]}', '{"vla_eval_results": 2, "results": []}']
)
def test_a_file_of_no_known_form_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "what.json").write_text(text)
    with pytest.raises(BadRequest, match=r"what\.json"):
        leaderboard([tmp_path / "what.json"])


def test_a_place_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="holds no run"):
        leaderboard([tmp_path])
    with pytest.raises(BadRequest, match="no such folder"):
        leaderboard([tmp_path / "nowhere"])


def test_the_json_says_what_the_tables_say(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path, all_but(1), run_id="a")
    data = json.loads(json.dumps(board.to_json(leaderboard([tmp_path])), allow_nan=False))
    cell = data["tables"][0]["rows"][0]["cells"]["shop@fair"]
    assert (cell["rank"], cell["rate"]["k"], cell["rate"]["n"], cell["origin"]) == (1, 9, 12, "a")
    assert cell["latency"]["p50"] > 0
    assert data["tables"][0]["conditions"]["shop@fair"]["simulator"] == {"mujoco": "3.3.2", "robosuite": "1.4.0"}


def test_a_row_says_in_which_types_its_engines_compute(make_runs: ModuleType, tmp_path: Path) -> None:
    mixed = {"visual": {"dtype": "fp32", "backend": "onnxruntime"}, "action": {"dtype": "bf16"}, "text": {"dtype": "bf16"}}
    fast = make_runs.make_run(tmp_path / "runs", run_id="fast", engines=mixed)
    plain = make_runs.make_run(tmp_path / "runs", run_id="plain")
    assert (board.of_run(fast).precision, board.of_run(plain).precision) == ("bf16, fp32", "–")
    assert "| – | bf16, fp32 | none |" in board.markdown(leaderboard([tmp_path / "runs"]))


@pytest.mark.parametrize(("name", "value"), [("replan", "five"), ("replan", True), ("date", None), ("privileged", "no"), ("bundle", 7)])
def test_a_published_field_of_another_kind_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    result = {"policy": "p", "suite": "shop@fair", "k": 1, "n": 2, "source": "a paper", name: value}
    file = tmp_path / "published.json"
    file.write_text(json.dumps({"vla_eval_results": 1, "results": [result]}))
    with pytest.raises(BadRequest, match=rf"results\[0\]: '{name}' is "):
        leaderboard([file])


def test_a_row_of_two_suites_names_both_of_its_runs(make_runs: ModuleType, tmp_path: Path) -> None:
    make_runs.make_run(tmp_path, run_id="one")
    make_runs.make_run(tmp_path, run_id="other", suite="mall@fair", tasks=2)
    (table,) = leaderboard([tmp_path])
    (row,) = table.rows
    *_, dates, origins = board.row_texts(row)
    assert dates == ["2026-01-02"]
    assert sorted(origins) == ["one", "other"]
    assert "mall, 2 tasks of at most 120 steps; shop, 3 tasks of at most 120 steps" in table.title
    text = board.markdown([table])
    assert "| other, one |" in text or "| one, other |" in text
