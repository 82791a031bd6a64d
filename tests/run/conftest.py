"""What the tests of the run share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from vla_eval.registry import load_tasks
from vla_eval.types import Task


@pytest.fixture
def toy() -> Task:
    """Put the red block on the pad."""
    return load_tasks("toy")[2]


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `strange_envs` can be imported, here and in every worker."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "strangers")
    yield
    for name in [name for name in gymnasium.registry if name.startswith("strange/")]:
        del gymnasium.registry[name]
    sys.modules.pop("strange_envs", None)
