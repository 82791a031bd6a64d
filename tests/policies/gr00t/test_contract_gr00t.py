"""What a GR00T checkpoint says about its robot: found by tag, resolved once, and refused in one sentence where it cannot be served."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_eval.policies.gr00t.contract import Contract, from_checkpoint, load, parse
from vla_eval.policies.gr00t.processor import decode_chunk, encode_state
from vla_eval.types import BadRequest, ContractMismatch

GOLDEN = Path(__file__).parents[2] / "golden/gr00t_tiny/checkpoint"
CASES = Path(__file__).parents[2] / "cases/checkpoints"
FILES = ("processor_config.json", "statistics.json", "embodiment_id.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The golden checkpoint without its weights, in a folder named after a suite."""
    folder = tmp_path / "libero_10"
    folder.mkdir()
    for name in FILES:
        shutil.copy(GOLDEN / name, folder / name)
    shutil.copytree(GOLDEN / "tokenizer", folder / "tokenizer")
    return folder


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_kwargs(checkpoint: Path, **fields: Any) -> None:
    edit(checkpoint / "processor_config.json", lambda c: c["processor_kwargs"].update(fields))


def test_the_folders_name_gives_the_embodiment_and_the_suite(checkpoint: Path) -> None:
    contract = parse(from_checkpoint(checkpoint), "here")
    assert (contract.embodiment_tag, contract.embodiment_id) == ("libero_sim", 19)
    assert contract.trained_for == ("libero_10",)
    assert contract.cameras == ("image", "wrist_image")
    assert [(g.key, g.dim) for g in contract.state] == [(k, 1) for k in ("x", "y", "z", "roll", "pitch", "yaw")] + [("gripper", 2)]
    assert (contract.horizon, contract.model_horizon, contract.state_dim, contract.action_dim) == (16, 40, 8, 7)
    assert (contract.state[0].first, contract.state[0].second) == ((-0.39,), (0.153,))  # q01 and q99, not min and max


def test_processor_files_may_lie_in_a_folder_of_their_own(checkpoint: Path) -> None:
    wanted = from_checkpoint(checkpoint)
    (checkpoint / "processor").mkdir()
    for name in FILES:
        (checkpoint / name).rename(checkpoint / "processor" / name)
    assert from_checkpoint(checkpoint) == wanted


def test_bounds_are_min_and_max_without_percentiles(checkpoint: Path) -> None:
    edit_kwargs(checkpoint, use_percentiles=False)
    statistics = json.loads((checkpoint / "statistics.json").read_text())["libero_sim"]["state"]["x"]
    assert list(parse(from_checkpoint(checkpoint), "here").state[0].first) == statistics["min"]


def test_sin_cos_groups_need_the_global_switch(checkpoint: Path) -> None:
    assert [g.encoding for g in parse(from_checkpoint(checkpoint, 5), "here").state] == ["bounds", "sin_cos", "mean_std", "bounds"]
    edit_kwargs(checkpoint, apply_sincos_state_encoding=False)
    assert [g.encoding for g in parse(from_checkpoint(checkpoint, 5), "here").state] == ["bounds", "bounds", "mean_std", "bounds"]


ASKED = json.loads((CASES / "embodiment_asked.json").read_text())


@pytest.fixture
def many_tags(checkpoint: Path) -> Path:
    """The same robot under every tag of the case's file, where libero_sim is slot 5."""
    shutil.copy(CASES / "embodiment_id.json", checkpoint / "embodiment_id.json")
    tags = json.loads((checkpoint / "embodiment_id.json").read_text())
    edit(checkpoint / "statistics.json", lambda c: c.update(dict.fromkeys(tags, c["libero_sim"])))
    configs = json.loads((checkpoint / "processor_config.json").read_text())["processor_kwargs"]["modality_configs"]
    edit_kwargs(checkpoint, modality_configs=dict.fromkeys(tags, configs["libero_sim"]))
    return checkpoint


@pytest.mark.parametrize(("name", "slot"), ASKED["found"].items())
def test_a_name_gives_the_files_slot(many_tags: Path, name: str, slot: int) -> None:
    assert from_checkpoint(many_tags, name)["embodiment_id"] == slot


def test_tags_that_differ_only_in_case_are_told_apart_by_case(many_tags: Path) -> None:
    for file, add in (
        ("embodiment_id.json", lambda c: c.update(LIBERO_SIM=30)),
        ("statistics.json", lambda c: c.update(LIBERO_SIM=c["libero_sim"])),
        ("processor_config.json", lambda c: c["processor_kwargs"]["modality_configs"].update(
            LIBERO_SIM=c["processor_kwargs"]["modality_configs"]["libero_sim"])),
    ):  # fmt: skip
        edit(many_tags / file, add)
    assert from_checkpoint(many_tags, "LIBERO_SIM")["embodiment_id"] == 30
    assert from_checkpoint(many_tags, "libero_sim")["embodiment_id"] == 5
    for name in ("Libero_Sim", "LIBERO_PANDA"):
        with pytest.raises(BadRequest, match=f"'{name}' means any of libero_sim, LIBERO_SIM"):
            from_checkpoint(many_tags, name)


@pytest.mark.parametrize("name", [*ASKED["refused"], "²", "+-5", "1_9", "99999999999999999999"])
def test_a_misspelt_name_is_refused_with_the_list(many_tags: Path, name: str) -> None:
    with pytest.raises(BadRequest, match=r"embodiment_id\.json has libero_sim, new_embodiment, xdof_relative") as refused:
        from_checkpoint(many_tags, name)
    assert name in str(refused.value)


def test_a_slot_that_several_tags_share_is_taken_if_one_of_them_is_complete(checkpoint: Path) -> None:
    assert from_checkpoint(checkpoint, 19)["embodiment_tag"] == "libero_sim"  # robocasa_panda_omron shares it, without statistics
    assert from_checkpoint(checkpoint, "19")["embodiment_tag"] == "libero_sim"
    with pytest.raises(BadRequest, match="embodiment 10 belongs to no tag with statistics"):
        from_checkpoint(checkpoint, 10)
    edit(checkpoint / "embodiment_id.json", lambda c: c.update(simpler_env_widowx=19))
    with pytest.raises(BadRequest, match="embodiment 19 belongs to simpler_env_widowx, libero_sim"):
        from_checkpoint(checkpoint, 19)


def test_a_tag_without_statistics_is_refused(checkpoint: Path) -> None:
    with pytest.raises(BadRequest, match=r"'unitree_g1_sonic' lacks statistics in .*statistics\.json"):
        from_checkpoint(checkpoint, "unitree_g1_sonic")


def test_an_unmatched_folder_takes_unknown_with_a_warning_or_is_refused(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = checkpoint.rename(checkpoint.with_name("run-17"))
    with pytest.raises(BadRequest, match="folder name 'run-17' fits no embodiment"):
        from_checkpoint(other)
    edit(other / "embodiment_id.json", lambda c: c.update(unknown=7))
    edit(other / "statistics.json", lambda c: c.update(unknown=c["libero_sim"]))
    edit(
        other / "processor_config.json",
        lambda c: c["processor_kwargs"]["modality_configs"].update(unknown=c["processor_kwargs"]["modality_configs"]["libero_sim"]),
    )
    with caplog.at_level(logging.WARNING):
        assert from_checkpoint(other)["embodiment_id"] == 7
    assert "taking 'unknown', slot 7" in caplog.text
    assert from_checkpoint(other)["trained_for"] == []


def test_a_folder_that_fits_two_embodiments_is_refused(checkpoint: Path) -> None:
    edit(checkpoint / "embodiment_id.json", lambda c: c.update(libero_real=3))
    edit(checkpoint / "statistics.json", lambda c: c.update(libero_real=c["libero_sim"]))
    edit(
        checkpoint / "processor_config.json",
        lambda c: c["processor_kwargs"]["modality_configs"].update(libero_real=c["processor_kwargs"]["modality_configs"]["libero_sim"]),
    )
    with pytest.raises(BadRequest, match="fits the embodiments libero_sim, libero_real"):
        from_checkpoint(checkpoint)


def test_a_relative_action_group_is_refused_by_tag_group_and_representation(checkpoint: Path) -> None:
    shutil.copy(CASES / "relative_roll/processor_config.json", checkpoint / "processor_config.json")
    edit_kwargs(checkpoint, apply_sincos_state_encoding=False)
    with pytest.raises(BadRequest, match=r"libero_sim\.action: group 'roll' is declared rep RELATIVE, type EEF"):
        from_checkpoint(checkpoint)


@pytest.mark.parametrize(("field", "value"), [("rep", "DELTA"), ("rep", "RELATIVE"), ("type", "EEF"), ("format", "XYZ_ROT6D")])
def test_actions_that_need_pose_arithmetic_are_refused(checkpoint: Path, field: str, value: str) -> None:
    def change(content: dict[str, Any]) -> None:
        content["processor_kwargs"]["modality_configs"]["libero_sim"]["action"]["action_configs"][2][field] = value

    edit(checkpoint / "processor_config.json", change)
    with pytest.raises(BadRequest, match=f"group 'z' is declared .*{field} {value}"):
        from_checkpoint(checkpoint)


def test_absent_action_configs_are_absolute(checkpoint: Path) -> None:
    wanted = from_checkpoint(checkpoint)

    def change(content: dict[str, Any]) -> None:
        content["processor_kwargs"]["modality_configs"]["libero_sim"]["action"]["action_configs"] = None

    edit(checkpoint / "processor_config.json", change)
    assert from_checkpoint(checkpoint) == wanted


REQUIRED = (
    "modality_configs", "use_percentiles", "clip_outliers", "apply_sincos_state_encoding", "use_albumentations", "image_target_size",
    "image_crop_size", "formalize_language", "max_state_dim", "max_action_dim", "max_action_horizon",
)  # fmt: skip


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_never_guessed(checkpoint: Path, field: str) -> None:
    edit(checkpoint / "processor_config.json", lambda c: c["processor_kwargs"].pop(field))
    with pytest.raises(BadRequest, match=f"has no '{field}'"):
        from_checkpoint(checkpoint)


@pytest.mark.parametrize("field", ["use_mean_std", "use_tactile"])
def test_what_is_not_implemented_is_refused(checkpoint: Path, field: str) -> None:
    edit_kwargs(checkpoint, **{field: True})
    with pytest.raises(BadRequest, match=field):
        from_checkpoint(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_broken_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text("[1")
    with pytest.raises(BadRequest, match=f"{name}: not JSON"):
        from_checkpoint(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises(BadRequest, match=f"has no {name}, neither at its root nor in processor/"):
        from_checkpoint(checkpoint)


def test_statistics_of_the_wrong_length_or_not_finite_are_refused(checkpoint: Path) -> None:
    edit(checkpoint / "statistics.json", lambda c: c["libero_sim"]["state"]["x"].update(q99=[0.1, 0.2]))
    with pytest.raises(BadRequest, match=r"libero_sim\.state\.x: q01 holds 1 numbers and q99 2"):
        from_checkpoint(checkpoint)
    edit(checkpoint / "statistics.json", lambda c: c["libero_sim"]["state"]["x"].update(q99=[float("nan")]))
    with pytest.raises(BadRequest, match=r"libero_sim\.state\.x\.q99\[0\] is nan"):
        from_checkpoint(checkpoint)


@pytest.mark.parametrize("number", [1e39, -1e300, 10**400, True, "0.1"], ids=str)
def test_statistics_that_no_float32_holds_are_refused(checkpoint: Path, number: Any) -> None:
    edit(checkpoint / "statistics.json", lambda c: c["libero_sim"]["action"]["x"].update(q01=[number]))
    with pytest.raises(BadRequest, match=r"libero_sim\.action\.x\.q01\[0\] is .*, no finite number of float32"):
        from_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("crop_fraction", "0.95", "crop_fraction is '0.95', no number"),
        ("crop_fraction", [0.95], r"crop_fraction is \[0.95\], no number"),
        ("crop_fraction", True, "crop_fraction is True, no number"),
        ("crop_fraction", 0.0, "crop_fraction is 0.0, no fraction"),
        ("crop_fraction", 10**400, "crop_fraction is 1000.*, no fraction"),
        ("crop_fraction", float("nan"), "crop_fraction is nan, no fraction"),
        ("shortest_image_edge", 0, "must lie between 1 and 4096 pixels"),
        ("shortest_image_edge", 10**12, "must lie between 1 and 4096 pixels"),
        ("image_target_size", [256, 5000], "must lie between 1 and 4096 pixels"),
        ("image_target_size", [256.0, 256], "must hold a height and a width"),
        ("formalize_language", 1, "formalize_language is 1, no true or false"),
        ("max_state_dim", True, "max_state_dim is True, no whole number"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(checkpoint: Path, field: str, value: Any, says: str) -> None:
    edit_kwargs(checkpoint, **{field: value})
    with pytest.raises((BadRequest, ContractMismatch), match=says):
        from_checkpoint(checkpoint)


@pytest.mark.parametrize("field", ["sin_cos_embedding_keys", "mean_std_embedding_keys"])
@pytest.mark.parametrize(("value", "says"), [("xyz", "no list"), (5, "no list"), (["wheel"], "names 'wheel', which is none of")])
def test_encodings_of_groups_that_are_not_there_are_refused(checkpoint: Path, field: str, value: Any, says: str) -> None:
    edit_kwargs(checkpoint, apply_sincos_state_encoding=True)
    edit(
        checkpoint / "processor_config.json",
        lambda c: c["processor_kwargs"]["modality_configs"]["libero_sim"]["state"].update({field: value}),
    )
    with pytest.raises(BadRequest, match=f"{field} .*{says}"):
        from_checkpoint(checkpoint)


def test_several_time_steps_are_refused(checkpoint: Path) -> None:
    edit(
        checkpoint / "processor_config.json",
        lambda c: c["processor_kwargs"]["modality_configs"]["libero_sim"]["video"].update(delta_indices=[-1, 0]),
    )
    with pytest.raises(BadRequest, match=r"video\.delta_indices is \[-1, 0\]"):
        from_checkpoint(checkpoint)


def test_tokenizer_files_are_needed(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer/tokenizer_config.json", lambda c: c.pop("chat_template"))
    with pytest.raises(BadRequest, match="has no chat template"):
        from_checkpoint(checkpoint)
    (checkpoint / "tokenizer/tokenizer.json").unlink()
    with pytest.raises(BadRequest, match=r"has no tokenizer\.json"):
        from_checkpoint(checkpoint)
    shutil.rmtree(checkpoint / "tokenizer")
    with pytest.raises(BadRequest, match="--tokenizer"):
        from_checkpoint(checkpoint)
    assert from_checkpoint(checkpoint, tokenizer=GOLDEN / "tokenizer")["prompt"] == from_checkpoint(GOLDEN, "libero_sim")["prompt"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_chat_template_in_a_file_of_its_own_is_found(checkpoint: Path, name: str) -> None:
    wanted = from_checkpoint(checkpoint)["prompt"]
    template = json.loads((checkpoint / "tokenizer/tokenizer_config.json").read_text())["chat_template"]
    edit(checkpoint / "tokenizer/tokenizer_config.json", lambda c: c.pop("chat_template"))
    (checkpoint / "tokenizer" / name).write_text(template if name.endswith("jinja") else json.dumps({"chat_template": template}))
    assert from_checkpoint(checkpoint)["prompt"] == wanted


def test_a_template_with_counters_and_conditions_renders_as_the_plain_one(checkpoint: Path) -> None:
    """As released templates are written: namespaces, tests of type and key, blocks that trim."""
    wanted = from_checkpoint(checkpoint)["prompt"]
    template = """{%- if tools %}{{- raise_exception("no tools here") }}{%- endif %}
{%- set seen = namespace(pictures=0) %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- "<|im_start|>" + message.role + "\n" }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == "image" or "image" in part %}
                    {%- set seen.pictures = seen.pictures + 1 %}
                    {%- if add_vision_id %}Picture {{ seen.pictures }}: {% endif -%}
                    <|vision_start|><|image_pad|><|vision_end|>
                {%- elif "text" in part %}
                    {{- part.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
    edit(checkpoint / "tokenizer/tokenizer_config.json", lambda c: c.update(chat_template=template))
    assert from_checkpoint(checkpoint)["prompt"] == wanted


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content[0].text | trim }}",  # no picture
        # strips the text
        "{% for p in messages[0].content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}",
        "{{ messages.__class__.__mro__ }}",  # reaches for Python
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% if %}",
    ],
)
def test_a_chat_template_that_does_something_else_is_refused(checkpoint: Path, template: str) -> None:
    edit(checkpoint / "tokenizer/tokenizer_config.json", lambda c: c.update(chat_template=template))
    with pytest.raises(BadRequest, match="chat template"):
        from_checkpoint(checkpoint)


def test_other_picture_packing_is_refused(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer/preprocessor_config.json", lambda c: c.update(patch_size=14))
    with pytest.raises(BadRequest, match=r"preprocessor_config\.json\.patch_size is 14"):
        from_checkpoint(checkpoint)


def test_a_constant_dimension_is_finite_and_named_once(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(checkpoint / "statistics.json", lambda c: c.update(json.loads((CASES / "constant/statistics.json").read_text())))
    (tmp_path / "policy.json").write_text(json.dumps({**from_checkpoint(checkpoint), "contract_version": 1}))
    with caplog.at_level(logging.WARNING):
        contract = load(tmp_path / "policy.json")
    assert len(caplog.records) == 1
    assert "state.roll[0] = 3.14159, action.pitch[0] = 0" in caplog.text
    case = json.loads((CASES / "constant/expected.json").read_text())
    expected, atol = case["gr00t"], case["atol"]
    keys = [group.key for group in contract.state for _ in range(group.dim)]
    for raw, wanted in zip(expected["state"], expected["state_normalized"], strict=True):
        state = {key: np.array([v for k, v in zip(keys, raw, strict=True) if k == key], np.float32) for key in keys}
        np.testing.assert_allclose(encode_state(contract, state)[0, :8], wanted, rtol=0, atol=atol)
    chunk = np.zeros((40, 132), np.float32)
    chunk[:4, :7] = expected["chunk_normalized"]
    actions = np.concatenate([*decode_chunk(contract, chunk).values()], axis=-1)
    np.testing.assert_allclose(actions[:4], expected["chunk"], rtol=0, atol=atol)
    assert (actions[:, 4] == 0.0).all()


GOOD = from_checkpoint(GOLDEN, "libero_sim")


def wrong(path: str, value: Any) -> dict[str, Any]:
    """The good contract with one field replaced; "…" takes it away."""
    content = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    spot: Any = content
    for step in way:
        spot = spot[int(step)] if isinstance(spot, list) else spot[step]
    if value is ...:
        del spot[last]
    else:
        spot[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model_family", "pi05", "model_family is 'pi05'"),
        ("embodiment_id", -1, "embodiment_id is -1"),
        ("embodiment_id", True, "embodiment_id is True"),
        ("action.horizon", 50, "action.horizon is 50, but the model computes 40"),
        ("action.horizon", ..., "has no 'horizon'"),
        ("state.width", 7, "state groups are 8 wide, the model takes 7"),
        ("state.groups.0.dim", 2, r"groups\[0\]\.low holds 1 numbers where 2 are wanted"),
        ("state.groups.0.low", [float("inf")], r"low\[0\] is inf"),
        ("state.groups.0.encoding", "log", "encoding is 'log'"),
        ("state.groups.1.key", "x", "every group needs a name of its own"),
        ("cameras", ["image"], "holds 2 places for pictures, cameras are 1"),
        ("cameras", ["image", "image"], "must hold different names"),
        ("prompt.image_token", "", "places for pictures"),
        ("pictures.resize", "lanczos", "neither 'area' nor 'torchvision'"),
        ("pictures.crop", 1.5, "no fraction"),
        ("pictures.target", [256], "must hold a height and a width"),
        ("pictures.edge", 0, "must lie between 1 and 4096"),
        ("pictures.edge", 1 << 40, "must lie between 1 and 4096"),
        ("action.groups.0.high", [10**400], "no finite number of float32"),
    ],
)
def test_a_contract_that_contradicts_itself_is_refused_by_field(path: str, value: Any, says: str) -> None:
    with pytest.raises(ContractMismatch, match=says):
        parse(wrong(path, value), "action/policy.json")


def test_a_good_contract_survives_json(tmp_path: Path) -> None:
    stamp = {"contract_version": 1, "export_id": "abc", "frontend": "onnx", "checkpoint_fingerprint": "f"}
    (tmp_path / "policy.json").write_text(json.dumps({**GOOD, **stamp}))
    contract = load(tmp_path / "policy.json")
    assert isinstance(contract, Contract)
    assert (contract.export_id, contract.frontend, contract.checkpoint_fingerprint) == ("abc", "onnx", "f")


def test_an_unknown_layout_is_refused_with_both_versions(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text(json.dumps({**GOOD, "contract_version": 2}))
    with pytest.raises(ContractMismatch, match=r"policy\.json: contract_version is 2, this program reads 1"):
        load(tmp_path / "policy.json")
