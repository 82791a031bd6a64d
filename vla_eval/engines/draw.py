"""A component's graph into the bundle that is being written, by the route that the bundle takes: an ONNX file, or a plan.

A plan is built by `python -m vla_eval.engines.draw` in a process of its own, which opens the checkpoint again and gives back all memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..types import BadRequest
from .bundle import Stage
from .graph import PRECISIONS, Axis, Graph, Value
from .weights import Checkpoint, open_checkpoint

GraphFrom = Callable[..., Callable[[Graph], None]]  # (checkpoint, component, **plain arguments) -> the function that draws


class Drawn(NamedTuple):
    """The edges of a graph that stands in its bundle."""

    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]


def draw(stage: Stage, component: str, stored: Checkpoint, graph_from: GraphFrom, **arguments: Any) -> Drawn:
    """Draw with the pen of the stage's frontend. A plan is this machine's own: it is staged, and no artifact of the export.

    `graph_from` is a module's function and `arguments` are plain JSON, an `Axis` as its four entries, since another process may call it.
    """
    dtype = str(stage.identity.options["dtype"])
    if stage.identity.frontend == "onnx":
        from .onnx_pen import OnnxPen

        with OnnxPen(stage.file(component, f"{component}.onnx"), PRECISIONS[dtype]) as pen:
            graph_from(stored, component, **arguments)(pen)
        return Drawn(pen.inputs, pen.outputs)
    from .trt_build import in_a_process, record_file

    folder = stage.file(component, "config.json").parent
    where = str(stage.out / component)
    given = {
        "where": where, "folder": str(folder), "component": component, "checkpoint": str(stored.path), "prefixes": stored.prefixes,
        "graph": [graph_from.__module__, graph_from.__name__], "arguments": arguments,
        "options": stage.identity.options, "stamp": stage.identity.stamp(),
    }  # fmt: skip
    said = in_a_process(where, "vla_eval.engines.draw", given=json.dumps(given))
    stored.seen.update(said["read"])
    plan = Path(said["plan"])
    stage.local.update(f"{component}/{file.name}" for file in (plan, record_file(plan)))
    return Drawn(*(_edges(said["tensor_contract"][side]) for side in ("inputs", "outputs")))


def _edges(said: Mapping[str, Any]) -> dict[str, Value]:
    """One side of a `tensor_contract` as the pen had it; the handles were the other process's."""

    def shape(axes: Any) -> tuple[int | Axis, ...]:
        return tuple(n if isinstance(n, int) else Axis(n["axis"], n["min"], n["opt"], n["max"]) for n in axes)

    return {name: Value(None, told["dtype"], shape(told["axes"])) for name, told in said.items()}


def _main() -> int:
    from .trt_build import answer, build_drawn

    given = json.load(sys.stdin)

    def work() -> Mapping[str, Any]:
        stored = open_checkpoint(given["checkpoint"], given["prefixes"])
        if stored.fingerprint != given["stamp"]["checkpoint_fingerprint"]:
            raise BadRequest(f"{stored.path} was changed while a bundle was made of it; build it again")
        module, name = given["graph"]
        graph = getattr(import_module(module), name)(stored, given["component"], **given["arguments"])
        config, built = build_drawn(Path(given["folder"]), given["component"], graph, given["options"], given["stamp"])
        return {"plan": str(built.plan), "tensor_contract": config["tensor_contract"], "read": sorted(stored.seen)}

    return answer(given["where"], work)


if __name__ == "__main__":
    raise SystemExit(_main())
