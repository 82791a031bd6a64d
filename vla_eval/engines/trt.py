"""The one door to TensorRT: the full `tensorrt` 11.x, or `tensorrt_rtx`, which has the same API and builds without a GPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

from ..types import BadRequest

INSTALL = "install vla-eval-trt[tensorrt], or vla-eval-trt[rtx] for TensorRT for RTX"
RTX_CARDS = frozenset({"sm75", "sm80", "sm86", "sm89", "sm120", "sm121"})  # what the vendor lists for TensorRT for RTX

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flavour:
    """Which TensorRT answers here."""

    name: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    api: Any  # the module

    @property
    def short(self) -> str:
        """As files are named: "trt-11.4.0.106", "rtx-1.6.1.120"."""
        return f"{'rtx' if self.name == 'tensorrt_rtx' else 'trt'}-{self.version}"

    def supports(self, sm: str) -> str:
        """Whether the vendor supports this flavour on a card such as "sm90", in words for reports."""
        if self.name == "tensorrt_rtx" and sm not in RTX_CARDS:
            return "unsupported GPU: the vendor does not list it for TensorRT for RTX"
        return "supported"


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


@cache
def logger() -> Any:
    """TensorRT's log through ours: one object a process, since its first runtime or builder keeps it."""
    api = door().api

    class Log(api.ILogger):  # type: ignore[misc, name-defined]
        """Passes on what TensorRT says, and remembers the last error: calls that fail return None and say why only here."""

        last = ""

        def __init__(self) -> None:
            api.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (api.ILogger.ERROR, api.ILogger.INTERNAL_ERROR):
                self.last = message
            _log.log(_LEVELS.get(severity.name, logging.DEBUG), "%s", message)

    return Log()


def complaint() -> str:
    """What TensorRT logged last as an error: the reason of a call that has just failed."""
    return logger().last or "it gave no reason"


# An error of TensorRT's becomes an exception of ours where a call fails; some it only tries out and survives.
_LEVELS = {"INTERNAL_ERROR": logging.INFO, "ERROR": logging.INFO, "WARNING": logging.DEBUG, "INFO": logging.DEBUG, "VERBOSE": logging.DEBUG}
