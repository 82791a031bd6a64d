"""Bundles: written whole or not at all, opened only if everything in them belongs together."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines.bundle import (
    CONTRACT_VERSION,
    ENDS,
    Frontend,
    Identity,
    check_profile,
    findings,
    impostor,
    open_bundle,
    staged,
    uncovered,
)
from vla_eval.engines.engine import check_inputs, describe, load_engine, load_engines, to_host
from vla_eval.engines.graph import PRECISIONS, Axis, axis
from vla_eval.engines.onnx_pen import OnnxPen
from vla_eval.engines.reading import head_of
from vla_eval.engines.verify import GATES, compare, trace
from vla_eval.types import BadRequest, ContractMismatch, TensorSpec

CASES = Path(__file__).parents[1] / "cases" / "engines"
POLICY = {"model_family": "small", "action": {"horizon": 4}}
WEIGHT = np.random.default_rng(1).normal(size=(300, 8)).astype(np.float32)


class Kept(NamedTuple):
    name: str
    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self) -> NDArray[Any]:
        return self.array


def identity(frontend: Frontend = "onnx", **options: Any) -> Identity:
    return Identity("small", frontend, "f" * 64, {"dtype": "fp32", "batch": 1, **options})


def write(out: Path, said: Identity | None = None, components: tuple[str, ...] = ("first", "action"), **policy: Any) -> Path:
    """`first`: x -> y = x W^T. `action`: y, noise -> velocity = y + noise."""
    said = said or identity()
    dtype = PRECISIONS[said.options["dtype"]]
    with staged(out, said, {**POLICY, **policy}, "action/policy.json") as stage:
        for name in components:
            with OnnxPen(stage.file(name, f"{name}.onnx"), dtype) as g:
                rows = axis("S", 1, 2, 4)
                if name == "first":
                    g.output(g.linear(g.input("x", dtype, (rows, 8)), Kept("w", WEIGHT)), "y")
                else:
                    g.output(g.add(g.input("y", dtype, (rows, 300)), g.input("noise", dtype, (rows, 300))), "velocity")
            stage.finish(name, g.inputs, g.outputs, note=name)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bundle") / "b")


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(made, tmp_path / "b")
    return tmp_path / "b"


def change(file: Path, **fields: Any) -> None:
    said = json.loads(file.read_text())
    for name, value in fields.items():
        if value is None:
            said.pop(name)
        else:
            said[name] = value
    file.write_text(json.dumps(said))


# --- writing ----------------------------------------------------------------------------------------------------------------------


def test_a_bundle_says_what_it_is_and_leaves_nothing_else_behind(made: Path) -> None:
    bundle = open_bundle(made)
    assert sorted(path.name for path in made.iterdir()) == ["action", "first"]
    assert (bundle.model, bundle.frontend, bundle.export_id) == ("small", "onnx", identity().export_id)
    assert bundle.component("first").inputs == (TensorSpec("x", "float32", ((1, 2, 4), 8)),)
    assert bundle.component("first").outputs == (TensorSpec("y", "float32", ((1, 2, 4), 300)),)
    assert bundle.policy["action"] == {"horizon": 4}
    assert findings(bundle) == []


def test_the_same_inputs_write_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again = write(tmp_path / "again")
    files = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert files == {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}
    assert open_bundle(again).digest == open_bundle(made).digest


@pytest.mark.parametrize(
    "changed", [identity(dtype="fp16"), identity(batch=2), identity("direct"), replace(identity(), fingerprint="0" * 64)]
)
def test_everything_that_changes_an_engine_changes_the_export_id(changed: Identity) -> None:
    assert changed.export_id != identity().export_id
    assert len(changed.export_id) == 32


def test_components_of_one_export_may_be_written_one_by_one(made: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "b", components=("first",))
    assert sorted(open_bundle(out).components) == ["first"]
    assert [path.name for path in (out / "action").iterdir()] == ["policy.json"]
    write(out, components=("action",))
    assert open_bundle(out).digest == open_bundle(made).digest


def everything_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("write_into", "says"),
    [
        (lambda out: write(out, identity(batch=2)), "is of export"),
        (lambda out: write(out, identity("direct"), components=("first",)), "is of export"),
        (lambda out: write(out, action={"horizon": 5}), "differs in action"),
    ],
    ids=["another export", "another route", "another policy contract"],
)
def test_nothing_is_written_beside_what_does_not_belong_there(write_into: Callable[[Path], Path], says: str, bundle: Path) -> None:
    before = everything_in(bundle)
    with pytest.raises(BadRequest, match=says):
        write_into(bundle)
    assert everything_in(bundle) == before


def test_a_folder_with_something_else_in_it_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BadRequest, match=r"thesis\.txt"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_export_that_fails_leaves_the_folder_as_it_was(bundle: Path, tmp_path: Path) -> None:
    before = everything_in(bundle)

    def stumble(out: Path) -> None:
        with staged(out, identity(), POLICY, "action/policy.json") as stage:
            stage.file("first", "first.onnx").write_bytes(b"half")
            raise OSError("no space left")

    for out in (bundle, tmp_path / "new"):
        with pytest.raises(BadRequest, match=r"cannot be written to its end \(no space left\).* make room"):
            stumble(out)
    assert everything_in(bundle) == before
    assert not (tmp_path / "new").exists()


def test_the_policy_contract_comes_to_its_place_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the folder is no bundle: an export that is killed while its files are renamed is not mistaken for a whole one."""
    moved, replace_file = [], Path.replace

    def noting(self: Path, target: Path) -> Path:
        moved.append(str(Path(target).relative_to(tmp_path / "b")))
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", noting)
    write(tmp_path / "b")
    assert moved[-1] == "action/policy.json"
    assert {"first/config.json", "action/config.json", "first/first.onnx"} < set(moved)


def test_what_a_killed_export_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "b" / ".staging-99999999" / "first").mkdir(parents=True)
    with pytest.raises(BadRequest, match="b: an export into it is under way or did not finish"):
        open_bundle(tmp_path / "b")
    write(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["action", "first"]


def test_two_exports_do_not_write_into_one_folder_at_once(bundle: Path) -> None:
    before = everything_in(bundle)
    with staged(bundle, identity(), POLICY, "action/policy.json") as stage:
        stage.file("first", "first.onnx").write_bytes(b"half")
        with pytest.raises(BadRequest, match="another process is writing there"):
            write(bundle)
        assert stage.file("first", "first.onnx").read_bytes() == b"half"
    assert everything_in(bundle).keys() == before.keys()


def test_a_full_disk_is_one_sentence_and_nothing_is_left(tmp_path: Path) -> None:
    """As on a disk with room for 4 kB: the system's own refusal, whatever call meets it."""
    import resource  # a limit of this process alone

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(BadRequest, match=f"{tmp_path / 'b'}: cannot be written to its end") as refused:
            write(tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_nobody_may_write_to_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))  # chmod does not stop root

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(BadRequest, match=r"cannot be written to its end \(\[Errno 13\] Permission denied"):
        write(tmp_path / "b")


def test_shared_files_are_copied_and_known_to_be_covered_by_nothing(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "model.safetensors").write_text("gigabytes")
    with staged(tmp_path / "b", identity(), POLICY) as stage:
        with OnnxPen(stage.file("first", "first.onnx"), "float32") as g:
            g.output(g.input("x", "float32", (1,)), "y")
        stage.finish("first", g.inputs, g.outputs)
        stage.copy(tmp_path / "source", "tokenizer", ("tokenizer.j*", "merges.txt"))
    bundle = open_bundle(tmp_path / "b")
    assert list(uncovered(bundle)) == ["tokenizer/tokenizer.json"]
    (tmp_path / "b" / "tokenizer" / "tokenizer.json").write_text('{"edited": true}')
    assert uncovered(open_bundle(tmp_path / "b")) != uncovered(bundle) or findings(bundle) == []
    assert open_bundle(tmp_path / "b").digest == bundle.digest


def axes_of_y(bundle: Path, axes: list[Any]) -> None:
    contract = json.loads((bundle / "first/config.json").read_text())["tensor_contract"]
    contract["outputs"]["y"]["axes"] = axes
    change(bundle / "first/config.json", tensor_contract=contract)


# --- opening ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda b: change(b / "first/config.json", export_id="0" * 32), "two exports"),
        (lambda b: change(b / "first/config.json", export_id=None), "carries no identity"),
        (lambda b: change(b / "first/config.json", frontend="direct"), "two exports"),
        (lambda b: change(b / "first/config.json", frontend="torch"), "neither 'onnx' nor 'direct'"),
        (lambda b: change(b / "first/config.json", checkpoint_fingerprint="0"), "two exports"),
        (lambda b: change(b / "first/config.json", contract_version=CONTRACT_VERSION + 1), f"is 2.*reads {CONTRACT_VERSION}"),
        (lambda b: change(b / "action/policy.json", contract_version=0), f"is 0.*reads {CONTRACT_VERSION}"),
        (lambda b: change(b / "action/policy.json", export_id=None), "carries no identity"),
        (lambda b: change(b / "first/config.json", component="action"), "is of component 'action'"),
        (lambda b: change(b / "first/config.json", artifacts=None), "not whole"),
        (lambda b: change(b / "first/config.json", artifacts={"../x": {"sha256": "0", "bytes": 1}}), "no plain file"),
        (lambda b: change(b / "first/config.json", options={"dtype": "int4"}), "none of fp32"),
        (lambda b: change(b / "first/config.json", options={"dtype": "fp32", "batch": 2}), f"not those of export {identity().export_id}"),
        (lambda b: change(b / "action/config.json", options={"dtype": "fp32"}), "action/config.json: its options are not those"),
        (lambda b: change(b / "first/config.json", version=None), "carries no identity"),
        (lambda b: change(b / "first/config.json", version="0.0.9"), "two exports"),
        (lambda b: shutil.copy(b / "action/policy.json", b / "policy.json"), "two contracts"),
        (lambda b: axes_of_y(b, [{"axis": "S", "min": 1, "opt": 2}, 300]), r"not whole \(KeyError: 'max'\)"),
        (lambda b: axes_of_y(b, [None, 300]), "not whole"),
        (lambda b: axes_of_y(b, [{"axis": "S", "min": 1, "opt": 2, "max": 4.5}, 300]), "neither a length nor min, opt and max"),
        (lambda b: change(b / "first/config.json", tensor_contract={"inputs": {"x": {"dtype": "f", "rank": 3, "axes": [1]}}}), "rank 3"),
    ],
)  # fmt: skip
def test_a_bundle_that_contradicts_itself_is_refused(spoil: Callable[[Path], object], says: str, bundle: Path) -> None:
    spoil(bundle)
    with pytest.raises(ContractMismatch, match=says):
        open_bundle(bundle)


def test_a_folder_that_is_no_bundle_or_not_finished_is_said_to_be(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no bundle"):
        open_bundle(tmp_path / "nowhere")
    (bundle / "action" / "policy.json").unlink()
    with pytest.raises(BadRequest, match="did not finish"):
        open_bundle(bundle)


def test_a_missing_component_is_asked_for_by_the_command_that_makes_it(bundle: Path) -> None:
    shutil.rmtree(bundle / "first")
    with pytest.raises(BadRequest, match="--components first"):
        open_bundle(bundle).component("first")


@pytest.mark.parametrize("name", ["first.onnx", "first.onnx.data"])
def test_a_changed_artifact_is_refused_before_it_is_deserialised(name: str, bundle: Path) -> None:
    file = bundle / "first" / name
    spoiled = bytearray(file.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    file.write_bytes(spoiled)
    opened = open_bundle(bundle)
    with pytest.raises(ContractMismatch, match="SHA-256"):
        load_engine(opened.component("first"))
    assert len(findings(opened)) == 1
    file.unlink()
    with pytest.raises(BadRequest, match="is missing"):
        load_engine(opened.component("first"))


PRETENDERS = {
    "an empty file": b"",
    "a large-file pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1681234567\n",
    "a web page": b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n",
    "an ONNX graph": (CASES / "inputs_a_b.onnx").read_bytes(),
}


@pytest.mark.parametrize("what", PRETENDERS)
def test_a_file_that_is_no_engine_is_named_for_what_it_is(what: str, tmp_path: Path) -> None:
    (tmp_path / "x.engine").write_bytes(PRETENDERS[what])
    assert (impostor(tmp_path / "x.engine", head_of(tmp_path / "x.engine")) or "").startswith(what)


def test_a_web_page_in_place_of_weights_is_told_from_weights_that_begin_with_its_first_byte(bundle: Path) -> None:
    """A safetensors file begins with the length of its header: 60 is "<"."""
    file, config = bundle / "first/table.safetensors", bundle / "first/config.json"
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, separators=(",", ":")).encode().ljust(60)
    file.write_bytes(len(head).to_bytes(8, "little") + head + np.array([2.5], np.float32).tobytes())
    assert file.read_bytes()[:1] == b"<"
    for content, says in ((file.read_bytes(), None), (PRETENDERS["a web page"], "is a web page saved under that name")):
        file.write_bytes(content)
        artifact = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        change(config, artifacts={**json.loads(config.read_text())["artifacts"], file.name: artifact})
        opened = open_bundle(bundle).component("first")
        if says is None:
            assert opened.tensors(file.name)["w"].tolist() == [2.5]
        else:
            with pytest.raises(ContractMismatch, match=says):
                opened.tensors(file.name)


def test_a_pointer_in_place_of_a_graph_is_named_for_what_it_is(bundle: Path) -> None:
    (bundle / "first" / "first.onnx").write_bytes(PRETENDERS["a large-file pointer"])
    with pytest.raises(ContractMismatch, match="large-file pointer"):
        load_engine(open_bundle(bundle).component("first"))


PROFILES = json.loads((CASES / "profiles.json").read_text())


def as_ends(profile: dict[str, dict[str, list[int]]]) -> dict[str, dict[str, list[int]]]:
    return {end: {name: shapes[end] for name, shapes in profile.items()} for end in ENDS}


def test_a_profile_that_fits_its_graph_passes() -> None:
    check_profile("b", PROFILES["graph"], as_ends(PROFILES["good"]))


@pytest.mark.parametrize("case", PROFILES["refused"], ids=lambda case: case["name"])
def test_a_profile_that_does_not_fit_is_refused_by_tensor_and_axis(case: dict[str, Any]) -> None:
    with pytest.raises(ContractMismatch, match=f"'{case['tensor']}'") as refused:
        check_profile("b", PROFILES["graph"], as_ends(case["profile"]))
    assert case.get("axis") is None or f"axis {case['axis']}" in str(refused.value)


# --- running ----------------------------------------------------------------------------------------------------------------------


def test_an_engine_computes_what_was_drawn_and_feeds_the_next(made: Path) -> None:
    bundle = open_bundle(made)
    x, noise = np.ones((3, 8), np.float32), np.full((3, 300), 2, np.float32)
    y = load_engine(bundle.component("first"))(x=x)["y"]
    np.testing.assert_allclose(to_host(y), x @ WEIGHT.T, rtol=1e-5)
    velocity = load_engine(bundle.component("action"))(y=y, noise=noise)["velocity"]
    np.testing.assert_allclose(to_host(velocity), x @ WEIGHT.T + 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, r"missing: \['x'\]"),
        ({"x": np.ones((1, 8), np.float32), "z": np.ones(1)}, r"unknown: \['z'\]"),
        ({"x": np.ones((1, 8))}, "'x' is float64, wanted float32"),
        ({"x": np.ones((5, 8), np.float32)}, r"'x' has shape \[5, 8\], wanted \[1…2…4, 8\]"),
        ({"x": np.ones((2, 7), np.float32)}, r"\[2, 7\], wanted"),
        ({"x": np.ones(8, np.float32)}, r"\[8\], wanted"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(inputs: dict[str, NDArray[Any]], says: str, made: Path) -> None:
    with pytest.raises(BadRequest, match=says):
        load_engine(open_bundle(made).component("first"))(**inputs)


@pytest.mark.parametrize("file", ["inputs_a_b.onnx", "inputs_b_a.onnx"])
def test_everything_is_bound_by_name_whatever_order_the_graph_declares(file: str, tmp_path: Path) -> None:
    with staged(tmp_path / "b", identity(), POLICY) as stage:
        shutil.copy(CASES / file, stage.file("first", "first.onnx"))
        with OnnxPen(tmp_path / "same.onnx", "float32") as g:
            inputs = {name: g.input(name, "float32", (2, 3)) for name in "ab"}
            outputs = {name: g.add(*inputs.values()) for name in "yz"}
            g.output(outputs["y"], "y")
        stage.finish("first", inputs, outputs)
    said = {name: np.array(rows, np.float32) for name, rows in json.loads((CASES / "binding_order.json").read_text()).items()}
    found = load_engine(open_bundle(tmp_path / "b").component("first"))(a=said["a"], b=said["b"])
    for name in "yz":
        assert np.array_equal(to_host(found[name]), said[name])


def test_inputs_that_fit_one_by_one_but_not_together_are_one_sentence(made: Path) -> None:
    y, noise = np.ones((3, 300), np.float32), np.ones((2, 300), np.float32)
    with pytest.raises(BadRequest, match=r"action: its inputs do not fit together \(.*\)$") as refused:
        load_engine(open_bundle(made).component("action"))(y=y, noise=noise)
    assert "\n" not in str(refused.value)


def test_a_graph_that_the_runtime_cannot_load_is_one_sentence(bundle: Path) -> None:
    file, config = bundle / "first/first.onnx", bundle / "first/config.json"
    content = file.read_bytes().replace(b"Gemm", b"Germ").replace(b"MatMul", b"MetMul")
    assert content != file.read_bytes()
    file.write_bytes(content)
    artifact = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    change(config, artifacts={**json.loads(config.read_text())["artifacts"], file.name: artifact})
    with pytest.raises(ContractMismatch, match=r"first\.onnx: ONNX Runtime .* cannot load it"):
        load_engine(open_bundle(bundle).component("first"))


def test_bf16_and_direct_bundles_say_that_they_need_tensorrt(tmp_path: Path) -> None:
    bf16 = open_bundle(write(tmp_path / "bf16", identity(dtype="bf16")))
    with pytest.raises(BadRequest, match="bf16, which runs on TensorRT only"):
        load_engine(bf16.component("first"))
    direct = open_bundle(write(tmp_path / "direct", identity("direct")))
    with pytest.raises(BadRequest, match="built directly"):
        load_engine(direct.component("first"))


def test_an_unknown_backend_is_refused_with_the_known_ones(made: Path) -> None:
    with pytest.raises(BadRequest, match="unknown backend 'onxruntime'; known: auto"):
        load_engine(open_bundle(made).component("first"), "onxruntime")


def test_a_graph_that_is_not_what_its_config_says_is_refused(bundle: Path) -> None:
    file = bundle / "first" / "config.json"
    contract = json.loads(file.read_text())["tensor_contract"]
    contract["outputs"]["y"]["dtype"] = "float16"
    change(file, tensor_contract=contract)
    with pytest.raises(ContractMismatch, match="disagree about y"):
        load_engine(open_bundle(bundle).component("first"))


def test_a_shape_is_told_as_least_tuned_and_most() -> None:
    assert describe(TensorSpec("x", "float32", (1, (2, 5, 9), (3, 3, 3)))) == "[1, 2…5…9, 3]"
    check_inputs("here", [TensorSpec("x", "float32", (1, (2, 5, 9)))], {"x": np.zeros((1, 9), np.float32)})
    assert axis("S", 4, 4, 4) == 4
    assert axis("S", 2, 4, 4) == Axis("S", 2, 4, 4)


# --- verifying --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(made: Path) -> dict[str, NDArray[Any]]:
    """Three steps, by numpy."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8)).astype(np.float32)
    y = x @ WEIGHT.T
    found = {"first/0/in/x": x, "first/0/out/y": y}
    for step in range(3):
        noise = rng.normal(size=(2, 300)).astype(np.float32)
        found |= {f"action/{step}/in/y": y, f"action/{step}/in/noise": noise, f"action/{step}/out/velocity": y + noise}
    return found


def test_a_bundle_that_computes_the_reference_passes_and_its_gates_are_told(made: Path, reference: dict[str, NDArray[Any]]) -> None:
    verdict = compare(open_bundle(made), reference)
    assert verdict.passed
    assert verdict.data()["gate"] == GATES["fp32"]._asdict()
    assert [(row.component, row.call) for row in verdict.rows] == [("first", 0), ("action", 0), ("action", 1), ("action", 2)]
    json.dumps(verdict.data(), allow_nan=False)


@pytest.mark.parametrize("precision", GATES)
@pytest.mark.parametrize("scale", [0.98, 1.02, -1.0])
def test_a_scaled_output_fails_although_its_cosine_is_one(
    scale: float, precision: str, made: Path, reference: dict[str, NDArray[Any]]
) -> None:
    scaled = {**reference, "action/1/out/velocity": reference["action/1/out/velocity"] / np.float32(scale)}
    verdict = compare(open_bundle(made), scaled, precision=precision)
    assert [row.passed for row in verdict.rows] == [True, True, False, True]
    assert abs(verdict.rows[2].cosine) == pytest.approx(1, abs=1e-6)
    assert verdict.rows[2].scale == pytest.approx(scale, rel=1e-4)


def test_engines_that_are_loaded_are_judged_in_place_of_the_bundles_own(made: Path, reference: dict[str, NDArray[Any]]) -> None:
    bundle = open_bundle(made)
    engines = load_engines(bundle.components.values())

    class Off:
        inputs, outputs, about = engines["first"].inputs, engines["first"].outputs, {"backend": "tensorrt_rtx"}

        def __call__(self, **inputs: Any) -> dict[str, Any]:
            return {name: to_host(tensor) * np.float32(1.1) for name, tensor in engines["first"](**inputs).items()}

    verdict = compare(bundle, reference, engines={**engines, "first": Off()})
    assert [row.component for row in verdict.rows if not row.passed] == ["first"]
    assert verdict.gate == GATES["tf32"]  # of what ran, not of what would run here


def test_the_worst_step_and_dimension_are_named(made: Path, reference: dict[str, NDArray[Any]]) -> None:
    wrong = reference["action/2/out/velocity"].copy()
    wrong[1, 123] += 5
    (row,) = (row for row in compare(open_bundle(made), {**reference, "action/2/out/velocity": wrong}).rows if not row.passed)
    assert (row.call, row.output, row.worst) == (2, "velocity", (1, 123))
    assert row.max_abs == pytest.approx(5, rel=1e-4)


def test_one_number_that_is_a_little_off_fails_although_cosine_and_scale_do_not_see_it(
    made: Path, reference: dict[str, NDArray[Any]]
) -> None:
    wrong = reference["action/2/out/velocity"].copy()
    wrong[1, 123] += 1e-4 * np.abs(wrong).max()
    (row,) = (row for row in compare(open_bundle(made), {**reference, "action/2/out/velocity": wrong}).rows if not row.passed)
    gate = GATES["fp32"]
    assert row.cosine > gate.cosine
    assert abs(row.scale - 1) < gate.scale
    assert row.relative == pytest.approx(1e-4, rel=0.01)


def test_a_stale_output_fails_even_where_the_steps_are_nearly_the_same(tmp_path: Path, reference: dict[str, NDArray[Any]]) -> None:
    """An engine whose noise input never reaches the output answers each step with the first step's bits."""
    said = identity(dtype="fp32")
    with staged(tmp_path / "b", said, POLICY) as stage:
        with OnnxPen(stage.file("action", "action.onnx"), "float32") as g:
            y, noise = (g.input(name, "float32", (2, 300)) for name in ("y", "noise"))
            g.output(g.add(y, g.mul(noise, 0.0)), "velocity")
        stage.finish("action", g.inputs, g.outputs)
    close = {key: array for key, array in reference.items() if key.startswith("action/")}
    for step in range(3):  # velocities that differ by a hundredth of the gate
        close[f"action/{step}/out/velocity"] = reference["action/0/in/y"] * np.float32(1 + 1e-7 * step)
    rows = compare(open_bundle(tmp_path / "b"), close).rows
    assert [row.stale for row in rows] == [False, True, True]
    assert [row.passed for row in rows] == [True, False, False]
    assert all(row.cosine > 0.999999999 for row in rows)


def test_an_output_that_is_not_finite_fails_and_is_still_json(made: Path, reference: dict[str, NDArray[Any]]) -> None:
    hot = {**reference, "action/0/in/noise": np.full((2, 300), np.inf, np.float32)}
    verdict = compare(open_bundle(made), hot)
    assert [row.passed for row in verdict.rows] == [True, False, True, True]
    json.dumps(verdict.data(), allow_nan=False)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: {"velocity": r["first/0/in/x"]}, "is no tensor of a reference"),
        (lambda r: {k: v for k, v in r.items() if "/out/" not in k}, "holds no output"),
        (lambda r: {k: v for k, v in r.items() if k != "action/1/in/noise"}, "no action/1/in/noise"),
        (lambda r: {k: v for k, v in r.items() if not k.startswith("action/1")}, r"\[0, 2\]; they must count up"),
        (lambda r: {**r, "first/0/out/y": r["first/0/out/y"][:1]}, r"first/0/out/y is \[1, 300\], the bundle has \[2, 300\]"),
        (lambda r: {**r, "first/0/out/z": r["first/0/out/y"]}, "no such output"),
        (lambda r: {**r, "first/0/out/y": r["first/0/out/y"].astype(complex)}, "first/0/out/y is complex128"),
        (lambda r: {**r, "first/0/in/x": np.full((2, 8), "a")}, "first/0/in/x is <U1"),
    ],
)
def test_a_reference_that_cannot_be_compared_is_refused(
    spoil: Callable[[dict[str, Any]], dict[str, Any]], says: str, made: Path, reference: dict[str, NDArray[Any]]
) -> None:
    with pytest.raises(BadRequest, match=says):
        compare(open_bundle(made), spoil(reference))


def test_what_is_not_compared_is_said(made: Path, reference: dict[str, NDArray[Any]]) -> None:
    only = {key: array for key, array in reference.items() if key.startswith("action")}
    assert compare(open_bundle(made), only).not_compared == ("first",)


def test_a_trace_chains_components_by_the_names_of_their_tensors(made: Path, reference: dict[str, NDArray[Any]]) -> None:
    inputs = {"first/0/in/x": reference["first/0/in/x"], "action/0/in/noise": reference["action/0/in/noise"]}
    found = trace(open_bundle(made), inputs)
    np.testing.assert_allclose(found["action/0/out/velocity"], reference["action/0/out/velocity"], rtol=1e-5, atol=1e-5)


def test_bundles_need_no_write_access_to_be_opened(bundle: Path) -> None:
    for folder, _, files in os.walk(bundle):
        for name in files:
            (Path(folder) / name).chmod(0o444)
    assert findings(open_bundle(bundle)) == []
