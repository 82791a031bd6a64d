"""How often the oracle succeeds, task by task: the tables of docs/oracle.md.

`python benchmarks/certify_oracle.py` plays trials 0 to 9 and 40 to 49 of every task of the five suites under the official caps (2,600
episodes, some hours) and writes docs/oracle.json and the tables in docs/oracle.md. `--suites`, `--tasks` and `--trials`
play less; what docs/oracle.json has of the others stays. `--resume` plays only what docs/oracle.json lacks or has as an
error. `--baselines` plays the no-op and the random policy instead, trials 0 to 9 at most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from _tables import fill, table

import vla_eval
from vla_eval.contract import open_env
from vla_eval.results import stats
from vla_eval.results.failures import bin_of
from vla_eval.results.folder import read_episode
from vla_eval.run.episode import in_process, rollout
from vla_eval.run.recorders import ArrayRecorder
from vla_eval.types import BadRequest, EpisodeRecord, Task

DOCS = Path(__file__).parents[1] / "docs"
SUITES = ("libero_object", "libero_spatial", "libero_goal", "libero_10", "libero_90")
TUNED, HELD_OUT = tuple(range(10)), tuple(range(40, 50))  # the second ten were never looked at while the oracle was made
REPLAN, SEED = 4, 0
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--tasks", nargs="+", type=int, help="task numbers; default: all of a suite")
    parser.add_argument("--trials", nargs="+", type=int, default=[*TUNED, *HELD_OUT])
    parser.add_argument("--protocol", default="openpi")
    parser.add_argument("--baselines", action="store_true", help="no-op and random instead of the oracle")
    parser.add_argument("--resume", action="store_true", help="leave out what docs/oracle.json has")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one task at a time")
    parser.add_argument("--tables", action="store_true", help="play nothing, write the tables anew")
    asked = parser.parse_args()
    path = DOCS / "oracle.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not asked.tables:
        try:
            tasks = tasks_asked(asked)
        except BadRequest as error:
            parser.error(str(error))
        play(asked, tasks, found, path)
    fill(
        DOCS / "oracle.md",
        {
            "suites": suites_table(found.get("oracle", {})),
            "misses": misses_table(found.get("oracle", {})),
            "tasks": tasks_table(found.get("oracle", {})),
            "baselines": baselines_table(found),
        },
    )


def tasks_asked(asked: argparse.Namespace) -> list[Task]:
    """The tasks to play. Raises BadRequest for a protocol, a task or a trial that there is not."""
    every = [task for suite in asked.suites for task in vla_eval.load_tasks(f"{suite}@{asked.protocol}")]
    for number in asked.tasks or ():
        if number not in {task.index for task in every}:
            raise BadRequest(f"--tasks {number}: no such task in {', '.join(asked.suites)}")
    tasks = [task for task in every if not asked.tasks or task.index in asked.tasks]
    for task in tasks:
        for trial in asked.trials:
            if trial < 0 or (task.trials is not None and trial >= task.trials):
                last = "on" if task.trials is None else f"to {task.trials - 1}"
                raise BadRequest(f"--trials {trial}: {task.id} has trials 0 {last}")
    return tasks


def play(asked: argparse.Namespace, tasks: Sequence[Task], found: dict[str, Any], path: Path) -> None:
    """Play those tasks, in any order, and keep it in `found` and at `path`."""
    policies = ("zero", "random") if asked.baselines else ("oracle",)
    trials = [trial for trial in asked.trials if trial in TUNED] if asked.baselines else asked.trials
    os.environ.update(ONE_THREAD)  # of the processes to come: seconds are those of one core
    with ProcessPoolExecutor(asked.workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {}
        for task in tasks:
            left = {}
            for policy in policies:
                row = found.setdefault(policy, {}).setdefault(task.suite, {}).setdefault(str(task.index), {"trials": {}})
                row["instruction"] = task.instruction
                left[policy] = [trial for trial in trials if not (asked.resume and trials_of([row], [trial]))]
            if any(left.values()):
                waiting[pool.submit(played, task.suite, task.index, left)] = task
        for done in as_completed(waiting):
            task, rows = waiting[done], done.result()
            for policy, row in rows.items():
                known = found[policy][task.suite][str(task.index)]
                known["trials"] = dict(sorted((known["trials"] | row).items(), key=lambda item: int(item[0])))
                print(policy, task.id, task.instruction, dict(Counter(trial["outcome"] for trial in row.values())), flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")  # after every task: hours of work are not lost to one key


def played(suite: str, index: int, trials: dict[str, Sequence[int]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Policy to trial to what is kept of it. The policy lives in the simulator's process, so that one clock counts both."""
    (task,) = (task for task in vla_eval.load_tasks(suite) if task.index == index)
    env = open_env(task)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, numbers in trials.items():
                policy, rows[name] = vla_eval.load_policy(name), {}
                replan = min(REPLAN, policy.horizon)
                for trial in numbers:
                    arrays, began = Path(folder, f"{name}-{trial}.npz"), time.process_time()
                    recorders = [ArrayRecorder(arrays)]
                    record = rollout(
                        env, in_process(policy), task, policy.needs, trial=trial, seed=SEED, replan=replan, recorders=recorders
                    )
                    rows[name][str(trial)] = said(record, time.process_time() - began, arrays)
    finally:
        env.close()
    return rows


def said(record: EpisodeRecord, cpu_seconds: float, arrays: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"outcome": record.outcome, "steps": record.steps}
    row |= {"seconds": round(record.seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
    if record.outcome == "failure":
        episode = read_episode(arrays)
        unmet = [str(name) for name, holds in zip(episode.predicate_names, episode.predicates[-1], strict=True) if not holds]
        row |= {"bin": str(bin_of(record, episode)), "unmet": unmet}
    return row | ({"error": record.error} if record.error else {})


def suites_table(suites: dict[str, Any]) -> str:
    rows = []
    for suite, tasks in by_name(suites):
        tuned, held_out = [trials_of(tasks.values(), wanted) for wanted in (TUNED, HELD_OUT)]
        every = [*tuned, *held_out]
        steps = [trial["steps"] for trial in every if trial["outcome"] == "success"]
        rates = [text for half in (tuned, held_out) for text in (rate(half), interval(half))]
        rows.append([suite, which(tasks), *rates, f"{mean(steps):.0f}", seconds(tasks)])
    heads = ["suite", "trials played of every task", "trials 0–9", "95 % interval", "trials 40–49", "95 % interval"]
    return table([*heads, "steps of a success", "CPU s an episode (wall s)"], rows, "llrrrrrr")


def seconds(tasks: dict[str, Any]) -> str:
    """Means over the trials that are timed of every task: an easy task must weigh as much as one that goes on to the cap."""
    timed = [
        {number for number, trial in task["trials"].items() if "cpu_seconds" in trial and trial["outcome"] != "error"}
        for task in tasks.values()
    ]
    wanted = sorted(set.intersection(*timed), key=int)
    cpu, wall = ([task["trials"][number][clock] for task in tasks.values() for number in wanted] for clock in ("cpu_seconds", "seconds"))
    return f"{mean(cpu):.1f} ({mean(wall):.1f}), n = {len(cpu)}" if cpu else "–"


def misses_table(suites: dict[str, Any]) -> str:
    """Every task that was missed at least once: in which bin `vla-eval report` puts the misses, and what of the goal was missing."""
    rows = []
    for suite, tasks in by_name(suites):
        for index, task in tasks.items():
            every = task["trials"].values()
            lost, broken = ([trial for trial in every if trial["outcome"] == outcome] for outcome in ("failure", "error"))
            if lost or broken:
                bins = Counter(trial.get("bin") or trial["error"] for trial in (*lost, *broken))
                unmet = Counter(f"`{name}`" for trial in lost for name in trial.get("unmet", []))
                missed = f"{len(lost)} of {len(every) - len(broken)}" + (f", errors: {len(broken)}" if broken else "")
                rows.append([f"{suite}/{index}", missed, counted(bins), counted(unmet)])
    return table(["task", "missed", "how the episodes ended", "what of the goal was missing"], rows, "lrll")


def tasks_table(suites: dict[str, Any]) -> str:
    rows = []
    for suite, tasks in by_name(suites):
        for index, task in tasks.items():
            tuned, held_out = trials_of([task], TUNED), trials_of([task], HELD_OUT)
            lost = [number for number, trial in task["trials"].items() if trial["outcome"] == "failure"]
            rows.append([f"{suite}/{index}", task["instruction"], rate(tuned), rate(held_out), ", ".join(lost)])
    return table(["task", "instruction", "trials 0–9", "trials 40–49", "failed trials"], rows, "llrrl")


def baselines_table(found: dict[str, Any]) -> str:
    rows = []
    for name in ("zero", "random"):
        for suite, tasks in by_name(found.get(name, {})):
            won = {index: wins(trials_of([task], TUNED)) for index, task in tasks.items()}
            lucky = [f"{index} ({count} of {len(trials_of([tasks[index]], TUNED))})" for index, count in won.items() if count]
            rows.append([name, suite, which(tasks), rate(trials_of(tasks.values(), TUNED)), ", ".join(lucky) or "–"])
    return table(["policy", "suite", "trials played of every task", "success", "tasks with any success"], rows, "lllrl")


def by_name(suites: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Suites in their usual order, protocol after protocol, those without an episode left out; tasks by number."""
    played_ones = [(suite, {index: task for index, task in tasks.items() if task["trials"]}) for suite, tasks in suites.items()]
    ordered = sorted(played_ones, key=lambda item: (item[0].split("@")[1] != "openpi", SUITES.index(item[0].split("@")[0])))
    return [(suite, dict(sorted(tasks.items(), key=lambda item: int(item[0])))) for suite, tasks in ordered if tasks]


def which(tasks: dict[str, Any]) -> str:
    """The trials that every task has, as in "0–2, 40–42", and how many episodes there are besides."""
    numbers = [{int(trial) for trial in task["trials"]} for task in tasks.values()]
    common = sorted(set.intersection(*numbers))
    runs: list[list[int]] = []
    for number in common:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs) or "none"
    more = sum(len(own) - len(common) for own in numbers)
    return f"{text} of {len(tasks)} tasks" + (f" and {more} more episodes" if more else "")


def counted(things: Counter[str]) -> str:
    return ", ".join(f"{name} {count}×" for name, count in things.most_common())


def trials_of(tasks: Iterable[dict[str, Any]], wanted: Sequence[int]) -> list[dict[str, Any]]:
    """Those that were played to an end: an error counts in no rate."""
    known = [task["trials"][str(trial)] for task in tasks for trial in wanted if str(trial) in task["trials"]]
    return [trial for trial in known if trial["outcome"] != "error"]


def wins(trials: Sequence[dict[str, Any]]) -> int:
    return sum(trial["outcome"] == "success" for trial in trials)


def rate(trials: Sequence[dict[str, Any]]) -> str:
    return f"{wins(trials)}/{len(trials)}" if trials else "–"


def interval(trials: Sequence[dict[str, Any]]) -> str:
    wilson = stats.rate(wins(trials), len(trials)).wilson
    return f"{100 * wilson.low:.1f}–{100 * wilson.high:.1f}" if wilson else "–"


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("nan")


if __name__ == "__main__":
    main()
