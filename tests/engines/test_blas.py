"""What cuBLASLt is told of a product: a library that is not there, which has only names that the real binding has, multiplies as told."""

from __future__ import annotations

import ctypes
import itertools
import json
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines import few_rows, many_rows
from vla_eval.engines.card import Buffer
from vla_eval.engines.many_rows import WORKSPACE, ManyRows

API = json.loads((Path(__file__).parents[1] / "golden" / "cublaslt_api.json").read_text())  # names of nvmath.bindings.cublasLt
KINDS: dict[int, Any] = {2: np.float16, 14: ml_dtypes.bfloat16}  # of cudaDataType
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
Array = NDArray[Any]
ENUMERATIONS: Any = SimpleNamespace(**{name: IntEnum(name, members) for name, members in API["enumerations"].items()})


def at(pointer: int, count: int, kind: Any) -> Array:
    """The numbers that lie there."""
    array: Array = np.ctypeslib.as_array((ctypes.c_ubyte * (count * np.dtype(kind).itemsize)).from_address(pointer)).view(kind)
    return array


class Blas:
    """Column by column, as the library's manual has it."""

    matmul_heuristic_result_dtype = np.dtype([("algo", "<u8", 8), ("workspace_size", "<u8"), ("rest", "<i4", 6)])

    def __init__(self) -> None:
        vars(self).update(vars(ENUMERATIONS))
        self.made: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def _new(self, thing: Any) -> int:
        handle = next(self._handles)
        self.made[handle] = thing
        return handle

    def create(self) -> int:
        return self._new("library")

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._new({})

    def matmul_desc_set_attribute(self, made: int, attribute: int, value: int, size: int) -> None:
        self.made[made][ENUMERATIONS.MatmulDescAttribute(attribute).name] = int(at(value, 1, {4: np.int32, 8: np.int64}[size])[0])

    def matrix_layout_create(self, kind: int, rows: int, columns: int, between: int) -> int:
        return self._new({"kind": KINDS[kind], "rows": rows, "columns": columns, "between": between})

    def matrix_layout_set_attribute(self, made: int, attribute: int, value: int, size: int) -> None:
        self.made[made][ENUMERATIONS.MatrixLayoutAttribute(attribute).name] = int(at(value, 1, {4: np.int32, 8: np.int64}[size])[0])

    def matmul_preference_create(self) -> int:
        return self._new({})

    def matmul_preference_set_attribute(self, made: int, attribute: int, value: int, size: int) -> None:
        self.made[made][ENUMERATIONS.MatmulPreferenceAttribute(attribute).name] = int(at(value, 1, {8: np.int64}[size])[0])

    def matmul_algo_get_heuristic(
        self, handle: int, made: int, a: int, b: int, c: int, d: int, wanted: int, most: int, found: int, count: int
    ) -> None:
        assert self.made[wanted] == {"MAX_WORKSPACE_BYTES": WORKSPACE}
        assert most == 1
        at(found, 8, np.uint64)[:] = 7
        at(count, 1, np.int32)[0] = 1

    def matmul(
        self, handle: int, made: int, alpha: int, a: int, a_layout: int, b: int, b_layout: int, beta: int, c: int, c_layout: int, d: int,
        d_layout: int, algorithm: int, workspace: int, size: int, stream: int,
    ) -> None:  # fmt: skip
        said = self.made[made]
        assert (at(algorithm, 8, np.uint64) == 7).all()
        assert (size, stream) == (WORKSPACE, 77)
        one, zero = at(alpha, 1, np.float32)[0], at(beta, 1, np.float32)[0]
        for batch in range(self.made[d_layout].get("BATCH_COUNT", 1)):

            def matrix(pointer: int, layout: int, batch: int = batch) -> Array:
                m = self.made[layout]
                first = pointer + batch * m.get("STRIDED_BATCH_OFFSET", 0) * 2
                return at(first, m["columns"] * m["between"], m["kind"]).reshape(m["columns"], m["between"])[:, : m["rows"]].T

            left, right = (matrix(p, layout).astype(np.float32) for p, layout in ((a, a_layout), (b, b_layout)))
            y = one * (left.T if said.get("TRANSA") else left) @ (right.T if said.get("TRANSB") else right)
            if zero:
                y += zero * matrix(c, c_layout).astype(np.float32)
            epilogue = ENUMERATIONS.Epilogue(said["EPILOGUE"]).name
            if "BIAS" in epilogue:
                kind, step = self.made[d_layout]["kind"], said.get("BIAS_BATCH_STRIDE", 0)
                y += at(said["BIAS_POINTER"] + batch * step * 2, len(y), kind).astype(np.float32)[:, None]
            if "GELU" in epilogue:
                y = few_rows.gelu_tanh(y)
            elif "RELU" in epilogue:
                y = np.maximum(y, 0)
            matrix(d, d_layout)[:] = y

    def matrix_layout_destroy(self, made: int) -> None:
        del self.made[made]

    matmul_desc_destroy = matmul_preference_destroy = destroy = matrix_layout_destroy


def test_the_library_that_is_not_there_has_only_names_that_the_real_one_has() -> None:
    assert {name for name in vars(Blas) if not name.startswith("_")} <= set(API["names"])


class Held:
    """Buffers in this process's memory."""

    def __init__(self) -> None:
        self.sm, self.stream, self._arrays = "sm90", 77, list[Array]()

    def buffer(self, array: Array) -> Buffer:
        self._arrays.append(np.ascontiguousarray(array))
        kind = "float16" if array.dtype == np.float16 else "bfloat16"
        return Buffer(self, self._arrays[-1].ctypes.data, array.shape, kind)  # type: ignore[arg-type]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return SimpleNamespace(pointer=0)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(
    "form", ["plain", "bias", "gelu", "gelu and bias", "relu and bias", "rows apart", "base", "in place", "shared rows", "own rows"]
)
def test_a_product_is_told_so_that_it_gives_what_numpy_gives(form: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, card, rng = Blas(), Held(), np.random.default_rng(0)
    monkeypatch.setattr(many_rows, "blas", lambda: library)
    monkeypatch.setattr(many_rows, "compiling", lambda *_: None)
    rows = ManyRows(card, dtype=dtype)  # type: ignore[arg-type]
    kind, many = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype], (3,) if form.endswith(" rows") else ()
    x, weight, bias, base = (
        rng.standard_normal(shape).astype(kind)
        for shape in ((*(many if form == "own rows" else ()), 5, 16), (*many, 24, 16), (*many, 24), (*many, 5, 24))
    )  # fmt: skip
    out, known, given = card.buffer(base if form == "in place" else np.full_like(base, np.nan)), dict[str, Any](), dict[str, Any]()
    if form not in ("plain", "gelu"):
        given["bias"], known["bias"] = card.buffer(bias), bias.astype(np.float32)[..., None, :]
    if form in ("base", "in place"):
        given["base"], known["base"] = out if form == "in place" else card.buffer(base), base.astype(np.float32)
    follow: Any = form[:4].upper() if form[:4] in ("gelu", "relu") else ""
    if form == "rows apart":
        out = card.buffer(np.full((5, 3, 24), 7, kind))
        given["every"] = 3
    rows.product(card.buffer(x), card.buffer(weight), out, follow=follow, **given)
    if form == "rows apart":
        spread = at(out.pointer, 5 * 3 * 24, kind).reshape(5, 3, 24).copy()
        assert (spread[:, 1:] == 7).all()
        out = card.buffer(spread[:, 0])
    wanted = many_rows.product(x.astype(np.float32), weight.astype(np.float32), follow=follow, **known)
    found = at(out.pointer, wanted.size, kind).reshape(wanted.shape).astype(np.float32)
    assert np.abs(found - wanted).max() <= ROUNDED[dtype] * np.abs(wanted).max()
    assert list(library.made.values()) == ["library"]  # everything else was given back
    del rows
    assert not library.made
