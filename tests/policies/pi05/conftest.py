"""Tiny bundles, exported once a session from the golden checkpoints: real graphs, random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vla_eval.policies.pi05.recipe import recipe

GOLDEN = Path(__file__).parents[2] / "golden/pi05_tiny"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A bundle of a golden checkpoint: `tiny()`, `tiny("pi05_droid")`, `tiny(batch=2)`, `tiny(no_hoist_cond=True)`."""

    @cache
    def exported(robot: str = "pi05_libero", **options: Any) -> Path:
        out = tmp_path_factory.mktemp("bundles") / robot
        recipe(
            GOLDEN / robot / "checkpoint", out, policy_config=robot, geometry=GOLDEN / "geometry.json", suites=("toy", "libero_10"),
            tokenizer=GOLDEN / "paligemma_tokenizer.model", max_steps=16, **options,
        )  # fmt: skip
        return out

    return exported
