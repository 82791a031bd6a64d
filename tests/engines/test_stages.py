"""The benchmark that follows a load: every stage it names exists, and what it says of files is what was read."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_eval import registry
from vla_eval.engines.bundle import open_bundle
from vla_eval.engines.card import Card

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("model", "kernels"), [("gr00t", "no"), ("pi05", "yes")])
def test_a_load_is_followed_through_its_stages(
    model: str, kernels: str, wide: Callable[[str, str], Path], emulated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _stages import STAGES, followed  # type: ignore[import-not-found]

    bundle = open_bundle(shutil.copytree(wide(model, "fp16"), tmp_path / "bundle"))
    emulated[1](bundle)
    upload = Card.load
    began = time.perf_counter()
    with followed() as stages:
        registry.load_policy(model, bundle=bundle.path, backend="tensorrt", kernels=kernels)
    took, said = time.perf_counter() - began, stages.data()
    assert Card.load is upload  # what was patched is put back
    seldom = {
        "runtime cache",
        "TensorRT's library",
        "compile",
        *(["scale the token table", "cuBLAS's library"] if model == "gr00t" else []),
    }
    assert {stage for stage, seconds in stages.seconds.items() if seconds > 0} >= {*STAGES, "rest"} - seldom
    assert min(stages.seconds.values()) >= 0
    assert sum(stages.seconds.values()) <= took
    files = {file["file"]: file["bytes"] for file in said["files"]}
    assert files == {name: (bundle.path / name).stat().st_size for name in files}
    assert {Path(name).suffix for name in files} == {".engine", ".safetensors"}
    assert all(0 <= file["begins_s"] <= file["ends_s"] <= took + 1e-3 for file in said["files"])
    sys.modules.pop("_stages")
