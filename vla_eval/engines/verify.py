"""Two ways to the same numbers: a bundle's components against a reference's, on the reference's own inputs, call by call."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..types import BadRequest, TensorSpec, Vector, VlaEvalError
from . import trt
from .bundle import Bundle
from .engine import Engine, chosen, load_engines, to_host
from .graph import NUMPY

_FAR = 1e308  # JSON has no infinity
SELFTEST = "selftest.npz"  # in every bundle: inputs of its components, written by the recipe
_KEY = re.compile(r"(?P<component>\w+)/(?P<call>\d+)/(?P<side>in|out)/(?P<name>\w+)")

Flat = Mapping[str, Vector]  # "action/2/in/state": component, call, side, tensor


class Gate(NamedTuple):
    """How far an output may be from the reference's. A cosine does not see a scale; the other two do."""

    cosine: float  # at least
    relative: float  # largest difference, at most, in parts of the reference's largest number
    scale: float  # distance from 1, at most, of the factor that fits the output to the reference best


GATES: dict[str, Gate] = {  # by the less precise of the two
    "fp32": Gate(0.999999, 2e-5, 1e-5),  # seven times float32's own rounding through the deepest component
    "tf32": Gate(0.99999, 5e-3, 1e-3),  # of fp32 plans of TensorRT for RTX: products of ten bits, off by 1.5e-3 on an H200
    "fp16": Gate(0.9999, 1e-2, 2e-3),
    "bf16": Gate(0.999, 4e-2, 1e-2),
}


CHUNK_COSINE, CHUNK_MAX_ABS = 0.99999, 5e-3  # of a whole normalised chunk against another program's, on its own tensors


@dataclass(frozen=True, slots=True)
class Row:
    """One output of one call, held against the reference's."""

    component: str
    call: int  # of the action: the denoise step
    output: str
    cosine: float
    max_abs: float
    relative: float
    scale: float  # 1 where it should be
    worst: tuple[int, ...]  # where the largest difference is; the last number is the dimension
    stale: bool  # the same bits as in an earlier call, where the reference's differ
    passed: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every row, and what they were judged by."""

    gate: Gate
    rows: tuple[Row, ...]
    not_compared: tuple[str, ...]  # components that only one of the two has: the bundle, or the reference

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def data(self) -> dict[str, Any]:
        """The verdict as plain JSON."""
        return {
            "passed": self.passed, "gate": self.gate._asdict(), "rows": [asdict(row) for row in self.rows],
            "not_compared": list(self.not_compared),
        }  # fmt: skip


def selftest(bundle: Bundle, inputs: Flat, engines: Mapping[str, Engine]) -> None:
    """Run the inputs that the bundle carries through its loaded components. Raises VlaEvalError, naming the first that gives no number."""
    for key, array in trace(bundle, inputs, engines=engines).items():
        component, call, side, name = key.split("/")
        if side == "out" and not np.isfinite(array).all():
            raise VlaEvalError(
                f"{bundle.path}: component {component!r} gives NaN or infinity in {name!r} (call {call}) on the bundle's own {SELFTEST}; "
                "export it in bf16 or fp32"
            )


def trace(bundle: Bundle, inputs: Flat, *, backend: str = "auto", engines: Mapping[str, Engine] | None = None) -> dict[str, Vector]:
    """What the bundle's components make of these inputs: the inputs again, and the outputs, under keys that `compare` reads.

    An input that is not given is taken from the last call of an earlier component whose output has its name, as in the policy.
    `engines` replaces loading them.
    """
    calls = _calls(inputs)
    found: dict[str, Vector] = {}
    made: dict[str, Vector] = {}
    for component in calls:
        engine = (engines or load_engines([bundle.component(component)], backend))[component]
        for call, given in enumerate(calls[component]):
            fed = _fed(component, call, {**made, **given["in"]}, engine.inputs)
            outputs = {name: to_host(tensor) for name, tensor in engine(**fed).items()}
            made |= outputs
            found |= {f"{component}/{call}/in/{name}": _plain(array) for name, array in fed.items()}
            found |= {f"{component}/{call}/out/{name}": _plain(array) for name, array in outputs.items()}
        del engine
    return found


def compare(
    bundle: Bundle, reference: Flat, *, precision: str | None = None, backend: str = "auto", engines: Mapping[str, Engine] | None = None
) -> Verdict:
    """The bundle's components on the reference's inputs, against the reference's outputs.

    `precision` is the reference's, if it is less than the bundle's; `engines` replaces loading them. Raises BadRequest for a reference
    that holds no outputs, another component's tensors, or shapes that do not fit.
    """
    told = _calls(reference)
    calls = {name: sides for name, sides in told.items() if name in bundle.components}
    if not any(call["out"] for sides in calls.values() for call in sides):
        raise BadRequest(f"the reference holds no output of {', '.join(bundle.components)}; its keys look like 'action/0/out/velocity'")
    precisions = [precision or "fp32", *(component.dtype for component in bundle.components.values())]
    if engines is not None:
        rtx = any(engine.about["backend"] == "tensorrt_rtx" for engine in engines.values())
    else:
        rtx = chosen(list(bundle.components.values()), backend) == "tensorrt" and trt.door().name == "tensorrt_rtx"
    if rtx:
        precisions.append("tf32")
    gate = GATES[max(precisions, key=list(GATES).index)]
    wanted = {key: array for key, array in reference.items() if key.partition("/")[0] in calls}
    found = trace(bundle, {key: array for key, array in wanted.items() if "/in/" in key}, backend=backend, engines=engines)
    rows = []
    for component, sides in calls.items():
        for call, side in enumerate(sides):
            for output, array in side["out"].items():
                key = f"{component}/{call}/out/{output}"
                if key not in found or found[key].shape != array.shape:
                    has = list(found[key].shape) if key in found else "no such output"
                    raise BadRequest(f"the reference's {key} is {list(array.shape)}, the bundle has {has}; it is of another model or batch")
                if not array.size:
                    raise BadRequest(f"the reference's {key} is empty; make it again")
                earlier = [c for c in range(call) if np.array_equal(found[f"{component}/{c}/out/{output}"], found[key])]
                stale = any(not np.array_equal(sides[c]["out"].get(output, array), array) for c in earlier)
                rows.append(_judge(component, call, output, found[key], array, gate, stale))
    return Verdict(gate, tuple(rows), tuple(sorted(set(bundle.components) ^ set(told))))


def score(found: Vector, wanted: Vector) -> Row:
    """A normalised chunk against another program's."""
    row = _judge("chunk", 0, "actions", found, wanted, Gate(CHUNK_COSINE, math.inf, math.inf), stale=False)
    return replace(row, passed=row.passed and row.max_abs <= CHUNK_MAX_ABS)


def _judge(component: str, call: int, output: str, found: Vector, wanted: Vector, gate: Gate, stale: bool) -> Row:
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    bad = ~(np.isfinite(a) & np.isfinite(b))
    if bad.any():  # NaN compares false with everything: say that it is as far off as can be
        worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        return Row(component, call, output, 0.0, _FAR, _FAR, 0.0, worst, stale, passed=False)
    difference = np.abs(a - b)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(difference)), difference.shape))
    largest, most = float(difference[worst]), float(np.abs(b).max())
    along, lengths = float(a.ravel() @ b.ravel()), (float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    same = not a.any() and not b.any()  # zero where zero is wanted
    cosine = along / math.prod(lengths) if all(lengths) else float(same)
    scale = along / lengths[1] ** 2 if lengths[1] else float(same)
    relative = largest / most if most else (0.0 if same else _FAR)
    passed = cosine >= gate.cosine and relative <= gate.relative and abs(scale - 1) <= gate.scale and not stale
    return Row(component, call, output, cosine, largest, relative, scale, worst, stale, passed)


def _calls(flat: Flat) -> dict[str, list[dict[str, dict[str, Vector]]]]:
    """Component -> its calls, each with the tensors that went in and came out."""
    found: dict[str, dict[int, dict[str, dict[str, Vector]]]] = {}
    for key, array in flat.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise BadRequest(f"{key!r} is no tensor of a reference; keys look like 'action/0/in/state'")
        if array.dtype.kind not in "biuf":
            raise BadRequest(f"the reference's {key} is {array.dtype}; tensors are real numbers or booleans")
        sides = found.setdefault(match["component"], {}).setdefault(int(match["call"]), {"in": {}, "out": {}})
        sides[match["side"]][match["name"]] = array
    for component, calls in found.items():
        if sorted(calls) != list(range(len(calls))):
            raise BadRequest(f"the reference's calls of {component!r} are {sorted(calls)}; they must count up from 0")
    return {component: [calls[i] for i in range(len(calls))] for component, calls in found.items()}


def _fed(component: str, call: int, known: Mapping[str, Vector], specs: Sequence[TensorSpec]) -> dict[str, Vector]:
    missing = [spec.name for spec in specs if spec.name not in known]
    if missing:
        raise BadRequest(f"the reference has no {component}/{call}/in/{missing[0]}; it is of another model or incomplete")
    return {spec.name: known[spec.name].astype(NUMPY[spec.dtype], copy=False) for spec in specs}  # type: ignore[index]


def _plain(array: Vector) -> Vector:
    """Files hold no bfloat16; float32 holds its numbers exactly."""
    return array.astype(np.float32) if array.dtype == NUMPY["bfloat16"] else array
