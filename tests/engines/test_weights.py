"""Checkpoint files as they come: sharded, prefixed, tied, cut short, damaged, not finite."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from vla_eval.engines.weights import INDEX, open_checkpoint, read_tensors, token_table, write_tensors
from vla_eval.types import BadRequest

CASES = Path(__file__).parents[1] / "cases" / "checkpoints" / "token_table"
A = np.arange(24, dtype=np.float32).reshape(4, 6)
B = np.linspace(-1, 1, 6, dtype=np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index."""
    save_file({"layer.a": A}, tmp_path / "one.safetensors")
    save_file({"layer.b": B, "spare": B}, tmp_path / "two.safetensors")
    names = {"layer.a": "one.safetensors", "layer.b": "two.safetensors", "spare": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    return tmp_path


def test_tensors_are_read_by_name_whole_by_row_and_transposed(folder: Path) -> None:
    w = open_checkpoint(folder).weights.under("layer")
    assert np.array_equal(w["a"].read(), A)
    assert np.array_equal(w["a"].row(2).read(), A[2])
    assert np.array_equal(w["a"].rows(1, 3).transposed().read(), A[1:3].T)
    assert np.array_equal(w["a"].reshaped((2, 12)).read(), A.reshape(2, 12))
    assert np.array_equal(np.concatenate([*w["a"].pieces()]), A.ravel())
    assert "b" in w
    assert "c" not in w


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_every_float_type_is_read_as_another_reader_wrote_it(dtype: type, tmp_path: Path) -> None:
    save_file({"x": A.astype(dtype)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path).tensors["x"].read()
    assert found.dtype == dtype
    assert np.array_equal(found, A.astype(dtype))


def test_what_was_streamed_is_what_another_reader_reads(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_tensors(file, {"a": (np.float32, A.shape, [A[:1], A[1:]]), "b": (np.float16, B.shape, [B])})
    assert np.array_equal(load_file(file)["a"], A)
    assert np.array_equal(read_tensors(file)["b"], B.astype(np.float16))


def test_a_tensor_that_nobody_read_is_an_error_that_names_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.weights["layer.a"].row(0).read()
    checkpoint.weights["layer.b"]  # looked up, never read
    with pytest.raises(BadRequest, match=r"nothing asked for layer\.b, spare;"):
        checkpoint.check_all_read([])
    checkpoint.weights["layer.b"].read()
    checkpoint.check_all_read(["spare"])


def test_looking_through_the_numbers_is_not_reading_them(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.check_numbers()
    with pytest.raises(BadRequest, match="nothing asked for"):
        checkpoint.check_all_read([])


def test_a_prefix_that_all_names_share_is_taken_off(tmp_path: Path) -> None:
    save_file({"_groot_model.a": A, "_groot_model.b": B}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, ("_groot_model.",))
    assert np.array_equal(checkpoint.weights["a"].read(), A)
    checkpoint.check_all_read(["b"])


def test_a_prefix_that_only_some_names_have_is_refused(tmp_path: Path) -> None:
    save_file({"_groot_model.a": A, "b": B}, tmp_path / "model.safetensors")
    with pytest.raises(BadRequest, match=r"1 of 2 names begin with '_groot_model\.'"):
        open_checkpoint(tmp_path, ("_groot_model.",))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_numbers_that_are_not_finite_are_refused_by_name(bad: float, dtype: type, tmp_path: Path) -> None:
    poisoned: NDArray[Any] = A.astype(dtype)
    poisoned[3, 5] = bad
    save_file({"fine": A, "poisoned": poisoned}, tmp_path / "model.safetensors")
    with pytest.raises(BadRequest, match="'poisoned' holds NaN or infinity"):
        open_checkpoint(tmp_path).check_numbers()


@pytest.mark.parametrize(("number", "fits"), [(65519.0, True), (-65520.0, False)])
def test_numbers_that_float16_cannot_hold_are_refused_when_it_is_asked_for(number: float, fits: bool, tmp_path: Path) -> None:
    save_file({"x": np.array([1.0, number], np.float32)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.check_numbers()
    if fits:
        checkpoint.check_numbers(65520.0)
    else:
        with pytest.raises(BadRequest, match="'x' holds 65520, too large for float16"):
            checkpoint.check_numbers(65520.0)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def lengthened(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 4)


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")


def huge_header(file: Path) -> None:
    file.write_bytes((1 << 60).to_bytes(8, "little") + file.read_bytes()[8:])


def no_json(file: Path) -> None:
    file.write_bytes((10).to_bytes(8, "little") + b"0123456789")


def false_shape(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"[4,6]", b"[9,6]"))


def negative_shape(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"[4,6]", b"[-4,6]".ljust(6))[:-1])


def other_type(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))


def header(said: str, body: bytes = b"\0" * 8) -> Callable[[Path], None]:
    """A file with that header."""

    def damage(file: Path) -> None:
        file.write_bytes(len(said).to_bytes(8, "little") + said.encode() + body)

    return damage


enormous = header('{"x": {"dtype": "F32", "shape": [%d], "data_offsets": [0, %d]}}' % (10**30, 4 * 10**30))  # noqa: UP031
nested = header("[" * 100_000)
list_dtype = header('{"x": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}')
overlapping = header(
    '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
)
gap = header('{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}')


def web_page(file: Path) -> None:
    file.write_text("<!DOCTYPE html><html><head><title>Sign in</title></head></html>")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (enormous, "would end at byte"), (nested, "damaged"), (list_dtype, "damaged"), (overlapping, "begins at byte"),
        (gap, "begins at byte"), (web_page, "not a safetensors file"),
        (cut, "cut short"), (lengthened, "cut short or damaged"), (pointer, "large-file pointer"), (huge_header, "not a safetensors file"),
        (no_json, "damaged"), (false_shape, "damaged"), (negative_shape, "damaged"), (other_type, "only F32, F16 and BF16"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)  # fmt: skip
def test_a_damaged_file_is_refused_by_name(damage: Callable[[Path], None], says: str, folder: Path) -> None:
    damage(folder / "one.safetensors")
    with pytest.raises(BadRequest, match=says) as refused:
        open_checkpoint(folder)
    assert "one.safetensors" in str(refused.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    with pytest.raises(BadRequest, match=r"two\.safetensors is missing"):
        open_checkpoint(folder)


def test_an_index_that_points_outside_its_folder_is_refused(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"layer.a": "../one.safetensors"}}))
    with pytest.raises(BadRequest, match="'weight_map'"):
        open_checkpoint(folder)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("one", "two"):
        save_file({"x": A}, tmp_path / f"{file}.safetensors")
    with pytest.raises(BadRequest, match=r"'x' stands in one\.safetensors and in two\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("what", ["folder", "files"])
def test_nothing_to_read_is_one_sentence(what: str, tmp_path: Path) -> None:
    place = tmp_path if what == "files" else tmp_path / "nowhere"
    with pytest.raises(BadRequest, match="no such folder" if what == "folder" else "no .safetensors file is missing"):
        open_checkpoint(place)


def test_the_fingerprint_sees_names_shapes_and_numbers(folder: Path, tmp_path: Path) -> None:
    before = open_checkpoint(folder).fingerprint
    assert open_checkpoint(folder).fingerprint == before
    changed = A.copy()
    changed[-1, -1] += 1
    save_file({"layer.a": changed}, folder / "one.safetensors")
    assert open_checkpoint(folder).fingerprint != before
    save_file({"layer.a": A.reshape(6, 4)}, folder / "one.safetensors")
    assert open_checkpoint(folder).fingerprint != before


@pytest.mark.parametrize("stored", ["embedding_only", "head_only", "both_equal"])
def test_the_token_table_is_found_under_either_name_or_both(stored: str, tmp_path: Path) -> None:
    shutil.copy(CASES / f"{stored}.safetensors", tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    table = token_table(checkpoint, *sorted(checkpoint.tensors, reverse=True))
    assert np.array_equal(table.read(), np.arange(32, dtype=np.float32).reshape(8, 4) / 8)


def test_two_token_tables_that_differ_are_refused_and_none_overwrites_the_other(tmp_path: Path) -> None:
    shutil.copy(CASES / "both_different.safetensors", tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    names = sorted(checkpoint.tensors)
    assert len(names) == 2
    with pytest.raises(BadRequest, match="differ") as refused:
        token_table(checkpoint, *names)
    assert all(name in str(refused.value) for name in names)
