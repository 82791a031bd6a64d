"""Machine code that the user's cache keeps: compiled once for all that it depends on, and never loaded when it is damaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from vla_eval.engines import kernels
from vla_eval.engines.kernels import compiled

SOURCE = 'extern "C" __global__ void one(float* x) { x[threadIdx.x] += N; }'


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vla-eval/kernels"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What was really compiled."""
    found: list[tuple[str, ...]] = []
    real = kernels._compiled

    def counted(*said: str) -> bytes:
        found.append(said)
        return real(*said)

    monkeypatch.setattr(kernels, "_compiled", counted)
    return found


def test_the_same_code_is_compiled_once(runs: list[Any]) -> None:
    first = compiled(SOURCE, "sm90", "-DN=1")
    assert first[:4] == b"\x7fELF"
    assert [compiled(SOURCE, "sm90", "-DN=1") for _ in range(2)] == [first, first]
    assert len(runs) == 1


def test_another_source_card_option_or_compiler_is_compiled_by_itself(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(SOURCE, "sm90", "-DN=1"), (SOURCE + " ", "sm90", "-DN=1"), (SOURCE, "sm80", "-DN=1"), (SOURCE, "sm90", "-DN=2")]
    found = [compiled(*said) for said in asked]
    assert runs == asked
    assert len({found[0], found[2], found[3]}) == 3
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 12, 9))
    compiled(*asked[0])
    assert len(runs) == 5


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_damaged_code_is_compiled_again_and_not_handed_on(
    damage: str, runs: list[Any], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = compiled(SOURCE, "sm90", "-DN=1")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes({"flipped": whole[:-1] + bytes([whole[-1] ^ 1]), "cut": whole[:-1], "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        assert compiled(SOURCE, "sm90", "-DN=1") == good
    assert [record.message for record in caplog.records] == [f"{file} is damaged; the kernels are compiled again"]
    assert len(runs) == 2
    assert file.read_bytes() == whole
    assert compiled(SOURCE, "sm90", "-DN=1") == good
    assert len(runs) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(runs: list[Any], cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"a file where the folder would be")
    assert compiled(SOURCE, "sm90", "-DN=1") == compiled(SOURCE, "sm90", "-DN=1")
    assert len(runs) == 2
