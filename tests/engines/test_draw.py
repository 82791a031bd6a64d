"""Plans drawn straight from a checkpoint, each in a process of its own: what it tells, what it takes, and what is left when it dies."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.engines.bundle import Identity, open_bundle, staged
from vla_eval.engines.draw import draw
from vla_eval.engines.graph import Axis
from vla_eval.engines.trt_build import ANY_CARD, plan_file, record_of
from vla_eval.engines.weights import Checkpoint, open_checkpoint, write_tensors
from vla_eval.types import VlaEvalError

MODULE = """
import os, signal
from vla_eval.engines.graph import Axis

def graph_from(stored, component, *, rows, last=""):
    def drawn(g):
        x = g.input("x", "float32", (Axis(*rows), 8))
        y = g.linear(g.cast(x, g.dtype), stored.weights["w"])
        if last == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if last == "full":
            raise OSError(28, "No space left on device")
        if last == "large":
            raise MemoryError
        if last == "fail":
            raise ZeroDivisionError("a bug in this network")
        g.output(g.cast(y, "float32"), "y")
    return drawn
"""
ROWS = Axis("R", 1, 2, 4)
Write = Callable[..., None]


@pytest.fixture
def stored(tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    numbers = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    write_tensors(folder / "model.safetensors", {name: (np.float32, numbers.shape, [numbers]) for name in ("model.w", "model.unused")})
    return open_checkpoint(folder, ("model.",))


@pytest.fixture
def write(tmp_path: Path, stored: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Makes the bundle `tmp_path/bundle` of one component, drawn by a module that another process has to import too."""
    (tmp_path / "a_network.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    graph_from = import_module("a_network").graph_from

    def made(frontend: Any = "direct", **arguments: Any) -> None:
        options = {"dtype": "fp16", "batch": 1}
        with staged(tmp_path / "bundle", Identity("a_model", frontend, stored.fingerprint, options), {}) as stage:
            drawn = draw(stage, "only", stored, graph_from, rows=ROWS, **arguments)
            assert drawn.inputs["x"].shape == (ROWS, 8)
            stage.finish("only", drawn.inputs, drawn.outputs)

    return made


def test_both_routes_tell_the_same_edges_and_which_tensors_were_read(write: Write, stored: Checkpoint, tmp_path: Path) -> None:
    said = {}
    for frontend in ("direct", "onnx"):
        stored.seen.clear()
        write(frontend)
        assert stored.seen == {"w"}  # 'unused' is still to be missed
        said[frontend] = open_bundle(tmp_path / "bundle").component("only").config["tensor_contract"]
        (tmp_path / "bundle").rename(tmp_path / frontend)
    assert said["direct"] == said["onnx"]


def test_the_record_says_what_the_build_has_taken(write: Write, tmp_path: Path) -> None:
    write()
    said = record_of(plan_file(open_bundle(tmp_path / "bundle").component("only"), ANY_CARD))
    assert said["weights_bytes"] == 2 * 16 * 8  # in half precision
    assert 0 < said["peak_bytes"] <= 3.3 * said["weights_bytes"] + 1e9
    assert said["seconds"] > 0


def test_a_build_that_is_killed_is_a_sentence_and_leaves_the_old_plan(write: Write, tmp_path: Path) -> None:
    write()
    before = {file: file.read_bytes() for file in (tmp_path / "bundle").rglob("*") if file.is_file()}
    with pytest.raises(VlaEvalError, match=r"bundle/only: the build was killed by signal 9 .* the old plan stays"):
        write(last="die")
    assert {file: file.read_bytes() for file in (tmp_path / "bundle").rglob("*") if file.is_file()} == before


def test_a_killed_build_leaves_no_bundle_where_none_was(write: Write, tmp_path: Path) -> None:
    with pytest.raises(VlaEvalError, match="killed by signal 9"):
        write(last="die")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("last", "told"), [("full", "No space left on device"), ("large", "not enough memory")])
def test_a_build_without_room_is_a_sentence(write: Write, last: str, told: str) -> None:
    with pytest.raises(VlaEvalError, match=f"bundle/only: .*{told}.*the old plan stays$"):
        write(last=last)


def test_a_bug_of_the_network_keeps_its_traceback(write: Write) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*in drawn.*ZeroDivisionError: a bug in this network"):
        write(last="fail")


def test_a_checkpoint_that_changes_meanwhile_is_refused(write: Write, stored: Checkpoint) -> None:
    file = stored.path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(VlaEvalError, match="was changed while a bundle was made of it"):
        write()
