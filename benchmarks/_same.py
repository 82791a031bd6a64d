"""What of two runs must be equal however they were played: every record but its times, and every array but the answers' times."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vla_eval.results.folder import Episode, RunFolder, untimed


def outcome(folder: RunFolder) -> list[Any]:
    """The records in playing order."""
    return sorted((untimed(record) for record in folder.records()), key=lambda record: (record.task, record.trial))


def arrays(folder: RunFolder) -> list[bytes]:
    """Every array of every episode."""
    timed = ("request_seconds", "request_batch")
    return [
        getattr(folder.episode(*key), field.name).tobytes()
        for key in folder.manifest.ledger
        for field in fields(Episode)
        if field.name not in timed
    ]
