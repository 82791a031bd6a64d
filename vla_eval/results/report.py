"""One run, read from its folder: rates by task and suite, what is missing, latency; as JSON and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..types import BadRequest, EpisodeRecord, RunManifest
from .folder import RunFolder
from .sequential import anytime_interval, finished_prefix, stopped
from .stats import Interval, Percentiles, Rate, clustered, macro, percentiles, rate

CONTROL_HZ = 20.0  # of LIBERO, where a protocol does not say its own


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task's episodes. An error is neither success nor failure: it stands beside the rate and in no count of it."""

    task: str
    rate: Rate
    error: int
    missing: int  # of the ledger, not played yet


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of the policy's answers, by stage; "total" is the whole answer."""

    stages: Mapping[str, Percentiles]
    in_time: float  # the share of answers that took no longer than the steps executed from them last at the control rate
    control_hz: float
    episodes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a run folder says. `rate` counts every episode the same (micro), `macro` every task the same."""

    run: str
    suite: str
    policy: str
    bundle: str | None
    backend: str
    privileged: bool
    replan: int
    seed: int
    trials: int
    protocol: Mapping[str, Any]
    complete: bool
    planned: int
    success: int
    failure: int
    error: int
    rate: Rate
    clustered: Interval | None  # of `rate`, when episodes of one task resemble each other
    anytime: Interval | None  # of `rate`, in place of all others, if a stop rule looked at the outcomes while they came
    rule: str | None  # that rule
    not_counted: int  # episodes beyond where the rule stopped the run: stored, in no number here
    macro: float | None
    tasks: Sequence[TaskResult]
    latency: Latency | None
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """For `--json`: plain data, every rate with k, n and both intervals."""
        return {
            "run": self.run,
            "suite": self.suite,
            "policy": self.policy,
            "bundle": self.bundle,
            "backend": self.backend,
            "privileged": self.privileged,
            "replan": self.replan,
            "seed": self.seed,
            "trials": self.trials,
            "protocol": dict(self.protocol),
            "complete": self.complete,
            "planned": self.planned,
            "episodes": self.success + self.failure + self.error,
            "success": self.success,
            "failure": self.failure,
            "error": self.error,
            "rate": rate_json(self.rate)
            | {name: found and list(found) for name, found in (("clustered", self.clustered), ("anytime", self.anytime))},
            "rule": self.rule,
            "not_counted": self.not_counted,
            "macro": {"value": self.macro, "tasks": len(self.tasks)},
            "tasks": [
                {"task": line.task, "rate": rate_json(line.rate), "error": line.error, "missing": line.missing} for line in self.tasks
            ],
            "latency": _latency_json(self.latency),
            "notes": list(self.notes),
        }

    def markdown(self) -> str:
        """For a person, a pull request or a wiki."""
        head = [
            f"# {cell(self.suite)}, {cell(self.policy)}" + ("" if self.complete else " (INCOMPLETE)"),
            "",
            f"Run `{self.run}`, bundle {self.bundle or 'none'}, backend {cell(self.backend)}, replan {self.replan}, seed {self.seed}.",
            "",
            *(f"* {cell(note)}" for note in self.notes),
            *([""] if self.notes else []),
        ]
        rows = [(line.task, line.rate, line.error, line.missing) for line in self.tasks]
        total = ("all episodes (micro)", self.rate, self.error, self.planned - self.success - self.failure - self.error)
        lines = [
            "| task | k/n | success | 95 % Wilson | 95 % exact | errors | not played |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(
                f"| {cell(name)} | {r.k}/{r.n} | {percent(r.value)} | {between(r.wilson)} | {between(r.exact)} | {error} | {missing} |"
                for name, r, error, missing in [*rows, total]
            ),
            "",
            f"Suite rate {percent(self.rate.value)} of n = {self.rate.n}, "
            + (f"anytime {between(self.anytime)}; " if self.anytime else f"clustered by task {between(self.clustered)}; ")
            + f"mean of {len(self.tasks)} task rates (macro) {percent(self.macro)}.",
        ]
        return "\n".join(head + lines + _latency_lines(self.latency)) + "\n"


def report(folder: RunFolder) -> Report:
    """Read a run folder. A run without a single record is reported as what it is: nothing played.

    Where a stop rule ended the run, only the episodes up to there count, whatever was finished out of order.
    """
    manifest, records = folder.manifest, folder.records()
    end = stopped(folder)
    ledger = manifest.ledger[: end.n] if end else manifest.ledger
    planned = set(ledger)
    stored, records = len(records), [record for record in records if (record.task, record.trial) in planned]
    tasks = task_results(records, ledger)
    outcomes = Counter(record.outcome for record in records)
    played = rate(outcomes["success"], outcomes["success"] + outcomes["failure"])
    counts = [(line.rate.k, line.rate.n) for line in tasks]
    anytime = None
    if manifest.stop:  # fixed-n intervals mean nothing once the outcomes have had a say in n
        prefix = finished_prefix(records, ledger)
        anytime = anytime_interval(sum(record.outcome == "success" for record in prefix), len(prefix))
        played = _without_intervals(played)
        tasks = [replace(line, rate=_without_intervals(line.rate)) for line in tasks]
    latency, unread = run_latency(folder, records)
    missing = sum(line.missing for line in tasks)
    notes = []
    if missing or outcomes["error"]:
        notes.append(
            f"Incomplete: of {len(ledger)} episodes {missing} not played and {outcomes['error']} ended in an error; "
            f"vla-eval run --resume {folder.path} plays them."
        )
    if end:
        notes.append(
            f"Stopped by its rule after {end.n} of {len(manifest.ledger)} episodes ({end.why}); "
            f"{stored - len(records)} later ones are stored and not counted. Not ranked against runs of a fixed length."
        )
    elif manifest.stop:
        notes.append(f"Played under the stop rule {manifest.stop['rule']}, which was not met. Not ranked against runs of a fixed length.")
    if manifest.privileged:
        notes.append("The policy used privileged simulator state: not comparable with policies that did without.")
    if unread:
        notes.append(f"Latency leaves out {unread} episodes whose recorded arrays are missing or damaged.")
    return Report(
        run=manifest.run_id,
        suite=manifest.suite,
        policy=manifest.policy,
        bundle=manifest.bundle,
        backend=manifest.backend,
        privileged=manifest.privileged,
        replan=manifest.replan,
        seed=manifest.seed,
        trials=manifest.trials,
        protocol=manifest.protocol,
        complete=not missing and not outcomes["error"],
        planned=len(ledger),
        success=outcomes["success"],
        failure=outcomes["failure"],
        error=outcomes["error"],
        rate=played,
        clustered=None if manifest.stop else clustered(counts),
        anytime=anytime,
        rule=str(manifest.stop["rule"]) if manifest.stop else None,
        not_counted=stored - len(records),
        macro=macro(counts),
        tasks=tasks,
        latency=latency,
        notes=notes,
    )


def _without_intervals(found: Rate) -> Rate:
    return replace(found, wilson=None, exact=None)


def task_results(records: Iterable[EpisodeRecord], ledger: Sequence[tuple[str, int]]) -> list[TaskResult]:
    """Counts by task, in the suite's order."""
    planned, outcomes = Counter(task for task, _ in ledger), Counter((record.task, record.outcome) for record in records)
    results = []
    for task in sorted(planned, key=task_order):
        success, failure, error = (outcomes[task, outcome] for outcome in ("success", "failure", "error"))
        results.append(TaskResult(task, rate(success, success + failure), error, planned[task] - success - failure - error))
    return results


def task_order(task: str) -> tuple[str, int, str]:
    """Sorts task ids by suite, then by number, whatever a plug-in calls its last part."""
    suite, _, index = task.rpartition("/")
    return suite, int(index) if index.isdecimal() else -1, index


def run_latency(folder: RunFolder, records: Iterable[EpisodeRecord]) -> tuple[Latency | None, int]:
    """Latency over every counted episode's requests, and how many episodes could not be read. None if no request was recorded."""
    seconds: dict[str, list[float]] = {}
    in_time, episodes, unread = [], 0, 0
    for record in records:
        if record.outcome == "error":
            continue
        try:
            episode = folder.episode(record.task, record.trial)
        except BadRequest:
            unread += 1
            continue
        episodes += 1
        columns = dict(zip(map(str, episode.request_stages), episode.request_seconds.T, strict=True))
        for stage, column in columns.items():
            seconds.setdefault(stage, []).extend(map(float, column[np.isfinite(column)]))
        if "total" in columns:
            executed = np.diff(np.append(episode.request_step, len(episode.actions)))
            in_time.extend(columns["total"] <= executed / control_hz(folder.manifest, record.task))
    stages = {stage: found for stage, column in seconds.items() if (found := percentiles(column))}
    rates = {control_hz(folder.manifest, task) for task, _ in folder.manifest.ledger}
    return (Latency(stages, float(np.mean(in_time)) if in_time else 0.0, max(rates), episodes) if stages else None), unread


def control_hz(manifest: RunManifest, task: str) -> float:
    """Steps a second of a task, as its environment said."""
    return float(manifest.protocol.get("tasks", {}).get(task, {}).get("control_hz") or CONTROL_HZ)


def rate_json(found: Rate) -> dict[str, Any]:
    """A rate as plain data."""
    return {
        "value": found.value,
        "k": found.k,
        "n": found.n,
        "wilson": found.wilson and list(found.wilson),
        "exact": found.exact and list(found.exact),
    }


def percent(value: float | None) -> str:
    """A share for a person, "–" if nothing is known."""
    return "–" if value is None else f"{100 * value:.1f} %"


def between(interval: Interval | None) -> str:
    """An interval of shares for a person."""
    return "–" if interval is None else f"{100 * interval.low:.1f} … {100 * interval.high:.1f} %"


def _latency_json(latency: Latency | None) -> dict[str, Any] | None:
    if latency is None:
        return None
    return {
        "seconds": {stage: found._asdict() for stage, found in latency.stages.items()},
        "in_time": latency.in_time,
        "control_hz": latency.control_hz,
        "episodes": latency.episodes,
    }


def _latency_lines(latency: Latency | None) -> list[str]:
    if latency is None:
        return []
    return [
        "",
        "| latency, ms | n | p50 | p90 | p99 |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {cell(stage)} | {found.n} | {1e3 * found.p50:.2f} | {1e3 * found.p90:.2f} | {1e3 * found.p99:.2f} |"
            for stage, found in latency.stages.items()
        ),
        "",
        f"{percent(latency.in_time)} of the answers came before the steps executed from them had passed at {latency.control_hz:g} Hz.",
    ]


def cell(text: str) -> str:
    """Text inside a Markdown table or heading, where a pipe, a line end or a tag would be more than text."""
    return " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
