"""The folder between building and running: what is in it, whether it belongs together, and how it is written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from ..types import TensorSpec, Vector

CONTRACT_VERSION = 1
Frontend = Literal["onnx", "direct"]  # which pen drew the graphs
COMPONENTS = ("visual", "vl_backbone", "prefix", "action", "cond")  # every component any of our models has
_JSON_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """What an export was made from: everything that changes an engine, and nothing else."""

    model: str  # "gr00t"
    frontend: Frontend
    fingerprint: str  # of the checkpoint's weights
    options: Mapping[str, Any]  # dtype, batch, steps, embodiment, geometry …: plain JSON

    @property
    def export_id(self) -> str:
        """32 hex digits that every component of one export shares."""
        said = {
            "contract_version": CONTRACT_VERSION, "version": version("vla-eval-trt"), "model": self.model, "frontend": self.frontend,
            "checkpoint_fingerprint": self.fingerprint, "options": self.options,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Component:
    """One component's folder, its `config.json` checked."""

    name: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def dtype(self) -> str: ...  # "fp32", "fp16", "bf16": the storage type of its weights and activations
    def file(self, name: str) -> Path: ...  # an artifact, its digest checked now
    def tensors(self, name: str) -> dict[str, Vector]: ...  # the arrays of a safetensors artifact, digest checked


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder whose components belong together: same export, same route, known contract."""

    path: Path
    model: str  # "gr00t", "pi05"
    frontend: Frontend
    export_id: str
    fingerprint: str
    components: Mapping[str, Component]
    policy: Mapping[str, Any]  # policy.json, whole
    options: Mapping[str, Any]  # as Identity.options: dtype, batch, steps, max_text, …
    digest: str  # SHA-256 over policy.json and every config.json, which hold the digests of all else

    def component(self, name: str) -> Component: ...  # BadRequest with the command that makes it, if absent


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """The bundle in that folder. Raises BadRequest if it is none, ContractMismatch if it contradicts itself.

    Nothing is deserialised but JSON; artifacts are checked against their digests when they are asked for.
    """
    raise NotImplementedError


@dataclass
class Stage:
    """A bundle being written: files gather under temporary names until all of them are there."""

    out: Path
    identity: Identity
    folder: Path
    made: list[str] = field(default_factory=list)

    def file(self, component: str, name: str) -> Path: ...  # where to write an artifact
    def finish(self, component: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], **builder_config: Any) -> None: ...


@contextlib.contextmanager
def staged(out: str | os.PathLike[str], identity: Identity, policy: Mapping[str, Any], where: str = "policy.json") -> Iterator[Stage]:
    """Write a bundle, or some components of one. Refuses, before a byte moves, a folder that holds anything but this same export."""
    raise NotImplementedError
    yield
