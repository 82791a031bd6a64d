"""A checkpoint becomes a bundle, or is refused in one sentence before anything is written. Variants are the golden checkpoint, altered."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from vla_eval import cli
from vla_eval.arrays import read_npz
from vla_eval.engines import trt
from vla_eval.engines.bundle import Bundle, Component, Identity, findings, open_bundle
from vla_eval.engines.graph import PRECISIONS, Axis
from vla_eval.engines.trt_pen import TrtPen
from vla_eval.engines.verify import SELFTEST, compare, trace
from vla_eval.engines.weights import INDEX, Checkpoint, open_checkpoint
from vla_eval.policies.gr00t import network
from vla_eval.policies.gr00t import recipe as gr00t_recipe
from vla_eval.policies.gr00t.configuration import (
    EMBEDDING,
    HEAD,
    PREFIXES,
    RELEASED,
    TEXT,
    Architecture,
    geometry_from,
    read_architecture,
    tensor_shapes,
)
from vla_eval.policies.gr00t.recipe import Sizes, graph_of, recipe
from vla_eval.policies.gr00t.synthetic import FULL, SLOT, TINY, synth
from vla_eval.types import BadRequest, TensorSpec

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny"
GEOMETRY = GOLDEN / "geometry.json"
Tiny = Callable[..., Path]
Tensors = dict[str, NDArray[Any]]


def export(checkpoint: Path, out: Path, **options: Any) -> Bundle:
    return recipe(checkpoint, out, **{"embodiment": "libero_sim", "geometry": GEOMETRY, **options})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy that a test may alter."""
    shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def rewrite(checkpoint: Path, alter: Callable[[Tensors], Tensors], dtype: Any = None) -> None:
    """All tensors, altered, in one file without an index."""
    tensors: Tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (checkpoint / INDEX).unlink(missing_ok=True)
    tensors = alter(tensors)
    save_file(
        {n: np.ascontiguousarray(t if dtype is None else t.astype(dtype)) for n, t in tensors.items()}, checkpoint / "model.safetensors"
    )


def configure(file: Path, **fields: Any) -> None:
    said = json.loads(file.read_text())
    for path, value in fields.items():
        *parents, name = path.split("__")
        table = said
        for parent in parents:
            table = table[parent]
        if value is None:
            del table[name]
        else:
            table[name] = value
    file.write_text(json.dumps(said))


# --- what is written --------------------------------------------------------------------------------------------------------------


def test_the_released_architecture_has_the_1031_names_and_shapes_of_its_tensor_list() -> None:
    listed = dict(line.split("\t") for line in (GOLDEN.parent / "gr00t_n1d7_state_dict.tsv").read_text().splitlines() if line[0] != "#")
    shapes = {name: ",".join(map(str, shape)) for name, shape in tensor_shapes(FULL).items()}
    assert len(listed) == 1031
    assert {**shapes, HEAD: shapes[EMBEDDING]} == listed
    assert FULL.geometry is RELEASED


def test_the_components_have_the_specifications_tensors(tiny: Tiny) -> None:
    bundle = open_bundle(tiny())
    s = (140, 150, 203)  # a picture prompt of 139 tokens and 1, 11 and 64 of text
    p, m = (256, 512, 512), (64, 128, 128)
    cross = {f"cross_{letter}_layer{i:02d}": ("float32", (1, s, 3, 12)) for i in (0, 2, 4, 6) for letter in "kv"}
    wanted = {
        "visual": (
            {
                "input": ("float32", (p, 1536)), "rotary_pos_emb": ("float32", (p, 8)), "cu_seqlens": ("int32", ((2, 3, 3),)),
                "fast_pos_embed_idx": ("int64", (4, p)), "fast_pos_embed_weight": ("float32", (4, p)),
            },
            {"output": ("float32", (m, 64)), **{f"deepstack_features_{i}": ("float32", (m, 64)) for i in range(3)}},
        ),
        "vl_backbone": (
            {
                "inputs_embeds": ("float32", (1, s, 64)), "rope_rotary_cos_sin": ("float32", (1, s, 16)),
                "attention_pos_id": ("int32", (1, s)), **{f"deepstack_embeds_{i}": ("float32", (1, s, 64)) for i in range(3)},
            },
            cross,
        ),
        "action": (
            {
                "noise_trajectory": ("float32", (1, 40, 132)), "state": ("float32", (1, 1, 132)),
                "adanorm_modulation": ("float32", (9, 72)), "action_time_bias": ("float32", (36,)),
                "text_attention_mask": ("bool", (1, 1, 1, s)), "image_attention_mask": ("bool", (1, 1, 1, s)), **cross,
            },
            {"velocity": ("float32", (1, 40, 132))},
        ),
    }  # fmt: skip
    for name, (inputs, outputs) in wanted.items():
        component = bundle.component(name)
        assert {spec.name: (spec.dtype, spec.shape) for spec in component.inputs} == inputs
        assert {spec.name: (spec.dtype, spec.shape) for spec in component.outputs} == outputs


def test_the_graphs_are_standard_onnx_of_opset_23(tiny: Tiny) -> None:
    bundle = open_bundle(tiny())
    for name, component in bundle.components.items():
        file = component.file(f"{name}.onnx")
        onnx.checker.check_model(str(file), full_check=True)  # infers every shape
        (opset,) = onnx.load(file, load_external_data=False).opset_import
        assert (opset.domain, opset.version) == ("", 23)


def test_each_step_count_has_its_tables_and_its_times_beside_them(tiny: Tiny) -> None:
    action = open_bundle(tiny(steps=(4, 8))).component("action")
    assert action.config["builder_config"]["buckets"] == {"4": [0, 250, 500, 750], "8": [0, 125, 250, 375, 500, 625, 750, 875]}
    for steps in (4, 8):
        for name, shape in (("adanorm_modulation", (steps, 9, 72)), ("action_time_bias", (steps, 36))):
            with safe_open(action.file(f"{name}.{steps}.safetensors"), "np") as file:
                assert file.get_tensor(name).shape == shape


def test_the_embedding_table_stays_beside_the_graph(tiny: Tiny) -> None:
    table = open_bundle(tiny()).component("vl_backbone").tensors("embed_tokens.safetensors")["embed_tokens"]
    stored = open_checkpoint(GOLDEN / "checkpoint").tensors[EMBEDDING].read()
    assert np.array_equal(table, stored.astype(np.float32))


def test_the_policy_contract_carries_the_builds_identity_and_is_written_last(tiny: Tiny) -> None:
    bundle = open_bundle(tiny())
    policy = json.loads((bundle.path / "action" / "policy.json").read_text())
    assert {policy["export_id"], *(c.config["export_id"] for c in bundle.components.values())} == {bundle.export_id}
    assert (policy["embodiment_tag"], policy["embodiment_id"], policy["action"]["horizon"]) == ("libero_sim", 19, 16)
    assert findings(bundle) == []


def test_only_the_embodiments_own_slot_is_taken(checkpoint: Path, tiny: Tiny) -> None:
    """A checkpoint in which every other slot is another makes the same action engine and tables."""

    def others(tensors: Tensors) -> Tensors:
        spoilt = {name: np.where(np.arange(32).reshape(-1, *[1] * (array.ndim - 1)) == 19, array, 1 - 3 * array).astype(array.dtype)
                  for name, array in tensors.items() if name.endswith((".W", ".b"))}  # fmt: skip
        assert len(spoilt) == 14
        return {**tensors, **spoilt}

    rewrite(checkpoint, others)
    wanted, found = (
        bundle.component("action").config["artifacts"] for bundle in (open_bundle(tiny()), export(checkpoint, checkpoint.parent / "b"))
    )
    assert found == wanted
    rewrite(checkpoint, lambda tensors: {name: -array if name.endswith("layer2.b") else array for name, array in tensors.items()})
    assert export(checkpoint, checkpoint.parent / "c").component("action").config["artifacts"] != wanted


def test_a_part_of_the_components_is_completed_by_a_later_export(tiny: Tiny, tmp_path: Path) -> None:
    first = export(GOLDEN / "checkpoint", tmp_path / "b", components=("visual",))
    assert sorted(first.components) == ["visual"]
    assert [path.name for path in (tmp_path / "b" / "action").iterdir()] == ["policy.json"]
    whole = export(GOLDEN / "checkpoint", tmp_path / "b", components=("vl_backbone", "action"))
    assert whole.digest == open_bundle(tiny()).digest


# --- what a loader must tolerate --------------------------------------------------------------------------------------------------


def prefixed(tensors: Tensors) -> Tensors:
    return {f"_groot_model.{name}": tensor for name, tensor in tensors.items()}


def with_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING]}


def head_only(tensors: Tensors) -> Tensors:
    return {HEAD: tensors[EMBEDDING], **{name: tensor for name, tensor in tensors.items() if name != EMBEDDING}}


def more_layers(tensors: Tensors) -> Tensors:
    last = {name: tensor for name, tensor in tensors.items() if f"{TEXT}.layers.3." in name}
    return {**tensors, **{name.replace("layers.3.", f"layers.{i}."): tensor for name, tensor in last.items() for i in (4, 12)}}


def no_final_norm(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != f"{TEXT}.norm.weight"}


@pytest.mark.parametrize("alter", [prefixed, with_head, head_only, more_layers, no_final_norm], ids=lambda alter: alter.__name__)
def test_a_variant_of_the_same_weights_makes_the_same_engines(alter: Callable[[Tensors], Tensors], checkpoint: Path, tiny: Tiny) -> None:
    rewrite(checkpoint, alter)
    made, wanted = export(checkpoint, checkpoint.parent / "b"), open_bundle(tiny())
    for name, component in wanted.components.items():
        assert made.component(name).config["artifacts"] == component.config["artifacts"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])
def test_weights_of_another_type_make_the_same_answer(dtype: Any, checkpoint: Path, tiny: Tiny) -> None:
    rewrite(checkpoint, lambda tensors: tensors, dtype)
    reference = trace(open_bundle(tiny()), read_npz(tiny() / SELFTEST))
    verdict = compare(export(checkpoint, checkpoint.parent / "b"), reference, precision="fp32" if dtype == np.float32 else "fp16")
    assert verdict.passed  # float16 flushes the smallest of bfloat16's numbers


def test_processor_files_in_their_own_folder_are_found(checkpoint: Path, tiny: Tiny) -> None:
    (checkpoint / "processor").mkdir()
    for name in ("processor_config.json", "statistics.json", "embodiment_id.json"):
        (checkpoint / name).rename(checkpoint / "processor" / name)
    assert export(checkpoint, checkpoint.parent / "b").digest == open_bundle(tiny()).digest


def test_a_tokenizer_from_elsewhere_is_copied_in(checkpoint: Path, tiny: Tiny) -> None:
    (checkpoint / "tokenizer").rename(checkpoint.parent / "elsewhere")
    made = export(checkpoint, checkpoint.parent / "b", tokenizer=checkpoint.parent / "elsewhere")
    assert made.digest == open_bundle(tiny()).digest
    assert (made.path / "tokenizer" / "tokenizer.json").is_file()


# --- what is refused, before anything is written ----------------------------------------------------------------------------------


def drop(part: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name})


def put(name: str, array: NDArray[Any]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: {**tensors, name: array})


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: configure(folder / "config.json", **fields)


def processor(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: configure(folder / "processor_config.json", **{f"processor_kwargs__{name}": v for name, v in fields.items()})


def cut_shard(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def poison(folder: Path) -> None:
    def alter(tensors: Tensors) -> Tensors:
        bias = tensors["action_head.model.proj_out_2.bias"].copy()
        bias[3] = np.nan
        return {**tensors, "action_head.model.proj_out_2.bias": bias}

    rewrite(folder, alter)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "another model": (drop("action_head"), "not a GR00T N1.7 checkpoint"),
    "a missing layer": (drop("transformer_blocks.5.attn1.to_q.weight"), r"transformer_blocks\.5\.attn1\.to_q\.weight"),
    "a variant without VL self-attention": (drop("vl_self_attention"), "another variant"),
    "a variant with a tensor more": (put("action_head.dropout_prob_by_embodiment", np.ones(32, np.float32)), "dropout_prob_by_embodiment"),
    "a wrong shape": (put("action_head.vlln.weight", np.ones(48, np.float32)), r"'action_head\.vlln\.weight' has shape \[48\]"),
    "a wider table": (put(EMBEDDING, np.ones((300, 65), np.float32)), r"shape \[300, 65\]"),
    "a truncated shard": (cut_shard, r"model-00002-of-00003\.safetensors"),
    "a NaN": (poison, r"'action_head\.model\.proj_out_2\.bias' holds NaN"),
    "two token tables": (put(HEAD, np.zeros((300, 64), np.float32)), "differ"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read"),
    "a config without its horizon": (config(action_horizon=None), "action_horizon is 'absent'.*never guessed"),
    "a config without its blocks": (config(diffusion_model_cfg__num_layers=None), r"diffusion_model_cfg\.num_layers is 'absent'"),
    "a horizon that is no number": (config(action_horizon="40"), "action_horizon is '40'"),
    "another select_layer": (config(select_layer=3), "select_layer is 3, the geometry says 4"),
    "other heads": (config(diffusion_model_cfg__num_attention_heads=4), "input_embedding_dim is 36, the geometry says 48"),
    "another norm": (config(diffusion_model_cfg__norm_type="layer_norm"), "norm_type is 'layer_norm'"),
    "more blocks than tensors": (config(diffusion_model_cfg__num_layers=10**9), "1000000000 DiT layers are declared"),
    "no alternation": (config(use_alternate_vl_dit=False), "use_alternate_vl_dit is False"),
    "another horizon in the processor": (processor(max_action_horizon=50), "max_action_horizon is 50"),
    "another width in the processor": (processor(max_state_dim=64), "max_state_dim is 64"),
    "no tokenizer": (lambda folder: shutil.rmtree(folder / "tokenizer"), "tokenizer"),
    "no tokenizer.json": (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"tokenizer\.json"),
    "no chat template": (lambda folder: configure(folder / "tokenizer" / "tokenizer_config.json", chat_template=None), "template"),
    "a relative action": (
        processor(modality_configs__libero_sim__action__action_configs=[
            {"rep": "RELATIVE" if i == 3 else "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None} for i in range(7)
        ]),
        "roll",
    ),
    "no statistics": (lambda folder: (folder / "statistics.json").unlink(), r"statistics\.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_checkpoint_that_cannot_be_exported_is_refused_before_anything_is_written(what: str, checkpoint: Path) -> None:
    spoil, says = REFUSED[what]
    spoil(checkpoint)
    out = checkpoint.parent / "b"
    with pytest.raises(BadRequest, match=says) as refused:
        export(checkpoint, out)
    assert "\n" not in str(refused.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "int8"}, "--dtype int8"), ({"batch": 0}, "--batch 0"), ({"batch": 10**8}, "--batch 1.*1024 robots"),
        ({"steps": (4, 0)}, "--steps 4,0"),
        ({"steps": (1001,)}, "1000 times apart"), ({"max_text": 0}, "--max-text 0"), ({"components": ("vision",)}, "--components vision"),
        ({"components": ()}, "--components"), ({"embodiment": "libero_simm"}, "libero_simm"), ({"embodiment": 31}, "31"),
        ({"geometry": None}, "select_layer is 4, the geometry says 16"),
        ({"geometry": GOLDEN / "checkpoint" / "config.json"}, "no geometry"),
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_cannot_be_met_is_refused_before_anything_is_written(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=says):
        export(GOLDEN / "checkpoint", tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_a_number_that_float16_cannot_hold_is_refused_for_fp16_alone(checkpoint: Path) -> None:
    def enlarge(tensors: Tensors) -> Tensors:
        return {name: np.full_like(array, 70_144) if name == "action_head.vlln.bias" else array for name, array in tensors.items()}

    rewrite(checkpoint, enlarge, np.float32)
    with pytest.raises(BadRequest, match=r"'action_head\.vlln\.bias' holds 70144, too large for float16"):
        export(checkpoint, checkpoint.parent / "half", dtype="fp16")
    assert not (checkpoint.parent / "half").exists()
    assert export(checkpoint, checkpoint.parent / "whole").options["dtype"] == "fp32"


def test_another_variant_is_refused_also_where_only_a_part_is_exported(checkpoint: Path) -> None:
    put("action_head.dropout_prob_by_embodiment", np.ones(32, np.float32))(checkpoint)
    with pytest.raises(BadRequest, match=r"dropout_prob_by_embodiment' .* belongs to another variant"):
        export(checkpoint, checkpoint.parent / "b", components=("visual",))


def test_every_option_that_changes_an_engine_is_in_the_export_id_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    class Reached(Exception):
        """Everything is checked, and writing would begin."""

    def begins(out: Path, said: Identity, *rest: Any) -> None:
        raise Reached(said.export_id)

    def export_id(source: Path = GOLDEN / "checkpoint", **options: Any) -> str:
        with pytest.raises(Reached) as reached:
            export(source, tmp_path / "b", **options)
        return str(reached.value)

    monkeypatch.setattr(gr00t_recipe, "staged", begins)
    said = json.loads(GEOMETRY.read_text())
    (tmp_path / "g.json").write_text(json.dumps({**said, "text": {**said["text"], "rope_theta": 1e6}}))
    rewrite(checkpoint, lambda tensors: {**tensors, "action_head.vlln.bias": tensors["action_head.vlln.bias"] + 1})
    ids = [
        export_id(), export_id(dtype="fp16"), export_id(dtype="bf16"), export_id(batch=2), export_id(steps=(8,)), export_id(steps=(4, 8)),
        export_id(max_text=32), export_id(embodiment="simpler_env_widowx"), export_id(geometry=tmp_path / "g.json"),
        export_id(direct=True), export_id(checkpoint),
    ]  # fmt: skip
    assert len(set(ids)) == len(ids)
    same = [
        export_id(components=("visual",)),
        export_id(steps=(4,)),
        export_id(tokenizer=GOLDEN / "checkpoint/tokenizer"),
        export_id(embodiment=19),
    ]
    assert set(same) == {ids[0]}


def test_a_layer_that_the_network_forgets_cannot_hide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "vl_block", lambda g, x, w, a, name: x)
    with pytest.raises(BadRequest, match=r"nothing asked for action_head\.vl_self_attention\.transformer_blocks\.0"):
        export(GOLDEN / "checkpoint", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_geometry_with_a_field_too_many_or_another_rotation_is_refused(tmp_path: Path) -> None:
    said = json.loads(GEOMETRY.read_text())
    for part, field, value in (
        ("text", "window", 4), ("text", "mrope_interleaved", False), ("vision", "heads", 3), ("text", "heads", "8"),
        ("text", "kv_heads", 0), ("text", "head_dim", True), ("text", "rope_theta", float("nan")), ("vision", "depth", 10**12),
        ("vision", "num_positions", 2303), ("vision", "deepstack_after_blocks", [0, 1, 1]), ("vision", "deepstack_after_blocks", 3),
        ("text", "mrope_section", "abc"),
        ("token_ids", "image_pad", -1), ("token_ids", "image_pad", "292"), ("token_ids", "vision_start", 291), ("token_ids", "im_end", 5),
    ):  # fmt: skip
        (tmp_path / "g.json").write_text(json.dumps({**said, part: {**said[part], field: value}}))
        with pytest.raises(BadRequest, match=field):
            export(GOLDEN / "checkpoint", tmp_path / "b", geometry=tmp_path / "g.json")


@pytest.mark.parametrize(("field", "value"), [("patch", 14), ("merge", 1), ("temporal_patch", 1), ("deepstack_after_blocks", (0, 1))])
def test_a_backbone_whose_pictures_are_packed_otherwise_is_refused(
    field: str, value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where its tensors fit its geometry: the processor packs for one kind only."""

    def other(stored: Any, geometry: Any) -> Architecture:
        a = read_architecture(stored, geometry)
        return replace(a, geometry=replace(geometry, vision=replace(geometry.vision, **{field: value})))

    monkeypatch.setattr(gr00t_recipe, "read_architecture", other)
    with pytest.raises(BadRequest, match=rf"vision\.{field} is .* packed for"):
        export(GOLDEN / "checkpoint", tmp_path / "b")
    assert not (tmp_path / "b").exists()


# --- both routes, every precision -------------------------------------------------------------------------------------------------

BUILT = {("bf16", "direct")}  # a build takes a second, and test_trt_build.py builds this network in half precision by both routes


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(tmp_path_factory.mktemp("synthetic") / "checkpoint")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_both_routes_make_the_network_that_the_contract_states(dtype: Any, synthetic: Path, tmp_path: Path) -> None:
    api = trt.door().api
    bundle = export(synthetic, tmp_path / "b", dtype=dtype, geometry=synthetic / "geometry.json")
    checkpoint = open_checkpoint(synthetic)
    a, logger = read_architecture(checkpoint, TINY.geometry), api.Logger(api.Logger.ERROR)
    (_, s, _), (p, _) = bundle.component("vl_backbone").inputs[0].shape, bundle.component("visual").inputs[0].shape
    assert isinstance(s, tuple)
    assert isinstance(p, tuple)
    sizes = Sizes(1, Axis("P", *p), Axis("N", 2, 3, 3), Axis("S", *s))
    for name, component in bundle.components.items():
        for route in ("onnx", "direct"):
            builder = api.Builder(logger)
            network = builder.create_network(1 << int(api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            if route == "onnx":
                parser = api.OnnxParser(network, logger)
                assert parser.parse_from_file(str(component.file(f"{name}.onnx"))), parser.get_error(0).desc()
            else:
                pen = TrtPen(network, PRECISIONS[dtype])
                graph_of(name, a, SLOT, sizes, checkpoint)(pen)
            assert read_back(network) == stated(component)
            if (dtype, route) in BUILT:
                assert build(builder, network, component.inputs) is not None


def build(builder: Any, network: Any, inputs: Sequence[TensorSpec]) -> Any:
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for spec in inputs:
        profile.set_shape(spec.name, *(tuple(n if isinstance(n, int) else n[end] for n in spec.shape) for end in range(3)))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)


def read_back(network: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Inputs and outputs as the network has them."""
    tensors = [network.get_input(i) for i in range(network.num_inputs)] + [network.get_output(i) for i in range(network.num_outputs)]
    return {tensor.name: (tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors}


def stated(component: Component) -> dict[str, tuple[str, tuple[int, ...]]]:
    names = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64", "bool": "BOOL"}
    specs = (*component.inputs, *component.outputs)
    return {spec.name: (names[spec.dtype], tuple(n if isinstance(n, int) else -1 for n in spec.shape)) for spec in specs}


@pytest.fixture(scope="module")
def stored() -> tuple[Checkpoint, Architecture]:
    checkpoint = open_checkpoint(GOLDEN / "checkpoint", PREFIXES)
    return checkpoint, read_architecture(checkpoint, geometry_from(json.loads(GEOMETRY.read_text())))


def test_half_precision_is_a_smoke_test_here_and_stays_within_its_gates(tiny: Tiny, tmp_path: Path) -> None:
    reference = trace(open_bundle(tiny()), read_npz(tiny() / SELFTEST))
    half = export(GOLDEN / "checkpoint", tmp_path / "b", dtype="fp16")
    verdict = compare(half, reference)
    assert verdict.passed
    assert verdict.gate.relative == 1e-2
    assert max(row.relative for row in verdict.rows) > 1e-5  # it is half precision indeed


# --- verifying against the goldens, and the commands ------------------------------------------------------------------------------


def golden_dump(a: Architecture, checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """NVIDIA's numbers for the action's four steps, under the keys of a reference."""
    golden = read_npz(GOLDEN / "reference.npz")
    encoder = checkpoint.weights.under("action_head.action_encoder")
    lower, bias = (encoder[name].read()[19].astype(np.float32) for name in ("W2.W", "W2.b"))
    image, valid = golden["backbone.image_mask"], golden["backbone.attention_mask"]
    found: dict[str, NDArray[Any]] = {}
    for k in range(4):
        inputs = {
            "noise_trajectory": golden["step.x"][k], "state": golden["head.state_input"],
            "adanorm_modulation": golden["step.adanorm_modulation"][k],
            "action_time_bias": (golden["step.action_sinusoid"][k] @ lower[36:] + bias)[0],
            "text_attention_mask": (valid & ~image)[:, None, None], "image_attention_mask": (valid & image)[:, None, None],
            **{f"cross_{letter}_layer{i:02d}": golden[f"cross.{letter}_{i:02d}"] for i in a.cross_blocks for letter in "kv"},
        }  # fmt: skip
        found |= {f"action/{k}/in/{name}": array for name, array in inputs.items()}
        found[f"action/{k}/out/velocity"] = golden["step.velocity"][k]
    return found


def test_verify_passes_on_nvidias_numbers_and_fails_on_altered_ones(
    stored: tuple[Checkpoint, Architecture], tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, a = stored
    dump = golden_dump(a, checkpoint)
    for scale, code in ((1.0, 0), (1.001, 1)):
        np.savez(tmp_path / "reference.npz", **{**dump, "action/3/out/velocity": dump["action/3/out/velocity"] * np.float32(scale)})  # type: ignore[arg-type]
        assert cli.main(["verify", str(tiny()), "--reference", str(tmp_path / "reference.npz"), "--json"]) == code
        said = json.loads(capfd.readouterr().out)
        assert [row["passed"] for row in said["rows"]] == [True, True, True, code == 0]
        assert said["not_compared"] == ["visual", "vl_backbone"]
        assert said["gate"]["relative"] == 2e-5


def alter_slot(folder: Path) -> Path:
    shutil.copytree(GOLDEN / "checkpoint", folder / "altered")
    configure(folder / "altered" / "embodiment_id.json", libero_sim=11)
    return folder / "altered"


def test_verify_holds_two_bundles_together_and_dumps_what_one_computes(
    tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert cli.main(["verify", str(tiny()), "--dump", str(tmp_path / "dump.npz")]) == 0
    assert cli.main(["verify", str(tiny()), "--reference", str(tmp_path / "dump.npz")]) == 0
    export(alter_slot(tmp_path), other)  # another slot of the same weights: only the action differs
    capfd.readouterr()
    assert cli.main(["verify", str(tiny()), "--against", str(other), "--json"]) == 1
    failed = {row["component"] for row in json.loads(capfd.readouterr().out)["rows"] if not row["passed"]}
    assert failed == {"action"}
    assert cli.main(["verify", str(tiny())]) == 2
    assert "give one of --reference, --against, " in capfd.readouterr().err


def test_the_commands_make_a_checkpoint_export_it_and_check_the_bundle(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made, bundle = tmp_path / "made", tmp_path / "bundle"
    assert cli.main(["synth", "--model", "gr00t", "--out", str(made), "--seed", "3"]) == 0
    options = ["--checkpoint", str(made), "--out", str(bundle), "--embodiment", "libero_sim", "--geometry", str(made / "geometry.json")]
    assert cli.main(["export", "--model", "gr00t", *options, "--steps", "4,8", "--batch", "2"]) == 0
    capfd.readouterr()
    assert cli.main(["check", str(bundle), "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["options"]["steps"], said["options"]["batch"], said["options"]["embodiment_id"]) == ([4, 8], 2, SLOT)
    assert said["findings"] == []
    (bundle / "visual" / "visual.onnx").write_bytes(b"\x08")
    assert cli.main(["check", str(bundle)]) == 1
    assert cli.main(["export", "--model", "gr00t", *options, "--dtype", "fp16"]) == 2
    assert "is of export" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export"], "--model is missing; there are: "), (["export", "--model", "gr00"], "did you mean 'gr00t'"),
        (["export", "--model", "gr00t", "--out", "x"], "checkpoint"), (["synth", "--model", "gr00t"], "out"),
        (["export", "--model", "gr00t", "--checkpoint", "x", "--out", "y", "--layers", "3"], "--layers"),
        (["export", "--model", "gr00t", "--checkpoint", "x", "--out", "y"], "no such folder"),
        (["export", "--model", "gr00t", "--checkpoint", "x", "--out", "y", "--steps", "4,8.5"], "'8.5' is no whole number"),
        (["export", "--model", "gr00t", "--checkpoint", "x", "--out", "y", "--batch", "1.0"], "'1.0' is no whole number"),
        (
            ["export", "--model", "gr00t", "--checkpoint", str(GOLDEN / "checkpoint"), "--out", "y", "--geometry", str(GEOMETRY),
             "--embodiment", "19.4"],
            "unknown embodiment '19.4'",
        ),
    ],
)  # fmt: skip
def test_a_command_that_cannot_be_met_is_one_line_and_exit_code_2(
    words: list[str], says: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    told = capfd.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_a_models_own_options_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--help", "--model", "gr00t"]) == 0
    told = capfd.readouterr().out
    assert all(
        option in told for option in ("--checkpoint", "--out", "--embodiment", "--dtype", "--batch", "--steps", "--max-text", "--geometry")
    )


# --- synthetic checkpoints --------------------------------------------------------------------------------------------------------


def test_synthetic_numbers_depend_on_name_and_seed_alone(tmp_path: Path) -> None:
    first, again, other = (synth(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    for file in sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file()):
        assert (first / file).read_bytes() == (again / file).read_bytes()
    assert open_checkpoint(other).fingerprint != open_checkpoint(first).fingerprint
    tensors = open_checkpoint(first).tensors
    assert np.array_equal(tensors[HEAD].read(), tensors[EMBEDDING].read())  # tied, as in a real one
    slots = tensors["action_head.action_encoder.W1.W"].read().astype(np.float32)
    assert len({slot.tobytes() for slot in slots}) == 32  # a wrong slot is noticed


def test_a_synthetic_checkpoint_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_text("real")
    with pytest.raises(BadRequest, match="not empty"):
        synth(tmp_path / "a")


def test_without_a_count_the_checkpoints_own_steps_are_made(checkpoint: Path) -> None:
    configure(checkpoint / "config.json", num_inference_timesteps=5)
    assert export(checkpoint, checkpoint.parent / "b").options["steps"] == [5]
    for wrong in (None, "4", 0, True):
        configure(checkpoint / "config.json", num_inference_timesteps=wrong)
        with pytest.raises(BadRequest, match=r"num_inference_timesteps is .*never guessed; name --steps"):
            export(checkpoint, checkpoint.parent / "c")
        assert not (checkpoint.parent / "c").exists()
    assert export(checkpoint, checkpoint.parent / "c", steps=(4,)).options["steps"] == [4]


def test_an_export_says_how_far_it_is(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    export(GOLDEN / "checkpoint", tmp_path / "b", progress=lambda *said: heard.append(said))
    stored = sum(tensor.read().nbytes for tensor in open_checkpoint(GOLDEN / "checkpoint").tensors.values())
    parts = ("looking for NaN and infinity", "exporting visual", "exporting vl_backbone", "exporting action")
    assert list(dict.fromkeys(what for what, _, _ in heard)) == [f"{part}, MB" for part in parts]
    assert {total for _, _, total in heard} == {int(2 * stored / 1e6)}
    done = [done for _, done, _ in heard]
    assert done == sorted(done)
    assert done[-1] == heard[-1][2]
    assert next(d for what, d, _ in heard if "visual" in what) >= done[-1] // 2


def test_a_terminal_sees_a_bar_and_a_pipe_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "--model", "gr00t", "--checkpoint", str(GOLDEN / "checkpoint"), "--geometry", str(GEOMETRY), "--embodiment", "19"]
    assert cli.main([*words, "--out", str(tmp_path / "piped")]) == 0
    assert capfd.readouterr().err == ""
    screen = StringIO()
    monkeypatch.setattr(cli, "stderr", Console(file=screen, force_terminal=True, width=120))
    assert cli.main([*words, "--out", str(tmp_path / "shown")]) == 0
    assert "exporting action, MB" in screen.getvalue()
    assert "5/5" in screen.getvalue()


def test_exporting_says_nothing_at_the_usual_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    export(GOLDEN / "checkpoint", tmp_path / "b", components=("visual",))
    assert caplog.text == ""
