"""Measure what reading 500 episodes costs, and how often a verdict or a stop rule errs. Writes docs/results.json."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from vla_eval.results.compare import compare
from vla_eval.results.folder import RunFolder, open_run
from vla_eval.results.pages import review
from vla_eval.results.report import report
from vla_eval.results.sequential import evidence
from vla_eval.results.stats import difference_interval

ROOT = Path(__file__).resolve().parents[1]
EPISODES = 500


def main() -> None:
    spec = spec_from_file_location("make_runs", ROOT / "tests/results/make_runs.py")
    assert spec is not None
    assert spec.loader is not None
    make_runs = module_from_spec(spec)
    spec.loader.exec_module(make_runs)
    with tempfile.TemporaryDirectory() as out:
        ways = list(make_runs.TAUGHT)

        def mixed(task: int, trial: int) -> str:
            return "success" if trial % 3 else ways[(task + trial) % len(ways)]

        a = make_runs.make_run(Path(out), mixed, tasks=10, trials=50, run_id="a")
        b = make_runs.make_run(Path(out), lambda task, trial: "success", tasks=10, trials=50, run_id="b")
        seconds = timed(a, b)
    found = {"machine": platform.processor() or platform.machine(), "episodes": EPISODES, "seconds": seconds, "errors": errors()}
    (ROOT / "docs/results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def timed(a: RunFolder, b: RunFolder) -> dict[str, float]:
    """Seconds of each reading, of runs of 500 episodes without films."""
    found = {}
    readings: dict[str, Callable[[], object]] = {
        "report": lambda: report(open_run(a.path)),
        "pages, no films": lambda: review(open_run(a.path), a.path / "review"),
        "compare": lambda: compare(open_run(a.path), open_run(b.path)),
    }
    for name, read in readings.items():
        began = time.perf_counter()
        read()
        found[name] = round(time.perf_counter() - began, 2)
    return found


def errors() -> list[dict[str, Any]]:
    """How often a false claim is made: by enumeration where that is possible, else in 4000 simulated runs."""
    found: list[dict[str, Any]] = []
    margin = 0.05
    for n in (20, 50, 100):
        for discordant in (0.05, 0.1, 0.2, 0.4):
            said = 0.0
            for total in range(n + 1):
                if (chance := binom.pmf(total, n, discordant)) > 1e-7:
                    passing = first_pass(total, n, margin)
                    said += chance * binom.sf(passing - 1, total, (discordant - margin) / (2 * discordant))
            found.append({"claim": "not worse by 0.05, truly worse by 0.05", "n": n, "discordant": discordant, "error": round(said, 5)})
    rng = np.random.default_rng(0)
    for p in (0.5, 0.9, 0.98):
        k, looks = np.cumsum(rng.random((4000, 500)) < p, axis=1), np.arange(1, 501)
        false = (evidence(k, looks, p) >= 20) & (k > p * looks)
        found.append({"claim": f"lower>{p}, truly {p}", "n": "looked at after each of 500", "error": float(false.any(axis=1).mean())})
    return found


def first_pass(total: int, n: int, margin: float) -> int:
    """Of `total` pairs that disagree, how many B must have won for the verdict *not worse*."""
    return bisect_left(range(total + 1), True, key=lambda won: difference_interval(total - won, won, n).low > -margin)


if __name__ == "__main__":
    main()
