"""Array files that nobody vouches for: judged by their headers, before anything is allocated or inflated."""

from __future__ import annotations

import contextlib
import io
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_eval.arrays import check_plain, read_npy, read_npz, write_npz
from vla_eval.types import BadRequest

SAFETY = Path(__file__).parent / "cases/safety"
FEW_MB = 4 << 20  # of memory, beside what a reader needs anyway


def peak(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("actions_object.npy", r"actions_object\.npy holds object, which only an unpickler could read"),
        ("claims_56_gb.npy", r"claims_56_gb\.npy claims \d+ bytes by its shape .*, but 0 follow its header"),
        ("size_overflows.npy", r"size_overflows\.npy claims \d+ bytes by its shape"),
        ("negative_shape.npy", r"negative_shape\.npy claims the shape .*; lengths cannot be negative"),
    ],
)
def test_a_false_npy_is_refused_by_its_header(file: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        read_npy(SAFETY / file)
    assert peak(lambda: read_npy(SAFETY / file)) < FEW_MB


def test_an_archive_of_objects_is_refused_by_its_key() -> None:
    with pytest.raises(BadRequest, match=r"init_states_object\.npz: '\w+' holds object"):
        read_npz(SAFETY / "init_states_object.npz")


def test_an_archive_that_inflates_beyond_its_limit_is_refused_before_it_does() -> None:
    with pytest.raises(BadRequest, match=r"inflates_to_64_mib\.npz: '\w+' brings the arrays to 6\d{7} bytes, more than the 1048576"):
        read_npz(SAFETY / "inflates_to_64_mib.npz", limit=1 << 20)
    assert peak(lambda: read_npz(SAFETY / "inflates_to_64_mib.npz", limit=1 << 20)) < FEW_MB


def test_an_archive_that_lies_about_its_size_is_refused_where_the_lie_ends(tmp_path: Path) -> None:
    """Its directory says 1,128 bytes and its stream holds 80 MB: reading stops at what was said."""
    path, body = tmp_path / "a.npz", io.BytesIO()
    np.save(body, np.zeros(10_000_000))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", body.getvalue())
    data = bytearray(path.read_bytes())
    for at in (data.find(b"PK\x01\x02") + 24, data.find(b"PK\x03\x04") + 22):
        data[at : at + 4] = (1128).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(BadRequest, match="'a' is damaged"):
        read_npz(path)
    assert peak(lambda: read_npz(path)) < FEW_MB


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<i8", "|u1", "|b1", "<c16", "<U3", "|S5"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 4)])
def test_plain_arrays_are_read_as_numpy_reads_them(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    np.save(tmp_path / "a.npy", array, allow_pickle=False)
    write_npz(tmp_path / "a.npz", {"x": array, "nested/name": array.T})
    for found, wanted in (
        (read_npy(tmp_path / "a.npy"), array),
        (read_npz(tmp_path / "a.npz")["x"], array),
        (read_npz(tmp_path / "a.npz")["nested/name"], array.T),
    ):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype
        assert found.flags.writeable


def test_fortran_order_keeps_its_meaning(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(read_npy(tmp_path / "a.npy"), array)


def test_a_limit_holds_for_one_array_and_for_their_sum(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(100))
    with pytest.raises(BadRequest, match="is 800 bytes, more than the 799 allowed here"):
        read_npy(tmp_path / "a.npy", limit=799)
    write_npz(tmp_path / "a.npz", {"one": np.zeros(100), "two": np.zeros(100)})
    with pytest.raises(BadRequest, match="'two' brings the arrays to 1856 bytes"):
        read_npz(tmp_path / "a.npz", limit=1500)


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", "f8")]), np.dtype("V8"), np.dtype("M8[s]"), np.dtype([("a", object)])], ids=str)
def test_only_numbers_and_text_are_plain(dtype: Any) -> None:
    with pytest.raises(BadRequest, match="only an unpickler"):
        check_plain(np.dtype(dtype), "it")


def test_what_is_no_array_file_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "page").write_text("<html>please log in</html>")
    for name in ("empty", "page"):
        with pytest.raises(BadRequest, match=rf"{name} is no \.npy array"):
            read_npy(tmp_path / name)
        with pytest.raises(BadRequest, match=rf"{name}: not a \.npz archive"):
            read_npz(tmp_path / name)
    with pytest.raises(BadRequest, match="cannot be read"):
        read_npy(tmp_path / "missing")
    with pytest.raises(BadRequest, match="cannot be read"):
        read_npz(tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_and_never_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path, whole = tmp_path_factory.getbasetemp() / "damaged.npz", io.BytesIO()
    np.savez_compressed(whole, x=np.arange(20.0), y=np.array(["a"]))
    body = bytearray(whole.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body)
    with contextlib.suppress(BadRequest):
        found = read_npz(path)
        for name, array in {"x": np.arange(20.0), "y": np.array(["a"])}.items():  # a name may be damaged, its array may not
            assert name not in found or found[name].tobytes() == array.tobytes()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120), st.booleans())
def test_any_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes, brackets: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "header.npy"
    header = b"(" * 300 + text if brackets else text
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16))
    with contextlib.suppress(BadRequest):
        read_npy(path)


def test_an_archive_that_holds_a_name_twice_is_refused(tmp_path: Path) -> None:
    body = io.BytesIO()
    np.save(body, np.zeros(3))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that zipfile says so is the point
        archive.writestr("x.npy", body.getvalue())
        archive.writestr("x.npy", body.getvalue())
    with pytest.raises(BadRequest, match="'x' is there twice"):
        read_npz(tmp_path / "a.npz")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, {"x": np.zeros(3)})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="allow_pickle"):
        write_npz(path, {"x": np.array([None], object)})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.npz"]
