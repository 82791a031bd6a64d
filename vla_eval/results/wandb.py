"""A run folder to Weights & Biases, while it grows or afterwards.

W&B runs in a process of its own that only reads the run folder: whatever the service does, or does not, nothing of the run waits for it.
`python -m vla_eval.results.wandb RUN MODE` follows a folder until its standard input ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..types import BadRequest, EpisodeRecord, VlaEvalError
from .failures import bin_of
from .folder import EPISODES, MANIFEST, RECORDS, Episode, RunFolder, open_run
from .leaderboard import of_run
from .report import control_hz, report, task_order
from .stats import percentiles

Mode = Literal["online", "offline"]
INIT_SECONDS = 30  # for the service to answer at all
FINISH_SECONDS = 600  # for what is left to be sent when the run has ended
QUIET_SECONDS = 5.0  # of that, before a word is said
LOOK_SECONDS = 1.0  # between two looks at a growing folder
PROJECT = "vla-eval"  # unless WANDB_PROJECT says otherwise
COLUMNS: list[str | int] = ["task", "trial", "outcome", "bin", "steps", "seconds", "answer p50 ms", "error", "video"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Went:
    """How sending went, known once it is over."""

    well: bool = False


def check_installed() -> None:
    """Raise BadRequest, with the command that installs it, if W&B is asked for and absent."""
    if importlib.util.find_spec("wandb") is None:
        raise BadRequest("--wandb needs the package wandb, which is not installed: pip install wandb")


@contextlib.contextmanager
def following(folder: Path, mode: Mode, finish_seconds: float = FINISH_SECONDS) -> Iterator[Went]:
    """Send a run folder to W&B while the block fills it. Never raises and never keeps the block waiting; what went wrong is said once."""
    command = [sys.executable, "-m", "vla_eval.results.wandb", str(folder), mode]
    # What waits to be sent belongs to the run, and a home folder may be read-only.
    places = {f"WANDB_{kind}_DIR": str(folder.resolve() / "wandb" / kind.lower()) for kind in ("DATA", "CACHE")}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, env={**places, **os.environ}, start_new_session=True
        )
        went = Went()
        try:
            yield went
        finally:
            went.well = _end(child, said, folder, finish_seconds)


def send(folder: Path, mode: Mode, finish_seconds: float = FINISH_SECONDS) -> bool:
    """Send a finished run folder; whether W&B has it all. What goes wrong is said once."""
    with following(folder, mode, finish_seconds) as went:
        pass
    return went.well


def _end(child: subprocess.Popen[bytes], said: Any, folder: Path, finish_seconds: float) -> bool:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()  # the sign that the run has ended
    try:
        code = _waited(child, finish_seconds)
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.startswith("vla-eval: ")]
        why = lines[-1].removeprefix("vla-eval: ") if lines else f"its process ended with {code}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # W&B's own service process too
        child.wait()
        code, why = 1, f"it had not finished after {finish_seconds:g} s"
    if code:
        _log.warning(
            "Weights & Biases has not got all of %s (%s); the run folder is whole, vla-eval wandb %s sends it again",
            folder.name,
            why,
            folder,
        )
    return not code


def _waited(child: subprocess.Popen[bytes], seconds: float) -> int:
    """The process' exit code. A wait that is not short is said, so that nobody takes it for a hang. Raises TimeoutExpired."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(min(QUIET_SECONDS, seconds))
    if seconds > QUIET_SECONDS:
        _log.warning("the rest is being handed to W&B, which takes %g s at most", seconds - QUIET_SECONDS)
    return child.wait(max(seconds - QUIET_SECONDS, 0))


def follow(folder: RunFolder, mode: Mode, ended: Callable[[float], bool]) -> str:
    """Log a folder's records as they come, and everything else once `ended(seconds to wait)`; returns the W&B run's id.

    The same folder is always the same W&B run, and a record's step is its line: the service drops the steps that it has already.
    """
    import wandb

    manifest = folder.manifest
    settings = wandb.Settings(
        init_timeout=INIT_SECONDS,
        login_timeout=INIT_SECONDS,
        console="off",
        silent=True,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
    )
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run_id(manifest.run_id),
        name=manifest.run_id,
        group=manifest.suite,
        job_type=manifest.policy,
        resume="allow",
        mode=mode,
        dir=folder.path,
        config=asdict(manifest),
        settings=settings,
    )
    run.define_metric("*", step_metric="episodes")
    seen: dict[tuple[str, int], EpisodeRecord] = {}
    step, over = 0, False
    while not over:
        over = ended(LOOK_SECONDS)  # asked before the last look, so that nothing is missed
        for line, record in enumerate(folder.written(), 1):
            if line <= step:
                continue
            step, known = line, seen.get((record.task, record.trial))
            seen[record.task, record.trial] = record
            if not _known(known, record):
                run.log(_metrics(record, list(seen.values()), manifest.suite), step=step)
    folder = open_run(folder.path)  # the manifest may have learned more since
    run.config.update(asdict(folder.manifest), allow_val_change=True)  # type: ignore[no-untyped-call]
    records = sorted(folder.records(), key=lambda record: (task_order(record.task), record.trial))
    run.log({"episode_table": wandb.Table(columns=COLUMNS, data=[_row(wandb, folder, record) for record in records])})  # in the last step
    run.summary.update(_summary(folder))
    for artifact in (_rollouts(wandb, folder), _report(wandb, folder)):
        run.log_artifact(artifact)
    run.finish()
    return str(run.id)


def run_id(name: str) -> str:
    """The W&B run's id for a run of ours: the same for the same run, whenever it is resumed or sent again."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _known(seen: EpisodeRecord | None, record: EpisodeRecord) -> bool:
    return seen is not None and replace(seen, video=record.video) == record  # a film drawn later is no new outcome


def _metrics(record: EpisodeRecord, seen: Sequence[EpisodeRecord], suite: str) -> dict[str, float]:
    """What is known after a record: counts and rates of the suite and of its task."""
    counts = Counter(one.outcome for one in seen)
    of_task = Counter(one.outcome for one in seen if one.task == record.task)
    found: dict[str, float] = {"episodes": len(seen), **{f"{suite}/{name}": counts[name] for name in ("success", "failure", "error")}}
    for place, tally in ((suite, counts), (record.task, of_task)):
        if n := tally["success"] + tally["failure"]:
            found |= {f"{place}/rate": tally["success"] / n, f"{place}/n": n}
    return found | {"episode/steps": record.steps, "episode/seconds": record.seconds, "episode/policy_seconds": record.policy_seconds}


def _row(wandb: Any, folder: RunFolder, record: EpisodeRecord) -> list[Any]:
    episode: Episode | None = None
    if record.outcome != "error":
        with contextlib.suppress(BadRequest):
            episode = folder.episode(record.task, record.trial)
    bin_ = bin_of(record, episode, control_hz(folder.manifest, record.task))
    answers = None
    if episode is not None and "total" in (stages := [str(stage) for stage in episode.request_stages]):
        answers = percentiles(episode.request_seconds[:, stages.index("total")])
    film = folder.episode_path(record.task, record.trial, ".mp4")
    video = wandb.Video(str(film), format="mp4") if film.is_file() else None
    p50 = 1e3 * answers.p50 if answers else None
    return [record.task, record.trial, record.outcome, str(bin_ or ""), record.steps, record.seconds, p50, record.error or "", video]


def _summary(folder: RunFolder) -> dict[str, Any]:
    """The run's row on a leaderboard."""
    entry = of_run(folder)
    wilson = entry.rate.wilson or (None, None)
    return {
        **{
            name: getattr(entry, name)
            for name in ("policy", "suite", "bundle", "precision", "backend", "hardware", "replan", "date", "privileged")
        },
        "rate": entry.rate.value,
        "k": entry.rate.k,
        "n": entry.rate.n,
        "errors": entry.error,
        "wilson_low": wilson[0],
        "wilson_high": wilson[1],
        "answer_p50_ms": 1e3 * entry.latency.p50 if entry.latency else None,
        "answer_p99_ms": 1e3 * entry.latency.p99 if entry.latency else None,
        "unranked": entry.unranked,
    }


def _rollouts(wandb: Any, folder: RunFolder) -> Any:
    artifact = wandb.Artifact(f"rollouts-{run_id(folder.manifest.run_id)}", type="rollouts")
    artifact.add_file(str(folder.path / MANIFEST))
    artifact.add_file(str(folder.path / RECORDS))
    artifact.add_dir(str(folder.episodes), name=EPISODES)
    return artifact


def _report(wandb: Any, folder: RunFolder) -> Any:
    artifact, found = wandb.Artifact(f"report-{run_id(folder.manifest.run_id)}", type="report"), report(folder)
    for name, text in (("report.md", found.markdown()), ("report.json", json.dumps(found.to_json(), indent=1))):
        with artifact.new_file(name, mode="w", encoding="utf-8") as file:
            file.write(text)
    return artifact


def _parent_ended(seconds: float) -> bool:
    """Wait that long for the parent to close our standard input."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def main(path: str, mode: Mode) -> int:
    """The process that talks to W&B: one sentence on stderr if it cannot."""
    try:
        follow(open_run(path), mode, _parent_ended)
    except VlaEvalError as error:
        told = str(error)
    except Exception as error:  # a service's client may raise anything; the parent says it once and goes on
        told = f"{type(error).__name__}: {error}"
    else:
        return 0
    print(f"vla-eval: {' '.join(told.split())}", file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "online" if sys.argv[2] == "online" else "offline"))
