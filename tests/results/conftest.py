"""The run maker, for every test of results."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def make_runs() -> ModuleType:
    """tests/results/make_runs.py, which is a script too."""
    spec = spec_from_file_location("make_runs", Path(__file__).with_name("make_runs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
