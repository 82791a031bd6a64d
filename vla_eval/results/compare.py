"""Two runs, episode by episode: is B worse than A, by how much, and which episodes tell them apart?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..types import BadRequest, EpisodeRecord, Outcome, RunManifest
from .difference import Difference, differences
from .folder import RunFolder
from .report import cell, percent, task_order
from .stats import Paired, Verdict, paired, verdict

MARGIN = 0.05


class Disagreement(NamedTuple):
    """An episode that one policy solved and the other did not."""

    task: str
    trial: int
    a: Outcome
    b: Outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A on the episodes that both played."""

    a: RunManifest
    b: RunManifest
    pairs: Paired
    verdict: Verdict
    errors: int  # pairs with an error in an arm: in no count, and they keep the verdict open
    unpaired: int  # episodes that only one run has
    disagreements: Sequence[Disagreement]
    differences: Sequence[Difference]

    @property
    def sentence(self) -> str:
        """The verdict for a person."""
        about = f"{_name(self.b)} against {_name(self.a)}, margin {100 * self.verdict.margin:g} points"
        if self.verdict.word != "undecided":
            return f"{about}: {self.verdict.word}."
        if self.errors:
            need = f"play the {self.errors} pairs with an error first (vla-eval run --resume)"
        else:
            need = f"needs about {self.verdict.more_pairs} more pairs to be found not worse, if it is in truth as good"
        low, high = self.pairs.interval
        seen = f" It is worse by something, {_points(-high)[1:]} to {_points(-low)[1:]} points." if high < 0 else ""
        return f"{about}: undecided; {need}.{seen}"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "a": {"run": self.a.run_id, "policy": self.a.policy, "bundle": self.a.bundle, "replan": self.a.replan},
            "b": {"run": self.b.run_id, "policy": self.b.policy, "bundle": self.b.bundle, "replan": self.b.replan},
            "suite": self.a.suite,
            "pairs": {name: value for name, value in asdict(self.pairs).items() if name not in ("difference", "interval", "p")},
            "difference": {"value": self.pairs.difference, "interval": list(self.pairs.interval), "p": self.pairs.p},
            "verdict": {"word": self.verdict.word, "margin": self.verdict.margin, "more_pairs": self.verdict.more_pairs},
            "errors": self.errors,
            "unpaired": self.unpaired,
            "disagreements": [episode._asdict() for episode in self.disagreements],
            "differences": [difference._asdict() for difference in self.differences],
        }

    def markdown(self) -> str:
        """For a person."""
        p = self.pairs
        low, high = p.interval
        lines = [
            f"# {cell(_name(self.b))} (B) against {cell(_name(self.a))} (A) on {cell(self.a.suite)}",
            "",
            f"**{self.sentence}**",
            "",
            "| | B succeeded | B failed |",
            "|---|---:|---:|",
            f"| A succeeded | {p.both} | {p.only_a} |",
            f"| A failed | {p.only_b} | {p.neither} |",
            "",
            f"{p.n} pairs. A {percent((p.both + p.only_a) / p.n)}, B {percent((p.both + p.only_b) / p.n)} of n = {p.n}; "
            f"difference {_points(p.difference)} points, 95 % interval {_points(low)} … {_points(high)}; exact McNemar p = {p.p:.3g}.",
            *([f"{self.errors} pairs have an error in an arm and are not counted."] if self.errors else []),
            *([f"{self.unpaired} episodes were played by one run only and are not counted."] if self.unpaired else []),
            *(["One of the two used privileged simulator state."] if self.a.privileged != self.b.privileged else []),
        ]
        if self.disagreements:
            lines += ["", "| episodes that disagree | A | B |", "|---|---|---|"]
            lines += [f"| {cell(task)}, trial {trial} | {a} | {b} |" for task, trial, a, b in self.disagreements]
        if self.differences:
            lines += ["", *_difference_table(self.differences)]
        return "\n".join(lines) + "\n"


def compare(a: RunFolder, b: RunFolder, margin: float = MARGIN) -> Comparison:
    """Pair the runs by (task, trial, seed). Raises BadRequest, naming what differs, when equal numbers are not equal episodes."""
    if a.manifest.run_id == b.manifest.run_id:
        raise BadRequest(f"{a.path} and {b.path} are the same run, {a.manifest.run_id}; give two different ones")
    for folder in (a, b):
        if folder.manifest.stop:
            raise BadRequest(
                f"{folder.path} was played under the stop rule {folder.manifest.stop['rule']!r}, so its length depends on its outcomes "
                "and a comparison at fixed length would mislead; play it without --stop-when"
            )
    found = differences(a.manifest, b.manifest)
    if separating := [difference for difference in found if difference.separates]:
        told = "; ".join(f"{d.key}: {_short(d.a)} against {_short(d.b)}" for d in separating)
        raise BadRequest(f"{a.path} and {b.path} cannot be paired, their episodes differ in {told}")
    records_a, records_b = _by_episode(a), _by_episode(b)
    shared = sorted(records_a.keys() & records_b.keys(), key=lambda key: (task_order(key[0]), key[1]))
    if not shared:
        raise BadRequest(f"{a.path} and {b.path} have no episode in common: nothing can be paired")
    outcomes = {key: (records_a[key].outcome, records_b[key].outcome) for key in shared}
    counted = {key: pair for key, pair in outcomes.items() if "error" not in pair}
    if not counted:
        raise BadRequest(
            f"{a.path} and {b.path}: every one of the {len(shared)} pairs has an error in an arm; vla-eval run --resume plays them"
        )
    result = paired([(one == "success", other == "success") for one, other in counted.values()])
    errors = len(outcomes) - len(counted)
    return Comparison(
        a=a.manifest,
        b=b.manifest,
        pairs=result,
        verdict=verdict(result, margin, unknown=errors),
        errors=errors,
        unpaired=len(records_a.keys() ^ records_b.keys()),
        disagreements=[Disagreement(*key, *pair) for key, pair in counted.items() if pair[0] != pair[1]],
        differences=found,
    )


def difference_markdown(a: RunManifest, b: RunManifest) -> str:
    """`compare --diff`: every difference of two manifests, as a table."""
    found = differences(a, b)
    if not found:
        return f"{a.run_id} and {b.run_id} differ in nothing but their outcomes.\n"
    return "\n".join(_difference_table(found)) + "\n"


def _by_episode(folder: RunFolder) -> dict[tuple[str, int], EpisodeRecord]:
    return {(record.task, record.trial): record for record in folder.records()}  # the seed is the manifest's, and equal


def _difference_table(found: Sequence[Difference]) -> list[str]:
    rows = [f"| {cell(d.key)} | {cell(_short(d.a))} | {cell(_short(d.b))} | {'yes' if d.separates else ''} |" for d in found]
    return ["| manifests differ in | A | B | other episodes |", "|---|---|---|---|", *rows]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _name(manifest: RunManifest) -> str:
    return f"{manifest.policy}" + (f" {manifest.bundle[:12]}" if manifest.bundle else "") + f" replan {manifest.replan}"


def _points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f}"
