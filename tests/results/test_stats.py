"""Intervals, pairs and sample sizes, held against enumeration and against what they must be by definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom, binomtest, chi2, multinomial, norm

from vla_eval.results import stats
from vla_eval.results.stats import Interval
from vla_eval.types import BadRequest


@pytest.mark.parametrize(("k", "n"), [(0, 1), (19, 20), (20, 20), (7, 50), (470, 500)])
def test_the_wilson_ends_are_the_rates_that_a_score_test_just_accepts(k: int, n: int) -> None:
    low, high = stats.rate(k, n).wilson or Interval(0, 0)
    for end in (low, high):
        if 1e-12 < end < 1 - 1e-12:
            # 1e-9: the ends come from a closed form, the test here from the definition; both are double precision
            assert abs(k / n - end) / math.sqrt(end * (1 - end) / n) == pytest.approx(norm.isf(0.025), rel=1e-9)


@pytest.mark.parametrize(("k", "n"), [(0, 1), (19, 20), (20, 20), (7, 50)])
def test_the_exact_ends_leave_a_fortieth_in_each_tail(k: int, n: int) -> None:
    low, high = stats.rate(k, n).exact or Interval(0, 0)
    if k:
        assert binom.sf(k - 1, n, low) == pytest.approx(0.025, rel=1e-6)  # 1e-6: the library's root finder
    if k < n:
        assert binom.cdf(k, n, high) == pytest.approx(0.025, rel=1e-6)


def test_nothing_counted_is_nothing_known() -> None:
    assert stats.rate(0, 0) == stats.Rate(0, 0, None, None, None)


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (0, -1)])
def test_counts_that_no_run_has_are_refused(k: int, n: int) -> None:
    with pytest.raises(BadRequest, match="cannot be"):
        stats.rate(k, n)


def test_a_published_rate_becomes_the_count_behind_it() -> None:
    assert stats.counted(0.942, 500, digits=3).k == 471
    assert stats.counted(0.33, 3, digits=2).k == 1


@pytest.mark.parametrize(("value", "n", "digits"), [(0.955, 10, 3), (0.9417, 500, 4), (1.02, 50, 2)])
def test_a_rate_that_is_no_count_is_refused(value: float, n: int, digits: int) -> None:
    with pytest.raises(BadRequest, match=f"cannot come from {n}"):
        stats.counted(value, n, digits=digits)


def test_the_clustered_interval_is_never_the_narrower_one() -> None:
    rng = np.random.default_rng(1)
    alike = [(int(rng.binomial(20, 0.8)), 20) for _ in range(1000)]  # tasks that differ by luck alone, often by less
    for number in range(200):
        counts = [(int(rng.binomial(20, p)), 20) for p in rng.beta(3, 1, size=10)] if number % 2 else alike[5 * number : 5 * number + 10]
        clustered, plain = stats.clustered(counts), stats.rate(sum(k for k, _ in counts), sum(n for _, n in counts)).wilson
        assert clustered is not None
        assert plain is not None
        assert clustered.low <= plain.low + 1e-12
        assert clustered.high >= plain.high - 1e-12


def test_the_clustered_interval_covers_the_mean_of_a_population_of_tasks() -> None:
    rng = np.random.default_rng(2)
    truth, clustered, plain, rounds = 3 / 4, 0, 0, 1500
    for _ in range(rounds):
        counts = [(int(k), 50) for k in rng.binomial(50, rng.beta(3, 1, size=10))]
        low, high = stats.clustered(counts) or Interval(0, 0)
        clustered += low <= truth <= high
        low, high = stats.rate(sum(k for k, _ in counts), 500).wilson or Interval(0, 0)
        plain += low <= truth <= high
    # 1500 rounds at 95 % give ±1.1 %, three deviations 1.7 %; ten skewed clusters cost another two points
    assert clustered / rounds > 0.92
    assert plain / rounds < 0.6  # what pooling tasks as if they were episodes would have claimed


def test_one_task_has_no_spread_between_tasks() -> None:
    assert stats.clustered([(5, 10)]) is None
    assert stats.clustered([(5, 10), (0, 0)]) is None
    assert stats.clustered([]) is None


def test_macro_and_micro_part_when_tasks_have_other_lengths() -> None:
    assert stats.macro([(10, 10), (0, 30)]) == 0.5
    assert stats.macro([(10, 10), (0, 0)]) is None


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_swapping_the_runs_turns_the_difference_round(only_a: int, only_b: int, agree: int) -> None:
    n = only_a + only_b + agree
    low, high = stats.difference_interval(only_a, only_b, n)
    other = stats.difference_interval(only_b, only_a, n)
    assert (-other.high, -other.low) == pytest.approx((low, high), abs=1e-4)  # the root finder's tolerance is 1e-5
    if n:
        assert low <= (only_b - only_a) / n <= high


@pytest.mark.parametrize("n", [5, 12, 20])
def test_the_difference_interval_covers_at_least_95_percent_whatever_the_truth(n: int) -> None:
    cells = [(a, b) for a, b in itertools.product(range(n + 1), repeat=2) if a + b <= n]
    half = {(a, b): stats.difference_interval(a, b, n) for a, b in cells if a <= b}  # the other half mirrors it: the test above
    intervals = np.array([half[a, b] if a <= b else (-half[b, a].high, -half[b, a].low) for a, b in cells])
    counts = np.array([(a, b, n - a - b) for a, b in cells])
    for only_a, only_b in itertools.product((0.0, 0.02, 0.1, 0.3, 0.5), repeat=2):
        chance = multinomial.pmf(counts, n, [only_a, only_b, 1 - only_a - only_b])
        difference = only_b - only_a
        covered = (intervals[:, 0] <= difference + 1e-4) & (difference <= intervals[:, 1] + 1e-4)  # root finder: 1e-5
        assert chance[covered].sum() >= 0.95
        for missed in (intervals[:, 0] > difference + 1e-4, intervals[:, 1] < difference - 1e-4):
            assert chance[missed].sum() <= 0.025 + 1e-9


@pytest.mark.parametrize(("only_a", "only_b", "n"), [(0, 6, 8), (0, 18, 20), (0, 1, 5), (1, 3, 5), (3, 1, 20)])
def test_no_difference_outside_the_interval_explains_the_pairs(only_a: int, only_b: int, n: int) -> None:
    """All ways in which n pairs can turn out, at every discordance rate, the least one included, where only one policy ever wins alone."""
    cells = [(a, b) for a, b in itertools.product(range(n + 1), repeat=2) if a + b <= n]
    counts = np.array([(a, b, n - a - b) for a, b in cells])
    low, high = stats.difference_interval(only_a, only_b, n)
    for delta, sign in ((low - 0.001, 1), (high + 0.001, -1)):  # 0.001: a rate between two of the grid may be worse by that
        score = np.array([tango(a, b, n, delta) for a, b in cells])
        extreme = sign * score >= sign * tango(only_a, only_b, n, delta) - 1e-9
        least = max(0.0, -delta)
        for share in np.linspace(0, 1, 301) ** 2:
            loses = least + share * ((1 - delta) / 2 - least)
            truth = [loses, loses + delta, max(0.0, 1 - 2 * loses - delta)]
            assert multinomial.pmf(counts, n, truth)[extreme].sum() <= 0.025


def tango(only_a: int, only_b: int, n: int, delta: float) -> float:
    """B's rate less A's, less delta, by its deviation if delta were true (Tango 1998, equations 4 and 5)."""
    loses = max(np.roots([2 * n, (2 * n + only_a - only_b) * delta - only_a - only_b, -only_a * delta * (1 - delta)]).real)
    variance = n * (2 * loses + delta * (1 - delta))
    gap = only_b - only_a - n * delta
    return gap / math.sqrt(variance) if variance > 1e-9 else math.copysign(math.inf, gap)


def test_the_score_at_no_difference_is_mcnemars() -> None:
    assert float(stats._score(3, 11, 40, 0.0)) ** 2 == pytest.approx(chi2.isf(chi2.sf((11 - 3) ** 2 / 14, 1), 1))


@pytest.mark.parametrize("n", [400, stats.EXACT_PAIRS + 1])
def test_many_pairs_agree_with_the_textbook_interval(n: int) -> None:
    a, b = n // 10, n // 8
    difference, width = (b - a) / n, norm.isf(0.025) * math.sqrt((a + b) / n - ((b - a) / n) ** 2) / math.sqrt(n)
    low, high = stats.difference_interval(a, b, n)
    assert (low, high) == pytest.approx((difference - width, difference + width), abs=0.15 * width)  # Wald's is off by 1/n


def test_mcnemar_counts_discordant_pairs_only() -> None:
    pairs = [(True, True)] * 30 + [(True, False)] * 9 + [(False, True)] * 2 + [(False, False)] * 5
    result = stats.paired(pairs)
    assert (result.n, result.both, result.only_a, result.only_b, result.neither) == (46, 30, 9, 2, 5)
    assert result.p == pytest.approx(2 * binom.cdf(2, 11, 0.5))
    assert stats.paired([(True, True)] * 9).p == 1.0


def test_equal_policies_are_called_different_one_time_in_twenty_at_most() -> None:
    rng = np.random.default_rng(3)
    rounds, rejected = 2000, 0
    for _ in range(rounds):
        hardness = rng.beta(4, 1, size=50)[:, None]  # both arms meet the same starts
        a, b = (rng.random((50, 2)) < hardness).T
        only_a, only_b = int(np.sum(a & ~b)), int(np.sum(~a & b))
        rejected += only_a + only_b > 0 and binomtest(only_b, only_a + only_b).pvalue < 0.05
    assert 0 < rejected / rounds < 0.05  # exact, hence conservative: about 2 % here


@pytest.mark.parametrize("n", [20, 60])
@pytest.mark.parametrize("discordant", [0.1, 0.3, 0.8])
def test_a_policy_worse_by_the_margin_is_called_not_worse_one_time_in_forty_at_most(n: int, discordant: float) -> None:
    margin = 0.1
    chance = {total: p for total in range(n + 1) if (p := binom.pmf(total, n, discordant)) >= 1e-7}
    share = (discordant - margin) / (2 * discordant)
    error = sum(chance[total] * binom.sf(wins - 1, total, share) for total, wins in wins_needed(chance, n, margin).items())
    assert error <= 0.025 + 1e-5


def wins_needed(totals: Iterable[int], n: int, margin: float) -> dict[int, int]:
    """The fewest pairs that B alone must win for *not worse*, by how many disagree. The lower end grows with them."""
    found, wins = dict[int, int](), 0

    def passes(total: int, wins: int) -> bool:
        return stats._lower_end(total - wins, wins, n) > -margin

    for total in totals:  # ascending: who has lost once more needs no fewer
        while wins <= total and not passes(total, wins):
            wins += 1
        assert wins == 0 or not passes(total, wins - 1)
        found[total] = wins
    return found


def test_19_of_20_against_20_of_20_is_undecided() -> None:
    result = stats.paired([(True, True)] * 19 + [(True, False)])
    verdict = stats.verdict(result, 0.05)
    assert verdict.word == "undecided"
    assert verdict.more_pairs is not None
    assert verdict.more_pairs > 100


def test_the_pairs_asked_for_are_the_pairs_that_decide() -> None:
    rng = np.random.default_rng(4)
    start = stats.paired([(True, True)] * 18 + [(True, False), (False, True)])
    more = stats.verdict(start, 0.2).more_pairs
    assert more is not None
    decided, rounds = 0, 200
    for _ in range(rounds):
        a, b = rng.random((2, start.n + more)) < 0.95
        decided += stats.verdict(stats.paired(list(zip(a.tolist(), b.tolist(), strict=True))), 0.2).word == "not worse"
    assert decided / rounds > 0.8 - 3 * math.sqrt(0.8 * 0.2 / rounds)


def test_clear_cases_get_a_verdict() -> None:
    assert stats.verdict(stats.paired([(True, True)] * 300), 0.05).word == "not worse"
    assert stats.verdict(stats.paired([(True, False)] * 40 + [(True, True)] * 60), 0.05).word == "worse"


def test_an_error_in_an_arm_keeps_the_verdict_open() -> None:
    result = stats.paired([(True, True)] * 300)
    assert stats.verdict(result, 0.05, unknown=1) == stats.Verdict("undecided", 0.05, 1)


@pytest.mark.parametrize("margin", [0.0, -0.05, 1.0, 5.0])
def test_a_margin_outside_zero_and_one_is_refused(margin: float) -> None:
    with pytest.raises(BadRequest, match="margin"):
        stats.verdict(stats.paired([(True, True)]), margin)


def test_the_sample_size_has_the_power_that_it_promises() -> None:
    n = stats.pairs_needed(0.2, 0.2, power=0.8)
    assert stats.verdict_power(n, 0.2, 0.2) >= 0.8
    assert stats.verdict_power(n - 8, 0.2, 0.2) < 0.8
    chance = {total: p for total in range(n + 1) if (p := binom.pmf(total, n, 0.2)) > 1e-5}
    power = sum(chance[total] * binom.sf(wins - 1, total, 0.5) for total, wins in wins_needed(chance, n, 0.2).items())
    assert power == pytest.approx(stats.verdict_power(n, 0.2, 0.2), abs=0.05)  # the exact verdict asks a little more than the score


def test_a_truly_worse_policy_needs_no_number_of_pairs() -> None:
    with pytest.raises(BadRequest, match="no number of pairs"):
        stats.pairs_needed(0.05, 0.2, difference=-0.06)
    with pytest.raises(BadRequest, match="discordance"):
        stats.pairs_needed(0.05, 0.01, difference=0.1)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(v) for v in range(1, 101)]
    assert stats.percentiles(values[::-1]) == (100, 50.0, 90.0, 99.0)
    assert stats.percentiles([3.0]) == (1, 3.0, 3.0, 3.0)
    assert stats.percentiles([]) is None


def test_the_library_says_the_same() -> None:
    # another library's formulas beside the one we call
    found = stats.rate(19, 20)
    assert found.wilson == pytest.approx(tuple(binomtest(19, 20).proportion_ci(method="wilson")))
    assert found.exact == pytest.approx((beta.ppf(0.025, 19, 2), beta.ppf(0.975, 20, 1)))
