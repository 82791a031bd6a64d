"""From checkpoint to bundle: identity, partial exports, both build routes, synthetic checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from vla_eval import cli
from vla_eval.arrays import read_npz
from vla_eval.engines import trt
from vla_eval.engines.bundle import findings, open_bundle
from vla_eval.engines.engine import load_engine, to_host
from vla_eval.engines.graph import PRECISIONS, Axis
from vla_eval.engines.trt_build import check_network, new_network, read_network, serialize
from vla_eval.engines.trt_pen import TrtPen
from vla_eval.engines.verify import SELFTEST, compare, trace
from vla_eval.engines.weights import open_checkpoint, read_tensors, write_tensors
from vla_eval.policies.pi05.configuration import HEAD, PREFIXES
from vla_eval.policies.pi05.processor import rotary
from vla_eval.policies.pi05.recipe import Sizes, graph_of, recipe
from vla_eval.policies.pi05.synthetic import TINY, synth
from vla_eval.types import BadRequest

GOLDEN = Path(__file__).parents[2] / "golden/pi05_tiny"
CHECKPOINT = GOLDEN / "pi05_libero/checkpoint"
STATISTICS = Path("assets/physical-intelligence/libero/norm_stats.json")
Tiny = Callable[..., Path]


def export(out: Path, checkpoint: Path = CHECKPOINT, **options: Any) -> Any:
    given = {"policy_config": "pi05_libero", "geometry": GOLDEN / "geometry.json", "tokenizer": GOLDEN / "paligemma_tokenizer.model"}
    return recipe(checkpoint, out, **{**given, **options})


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_bundle_holds_what_the_specification_lists(tiny: Tiny) -> None:
    bundle = open_bundle(tiny())
    said = bundle.policy
    assert (said["model_family"], said["policy_config"], said["adapter"]) == ("pi05", "pi05_libero", "libero")
    assert said["action"] == {"dim": 7, "max_dim": 32, "horizon": 10}
    assert said["state"] == {"dim": 8, "num_bins": 256}
    assert said["discrete_state_input"] is False
    assert [slot["name"] for slot in said["cameras"]["slots"]] == ["image", "wrist_image"]
    assert {part.config["export_id"] for part in bundle.components.values()} == {said["export_id"]}
    action = bundle.component("action").config["builder_config"]
    assert (action["hoisted_adarms_cond"], action["num_adarms_sites"]) == (True, 7)
    shapes = {spec.name: spec.shape for spec in (*bundle.component("prefix").inputs, *bundle.component("cond").inputs)}
    assert shapes["inputs_embeds"] == (1, (257, 536, 976), 80)  # two views and 24 tokens; three views and 208
    assert shapes["timesteps"] == ((1, 10, 16),)
    assert dict(bundle.component("visual").config["optimization_profile"])["opt"]["pixel_values"] == [2, 3, 224, 224]
    assert files(tiny())[str(STATISTICS)] == (CHECKPOINT / STATISTICS).read_bytes()


def test_the_token_table_is_stored_as_it_is_and_scaled_by_nobody_but_the_runtime(tiny: Tiny) -> None:
    (table,) = open_bundle(tiny()).component("prefix").tensors("embed_tokens.safetensors").values()
    np.testing.assert_array_equal(table, read_tensors(CHECKPOINT / "model.safetensors")[HEAD])


def test_an_export_is_repeatable_and_part_of_it_can_be_made_again(tmp_path: Path) -> None:
    export(tmp_path / "a")
    first = files(tmp_path / "a")
    export(tmp_path / "b")
    assert files(tmp_path / "b") == first
    staged = json.dumps(json.loads((CHECKPOINT / STATISTICS).read_text())["norm_stats"]).encode()
    (tmp_path / "a" / STATISTICS).write_bytes(staged)
    export(tmp_path / "a", components=("visual", "cond"))
    assert files(tmp_path / "a") == {**first, str(STATISTICS): staged}  # statistics staged in between stay
    with pytest.raises(BadRequest, match=r"policy.json differs in trained_for"):
        export(tmp_path / "a", components=("visual",), suites=("libero_90",))
    assert files(tmp_path / "a")[str(STATISTICS)] == staged


def test_part_of_an_export_is_made_again_with_the_statistics_and_tokenizer_that_lie_there(tmp_path: Path) -> None:
    """As for LeRobot's release, which brings neither: the flags of the first export are not asked for again."""
    release = Path(shutil.copytree(CHECKPOINT, tmp_path / "c", ignore=shutil.ignore_patterns("assets")))
    export(tmp_path / "b", release, norm_stats=CHECKPOINT / STATISTICS)
    first = files(tmp_path / "b")
    with pytest.raises(BadRequest, match=r"assets holds no norm_stats\.json.*--norm-stats FILE"):
        export(tmp_path / "other", release)
    export(tmp_path / "b", release, components=("action",), tokenizer=None)
    assert files(tmp_path / "b") == first


def test_part_of_an_export_is_not_made_again_with_another_tokenizer(synthetic: Path, tmp_path: Path) -> None:
    export(tmp_path / "b")
    before = files(tmp_path / "b")
    with pytest.raises(BadRequest, match=r"policy\.json differs in tokenizer from what this export would write"):
        export(tmp_path / "b", components=("visual",), tokenizer=synthetic / "paligemma_tokenizer.model")
    assert files(tmp_path / "b") == before


def test_a_killed_export_leaves_what_was_there_and_the_next_one_ends_it(tmp_path: Path) -> None:
    """The real command in a process of its own, killed as soon as the first component's files appear."""
    words = ["export", "--model", "pi05", "--checkpoint", str(CHECKPOINT), "--out", str(tmp_path / "b"), "--policy-config", "pi05_libero"]
    words += ["--geometry", str(GOLDEN / "geometry.json"), "--tokenizer", str(GOLDEN / "paligemma_tokenizer.model")]
    killed = subprocess.Popen([sys.executable, "-m", "vla_eval", *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while killed.poll() is None and not any((tmp_path / "b").glob(".staging-*/visual/*")):
        time.sleep(0.001)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert [entry.name.partition("-")[0] for entry in (tmp_path / "b").iterdir()] == [".staging"]
    with pytest.raises(BadRequest, match="did not finish; wait for it, or run it again"):
        open_bundle(tmp_path / "b")
    assert cli.main(words) == 0
    assert not list((tmp_path / "b").glob(".*"))
    assert findings(open_bundle(tmp_path / "b")) == []


def test_time_and_actions_are_computed_in_float32_in_half_precision_too(tiny: Tiny) -> None:
    """The weights that no `--dtype` reaches: the time's MLP, the modulation, and both projections of the actions."""
    bundle = open_bundle(tiny(dtype="fp16"))
    for component, wanted in (("cond", {"time_mlp_in", "time_mlp_out"}), ("action", {"action_in_proj", "action_out_proj"})):
        graph = onnx.load(bundle.component(component).file(f"{component}.onnx"), load_external_data=False).graph
        kinds = {weight.name: weight.data_type for weight in graph.initializer}
        named = {name: kind for name, kind in kinds.items() if name.partition(".")[0] in wanted}
        assert {name.partition(".")[0] for name in named} == wanted
        assert set(named.values()) == {onnx.TensorProto.FLOAT}
        if component == "cond":
            assert onnx.TensorProto.FLOAT16 not in kinds.values()


OTHER: dict[str, Mapping[str, Any]] = {
    "no hoisting": {"no_hoist_cond": True}, "steps": {"max_steps": 8}, "precision": {"dtype": "fp16"}, "batch": {"batch": 2},
    "text": {"max_text": 64},
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER)
def test_another_option_is_another_export_and_is_refused_in_the_same_folder(case: str, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny(), tmp_path / "b")
    before = files(tmp_path / "b")
    with pytest.raises(BadRequest, match=r"is of export .*choose another --out"):
        export(tmp_path / "b", suites=("toy", "libero_10"), **{"max_steps": 16, **OTHER[case]})
    assert files(tmp_path / "b") == before


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(BadRequest, match=r"holds 'mine\.txt' and is no bundle"):
        export(tmp_path)
    assert files(tmp_path) == {"mine.txt": b"keep me"}


def large_number(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "time_mlp_in.bias": np.full(48, 7e4, np.float32)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "int8"}, "--dtype int8: choose one of fp32, fp16, bf16"),
        ({"batch": 0}, "--batch 0"),
        ({"max_steps": 65}, "--max-steps 65: give a number from 1 to 64"),
        ({"max_text": 0}, "--max-text 0"),
        ({"components": ("text",)}, "--components text: this export has visual, prefix, action, cond"),
        ({"components": ("cond",), "no_hoist_cond": True}, "--components cond: this export has visual, prefix, action"),
        ({"policy_config": "pi05_droid"}, "says 10 action steps, pi05_droid has 15"),
        ({"policy_config": None}, "does not say which robot"),
        ({"tokenizer": None}, r"has no paligemma_tokenizer\.model or tokenizer\.model"),
        ({"norm_stats": GOLDEN / "geometry.json"}, "has no 'state'"),
        ({"geometry": None}, r"has shape .* the released model has .*; declare this checkpoint's sizes with --geometry FILE"),
        ({"geometry": CHECKPOINT / "config.json"}, "no geometry"),
    ],
)
def test_an_export_that_cannot_be_is_refused_before_a_byte_is_written(options: Mapping[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=says):
        export(tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_a_number_that_half_precision_cannot_hold_is_named(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "c")
    tensors = large_number(read_tensors(CHECKPOINT / "model.safetensors"))
    write_tensors(tmp_path / "c/model.safetensors", {name: (a.dtype, a.shape, [a]) for name, a in tensors.items()})
    with pytest.raises(BadRequest, match=r"'time_mlp_in.bias' holds 70000, too large for float16"):
        export(tmp_path / "b", tmp_path / "c", dtype="fp16")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("options", [{}, {"no_hoist_cond": True}, {"batch": 2}])
def test_the_selftest_runs_every_component_and_holds_half_precision_to_it(tiny: Tiny, options: Mapping[str, Any]) -> None:
    bundle = open_bundle(tiny(**options))
    found = trace(bundle, read_npz(bundle.path / SELFTEST))
    assert {key.partition("/")[0] for key in found} == set(bundle.components)
    if not options:
        verdict = compare(open_bundle(tiny(dtype="fp16")), found)
        assert verdict.passed, [row for row in verdict.rows if not row.passed]


# --- synthetic checkpoints, and both routes


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(tmp_path_factory.mktemp("synthetic") / "checkpoint")


@pytest.mark.parametrize("robot", ["pi05_libero", "pi05_droid", "pi05_aloha"])
def test_a_synthetic_checkpoint_is_exported_and_asked_from_the_command_line(
    robot: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    c, b = str(tmp_path / "c"), str(tmp_path / "b")
    assert cli.main(["synth", "--model", "pi05", "--policy-config", robot, "--out", c]) == 0
    words = ["--policy-config", robot, "--geometry", f"{c}/geometry.json", "--suites", "toy,libero_10", "--max-steps", "4"]
    assert cli.main(["export", "--model", "pi05", "--checkpoint", c, "--out", b, *words]) == 0
    assert cli.main(["verify", b, "--against", b]) == 0
    assert open_bundle(b).policy["trained_for"] == ["toy", "libero_10"]
    capfd.readouterr()


def test_help_shows_defaults_as_one_would_type_them_and_synth_says_how_to_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--help", "--model", "pi05"]) == 0
    told = capfd.readouterr().out
    assert "[default: fp32]" in told
    assert not [nothing for nothing in ("()", "False", "None") if f"[default: {nothing}]" in told]
    assert cli.main(["synth", "--model", "pi05", "--out", str(tmp_path / "c")]) == 0
    assert f"export it with --geometry {tmp_path}/c/geometry.json" in capfd.readouterr().out.replace("\n", "")


BUILT = {("fp16", "onnx"), ("fp16", "direct"), ("bf16", "direct")}  # a build takes seconds: one of each kind


@pytest.mark.parametrize(("dtype", "hoisted"), [("fp32", False), ("fp16", True), ("bf16", True), ("fp16", False)])
def test_both_routes_make_the_network_that_the_contract_states(dtype: Any, hoisted: bool, synthetic: Path, tmp_path: Path) -> None:
    bundle = export(tmp_path / "b", synthetic, dtype=dtype, geometry=synthetic / "geometry.json", tokenizer=None, no_hoist_cond=not hoisted)
    weights = open_checkpoint(synthetic, PREFIXES).weights
    sizes = Sizes(1, Axis("V", 1, 2, 3), Axis("S", 257, 536, 976), Axis("K", 1, 10, 64), 10, 32, hoisted)
    for name, component in bundle.components.items():
        for route in ("onnx", "direct"):
            builder, network = new_network()
            if route == "onnx":
                parser = trt.door().api.OnnxParser(network, trt.logger())
                assert parser.parse_from_file(str(component.file(f"{name}.onnx"))), parser.get_error(0).desc()
            else:
                pen = TrtPen(network, PRECISIONS[dtype])  # keeps the numbers of its weights alive
                graph_of(name, TINY, sizes, weights)(pen)
            found = read_network(network)
            check_network(found, component.config, name)
            kinds = {kind.split()[1] for kind in found["layers"] if kind.startswith("NORMALIZATION")}
            assert kinds <= {"float32"}
            if (dtype, route) in BUILT and (hoisted or name == "action"):
                assert serialize(builder, network, component.config, name)[0] is not None


def test_the_batch_axis_takes_one_row_to_the_exports_batch(tmp_path: Path) -> None:
    bundle = export(tmp_path / "two", batch=2)
    answers = {}
    for rows in (1, 2):
        length, e = 300, 48
        rng = np.random.default_rng(0)
        noise = np.repeat(rng.standard_normal((1, 10, 32)).astype(np.float32), rows, 0)
        modulation = np.repeat(rng.standard_normal((1, 7, 3 * e)).astype(np.float32), rows, 0)
        table = np.repeat(rotary(length, 10, 16, 1e4)[None], rows, 0)
        keys = {
            spec.name: np.repeat(np.random.default_rng(1).standard_normal((1, length, 1, 16)).astype(np.float32), rows, 0)
            for spec in bundle.component("action").inputs
            if spec.name.startswith("prefix_")
        }
        (answer,) = load_engine(bundle.component("action"), "onnxruntime")(
            noise_trajectory=noise, adarms_modulation=modulation, rope_rotary_cos_sin=table,
            attention_pos_id=np.arange(rows * 10, dtype=np.int32).reshape(rows, 10), **keys,
        ).values()  # fmt: skip
        answers[rows] = to_host(answer)
    for row in answers[2]:
        np.testing.assert_allclose(row, answers[1][0], rtol=0, atol=2e-5 * np.abs(answers[1]).max())
