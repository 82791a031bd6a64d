"""A tiny GR00T bundle on ONNX Runtime: observation to robot actions, episodes, commands. Its weights are random, so it fails its tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import vla_eval
from vla_eval import cli, images
from vla_eval.arrays import read_npz, write_npz
from vla_eval.policies import flow
from vla_eval.policies.flow import draw_noise
from vla_eval.policies.gr00t import processor
from vla_eval.policies.gr00t.libero import load
from vla_eval.policies.gr00t.runtime import Gr00tRuntime, Inputs
from vla_eval.results.folder import open_run
from vla_eval.testing import check_policy
from vla_eval.types import BadRequest, ContractMismatch, Observation

if TYPE_CHECKING:
    from vla_eval.envs.libero import LiberoEnv

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny"
CASES = Path(__file__).parents[2] / "cases"
KEY = "annotation.human.action.task_description"
Tiny = Callable[..., Path]
ASKED = {
    "libero_sim": ("reference.npz", "Pick up the red_mug, please!"),
    "simpler_env_widowx": ("reference_one_view.npz", "Put it in the drawer."),
}
# Of each array's largest value: how far float32 and float64 runs of the reference are apart (its README). We may be ten times that.
ROUNDING = {
    "libero_sim": {
        "chunk_normalized": 6.3e-7, "action.x": 6.6e-7, "action.y": 6.3e-7, "action.z": 1.1e-6, "action.roll": 4.6e-7,
        "action.pitch": 1.3e-6, "action.yaw": 7.3e-7, "action.gripper": 5.1e-7,
    },
    "simpler_env_widowx": {"chunk_normalized": 4.6e-7, "action.arm": 1.5e-6, "action.finger": 2.1e-7},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def graphs_loaded_once() -> None:
    """Not here: what a row or a neighbour may not change could change in sessions as the product makes them."""


def reference(tag: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The recorded arrays, and the observation in them."""
    file, text = ASKED[tag]
    arrays = read_npz(GOLDEN / file)
    seen = {key.removeprefix("obs."): value for key, value in arrays.items() if key.startswith(("obs.video", "obs.state"))}
    return arrays, {**seen, KEY: text}


@pytest.mark.parametrize("tag", ASKED)
def test_the_chunk_and_the_actions_are_the_references(tiny: Tiny, tag: str) -> None:
    arrays, observation = reference(tag)
    answer = load(tiny(tag)).infer(observation, noise=arrays["noise"])
    assert set(answer) == set(ROUNDING[tag])
    for key, rounding in ROUNDING[tag].items():
        np.testing.assert_allclose(answer[key], arrays[key], rtol=0, atol=10 * rounding * np.abs(arrays[key]).max(), err_msg=key)


def test_half_precision_runs_and_keeps_the_flow_in_float32(tiny: Tiny) -> None:
    arrays, observation = reference("libero_sim")
    policy = load(tiny(dtype="fp16"))
    chunk = policy.infer(observation, noise=arrays["noise"])["chunk_normalized"]
    assert chunk.dtype == np.float32
    off = np.abs(chunk - arrays["chunk_normalized"]).max() / np.abs(arrays["chunk_normalized"]).max()
    assert 1e-5 < off < 1e-2  # float16 keeps 11 bits, 5e-4, over a dozen layers; nearer than 1e-5 it would not have been used
    with pytest.raises(BadRequest, match="is bf16, which runs on TensorRT only"):
        load(tiny(dtype="bf16"))


def swapped_halves(table: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(np.split(table, 2, axis=-1)[::-1], axis=-1)


def in_blocks(layout: processor.Layout, ids: NDArray[Any], grid: tuple[int, int]) -> NDArray[Any]:
    """The rotary table with its three axes one after another instead of in turn."""
    half = layout.text_head_dim // 2
    axis = np.repeat([0, 1, 2], layout.mrope_section)
    frequency = layout.text_theta ** -(np.arange(half) / half)
    angle = processor.positions(ids, layout.image_token, grid)[axis].T * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def on_positions(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[..., NDArray[Any]]:
    return lambda layout, ids, grid: processor.text_rotary(layout, change(processor.positions(ids, layout.image_token, grid)))


def on_tables(**changes: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[..., processor.VisionTables]:
    def wrong(layout: processor.Layout, views: int, grid: tuple[int, int]) -> processor.VisionTables:
        tables = processor.vision_tables(layout, views, grid)
        return replace(tables, **{name: change(getattr(tables, name)) for name, change in changes.items()})

    return wrong


def raster(table: NDArray[Any]) -> NDArray[Any]:
    """Columns of a [4, P] table in raster order instead of merge-block order."""
    order = np.arange(256).reshape(8, 2, 8, 2).transpose(0, 2, 1, 3).ravel()  # merge-block place -> raster place
    undone = np.argsort(order)
    return np.concatenate([view[:, undone] for view in np.split(table, table.shape[1] // 256, axis=1)], axis=1)


WRONG_HOST: dict[str, tuple[str, str, Any]] = {
    "vision rotary: rows and columns swapped": ("runtime", "vision_tables", on_tables(rotary=swapped_halves)),
    "position table: nearest instead of bilinear": (
        "runtime",
        "vision_tables",
        on_tables(position_weight=lambda w: (w == w.max(0)).astype(w.dtype)),
    ),
    "positions in raster order": ("runtime", "vision_tables", on_tables(position_index=raster, position_weight=raster)),
    "attention across pictures": ("runtime", "vision_tables", on_tables(cu_seqlens=lambda ends: ends[[0, 2, 2]])),
    "three text axes in blocks": ("runtime", "prompt_rotary", in_blocks),
    "rows and columns of text positions swapped": ("runtime", "prompt_rotary", on_positions(lambda p: p[[0, 2, 1]])),
    "plain counting instead of three axes": ("runtime", "prompt_rotary", on_positions(lambda p: np.tile(np.arange(p.shape[1]), (3, 1)))),
    "second resize bilinear": ("processor", "stretch_area", lambda picture, h, w: images.stretch_antialiased(picture, h, w)),
    "state not normalised": ("policy", "encode_state", lambda contract, state: np.pad(np.concatenate([*state.values()]), (0, 124))[None]),
    "velocity subtracted": ("runtime", "integrate", lambda velocity, start, steps, dt: flow.integrate(velocity, start, steps, -dt)),
}


@pytest.mark.parametrize("case", WRONG_HOST)
def test_a_wrong_host_is_far_from_the_reference(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Each deliberate error moves the chunk at least a hundred times further than a right one may be away."""
    where, name, wrong = WRONG_HOST[case]
    monkeypatch.setattr(f"vla_eval.policies.gr00t.{where}.{name}", wrong)
    arrays, observation = reference("libero_sim")
    chunk = load(tiny()).infer(observation, noise=arrays["noise"])["chunk_normalized"]
    off = np.abs(chunk - arrays["chunk_normalized"]).max() / np.abs(arrays["chunk_normalized"]).max()
    assert off > 100 * 10 * ROUNDING["libero_sim"]["chunk_normalized"], off


def rows(bundle: Path, count: int, words: int = 5) -> tuple[Gr00tRuntime, list[Inputs]]:
    """The bundle's runtime, and rows with pictures, text, state and noise of their own."""
    model = load(bundle).model
    made = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        ids = np.array([281, 84, *[289, *[292] * 64, 290] * 2, *rng.integers(0, 280, words), 282, 198])
        patches = rng.uniform(-1, 1, (512, 1536)).astype(np.float32)
        made.append(Inputs(patches, (16, 16), ids, rng.uniform(-1, 1, (1, 132)).astype(np.float32), draw_noise(seed, 40, 132)))
    return model.runtime, made


def test_a_row_is_bit_identical_whatever_its_batch_mates_are(tiny: Tiny) -> None:
    runtime, (a, b, c) = rows(tiny(batch=2), 3)
    alone = runtime([a])[0].chunk
    np.testing.assert_array_equal(runtime([a, b])[0].chunk, alone)
    np.testing.assert_array_equal(runtime([a, c])[0].chunk, alone)
    np.testing.assert_array_equal(runtime([b, a])[1].chunk, runtime([c, a])[1].chunk)
    single = rows(tiny(), 1)[0]([a])[0].chunk  # another batch may round differently: ten times the reference's own rounding
    np.testing.assert_allclose(single, alone, rtol=0, atol=6.3e-6 * np.abs(alone).max())


def test_second_rows_read_their_own_rotary_table(tiny: Tiny) -> None:
    """Rows of one length that differ in where their pictures stand: the second would use the first's positions without the offset."""
    runtime, (a, b) = rows(tiny(batch=2), 2)
    moved = replace(b, token_ids=np.roll(b.token_ids, 3))
    first = runtime([moved, a])[0].chunk
    np.testing.assert_allclose(runtime([a, moved])[1].chunk, first, rtol=0, atol=6.3e-6 * np.abs(first).max())
    other = runtime([b, a])[0].chunk
    assert np.abs(other - first).max() > 1e-3 * np.abs(first).max()  # the positions matter


def test_a_longer_prompt_before_changes_nothing(tiny: Tiny) -> None:
    runtime, (short,) = rows(tiny(), 1)
    clean = runtime([short])[0].chunk
    runtime([rows(tiny(), 1, words=40)[1][0]])
    np.testing.assert_array_equal(runtime([short])[0].chunk, clean)


def test_seeds_and_noise_decide_the_chunk(tiny: Tiny) -> None:
    policy, (_, observation) = load(tiny()), reference("libero_sim")
    one, again, two = (policy.infer(observation, seed=seed)["chunk_normalized"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - two).max() > 0.1
    zeros = np.zeros((1, 40, 132), np.float32)
    flat = [policy.infer(observation, noise=zeros)["chunk_normalized"] for _ in range(2)]
    np.testing.assert_array_equal(flat[0], flat[1])


def test_noise_in_padded_numbers_and_unused_steps_changes_valid_actions(tiny: Tiny) -> None:
    policy, (arrays, observation) = load(tiny()), reference("libero_sim")
    padded = arrays["noise"].copy()
    padded[:, :, 7:] = 0
    padded[:, 16:] = 0
    full, cut = (policy.infer(observation, noise=noise)["chunk_normalized"][:, :16, :7] for noise in (arrays["noise"], padded))
    assert np.abs(full - cut).max() > 1e-2


def test_another_step_count_needs_its_own_table(tiny: Tiny) -> None:
    _, observation = reference("libero_sim")
    both = tiny(steps=(4, 8))
    four, eight = (load(both, steps=steps).infer(observation)["chunk_normalized"] for steps in (4, 8))
    assert np.abs(four - eight).max() > 1e-3
    np.testing.assert_array_equal(load(both).infer(observation)["chunk_normalized"], four)
    with pytest.raises(BadRequest, match=r"not for 3; .*--steps 3,4,8"):
        load(both, steps=3)


def test_the_policy_keeps_the_rules_of_the_house(tiny: Tiny) -> None:
    check_policy(vla_eval.load_policy("gr00t", bundle=tiny(batch=2)))


def edited(bundle: Path, out: Path, change: Mapping[str, Any]) -> Path:
    """A copy whose policy.json says something else."""
    for file in bundle.rglob("*"):
        if file.is_file():
            target = out / file.relative_to(bundle)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    path = out / "action/policy.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **change}))
    return out


def test_a_contract_that_contradicts_the_graphs_is_refused_at_load(tiny: Tiny, tmp_path: Path) -> None:
    action = json.loads((tiny() / "action/policy.json").read_text())["action"]
    ten = edited(tiny(), tmp_path / "ten", {"action": {**action, "model_horizon": 50, "horizon": 50}})
    with pytest.raises(ContractMismatch, match=r"action\.model_horizon is 50 in policy\.json and tokenizer, 40 in the engines"):
        load(ten)
    said = json.loads((tiny() / "action/policy.json").read_text())
    one, view = f"<|vision_start|>{said['prompt']['image_token']}<|vision_end|>", said["prompt"]
    for name, change, says in (
        ("slot", {"embodiment_id": 5}, "embodiment_id is 5 in policy.json, 19 in the engines"),
        ("views", {"cameras": ["image"], "prompt": {**view, "before": view["before"].replace(one, "", 1)}}, "cameras are 1 .*, 2 in the"),
        ("grid", {"pictures": {**said["pictures"], "edge": 512}}, r"patches of a picture are \[32, 32\] in policy.json, \[16, 16\]"),
    ):
        with pytest.raises(ContractMismatch, match=says):
            load(edited(tiny(), tmp_path / name, change))


def run(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    out, err = capfd.readouterr()
    return code, out, err


def test_infer_answers_one_observation(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arrays, observation = reference("libero_sim")
    write_npz(tmp_path / "obs.npz", {**observation, KEY: np.array(observation[KEY])})
    np.save(tmp_path / "x0.npy", arrays["noise"])
    code, out, _ = run(capfd, "infer", tiny(), "--observation", tmp_path / "obs.npz", "--noise", tmp_path / "x0.npy", "--json")
    assert code == 0
    told = json.loads(out)
    for key in ("action.x", "action.gripper", "chunk_normalized"):
        np.testing.assert_allclose(told["arrays"][key], arrays[key], rtol=0, atol=2e-5 * np.abs(arrays[key]).max())
    assert told["bundle"] == vla_eval_digest(tiny())
    code, out, _ = run(capfd, "infer", tiny(), "--observation", tmp_path / "obs.npz", "--seed", "3")
    assert code == 0
    assert "action.gripper" in out


def vla_eval_digest(bundle: Path) -> str:
    from vla_eval.engines.bundle import open_bundle

    return open_bundle(bundle).digest


WRONG = json.loads((CASES / "conventions/observations.json").read_text())


@pytest.mark.parametrize("case", ["state in double precision", "channels first"])  # the others are held without a bundle
def test_infer_refuses_a_wrong_observation_in_one_line(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    arrays = {key: np.zeros(shape, dtype) for key, (dtype, shape) in {**WRONG["good"], **WRONG["refused"][case]}.items()}
    write_npz(tmp_path / "obs.npz", {**arrays, KEY: np.array("open it")})
    code, out, err = run(capfd, "infer", tiny(), "--observation", tmp_path / "obs.npz")
    assert (code, out) == (2, "")
    (key,) = WRONG["refused"][case]
    assert f"{key} is " in err.splitlines()[-1]
    assert "wanted" in err.splitlines()[-1]


def test_infer_refuses_what_only_an_unpickler_could_read(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "obs.npz").open("wb") as file:
        np.savez(file, **{"state.x": np.array([None], dtype=object)})  # type: ignore[arg-type]
    code, _, err = run(capfd, "infer", tiny(), "--observation", tmp_path / "obs.npz")
    assert code == 2
    assert "obs.npz: 'state.x' holds object" in err


def test_episodes_of_the_toy_are_played_and_recorded(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words: list[str | Path] = [
        "run",
        "--task",
        "toy/0",
        "--policy",
        "gr00t",
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
    code, out, err = run(capfd, *words, "--workers", "0")
    assert code == 0, err
    told = json.loads(out)
    folder = open_run(Path(told["folder"]))
    assert folder.manifest.bundle == vla_eval_digest(tiny())
    assert folder.manifest.backend.startswith("onnxruntime ")
    assert "gr00t runs on onnxruntime" in err
    assert {name: about["dtype"] for name, about in folder.manifest.engines.items()} == {
        "visual": "fp32",
        "vl_backbone": "fp32",
        "action": "fp32",
    }
    (record,) = folder.records()
    assert record.outcome == "failure"
    assert record.steps == 40
    assert record.chunks == 3  # of 16 actions each: the toy's protocol executes whole chunks


def test_a_run_is_the_same_alone_and_side_by_side(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two workers whose requests share batches, against one episode after another through the same engines of batch two."""
    folders = []
    for name, words in (("alone", ["--workers", "0"]), ("together", ["--workers", "2", "--batch", "2"])):
        code, out, err = run(
            capfd, "run", "--task", "toy/0", "--policy", "gr00t", "--bundle", tiny(batch=2), "--option", "side=64", "--trials", "2",
            "--out", tmp_path / name, "--json", *words,
        )  # fmt: skip
        assert code == 0, err
        folders.append(open_run(Path(json.loads(out)["folder"])))
    alone, together = folders
    for trial in range(2):
        ours, theirs = (folder.episode("toy@v1/0", trial) for folder in folders)
        np.testing.assert_array_equal(ours.actions, theirs.actions)
        np.testing.assert_array_equal(ours.states, theirs.states)
    assert alone.manifest.bundle == together.manifest.bundle


def test_another_robots_bundle_is_refused_before_the_first_episode(tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(
        capfd, "run", "--task", "toy/0", "--policy", "gr00t", "--bundle", tiny("simpler_env_widowx"), "--out", tmp_path / "out"
    )
    assert code == 2
    assert "'simpler_env_widowx' has cameras ['front'], the LIBERO arm" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.libero
def test_the_real_simulator_can_be_asked_and_moved(tiny: Tiny, libero: Callable[[str, int], LiberoEnv]) -> None:
    """Pictures in, actions out, in robosuite: two chunks of libero_object/0. What it does there is random."""
    env, policy = libero("libero_object", 0), load(tiny())
    observation, _ = env.reset(seed=1, options={"trial": 0})
    for chunk in range(2):
        images = env.look(list(policy.needs.cameras))
        seen: Observation = {"images": images, "state": observation["state"], "instruction": observation["instruction"]}
        (answer,) = policy.act([vla_eval.Request(seen, seed=chunk, task="t", trial=0, step=8 * chunk)])
        assert answer.actions.shape == (16, 7)
        assert set(np.unique(answer.actions[:, 6])) <= {-1.0, 0.0, 1.0}
        before = observation["state"]["eef_pos"]
        for action in answer.actions[:8]:
            observation, *_ = env.step(action)
        assert np.abs(observation["state"]["eef_pos"] - before).max() > 1e-3
