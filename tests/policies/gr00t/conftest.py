"""Tiny bundles, exported once a session from the golden checkpoint: real graphs, random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines.weights import Checkpoint, open_checkpoint
from vla_eval.policies.gr00t.configuration import PREFIXES, Architecture, read_architecture, read_geometry
from vla_eval.policies.gr00t.recipe import recipe

Dtype = Literal["fp32", "fp16", "bf16"]
GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A bundle of the golden checkpoint: `tiny()`, `tiny("simpler_env_widowx")`, `tiny(batch=2)`, `tiny(steps=(4, 8))`,
    `tiny(dtype="fp16")`.
    """

    @cache
    def exported(embodiment: str = "libero_sim", batch: int = 1, steps: tuple[int, ...] = (4,), dtype: Dtype = "fp32") -> Path:
        out = tmp_path_factory.mktemp("bundles") / embodiment
        recipe(GOLDEN / "checkpoint", out, embodiment=embodiment, batch=batch, steps=steps, dtype=dtype, geometry=GOLDEN / "geometry.json")
        return out

    return exported


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(GOLDEN / "checkpoint", PREFIXES)


@pytest.fixture(scope="module")
def architecture(checkpoint: Checkpoint) -> Architecture:
    return read_architecture(checkpoint, read_geometry(GOLDEN / "geometry.json"))


@pytest.fixture(scope="module")
def golden() -> Mapping[str, NDArray[Any]]:
    with np.load(GOLDEN / "reference.npz") as file:
        return dict(file)
