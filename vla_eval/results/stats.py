"""What a number of successes says: rates with intervals, paired comparison, sample size, percentiles. k successes of n episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, betaincinv, ndtri, stdtrit  # the rest of scipy, and statsmodels, take a second to import

from ..types import BadRequest

ALPHA = 0.05  # every interval here is a 95 % one, two-sided; a one-sided claim read off it errs at most 2.5 % of the time
EXACT_PAIRS = 2000  # up to here the paired interval is the exact one, which takes about a second
NUISANCE_GRID = 100  # discordance rates tried for the worst case of the exact paired test

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """Both ends belong to it."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rate:
    """k of n. Errors are in neither: n counts episodes that succeeded or failed. Without any, nothing is known: all None."""

    k: int
    n: int
    value: float | None
    wilson: Interval | None
    exact: Interval | None  # Clopper and Pearson: never covers less than 95 %, usually more


def rate(k: int, n: int) -> Rate:
    """The rate k/n with its Wilson and exact intervals. Raises BadRequest for counts that no run can have."""
    if not 0 <= k <= n:
        raise BadRequest(f"{k} successes of {n} episodes cannot be; a rate is counted, 0 <= k <= n")
    if n == 0:
        return Rate(0, 0, None, None, None)
    low = float(betaincinv(k, n - k + 1, ALPHA / 2)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - ALPHA / 2)) if k < n else 1.0
    return Rate(k, n, k / n, _wilson(k, n), Interval(low, high))


def _wilson(k: float, n: float) -> Interval:
    """The rates p whose distance to k/n is no more than `z` deviations of p's own; k and n need not be whole."""
    p, z = k / n, -float(ndtri(ALPHA / 2))
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((middle + side) / (1 + z**2 / n) for side in (-half, half))
    return Interval(0.0 if k == 0 else low, 1.0 if k == n else high)  # exactly, where rounding would miss it


def counted(value: float, n: int, *, digits: int) -> Rate:
    """The rate behind a published number: the k with k/n = value as printed. Raises BadRequest if n episodes cannot give it.

    `digits` decimals of the fraction were printed: 0.956 has 3, 95.6 % has 3 too.
    """
    k = round(value * n)
    if not 0 <= k <= n or abs(k / n - value) > 0.5 * 10.0**-digits + 1e-12:
        raise BadRequest(f"a rate of {value:.{digits}f} cannot come from {n} episodes: {k}/{n} is {k / n:.{digits + 2}f}; give k and n")
    return rate(k, n)


def macro(counts: Sequence[tuple[int, int]]) -> float | None:
    """The mean of the tasks' own rates, each task counting the same. None if a task has no counted episode yet."""
    if not counts or any(n == 0 for _, n in counts):
        return None
    return math.fsum(k / n for k, n in counts) / len(counts)


def clustered(counts: Sequence[tuple[int, int]]) -> Interval | None:
    """The suite rate's interval when episodes of one task resemble each other: `counts` are (k, n) by task. None for fewer than two tasks.

    Wilson's interval at the effective sample size of Korn and Graubard (Survey Methodology 24, 1998): episodes divided by the design
    effect between tasks, less what the few tasks cost in degrees of freedom. It answers for tasks like these, the plain interval for
    these tasks; it is never the narrower one.
    """
    table = np.array([count for count in counts if count[1] > 0], np.float64).reshape(-1, 2)
    k, n = table.T
    tasks, total = len(n), float(np.sum(n))
    if tasks < 2:
        return None
    p = float(np.sum(k)) / total
    effective = total
    if 0 < p < 1:
        variance = tasks / (tasks - 1) * float(np.sum((k - p * n) ** 2)) / total**2
        cost = float(stdtrit(total - 1, ALPHA / 2) / stdtrit(tasks - 1, ALPHA / 2)) ** 2
        effective = min(total, cost * p * (1 - p) / variance) if variance > 0 else total
    return _wilson(p * effective, effective)


@dataclass(frozen=True, slots=True)
class Paired:
    """Two policies on the same episodes. `difference` is B's rate less A's, with its 95 % interval; `p` is the exact McNemar test's."""

    n: int
    both: int
    only_a: int
    only_b: int
    neither: int
    difference: float | None
    interval: Interval
    p: float


def paired(pairs: Sequence[tuple[bool, bool]]) -> Paired:
    """Compare (A succeeded, B succeeded), one pair an episode."""
    from scipy.stats import binomtest

    n = len(pairs)
    both, only_a, only_b = (pairs.count(kind) for kind in ((True, True), (True, False), (False, True)))
    p = float(binomtest(only_b, only_a + only_b).pvalue) if only_a + only_b else 1.0
    difference = (only_b - only_a) / n if n else None
    return Paired(n, both, only_a, only_b, n - both - only_a - only_b, difference, difference_interval(only_a, only_b, n), p)


def difference_interval(only_a: int, only_b: int, n: int) -> Interval:
    """The 95 % interval of B's rate less A's, from n pairs of which `only_a` and `only_b` disagree.

    Exact (it covers at least 95 % whatever the truth): the differences that an unconditional test, ordered by Tango's score and worst
    case over the discordance rate, does not reject (Hsueh, Liu and Chen, Biometrics 57, 2001; Sidik, JASA 98, 2003). Beyond
    EXACT_PAIRS pairs it is Tango's own interval (Statistics in Medicine 17, 1998), whose error is then within 0.1 % of its 2.5 % a side.
    """
    if n == 0:
        return Interval(-1.0, 1.0)
    # The upper end is the same question asked of the swapped pair
    return Interval(_lower_end(only_a, only_b, n), -_lower_end(only_b, only_a, n))


@lru_cache(maxsize=4096)
def _lower_end(only_a: int, only_b: int, n: int) -> float:
    from scipy.optimize import brentq

    def excess(delta: float) -> float:  # of the evidence that the difference is above delta, over what the level asks; falls with delta
        if n <= EXACT_PAIRS:
            return ALPHA / 2 - _exact_p(only_a, only_b, n, delta)
        return float(_score(only_a, only_b, n, delta)) + float(ndtri(ALPHA / 2))

    low, high = -1 + 1e-9, (only_b - only_a) / n
    return float(brentq(excess, low, high, xtol=1e-5)) if excess(low) > 0 else -1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether B is worse than A by more than a margin. `more_pairs` is a plan for the undecided: about that many, with 80 % power."""

    word: Literal["not worse", "worse", "undecided"]
    margin: float
    more_pairs: int | None


def verdict(result: Paired, margin: float, *, unknown: int = 0) -> Verdict:
    """*not worse* if the whole interval lies above −margin, *worse* if it lies below, else *undecided*.

    `unknown` pairs, those with an error in an arm, are in no count and keep the verdict open: undecided until they are played. How
    many more pairs are needed assumes equal policies that disagree as often as these did.
    """
    if not 0 < margin < 1:
        raise BadRequest(f"margin {margin}: a rate can be worse by more than 0 and less than 1; 0.05 means five points")
    low, high = result.interval
    decided: Literal["not worse", "worse"] | None = "not worse" if low > -margin else "worse" if high < -margin else None
    if decided:
        return Verdict(decided, margin, None) if unknown == 0 else Verdict("undecided", margin, unknown)
    discordant = (result.only_a + result.only_b + 1) / (result.n + 2)  # none seen is not none there
    return Verdict("undecided", margin, max(unknown, 1, pairs_needed(margin, discordant) - result.n))


def pairs_needed(margin: float, discordant: float, power: float = 0.8, difference: float = 0.0) -> int:
    """Pairs for a verdict *not worse* with that power, when B's true rate is A's plus `difference` and a share `discordant` disagrees.

    Starts from the normal approximation and goes on until `verdict_power` says so. Raises BadRequest for what cannot be.
    """
    from statsmodels.stats.power import normal_sample_size_one_tail

    if not 0 < margin < 1 or not 0 < power < 1:
        raise BadRequest(f"margin {margin} and power {power} must lie between 0 and 1")
    if difference <= -margin:
        raise BadRequest(
            f"a policy that truly differs by {difference:+.3f} is worse by the margin {margin}: no number of pairs shows otherwise"
        )
    if not abs(difference) <= discordant <= 1:
        raise BadRequest(f"a discordance of {discordant:.3f} cannot be: it is at least the difference {abs(difference):.3f} and at most 1")
    deviation, deviation_null = math.sqrt(discordant - difference**2), math.sqrt(max(discordant, margin) - margin**2)
    pairs = normal_sample_size_one_tail(difference + margin, power, ALPHA / 2, std_null=deviation_null, std_alternative=deviation)
    n = max(1, math.ceil(float(pairs)))
    while verdict_power(n, margin, discordant, difference) < power:
        n += max(1, n // 200)
    return n


def verdict_power(n: int, margin: float, discordant: float, difference: float = 0.0) -> float:
    """How often n pairs come out *not worse*, by enumeration (of Tango's score, which the exact interval follows closely)."""
    from scipy.stats import binom

    total, first = _region(n, -margin, -float(ndtri(ALPHA / 2)))
    share = (discordant + difference) / (2 * discordant) if discordant else 0.5
    return float(np.sum(binom.pmf(total, n, discordant) * binom.sf(first - 1, total, share)))


def independent_discordance(rate_a: float, rate_b: float) -> float:
    """The share of pairs that disagree when two policies succeed independently: more than any two that share hard starts."""
    return rate_a * (1 - rate_b) + rate_b * (1 - rate_a)


class Percentiles(NamedTuple):
    """Of n measured values: each is one of them, the smallest that at least that share does not exceed."""

    n: int
    p50: float
    p90: float
    p99: float


def percentiles(values: Sequence[float] | Floats) -> Percentiles | None:
    """None of nothing."""
    if len(values) == 0:
        return None
    p50, p90, p99 = np.percentile(np.asarray(values, np.float64), [50, 90, 99], method="inverted_cdf")
    return Percentiles(len(values), float(p50), float(p90), float(p99))


def _score(only_a: int | Floats, only_b: int | Floats, n: int, delta: float) -> Floats:
    """Tango's score statistic for H0: the difference is delta. At delta = 0 it is McNemar's."""
    a, b = np.asarray(only_a, np.float64), np.asarray(only_b, np.float64)
    linear = (2 * n + a - b) * delta - a - b
    q = (np.sqrt(np.maximum(linear**2 + 8 * n * a * delta * (1 - delta), 0)) - linear) / (4 * n)  # P(only A), most likely under H0
    variance = np.maximum(n * (2 * q + delta * (1 - delta)), 0)
    gap = b - a - n * delta
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(variance > 1e-12, gap / np.sqrt(variance), np.where(np.abs(gap) < 1e-9, 0.0, np.copysign(np.inf, gap)))


def _region(n: int, delta: float, score: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each number of discordant pairs 0…n, the least only_b whose score against delta reaches `score` (total + 1: none does)."""
    total = np.arange(n + 1)
    low, high = np.zeros(n + 1, np.int64), total + 1  # the score grows with only_b, so halve
    while np.any(low < high):
        middle = (low + high) // 2
        reached = _score((total - middle).astype(float), middle.astype(float), n, delta) >= score - 1e-9
        open_ = low < high
        high, low = np.where(open_ & reached, middle, high), np.where(open_ & ~reached, middle + 1, low)
    return total, low


def _exact_p(only_a: int, only_b: int, n: int, delta: float) -> float:
    """P(a score at least as high | the difference is delta), at the worst discordance rate."""
    _, first = _region(n, delta, float(_score(only_a, only_b, n, delta)))
    rates, discordant, total, chance, starts = _discordance(n)
    allowed = int(np.searchsorted(rates, abs(delta)))  # no fewer can disagree
    begins = int(starts[allowed]) if allowed < len(rates) else len(total)
    discordant, total, chance = discordant[begins:], total[begins:], chance[begins:]
    least = first[total]
    some = (least > 0) & (least <= total)
    tail = (least == 0).astype(np.float64)
    share = (discordant[some] + delta) / (2 * discordant[some])  # of the discordant, those that only B solved
    tail[some] = bdtrc(least[some] - 1, total[some], share)
    sums = np.add.reduceat(chance * tail, starts[allowed:] - begins) if len(total) else np.zeros(0)
    # The least rate that a difference of delta allows lies between two of the grid: then all who disagree do it to one side
    least_rate = np.diff(bdtr(np.arange(n + 1), n, abs(delta)), prepend=0.0)
    one_sided = np.sum(least_rate[first <= (np.arange(n + 1) if delta > 0 else 0)])
    return float(np.max(sums, initial=float(one_sided)))


@lru_cache(maxsize=8)
def _discordance(n: int) -> tuple[Floats, Floats, NDArray[np.int64], Floats, NDArray[np.int64]]:
    """Every discordance rate of the grid, and with it each number of discordant pairs that it makes likely, end to end.

    Gives the grid; rate, number of pairs and its probability; and where each rate's stretch begins. What is left out weighs less than 1e-9.
    """
    from scipy.stats import binom

    grid = np.linspace(0.0, 1.0, NUISANCE_GRID + 1)[1:] ** 2  # closest where good policies are
    chance = binom.pmf(np.arange(n + 1), n, grid[:, None])
    row, total = np.nonzero(chance > 1e-9 / (n + 1))
    return grid, grid[row], total, chance[row, total], np.searchsorted(row, np.arange(NUISANCE_GRID))
