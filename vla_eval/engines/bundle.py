"""The folder between building and running: what is in it, whether it belongs together, and how it is written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from ..types import BadRequest, ContractMismatch, TensorSpec, Vector
from .graph import PRECISIONS, Axis, Value
from .reading import Contents, begin, head_of
from .weights import read_json, read_tensors

CONTRACT_VERSION = 1
Frontend = Literal["onnx", "direct"]  # which pen drew the graphs
ENDS = ("min", "opt", "max")
SHARED = ("tokenizer", "text_tokenizer", "assets")  # folders of a bundle that are no components
_STAGING = ".staging-"
_IDENTITY = ("export_id", "frontend", "checkpoint_fingerprint", "model", "version")


@dataclass(frozen=True, slots=True)
class Identity:
    """What an export was made from: everything that changes an engine, and nothing else."""

    model: str  # "gr00t"
    frontend: Frontend
    fingerprint: str  # of the checkpoint's weights
    options: Mapping[str, Any]  # dtype, batch, steps, embodiment, geometry …: plain JSON
    version: str = field(default_factory=lambda: version("vla-eval-trt"))  # of the program that exports

    @property
    def export_id(self) -> str:
        """32 hex digits that every component of one export shares."""
        said = {
            "contract_version": CONTRACT_VERSION, "version": self.version, "model": self.model, "frontend": self.frontend,
            "checkpoint_fingerprint": self.fingerprint, "options": self.options,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]

    def stamp(self) -> dict[str, Any]:
        """What `policy.json` and every `config.json` carry."""
        return {
            "contract_version": CONTRACT_VERSION, "export_id": self.export_id, "frontend": self.frontend,
            "checkpoint_fingerprint": self.fingerprint, "model": self.model, "version": self.version,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Component:
    """One component's folder, its `config.json` checked."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    _begun: dict[str, Future[Contents]] = field(default_factory=dict, repr=False, compare=False)  # artifacts that are read ahead

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Its inputs; what may vary is bounded by the optimisation profile."""
        profile, found = self.config["optimization_profile"], []
        for name, said in self.config["tensor_contract"]["inputs"].items():
            lengths = (
                zip(*(profile[end][name] for end in ENDS), strict=True) if name in profile["opt"] else [(n,) * 3 for n in said["axes"]]
            )
            shape = (n[0] if isinstance(axis, int) else n for axis, n in zip(said["axes"], lengths, strict=True))
            found.append(TensorSpec(name, said["dtype"], tuple(shape)))
        return tuple(found)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Its outputs."""
        return tuple(
            TensorSpec(name, said["dtype"], tuple(n if isinstance(n, int) else tuple(n[end] for end in ENDS) for n in said["axes"]))
            for name, said in self.config["tensor_contract"]["outputs"].items()
        )

    @property
    def dtype(self) -> str:
        """The storage type of its weights and activations, as `--dtype` says it: "fp32", "fp16" or "bf16"."""
        return str(self.config["options"]["dtype"])

    def file(self, name: str) -> Path:
        """An artifact, its digest checked now. Raises BadRequest if it is missing, ContractMismatch if it is another file."""
        path, said = self._artifact(name)
        self._check(path, head_of(path), right=path.stat().st_size == said["bytes"] and file_digest(path) == said["sha256"])
        return path

    def ahead(self, *names: str) -> int:
        """Begin to read artifacts that `tensors` will be asked for; how many bytes they are. Raises BadRequest if one is missing."""
        size = 0
        for name in names:
            path, said = self._artifact(name)
            size += int(said["bytes"])
            if name not in self._begun:
                self._begun[name] = begin(path, said["bytes"], said["sha256"])
        return size

    def tensors(self, name: str) -> dict[str, Vector]:
        """The arrays of a safetensors artifact, whose bytes were read once and hashed before. Raises as `file` does."""
        self.ahead(name)
        path = self.folder / name
        try:
            head, data = self._begun.pop(name).result()
        except OSError as error:
            raise BadRequest(f"{path} cannot be read ({error.strerror}); copy the bundle again") from error
        self._check(path, head, right=data is not None)
        return read_tensors(path, data)

    def _artifact(self, name: str) -> tuple[Path, Mapping[str, Any]]:
        path, said = self.folder / name, self.config["artifacts"].get(name)
        if said is None or not path.is_file():
            raise BadRequest(f"{path} is missing; export the component again: --components {self.name}")
        return path, said

    def _check(self, path: Path, head: bytes, *, right: bool) -> None:
        if strange := impostor(path, head):
            raise ContractMismatch(f"{path} is {strange}; copy the bundle again, or export the component again")
        if not right:
            raise ContractMismatch(
                f"{path} is not the file that was exported (its SHA-256 differs); copy the bundle again or export it again"
            )


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

    def component(self, name: str) -> Component:
        """The component of that name. Raises BadRequest if the bundle lacks it."""
        if name not in self.components:
            raise BadRequest(f"{self.path} has no component {name!r}; add it with vla-eval export … --components {name}")
        return self.components[name]


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """The bundle in that folder. Raises BadRequest if it is none, ContractMismatch if it contradicts itself.

    Nothing is deserialised but JSON; artifacts are checked against their digests when they are asked for.
    """
    folder = Path(path)
    configs = sorted(file for file in folder.glob("*/config.json") if file.parent.name not in SHARED)
    if not configs and any(folder.glob(f"{_STAGING}*")):
        raise BadRequest(f"{folder}: an export into it is under way or did not finish; wait for it, or run it again")
    if not configs:
        raise BadRequest(f"{folder}: no bundle, it has no component with a config.json; make one with vla-eval export")
    policy_files = [file for file in (folder / "policy.json", folder / "action" / "policy.json") if file.exists()]
    if not policy_files:
        raise BadRequest(f"{folder}: no policy.json, which is written last: the export did not finish; run it again")
    if len(policy_files) > 1:
        raise ContractMismatch(f"{folder} has two contracts, policy.json and action/policy.json; remove the one that no export wrote")
    (policy_file,) = policy_files
    policy = _stamped(policy_file)
    trained = policy.get("trained_for", [])
    if not isinstance(trained, list) or not all(isinstance(suite, str) for suite in trained):
        raise ContractMismatch(f"{policy_file}: trained_for is {trained!r}, no list of suites; export the checkpoint again")
    components = {file.parent.name: Component(file.parent.name, file.parent, _config(file)) for file in configs}
    for component in components.values():
        for name in _IDENTITY:
            if component.config[name] != policy[name]:
                raise ContractMismatch(
                    f"{component.folder / 'config.json'}: {name} is {component.config[name]!r}, {policy_file.relative_to(folder)} has "
                    f"{policy[name]!r}; these come from two exports, make all components by one"
                )
        options = component.config["options"]
        made = Identity(policy["model"], policy["frontend"], policy["checkpoint_fingerprint"], options, policy["version"])
        if made.export_id != policy["export_id"]:
            raise ContractMismatch(
                f"{component.folder / 'config.json'}: its options are not those of export {policy['export_id']}, so somebody has edited "
                "them; export the component again"
            )
    first = next(iter(components.values())).config
    digest = hashlib.sha256()
    for file in (*configs, policy_file):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return Bundle(
        folder, policy["model"], policy["frontend"], policy["export_id"], policy["checkpoint_fingerprint"], components, policy,
        first["options"], digest.hexdigest(),
    )  # fmt: skip


def findings(bundle: Bundle) -> list[str]:
    """Everything about the bundle's files that does not hold, a sentence each; reads every artifact."""
    found = []
    for component in bundle.components.values():
        for name in component.config["artifacts"]:
            try:
                component.file(name)
            except (BadRequest, ContractMismatch) as error:
                found.append(str(error))
    return found


def uncovered(bundle: Bundle) -> dict[str, str]:
    """Files that no identity covers, such as the tokenizer and statistics staged after the export: name -> SHA-256."""
    files = (file for folder in SHARED for file in sorted((bundle.path / folder).rglob("*")) if file.is_file())
    return {str(file.relative_to(bundle.path)): file_digest(file) for file in files}


def impostor(path: Path, head: bytes) -> str | None:
    """What a file is that claims to be an engine, a graph or a table and is not, by its first bytes: of the kinds that are met."""
    head = head.lstrip()
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a large-file pointer, not the file itself: fetch it with git lfs or hf download"
    if head.lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):  # weights may begin with the byte of "<"
        return "a web page saved under that name"
    if path.suffix == ".engine" and head.startswith(b"\x08"):
        return "an ONNX graph, not a plan: build it with vla-eval build"
    return None


def check_profile(where: str, axes: Mapping[str, Sequence[Any]], profile: Any) -> None:
    """Refuse an optimisation profile that does not fit the graph's inputs; `axes` has an int where a length is fixed.

    The profile is {"min"|"opt"|"max": {tensor: lengths}}. Raises ContractMismatch, naming tensor and axis.
    """
    if not isinstance(profile, dict) or set(profile) != set(ENDS) or not all(isinstance(table, dict) for table in profile.values()):
        raise ContractMismatch(f"{where}: optimization_profile must hold min, opt and max, each a table of shapes")
    for name in sorted({name for table in profile.values() for name in table}):
        if name not in axes:
            raise ContractMismatch(f"{where}: optimization_profile names {name!r}; the graph has {', '.join(axes)}")
    for name, lengths in axes.items():
        shapes = [profile[end].get(name) for end in ENDS]
        if all(shape is None for shape in shapes) and all(isinstance(n, int) for n in lengths):
            continue
        if any(not isinstance(shape, list) or len(shape) != len(lengths) for shape in shapes):
            raise ContractMismatch(f"{where}: optimization_profile of {name!r} needs min, opt and max with {len(lengths)} lengths each")
        for i, (axis, said) in enumerate(zip(lengths, zip(*shapes, strict=True), strict=True)):
            if not all(type(n) is int and n > 0 for n in said) or not said[0] <= said[1] <= said[2]:
                raise ContractMismatch(
                    f"{where}: optimization_profile of {name!r}, axis {i}: wanted 0 < min <= opt <= max, found {list(said)}"
                )
            if isinstance(axis, int) and set(said) != {axis}:
                raise ContractMismatch(
                    f"{where}: optimization_profile of {name!r}, axis {i}: the graph has {axis} there, found {list(said)}"
                )


@dataclass(frozen=True, slots=True)
class Stage:
    """A bundle being written: files gather in a folder of their own until all of them are there."""

    out: Path
    identity: Identity
    folder: Path
    order: list[str] = field(default_factory=list)  # the staged files, in the order in which they come to their place
    local: set[str] = field(default_factory=set)  # staged files that belong to this machine and not to the export, such as plans

    def file(self, component: str, name: str) -> Path:
        """Where to write an artifact of a component."""
        (self.folder / component).mkdir(exist_ok=True)
        return self.folder / component / name

    def finish(self, component: str, inputs: Mapping[str, Value], outputs: Mapping[str, Value], **builder_config: Any) -> None:
        """Every artifact of the component is written: note their digests in its `config.json`."""
        files = sorted((self.folder / component).iterdir())
        artifacts = {
            file.name: {"sha256": file_digest(file), "bytes": file.stat().st_size}
            for file in files
            if f"{component}/{file.name}" not in self.local
        }
        profile = {
            end: {name: [n if isinstance(n, int) else getattr(n, end) for n in value.shape] for name, value in inputs.items()}
            for end in ENDS
        }
        config = {
            "component": component, **self.identity.stamp(), "optimization_profile": profile,
            "tensor_contract": {"inputs": contract(inputs), "outputs": contract(outputs)},
            "builder_config": builder_config, "options": self.identity.options, "artifacts": artifacts,
        }  # fmt: skip
        _write_json(self.file(component, "config.json"), config)
        self.order.extend([f"{component}/{name}" for name in (*(file.name for file in files), "config.json")])

    def shared(self, name: str) -> Path:
        """Where to write a file that belongs to the bundle as a whole."""
        self.order.append(name)
        return self.folder / name

    def copy(self, source: Path, name: str, patterns: Sequence[str]) -> None:
        """Files that every component shares, such as the tokenizer: those of a folder that fit the patterns, under `name`."""
        (self.folder / name).mkdir()
        for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
            if file.is_file():
                shutil.copyfile(file, self.folder / name / file.name)
                self.order.append(f"{name}/{file.name}")


@contextlib.contextmanager
def staged(out: str | os.PathLike[str], identity: Identity, policy: Mapping[str, Any], where: str = "policy.json") -> Iterator[Stage]:
    """Write a bundle, or some components of one; leaving the block brings every file to its place, `policy.json` last.

    Raises BadRequest, before a byte moves, for a folder that holds anything but this same export, or this export with another policy
    contract. If the block raises, what it wrote is removed and nothing else.
    """
    folder = Path(out)
    stamped = {**identity.stamp(), **policy}
    _check_destination(folder, stamped, where)
    created = not folder.exists()
    try:
        with workplace(folder, _STAGING, alone=True) as staging:
            stage = Stage(folder, identity, staging)
            yield stage
            (staging / where).parent.mkdir(exist_ok=True)
            _write_json(staging / where, stamped)
            for name in (*stage.order, where):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (staging / name).replace(folder / name)
    finally:
        if created and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextlib.contextmanager
def workplace(folder: Path, prefix: str, *, alone: bool = False) -> Iterator[Path]:
    """A hidden folder inside `folder` for what is not finished yet, locked while it is in use and removed at the end.

    What killed processes left under that prefix is removed first. Raises BadRequest if what is written inside does not fit on the disk
    or may not be written, and, with `alone`, if another process is at work there.
    """
    place = folder / f"{prefix}{os.getpid()}"
    with contextlib.ExitStack() as held:
        try:
            for left in sorted(folder.glob(f"{prefix}*")):
                with _locked(left) as ours:
                    if ours:
                        shutil.rmtree(left)
                    elif alone:
                        raise BadRequest(f"{folder}: another process is writing there; wait for it or choose another folder")
            place.mkdir(parents=True)
            held.callback(shutil.rmtree, place, ignore_errors=True)
            held.enter_context(_locked(place))
            yield place
        except OSError as error:
            raise BadRequest(
                f"{folder}: cannot be written to its end ({error}), and what was begun is removed; make room there or choose another folder"
            ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the folder could be locked: not if another process has it."""
    handle, ours = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        yield ours
    finally:
        os.close(handle)


def _check_destination(folder: Path, stamped: Mapping[str, Any], where: str) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise BadRequest(f"{folder} is a file; --out wants a folder that is empty or holds this same export")
    entries = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(_STAGING))
    known = [file for file in (folder / where, *folder.glob("*/config.json")) if file.exists() and file.parent.name not in SHARED]
    if entries and not known:
        raise BadRequest(f"{folder} holds {entries[0]!r} and is no bundle; choose an empty folder")
    for file in known:
        said = read_json(file)
        found = said.get("export_id") if isinstance(said, dict) else None
        if found != stamped["export_id"]:
            raise BadRequest(
                f"{file} is of export {found}, this one is {stamped['export_id']}; choose another --out, or remove that bundle"
            )
        if file == folder / where:
            plain = json.loads(json.dumps(stamped))
            changed = sorted(name for name in {*said, *plain} if said.get(name) != plain.get(name))
            if changed:
                raise BadRequest(f"{file} differs in {', '.join(changed)} from what this export would write; choose another --out")


def _stamped(file: Path) -> dict[str, Any]:
    said = read_json(file)
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) and said[name] for name in _IDENTITY):
        raise ContractMismatch(f"{file} carries no identity ({', '.join(_IDENTITY)}); export it again")
    if said.get("contract_version") != CONTRACT_VERSION:
        raise ContractMismatch(
            f"{file}: contract_version is {said.get('contract_version')!r}, this vla-eval reads {CONTRACT_VERSION}; export again"
        )
    if said["frontend"] not in ("onnx", "direct"):
        raise ContractMismatch(f"{file}: frontend is {said['frontend']!r}, neither 'onnx' nor 'direct'; export it again")
    return said


def _config(file: Path) -> dict[str, Any]:
    config = _stamped(file)
    try:
        if config["component"] != file.parent.name:
            raise ContractMismatch(f"{file} is of component {config['component']!r}; move it back to its folder, or export again")
        for side in ("inputs", "outputs"):
            for name, said in config["tensor_contract"][side].items():
                if len(said["axes"]) != said["rank"] or not isinstance(said["dtype"], str):
                    raise ContractMismatch(f"{file}: tensor_contract of {name!r} has {len(said['axes'])} axes and rank {said['rank']}")
                if not all(type(n) is int or all(type(n[end]) is int for end in ENDS) for n in said["axes"]):
                    raise ContractMismatch(f"{file}: tensor_contract of {name!r} has an axis that is neither a length nor min, opt and max")
        check_profile(
            str(file), {n: said["axes"] for n, said in config["tensor_contract"]["inputs"].items()}, config["optimization_profile"]
        )
        if not isinstance(config["builder_config"], dict):
            raise ContractMismatch(f"{file}: builder_config is no table; export the component again")
        if config["options"]["dtype"] not in PRECISIONS:
            raise ContractMismatch(f"{file}: dtype is {config['options']['dtype']!r}, none of {', '.join(PRECISIONS)}")
        for name, said in config["artifacts"].items():
            if Path(name).name != name or not isinstance(said["sha256"], str) or not isinstance(said["bytes"], int):
                raise ContractMismatch(f"{file}: artifact {name!r} is no plain file with digest and size; export again")
    except (KeyError, TypeError, AttributeError) as error:
        raise ContractMismatch(f"{file} is not whole ({type(error).__name__}: {error}); export the component again") from error
    return config


def contract(values: Mapping[str, Value]) -> dict[str, Any]:
    """One side of a drawn graph as `tensor_contract` states it."""

    def axes(value: Value) -> list[Any]:
        return [{"axis": n.name, **{end: getattr(n, end) for end in ENDS}} if isinstance(n, Axis) else n for n in value.shape]

    return {name: {"dtype": value.dtype, "rank": len(value.shape), "axes": axes(value)} for name, value in values.items()}


def digest_of(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, said: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=1, allow_nan=False) + "\n", encoding="utf-8")
