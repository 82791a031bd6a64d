"""Checkpoints as they are found: layouts, both configuration schemas, statistics in all their places, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from vla_eval.engines.weights import open_checkpoint, read_tensors, token_table, write_tensors
from vla_eval.policies.pi05.configuration import (
    DEAD_HEAD,
    EMBEDDING,
    EXPERT,
    HEAD,
    PREFIX,
    PREFIXES,
    RELEASED,
    VISION,
    check_architecture,
    geometry_from,
    plain,
    read_config,
    read_geometry,
    tensor_shapes,
)
from vla_eval.policies.pi05.contracts import CONFIGURATIONS, choose, find_statistics, read_policy, read_statistics
from vla_eval.policies.pi05.recipe import recipe
from vla_eval.types import BadRequest, ContractMismatch

GOLDEN = Path(__file__).parents[2] / "golden/pi05_tiny"
CASES = Path(__file__).parents[2] / "cases"
A = read_geometry(GOLDEN / "geometry.json")
ROBOTS = ("pi05_libero", "pi05_droid", "pi05_aloha")
Tensors = dict[str, NDArray[Any]]
LIBERO = CONFIGURATIONS["pi05_libero"]


def test_the_released_model_has_the_812_tensors_of_the_published_list() -> None:
    shapes = tensor_shapes(RELEASED)
    assert len(shapes) == 812
    text = "".join(f"{name}\t{'x'.join(map(str, shapes[name]))}\n" for name in sorted(shapes))
    assert hashlib.sha256(text.encode()).hexdigest() == "f932ea763802ccbf6fa78878409287a28546fe18817bcff48c22499a1e0de955"


@pytest.mark.parametrize("robot", ROBOTS)
def test_every_golden_layout_is_read(robot: str) -> None:
    """float32 with one table (A32, C), bfloat16 (A), and the mixture that openpi's trainer writes (B)."""
    stored = open_checkpoint(GOLDEN / robot / "checkpoint", PREFIXES)
    assert check_architecture(stored, A) == 32
    kinds = {np.dtype(tensor.dtype) for tensor in stored.tensors.values()}
    bfloat16, single = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    assert kinds == {"pi05_libero": {single}, "pi05_droid": {bfloat16}, "pi05_aloha": {single, bfloat16}}[robot]


TABLE = {  # the specification's, row by row
    "pi05_libero": (8, 7, 10, False, [("image", True), ("wrist_image", True)], [], 2),
    "pi05_droid": (8, 8, 15, True, [("exterior_image_1_left", True), ("wrist_image_left", True)], [], 2),
    "pi05_aloha": (14, 14, 50, True, [("cam_high", True), ("cam_left_wrist", False), ("cam_right_wrist", False)], ["cam_low"], 3),
}


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_three_configurations_are_the_specifications(robot: str) -> None:
    c = CONFIGURATIONS[robot]
    told = (c.state_dim, c.action_dim, c.horizon, c.discrete_state_input, [tuple(one) for one in c.cameras], list(c.ignored), c.opt_views)
    assert told == TABLE[robot]
    assert set(CONFIGURATIONS) == set(TABLE)


def test_the_geometry_survives_its_plain_form() -> None:
    assert geometry_from(json.loads(json.dumps(plain(RELEASED)))) == RELEASED


def copied(folder: Path, alter: Callable[[Tensors], Tensors] | None = None, robot: str = "pi05_libero", shards: int = 1) -> Path:
    """A golden checkpoint with other tensors."""
    shutil.copytree(GOLDEN / robot / "checkpoint", folder)
    file = folder / "model.safetensors"
    if alter is not None or shards > 1:
        tensors = read_tensors(file)
        file.unlink()
        tensors = alter(tensors) if alter else tensors
        for i in range(shards):
            part = {name: (a.dtype, a.shape, [a]) for name, a in list(tensors.items())[i::shards]}
            write_tensors(folder / f"model-{i + 1:05d}-of-{shards:05d}.safetensors", part)
        index = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def prefixed(tensors: Tensors) -> Tensors:
    return {f"model.{name}": array for name, array in tensors.items()}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: array for name, array in tensors.items() if name not in names}


def plus(name: str, *shape: int, value: float = 0.0) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: np.full(shape, value, np.float32)}


def renamed_table(tensors: Tensors) -> Tensors:
    return {EMBEDDING if name == HEAD else name: array for name, array in tensors.items()}


def both_tables(tensors: Tensors) -> Tensors:
    return {**tensors, EMBEDDING: tensors[HEAD]}


ALIKE: dict[str, tuple[Callable[[Tensors], Tensors] | None, int]] = {
    "LeRobot's prefix, in shards": (prefixed, 3),
    "the table as embedding": (renamed_table, 1),
    "the table under both names": (both_tables, 1),
    "without the dead head": (without(DEAD_HEAD), 1),
    "with a tensor that nobody knows": (plus("extra.weight", 2), 1),
}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, str]]:
    """The digests of everything that an export makes of a checkpoint's numbers."""

    def exported(checkpoint: Path) -> dict[str, str]:
        bundle = recipe(
            checkpoint, tmp_path_factory.mktemp("b") / "b", policy_config="pi05_libero", geometry=GOLDEN / "geometry.json",
            tokenizer=GOLDEN / "paligemma_tokenizer.model",
        )  # fmt: skip
        return {name: said["sha256"] for part in bundle.components.values() for name, said in part.config["artifacts"].items()}

    return exported


@pytest.fixture(scope="module")
def original(artifacts: Callable[[Path], dict[str, str]]) -> dict[str, str]:
    return artifacts(GOLDEN / "pi05_libero/checkpoint")


@pytest.mark.parametrize("case", ALIKE)
def test_another_layout_of_the_same_weights_makes_the_same_engines(
    case: str, tmp_path: Path, artifacts: Callable[[Path], dict[str, str]], original: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    alter, shards = ALIKE[case]
    assert artifacts(copied(tmp_path / "c", alter, shards=shards)) == original
    assert ("1 tensors are none of pi0.5's and are not used: extra.weight" in caplog.text) == ("nobody knows" in case)


def test_what_lerobot_saves_of_its_processors_is_no_part_of_the_weights(
    tmp_path: Path, artifacts: Callable[[Path], dict[str, str]], original: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Layout D has statistics in safetensors files beside the weights, under bare names that both files share."""
    checkpoint = copied(tmp_path / "c", prefixed)
    (checkpoint / "model.safetensors.index.json").unlink()  # one file needs none
    for kind, step in (("pre", 5), ("post", 0)):
        name = "unnormalizer" if kind == "post" else "normalizer"
        write_tensors(
            checkpoint / f"policy_{kind}processor_step_{step}_{name}_processor.safetensors",
            {"action.mean": (np.float32, (7,), [np.zeros(7)])},
        )
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (checkpoint / name).write_text("neither read nor JSON")
    assert artifacts(checkpoint) == original
    assert "none of pi0.5's" not in caplog.text


def unmarked(tensors: Tensors) -> Tensors:
    return {name: array for name, array in tensors.items() if "dense" not in name and "time_mlp" not in name}


def deeper(root: str) -> Callable[[Tensors], Tensors]:
    """One layer more than the geometry declares: what is shallower would run, and mean nothing."""
    return lambda t: t | {name.replace(f"{root}.2.", f"{root}.3."): array for name, array in t.items() if f"{root}.2." in name}


DENSE = f"{EXPERT}.layers.0.input_layernorm.dense.weight"
REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "pi0": (
        lambda t: unmarked(t) | {"state_proj.weight": t["action_in_proj.weight"]},
        r"a pi0 checkpoint \(state_proj\.weight\), not pi0\.5",
    ),
    "both markers": (plus("state_proj.weight", 48, 32), "pi0 and pi0.5 are mixed here"),
    "half a marker": (without(DENSE), "have time_mlp_in.weight, but not adaRMS norms"),
    "neither": (unmarked, "not a pi0.5 checkpoint"),
    "missing tensors": (without("action_out_proj.weight", "action_out_proj.bias"), r"no tensor action_out_proj\.(weight|bias), action_out"),
    "another shape": (lambda t: t | {"time_mlp_out.bias": np.zeros(47, np.float32)}, r"shape \[47\], --geometry says \[48\]; is it"),
    "plain norms in the expert": (plus(DENSE.replace("dense.", ""), 48), "pi0 and pi0.5 are mixed here"),
    "a deeper expert": (deeper(f"{EXPERT}.layers"), r"is of a deeper network, --geometry says 3 layers"),
    "a deeper prefix": (deeper(f"{PREFIX}.layers"), r"is of a deeper network, --geometry says 3 layers"),
    "a deeper vision tower": (deeper(f"{VISION}.encoder.layers"), r"is of a deeper network, --geometry says 3 layers"),
    "NaN": (lambda t: t | {"time_mlp_out.bias": np.full(48, np.nan, np.float32)}, "'time_mlp_out.bias' holds NaN"),
    "some names prefixed": (lambda t: {(f"model.{k}" if "expert" in k else k): v for k, v in t.items()}, "two checkpoints seem"),
    "two tables that differ": (lambda t: t | {EMBEDDING: t[HEAD] + 1}, "differ; this model ties them"),
    "no table": (without(HEAD), "no token table under"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_that_is_not_whole_pi05_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    alter, says = REFUSED[case]
    checkpoint = copied(tmp_path / "c", alter)
    with pytest.raises(BadRequest, match=says):
        recipe(
            checkpoint, tmp_path / "b", policy_config="pi05_libero", geometry=GOLDEN / "geometry.json",
            tokenizer=GOLDEN / "paligemma_tokenizer.model",
        )  # fmt: skip
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["head_only", "embedding_only", "both_equal"])
def test_the_token_table_is_the_same_from_either_name(name: str, tmp_path: Path) -> None:
    shutil.copyfile(CASES / f"checkpoints/token_table/{name}.safetensors", tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)
    names = [tensor for end in ("lm_head.weight", "embed_tokens.weight") for tensor in stored.tensors if tensor.endswith(end)]
    np.testing.assert_array_equal(token_table(stored, *names).read(), np.arange(32).reshape(8, 4) / 8)


LEROBOT: Mapping[str, Any] = {
    "type": "pi05", "n_action_steps": 10, "chunk_size": 50, "max_action_dim": 32, "max_state_dim": 32, "image_resolution": [224, 224],
    "input_features": {
        "observation.images.image": {"type": "VISUAL", "shape": [3, 256, 256]},
        "observation.images.image2": {"type": "VISUAL", "shape": [3, 256, 256]},
        "observation.state": {"type": "STATE", "shape": [8]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [7]}},
    "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "some_new_field": 1,
}  # fmt: skip
OPENPI: Mapping[str, Any] = {
    "action_dim": 32, "action_horizon": 15, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "precision": "bfloat16",
}  # fmt: skip


def said(folder: Path, config: Mapping[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder, A, 32)


def test_libero_is_detected_from_its_features_and_nothing_else_is(tmp_path: Path) -> None:
    assert choose(None, said(tmp_path, LEROBOT)).name == "pi05_libero"
    with pytest.raises(BadRequest, match=r"name one with --policy-config pi05_libero\|pi05_droid\|pi05_aloha"):
        choose(None, said(tmp_path, OPENPI))
    three = {**LEROBOT["input_features"], "observation.images.image3": {"type": "VISUAL", "shape": [3, 256, 256]}}
    with pytest.raises(BadRequest, match="name one with --policy-config"):
        choose(None, said(tmp_path, {**LEROBOT, "input_features": three}))
    (tmp_path / "config.json").unlink()  # openpi's trainer writes none
    assert choose("pi05_aloha", read_config(tmp_path, A, 32)).horizon == 50
    with pytest.raises(BadRequest, match="--policy-config pi05_base: there are"):
        choose("pi05_base", read_config(tmp_path, A, 32))


def test_a_horizon_that_is_not_the_configurations_is_refused_in_both_schemas(tmp_path: Path) -> None:
    assert choose("pi05_droid", said(tmp_path, OPENPI)).horizon == 15
    with pytest.raises(BadRequest, match="says 15 action steps, pi05_libero has 10"):
        choose("pi05_libero", said(tmp_path, OPENPI))
    with pytest.raises(BadRequest, match="says 10 action steps, pi05_droid has 15"):
        choose("pi05_droid", said(tmp_path, LEROBOT))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"type": "pi0"}, "type is 'pi0', not 'pi05'"),
        ({"paligemma_variant": "gemma_2b_lora"}, "paligemma_variant is 'gemma_2b_lora'"),
        ({"action_expert_variant": None}, "action_expert_variant is None"),
        ({"max_action_dim": 24}, "max_action_dim is 24, the weights have 32"),
        ({"image_resolution": [256, 256]}, r"image_resolution is \[256, 256\]"),
        ({"n_action_steps": "ten"}, "n_action_steps is 'ten', no whole number"),
        ({"n_action_steps": None, "action_horizon": 0}, "action_horizon is 0, no whole number"),
        ({"action_horizon": 50}, "n_action_steps is 10, action_horizon 50; which is it"),
        ({"output_features": {"action": {}}}, "input_features and output_features are not whole"),
    ],
)
def test_a_config_that_the_weights_contradict_is_refused(change: Mapping[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=says):
        said(tmp_path, {**LEROBOT, **change})


# --- statistics


@pytest.mark.parametrize("folder", ["one_set", "no_outer_key"])
def test_statistics_are_the_same_with_and_without_the_outer_key(folder: str) -> None:
    found = read_statistics(find_statistics(CASES / "checkpoints" / folder, "X"), LIBERO)
    other = read_statistics(find_statistics(CASES / "checkpoints" / "one_set", "X"), LIBERO)
    for ours, theirs in zip((*found.state, *found.action), (*other.state, *other.action), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_statistics_that_are_missing_or_several_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"assets holds no norm_stats\.json.*--norm-stats FILE"):
        find_statistics(tmp_path, "--norm-stats FILE")
    (tmp_path / "assets").mkdir()
    with pytest.raises(BadRequest, match=r"assets holds no norm_stats\.json"):
        find_statistics(tmp_path, "--norm-stats FILE")
    with pytest.raises(BadRequest, match="of first_robot and of second_robot; say which: --norm-stats FILE"):
        find_statistics(CASES / "checkpoints/two_sets", "--norm-stats FILE")
    assert find_statistics(CASES / "checkpoints/two_sets", "", "second_robot").parent.name == "second_robot"
    with pytest.raises(BadRequest, match="no statistics of 'third'; it has first_robot, second_robot"):
        find_statistics(CASES / "checkpoints/two_sets", "", "third")


def broken(side: str, field: str, value: Any) -> dict[str, Any]:
    stats = json.loads((CASES / "checkpoints/one_set/assets/libero/norm_stats.json").read_text())["norm_stats"]
    stats[side][field] = value
    return {"norm_stats": stats}


@pytest.mark.parametrize(
    ("stats", "says"),
    [
        (broken("state", "q01", None), r"state\.q01 is None; pi0\.5 is normalised by quantiles"),
        (broken("actions", "q99", [1.0] * 6), r"actions\.q99 holds 6 numbers, the robot has 7"),
        (broken("state", "q99", [float("nan")] * 8), r"state\.q99\[0\] is nan"),
        (broken("state", "q99", [10**400] * 8), r"state\.q99\[0\] is 1000.*, no finite number"),
        ({"norm_stats": {key: {"q01": [-1.7e308] * 8, "q99": [1.7e308] * 8} for key in ("state", "actions")}}, "which no number holds"),
        (broken("state", "q99", ["1"] * 8), r"state\.q99\[0\] is '1'"),
        (broken("state", "q99", [-99.0] * 8), r"state\.q01\[0\] is .* above q99's -99"),
        (broken("state", "q99", [9.0] * 32), r"state\.q01 holds 8 numbers and state\.q99 32"),
        ({"state": {}}, r"state\.q01 is None"),
        ({"actions": {}}, "has no 'state'; it has actions"),
        ([], "holds no table"),
    ],
)
def test_statistics_that_do_not_cover_the_robot_are_refused(stats: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "norm_stats.json").write_text(json.dumps(stats))
    with pytest.raises(BadRequest, match=says):
        read_statistics(tmp_path / "norm_stats.json", LIBERO)


def test_statistics_of_a_robot_with_more_moving_numbers_are_said_and_padded_ones_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "norm_stats.json"
    stats = json.loads((CASES / "checkpoints/one_set/assets/libero/norm_stats.json").read_text())["norm_stats"]
    for low, high in ((0.0, 0.0), (-1e-10, 1e-10), (-1.0, 1.0)):
        longer = {key: {"q01": rows["q01"] + [low], "q99": rows["q99"] + [high]} for key, rows in stats.items()}
        file.write_text(json.dumps(longer))
        caplog.clear()
        read_statistics(file, LIBERO)
        assert ("actions has 1 numbers more than pi05_libero; are these another robot's statistics?" in caplog.text) == (high == 1.0)


# --- policy.json


def test_robot_facing_numbers_that_are_not_the_configurations_are_refused() -> None:
    file = CASES / "engines/horizon_50_on_10/policy.json"
    policy = json.loads(file.read_text())
    with pytest.raises(ContractMismatch, match=r"action\.horizon is 50, pi05_libero has 10"):
        read_policy(policy, file)
    policy["action"]["horizon"] = 10
    policy["tokenizer"] = {"add_bos": True, "add_eos": False, "max_length": 200}  # the case says nothing of it
    assert read_policy(policy, file) == LIBERO
    for change, says in (
        ({"discrete_state_input": True}, "discrete_state_input is True, pi05_libero has False"),
        ({"policy_config": "pi05_mine"}, "policy_config 'pi05_mine' is not implemented"),
        ({"policy_config": "pi05_droid"}, "adapter is 'libero', pi05_droid has 'droid'"),
        ({"model_family": "pi0"}, "model_family 'pi0'"),
        ({"state": {"dim": 8, "num_bins": 255}}, r"state\.num_bins is 255"),
        ({"cameras": {"slots": policy["cameras"]["slots"][::-1], "ignored": []}}, r"cameras\.slots is"),
        ({"cameras": None}, r"cameras\.slots is None"),
        ({"tokenizer": None}, r"tokenizer\.add_bos is None, pi05_libero has True"),
        ({"tokenizer": {"add_bos": True, "add_eos": True, "max_length": 200}}, r"tokenizer\.add_eos is True, pi05_libero has False"),
        ({"tokenizer": {"add_bos": True, "add_eos": False, "max_length": 48}}, r"tokenizer\.max_length is 48, pi05_libero has 200"),
    ):
        with pytest.raises(ContractMismatch, match=says):
            read_policy({**policy, **change}, file)
