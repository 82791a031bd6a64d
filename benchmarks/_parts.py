"""Parts of a run on a machine that may be gone any minute: each is written down when it ends, and one that fails loses no other."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Note = dict[str, Any]


class Parts:
    """A JSON file: what is said of the whole, and below "parts" each part with its seconds and what it noted."""

    def __init__(self, file: Path, *, minutes: float | None = None, **about: Any) -> None:
        """No part begins once `minutes` are over."""
        self.file, self.about = file, about
        self.found: dict[str, Note] = {}
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        file.parent.mkdir(parents=True, exist_ok=True)
        self._save()

    def __call__(self, name: str, work: Callable[[Note], T]) -> T | None:
        """Do a part: `work` fills the note that it is given. None where it failed or came too late."""
        note: Note = {}
        self.found[name] = row = {"ok": False, "seconds": 0.0, "said": note}
        if self._end is not None and time.monotonic() > self._end:
            row["error"] = "not begun: the time was over"
            self._save()
            print(f"== {name}: {row['error']}", flush=True)
            return None
        print(f"== {name}", flush=True)
        began, made = time.perf_counter(), None
        try:
            made = work(note)
            row["ok"] = True
        except Exception as error:  # the parts after this one still tell something
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:800]
        row["seconds"] = round(time.perf_counter() - began, 2)
        self._save()
        print(f"   {'ok' if row['ok'] else 'FAILED'} {row['seconds']} s {json.dumps(note, default=str)[:1500]}", flush=True)
        return made

    def failed(self) -> list[str]:
        """The parts that did not come to their end."""
        return [name for name, row in self.found.items() if not row["ok"]]

    def end(self) -> int:
        """Print what came of each part; the exit code."""
        for name, row in self.found.items():
            print(f"{'ok ' if row['ok'] else 'NO '} {row['seconds']:8.1f} s  {name}  {row.get('error', '')}")
        print(f"written: {self.file}", flush=True)
        return int(bool(self.failed()))

    def _save(self) -> None:
        self.file.write_text(json.dumps({**self.about, "parts": self.found}, indent=1, default=str) + "\n")


def command_line(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Path]:
    """The command line with what all such runs are asked, and the folder for checkpoints and bundles, which is there."""
    parser.add_argument("--size", default="full", choices=["full", "tiny"])
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    found = parser.parse_args()
    work = found.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    return found, work
