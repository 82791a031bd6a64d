"""A component's graph into the bundle that is being written, by the route that the bundle takes: an ONNX file, or a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .bundle import Stage
from .graph import PRECISIONS, Graph, Value


class Drawn(NamedTuple):
    """The edges of a graph that stands in its bundle."""

    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]


def draw(stage: Stage, component: str, graph: Callable[[Graph], None]) -> Drawn:
    """Draw with the pen of the stage's frontend. A plan is this machine's own: it is staged, and no artifact of the export."""
    dtype = str(stage.identity.options["dtype"])
    if stage.identity.frontend == "onnx":
        from .onnx_pen import OnnxPen

        with OnnxPen(stage.file(component, f"{component}.onnx"), PRECISIONS[dtype]) as pen:
            graph(pen)
        return Drawn(pen.inputs, pen.outputs)
    from .trt_build import build_drawn, config_of, record_file

    folder = stage.file(component, "config.json").parent
    drawn, built = build_drawn(folder, component, dtype, graph, lambda pen: config_of(pen, stage.identity.options, stage.identity.stamp()))
    stage.local.update(f"{component}/{file.name}" for file in (built.plan, record_file(built.plan)))
    return Drawn(drawn.inputs, drawn.outputs)
