"""Write tasks/libero.json: each suite's instructions in upstream's order, read from the installed benchmark.

The table lets `vla-eval list` name every task without a simulator; a test holds it against the installed package.
"""

from __future__ import annotations

import json
from pathlib import Path

from libero.libero import benchmark

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")


def table() -> dict[str, list[str]]:
    """Suite -> instructions, by task index."""
    return {suite: [task.language for task in benchmark.task_maps[suite].values()] for suite in SUITES}


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "tasks" / "libero.json"
    path.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
