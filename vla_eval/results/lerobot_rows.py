"""The rows of one episode, from its parquet file, with everything that is wrong with them. N rows, D dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .lerobot_meta import Dataset, Feature
from .lerobot_rules import Finding, Steps

Rows = Mapping[str, NDArray[Any]]  # column -> [N] or [N, D]; a column with a fault that hides its numbers is left out
ROWS_LIMIT = 1_000_000  # of one episode: 14 hours at 20 Hz
BYTES_LIMIT = 1 << 30
_LFS = b"version https://git-lfs"
_ARROW_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def read_rows(dataset: Dataset, index: int, names: frozenset[str] | None = None) -> Steps[Rows | None]:
    """Every declared column of an episode (or those of `names`). None if the file cannot be read.

    What the file claims to hold is compared with the limits before anything is decoded.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = dataset.data(index)
    path = dataset.root / file
    if fault := not_there(path):
        yield Finding("data-missing", file, fault)
        return None
    if not path.is_file():
        yield Finding("data-unreadable", file, "is no file")
        return None
    if is_pointer(dataset, file):
        yield Finding("data-unreadable", file, "is a Git LFS pointer; fetch the data with `git lfs pull`")
        return None
    wanted = {name: feature for name, feature in dataset.columns.items() if names is None or name in names}
    try:
        with pq.ParquetFile(path) as parquet:
            about, names_there = parquet.metadata, parquet.schema_arrow.names
            present = set(names_there)
            fault = _too_large(about)
            if len(present) < len(names_there):
                fault = f"has two columns {next(name for name in names_there if names_there.count(name) > 1)!r}"
            if fault:
                yield Finding("data-unreadable", file, fault)
                return None
            types = {field.name: field.type for field in parquet.schema_arrow}
            # Text is nobody's input here, and a dictionary of a few bytes can make gigabytes of it: only columns of numbers are decoded.
            table = parquet.read([name for name in wanted if name in present and _holds_numbers(types[name])], use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        yield Finding("data-unreadable", file, f"no parquet file that can be read ({' '.join(str(error).split())[:200]})")
        return None
    if names is None and (extra := sorted(present - set(dataset.features))):
        yield Finding("column-undeclared", file, f"column {extra[0]!r} is not in info.json's features; leave it out or declare it")
    sliced = {group.column for groups in dataset.groups.values() for group in groups.values()}
    rows: dict[str, NDArray[Any]] = {}
    for name, feature in wanted.items():
        if name not in present:
            yield Finding("column-missing", file, f"column {name!r} is missing; it has {', '.join(sorted(present))}")
            continue
        column = table.column(name) if name in table.column_names else pa.chunked_array([], types[name])
        numbers = yield from _numbers(name, feature, column, file, is_vector=feature.width > 1 or name in sliced)
        if numbers is not None:
            rows[name] = numbers
    return rows


def not_there(path: Path) -> str | None:
    """Why a path names nothing, if so."""
    try:
        return None if path.exists() else "is not there"
    except (OSError, ValueError) as error:
        return f"cannot be there ({getattr(error, 'strerror', None) or error})"


def is_pointer(dataset: Dataset, file: str) -> bool:
    """Whether a file is what Git LFS leaves where the data should be."""
    with (dataset.root / file).open("rb") as opened:
        return opened.read(len(_LFS)) == _LFS


def _too_large(about: Any) -> str | None:
    chunks = [about.row_group(i).column(j) for i in range(about.num_row_groups) for j in range(about.num_columns)]
    claimed = max(sum(8 * chunk.num_values for chunk in chunks), sum(chunk.total_uncompressed_size for chunk in chunks))
    if about.num_rows > ROWS_LIMIT or claimed > BYTES_LIMIT:
        return f"claims {about.num_rows} rows and {claimed} bytes; an episode has at most {ROWS_LIMIT} rows and {BYTES_LIMIT} bytes here"
    return None


def _numbers(name: str, feature: Feature, column: Any, file: str, *, is_vector: bool) -> Steps[NDArray[Any] | None]:
    import pyarrow as pa

    chunks = [chunk.storage if isinstance(chunk.type, pa.ExtensionType) else chunk for chunk in column.chunks]
    cells = pa.concat_arrays(chunks) if chunks else pa.array([], column.type)
    kind = cells.type
    if column.null_count:
        yield Finding(
            "not-finite", file, f"{name} holds nothing in {column.null_count} row(s), this the first", _first(~np.asarray(cells.is_valid()))
        )
        return None
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_vector:
        if _is_number(kind):
            return (yield from _plain(name, feature, cells, file, width=1))
        if feature.dtype in ("string", "str", "language"):  # text is nobody's input here
            return None
        yield Finding("column-dtype", file, f"{name} is {kind}, but info.json says {feature.dtype}")
        return None
    if _is_number(kind):
        yield Finding("scalar-cells", file, f"{name} holds single numbers ({kind}), but a group slices it: store arrays of {feature.width}")
        return None
    if not nested or not _is_number(kind.value_type):
        yield Finding("list-cells", file, f"{name} is {kind}; its cells want to be flat arrays of {feature.width} numbers")
        return None
    widths = np.full(len(cells), kind.list_size) if pa.types.is_fixed_size_list(kind) else np.asarray(cells.value_lengths())
    wrong = np.asarray(widths != feature.width)
    if wrong.any():
        row = _first(wrong)
        yield Finding(
            "cell-width", file, f"{name} is {widths[row]} wide in {wrong.sum()} row(s), this the first; info.json says {feature.width}", row
        )
        return None
    return (yield from _plain(name, feature, cells.flatten(), file, width=feature.width))


def _plain(name: str, feature: Feature, values: Any, file: str, *, width: int) -> Steps[NDArray[Any] | None]:
    """Flat numbers as [N] or [N, width], if they are finite and of the declared type."""
    stored = _ARROW_NAMES.get(str(values.type), str(values.type))
    if stored != feature.dtype:
        yield Finding("column-dtype", file, f"{name} is {stored}, but info.json says {feature.dtype}")
        return None
    if values.null_count:
        row = _first(~np.asarray(values.is_valid())) // width
        yield Finding("not-finite", file, f"{name} holds nothing in a cell", row)
        return None
    numbers = np.asarray(values)
    shaped = numbers.reshape(-1, width) if width > 1 or feature.shape not in ((), (1,)) else numbers
    if feature.is_float:
        with np.errstate(over="ignore"):  # training is in float32: what is infinite there is infinite
            bad = ~np.isfinite(numbers.astype(np.float32))
        if bad.any():
            rows = bad.reshape(-1, width).any(axis=1)
            row = _first(rows)
            where = "" if width == 1 else f"[{_first(bad.reshape(-1, width)[row])}]"
            yield Finding("not-finite", file, f"{name}{where} is not a finite number in {rows.sum()} row(s), this the first", row)
            return None
    return shaped


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _holds_numbers(kind: Any) -> bool:
    """Numbers, or lists of them, however deep."""
    import pyarrow as pa

    while pa.types.is_nested(kind) and kind.num_fields == 1:
        kind = kind.field(0).type
    return _is_number(kind)


def _first(mask: Any) -> int:
    return int(np.argmax(mask))
