"""What a load reads: each byte once, in threads, and nothing is handed on that is not what was written."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval import registry
from vla_eval.engines import reading, trt
from vla_eval.engines.bundle import Bundle, open_bundle
from vla_eval.engines.reading import begin
from vla_eval.engines.weights import read_tensors
from vla_eval.types import BadRequest, ContractMismatch

CASES = pytest.mark.parametrize(("model", "kernels"), [("gr00t", "yes"), ("pi05", "yes"), ("pi05", "no")])
LOADED = {  # which files, and that there is no other
    ("gr00t", "yes"): [
        "visual/rows.safetensors", "vl_backbone/rows.safetensors", "vl_backbone/embed_tokens.safetensors",
        "action/adanorm_modulation.4.safetensors", "action/action_time_bias.4.safetensors", "action/dit.safetensors",
        "action/dit.4.safetensors",
    ],
    ("pi05", "yes"): [
        "visual/rows.safetensors", "prefix/rows.safetensors", "cond/cond*.engine", "prefix/embed_tokens.safetensors",
        "action/expert.safetensors",
    ],
    ("pi05", "no"): [
        "visual/visual*.engine", "prefix/prefix*.engine", "cond/cond*.engine", "action/action*.engine", "prefix/embed_tokens.safetensors",
    ],
}  # fmt: skip
Make = Callable[[str], Bundle]


@pytest.fixture
def stored(wide: Callable[[str, str], Path], emulated: Any, tmp_path: Path) -> Make:
    """A bundle of this test's own with kernels and plans."""

    def made(model: str) -> Bundle:
        bundle = open_bundle(shutil.copytree(wide(model, "fp16"), tmp_path / model))
        emulated[1](bundle)
        return bundle

    return made


def load(bundle: Bundle, **options: Any) -> Any:
    return registry.load_policy(bundle.model, bundle=bundle.path, backend="tensorrt", **options)


def loaded(bundle: Bundle, kernels: str) -> list[Path]:
    """The files that a load takes."""
    patterns = LOADED[bundle.model, kernels]
    found = [file for pattern in patterns for file in bundle.path.glob(pattern)]
    assert len(found) == len(patterns)
    return found


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE", 1000)


@pytest.mark.usefixtures("small_pieces")
def test_many_files_at_once_are_what_was_written(tmp_path: Path) -> None:
    wanted = {f"{size}": np.random.default_rng(size).bytes(size) for size in (0, 1, 999, 1000, 1001, 54_321, *range(2000, 2030))}
    for name, data in wanted.items():
        (tmp_path / name).write_bytes(data)
    begun = {name: begin(tmp_path / name, len(data), hashlib.sha256(data).hexdigest()) for name, data in wanted.items()}
    for name, data in wanted.items():
        head, found = begun[name].result()
        assert head == data[:256]
        assert found is not None
        assert found.tobytes() == data


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("at", [0, 999, 1000, 9_999, 10_000])
def test_a_flipped_byte_in_any_piece_shows(at: int, tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(10_001)
    file, digest = tmp_path / "file", hashlib.sha256(data).hexdigest()
    file.write_bytes(data)
    assert begin(file, len(data), digest).result().data is not None
    flip(file, at)
    head, found = begin(file, len(data), digest).result()
    assert found is None
    assert head == file.read_bytes()[:256]


def test_a_file_of_another_size_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"version https://git-lfs")
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("memory was taken"))
    head, found = begin(tmp_path / "file", 1 << 40, "0" * 64).result()
    assert (head, found) == (b"version https://git-lfs", None)


@pytest.mark.usefixtures("small_pieces")
def test_a_file_that_becomes_shorter_while_it_is_read_is_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    real = os.preadv

    def cut(handle: int, buffers: Any, offset: int) -> int:
        return 0 if offset >= 5000 else real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    head, found = begin(tmp_path / "file", 10_000, hashlib.sha256(bytes(10_000)).hexdigest()).result()
    assert (head, found) == (bytes(256), None)


@CASES
def test_a_load_opens_each_file_once_and_reads_each_byte_once(
    model: str, kernels: str, stored: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = stored(model)
    files, opened, read = {str(file) for file in loaded(bundle, kernels)}, Counter[str](), Counter[str]()
    real_open, real_read = Path.open, os.preadv

    def opening(path: Path, *args: Any, **named: Any) -> Any:
        opened[str(path)] += 1
        return real_open(path, *args, **named)

    def reads(handle: int, buffers: Any, offset: int) -> int:
        count = real_read(handle, buffers, offset)
        read[os.readlink(f"/proc/self/fd/{handle}")] += count
        return count

    monkeypatch.setattr(Path, "open", opening)
    monkeypatch.setattr(os, "preadv", reads)
    load(bundle, kernels=kernels)
    assert {file for file in opened if file.endswith((".engine", ".safetensors", ".onnx", ".data"))} == files
    assert {file: opened[file] for file in files} == dict.fromkeys(files, 1)
    assert dict(read) == {file: Path(file).stat().st_size for file in files}


@CASES
def test_a_flipped_byte_in_any_loaded_file_is_refused_before_it_is_used(
    model: str, kernels: str, stored: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = stored(model)
    flavour, given = trt.door(), list[bytes]()
    real_runtime = flavour.api.Runtime

    def runtime(logger: Any) -> Any:
        made = real_runtime(logger)
        inside = made.deserialize_cuda_engine

        def deserialize(data: Any) -> Any:
            given.append(bytes(data))
            return inside(data)

        made.deserialize_cuda_engine = deserialize
        return made

    def tensors(file: Path, data: Any) -> Any:
        given.append(bytes(data))
        return read_tensors(file, data)

    monkeypatch.setattr(flavour.api, "Runtime", runtime)
    monkeypatch.setattr("vla_eval.engines.bundle.read_tensors", tensors)
    load(bundle, kernels=kernels)
    whole = {file: file.read_bytes() for file in loaded(bundle, kernels)}
    assert sorted(given) == sorted(whole.values())  # so nothing is used past these two
    for i, (file, data) in enumerate(whole.items()):
        at = (0, len(data) // 2, len(data) - 1)[i % 3]
        flip(file, at)
        given.clear()
        with pytest.raises(ContractMismatch, match=rf"{file.name}.*its SHA-256 differs"):
            load(bundle, kernels=kernels)
        assert file.read_bytes() not in given
        flip(file, at)


@CASES
def test_a_missing_file_is_one_sentence(model: str, kernels: str, stored: Make) -> None:
    bundle = stored(model)
    for file in loaded(bundle, kernels):
        moved = file.rename(file.with_name("away"))
        wanted = "has no plan for" if file.suffix == ".engine" else rf"{file.name} is missing; export the component again"
        with pytest.raises(BadRequest, match=wanted):
            load(bundle, kernels=kernels)
        moved.rename(file)


@CASES
def test_a_file_that_cannot_be_read_is_one_sentence(model: str, kernels: str, stored: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, real = stored(model), os.preadv
    for file in loaded(bundle, kernels):

        def broken(handle: int, buffers: Any, offset: int, name: str = file.name) -> int:
            if os.readlink(f"/proc/self/fd/{handle}").endswith(f"/{name}"):
                raise OSError(5, "Input/output error")
            return real(handle, buffers, offset)

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(BadRequest, match=rf"{file.name} cannot be read \(Input/output error\); (copy|build)"):
            load(bundle, kernels=kernels)


@pytest.mark.parametrize("model", ["gr00t", "pi05"])
def test_room_is_wanted_for_the_kernels_weights_only_where_they_run(
    model: str, stored: Make, emulated: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = stored(model)
    tables = [file.stat().st_size for file in loaded(bundle, "yes") if file.suffix == ".safetensors"]
    packed = [file.stat().st_size for file in loaded(bundle, "yes") if file.name.startswith(("dit.", "expert.", "rows."))]
    for kernels, wanted in (("yes", sum(tables)), ("no", sum(tables) - sum(packed))):
        caplog.clear()
        with caplog.at_level(logging.INFO, "vla_eval.engines.trt_run"):
            load(bundle, kernels=kernels)
        said = next(record.args for record in caplog.records if "GB left" in record.message)
        assert f"tables {wanted / 1e9:.3f}" in str(said)
