"""Every TensorRT name that the code touches exists in both flavours: the installed one, and the full package by a list of its names."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vla_eval.engines import trt

ROOT = Path(__file__).parents[2]
FULL = json.loads((ROOT / "tests/golden/tensorrt_api.json").read_text())
MODULES = ("trt", "trt_pen", "trt_build", "trt_run")
RTX_ONLY = {"_runtime_cache", "save_cache"}  # functions that need a runtime cache, and ask first
OURS = {("trt_build", "runtime"), ("trt_run", "tensor")}  # variables of these names that hold nothing of TensorRT's
OURS_IN_RUN = {"__init__", "set", "enqueue", "bind"}  # there `engine` is a TrtEngine
ALIASES = {"kinds": "CausalMaskKind", "norms": "AttentionNormalizationOp", "ops": "MatrixOperation"}  # of trt_pen
OBJECTS = {  # what our variables hold
    "network": ["INetworkDefinition"], "builder": ["Builder"], "settings": ["IBuilderConfig", "IRuntimeConfig"], "parser": ["OnnxParser"],
    "engine": ["ICudaEngine"], "context": ["IExecutionContext"], "runtime": ["Runtime"], "inspector": ["EngineInspector"],
    "cache": ["IRuntimeCache"], "measured": ["ITimingCache"],
    "profile": ["IOptimizationProfile"], "layer": ["ILayer", "*Layer", "IAttention"], "handle": ["ITensor"], "tensor": ["ITensor"],
}  # fmt: skip


def touched() -> Iterator[tuple[str, str, str, str]]:
    """(where, function, what it is of, name): `api.X`, `api.X.Y`, and members of the objects above."""
    for module in MODULES:
        tree = ast.parse((ROOT / f"vla_eval/engines/{module}.py").read_text())
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
                    continue
                where, base = f"{module}.py:{node.lineno}", ast.unparse(node.value)
                last = base.rsplit(".", 1)[-1].lstrip("_")
                if (module, last) in OURS or (module == "trt_run" and last == "engine" and function.name in OURS_IN_RUN):
                    continue
                if last == "api":
                    what = ""
                elif module == "trt_pen" and last in ALIASES:
                    what = ALIASES[last]
                elif last in OBJECTS or ("api." in base and last[:1].isupper()):
                    what = last
                else:
                    continue
                yield where, function.name, what, node.attr


def classes_of(what: str, classes: Any) -> list[str]:
    found = []
    for name in OBJECTS.get(what, [what]):
        found += [c for c in classes if c.startswith("I") and c.endswith("Layer")] if name == "*Layer" else [name]
    return found


def test_the_names_are_of_the_full_package() -> None:
    assert FULL["version"].startswith("11.4.")
    assert len(FULL["classes"]) > 100


@pytest.mark.parametrize("flavour", ["full", "installed"])
def test_every_name_that_we_touch_exists(flavour: str) -> None:
    api, checked, missing = trt.door().api, 0, []
    for where, function, what, name in touched():
        if flavour == "full" and function in RTX_ONLY:
            continue
        checked += 1
        if flavour == "full":
            classes = FULL["classes"]
            members = [*classes, *FULL["names"]] if not what else [m for c in classes_of(what, classes) for m in classes.get(c, [])]
        else:
            members = dir(api) if not what else [m for c in classes_of(what, dir(api)) for m in dir(getattr(api, c, None))]
        if name not in members:
            missing.append(f"{where}: {what or 'module'}.{name}")
    assert checked > 80
    assert missing == []
