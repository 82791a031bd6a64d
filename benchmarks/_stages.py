"""Where the seconds of a load go: each stage's own time in the thread that loads, and what the threads beside it read meanwhile."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

STAGES = {  # stage -> functions whose time it is, less that of stages inside
    "card": ["vla_eval.engines.card:Card.__init__"],
    "compile": ["cuda.bindings.nvrtc:nvrtcCompileProgram"],
    "TensorRT's library": ["vla_eval.engines.trt:door"],
    "cuBLAS's library": ["vla_eval.policies.components:blas"],
    "wait for tables and weights": ["vla_eval.engines.bundle:Component.tensors"],
    "wait for plans": ["vla_eval.engines.trt_run:Plans.load"],
    "deserialise": ["vla_eval.engines.trt_run:TrtEngine.__init__"],
    "upload": ["vla_eval.engines.card:Card.load"],
    "scale the token table": ["vla_eval.policies.pi05.runtime:_scaled"],
    "contexts": ["vla_eval.engines.trt_run:Bound.__init__"],
    "runtime cache": ["vla_eval.engines.trt_run:_runtime_cache", "vla_eval.engines.trt_run:TrtEngine.save_cache"],
    "self-test": ["vla_eval.policies.components:selftest"],
    "tokenizer": ["vla_eval.policies.gr00t.processor:Tokens.__init__", "vla_eval.policies.pi05.processor:Tokens.__init__"],
}  # fmt: skip
_READ = "vla_eval.engines.reading:_contents"


class Stages:
    """Seconds by stage, and every file that was read: name, bytes, and seconds from the start of the load to its beginning and end."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys([*STAGES, "rest"], 0.0)
        self.files: list[dict[str, Any]] = []
        self._thread, self._began = threading.get_ident(), time.perf_counter()
        self._inside: list[float] = []  # of each stage that is under way, the seconds of stages in it

    def own(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, its own time added up."""

        def timed(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return work(*args, **named)
            began = time.perf_counter()
            self._inside.append(0.0)
            try:
                return work(*args, **named)
            finally:
                took, inside = time.perf_counter() - began, self._inside.pop()
                self.seconds[stage] += took - inside
                if self._inside:
                    self._inside[-1] += took

        return timed

    def read(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, as one file's."""

        def timed(path: Path, size: int, sha256: str) -> Any:
            began = time.perf_counter()
            try:
                return work(path, size, sha256)
            finally:
                ends = {"begins_s": round(began - self._began, 3), "ends_s": round(time.perf_counter() - self._began, 3)}
                self.files.append({"file": f"{path.parent.name}/{path.name}", "bytes": size, **ends})

        return timed

    def data(self) -> dict[str, Any]:
        """As JSON, without stages that took no time."""
        seconds = {stage: round(spent, 3) for stage, spent in self.seconds.items() if spent >= 0.0005}
        return {"seconds": round(sum(self.seconds.values()), 3), "stages": seconds, "files": sorted(self.files, key=lambda f: f["ends_s"])}


@contextmanager
def followed() -> Iterator[Stages]:
    """Follow a load in this thread; modules that it would import are imported before."""
    places = [(stage, place) for stage, functions in STAGES.items() for place in functions]
    found = {place: _attribute(place) for place in (_READ, *(place for _, place in places))}
    stages = Stages()
    with ExitStack() as patched:
        for stage, place in places:
            patched.enter_context(patch.object(*found[place][:2], stages.own(stage, found[place][2])))
        patched.enter_context(patch.object(*found[_READ][:2], stages.read(found[_READ][2])))
        began = time.perf_counter()
        try:
            yield stages
        finally:
            whole = time.perf_counter() - began
            stages.seconds["rest"] = whole - sum(spent for stage, spent in stages.seconds.items() if stage != "rest")


def _attribute(place: str) -> tuple[Any, str, Any]:
    """What holds a function, its name there, and the function."""
    module, _, path = place.partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    return holder, name, getattr(holder, name)
