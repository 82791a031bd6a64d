"""A tiny pi0.5 bundle on ONNX Runtime: request to robot actions, episodes, commands. Its weights are random, so it fails its tasks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import vla_eval
from vla_eval import cli
from vla_eval.arrays import read_npz, write_npz
from vla_eval.engines.bench import RIVALS
from vla_eval.engines.bundle import open_bundle
from vla_eval.engines.graph import Axis, Value
from vla_eval.engines.onnx_pen import OnnxPen
from vla_eval.engines.verify import compare
from vla_eval.engines.weights import open_checkpoint
from vla_eval.images import stretch_area
from vla_eval.policies import flow
from vla_eval.policies.flow import draw_noise
from vla_eval.policies.pi05 import adapters, network, processor
from vla_eval.policies.pi05 import policy as policies
from vla_eval.policies.pi05.configuration import PREFIXES, read_geometry
from vla_eval.policies.pi05.libero import load, to_robot
from vla_eval.policies.pi05.policy import open_policy
from vla_eval.policies.pi05.runtime import Inputs, Pi05Runtime
from vla_eval.results.folder import open_run
from vla_eval.testing import check_policy
from vla_eval.types import BadRequest, ContractMismatch, InvalidObservation, Observation

if TYPE_CHECKING:
    from vla_eval.envs.libero import LiberoEnv

GOLDEN = Path(__file__).parents[2] / "golden/pi05_tiny"
CASES = Path(__file__).parents[2] / "cases"
ROBOTS = ("pi05_libero", "pi05_droid", "pi05_aloha")
Tiny = Callable[..., Path]
# Of each array's largest value: how far float32 and float64 runs of the reference are apart (its README). We may be ten times that.
ROUNDING = {
    "pi05_libero": {"chunk_normalized": 2.1e-7, "actions": 1.5e-7},
    "pi05_droid": {"chunk_normalized": 1.9e-7, "actions": 1.2e-7},
    "pi05_aloha": {"chunk_normalized": 2.6e-7, "actions": 1.1e-7},
}


@pytest.fixture(autouse=True, scope="module")
def graphs_loaded_once() -> None:
    """Not here: what a row or a neighbour may not change could change in sessions as the product makes them."""


def reference(robot: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The recorded arrays, and the request in them."""
    arrays = read_npz(GOLDEN / robot / "reference.npz")
    seen = {key.removeprefix("obs.").replace("images.", "images/"): value for key, value in arrays.items() if key.startswith("obs.")}
    return arrays, {**seen, "prompt": json.loads((GOLDEN / robot / "prompt.json").read_text())["prompt"]}


def off(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("no_hoist_cond", [False, True])
@pytest.mark.parametrize("robot", ROBOTS)
def test_the_chunk_and_the_actions_are_the_references(tiny: Tiny, robot: str, no_hoist_cond: bool) -> None:
    arrays, request = reference(robot)
    bundle = tiny(robot, no_hoist_cond=True) if no_hoist_cond else tiny(robot)
    assert ("cond" in open_bundle(bundle).components) is not no_hoist_cond
    answer = load(bundle).infer(request, noise=arrays["noise"])
    assert off(answer["chunk_normalized"], arrays["chunk_normalized"][0]) <= 10 * ROUNDING[robot]["chunk_normalized"]
    assert off(answer["actions"], arrays["actions"]) <= 10 * ROUNDING[robot]["actions"]


def test_a_bundle_that_does_not_say_is_not_hoisted(tiny: Tiny, tmp_path: Path) -> None:
    """A three-engine export of the same contract version may lack the flag."""
    bundle = tmp_path / "b"
    shutil.copytree(tiny(no_hoist_cond=True), bundle)
    config = json.loads((bundle / "action/config.json").read_text())
    assert config["builder_config"].pop("hoisted_adarms_cond") is False
    (bundle / "action/config.json").write_text(json.dumps(config))
    arrays, request = reference("pi05_libero")
    chunk = load(bundle).infer(request, noise=arrays["noise"])["chunk_normalized"]
    assert off(chunk, arrays["chunk_normalized"][0]) <= 10 * ROUNDING["pi05_libero"]["chunk_normalized"]


def test_half_precision_runs_and_keeps_flow_time_and_keys_where_they_belong(tiny: Tiny) -> None:
    arrays, request = reference("pi05_libero")
    bundle = tiny(dtype="fp16")
    chunk = load(bundle).infer(request, noise=arrays["noise"])["chunk_normalized"]
    assert 1e-5 < off(chunk, arrays["chunk_normalized"][0]) < 1e-2  # float16 keeps 11 bits; nearer than 1e-5 it would not have been used
    kinds = {spec.name: spec.dtype for part in open_bundle(bundle).components.values() for spec in (*part.inputs, *part.outputs)}
    float32 = {"noise_trajectory", "adarms_modulation", "timesteps", "rope_rotary_cos_sin", "action_pred"}
    assert {name for name, dtype in kinds.items() if dtype == "float32"} == float32
    assert kinds["pixel_values"] == kinds["prefix_k_layer00"] == "float16"
    with pytest.raises(BadRequest, match="is bf16, which runs on TensorRT only"):
        load(tiny(dtype="bf16"))


def test_the_per_step_velocities_of_the_reference_pass_verify_and_a_bent_one_fails(tiny: Tiny) -> None:
    arrays, _ = reference("pi05_libero")
    dump: dict[str, NDArray[Any]] = {}
    for k in range(10):
        keys = {f"prefix_{letter}_layer{i:02d}": arrays[f"prefix.{letter}_{i:02d}"] for i in range(3) for letter in "kv"}
        table = processor.rotary(527, 10, 16, 1e4)[None]
        given = {
            "noise_trajectory": arrays["step.x"][k], "adarms_modulation": arrays["step.adarms_modulation"][k], **keys,
            "rope_rotary_cos_sin": table, "attention_pos_id": np.arange(10, dtype=np.int32)[None],
        }  # fmt: skip
        dump |= {f"action/{k}/in/{name}": array for name, array in given.items()}
        dump[f"action/{k}/out/action_pred"] = arrays["step.velocity"][k]
    bundle = open_bundle(tiny())
    verdict = compare(bundle, dump)
    assert verdict.passed
    assert len(verdict.rows) == 10
    dump["action/7/out/action_pred"] = dump["action/7/out/action_pred"] + np.float32(1e-3)
    assert [row.call for row in compare(bundle, dump).rows if not row.passed] == [7]


def test_a_reference_that_is_not_finite_or_holds_more_is_told(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, "verify", tiny(), "--dump", tmp_path / "nowhere" / "d.npz")
    assert (code, "there is no such folder; name a file to write" in err) == (2, True)
    assert run(capfd, "verify", tiny(), "--dump", tmp_path / "d.npz")[0] == 0
    dump = read_npz(tmp_path / "d.npz")
    write_npz(tmp_path / "more.npz", {**dump, "decoder/0/out/tokens": np.zeros(3)})
    code, out, _ = run(capfd, "verify", tiny(), "--reference", tmp_path / "more.npz", "--json")
    assert (code, json.loads(out)["not_compared"]) == (0, ["decoder"])
    bent = dump["action/1/out/action_pred"].copy()
    bent[0, 2, 3] = np.nan
    write_npz(tmp_path / "nan.npz", {**dump, "action/1/out/action_pred": bent})
    code, out, _ = run(capfd, "verify", tiny(), "--reference", tmp_path / "nan.npz", "--json")
    assert code == 1
    (row,) = [row for row in json.loads(out)["rows"] if not row["passed"]]
    assert (row["component"], row["call"], row["worst"]) == ("action", 1, [0, 2, 3])


def unscaled(times: float) -> Callable[[Pi05Runtime], None]:
    def change(runtime: Pi05Runtime) -> None:
        runtime._scale = np.float32(runtime._scale**times)

    return change


def no_antialias(picture: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    import cv2

    return np.asarray(cv2.resize(picture, (width, height), interpolation=cv2.INTER_LINEAR))


REAL_ROTARY, REAL_PIXELS, REAL_IDS, REAL_BINS = processor.rotary, processor.pixels, processor.Tokens.ids, processor.bins
WRONG: dict[str, tuple[str, Any]] = {
    "velocity added": ("runtime.integrate", lambda velocity, start, steps, dt: flow.integrate(velocity, start, steps, -dt)),
    "time from 0 to 1": ("runtime.schedule", lambda steps: processor.schedule(steps)[::-1].copy()),
    "suffix positions from 0": ("runtime.rotary", lambda first, *rest: REAL_ROTARY(0, *rest)),
    "suffix positions off by one": ("runtime.rotary", lambda first, *rest: REAL_ROTARY(first + (first > 0), *rest)),
    "suffix positions behind all slots": ("runtime.rotary", lambda first, *rest: REAL_ROTARY(968 if first else 0, *rest)),
    "views swapped": ("policy.pixels", lambda pictures, side: REAL_PIXELS(pictures[::-1], side)),
    "a filler view attended": (
        "policy.pixels", lambda pictures, side: np.concatenate([REAL_PIXELS(pictures, side), -np.ones((1, 3, side, side), np.float32)]),
    ),
    "a padded token emitted": ("processor.Tokens.ids", lambda self, *given: np.append(REAL_IDS(self, *given), 0)),
    "resize without antialias": ("processor.fit_with_border", no_antialias),
    "prompt in lower case": ("processor.clean", lambda prompt: prompt.strip().replace("_", " ").replace("\n", " ").lower()),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_host_is_far_from_the_reference(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Each deliberate error moves the chunk a hundred times further than a right one may be away."""
    where, wrong = WRONG[case]
    policy = load(tiny())
    monkeypatch.setattr(f"vla_eval.policies.pi05.{where}", wrong)
    arrays, request = reference("pi05_libero")
    chunk = policy.infer(request, noise=arrays["noise"])["chunk_normalized"]
    assert off(chunk, arrays["chunk_normalized"][0]) > 100 * 10 * ROUNDING["pi05_libero"]["chunk_normalized"]


@pytest.mark.parametrize("times", [0, 2])
def test_text_tokens_that_are_scaled_never_or_twice_are_far_from_the_reference(tiny: Tiny, times: int) -> None:
    arrays, request = reference("pi05_libero")
    policy = load(tiny())
    unscaled(times)(policy.model.runtime)
    chunk = policy.infer(request, noise=arrays["noise"])["chunk_normalized"]
    assert off(chunk, arrays["chunk_normalized"][0]) > 1000 * ROUNDING["pi05_libero"]["chunk_normalized"]


WRONG_STATE: dict[str, Any] = {
    "bins clamped": lambda state: [max(0, n) for n in REAL_BINS(state)],
    "bins off by one": lambda state: [n + 1 for n in REAL_BINS(state)],
    "state padded to 32": lambda state: REAL_BINS(np.pad(state, (0, 32 - len(state)))),
}


@pytest.mark.parametrize("case", WRONG_STATE)
def test_a_state_written_wrongly_is_far_from_the_reference(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(processor, "bins", WRONG_STATE[case])
    arrays, request = reference("pi05_droid")
    chunk = load(tiny("pi05_droid")).infer(request, noise=arrays["noise"])["chunk_normalized"]
    assert off(chunk, arrays["chunk_normalized"][0]) > 1000 * ROUNDING["pi05_droid"]["chunk_normalized"]


WRONG_ALOHA: dict[str, tuple[str, Any]] = {
    "signs not turned": ("FLIP", np.ones(14)),
    "state not added": ("JOINTS", np.zeros(14, bool)),
    "state added to the grippers too": ("JOINTS", np.ones(14, bool)),
}


@pytest.mark.parametrize("case", WRONG_ALOHA)
def test_alohas_wrong_steps_are_far_from_the_reference(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name, wrong = WRONG_ALOHA[case]
    monkeypatch.setattr(adapters, name, wrong)
    arrays, request = reference("pi05_aloha")
    actions = load(tiny("pi05_aloha")).infer(request, noise=arrays["noise"])["actions"]
    assert off(actions, arrays["actions"]) > 1e-2  # the goldens' README: 9e-2 and more


PLACES = 96


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnxruntime.InferenceSession, onnxruntime.InferenceSession]:
    """The prefix as it is, and the same drawn with a mask over its places."""

    class Masked(OnnxPen):
        """A pen whose attention sees an input `valid` only."""

        seen: Value | None = None

        def attention(self, q: Value, k: Value, v: Value, *, scale: float, mask: Value | None = None, causal: bool = False) -> Value:
            self.seen = self.seen or self.input("valid", "bool", (1, 1, 1, k.shape[2]))
            return super().attention(q, k, v, scale=scale, mask=self.seen, causal=causal)

    g, w = read_geometry(GOLDEN / "geometry.json"), open_checkpoint(GOLDEN / "pi05_libero/checkpoint", PREFIXES).weights
    paths = []
    for pen in (OnnxPen, Masked):
        paths.append(tmp_path_factory.mktemp("prefix") / "prefix.onnx")
        with pen(paths[-1], "float32") as drawing:
            network.prefix(drawing, g, w, 1, Axis("S", 1, 48, PLACES))
    compact, masked = (onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in paths)
    return compact, masked


@settings(max_examples=25, deadline=None)
@given(valid=st.lists(st.booleans(), min_size=PLACES, max_size=PLACES).filter(any), seed=st.integers(0, 2**32 - 1))
def test_a_compact_prefix_is_the_masked_and_padded_one(
    prefixes: tuple[onnxruntime.InferenceSession, onnxruntime.InferenceSession], valid: list[bool], seed: int
) -> None:
    """What is masked out may as well not be there, wherever it lies: positions count what is valid, in both."""
    g, keep = read_geometry(GOLDEN / "geometry.json"), np.array(valid)
    embeds = np.random.default_rng(seed).standard_normal((1, PLACES, g.prefix.width), np.float32)
    found = []
    for session, rows, extra in (
        (prefixes[0], keep, {}), (prefixes[1], np.ones(PLACES, bool), {"valid": keep[None, None, None]}),
    ):  # fmt: skip
        table = processor.rotary(0, PLACES, g.prefix.head_dim, g.rope_theta)[np.maximum(np.cumsum(keep) - 1, 0)[rows]]
        ids = np.arange(rows.sum(), dtype=np.int32)[None]
        fed = {"inputs_embeds": embeds[:, rows], "rope_rotary_cos_sin": table[None], "attention_pos_id": ids, **extra}
        found.append(session.run(None, fed))
    for compact, padded in zip(*found, strict=True):
        assert off(compact, padded[:, keep]) <= 2e-6  # sums of another length round differently, twice


def rows(bundle: Path, count: int) -> tuple[Pi05Runtime, list[Inputs]]:
    runtime = load(bundle).model.runtime
    rng = np.random.default_rng(3)
    made = [
        Inputs(
            rng.uniform(-1, 1, (2, 3, 224, 224)).astype(np.float32), rng.integers(4, 400, 12 if i != 2 else 17), draw_noise(i, 10, 32)
        )
        for i in range(count)
    ]  # fmt: skip
    return runtime, made


def test_a_row_does_not_depend_on_its_batch_mates(tiny: Tiny) -> None:
    runtime, made = rows(tiny(batch=2), 4)  # the third prompt is longer, so it cannot share a batch
    together = [answer.chunk for answer in runtime(made)]
    for row, chunk in zip(made, together, strict=True):
        (alone,) = runtime([row])
        np.testing.assert_array_equal(alone.chunk, chunk)
    single, _ = rows(tiny(), 1)
    for answer, chunk in zip(single(made), together, strict=True):
        assert off(answer.chunk, chunk) <= 1e-5  # another batch may use another product


def test_noise_is_an_input_and_nothing_else_is_random(tiny: Tiny) -> None:
    _, request = reference("pi05_libero")
    policy = load(tiny())
    one, again, two = (policy.infer(request, seed=seed)["chunk_normalized"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert off(two, one) > 1e-2
    first, second = (policy.infer(request, noise=np.zeros((10, 32), np.float32))["actions"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_the_times_part_is_made_once_and_again_for_another_number_of_steps(tiny: Tiny) -> None:
    runtime, (row,) = rows(tiny(), 1)
    calls: list[str] = []
    real = runtime._call

    class Counted:
        def __call__(self, component: str, **tensors: Any) -> Any:
            calls.append(component)
            return real(component, **tensors)

    runtime._call = Counted()  # type: ignore[assignment]
    runtime([row])
    runtime([row])
    assert calls.count("cond") == 1
    assert calls.count("prefix") == calls.count("visual") == 2
    assert calls.count("action") == 20
    runtime.steps = 4
    runtime([row])
    assert calls.count("cond") == 2
    assert calls.count("action") == 24


def test_steps_are_a_setting_of_the_run_up_to_the_exports_limit(tiny: Tiny) -> None:
    arrays, request = reference("pi05_libero")
    four = [load(bundle, steps=4).infer(request, noise=arrays["noise"])["actions"] for bundle in (tiny(), tiny(no_hoist_cond=True))]
    assert off(four[0], four[1]) <= 1e-6  # the same numbers in another graph
    assert off(four[0], arrays["actions"]) > 1e-3
    with pytest.raises(BadRequest, match="takes 1 to 16 denoise steps, not 17; export it with --max-steps 17"):
        load(tiny(), steps=17)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": np.array([2, 416])}, "a token id is outside the embedding table's 416 rows"),
        ({"token_ids": np.array([2, -1])}, "a token id is outside"),
        ({"token_ids": np.array([], np.int64)}, "no text token"),
        ({"token_ids": np.full(1000, 5)}, "its prefix is 1512 tokens long, the bundle takes 976"),
        ({"pixels": np.zeros((4, 3, 224, 224), np.float32)}, r"wanted \[1 to 3, 3, 224, 224\]"),
        ({"pixels": np.zeros((0, 3, 224, 224), np.float32)}, r"wanted \[1 to 3, 3, 224, 224\]"),
        ({"noise": np.zeros((10, 7), np.float32)}, r"noise is \[10, 7\], wanted \[10, 32\]"),
        ({"noise": np.full((10, 32), np.nan, np.float32)}, "not finite"),
    ],
)
def test_a_row_that_the_network_cannot_answer_is_refused(tiny: Tiny, change: Mapping[str, Any], says: str) -> None:
    runtime, (row,) = rows(tiny(), 1)
    with pytest.raises(InvalidObservation, match=says):
        runtime([replace(row, **change)])


@pytest.mark.parametrize(
    "noise", [np.zeros((10, 7), np.float32), np.zeros((2, 10, 32), np.float32), np.zeros((10, 32)), [[0.0] * 32] * 10],
    ids=["narrow", "two", "double", "list"],
)  # fmt: skip
def test_noise_of_another_shape_or_precision_is_refused(tiny: Tiny, noise: Any) -> None:
    with pytest.raises(InvalidObservation, match=r"noise is .*, wanted float32 \[10, 32\]"):
        load(tiny()).infer(reference("pi05_libero")[1], noise=noise)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "7"])
def test_a_seed_that_is_none_is_refused(tiny: Tiny, seed: Any) -> None:
    with pytest.raises(InvalidObservation, match="it must be a whole number between 0 and 4294967295"):
        load(tiny()).infer(reference("pi05_libero")[1], seed=seed)


def test_a_request_that_is_no_table_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InvalidObservation, match="the request holds 'pick up the bowl', wanted a table of arrays"):
        load(tiny()).infer("pick up the bowl")  # type: ignore[arg-type]


def edited(tiny: Tiny, tmp_path: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(tiny(), tmp_path / "b")
    change(tmp_path / "b")
    return tmp_path / "b"


def policy_with(**fields: Any) -> Callable[[Path], object]:
    def change(bundle: Path) -> object:
        said = json.loads((bundle / "policy.json").read_text())
        return (bundle / "policy.json").write_text(json.dumps({**said, **fields}))

    return change


def two_sets(bundle: Path) -> object:
    return shutil.copytree(CASES / "checkpoints/two_sets/assets", bundle / "assets", dirs_exist_ok=True)


CONTRADICTIONS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "a horizon that is not the configuration's": (
        policy_with(action={"dim": 7, "max_dim": 32, "horizon": 50}), ContractMismatch, r"action\.horizon is 50, pi05_libero has 10",
    ),
    "a width that is not the engine's": (
        policy_with(action={"dim": 7, "max_dim": 64, "horizon": 10}), ContractMismatch, r"action\.max_dim is 64, the engine's 32",
    ),
    "state input turned on": (policy_with(discrete_state_input=True), ContractMismatch, "discrete_state_input is True"),
    "another configuration's name": (policy_with(policy_config="pi05_other"), ContractMismatch, "'pi05_other' is not implemented"),
    "another resolution": (policy_with(image_resolution=[256, 256]), ContractMismatch, r"image_resolution is \[256, 256\]"),
    "prompts that end in an end-of-sequence piece": (
        policy_with(tokenizer={"add_bos": True, "add_eos": True, "max_length": 200}), ContractMismatch, r"tokenizer\.add_eos is True",
    ),
    "suites that are no list": (policy_with(trained_for="libero_10"), ContractMismatch, "trained_for is 'libero_10', no list of suites"),
    "another contract version": (policy_with(contract_version=99), ContractMismatch, "contract_version is 99, this vla-eval reads 1"),
    "no statistics": (lambda b: shutil.rmtree(b / "assets"), BadRequest, r"assets holds no norm_stats\.json"),
    "several statistics": (two_sets, BadRequest, r"physical-intelligence/libero and of second_robot; say which: --option asset=ID"),
    "another tokenizer": (
        lambda b: (b / "text_tokenizer/paligemma_tokenizer.model").unlink(), BadRequest, "is no file; PaliGemma's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_bundle_that_contradicts_itself_is_refused_at_load(tiny: Tiny, tmp_path: Path, case: str) -> None:
    change, kind, says = CONTRADICTIONS[case]
    with pytest.raises(kind, match=says):
        load(edited(tiny, tmp_path, change))


def test_an_action_engine_of_another_horizon_is_refused(tiny: Tiny) -> None:
    policy = open_policy(tiny())
    with pytest.raises(ContractMismatch, match=r"action\.horizon is 50 in pi05_aloha, 10 in the action engine"):
        type(policy)(open_policy(tiny("pi05_aloha")).configuration, policy.statistics, policy._tokens, policy.runtime)


def test_statistics_that_are_staged_after_the_export_count_and_their_digest_is_told(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = edited(tiny, tmp_path, two_sets)
    before, after = load(tiny()), load(bundle, asset="second_robot")
    assert before.engines["action"]["norm_stats_sha256"] != after.engines["action"]["norm_stats_sha256"]
    arrays, request = reference("pi05_libero")
    ours, theirs = (policy.infer(request, noise=arrays["noise"]) for policy in (before, after))
    np.testing.assert_array_equal(ours["chunk_normalized"], theirs["chunk_normalized"])
    assert off(theirs["actions"], ours["actions"]) > 1e-3
    code, out, _ = run(capfd, "check", bundle, "--json")
    assert code == 0
    told = json.loads(out)["not_covered"]
    assert told["assets/second_robot/norm_stats.json"] == after.engines["action"]["norm_stats_sha256"]


def test_the_cpus_engine_leaves_nothing_in_the_users_home_and_reports_to_nobody(tiny: Tiny, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ORT_"))}
    asked = f"import vla_eval; print(vla_eval.load_policy('pi05', bundle={str(tiny())!r}).engines['action']['backend'])"
    done = subprocess.run([sys.executable, "-c", asked], env={**kept, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "onnxruntime"
    assert list(tmp_path.iterdir()) == []


# --- canonical tensors


def canonical(folder: Path, robot: str = "pi05_libero", views: int = 0) -> Path:
    """The reference's tensors as another program would write them; `views` more slots, filled as the reference fills them."""
    arrays, _ = reference(robot)
    seen = np.moveaxis(arrays["input.images_u8"][0].astype(np.float32) / np.float32(255) * 2 - 1, -1, 1)
    seen = np.concatenate([seen, -np.ones((views, *seen.shape[1:]), np.float32)])
    folder.mkdir()
    seen.astype(np.float16).tofile(folder / "pixel_values.bin")
    (folder / "token_ids.csv").write_text(",".join(map(str, arrays["input.token_ids"][0])) + "\n")  # padded, as the transform leaves it
    arrays["noise"].astype(np.float32).tofile(folder / "x0.bin")
    np.save(folder / "actions.npy", arrays["chunk_normalized"])
    return folder


FILES = ("pixel_values.bin", "token_ids.csv", "x0.bin", "actions.npy")


@pytest.mark.parametrize("robot", ROBOTS)
def test_canonical_tensors_of_the_reference_pass_its_gates(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str], robot: str
) -> None:
    folder = canonical(tmp_path / "c", robot)
    code, out, err = run(capfd, "verify", tiny(robot), "--tensors", *(folder / name for name in FILES), "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["passed"]
    assert told["max_abs"] <= 5e-3
    code, out, err = run(capfd, "infer", tiny(robot), "--canonical", folder, "--json")
    assert code == 0, err
    arrays, _ = reference(robot)
    chunk = np.array(json.loads(out)["arrays"]["chunk_normalized"])
    assert off(chunk, arrays["chunk_normalized"][0]) < 2e-3  # the pictures came as float16, 11 bits


def test_another_chunk_or_number_of_steps_misses_the_gates(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = canonical(tmp_path / "c")
    code, out, _ = run(capfd, "verify", tiny(), "--tensors", *(folder / name for name in FILES), "--steps", "4", "--json")
    assert code == 1
    assert not json.loads(out)["passed"]
    chunk = reference("pi05_libero")[0]["chunk_normalized"].copy()
    chunk[0, 3, 2] += 6e-3
    np.save(folder / "actions.npy", chunk)
    code, out, _ = run(capfd, "verify", tiny(), "--tensors", *(folder / name for name in FILES), "--json")
    assert code == 1
    assert json.loads(out)["worst"] == [3, 2]


def test_all_three_slots_are_a_benchmark_and_never_scored(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = canonical(tmp_path / "c", views=1)
    code, _, _ = run(capfd, "infer", tiny(), "--canonical", folder)
    assert code == 0
    code, _, err = run(capfd, "verify", tiny(), "--tensors", *(folder / name for name in FILES))
    assert code == 2
    assert "holds 3 views, pi05_libero has 2" in err


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("pixel_values.bin", b"\0" * 7, "has 7 bytes, wanted 1 to 3 views"),
        ("pixel_values.bin", b"", "has 0 bytes, wanted 1 to 3 views"),
        (
            "pixel_values.bin",
            np.full(2 * 3 * 224 * 224, 1.001, np.float16).tobytes(),
            "to 1.0009765625, wanted pictures in -1 … 1",
        ),
        ("pixel_values.bin", np.zeros(3 * 224 * 224, np.float32).tobytes()[:-2], "wanted 1 to 3 views"),
        ("x0.bin", b"\0" * 640, "has 640 bytes, wanted 1 chunk of 1280 bytes"),
        ("x0.bin", np.zeros((10, 32)).tobytes(), "has 2560 bytes, wanted 1 chunk of 1280 bytes: float32"),
        ("token_ids.csv", b"2,5,7,0\n2,6,7,0\n", "has 2 rows of ids; a prompt is one row"),
        ("token_ids.csv", b"2,0,5,0", "padding (id 0) stands before other tokens"),
        ("token_ids.csv", b"2,-5", "'-5' is no token id"),
        ("x0.bin", b"\xff" * 1280, "holds NaN or infinity"),
        ("token_ids.csv", b"2,five", "'five' is no token id"),
        ("token_ids.csv", b"0,0", "it has no text token"),
        ("token_ids.csv", b"2,9999", "a token id is outside"),
        ("token_ids.csv", None, "cannot be read"),
    ],
)
def test_a_canonical_tensor_that_does_not_fit_is_refused_by_file(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, content: bytes | None, says: str
) -> None:
    folder = canonical(tmp_path / "c")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    code, _, err = run(capfd, "infer", tiny(), "--canonical", folder)
    assert code == 2
    assert says in err


def test_ids_may_stand_in_a_row_or_a_column_with_padding_behind(tiny: Tiny, tmp_path: Path) -> None:
    policy, folder = load(tiny()), canonical(tmp_path / "c")
    for text in (b"2,5,7\n", b"2\n5\n7\n", b"2 5 7 0 0", b"\xef\xbb\xbf2, 5, 7,0\r\n"):
        (folder / "token_ids.csv").write_bytes(text)
        row = policy.model.canonical(*(folder / name for name in FILES[:3]))
        assert row.token_ids.tolist() == [2, 5, 7]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give --observation FILE or --canonical DIR"),
        (["--canonical", "c", "--seed", "3"], "--canonical brings its own pictures"),
        (["--canonical", "c", "--steps", "4", "--option", "steps=5"], "--steps 4 and --option steps=5 disagree"),
    ],
)
def test_infer_says_which_of_its_options_go_together(tiny: Tiny, capfd: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    code, _, err = run(capfd, "infer", tiny(), *words)
    assert code == 2
    assert says in err


def test_an_observation_file_is_asked_on_the_command_line(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrays, request = reference("pi05_aloha")
    write_npz(tmp_path / "obs.npz", {key: np.asarray(value.encode() if key == "prompt" else value) for key, value in request.items()})
    np.save(tmp_path / "noise.npy", arrays["noise"])
    words: list[str | Path] = ["--observation", tmp_path / "obs.npz", "--noise", tmp_path / "noise.npy", "--steps", "10", "--json"]
    code, out, err = run(capfd, "infer", tiny("pi05_aloha"), *words)
    assert code == 0, err
    assert off(np.array(json.loads(out)["arrays"]["actions"]), arrays["actions"]) <= 10 * ROUNDING["pi05_aloha"]["actions"]


# --- episodes


def test_the_policy_keeps_the_harnesss_contract(tiny: Tiny) -> None:
    check_policy(load(tiny(), side=64))


def test_libero_pictures_reach_the_network_mirrored_and_the_state_in_order(tiny: Tiny) -> None:
    plates = read_npz(CASES / "conventions/l_shape.npz")
    state = {"eef_pos": np.array([1.0, 2, 3]), "eef_rot": np.array([4.0, 5, 6]), "gripper": np.array([7.0, 8])}
    seen: Observation = {
        "images": {"agentview": plates["upright"], "robot0_eye_in_hand": plates["upright"]},
        "state": state,
        "instruction": "x",
    }
    request = to_robot(seen)
    np.testing.assert_array_equal(request["observation/image"], plates["policy"])
    np.testing.assert_array_equal(request["observation/wrist_image"], plates["policy"])
    assert request["observation/state"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    row = load(tiny()).model.row(request)
    assert isinstance(row.pixels, np.ndarray)
    shown = (row.pixels[0].transpose(1, 2, 0) + 1) / 2 * 255
    small = stretch_area(plates["policy"], 224, 224).astype(np.float32)
    assert np.abs(shown - small).mean() < np.abs(shown - small[:, ::-1]).mean() / 4


def test_episodes_of_the_toy_are_played_and_recorded(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words: list[str | Path] = [
        "--task",
        "toy/0",
        "--policy",
        "pi05",
        "--bundle",
        tiny(),
        "--option",
        "side=64",
        "--trials",
        "1",
        "--out",
        tmp_path,
        "--json",
    ]
    code, out, err = run(capfd, "run", *words, "--workers", "0")
    assert code == 0, err
    folder = open_run(Path(json.loads(out)["folder"]))
    assert set(folder.manifest.engines) == {"visual", "prefix", "action", "cond"}
    assert folder.manifest.engines["action"]["norm_stats_sha256"] == load(tiny()).model.statistics.sha256
    (record,) = folder.records()
    assert (record.outcome, record.steps, record.chunks) == ("failure", 40, 4)  # of 10 actions each


def test_a_run_is_not_gone_on_with_under_other_statistics(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are no part of the bundle's identity, but they are of the run's."""
    bundle = edited(tiny, tmp_path, lambda bundle: None)
    (file,) = bundle.rglob("norm_stats.json")
    words = ["--task", "toy/0", "--policy", "pi05", "--bundle", str(bundle), "--option", "side=64", "--trials", "1", "--workers", "0"]
    code, out, err = run(capfd, "run", *words, "--out", tmp_path / "runs", "--json")
    assert code == 0, err
    folder = Path(json.loads(out)["folder"])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    statistics = file.read_text()
    file.write_text(statistics + " ")
    code, _, err = run(capfd, "run", "--resume", folder, "--bundle", bundle)
    assert code == 2
    assert "it would no longer be one run: engines.action.norm_stats_sha256: '" in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    file.write_text(statistics)
    assert run(capfd, "run", "--resume", folder, "--bundle", bundle)[0] == 0


def test_a_run_is_the_same_alone_and_side_by_side(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two workers whose requests share batches, against one episode after another through the same engines of batch two."""
    folders = []
    for name, words in (("alone", ["--workers", "0"]), ("together", ["--workers", "2", "--batch", "2"])):
        code, out, err = run(
            capfd, "run", "--task", "toy/0", "--policy", "pi05", "--bundle", tiny(batch=2), "--option", "side=64", "--trials", "2",
            "--out", tmp_path / name, "--json", *words,
        )  # fmt: skip
        assert code == 0, err
        folders.append(open_run(Path(json.loads(out)["folder"])))
    for trial in range(2):
        ours, theirs = (folder.episode("toy@v1/0", trial) for folder in folders)
        np.testing.assert_array_equal(ours.actions, theirs.actions)


def test_another_robots_bundle_is_refused_before_the_first_episode(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, "run", "--task", "toy/0", "--policy", "pi05", "--bundle", tiny("pi05_droid"), "--out", tmp_path / "out")
    assert code == 2
    assert "the bundle drives 'pi05_droid', no LIBERO arm" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.libero
def test_the_real_simulator_can_be_asked_and_moved(tiny: Tiny, libero: Callable[[str, int], LiberoEnv]) -> None:
    """Pictures in, actions out, in robosuite: one chunk of libero_object/0. What it does there is random."""
    env, policy = libero("libero_object", 0), load(tiny())
    observation, _ = env.reset(seed=1, options={"trial": 0})
    images = env.look(list(policy.needs.cameras))
    seen: Observation = {"images": images, "state": observation["state"], "instruction": observation["instruction"]}
    (answer,) = policy.act([vla_eval.Request(seen, seed=0, task="t", trial=0, step=0)])
    assert answer.actions.shape == (10, 7)
    before = observation["state"]["eef_pos"]
    for action in answer.actions:
        observation, *_ = env.step(np.clip(action, -1, 1))
    assert np.abs(observation["state"]["eef_pos"] - before).max() > 1e-3


def run(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    out, err = capfd.readouterr()
    return code, out, " ".join(err.split())


@pytest.mark.parametrize(("robot", "views"), [("pi05_libero", 2), ("pi05_droid", 2), ("pi05_aloha", 3)])
def test_every_robot_answers_requests_made_from_its_contract(tiny: Callable[..., Path], robot: str, views: int) -> None:
    policy = open_policy(tiny(robot, batch=2), backend="onnxruntime", steps=2)
    rehearsal = policy.rehearse("pick up the bowl")
    assert set(rehearsal.answer()) == {"pack", "visual", "prefill", "denoise", "unpack"}
    seen, text = views * policy.runtime.geometry.vision.tokens_per_view, rehearsal.rows[0].token_ids.size
    assert rehearsal.about == {"batch": 2, "views": views, "tokens": seen + text, "steps": 2}
    assert len(rehearsal.rows) == 2
    assert not np.array_equal(rehearsal.rows[0].pixels, rehearsal.rows[1].pixels)
    assert rehearsal.rival is None  # no baseline has a tiny network's sizes


@pytest.mark.parametrize(("robot", "horizon"), [("pi05_libero", 10), ("pi05_droid", 15), ("pi05_aloha", None)])
def test_a_released_network_with_two_pictures_has_a_baseline_that_does_the_same_work(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, robot: str, horizon: int | None
) -> None:
    policy = open_policy(tiny(robot, batch=2), backend="onnxruntime", steps=2)
    monkeypatch.setattr(policies, "RELEASED", policy.runtime.geometry)  # as if the tiny network were the released one
    wanted = None if horizon is None else {"batch": 2, "steps": 2, "horizon": horizon}  # ALOHA has three pictures
    assert policy.rehearse("pick up the bowl").rival == wanted
    script = (RIVALS / "torch_baseline_pi05.py").read_text()
    assert all(f'"--{name}"' in script for name in ("arms", "dtype", *(wanted or ())))
