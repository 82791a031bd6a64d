"""vla-eval: evaluate vision-language-action policies, and their TensorRT engines, in simulation."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .registry import load_policy, load_tasks
from .types import ActionChunk, EpisodeRecord, Interface, Meaning, Observation, Policy, Request, Task, VlaEvalError

if TYPE_CHECKING:
    from .run.loop import evaluate

try:
    __version__ = version("vla-eval-trt")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0+unknown"

__all__ = [
    "ActionChunk", "EpisodeRecord", "Interface", "Meaning", "Observation", "Policy", "Request", "Task", "VlaEvalError",
    "__version__", "evaluate", "load_policy", "load_tasks",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # A simulator's process imports this package too: what plays episodes is loaded when somebody asks for it.
    if name == "evaluate":
        return import_module("vla_eval.run.loop").evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
