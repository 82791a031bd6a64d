"""The one door to TensorRT: the full `tensorrt` 11.x, or `tensorrt_rtx`, which has the same API and builds without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

from ..types import BadRequest

INSTALL = "install vla-eval-trt[tensorrt], or vla-eval-trt[rtx] for TensorRT for RTX"


@dataclass(frozen=True, slots=True)
class Flavour:
    """Which TensorRT answers here."""

    name: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    api: Any  # the module


@cache
def door() -> Flavour:
    """The TensorRT of this environment, the full one first. Raises BadRequest, with the command, if there is none or an older one."""
    for name in ("tensorrt", "tensorrt_rtx"):
        try:
            api = import_module(name)
        except ModuleNotFoundError:
            continue
        if name == "tensorrt" and int(api.__version__.split(".")[0]) < 11:
            raise BadRequest(f"tensorrt {api.__version__} is older than 11, which nobody has tried here; {INSTALL}")
        return Flavour(name, api.__version__, api)
    raise BadRequest(f"neither tensorrt nor tensorrt_rtx is installed; {INSTALL}")
