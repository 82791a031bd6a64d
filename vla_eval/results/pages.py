"""Pages for a browser, from disk and without a network: a run's episodes to look through, two runs' disagreements, a leaderboard.

Whatever comes from a run reaches the page as text: Jinja2 escapes it, and the scripts only ever set text.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from ..types import BadRequest, EpisodeRecord
from .compare import Comparison
from .failures import Bin, bin_of, by_task
from .folder import Episode, RunFolder
from .leaderboard import ABOUT, Table, cell_lines, row_name, row_texts
from .report import CONTROL_HZ, Report, between, control_hz, percent, report, task_order
from .stats import percentiles

HERE = Path(__file__).parent
SHEET_FRAMES, SHEET_COLUMNS, SHEET_WIDTH = 10, 5, 320  # pixels of one frame
FFMPEG_SECONDS = 120
PLOT_RC: dict[Any, Any] = {"svg.hashsalt": "vla-eval", "svg.fonttype": "none", "font.size": 9}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255", "#882200", "#337755", "#997700")


def review(folder: RunFolder, out: Path) -> Path:
    """Write the review pages of a run into the new or old folder `out`; returns the page to open. Raises BadRequest if it cannot.

    Episodes are shown with the mp4 that the run folder has; one that was not drawn says how to draw it.
    """
    records, found = sorted(folder.played(), key=lambda r: (task_order(r.task), r.trial)), report(folder)
    with _writing(out):
        shown, bins, totals = [], {}, []
        for record in records:
            episode = _arrays(folder, record)
            totals += _totals(episode)
            bin_ = bin_of(record, episode, control_hz(folder.manifest, record.task))
            if bin_ is not None:
                bins[record.task, record.trial] = bin_
            shown.append(_card(folder, record, episode, bin_, out))
        plots = [
            _plot(out, "success.svg", "Success rate by task, with 95 % intervals", _success(found)),
            *([_plot(out, "failures.svg", "Failed and broken episodes by task", _failures(by_task(bins)))] if bins else []),
            *([_plot(out, "latency.svg", "Time of the policy's answers", _latency(totals, _deadline(found)))] if totals else []),
        ]
        return _page(
            out,
            shown,
            title=f"{found.suite}, {found.policy}" + ("" if found.complete else " (incomplete)"),
            subtitle=f"run {found.run}, bundle {found.bundle or 'none'}, backend {found.backend}, replan {found.replan}, seed {found.seed}",
            notes=found.notes,
            verdict="",
            tables=_tables(found, bins),
            plots=plots,
            filters=["task", "outcome", "bin"],
            failure="failure",
            episodes_title="Episodes",
        )


def review_pair(comparison: Comparison, a: RunFolder, b: RunFolder, out: Path) -> Path:
    """Write the episodes on which two runs disagree, side by side, into `out`; returns the page to open."""
    arms = {"A": (a, {(r.task, r.trial): r for r in a.records()}), "B": (b, {(r.task, r.trial): r for r in b.records()})}
    with _writing(out):
        shown = []
        for task, trial, *_ in comparison.disagreements:
            views = []
            for name, (folder, records) in arms.items():
                record = records[task, trial]
                episode = _arrays(folder, record)
                views.append(_view(folder, record, episode, bin_of(record, episode, control_hz(folder.manifest, task)), out, name))
            better = "B" if views[1]["outcome"] == "success" else "A"
            shown.append(
                {
                    "title": f"{task}, trial {trial}",
                    "text": _instruction(a, task),
                    "failed": better == "A",
                    "filters": {"task": task, "solved by": f"only {better}"},
                    "views": views,
                }
            )
        p = comparison.pairs
        counts = [["A succeeded", str(p.both), str(p.only_a)], ["A failed", str(p.only_b), str(p.neither)]]
        manifests = [[d.key, _short(d.a), _short(d.b), "yes" if d.separates else ""] for d in comparison.differences]
        return _page(
            out,
            shown,
            title=f"{b.manifest.policy} (B) against {a.manifest.policy} (A) on {a.manifest.suite}",
            subtitle=f"A is run {a.manifest.run_id}, B is run {b.manifest.run_id}; {p.n} pairs, exact McNemar p = {p.p:.3g}",
            notes=[f"{comparison.errors} pairs have an error in an arm and are not counted."] if comparison.errors else [],
            verdict=f"{comparison.sentence} Difference (B less A) {percent(p.difference)}, 95 % interval {between(p.interval)}.",
            tables=[
                {"title": "Pairs", "heads": ["", "B succeeded", "B failed"], "rows": counts},
                *([{"title": "Manifests differ in", "heads": ["key", "A", "B", "other episodes"], "rows": manifests}] if manifests else []),
            ],
            plots=[],
            filters=["task", "solved by"],
            failure="failure of B",
            episodes_title="Episodes that disagree",
        )


def leaderboard_page(tables: Sequence[Table], out: Path) -> Path:
    """Write the leaderboard as one HTML file."""
    if out.is_dir() or out.suffix not in ("", ".html"):
        out = out / "leaderboard.html" if out.is_dir() else out.with_suffix(".html")
    shown = []
    for table in tables:
        heads = ["policy", *table.suites, "p50 / p99 ms", *ABOUT, "date", "origin"]
        rows = []
        for row in table.rows:
            latency, *rest = row_texts(row)
            rates = [(cell_lines(row, s), row.cells[s].rate.value if s in row.cells and row.cells[s].rate.n else "") for s in table.suites]
            p50 = row.first.latency.p50 if row.first.latency else ""
            rows.append([([row_name(row)], row_name(row)), *rates, (latency, p50), *((texts, texts[0]) for texts in rest)])
        shown.append({"title": table.title, "notes": table.notes, "heads": heads, "rows": rows})
    with _writing(out.parent):
        _write(out, _templates().get_template("leaderboard.html").render(tables=shown, css=_asset("page.css"), script=_asset("sort.js")))
    return out


def _page(out: Path, shown: Sequence[Mapping[str, Any]], **parts: Any) -> Path:
    _write(out / "episodes.js", f"const EPISODES = {json.dumps(shown, ensure_ascii=True, allow_nan=False)};\n")
    page = _templates().get_template("review.html").render(css=_asset("page.css"), script=_asset("review.js"), **parts)
    return _write(out / "index.html", page)


def _card(folder: RunFolder, record: EpisodeRecord, episode: Episode | None, bin_: Bin | None, out: Path) -> dict[str, Any]:
    return {
        "title": f"{record.task}, trial {record.trial}",
        "text": _instruction(folder, record.task),
        "failed": record.outcome != "success",
        "filters": {"task": record.task, "outcome": record.outcome, "bin": str(bin_ or "")},
        "views": [_view(folder, record, episode, bin_, out, folder.manifest.policy)],
    }


def _view(folder: RunFolder, record: EpisodeRecord, episode: Episode | None, bin_: Bin | None, out: Path, name: str) -> dict[str, Any]:
    """What is shown of one episode of one run."""
    told = [f"{name}: {record.outcome}", *([str(bin_)] if bin_ else []), f"{record.steps} steps, {record.seconds:.1f} s"]
    if answers := percentiles(_totals(episode)):
        told.append(f"answers {_ms(answers.p50)} (median of {answers.n})")
    if record.error:
        told.append(record.error)
    video, sheet = _media(folder, record, out)
    return {
        "name": name,
        "outcome": record.outcome,
        "label": " · ".join(told),
        "steps": record.steps,
        "video": video,
        "sheet": sheet,
        "hint": f"Not drawn. vla-eval render {folder.path} --episode {record.task.rpartition('/')[2]}/{record.trial}",
        "lines": [] if episode is None else _timeline(episode),
    }


def _timeline(episode: Episode) -> list[dict[str, Any]]:
    """For each predicate, the stretches of states [first, last + 1) in which it holds; for each object those in which it is held."""
    lines = []
    named = [(str(name), column) for name, column in zip(episode.predicate_names, episode.predicates.T, strict=True)]
    named += [(f"holds {name}", column) for name, column in zip(episode.object_names, episode.held.T, strict=True) if column.any()]
    for name, column in named:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], column.astype(np.int8), [0]])))
        lines.append({"name": name, "spans": edges.reshape(-1, 2).tolist()})
    return lines


def _media(folder: RunFolder, record: EpisodeRecord, out: Path) -> tuple[str | None, str | None]:
    """The episode's film and contact sheet inside `out`, by their relative addresses; None for what has not been drawn."""
    film = folder.episode_path(record.task, record.trial, ".mp4")
    if not film.is_file():
        return None, None
    media = out / "media" / folder.manifest.run_id
    media.mkdir(parents=True, exist_ok=True)
    copy, sheet = media / film.name, media / f"{film.stem}.jpg"
    if not copy.exists() or copy.stat().st_mtime_ns < film.stat().st_mtime_ns:
        copy.unlink(missing_ok=True)
        try:
            os.link(film, copy)
        except OSError:  # another file system
            shutil.copy2(film, copy)
        sheet.unlink(missing_ok=True)
    if not sheet.exists():
        contact_sheet(film, sheet)
    # A colon or a slash in a run's id would be an address of its own
    return tuple("/".join(["media", *map(_quoted, (folder.manifest.run_id, path.name))]) for path in (copy, sheet))  # type: ignore[return-value]


def contact_sheet(film: Path, sheet: Path) -> None:
    """Ten frames of a film, first and last included, as one JPEG. Raises BadRequest, naming the film, if it cannot be read."""
    part = sheet.with_name(f".{sheet.stem}.part.jpg")
    try:
        frames, _ = imageio_ffmpeg.count_frames_and_secs(str(film))
        wanted = np.unique(np.linspace(0, max(frames - 1, 0), SHEET_FRAMES).round().astype(int))
        chosen = "+".join(f"eq(n\\,{frame})" for frame in wanted)
        tiled = f"select={chosen},scale={SHEET_WIDTH}:-2,tile={SHEET_COLUMNS}x{-(-len(wanted) // SHEET_COLUMNS)}"
        command = [
            *(imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-loglevel", "error", "-protocol_whitelist", "file", "-i", str(film)),
            *("-vf", tiled, "-frames:v", "1", "-q:v", "4", "-y", str(part)),
        ]
        subprocess.run(command, capture_output=True, text=True, timeout=FFMPEG_SECONDS, check=True)
        part.replace(sheet)
    except (subprocess.SubprocessError, RuntimeError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise BadRequest(f"{film}: no contact sheet can be made of it ({said[-1] if said else error}); draw it again") from error
    finally:
        part.unlink(missing_ok=True)


def _success(found: Report) -> Figure:
    lines = [line for line in found.tasks if line.rate.value is not None]
    figure = Figure(figsize=(6, 1.2 + 0.28 * max(len(lines), 1)), layout="constrained")
    axes = figure.subplots()
    values = [100 * (line.rate.value or 0) for line in lines]
    axes.barh(range(len(lines)), values, color=COLOURS[0])
    if all(line.rate.wilson for line in lines) and lines:
        ends = 100 * np.array([line.rate.wilson for line in lines])
        axes.errorbar(values, range(len(lines)), xerr=np.abs(ends.T - values), fmt="none", ecolor="#222222", capsize=2)
    _task_axis(axes, [f"{line.task.rpartition('/')[2]} ({line.rate.k}/{line.rate.n})" for line in lines])
    axes.set(xlim=(0, 100), xlabel="success, % (95 % Wilson interval)")
    return figure


def _failures(counts: Mapping[str, Counter[Bin]]) -> Figure:
    figure = Figure(figsize=(6, 1.8 + 0.28 * max(len(counts), 1)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(counts))
    for bin_, colour in zip(Bin, COLOURS, strict=True):
        width = np.array([row[bin_] for row in counts.values()])
        if width.any():
            axes.barh(range(len(counts)), width, left=left, label=bin_.value, color=colour)
            left += width
    _task_axis(axes, [task.rpartition("/")[2] for task in counts])
    axes.set(xlabel="episodes")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return figure


def _task_axis(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.invert_yaxis()
    axes.set_ylabel("task")
    axes.spines[["top", "right"]].set_visible(False)


def _latency(totals: Sequence[float], deadline: float) -> Figure:
    """Answers by their time, by its logarithm where they differ tenfold; `deadline` in seconds is shown if one came later."""
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    ms = 1e3 * np.array(totals)
    if 0 < 10 * ms.min() < ms.max():
        axes.hist(ms, bins=np.geomspace(ms.min(), ms.max(), 41).tolist(), color=COLOURS[0])
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if ms.max() > 1e3 * ms.min() else (1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.hist(ms, bins="auto" if len(totals) < 10_000 else 100, color=COLOURS[0])
    found = percentiles(totals)
    assert found is not None
    for name, value, colour in (("p50", found.p50, COLOURS[2]), ("p90", found.p90, COLOURS[3]), ("p99", found.p99, COLOURS[1])):
        axes.axvline(1e3 * value, color=colour, label=f"{name} {_ms(value)}")
    if max(totals) > deadline:
        axes.axvline(1e3 * deadline, color="#222222", linestyle="--", label=f"deadline {_ms(deadline)}")
    axes.set(xlabel=f"ms, {found.n} answers", ylabel="answers")
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _deadline(found: Report) -> float:
    """Seconds until the steps executed from an answer have passed."""
    return found.replan / (found.latency.control_hz if found.latency else CONTROL_HZ)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _totals(episode: Episode | None) -> list[float]:
    """Seconds of each of an episode's answers."""
    stages = [] if episode is None else [str(stage) for stage in episode.request_stages]
    return [] if episode is None or "total" not in stages else episode.request_seconds[:, stages.index("total")].tolist()


def _tables(found: Report, bins: Mapping[tuple[str, int], Bin]) -> list[dict[str, Any]]:
    heads = ["task", "k/n", "success", "95 % Wilson", "95 % exact", "errors", "not played"]
    rows = [_row(line.task, line.rate, line.error, line.missing) for line in found.tasks]
    missing = found.planned - found.success - found.failure - found.error
    rows.append(_row("all episodes (micro)", found.rate, found.error, missing))
    suite = [
        ["rate, every episode the same (micro)", percent(found.rate.value), f"n = {found.rate.n}"],
        ["rate, every task the same (macro)", percent(found.macro), f"{len(found.tasks)} tasks"],
        *(
            [["95 % anytime interval", between(found.anytime), ""]]
            if found.anytime
            else [
                ["95 % interval of these tasks (Wilson)", between(found.rate.wilson), ""],
                ["95 % interval of tasks like these (clustered)", between(found.clustered), ""],
            ]
        ),
    ]
    tables = [
        {"title": "Suite", "heads": ["", "", ""], "rows": suite},
        {"title": "Tasks", "heads": heads, "rows": rows},
    ]
    if bins:
        counts = by_task(bins)
        columns = [bin_ for bin_ in Bin if any(bin_ in row for row in counts.values())]
        rows = [[task, *(str(row[bin_]) for bin_ in columns)] for task, row in counts.items()]
        tables.append({"title": "Failures and errors", "heads": ["task", *map(str, columns)], "rows": rows})
    if found.latency:
        rows = [[stage, str(p.n), *(f"{1e3 * value:.2f}" for value in (p.p50, p.p90, p.p99))] for stage, p in found.latency.stages.items()]
        rows.append([f"in time at {found.latency.control_hz:g} Hz", percent(found.latency.in_time), "", "", ""])
        tables.append({"title": "Latency, ms", "heads": ["stage", "n", "p50", "p90", "p99"], "rows": rows})
    return tables


def _row(name: str, rate: Any, error: int, missing: int) -> list[str]:
    return [name, f"{rate.k}/{rate.n}", percent(rate.value), between(rate.wilson), between(rate.exact), str(error), str(missing)]


def _plot(out: Path, name: str, alt: str, figure: Figure) -> tuple[str, str]:
    part = out / f".{name}.part"
    with mpl.rc_context(PLOT_RC):
        figure.savefig(part, format="svg", metadata={"Date": None})
    part.replace(out / name)
    return name, alt


def _arrays(folder: RunFolder, record: EpisodeRecord) -> Episode | None:
    if record.outcome == "error":
        return None
    try:
        return folder.episode(record.task, record.trial)
    except BadRequest:
        return None  # the bin says that they are missing


def _instruction(folder: RunFolder, task: str) -> str:
    return str(folder.manifest.protocol.get("tasks", {}).get(task, {}).get("instruction", ""))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)


def _asset(name: str) -> Markup:
    return Markup((HERE / name).read_text(encoding="utf-8"))  # noqa: S704  our own file, nothing of a run


def _write(path: Path, text: str) -> Path:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return path


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn what the disk says into one sentence."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        with suppress(OSError):
            (out / "index.html").unlink(missing_ok=True)  # a page whose parts are missing is worse than none
        raise BadRequest(f"{out}: the pages cannot be written ({error.strerror or error}); choose another folder or make room") from error
