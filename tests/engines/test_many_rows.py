"""What stands between products over many rows, on a machine without a GPU: it compiles for every released width, beside other work."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vla_eval.engines import kernels, many_rows
from vla_eval.engines.kernels import compiled, source_of
from vla_eval.engines.many_rows import ManyRows, entries, shared_of
from vla_eval.types import VlaEvalError

RELEASED = {"float16": ((64, 128), (64, 128)), "bfloat16": ((256,), (72, 256))}  # of GR00T's and pi0.5's heads: with rotary, and all


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the user's cache keeps is not compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the kernels ask of a card before they are launched, and a cuBLAS that nobody multiplies with."""
    monkeypatch.setattr(many_rows, "blas", lambda: SimpleNamespace(create=lambda: 1, destroy=lambda handle: None))
    asked: dict[str, Any] = {"shared": {}}

    def loaded(code: bytes, names: list[str]) -> dict[str, str]:
        asked["code"] = code
        return {name: name for name in names}

    return SimpleNamespace(
        sm="sm90", asked=asked, empty=lambda shape, dtype: None, kernels=loaded, allow_shared=asked["shared"].__setitem__
    )


@pytest.mark.parametrize("dtype", RELEASED)
def test_the_kernels_of_the_released_models_compile(dtype: str, card: Any) -> None:
    turned, attended = RELEASED[dtype]
    found = ManyRows(card, dtype=dtype, turned=turned, attended=attended)._kernels
    assert {f"turn_{d}" for d in turned} | {f"attend_{d}" for d in attended} < set(found)
    assert all(kernel.encode() in card.asked["code"] for kernel in found)
    assert card.asked["shared"] == {f"attend_{d}": shared_of(d) for d in attended}


def test_shared_memory_counted_wrongly_does_not_compile() -> None:
    text = entries((), (64,)).replace(str(shared_of(64)), str(shared_of(64) + 16))
    with pytest.raises(VlaEvalError, match="shared memory"):
        compiled(source_of("many_rows.cu") + text, "sm90", '-DKIND="f16"', "-default-device")


def test_nobody_waits_for_a_compiler_before_the_first_launch(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both, given = threading.Barrier(3), [b"one", b"two"]

    def slow(*_: str) -> bytes:
        both.wait(30)  # for the other one, and for who made both
        return given.pop()

    monkeypatch.setattr(kernels, "_compiled", slow)
    made = [ManyRows(card, dtype="float16", turned=(d,), attended=(d,)) for d in (64, 128)]
    both.wait(30)
    assert {rows._code.result() for rows in made} == {b"one", b"two"}


def test_what_the_compiler_refuses_is_told_by_the_first_launch(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "shared_of", lambda width: 16)
    rows = ManyRows(card, dtype="float16", attended=(64,))
    with pytest.raises(VlaEvalError, match="NVRTC cannot compile the kernels for sm90"):
        _ = rows._kernels
