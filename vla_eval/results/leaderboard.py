"""Many runs as tables: one for each set of conditions, ranked where rates can be told apart; runs, published and foreign results."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..types import BadRequest, RunManifest
from .difference import HARMLESS
from .folder import MANIFEST, TEXT_LIMIT_BYTES, RunFolder, open_result
from .report import Report, between, cell, percent, rate_json, report
from .stats import ALPHA, Percentiles, Rate, counted, rate

IMPORT_VERSION = 1
ABOUT = ("replan", "bundle", "precision", "backend", "hardware")  # a row's columns beside its name, in tables for a person
ENTRY_FIELDS = (
    *("policy", "suite", "k", "n", "rate", "source", "date"),
    *("bundle", "precision", "backend", "hardware", "replan", "conditions", "privileged"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy's rate on one suite under one set of conditions."""

    policy: str
    suite: str  # "libero_10@openpi"
    rate: Rate
    conditions: Mapping[str, Any]  # every number a score depends on; entries that differ here are in different tables
    error: int = 0
    replan: int | None = None
    bundle: str | None = None
    precision: str = "–"
    backend: str = "–"
    hardware: str = "–"
    date: str = "–"
    privileged: bool = False
    unranked: str | None = None  # why it has no rank
    origin: str = "run"  # a run's id, or whose result it is
    latency: Percentiles | None = None  # seconds of a whole answer
    seed: int | None = None
    outcomes: Mapping[tuple[str, int], bool] = field(default_factory=dict)  # for pairing; empty for imported results

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes a row: another number here is another row."""
        return self.policy, self.bundle, self.precision, self.backend, self.hardware, self.replan, self.privileged, bool(self.unranked)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy as it was run, with its entry and rank for each suite."""

    cells: Mapping[str, Entry]
    ranks: Mapping[str, int | None]

    @property
    def first(self) -> Entry:
        return next(iter(self.cells.values()))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that were played under the same conditions."""

    title: str
    suites: Sequence[str]
    conditions: Mapping[str, Mapping[str, Any]]  # by suite
    rows: Sequence[Row]
    notes: Sequence[str]


def leaderboard(places: Sequence[Path], sort: str | None = None) -> list[Table]:
    """The tables of every run under `places` (run folders, folders of runs, result files). `sort`: a suite, "policy", "date" or "latency".

    Raises BadRequest for a place that holds no result, for runs that have none yet, and for two runs with one id.
    """
    entries = [entry for place in places for entry in _entries(place)]
    if not any(entry.rate.n or entry.error for entry, _ in entries):
        raise BadRequest(f"{', '.join(map(str, places))}: no episode has been played yet, there is nothing to rank")
    seen: dict[str, Path] = {}
    for entry, path in entries:
        if path.is_dir() and seen.setdefault(entry.origin, path) != path:
            raise BadRequest(f"{seen[entry.origin]} and {path} are both run {entry.origin}; a copied run would count twice, leave one out")
    unique = {(entry.origin, entry.suite, entry.policy): entry for entry, _ in entries}
    tables = [_table(group) for group in _groups(list(unique.values()))]
    if sort is not None:
        tables = [_sorted(table, sort) for table in tables]
    return tables


def to_json(tables: Sequence[Table]) -> dict[str, Any]:
    """For `--json`."""
    return {
        "tables": [
            {
                "title": table.title,
                "suites": list(table.suites),
                "conditions": {suite: dict(found) for suite, found in table.conditions.items()},
                "notes": list(table.notes),
                "rows": [
                    {
                        **{
                            name: getattr(row.first, name)
                            for name in ("policy", "bundle", "precision", "backend", "hardware", "replan", "privileged")
                        },
                        "cells": {
                            suite: {
                                "rank": row.ranks[suite],
                                "rate": rate_json(entry.rate),
                                "error": entry.error,
                                "latency": entry.latency._asdict() if entry.latency else None,
                                "date": entry.date,
                                "origin": entry.origin,
                                "unranked": entry.unranked,
                            }
                            for suite, entry in row.cells.items()
                        },
                    }
                    for row in table.rows
                ],
            }
            for table in tables
        ]
    }


def markdown(tables: Sequence[Table]) -> str:
    """For a person."""
    lines: list[str] = []
    for table in tables:
        heads = ["policy", *table.suites, "p50 / p99 ms", *ABOUT, "date", "origin"]
        lines += [f"## {cell(table.title)}", "", *(f"* {cell(note)}" for note in table.notes), *([""] if table.notes else [])]
        lines += ["| " + " | ".join(map(cell, heads)) + " |", "|" + "---|" * len(heads)]
        for row in table.rows:
            texts = [row_name(row), *(cell_text(row, suite) for suite in table.suites), *map(", ".join, row_texts(row))]
            lines.append("| " + " | ".join(map(cell, texts)) + " |")
        lines.append("")
    return "\n".join(lines)


def row_name(row: Row) -> str:
    """Who it is."""
    return row.first.policy + (" (privileged)" if row.first.privileged else "")


def row_texts(row: Row) -> list[list[str]]:
    """What stands right of the rates, latency, ABOUT, date and origin: each what its suites have, once if it is the same for all."""
    one, cells = row.first, row.cells.values()
    latency = [f"{1e3 * e.latency.p50:.1f} / {1e3 * e.latency.p99:.1f}" if e.latency else "–" for e in cells]
    about = [[text] for text in (str(one.replan or "–"), (one.bundle or "–")[:12], one.precision, one.backend, one.hardware)]
    found = [latency, *about, [e.date[:10] for e in cells], [e.origin for e in cells]]
    return [list(dict.fromkeys(texts)) for texts in found]


def cell_lines(row: Row, suite: str) -> list[str]:
    """A suite's rank and rate, its count with the interval, and what keeps it from having a rank."""
    entry = row.cells.get(suite)
    if entry is None:
        return ["–"]
    rank = f"{row.ranks[suite]}. " if row.ranks[suite] is not None else ""
    errors = f", {entry.error} errors" if entry.error else ""
    interval = f"; {between(entry.rate.wilson)}" if entry.rate.wilson else ""
    why = [entry.unranked] if entry.unranked else []
    return [f"{rank}{percent(entry.rate.value)}", f"{entry.rate.k}/{entry.rate.n}{errors}{interval}", *why]


def cell_text(row: Row, suite: str) -> str:
    """The same in one line."""
    rate, *rest = cell_lines(row, suite)
    return f"{rate} ({'; '.join(rest)})" if rest else rate


def _entries(place: Path) -> list[tuple[Entry, Path]]:
    if place.is_file():
        return [(entry, place) for entry in _imported(place)]
    if not place.is_dir():
        raise BadRequest(f"{place}: no such folder or file; name run folders, folders that hold runs, or result files")
    runs = [place] if (place / MANIFEST).is_file() else sorted(path.parent for path in place.glob(f"*/{MANIFEST}"))
    if not runs:
        raise BadRequest(f"{place}: holds no run (a folder with {MANIFEST})")
    return [(of_run(open_result(run)), run.resolve()) for run in runs]


def of_run(folder: RunFolder) -> Entry:
    """A run's row, read from its folder."""
    found, manifest = report(folder), folder.manifest
    return Entry(
        policy=manifest.policy,
        suite=manifest.suite,
        rate=found.rate,
        conditions=_conditions(manifest),
        error=found.error,
        replan=manifest.replan,
        bundle=manifest.bundle,
        precision=_precision(manifest),
        backend=manifest.backend,
        hardware=manifest.hardware.get("gpu") or manifest.hardware.get("cpu", "–"),
        date=manifest.created,
        privileged=manifest.privileged,
        unranked=_unranked(found),
        origin=manifest.run_id,
        latency=found.latency.stages.get("total") if found.latency else None,
        seed=manifest.seed,
        outcomes={(r.task, r.trial): r.outcome == "success" for r in folder.records() if r.outcome != "error"},
    )


def _unranked(found: Report) -> str | None:
    if found.rule is not None:
        low_high = f" {between(found.anytime)}" if found.anytime else ""
        return f"stop rule {found.rule}, anytime interval{low_high}"
    if not found.complete:
        return "incomplete"
    return "used privileged state" if found.privileged else None


def _conditions(manifest: RunManifest) -> dict[str, Any]:
    """What must be equal for two rates to be in one table: each task's numbers, which tasks there are, and the simulator."""
    tasks = manifest.protocol.get("tasks", {})
    played = sorted({task for task, _ in manifest.ledger})
    numbers = {
        task: {key: value for key, value in tasks.get(task, {}).items() if key not in ("instruction", "control_hz")} for task in played
    }
    simulator = {name: value for name, value in manifest.versions.items() if name.lower() not in HARMLESS}
    return {"tasks": numbers, "simulator": simulator}


def _precision(manifest: RunManifest) -> str:
    """The types of the engines' weights and activations, as `--dtype` says them."""
    said = {str(about["dtype"]) for about in manifest.engines.values() if isinstance(about, Mapping) and "dtype" in about}
    return ", ".join(sorted(said)) or "–"


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that may stand in one table: one protocol and simulator, and no suite under two sets of conditions."""
    groups: list[tuple[str, dict[str, str], list[Entry]]] = []
    for entry in sorted(entries, key=lambda e: (e.suite, e.date)):
        protocol = entry.suite.partition("@")[2]
        kind = json.dumps([protocol, entry.conditions.get("simulator"), entry.conditions.get("stated_by")], sort_keys=True, default=str)
        numbers = json.dumps(entry.conditions, sort_keys=True, default=str)
        for known, suites, group in groups:
            if known == kind and suites.get(entry.suite, numbers) == numbers:
                suites[entry.suite] = numbers
                group.append(entry)
                break
        else:
            groups.append((kind, {entry.suite: numbers}, [entry]))
    return [group for _, _, group in groups]


def _table(entries: Sequence[Entry]) -> Table:
    suites = list(dict.fromkeys(entry.suite for entry in entries))
    rows: list[dict[str, Entry]] = []
    for entry in entries:
        for row in rows:
            if entry.suite not in row and next(iter(row.values())).identity == entry.identity:
                row[entry.suite] = entry
                break
        else:
            rows.append({entry.suite: entry})
    ranks: dict[str, dict[str, int]] = {suite: _ranks([e for e in entries if e.suite == suite and e.unranked is None]) for suite in suites}
    made = [Row(row, {suite: ranks[suite].get(entry.origin) for suite, entry in row.items()}) for row in rows]
    made.sort(
        key=lambda row: (min((r for r in row.ranks.values() if r is not None), default=len(entries) + 1), -(row.first.rate.value or 0))
    )
    ranked = [entry for entry in entries if entry.unranked is None]
    notes = []
    if ranked:
        notes.append("Rows that share a rank cannot be told apart at the 5 % level from the best of them.")
    if len({entry.replan for entry in ranked}) > 1:
        notes.append("Ranked rows differ in replan, how much of each chunk was executed: part of what a rate depends on.")
    conditions = {entry.suite: entry.conditions for entry in entries}
    return Table(_title(entries), suites, conditions, made, notes)


def _title(entries: Sequence[Entry]) -> str:
    first = entries[0]
    if by := first.conditions.get("stated_by"):
        return f"{first.suite.partition('@')[2] or 'no protocol named'}, conditions as stated by {by}"
    simulator = ", ".join(f"{name} {value}" for name, value in first.conditions["simulator"].items()) or "no simulator version recorded"
    suites = {entry.suite: entry.conditions["tasks"].values() for entry in entries}
    told = "; ".join(f"{suite.partition('@')[0]}, {len(tasks)} tasks of at most {_steps(tasks)} steps" for suite, tasks in suites.items())
    return f"{first.suite.partition('@')[2] or first.suite}: {told}; {simulator}"


def _steps(tasks: Collection[Mapping[str, Any]]) -> str:
    limits = sorted({limit for numbers in tasks if (limit := numbers.get("max_steps")) is not None})
    return " to ".join(map(str, dict.fromkeys([*limits[:1], *limits[-1:]]))) or "unknown"


def _ranks(entries: Sequence[Entry]) -> dict[str, int]:
    """Origin -> rank. Who cannot be told apart from the best of a group joins it; who can begins the next one, at its own place."""
    ordered = sorted((entry for entry in entries if entry.rate.value is not None), key=lambda entry: -(entry.rate.value or 0))
    ranks: dict[str, int] = {}
    best = None
    for place, entry in enumerate(ordered, 1):
        if best is None or told_apart(best, entry):
            best, rank = entry, place
        ranks[entry.origin] = rank
    return ranks


def told_apart(a: Entry, b: Entry) -> bool:
    """At the 5 % level: by their pairs if they played the same episodes (exact McNemar), else as two independent rates (Fisher)."""
    from scipy.stats import binomtest, fisher_exact

    if a.outcomes and a.seed == b.seed and a.outcomes.keys() == b.outcomes.keys():
        only_a = sum(won and not b.outcomes[key] for key, won in a.outcomes.items())
        only_b = sum(not won and b.outcomes[key] for key, won in a.outcomes.items())
        return only_a + only_b > 0 and bool(binomtest(only_b, only_a + only_b).pvalue < ALPHA)
    table = [[a.rate.k, a.rate.n - a.rate.k], [b.rate.k, b.rate.n - b.rate.k]]
    return bool(fisher_exact(table).pvalue < ALPHA)


def _sorted(table: Table, sort: str) -> Table:
    keys: dict[str, Any] = {
        "policy": lambda row: row.first.policy,
        "date": lambda row: row.first.date,
        "latency": lambda row: row.first.latency.p50 if row.first.latency else float("inf"),
    }
    for suite in table.suites:
        keys[suite] = keys[suite.partition("@")[0]] = lambda row, suite=suite: (
            -(row.cells[suite].rate.value or 0) if suite in row.cells else 1.0
        )
    if sort not in keys:
        raise BadRequest(f"cannot sort by {sort!r}; this table has {', '.join(keys)}")
    return Table(table.title, table.suites, table.conditions, sorted(table.rows, key=keys[sort]), table.notes)


# Results that were not made here.


def _imported(path: Path) -> list[Entry]:
    """The entries of a result file, by what is in it. Raises BadRequest for a form that nobody documented."""
    try:
        if path.stat().st_size > TEXT_LIMIT_BYTES:
            raise BadRequest(f"{path}: larger than any result file ({TEXT_LIMIT_BYTES >> 20} MiB)")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path}: no readable result file ({error})") from error
    if isinstance(data, dict) and "vla_eval_results" in data:
        return list(_published(path, data))
    try:
        if isinstance(data, dict) and isinstance(data.get("per_task"), list):
            return list(_lerobot(path, data["per_task"]))
        if isinstance(data, dict) and isinstance(data.get("per_episode"), list):
            won = [bool(episode["success"]) for episode in data["per_episode"]]
            return [_foreign(path, "lerobot", path.parent.name, "unnamed", won, 0)]
        if isinstance(data, dict) and "benchmark" in data and isinstance(data.get("tasks"), list):
            return [_harness(path, data)]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"{path}: looks like another harness' results, but {type(error).__name__}: {error}") from error
    raise BadRequest(f"{path}: none of the result files that can be imported; docs/results.md shows them")


def _published(path: Path, data: Mapping[str, Any]) -> Iterator[Entry]:
    if data["vla_eval_results"] != IMPORT_VERSION or not isinstance(data.get("results"), list):
        raise BadRequest(f"{path}: 'vla_eval_results' must be {IMPORT_VERSION}, beside a list 'results'")
    for number, result in enumerate(data["results"]):
        where = f"{path}: results[{number}]"
        if not isinstance(result, dict):
            raise BadRequest(f"{where} is no object")
        if unknown := sorted(set(result) - set(ENTRY_FIELDS)):
            raise BadRequest(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(ENTRY_FIELDS))}")
        texts = {name: result[name] for name in ("policy", "suite", "source") if name in result}
        if len(texts) < 3 or not all(isinstance(text, str) and text for text in texts.values()):
            raise BadRequest(f"{where}: 'policy', 'suite' and 'source' (where it was published) are texts that it must have")
        stated = result.get("conditions", {})
        if not isinstance(stated, dict):
            raise BadRequest(f"{where}: 'conditions' is no object")
        optional = {name: result[name] for name in ("bundle", "precision", "backend", "hardware", "date") if name in result}
        kinds: dict[str, type] = {**dict.fromkeys(optional, str), "privileged": bool, "replan": int}
        for name, kind in kinds.items():
            if name in result and type(result[name]) is not kind:
                raise BadRequest(f"{where}: {name!r} is {result[name]!r:.60}, no {kind.__name__}; correct it or leave it out")
        yield Entry(
            policy=texts["policy"],
            suite=texts["suite"],
            rate=_count(result, where),
            conditions={"stated_by": "their publishers", "stated": stated},
            replan=result.get("replan"),
            privileged=result.get("privileged", False),
            unranked="published, not played here",
            origin=texts["source"],
            **optional,
        )


def _count(result: Mapping[str, Any], where: str) -> Rate:
    k, n, value = result.get("k"), result.get("n"), result.get("rate")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise BadRequest(f"{where}: 'n', the number of episodes, is missing or no count; a rate without it says nothing")
    try:
        if isinstance(k, int) and not isinstance(k, bool):
            found = rate(k, n)
            if value is not None:
                counted(float(value), n, digits=_digits(value))
            return found
        if value is None:
            raise BadRequest("'k' or 'rate' is missing")
        return counted(float(value), n, digits=_digits(value))
    except (BadRequest, TypeError, ValueError) as error:
        raise BadRequest(f"{where}: {error}") from error


def _digits(value: Any) -> int:
    """Decimals that were written: 0.956 has three."""
    return len(str(value).partition(".")[2])


def _lerobot(path: Path, tasks: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
    groups: dict[str, list[bool]] = {}
    for task in tasks:
        groups.setdefault(str(task["task_group"]), []).extend(bool(won) for won in task["metrics"]["successes"])
    for group, won in groups.items():
        yield _foreign(path, "lerobot", path.parent.name, group, won, 0)


def _harness(path: Path, data: Mapping[str, Any]) -> Entry:
    """A result of vla-evaluation-harness. It counts a crash as a failure; here a crash is an error and in no rate."""
    episodes = [episode for task in data["tasks"] for episode in task["episodes"]]
    whole = [episode for episode in episodes if not episode.get("failure_reason")]
    won = [bool(episode["metrics"]["success"] if "metrics" in episode else episode["success"]) for episode in whole]
    version = data.get("harness_version", "?")
    return _foreign(path, f"vla-evaluation-harness {version}", path.parent.name, str(data["benchmark"]), won, len(episodes) - len(whole))


def _foreign(path: Path, harness: str, policy: str, suite: str, won: Sequence[bool], errors: int) -> Entry:
    if not won and not errors:
        raise BadRequest(f"{path}: holds no episode of {suite}")
    return Entry(
        policy=policy,
        suite=suite,
        rate=rate(sum(won), len(won)),
        conditions={"stated_by": harness},
        error=errors,
        unranked=f"played by {harness}",
        origin=str(path),
    )
