"""Stop a run early without fooling oneself: rules whose error rate holds however often they look. k successes of n episodes.

A rule reads the finished prefix of a shuffled ledger and nothing else: not which worker was fast, not what was finished out of order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaln, xlog1py, xlogy

from ..types import BadRequest, EpisodeRecord, RunManifest
from .difference import differences
from .folder import RunFolder, open_result
from .stats import ALPHA, Interval

Episode = tuple[str, int]  # (task, trial)


class Stopped(NamedTuple):
    """A rule fired: the first `n` episodes of the ledger count, those after them are stored and do not."""

    n: int
    why: str


@dataclass(frozen=True, slots=True)
class Rule:
    """When to stop a run whose ledger is shuffled."""

    text: str  # "lower>0.9", "upper<0.5", "versus RUN"
    kind: Literal["lower", "upper", "versus"]
    threshold: float = 0.5
    against: str = ""  # the other run's id
    reference: Mapping[Episode, bool] | None = None  # its outcomes; an error is in none
    other: RunManifest | None = field(default=None, compare=False)  # the other run's, while this one is being started

    def of(self, records: Iterable[EpisodeRecord], ledger: Sequence[Episode]) -> str | None:
        """Why to stop now, or None."""
        fired = self.fires(finished_prefix(records, ledger))
        return fired and fired.why

    def fires(self, prefix: Sequence[EpisodeRecord]) -> Stopped | None:
        """The first length of the prefix at which the rule is met: the same whenever and however often it is asked."""
        if not prefix:
            return None
        won = np.array([record.outcome == "success" for record in prefix])
        n = np.arange(1, len(prefix) + 1)
        if self.reference is None:
            k = np.cumsum(won)
            above = k > self.threshold * n
            met = (evidence(k, n, self.threshold) >= 1 / ALPHA) & (above if self.kind == "lower" else ~above)
        else:
            other = np.array([self.reference[record.task, record.trial] for record in prefix])
            only_here, only_there = np.cumsum(won & ~other), np.cumsum(~won & other)
            met = evidence(only_here, only_here + only_there, 0.5) >= 1 / ALPHA
        if not met.any():
            return None
        first = int(np.argmax(met))
        if self.reference is not None:
            better = "better" if only_here[first] > only_there[first] else "worse"
            told = f"{better} than {self.against}: {only_here[first]} episodes succeeded only here, {only_there[first]} only there"
        else:
            interval = anytime_interval(int(k[first]), first + 1)
            told = f"{k[first]}/{first + 1} succeeded, anytime interval {interval.low:.3f} … {interval.high:.3f}"
        return Stopped(first + 1, f"{self.text}: {told}")

    def admit(self, manifest: RunManifest) -> None:
        """Refuse a run that the rule cannot judge, before its first step. Raises BadRequest."""
        if self.other is None or self.reference is None:
            return
        if separating := [d for d in differences(self.other, manifest) if d.separates]:
            told = "; ".join(f"{d.key}: {d.a} there, {d.b} here" for d in separating[:3])
            raise BadRequest(f"{self.text}: its episodes are not this run's ({told}); compare with a run under the same protocol")
        if missing := [episode for episode in manifest.ledger if episode not in self.reference]:
            task, trial = missing[0]
            raise BadRequest(
                f"{self.text}: {len(missing)} of {len(manifest.ledger)} episodes were not finished there, {task} trial {trial} first"
            )

    def to_json(self) -> dict[str, Any]:
        """What a manifest keeps, the other run's outcomes included: the folder alone says when the rule was met."""
        reference = self.reference and [[task, trial, won] for (task, trial), won in self.reference.items()]
        return {"rule": self.text, "kind": self.kind, "threshold": self.threshold, "against": self.against, "reference": reference}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rule:
        """The rule of a manifest. Raises BadRequest for what is none."""
        try:
            reference = data["reference"] and {(str(task), int(trial)): bool(won) for task, trial, won in data["reference"]}
            return Rule(str(data["rule"]), data["kind"], float(data["threshold"]), str(data["against"]), reference)
        except (KeyError, TypeError, ValueError) as error:
            raise BadRequest(f"the manifest's stop rule cannot be read ({type(error).__name__}: {error})") from error


def parse_rule(text: str) -> Rule:
    """The rule of `--stop-when`. Raises BadRequest, with the three forms, for anything else."""
    text = " ".join(text.split())
    if match := re.fullmatch(r"(lower ?>|upper ?<) ?(0?\.\d+)", text):
        kind: Literal["lower", "upper"] = "lower" if match[1].startswith("lower") else "upper"
        return Rule(text.replace(" ", ""), kind, float(match[2]))
    if text.startswith("versus "):
        folder = open_result(text.removeprefix("versus "))
        reference = {(r.task, r.trial): r.outcome == "success" for r in folder.records() if r.outcome != "error"}
        return Rule(
            f"versus {folder.manifest.run_id}", "versus", against=folder.manifest.run_id, reference=reference, other=folder.manifest
        )
    raise BadRequest(f"stop rule {text!r} is none of 'lower>0.9', 'upper<0.5', 'versus RUN' (thresholds between 0 and 1)")


def finished_prefix(records: Iterable[EpisodeRecord], ledger: Sequence[Episode]) -> list[EpisodeRecord]:
    """The records of the ledger's first episodes, up to the first that is not played or ended in an error.

    Stepping over an error would count episodes by how hard they are on the simulator.
    """
    done = {(record.task, record.trial): record for record in records if record.outcome != "error"}
    prefix: list[EpisodeRecord] = []
    for task, trial in ledger:
        if (task, trial) not in done:
            break
        prefix.append(done[task, trial])
    return prefix


def stopped(folder: RunFolder) -> Stopped | None:
    """Where the run's own rule stopped it, worked out again from its records; None if it has none or it was never met."""
    if not folder.manifest.stop:
        return None
    return Rule.from_json(folder.manifest.stop).fires(finished_prefix(folder.records(), folder.manifest.ledger))


def evidence(k: ArrayLike, n: ArrayLike, p: float) -> NDArray[np.float64]:
    """The e-value against a success rate of p: how many times better the outcomes are explained by the rates around k/n.

    The likelihood ratio mixed over Beta(1/2, 1/2) (Robbins, Annals of Mathematical Statistics 41, 1970). If the rate is p it is a
    martingale that starts at 1, so by Ville's inequality it ever reaches 1/alpha with probability at most alpha: looking is free.
    """
    return np.exp(np.minimum(_log_evidence(k, n, p), 700.0))


def anytime_interval(k: int, n: int) -> Interval:
    """The 95 % interval that holds at all n at once: every rate against which the evidence is below 20."""
    from scipy.optimize import brentq

    if n == 0:
        return Interval(0.0, 1.0)

    def excess(p: float) -> float:
        return float(_log_evidence(k, n, p)) - math.log(1 / ALPHA)

    tiny, middle = 1e-12, k / n
    low = float(brentq(excess, tiny, middle)) if k and excess(tiny) > 0 else 0.0
    high = float(brentq(excess, middle, 1 - tiny)) if k < n and excess(1 - tiny) > 0 else 1.0
    return Interval(low, high)


def _log_evidence(k: ArrayLike, n: ArrayLike, p: float) -> NDArray[np.float64]:
    k, n = np.asarray(k, np.float64), np.asarray(n, np.float64)
    return np.asarray(betaln(k + 0.5, n - k + 0.5) - betaln(0.5, 0.5) - xlogy(k, p) - xlog1py(n - k, -p), np.float64)
