"""Whether a run folder holds: its records, arrays and films against its manifest and each other."""

from __future__ import annotations

from pathlib import Path

from ..types import BadRequest, EpisodeRecord
from .folder import RunFolder


def findings(folder: RunFolder) -> list[str]:
    """What does not hold, one sentence each with its file; empty for a whole folder. Episodes that are still to be played are no fault."""
    found = []
    ledger = set(folder.manifest.ledger)
    expected = set()
    for record in folder.records():
        path = folder.episode_path(record.task, record.trial)
        expected |= {path.name, path.with_suffix(".mp4").name}
        if (record.task, record.trial) not in ledger:
            found.append(f"{path.name}: {record.task} trial {record.trial} is recorded, but not in the manifest's ledger")
        if record.seed != folder.manifest.seed:
            found.append(f"{path.name}: played with seed {record.seed}, the run's is {folder.manifest.seed}")
        if record.video is not None and not _inside(folder.path, record.video):
            found.append(f"{path.name}: its film {record.video} is not there")
        found += _arrays(folder, record, path)
    found += [f"{path.name}: belongs to no record" for path in sorted(folder.episodes.iterdir()) if path.name not in expected]
    return found


def _arrays(folder: RunFolder, record: EpisodeRecord, path: Path) -> list[str]:
    if record.outcome == "error" and not path.exists():
        return []  # it broke before there was anything to store
    try:
        episode = folder.episode(record.task, record.trial)
    except BadRequest as error:
        return [str(error)]
    found = []
    steps = len(episode.actions)
    for name in ("states", "proprio", "predicates", "objects", "held"):
        if (rows := len(getattr(episode, name))) != steps + 1:
            found.append(f"{path.name}: {name} has {rows} rows; {steps} actions need {steps + 1}")
    for name in ("request_seconds", "request_batch"):
        if (rows := len(getattr(episode, name))) != len(episode.request_step):
            found.append(f"{path.name}: {name} has {rows} rows; {len(episode.request_step)} requests were made")
    if record.outcome != "error" and (steps, len(episode.request_step)) != (record.steps, record.chunks):
        found.append(
            f"{path.name}: holds {steps} steps and {len(episode.request_step)} chunks, its record says {record.steps} and {record.chunks}"
        )
    return found


def _inside(folder: Path, name: str) -> bool:
    path = (folder / name).resolve()
    return path.is_relative_to(folder.resolve()) and path.is_file()
