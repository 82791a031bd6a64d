"""The global statistics GR00T normalises by, over datasets of any size. N rows, D dimensions.

Two passes over the rows, at most 2.5 MB a dimension whatever N is. Minimum, maximum and both order statistics of each quantile are
exact, since float32 numbers sorted by their bits are sorted by value: the first pass counts the upper 16 bits, the second the lower 16
bits of the few values that matter. Between two neighbours a quantile is interpolated linearly, as `numpy.quantile` does, in float64. Mean
and standard deviation (the population's) are accumulated in float64. Every number is rounded to float32 once: it is off by half a unit in
the last place, where the reference, which adds in float32, may be off by N units.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import BadRequest, Progress, silent
from .folder import write_json
from .lerobot_meta import STATS, Dataset, Feature, read_object
from .lerobot_rows import read_rows
from .lerobot_rules import Finding, Steps, collected, settled

FIELDS = ("mean", "std", "min", "max", "q01", "q99")
QUANTILES: Mapping[str, float] = {"q01": 0.01, "q99": 0.99}
_LARGEST = float(np.finfo(np.float64).max)
FINGERPRINTS = "__fingerprints__"

Statistics = dict[str, dict[str, list[float]]]  # feature -> field -> [D]


class Summary:
    """Statistics of one column: `add` all its rows, then `refine` with all of them again, then `result`."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean, self.squares = np.zeros(width), np.zeros(width)  # [D] float64; squares: sum of squared distances from the mean
        self.low, self.high = np.full(width, np.inf), np.full(width, -np.inf)
        self._upper = np.zeros((width, 1 << 16), np.int64)  # how many begin with these 16 bits; once refining, with these or lower
        self._lower: dict[tuple[int, int], NDArray[np.int64]] = {}  # (dimension, upper bits) -> how many end with these

    def add(self, values: NDArray[Any]) -> None:
        """First pass. [N] or [N, D], finite."""
        rows = _float32(values)
        if not len(rows):
            return
        count, mean = len(rows), rows.mean(axis=0, dtype=np.float64)
        total, shift = self.count + count, mean - self.mean
        self.squares += np.square(rows - mean).sum(axis=0) + np.square(shift) * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total
        self.low, self.high = np.minimum(self.low, rows.min(axis=0)), np.maximum(self.high, rows.max(axis=0))
        upper = (_sortable(rows) >> 16).astype(np.int64) + (np.arange(rows.shape[1]) << 16)
        np.add.at(self._upper.reshape(-1), upper.reshape(-1), 1)

    def refine(self, values: NDArray[Any]) -> None:
        """Second pass, with the same rows."""
        bits = _sortable(_float32(values))
        if not self._lower:
            np.cumsum(self._upper, axis=1, out=self._upper)
            wanted = {(d, self._bin(d, rank)[0]) for d in range(len(self.mean)) for q in QUANTILES.values() for rank in self._ranks(q)}
            self._lower = {key: np.zeros(1 << 16, np.int64) for key in wanted}
        for (d, upper), counts in self._lower.items():
            column = bits[:, d]
            np.add.at(counts, column[column >> 16 == upper] & 0xFFFF, 1)

    def result(self) -> dict[str, list[float]]:
        """Field -> [D], every number a float32's."""
        fields = {"mean": self.mean, "std": np.sqrt(self.squares / self.count), "min": self.low, "max": self.high}
        for name, q in QUANTILES.items():
            fields[name] = np.array([self._quantile(d, q) for d in range(len(self.mean))])
        return {name: _float32(values)[:, 0].tolist() for name, values in fields.items()}

    def _ranks(self, q: float) -> tuple[int, int]:
        below = math.floor((self.count - 1) * q)
        return below, min(below + 1, self.count - 1)

    def _bin(self, d: int, rank: int) -> tuple[int, int]:
        """The upper bits of the value of that rank, and its rank among the values that share them."""
        running = self._upper[d]
        upper = int(np.searchsorted(running, rank, side="right"))
        return upper, rank - (int(running[upper - 1]) if upper else 0)

    def _value(self, d: int, rank: int) -> float:
        upper, inside = self._bin(d, rank)
        counts = self._lower[d, upper].reshape(256, 256)  # by the first and the last eight of the lower bits
        running = counts.sum(axis=1).cumsum()
        row = int(np.searchsorted(running, inside, side="right"))
        inside -= int(running[row - 1]) if row else 0
        lower = row << 8 | int(np.searchsorted(counts[row].cumsum(), inside, side="right"))
        key = np.uint32(upper << 16 | lower)
        bits = key ^ np.uint32(0x80000000) if key >> np.uint32(31) else ~key
        return float(np.array(bits, np.uint32).view(np.float32))

    def _quantile(self, d: int, q: float) -> float:
        below, above = (self._value(d, rank) for rank in self._ranks(q))
        part = (self.count - 1) * q % 1.0
        return below + (above - below) * part if part < 0.5 else above - (above - below) * (1.0 - part)


def compute(dataset: Dataset, progress: Progress = silent) -> Statistics:
    """The statistics of every float column, from the rows. Raises BadRequest for rows that have none."""
    names = frozenset(name for name, feature in dataset.columns.items() if feature.is_float)
    summaries = {name: Summary(dataset.features[name].width) for name in names}
    total = 2 * len(dataset.episodes)
    for refining in (False, True):
        for number, record in enumerate(dataset.episodes, refining * len(dataset.episodes)):
            progress("statistics", number, total)
            rows = settled(read_rows(dataset, record.index, names), dataset.root)
            assert rows is not None
            for name, summary in summaries.items():
                (summary.refine if refining else summary.add)(rows[name])
    if not dataset.episodes:
        raise BadRequest(f"{dataset.root} has no episodes, so no statistics either")
    return {name: summaries[name].result() for name in dataset.columns if name in names}


def write_stats(dataset: Dataset, progress: Progress = silent) -> Statistics:
    """Compute meta/stats.json anew, in one piece. Fingerprints are kept up if the old file had them."""
    found = compute(dataset, progress)
    data: dict[str, Any] = dict(found)
    _, old = collected(read_object(dataset.root, STATS))
    if old is not None and FINGERPRINTS in old:
        data[FINGERPRINTS] = {name: fingerprint(name, dataset.features[name]) for name in found}
    write_json(dataset.root / STATS, data)
    return found


def fingerprint(name: str, feature: Feature) -> str:
    """What newer GR00T versions store beside a feature's statistics; it covers name, type and shape, not the numbers."""
    canonical = json.dumps({"feature": name, "dtype": feature.dtype, "shape": list(feature.shape)}, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def read_stats(dataset: Dataset) -> Steps[Statistics]:
    """meta/stats.json, as far as it has the shape that the loader slices."""
    data = yield from read_object(dataset.root, STATS)
    found: Statistics = {}
    if data is None:
        return found
    prints = data.pop(FINGERPRINTS, {})
    floats = {name: feature for name, feature in dataset.columns.items() if feature.is_float}
    for name in data:
        if name not in floats:
            yield Finding("stats-unused", STATS, f"{name!r} is no float feature of info.json; nothing reads its statistics")
    for name, feature in floats.items():
        entry = data.get(name)
        if not isinstance(entry, dict):
            yield Finding("stats-feature", STATS, f"{name!r} is missing; `vla-eval dataset stats` writes it")
            continue
        found[name] = yield from _entry(name, feature.width, entry)
        if isinstance(prints, dict) and name in prints and str(prints[name]).removeprefix("sha256:") != fingerprint(name, feature)[7:]:
            yield Finding("stats-fingerprint", STATS, f"the fingerprint of {name!r} is not that of its dtype and shape")
    return found


def disagreements(name: str, said: Mapping[str, list[float]], summary: Summary) -> Steps[None]:
    """Where stats.json and the rows part.

    Minimum and maximum to the float32. The rest to 1e-4 of the range, plus what a float32 running sum may lose over N rows (N · 2⁻²⁴ of the
    largest value), since that is how the reference adds.
    """
    rows = summary.result()
    low, high = np.array(rows["min"]), np.array(rows["max"])
    largest = np.maximum(np.abs(low), np.abs(high))
    for field in FIELDS:
        if field not in said:
            continue
        slack = 2e-6 * largest + 1e-9
        if field not in ("min", "max"):
            slack += 1e-4 * (high - low) + summary.count * 2.0**-24 * largest
        off = np.abs(np.array(said[field]) - np.array(rows[field])) > slack
        if off.any():
            d = int(np.argmax(off))
            text = f"{name}.{field}[{d}] is {said[field][d]:.6g}, but the rows give {rows[field][d]:.6g}"
            more = f" (and {off.sum() - 1} more of its dimensions)" if off.sum() > 1 else ""
            yield Finding("stats-disagree", STATS, f"{text}{more}; `vla-eval dataset stats` writes them anew")


def _entry(name: str, width: int, entry: Mapping[str, Any]) -> Steps[dict[str, list[float]]]:
    found: dict[str, list[float]] = {}
    for field in entry:
        if field not in FIELDS:
            yield Finding("stats-extra-field", STATS, f"{name}.{field} is none of {', '.join(FIELDS)}; the loader slices it like a vector")
    for field in FIELDS:
        values = entry.get(field)
        if field not in entry:
            yield Finding("stats-field", STATS, f"{name}.{field} is missing; `vla-eval dataset stats` writes it")
        elif (
            not isinstance(values, list)
            or len(values) != width
            or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        ):
            told = f"a list of {len(values)}" if isinstance(values, list) else repr(values)[:40]
            yield Finding("stats-width", STATS, f"{name}.{field} is {told}; it wants a list of {width} numbers")
        elif not all(abs(v) <= _LARGEST for v in values):  # NaN is not, nor is a whole number too long for a float
            yield Finding("stats-not-finite", STATS, f"{name}.{field} holds NaN or infinity")
        else:
            found[field] = [float(v) for v in values]
    return found


def _float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """[N, D] float32, as the reference computes in; minus zero becomes zero, so that both sort alike."""
    return values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float32) + np.float32(0)


def _sortable(rows: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Unsigned numbers in the order of the float32 values: the sign bit turned, and all others too below zero."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
