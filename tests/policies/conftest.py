"""What tests of policies share: graphs that ONNX Runtime has loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LOADED: dict[str, Any] = {}  # by what the files hold


@pytest.fixture(autouse=True, scope="module")
def graphs_loaded_once() -> Iterator[None]:
    """The same graph, to the last byte, is one session for all engines of it, which keeps nothing of what it has answered.

    Of one thread: waking a second takes longer than a tiny graph's operators, and the other process of the suite wants the core.
    """
    import onnxruntime

    load = onnxruntime.InferenceSession

    def session(graph: Any, options: Any = None, **more: Any) -> Any:
        if not Path(graph).is_file():
            return load(graph, options, **more)  # says so as it does
        weights = Path(f"{graph}.data")
        digest = hashlib.sha256(Path(graph).read_bytes())
        digest.update(weights.read_bytes() if weights.exists() else b"")
        key = digest.hexdigest()
        if key not in LOADED:
            options = options or onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            LOADED[key] = load(graph, options, **more)
        return LOADED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", session)
        yield
