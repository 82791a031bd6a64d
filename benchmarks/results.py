"""Measure what reading 500 episodes costs, and how often a verdict or a stop rule errs.

Writes docs/results.json and the tables that docs/results*.md have of it; `--tables` writes the tables alone, from the JSON that is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from _tables import fill, table
from scipy.stats import binom

from vla_eval.results.compare import compare
from vla_eval.results.folder import RunFolder, open_run
from vla_eval.results.pages import review
from vla_eval.results.report import report
from vla_eval.results.sequential import evidence
from vla_eval.results.stats import difference_interval
from vla_eval.run.manifest import hardware

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EPISODES, RUNS, MARGIN = 500, 4000, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    path = DOCS / "results.json"
    if not parser.parse_args().tables:
        path.write_text(json.dumps(measured(), indent=1) + "\n")
        print(path.read_text())
    tables(json.loads(path.read_text()))


def measured() -> dict[str, Any]:
    """What docs/results.json holds."""
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
    return {"machine": hardware()["cpu"], "episodes": EPISODES, "seconds": seconds, "errors": errors()}


def tables(found: dict[str, Any]) -> None:
    """The same as tables, on the pages that answer for it."""
    by = {(error["n"], error.get("discordant") or error["claim"]): error["error"] for error in found["errors"]}
    shares = sorted({discordant for _, discordant in by if isinstance(discordant, float)})
    counts = sorted({n for n, _ in by if isinstance(n, int)})
    verdicts = [(n, *(f"{100 * by[n, share]:.2f} %" for share in shares)) for n in counts]
    heads = ["pairs", f"{100 * shares[0]:.0f} % disagree", *(f"{100 * share:.0f} %" for share in shares[1:])]
    fill(DOCS / "results-compare.md", {"false verdicts": table(heads, verdicts, "r" * len(heads))})
    stops = [
        (error["claim"].split()[-1], f"{100 * error['error']:.2f} %") for error in found["errors"] if error["claim"].startswith("lower>")
    ]
    fill(DOCS / "results-stop.md", {"false stops": table(["threshold", "share of runs"], stops, "rr")})
    reading = [(name, f"{seconds:.2f} s") for name, seconds in found["seconds"].items()]
    fill(DOCS / "results.md", {"reading": table([f"reading {found['episodes']} episodes", found["machine"]], reading, "lr")})


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
    """How often a false claim is made: by enumeration where that is possible, else in RUNS simulated runs."""
    found: list[dict[str, Any]] = []
    margin, claim = MARGIN, f"not worse by {MARGIN}, truly worse by {MARGIN}"
    for n in (20, 50, 100):
        for discordant in (0.05, 0.1, 0.2, 0.4):
            said = 0.0
            for total in range(n + 1):
                if (chance := binom.pmf(total, n, discordant)) > 1e-7:
                    passing = first_pass(total, n, margin)
                    said += chance * binom.sf(passing - 1, total, (discordant - margin) / (2 * discordant))
            found.append({"claim": claim, "n": n, "discordant": discordant, "error": round(said, 5)})
    rng = np.random.default_rng(0)
    for p in (0.5, 0.9, 0.98):
        k, looks = np.cumsum(rng.random((RUNS, EPISODES)) < p, axis=1), np.arange(1, EPISODES + 1)
        false = (evidence(k, looks, p) >= 20) & (k > p * looks)
        found.append(
            {"claim": f"lower>{p}, truly {p}", "n": f"looked at after each of {EPISODES}", "error": float(false.any(axis=1).mean())}
        )
    return found


def first_pass(total: int, n: int, margin: float) -> int:
    """Of `total` pairs that disagree, how many B must have won for the verdict *not worse*."""
    return bisect_left(range(total + 1), True, key=lambda won: difference_interval(total - won, won, n).low > -margin)


if __name__ == "__main__":
    main()
