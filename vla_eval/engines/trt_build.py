"""A component to a TensorRT plan: an ONNX file or a drawn network, its profile, its caches, and a record of what was built."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..types import BadRequest, ContractMismatch, VlaEvalError
from . import trt
from .bundle import ENDS, Bundle, Component, open_bundle
from .graph import PRECISIONS, Axis, Graph, Value
from .trt_pen import TYPES, TrtPen

_log = logging.getLogger(__name__)
ANY_CARD = "any"  # in a plan's name: built where no GPU was, for every card that the flavour knows
NOT_INSPECTED = "not inspected"
REFUSED = 2  # exit code of a process that builds and says in one sentence why it did not


@dataclass(frozen=True, slots=True)
class Built:
    """A plan that stands in its component's folder."""

    component: str
    plan: Path
    seconds: float
    bytes: int
    new: bool  # False: an up-to-date plan was there
    weights: int  # bytes, as the graph keeps them
    peak: int  # bytes of memory that the process which built it has held at once


def build(bundle: Bundle, components: Sequence[str] = (), *, force: bool = False) -> list[Built]:
    """Plans for this machine, each component built in a process of its own: what a build has taken is given back before the next.

    Raises BadRequest for a component that the bundle lacks or that was built directly, VlaEvalError with the reason of a failed build.
    """
    trt.door()
    chosen = [bundle.component(name) for name in components or bundle.components]
    if bundle.frontend != "onnx":
        raise BadRequest(f"{bundle.path} was built directly and has no ONNX graph; build it again with vla-eval build --direct --model …")
    found = []
    for component in chosen:
        words = [str(bundle.path), component.name, *(["--force"] if force else [])]
        found.append(standing(component, new=in_a_process(str(component.folder), "vla_eval.engines.trt_build", *words)["new"]))
    return found


def standing(component: Component, *, new: bool) -> Built:
    """The plan of a component for this machine, which is there, as its record tells of it."""
    path = plan_file(component, card_here())
    said = record_of(path)
    seconds, peak = float(said.get("seconds", 0.0)), int(said.get("peak_bytes", 0))
    return Built(component.name, path, seconds, path.stat().st_size, new, int(said.get("weights_bytes", 0)), peak)


def plan_file(component: Component, sm: str) -> Path:
    """Where the plan of a component for a card such as "sm90" lies, under the TensorRT of this environment."""
    return component.folder / f"{component.name}.{trt.door().short}-{sm}-b{component.config['options']['batch']}.engine"


def build_component(component: Component, *, force: bool = False) -> Built:
    """One plan from its ONNX graph, in this process. An older plan stays until the new one is whole."""
    sm = card_here()
    path = plan_file(component, sm)
    if not force and path.is_file() and record_of(path).get("source") == _source(component):
        return standing(component, new=False)
    if (data := f"{component.name}.onnx.data") in component.config["artifacts"]:
        component.file(data)
    graph = component.file(f"{component.name}.onnx")
    began = time.perf_counter()
    builder, network = new_network()
    parser = trt.door().api.OnnxParser(network, trt.logger())
    if not parser.parse_from_file(str(graph)):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise VlaEvalError(f"{graph}: TensorRT cannot read it ({errors or trt.complaint()}); export the component again")
    plan, said = serialize(builder, network, component.config, str(component.folder), timing_file(path))
    del parser, network, builder
    weights = sum(told["bytes"] for file, told in component.config["artifacts"].items() if ".onnx" in file)
    said |= {"source": _source(component), "weights_bytes": weights}
    return write_plan(path, plan, said, component.name, component.config, sm, began)


def build_drawn(
    folder: Path, name: str, draw: Callable[[Graph], None], options: Mapping[str, Any], stamp: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Built]:
    """One plan from a function that draws, with no ONNX in between, written into `folder`, and what its `config.json` will say.

    The network is held against that like any other. `options` and `stamp` are the export's.
    """
    sm, began = card_here(), time.perf_counter()
    builder, network = new_network()
    pen = TrtPen(network, PRECISIONS[str(options["dtype"])])  # keeps the numbers of its weights alive until the plan is there
    draw(pen)
    said = config_of(pen, options, stamp)
    plan, about = serialize(builder, network, said, str(folder))
    about |= {"source": "drawn", "weights_bytes": pen.weights_bytes}
    del pen, network, builder
    path = folder / f"{name}.{trt.door().short}-{sm}-b{options['batch']}.engine"
    return said, write_plan(path, plan, about, name, said, sm, began)


def new_network() -> tuple[Any, Any]:
    """A builder and an empty strongly typed network."""
    api = trt.door().api
    builder = api.Builder(trt.logger())
    return builder, builder.create_network(1 << int(api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def serialize(builder: Any, network: Any, config: Mapping[str, Any], where: str, timing: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """The plan's bytes, and what the network was found to be. Raises ContractMismatch before building, VlaEvalError where it fails.

    `timing` holds what earlier builds have measured, for the full TensorRT; the other one measures nothing while it builds.
    """
    api = trt.door().api
    timing = timing if trt.door().name == "tensorrt" else None
    found = read_network(network)
    check_network(found, config, where)
    settings = builder.create_builder_config()
    settings.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    if config["options"]["dtype"] == "fp32":
        settings.clear_flag(api.BuilderFlag.TF32)  # float32 is the truth: its products keep all their bits
    profile = builder.create_optimization_profile()
    for name, shapes in _shapes(config).items():
        profile.set_shape(name, *shapes)
    if settings.add_optimization_profile(profile) < 0:
        raise ContractMismatch(f"{where}: TensorRT refuses the optimization_profile ({trt.complaint()}); export the component again")
    if timing is not None:
        measured = settings.create_timing_cache(timing.read_bytes() if timing.is_file() else b"")
        settings.set_timing_cache(measured, False)
    plan = builder.build_serialized_network(network, settings)
    if plan is None:
        raise VlaEvalError(f"{where}: TensorRT could not build it ({trt.complaint()}); the plan that was there stays")
    if timing is not None:
        replace_file(timing, memoryview(measured.serialize()))
    return plan, {"network": found}


def read_network(network: Any) -> dict[str, Any]:
    """What a network is just before it is built: inputs and outputs with type and shape, and how many layers of each kind and type."""
    types = {getattr(trt.door().api.DataType, theirs): ours for ours, theirs in TYPES.items()}

    def side(count: int, get: Callable[[int], Any]) -> dict[str, Any]:
        tensors = [get(i) for i in range(count)]
        return {t.name: {"dtype": types.get(t.dtype, str(t.dtype)), "shape": [int(n) for n in t.shape]} for t in tensors}

    layers: dict[str, int] = {}
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        key = f"{layer.type.name} {types.get(layer.get_output(0).dtype, '?') if layer.num_outputs else ''}".strip()
        layers[key] = layers.get(key, 0) + 1
    return {
        "inputs": side(network.num_inputs, network.get_input), "outputs": side(network.num_outputs, network.get_output),
        "layers": dict(sorted(layers.items())),
    }  # fmt: skip


def check_network(found: Mapping[str, Any], config: Mapping[str, Any], where: str) -> None:
    """Hold a network's inputs and outputs against `tensor_contract`. Raises ContractMismatch, naming the tensor."""
    for side in ("inputs", "outputs"):
        said = {
            name: {"dtype": told["dtype"], "shape": [n if isinstance(n, int) else -1 for n in told["axes"]]}
            for name, told in config["tensor_contract"][side].items()
        }
        for name in sorted({*said, *found[side]}):
            if said.get(name) != found[side].get(name):
                has, wanted = (_told(table.get(name)) for table in (found[side], said))
                raise ContractMismatch(
                    f"{where}: {side[:-1]} {name!r} is {has} in the network, {wanted} in config.json; export the component again"
                )


def write_plan(
    path: Path, plan: Any, said: Mapping[str, Any], component: str, config: Mapping[str, Any], sm: str, began: float,
    *, inspection: Any = None,
) -> Built:  # fmt: skip
    """The plan and its record, each under a temporary name first. The plan is inspected where it can be loaded, unless it was."""
    flavour, view = trt.door(), memoryview(plan)
    scratch: int | None = None
    if inspection is None:
        inspection, scratch = (NOT_INSPECTED, None) if sm == ANY_CARD else _inspect(view)
    record = {
        "component": component, "export_id": config["export_id"], "frontend": config["frontend"], "flavour": flavour.name,
        "version": flavour.version, "sm": sm, "batch": config["options"]["batch"], "dtype": config["options"]["dtype"],
        "optimization_profile": config["optimization_profile"], "sha256": hashlib.sha256(view).hexdigest(), "bytes": view.nbytes,
        "seconds": round(time.perf_counter() - began, 3), **said, "peak_bytes": peak_memory(),
        **({} if scratch is None else {"scratch_bytes": scratch}), "inspection": inspection,
    }  # fmt: skip
    replace_file(path, view)
    replace_file(record_file(path), json.dumps(record, indent=1).encode() + b"\n")
    cache_file(path).unlink(missing_ok=True)  # it was of the plan before
    return Built(component, path, record["seconds"], view.nbytes, True, record.get("weights_bytes", 0), record["peak_bytes"])


def record_file(plan: Path) -> Path:
    """What stands beside a plan: which export, card and version it is of, its digest, and the inspector's report."""
    return plan.with_name(f"{plan.name}.inspect.json")


def cache_file(plan: Path) -> Path:
    """The kernels that this card has compiled for the plan."""
    return plan.with_name(f"{plan.name}.cache")


def timing_file(plan: Path) -> Path:
    """What the full TensorRT has measured on this card while building; named, as the plan is, for flavour, version and card."""
    return plan.with_suffix(".timing")


def record_of(plan: Path) -> dict[str, Any]:
    """The record beside a plan; empty if there is none that can be read."""
    try:
        said = json.loads(record_file(plan).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def card_here() -> str:
    """The GPU of this machine as plans are named for it, such as "sm90"; "any" without one."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return ANY_CARD
    status, count = runtime.cudaGetDeviceCount()
    if int(status) or not count:
        return ANY_CARD
    kinds = runtime.cudaDeviceAttr
    parts = (kinds.cudaDevAttrComputeCapabilityMajor, kinds.cudaDevAttrComputeCapabilityMinor)
    return "sm" + "".join(str(runtime.cudaDeviceGetAttribute(kind, 0)[1]) for kind in parts)


def config_of(pen: TrtPen, options: Mapping[str, Any], stamp: Mapping[str, Any]) -> dict[str, Any]:
    """What a drawn graph's `config.json` will say about its tensors, in the same words."""
    from .bundle import contract

    def shape(value: Value, end: str) -> list[int]:
        return [getattr(n, end) if isinstance(n, Axis) else n for n in value.shape]

    return {
        **stamp, "options": options, "optimization_profile": {end: {n: shape(v, end) for n, v in pen.inputs.items()} for end in ENDS},
        "tensor_contract": {"inputs": contract(pen.inputs), "outputs": contract(pen.outputs)},
    }  # fmt: skip


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Least, tuned and most shape of every input with a length that varies."""
    profile, inputs = config["optimization_profile"], config["tensor_contract"]["inputs"]
    open_ends = [name for name, said in inputs.items() if not all(isinstance(n, int) for n in said["axes"])]
    return {name: tuple(tuple(profile[end][name]) for end in ENDS) for name in open_ends}


def _inspect(plan: memoryview) -> tuple[Any, int | None]:
    """The inspector's report of a plan and the bytes of scratch memory that one request takes, where this machine can load it."""
    api = trt.door().api
    engine = api.Runtime(trt.logger()).deserialize_cuda_engine(plan)
    if engine is None:
        return f"{NOT_INSPECTED}: {trt.complaint()}", None
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(api.LayerInformationFormat.JSON)
    scratch = int(engine.device_memory_size_v2)
    try:
        return json.loads(text), scratch
    except ValueError:
        return text, scratch


def _source(component: Component) -> str:
    """The digest of everything that a plan is made from."""
    config = component.config
    said = [config["export_id"], config["optimization_profile"], config["tensor_contract"], config["artifacts"]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def in_a_process(where: str, module: str, *words: str, given: str = "") -> dict[str, Any]:
    """What `python -m MODULE WORDS`, which reads `given`, answers in its last line: JSON.

    Raises VlaEvalError with the sentence that it refuses with, or saying that it was killed while it built `where`.
    """
    done = subprocess.run([sys.executable, "-m", module, *words], input=given, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        raise VlaEvalError(f"{where}: the build was killed by signal {-done.returncode} (out of memory?); the old plan stays")
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"]
        if done.returncode != REFUSED:
            raise RuntimeError(f"building {where} failed:\n{done.stderr.strip()}")
        raise VlaEvalError(told[-1])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def answer(where: str, work: Callable[[], Mapping[str, Any]]) -> int:
    """The other side of `in_a_process`: print what `work` gives, or one sentence why it gave nothing. The process's exit code."""
    try:
        said = work()
    except VlaEvalError as error:
        told = str(error)
    except MemoryError:
        told = f"{where}: there is not enough memory to build it; the old plan stays"
    except OSError as error:
        told = f"{where}: {error.strerror or error} while it was built; the old plan stays"
    else:
        sys.stdout.write(json.dumps(said) + "\n")
        return 0
    sys.stderr.write(f"{told}\n")
    return REFUSED


def peak_memory() -> int:
    """Bytes that this process has held at most, since it became this program."""
    try:
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:  # getrusage would count what the parent held when it forked
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _told(tensor: Mapping[str, Any] | None) -> str:
    return "missing" if tensor is None else f"{tensor['dtype']} {tensor['shape']}"


def _main(bundle: str, component: str, *flags: str) -> int:
    def work() -> Mapping[str, Any]:
        return {"new": build_component(open_bundle(bundle).component(component), force="--force" in flags).new}

    return answer(f"{bundle}/{component}", work)


if __name__ == "__main__":
    raise SystemExit(_main(*sys.argv[1:]))
