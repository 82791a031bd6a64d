"""Stop rules: the error rate they promise, and that nothing but the shuffled ledger's prefix moves them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from vla_eval.results import sequential
from vla_eval.results.folder import open_run
from vla_eval.results.report import report
from vla_eval.results.sequential import Rule, parse_rule
from vla_eval.types import BadRequest, EpisodeRecord

ROUNDS, EPISODES = 2000, 500


def record(task: str, trial: int, won: bool) -> EpisodeRecord:
    return EpisodeRecord(task, trial, 0, "success" if won else "failure", 10, 2, 1, 1.0, 0.5)


def prefix(won: list[bool]) -> list[EpisodeRecord]:
    return [record("shop@fair/0", trial, one) for trial, one in enumerate(won)]


@pytest.mark.parametrize("p", [0.5, 0.9, 0.98])
def test_looking_after_every_episode_errs_no_more_than_promised(p: float) -> None:
    rng = np.random.default_rng(1)
    k, n = np.cumsum(rng.random((ROUNDS, EPISODES)) < p, axis=1), np.arange(1, EPISODES + 1)
    stopped = sequential.evidence(k, n, p) >= 20
    assert 0 < stopped.any(axis=1).mean() <= 0.05
    for claimed in (stopped & (k > p * n), stopped & (k < p * n)):  # "lower>p" and "upper<p", both false
        assert claimed.any(axis=1).mean() <= 0.05


def test_a_naive_rule_would_err_far_more() -> None:
    rng = np.random.default_rng(1)
    k, n = np.cumsum(rng.random((ROUNDS, EPISODES)) < 0.9, axis=1), np.arange(1, EPISODES + 1)
    z = (k / n - 0.9) / np.sqrt(0.09 / n)
    assert (np.abs(z) > 1.96)[:, 20:].any(axis=1).mean() > 0.2  # a fixed-n interval, looked at after every episode


@pytest.mark.parametrize(
    "rates", [[1.0] * 9 + [0.0], [1.0, 0.95, 0.9, 0.8, 0.3], [0.99] * 5 + [0.7] * 5], ids=["one hopeless", "mixed", "two kinds"]
)
def test_tasks_of_unequal_hardness_in_a_shuffled_ledger_keep_the_promise(rates: list[float]) -> None:
    rng = np.random.default_rng(2)
    ledger = np.repeat(rates, 40)
    p, n = float(ledger.mean()), np.arange(1, len(ledger) + 1)
    order = np.argsort(rng.random((ROUNDS, len(ledger))), axis=1)
    k = np.cumsum(rng.random(order.shape) < ledger[order], axis=1)
    assert (sequential.evidence(k, n, p) >= 20).any(axis=1).mean() <= 0.05


def test_equal_policies_are_told_apart_no_more_often_than_promised() -> None:
    rng = np.random.default_rng(3)
    hardness = rng.beta(4, 1, size=(ROUNDS, EPISODES))
    a, b = (rng.random((ROUNDS, EPISODES)) < hardness for _ in "ab")
    only_a, only_b = np.cumsum(a & ~b, axis=1), np.cumsum(~a & b, axis=1)
    assert 0 < (sequential.evidence(only_b, only_a + only_b, 0.5) >= 20).any(axis=1).mean() <= 0.05


def test_the_interval_is_what_the_evidence_leaves() -> None:
    for k, n in [(0, 7), (3, 9), (45, 50), (60, 60)]:
        low, high = sequential.anytime_interval(k, n)
        for end in (low, high):
            if 0 < end < 1:
                assert float(sequential.evidence(k, n, end)) == pytest.approx(20, rel=1e-6)
        assert low <= k / n <= high
    assert sequential.anytime_interval(0, 0) == (0.0, 1.0)


def test_the_interval_covers_at_all_lengths_at_once() -> None:
    rng = np.random.default_rng(4)
    interval = cache(sequential.anytime_interval)  # most walks meet the same counts
    missed = 0
    for _ in range(200):
        k = np.cumsum(rng.random(80) < 0.8)
        intervals = [interval(int(won), n) for n, won in enumerate(k, 1)]
        missed += any(not low <= 0.8 <= high for low, high in intervals)
    assert missed / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_a_rule_fires_at_the_same_length_however_often_it_is_asked() -> None:
    won = [True] * 80
    rule = parse_rule("lower>0.9")
    fired = rule.fires(prefix(won))
    assert fired is not None
    assert 20 < fired.n < 80
    assert rule.fires(prefix(won[: fired.n])) == fired
    assert rule.fires(prefix(won[: fired.n - 1])) is None
    assert rule.of(prefix(won), [("shop@fair/0", trial) for trial in range(100)]) == fired.why


def test_upper_fires_on_a_hopeless_policy_and_lower_does_not() -> None:
    lost = prefix([False] * 60)
    assert parse_rule("upper<0.5").fires(lost) is not None
    assert parse_rule("lower>0.5").fires(lost) is None


@pytest.mark.parametrize("text", ["lower>1.2", "lower<0.9", "mean>0.5", "upper<0", "", "lower>0.9; rm"])
def test_anything_else_is_refused_with_the_three_forms(text: str) -> None:
    with pytest.raises(BadRequest, match=r"lower>0\.9.*upper<0\.5.*versus RUN"):
        parse_rule(text)


def test_the_prefix_ends_at_a_gap_and_at_an_error() -> None:
    ledger = [("t/0", trial) for trial in range(5)]
    records = [record("t/0", trial, True) for trial in (3, 1, 0)]
    assert [r.trial for r in sequential.finished_prefix(records, ledger)] == [0, 1]
    broken = EpisodeRecord("t/0", 2, 0, "error", 0, 0, 1, 0, 0, error="x")
    assert [r.trial for r in sequential.finished_prefix([*records, broken], ledger)] == [0, 1]


def stopping(make_runs: ModuleType, out: Path, rule: Rule, way: Callable[[int, int], str]) -> Path:
    ledger = [(f"shop@fair/{task}", trial) for task in range(3) for trial in range(40)]
    ledger = [ledger[i] for i in np.random.default_rng(0).permutation(len(ledger))]
    folder = make_runs.make_run(out, way, only=90, trials=40, ledger=ledger, stop=rule.to_json())
    assert isinstance(folder.path, Path)
    return folder.path


def test_a_stopped_run_is_complete_counts_its_prefix_and_carries_the_anytime_interval(make_runs: ModuleType, tmp_path: Path) -> None:
    rule = parse_rule("lower>0.9")
    folder = open_run(stopping(make_runs, tmp_path, rule, lambda task, trial: "success"))
    end = sequential.stopped(folder)
    assert end is not None
    told = report(folder)
    assert told.complete
    assert told.rate.n == end.n < 90
    assert told.not_counted == 90 - end.n
    assert told.rate.wilson is None
    assert told.anytime == sequential.anytime_interval(end.n, end.n)
    data = json.loads(json.dumps(told.to_json()))
    assert data["rule"] == "lower>0.9"
    assert data["rate"]["anytime"][0] > 0.9
    assert any("Not ranked" in note for note in told.notes)


def test_a_rule_that_was_not_met_leaves_the_run_incomplete(make_runs: ModuleType, tmp_path: Path) -> None:
    told = report(open_run(stopping(make_runs, tmp_path, parse_rule("upper<0.5"), lambda task, trial: "success")))
    assert not told.complete
    assert told.planned == 120


def test_versus_keeps_the_other_runs_outcomes_in_its_own_manifest(make_runs: ModuleType, tmp_path: Path) -> None:
    other = make_runs.make_run(tmp_path, lambda task, trial: "drop", trials=40, run_id="other")
    rule = parse_rule(f"versus {other.path}")
    path = stopping(make_runs, tmp_path, rule, lambda task, trial: "success")
    for file in other.path.glob("*.json*"):
        file.unlink()  # the verdict needs the other folder no longer
    end = sequential.stopped(open_run(path))
    assert end is not None
    assert "better than other" in end.why
    # 2^n / π-ish against 20: seven or so one-sided disagreements in a row convince
    assert 6 <= end.n <= 10


def test_a_damaged_rule_is_refused(make_runs: ModuleType, tmp_path: Path) -> None:
    folder = make_runs.make_run(tmp_path, stop={"rule": "lower>0.9"})
    with pytest.raises(BadRequest, match="stop rule cannot be read"):
        report(open_run(folder.path))
