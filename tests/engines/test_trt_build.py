"""Plans from a bundle and straight from a checkpoint: what the networks are just before they are built, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_eval.cli import main
from vla_eval.engines import trt, trt_build
from vla_eval.engines.bundle import Bundle, Component, findings, open_bundle
from vla_eval.engines.trt_build import ANY_CARD, build, build_component, plan_file, record_file, record_of
from vla_eval.engines.trt_run import Plan, find_plan, plan_record
from vla_eval.policies.gr00t.recipe import recipe
from vla_eval.policies.gr00t.synthetic import synth
from vla_eval.types import BadRequest, ContractMismatch, VlaEvalError

COMPONENTS = ("visual", "vl_backbone", "action")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A bundle of the synthetic checkpoint: each build takes a second, so tests share the plans."""
    checkpoint = synth(tmp_path_factory.mktemp("synthetic") / "checkpoint")

    def made(**options: Any) -> Bundle:
        out, geometry = tmp_path_factory.mktemp("bundles") / "bundle", checkpoint / "geometry.json"
        return recipe(checkpoint, out, embodiment="libero_sim", dtype="fp16", geometry=geometry, **options)

    return made


@pytest.fixture(scope="module")
def graphs(exported: Callable[..., Bundle]) -> Bundle:
    """ONNX graphs without plans."""
    return exported()


@pytest.fixture(scope="module")
def built(graphs: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same with plans, each built in a process of its own."""
    bundle = open_bundle(shutil.copytree(graphs.path, tmp_path_factory.mktemp("built") / "bundle"))
    assert [one.new for one in build(bundle)] == [True] * 3
    return bundle


@pytest.fixture(scope="module")
def drawn(exported: Callable[..., Bundle]) -> Bundle:
    """Plans with no ONNX in between."""
    return exported(direct=True)


@pytest.fixture
def own(built: Bundle, tmp_path: Path) -> Bundle:
    """A built bundle that a test may spoil."""
    return open_bundle(shutil.copytree(built.path, tmp_path / "bundle"))


@pytest.mark.parametrize("route", ["built", "drawn"])
def test_every_component_builds_and_its_network_is_what_the_contract_says(route: str, request: pytest.FixtureRequest) -> None:
    bundle: Bundle = request.getfixturevalue(route)
    assert set(bundle.components) == set(COMPONENTS)
    for component in bundle.components.values():
        said = record_of(plan_file(component, ANY_CARD))
        assert said["frontend"] == bundle.frontend == {"built": "onnx", "drawn": "direct"}[route]
        assert (said["export_id"], said["sm"], said["batch"], said["dtype"]) == (bundle.export_id, ANY_CARD, 1, "fp16")
        assert said["inspection"] == "not inspected"  # no GPU here that could load it
        for side, specs in (("inputs", component.inputs), ("outputs", component.outputs)):
            shapes = {s.name: (s.dtype, [n if isinstance(n, int) else -1 for n in s.shape]) for s in specs}
            assert {name: (t["dtype"], t["shape"]) for name, t in said["network"][side].items()} == shapes
        layers = said["network"]["layers"]
        kinds = {key.partition(" ")[0] for key in layers}
        assert "MATRIX_MULTIPLY" in kinds
        assert "MATRIX_MULTIPLY float16" not in layers  # both operands are cast up: summed in float32
        assert not any(key.startswith(("SOFTMAX", "NORMALIZATION")) and not key.endswith("float32") for key in layers)


def test_a_direct_bundle_has_no_graphs_and_its_plans_are_no_artifacts(drawn: Bundle) -> None:
    assert not list(drawn.path.rglob("*.onnx*"))
    assert not any(name.endswith((".engine", ".json")) for c in drawn.components.values() for name in c.config["artifacts"])
    assert findings(drawn) == []
    with pytest.raises(BadRequest, match="built directly"):
        build(drawn)


def test_both_routes_write_the_same_contract(built: Bundle, drawn: Bundle) -> None:
    for name in COMPONENTS:
        one, other = (bundle.component(name).config for bundle in (built, drawn))
        for key in ("tensor_contract", "optimization_profile", "options"):
            assert one[key] == other[key]
    assert built.export_id != drawn.export_id


def test_a_plan_that_is_up_to_date_is_left_alone(own: Bundle) -> None:
    component = own.component("action")
    path = plan_file(component, ANY_CARD)
    before = path.stat().st_mtime_ns
    assert not build_component(component).new
    assert path.stat().st_mtime_ns == before


def test_a_forced_build_writes_the_same_bytes_again(own: Bundle) -> None:
    component = own.component("action")
    path = plan_file(component, ANY_CARD)
    before, digest = path.stat().st_mtime_ns, record_of(path)["sha256"]
    assert build_component(component, force=True).new
    assert path.stat().st_mtime_ns > before
    assert record_of(path)["sha256"] == digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_failed_build_leaves_the_old_plan(own: Bundle) -> None:
    component = own.component("action")
    path = plan_file(component, ANY_CARD)
    before = path.read_bytes()
    (component.folder / "action.onnx").write_bytes(b"")
    with pytest.raises(VlaEvalError, match=r"action\.onnx"):
        build(own, ["action"], force=True)
    assert path.read_bytes() == before
    assert sorted(file.name for file in component.folder.iterdir() if file.name.startswith(".")) == []


def test_a_folder_that_cannot_be_written_is_left_as_it_was(own: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    component = own.component("action")
    path = plan_file(component, ANY_CARD)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trt_build, "serialize", lambda *_: (b"another plan", {}))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        build_component(component, force=True)
    assert path.read_bytes() == before
    assert not [file for file in component.folder.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["inputs"].pop("state"), "input 'state' is float32 .* missing in config"),
        (lambda c: c["outputs"]["velocity"].update(dtype="float16"), "output 'velocity' is float32 .* float16"),
        (lambda c: c["inputs"]["noise_trajectory"].update(axes=[1, 50, 132]), r"'noise_trajectory' is float32 \[1, 40, 132\]"),
        (lambda c: c["outputs"].update(more={"dtype": "float32", "rank": 1, "axes": [3]}), "output 'more' is missing"),
    ],
    ids=["unknown input", "other type", "other length", "missing output"],
)
def test_a_network_that_is_not_the_contracts_is_refused_before_it_is_built(
    built: Bundle, change: Callable[[dict[str, Any]], Any], named: str
) -> None:
    component = built.component("action")
    config = copy.deepcopy(dict(component.config))
    change(config["tensor_contract"])
    with pytest.raises(ContractMismatch, match=named):
        trt_build.check_network(record_of(plan_file(component, ANY_CARD))["network"], config, "here")


def test_there_is_no_such_component(graphs: Bundle) -> None:
    with pytest.raises(BadRequest, match="no component 'prefix'"):
        build(graphs, ["prefix"])


# --- before a plan is opened ---------------------------------------------------------------------------------------------------------


def test_a_missing_plan_is_a_sentence_with_what_is_there_and_the_command(graphs: Bundle, own: Bundle) -> None:
    with pytest.raises(BadRequest, match=r"on sm90: there is none; build it: vla-eval build .* --components action"):
        find_plan(graphs.component("action"), "sm90")
    folder = own.component("action").folder
    plan_file(own.component("action"), ANY_CARD).rename(folder / "action.trt-11.4.0-sm86-b1.engine")
    with pytest.raises(BadRequest, match=r"there is action\.trt-11\.4\.0-sm86-b1\.engine; build it"):
        find_plan(own.component("action"), "sm90")


def taken(component: Component, path: Path) -> Any:
    """The plan's bytes, as a load takes them."""
    return Plan.begin(component, path, plan_record(component, path)).take()


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("version", "1.5.0.1", r"built by tensorrt_rtx 1\.5\.0\.1, here is tensorrt_rtx .*; build it again: vla-eval build"),
        ("flavour", "tensorrt", r"built by tensorrt 1\.6"),
        ("export_id", "0" * 32, "is of export 000.*, the bundle of"),
        ("optimization_profile", {}, "another optimization_profile"),
        ("sha256", "0" * 64, "SHA-256 differs"),
    ],
)
def test_a_plan_of_something_else_is_refused_before_it_is_opened(own: Bundle, key: str, value: Any, wanted: str) -> None:
    component = own.component("action")
    path = find_plan(component, "sm90")
    record_file(path).write_text(json.dumps({**record_of(path), key: value}))
    with pytest.raises((BadRequest, ContractMismatch), match=wanted):
        taken(component, path)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "large-file pointer"),
        (b"<!doctype html><title>Sign in</title>", "a web page"),
        (b"\x08\x0a\x12\x08vla-eval", "an ONNX graph"),
        (b"something else", "SHA-256 differs"),
    ],
)
def test_a_file_that_is_no_plan_is_named_for_what_it_is(own: Bundle, content: bytes, wanted: str) -> None:
    path = find_plan(own.component("action"), "sm90")
    path.write_bytes(content)
    with pytest.raises((BadRequest, ContractMismatch), match=wanted):
        taken(own.component("action"), path)


def test_a_plan_without_a_record_is_refused(own: Bundle) -> None:
    path = find_plan(own.component("action"), "sm90")
    record_file(path).unlink()
    with pytest.raises(BadRequest, match="no record beside it"):
        taken(own.component("action"), path)


def test_the_door_says_which_cards_the_vendor_supports() -> None:
    flavour = trt.door()
    assert flavour.short == f"rtx-{flavour.version}"
    assert "unsupported GPU" in flavour.supports("sm90")
    assert flavour.supports("sm120") == "supported"
    assert trt.Flavour("tensorrt", "11.4.0.106", None).supports("sm90") == "supported"


def test_the_command_builds_once_and_says_so(own: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    plan_file(own.component("visual"), ANY_CARD).unlink()
    for new in (True, False):
        assert main(["build", str(own.path), "--components", "visual", "--json"]) == 0
        said = json.loads(capfd.readouterr().out)
        assert [(plan["component"], plan["new"]) for plan in said["plans"]] == [("visual", new)]
        assert Path(said["plans"][0]["plan"]).is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "build wants one bundle"),
        (["a", "b"], "build wants one bundle"),
        (["a", "--model", "gr00t"], "--model goes with --direct"),
        (["--direct"], "--model is missing"),
        (["--direct", "--model", "gr00t", "--force"], "a direct build always builds"),
    ],
    ids=" ".join,
)
def test_the_command_refuses_what_it_cannot_mean(words: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["build", *words]) == 2
    assert told in capfd.readouterr().err
