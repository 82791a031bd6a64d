"""How often the oracle succeeds, task by task: the table of docs/oracle.md.

`python benchmarks/certify_oracle.py` plays trials 0 to 9 and 40 to 49 of every task of the five suites under the official caps (2,600
episodes, some hours on one core) and writes docs/oracle.json and the tables in docs/oracle.md. `--suites`, `--tasks` and `--trials` play
less; what docs/oracle.json has of the others stays. `--baselines` plays the no-op and the random policy instead, trials 0 to 9.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _tables import fill

import vla_eval
from vla_eval.contract import open_env
from vla_eval.results import stats
from vla_eval.run.episode import in_process, rollout
from vla_eval.types import EpisodeRecord, Policy, Task

DOCS = Path(__file__).parents[1] / "docs"
SUITES = ("libero_object", "libero_spatial", "libero_goal", "libero_10", "libero_90")
TUNED, HELD_OUT = tuple(range(10)), tuple(range(40, 50))  # the second ten were never looked at while the oracle was made
REPLAN, SEED = 4, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--tasks", nargs="+", type=int, help="task numbers; default: all of a suite")
    parser.add_argument("--trials", nargs="+", type=int, default=[*TUNED, *HELD_OUT])
    parser.add_argument("--protocol", default="openpi")
    parser.add_argument("--baselines", action="store_true", help="no-op and random instead of the oracle")
    asked = parser.parse_args()
    policies = ["zero", "random"] if asked.baselines else ["oracle"]
    trials = [trial for trial in asked.trials if trial in TUNED] if asked.baselines else asked.trials
    path = DOCS / "oracle.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in policies:
        policy = vla_eval.load_policy(name)
        for suite in asked.suites:
            for task in vla_eval.load_tasks(f"{suite}@{asked.protocol}"):
                if asked.tasks and task.index not in asked.tasks:
                    continue
                records = played(policy, task, trials)
                row = found.setdefault(name, {}).setdefault(task.suite, {}).setdefault(str(task.index), {"instruction": task.instruction})
                row.setdefault("trials", {}).update({str(record.trial): said(record) for record in records})
                path.write_text(json.dumps(found, indent=1) + "\n")  # after every task: hours of work are not lost to one key
                print(task.id, task.instruction, dict(Counter(record.outcome for record in records)), flush=True)
    page = DOCS / "oracle.md"
    fill(
        page,
        {
            "suites": suites_table(found),
            "tasks": tasks_table(found.get("oracle", {})),
            "baselines": baselines_table(found),
        },
    )


def played(policy: Policy, task: Task, trials: Sequence[int]) -> list[EpisodeRecord]:
    env = open_env(task)
    try:
        ask = in_process(policy)
        return [rollout(env, ask, task, policy.needs, trial=trial, seed=SEED, replan=min(REPLAN, policy.horizon)) for trial in trials]
    finally:
        env.close()


def said(record: EpisodeRecord) -> dict[str, Any]:
    plain = {"outcome": record.outcome, "steps": record.steps, "seconds": round(record.seconds, 1)}
    return plain | ({"error": record.error} if record.error else {})


def suites_table(found: dict[str, Any]) -> str:
    rows = [
        "| suite | trials 0–9 | 95 % interval | trials 40–49 | mean steps of a success | seconds an episode |",
        "|---|---|---|---|---|---|",
    ]
    for suite, tasks in found.get("oracle", {}).items():
        tuned, held_out = [trials_of(tasks.values(), wanted) for wanted in (TUNED, HELD_OUT)]
        every = [*tuned, *held_out]
        interval = stats.rate(wins(tuned), len(tuned)).wilson
        ends = f"{100 * interval.low:.1f}–{100 * interval.high:.1f}" if interval else "–"
        steps = [trial["steps"] for trial in every if trial["outcome"] == "success"]
        rows.append(
            f"| {suite} | {rate(tuned)} | {ends} | {rate(held_out)} | {mean(steps):.0f} "
            f"| {mean([trial['seconds'] for trial in every]):.1f} |"
        )
    return "\n".join(rows) + "\n"


def tasks_table(suites: dict[str, Any]) -> str:
    rows = ["| task | instruction | trials 0–9 | trials 40–49 | failed trials |", "|---|---|---|---|---|"]
    for suite, tasks in suites.items():
        for index, task in sorted(tasks.items(), key=lambda item: int(item[0])):
            tuned, held_out = trials_of([task], TUNED), trials_of([task], HELD_OUT)
            lost = [number for number, trial in task["trials"].items() if trial["outcome"] != "success"]
            rows.append(f"| {suite}/{index} | {task['instruction']} | {rate(tuned)} | {rate(held_out)} | {', '.join(lost)} |")
    return "\n".join(rows) + "\n"


def baselines_table(found: dict[str, Any]) -> str:
    rows = ["| policy | suite | success, trials 0–9 | tasks with any success |", "|---|---|---|---|"]
    for name in ("zero", "random"):
        for suite, tasks in found.get(name, {}).items():
            lucky = [f"{index} ({wins(trials_of([task], TUNED))})" for index, task in tasks.items() if wins(trials_of([task], TUNED))]
            rows.append(f"| {name} | {suite} | {rate(trials_of(tasks.values(), TUNED))} | {', '.join(lucky) or '–'} |")
    return "\n".join(rows) + "\n"


def trials_of(tasks: Any, wanted: Sequence[int]) -> list[dict[str, Any]]:
    return [task["trials"][str(trial)] for task in tasks for trial in wanted if str(trial) in task["trials"]]


def wins(trials: list[dict[str, Any]]) -> int:
    return sum(trial["outcome"] == "success" for trial in trials)


def rate(trials: list[dict[str, Any]]) -> str:
    return f"{wins(trials)}/{len(trials)}" if trials else "–"


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("nan")


if __name__ == "__main__":
    main()
