"""Tiny bundles, exported once a session from the golden checkpoint: real graphs, random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from vla_eval.policies.gr00t.recipe import recipe

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A bundle of the golden checkpoint: `tiny()`, `tiny("simpler_env_widowx")`, `tiny(batch=2)`, `tiny(steps=(4, 8))`."""

    @cache
    def exported(embodiment: str = "libero_sim", batch: int = 1, steps: tuple[int, ...] = (4,)) -> Path:
        out = tmp_path_factory.mktemp("bundles") / f"{embodiment}-{batch}-{len(steps)}"
        recipe(GOLDEN / "checkpoint", out, embodiment=embodiment, batch=batch, steps=steps, geometry=GOLDEN / "geometry.json")
        return out

    return exported
