"""Streaming statistics against numpy on all rows at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vla_eval.results.lerobot_meta import Feature, open_dataset
from vla_eval.results.lerobot_stats import FIELDS, Summary, fingerprint, write_stats
from vla_eval.types import BadRequest

FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)


def summarised(rows: np.ndarray[Any, Any], parts: int) -> dict[str, list[float]]:
    """The rows fed in pieces, other pieces the second time."""
    summary = Summary(rows.shape[1])
    for part in np.array_split(rows, parts):
        summary.add(part)
    for part in np.array_split(rows, parts + 1):
        summary.refine(part)
    return summary.result()


def at_once(rows: np.ndarray[Any, Any]) -> Mapping[str, np.ndarray[Any, Any]]:
    """The reference's formulas, in float64."""
    wide = rows.astype(np.float64)
    q01, q99 = (np.quantile(wide, q, axis=0) for q in (0.01, 0.99))
    return {"mean": wide.mean(0), "std": wide.std(0), "min": wide.min(0), "max": wide.max(0), "q01": q01, "q99": q99}


@given(arrays(np.float32, st.tuples(st.integers(1, 230), st.integers(1, 3)), elements=FLOATS), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_statistics_in_pieces_are_those_of_all_rows_at_once(rows: np.ndarray[Any, Any], parts: int) -> None:
    found, wanted = summarised(rows, parts), at_once(rows)
    assert list(found) == list(FIELDS)
    largest = np.abs(rows).max(0).astype(np.float64)
    for field in FIELDS:
        # One rounding to float32 (2⁻²⁴); mean and deviation are float64 sums in another order, which cancel to 1e-13 of the largest.
        slack = np.abs(wanted[field]) * 2.0**-23 + largest * 1e-7 * (field == "std") + largest * 1e-13 + 1e-45
        assert (np.abs(np.array(found[field]) - wanted[field]) <= slack).all(), field


@pytest.mark.parametrize("count", [1, 2, 50, 100, 101, 102, 5001])
def test_quantiles_are_exact_whatever_the_distribution(count: int) -> None:
    rng = np.random.default_rng(count)
    rows = np.stack(
        [
            rng.normal(size=count), rng.integers(0, 2, count), np.full(count, 0.3), -np.abs(rng.normal(size=count)) * 1e-3,
            rng.choice([-0.0, 0.0], count), 1 + rng.normal(size=count) * 1e-6,  # many values share their upper bits
        ],
        axis=1,
    ).astype(np.float32)  # fmt: skip
    found = summarised(rows, 3)
    for field, q in (("q01", 0.01), ("q99", 0.99)):
        assert found[field] == np.quantile(rows.astype(np.float64), q, axis=0).astype(np.float32).tolist()


def test_a_wrong_quantile_method_would_show() -> None:
    rows = np.random.default_rng(0).normal(size=(150, 4)).astype(np.float32)
    found = summarised(rows, 2)
    assert found["q01"] != np.quantile(rows, 0.01, axis=0, method="nearest").tolist()
    assert found["std"] != pytest.approx(rows.astype(np.float64).std(0, ddof=1), rel=1e-4)


def test_statistics_have_six_fields_for_float_columns_only_and_lists_as_long_as_the_feature(dataset: Path) -> None:
    stats = json.loads((dataset / "meta/stats.json").read_text())
    assert {name: {field: len(values) for field, values in fields.items()} for name, fields in stats.items()} == {
        "observation.state": dict.fromkeys(FIELDS, 8),
        "action": dict.fromkeys(FIELDS, 7),
        "timestamp": dict.fromkeys(FIELDS, 1),
    }


def test_statistics_written_anew_are_those_of_the_rows(dataset: Path) -> None:
    path = dataset / "meta/stats.json"
    before = path.read_bytes()
    path.write_text("{}")
    write_stats(open_dataset(dataset))
    assert path.read_bytes() == before
    rows = [np.stack(pq.read_table(file).column("action").to_numpy()) for file in sorted(dataset.glob("data/*/*.parquet"))]
    assert (
        json.loads(before)["action"]["q99"]
        == np.quantile(np.concatenate(rows).astype(np.float64), 0.99, axis=0).astype(np.float32).tolist()
    )


def test_fingerprints_are_kept_up_where_there_were_any(dataset: Path) -> None:
    path = dataset / "meta/stats.json"
    path.write_text(json.dumps({"__fingerprints__": {"action": "stale"}}))
    write_stats(open_dataset(dataset))
    # As NVIDIA's own LIBERO sample has them for these names, types and shapes.
    assert json.loads(path.read_text())["__fingerprints__"] == {
        "observation.state": "sha256:cdd88a979a931bb5fa6173e45c09227ad312fdce23b82d46bc5b8804625e20f2",
        "action": "sha256:d2f8f5abe287ccf4b95d35ca2e77bbd90271614529d6a07400cf6e1744952d42",
        "timestamp": "sha256:f1ad41afdf47f1d901e4135b7d796d673d4aab32fba5472e282251bdaa1df87a",
    }
    assert fingerprint("action", Feature("float32", (6,))) != fingerprint("action", Feature("float32", (7,)))


def test_rows_without_statistics_are_refused_and_the_old_file_stays(dataset: Path) -> None:
    (dataset / "data/chunk-000/episode_000001.parquet").write_bytes(b"PAR1")
    before = (dataset / "meta/stats.json").read_bytes()
    with pytest.raises(BadRequest, match=r"episode_000001\.parquet: no parquet file"):
        write_stats(open_dataset(dataset))
    assert (dataset / "meta/stats.json").read_bytes() == before
