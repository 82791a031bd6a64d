"""ONNX Runtime behind the Engine protocol: tests, laptops, ground truth. Its device is the CPU, so its tensors are numpy arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..types import BadRequest, ContractMismatch, TensorSpec
from .bundle import Component
from .engine import Tensor, check_inputs, to_host

_TYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int32)": "int32", "tensor(int64)": "int64", "tensor(bool)": "bool",
}  # fmt: skip


class OrtEngine:
    """One component's ONNX graph in a session of its own."""

    def __init__(self, component: Component) -> None:
        """Raises BadRequest for what ONNX Runtime cannot run, ContractMismatch for files that are not the exported ones."""
        if component.dtype == "bf16":
            raise BadRequest(f"{component.folder} is bf16, which runs on TensorRT only; export with --dtype fp32 to run it here")
        if component.config["frontend"] != "onnx":
            raise BadRequest(
                f"{component.folder} was built directly and has no ONNX graph; run it on TensorRT, or make it with vla-eval export"
            )
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it would leave an identifier in the user's cache, and report to its maker
        import onnxruntime

        self.where = f"{component.folder}"
        if (data := f"{component.name}.onnx.data") in component.config["artifacts"]:
            component.file(data)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # its warnings speak of its own optimisers
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the simulators beside us want the cores
        graph = str(component.file(f"{component.name}.onnx"))
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the library's own kinds have no common root
            told = f"{graph}: ONNX Runtime {onnxruntime.__version__} cannot load it ({_line(error)})"
            raise ContractMismatch(f"{told}; export the component again with this version") from error
        self.inputs, self.outputs = component.inputs, component.outputs
        self.about = {"backend": "onnxruntime", "version": onnxruntime.__version__, "device": "cpu", "dtype": component.dtype}
        self._check(self._session.get_inputs(), self.inputs)
        self._check(self._session.get_outputs(), self.outputs)

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]:
        check_inputs(self.where, self.inputs, inputs)
        names = [spec.name for spec in self.outputs]
        fed = {name: to_host(tensor) for name, tensor in inputs.items()}
        try:
            return dict(zip(names, self._session.run(names, fed), strict=True))
        except Exception as error:  # as above; each input fits by itself, but not all of them together
            raise BadRequest(f"{self.where}: its inputs do not fit together ({_line(error)})") from error

    def _check(self, nodes: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
        said = {spec.name: (spec.dtype, tuple(n if isinstance(n, int) else None for n in spec.shape)) for spec in specs}
        found = {n.name: (_TYPES.get(n.type, n.type), tuple(i if isinstance(i, int) else None for i in n.shape)) for n in nodes}
        if said != found:
            wrong = sorted(name for name in {*said, *found} if said.get(name) != found.get(name))
            raise ContractMismatch(f"{self.where}: graph and config.json disagree about {', '.join(wrong)}; export the component again")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
