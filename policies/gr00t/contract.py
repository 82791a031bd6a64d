"""What a GR00T checkpoint says about its robot, as `action/policy.json`: keys, widths, bounds, pictures, prompt, horizon."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from vla_eval.engines.bundle import CONTRACT_VERSION
from vla_eval.engines.weights import read_json
from vla_eval.types import BadRequest, ContractMismatch

log = logging.getLogger(__name__)

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")  # sub-folders of released checkpoints

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.j*",
    "preprocessor_config.json",
)  # all that is read of Qwen3-VL

# Qwen3-VL's picture packing. The network's shapes follow from it, and the backbone's files must state the same.
PATCH, FRAMES, MERGE = 16, 2, 2
LEAST_PIXELS, MOST_PIXELS = 65536, 16777216
_PACKING = {
    "patch_size": PATCH, "temporal_patch_size": FRAMES, "merge_size": MERGE,
    "size": {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip

# Names of the family's own enumeration whose tag is spelt differently; the slot always comes from the checkpoint's file.
ALIASES = {
    "libero_panda": "libero_sim",
    "oxe_droid": "oxe_droid_relative_eef_relative_joint",
    "real_g1": "real_g1_relative_eef_relative_joints",
    "real_r1_pro_sharpa": "real_r1_pro_sharpa_relative_eef",
    "real_r1_pro_sharpa_human": "real_r1_pro_sharpa_relative_eef_human",
    "real_r1_pro_sharpa_maxinsights": "real_r1_pro_sharpa_relative_eef_maxinsights",
    "real_r1_pro_sharpa_mecka": "real_r1_pro_sharpa_relative_eef_mecka",
    "unitree_g1": "unitree_g1_full_body_with_waist_height_nav_cmd",
    "xdof": "xdof_relative_eef_relative_joint",
}

_LARGEST = float(np.finfo(np.float32).max)  # of statistics and of what is decoded with them
_SIDE = 4096  # pixels: 16,777,216 of them are what Qwen's packing takes at most

Encoding = Literal["bounds", "sin_cos", "mean_std"]
_KINDS = {
    dict: "object",
    list: "list",
    str: "text",
    bool: "true or false",
    int: "whole number",
    float: "number",
    (int, float): "number",
}  # JSON's kinds by their names
_NUMBERS = {"bounds": ("low", "high"), "mean_std": ("mean", "std"), "sin_cos": ()}  # encoding -> its two rows of numbers


@dataclass(frozen=True, slots=True)
class Group:
    """One group of state or action numbers, in the robot's units."""

    key: str
    dim: int
    encoding: Encoding
    first: tuple[float, ...] = ()  # [dim] the lower bound, or the mean
    second: tuple[float, ...] = ()  # [dim] the upper bound, or the deviation

    @property
    def encoded(self) -> int:
        """How many numbers the model sees."""
        return 2 * self.dim if self.encoding == "sin_cos" else self.dim

    @property
    def constant(self) -> tuple[int, ...]:
        """Dimensions that never moved in the training data: these are the model's blind spots, not errors."""
        if self.encoding == "bounds":
            return tuple(int(i) for i in np.flatnonzero(np.isclose(self.second, self.first)))
        if self.encoding == "mean_std":
            return tuple(i for i, std in enumerate(self.second) if std == 0.0)
        return ()


@dataclass(frozen=True, slots=True)
class Pictures:
    """How a camera's picture becomes the model's."""

    resize: Literal["area", "torchvision"]  # OpenCV INTER_AREA, or bilinear with antialias
    edge: int | None  # shorter side after each resize; None: `target` exactly
    target: tuple[int, int]
    crop: tuple[int, int] | float  # height and width in pixels, or a fraction of each side


@dataclass(frozen=True, slots=True)
class Prompt:
    """The one user turn: what stands before and after the instruction, pictures included."""

    before: str
    after: str
    image_token: str
    formalize: bool  # lower case, without punctuation


@dataclass(frozen=True, slots=True)
class Contract:
    """Everything robot-facing. It holds no engine and no geometry of the network."""

    embodiment_tag: str
    embodiment_id: int
    trained_for: tuple[str, ...]  # suites; empty: the checkpoint does not say
    cameras: tuple[str, ...]  # in the model's order
    language_key: str
    state: tuple[Group, ...]
    state_width: int
    clip_state: bool
    exclude_state: bool  # the model was trained on zeros instead of a state
    action: tuple[Group, ...]
    action_width: int
    horizon: int  # actions that mean something; the model computes `model_horizon`
    model_horizon: int
    pictures: Pictures
    prompt: Prompt
    export_id: str = ""
    frontend: str = ""
    checkpoint_fingerprint: str = ""

    @property
    def state_dim(self) -> int:
        return sum(group.encoded for group in self.state)

    @property
    def action_dim(self) -> int:
        return sum(group.dim for group in self.action)


def from_checkpoint(checkpoint: Path, embodiment: str | int | None = None, *, tokenizer: Path | None = None) -> dict[str, Any]:
    """The content of `action/policy.json`, without the build's identity, which the recipe adds.

    Reads processor_config.json, statistics.json and embodiment_id.json from the checkpoint's root or its processor/ folder, and
    the chat template from `tokenizer` (default: the checkpoint's tokenizer/). Raises BadRequest, naming file and key, before
    anything is written.
    """
    config_file = _find(checkpoint, "processor_config.json")
    kwargs = _get(_read(config_file), "processor_kwargs", dict, str(config_file))
    where = f"{config_file}: processor_kwargs"
    tag, slot = _embodiment(checkpoint, embodiment, kwargs, where)
    modalities = cast(dict[str, Any], _get(kwargs, "modality_configs", dict, where)[tag])
    where_tag = f"{where}.modality_configs.{tag}"
    statistics_file = _find(checkpoint, "statistics.json")
    statistics = _read(statistics_file)[tag]

    for name in ("use_mean_std", "use_tactile"):
        if kwargs.get(name):
            raise BadRequest(f"{where}.{name} is set, which this policy does not implement; only checkpoints without it can be used")
    _only_absolute(modalities, where_tag)
    percentiles = _get(kwargs, "use_percentiles", bool, where)
    sin_cos = _get(kwargs, "apply_sincos_state_encoding", bool, where)
    bounds = ("q01", "q99") if percentiles else ("min", "max")

    def groups(modality: str) -> list[dict[str, Any]]:
        config = _get(modalities, modality, dict, where_tag)
        spot = f"{where_tag}.{modality}"
        keys = _names(config, "modality_keys", spot)
        encodings: dict[str, Encoding] = dict.fromkeys(_some(config, "mean_std_embedding_keys", keys, spot), "mean_std")
        if modality == "state" and sin_cos:
            encodings |= dict.fromkeys(_some(config, "sin_cos_embedding_keys", keys, spot), "sin_cos")
        stats = _get(statistics, modality, dict, f"{statistics_file}: {tag}")
        return [_group(key, encodings.get(key, "bounds"), bounds, stats, f"{statistics_file}: {tag}.{modality}") for key in keys]

    for modality in ("video", "state", "language"):
        deltas = _get(_get(modalities, modality, dict, where_tag), "delta_indices", list, f"{where_tag}.{modality}")
        if deltas != [0]:
            raise BadRequest(f"{where_tag}.{modality}.delta_indices is {deltas}; this policy sees the present only, so it must be [0]")
    deltas = _get(_get(modalities, "action", dict, where_tag), "delta_indices", list, f"{where_tag}.action")
    model_horizon = _get(kwargs, "max_action_horizon", int, where)
    if deltas != list(range(len(deltas))) or not 0 < len(deltas) <= model_horizon:
        raise BadRequest(
            f"{where_tag}.action.delta_indices is {deltas}; it must count up from 0 and fit into max_action_horizon, {model_horizon}"
        )
    cameras = _names(_get(modalities, "video", dict, where_tag), "modality_keys", f"{where_tag}.video")
    language = _names(_get(modalities, "language", dict, where_tag), "modality_keys", f"{where_tag}.language")
    content = {
        "model_family": "gr00t_n1d7",
        "embodiment_tag": tag,
        "embodiment_id": slot,
        "trained_for": [checkpoint.resolve().name] if checkpoint.resolve().name in SUITES else [],
        "cameras": cameras,
        "language_key": language[0],
        "state": {
            "groups": groups("state"),
            "width": _get(kwargs, "max_state_dim", int, where),
            "clip": _get(kwargs, "clip_outliers", bool, where),
            "exclude": bool(kwargs.get("exclude_state", False) or modalities["state"].get("exclude_state", False)),
            "bounds": "/".join(bounds),
        },
        "action": {
            "groups": groups("action"),
            "width": _get(kwargs, "max_action_dim", int, where),
            "horizon": len(deltas),
            "model_horizon": model_horizon,
            "bounds": "/".join(bounds),
        },
        "pictures": _pictures(kwargs, where),
        "prompt": _prompt(tokenizer or checkpoint / "tokenizer", len(cameras), _get(kwargs, "formalize_language", bool, where)),
    }
    parse(content, f"{config_file} with {statistics_file}")  # whatever load() would refuse is refused before anything is written
    return content


def load(path: Path) -> Contract:
    """`action/policy.json` as a Contract, every field checked; dimensions that never moved are named in one warning.

    Raises ContractMismatch, naming file and field.
    """
    content = _read(path)
    if (version := content.get("contract_version")) != CONTRACT_VERSION:
        raise ContractMismatch(
            f"{path}: contract_version is {version!r}, this program reads {CONTRACT_VERSION}; export the checkpoint again"
        )
    contract = parse(content, str(path))
    still = [
        f"{kind}.{group.key}[{i}] = {group.first[i]:g}"
        for kind, groups in (("state", contract.state), ("action", contract.action))
        for group in groups
        for i in group.constant
    ]
    if still:
        log.warning("%s: never moved in the training data, so the policy cannot see or move it: %s", path, ", ".join(still))
    return contract


def parse(content: Any, where: str) -> Contract:
    """The checked Contract of policy.json's content. Raises ContractMismatch, naming `where` and the field."""
    try:
        return _parse(content, where)
    except BadRequest as error:
        raise ContractMismatch(str(error)) from error


def _parse(content: Any, where: str) -> Contract:
    if not isinstance(content, dict):
        raise BadRequest(f"{where} holds no JSON object; export the checkpoint again")
    family = _get(content, "model_family", str, where)
    if family != "gr00t_n1d7":
        raise BadRequest(f"{where}: model_family is {family!r}, not 'gr00t_n1d7'; load it with the policy it was exported for")
    state, action = _get(content, "state", dict, where), _get(content, "action", dict, where)
    prompt, pictures = _get(content, "prompt", dict, where), _get(content, "pictures", dict, where)
    edge = pictures.get("edge")
    crop = pictures.get("crop")
    contract = Contract(
        embodiment_tag=_get(content, "embodiment_tag", str, where),
        embodiment_id=_get(content, "embodiment_id", int, where),
        trained_for=tuple(_names(content, "trained_for", where, empty=True)),
        cameras=tuple(_names(content, "cameras", where)),
        language_key=_get(content, "language_key", str, where),
        state=_groups(state, f"{where}: state"),
        state_width=_get(state, "width", int, f"{where}: state"),
        clip_state=_get(state, "clip", bool, f"{where}: state"),
        exclude_state=_get(state, "exclude", bool, f"{where}: state"),
        action=_groups(action, f"{where}: action"),
        action_width=_get(action, "width", int, f"{where}: action"),
        horizon=_get(action, "horizon", int, f"{where}: action"),
        model_horizon=_get(action, "model_horizon", int, f"{where}: action"),
        pictures=Pictures(
            resize=_get(pictures, "resize", str, f"{where}: pictures"),
            edge=None if edge is None else _get(pictures, "edge", int, f"{where}: pictures"),
            target=_pair(pictures, "target", f"{where}: pictures"),
            crop=float(crop) if isinstance(crop, float) else _pair(pictures, "crop", f"{where}: pictures"),
        ),
        prompt=Prompt(
            before=_get(prompt, "before", str, f"{where}: prompt"),
            after=_get(prompt, "after", str, f"{where}: prompt"),
            image_token=_get(prompt, "image_token", str, f"{where}: prompt"),
            formalize=_get(prompt, "formalize", bool, f"{where}: prompt"),
        ),
        export_id=str(content.get("export_id", "")),
        frontend=str(content.get("frontend", "")),
        checkpoint_fingerprint=str(content.get("checkpoint_fingerprint", "")),
    )
    _consistent(contract, where)
    return contract


def _consistent(contract: Contract, where: str) -> None:
    pictures, prompt = contract.pictures, contract.prompt
    problems = [
        (contract.embodiment_id < 0, f"embodiment_id is {contract.embodiment_id}; slots count from 0"),
        (
            not 0 < contract.horizon <= contract.model_horizon,
            f"action.horizon is {contract.horizon}, but the model computes {contract.model_horizon} steps",
        ),
        (contract.state_dim > contract.state_width, f"state groups are {contract.state_dim} wide, the model takes {contract.state_width}"),
        (
            contract.action_dim > contract.action_width,
            f"action groups are {contract.action_dim} wide, the model gives {contract.action_width}",
        ),
        (pictures.resize not in ("area", "torchvision"), f"pictures.resize is {pictures.resize!r}, neither 'area' nor 'torchvision'"),
        (
            not all(0 < n <= _SIDE for n in (*pictures.target, pictures.target[0] if pictures.edge is None else pictures.edge)),
            f"pictures.target and pictures.edge must lie between 1 and {_SIDE} pixels",
        ),
        (isinstance(pictures.crop, float) and not 0.0 < pictures.crop <= 1.0, f"pictures.crop is {pictures.crop}, no fraction of a side"),
        (
            not prompt.image_token or prompt.before.count(prompt.image_token) != len(contract.cameras),
            f"prompt.before holds {prompt.before.count(prompt.image_token) if prompt.image_token else 0} places for pictures, "
            f"cameras are {len(contract.cameras)}",
        ),
    ]
    for wrong, what in problems:
        if wrong:
            raise BadRequest(f"{where}: {what}; export the checkpoint again")


def _groups(side: dict[str, Any], where: str) -> tuple[Group, ...]:
    found = []
    for i, entry in enumerate(_get(side, "groups", list, where)):
        spot = f"{where}.groups[{i}]"
        if not isinstance(entry, dict):
            raise BadRequest(f"{spot} is no object")
        encoding = _get(entry, "encoding", str, spot)
        if encoding not in _NUMBERS:
            raise BadRequest(f"{spot}.encoding is {encoding!r}, none of {', '.join(_NUMBERS)}")
        dim = _get(entry, "dim", int, spot)
        if dim < 1:
            raise BadRequest(f"{spot}.dim is {dim}; a group has at least one number")
        rows = [_row(entry, name, dim, spot) for name in _NUMBERS[encoding]]
        found.append(Group(_get(entry, "key", str, spot), dim, cast(Encoding, encoding), *rows))
    keys = [group.key for group in found]
    if not found or len(set(keys)) != len(keys):
        raise BadRequest(f"{where}.groups names {keys or 'nothing'}; every group needs a name of its own")
    return tuple(found)


def _row(entry: Mapping[str, Any], name: str, dim: int | None, where: str) -> tuple[float, ...]:
    values = _get(entry, name, list, where)
    if dim is not None and len(values) != dim:
        raise BadRequest(f"{where}.{name} holds {len(values)} numbers where {dim} are wanted")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise BadRequest(f"{where}.{name}[{i}] is {value!r:.40}, no finite number of float32")
    return tuple(float(value) for value in values)


def _group(key: str, encoding: Encoding, bounds: tuple[str, str], stats: Mapping[str, Any], where: str) -> dict[str, Any]:
    rows = _get(stats, key, dict, where)
    names = ("mean", "std") if encoding == "mean_std" else bounds
    first, second = _row(rows, names[0], None, f"{where}.{key}"), _row(rows, names[1], None, f"{where}.{key}")
    if len(first) != len(second) or not first:
        raise BadRequest(f"{where}.{key}: {names[0]} holds {len(first)} numbers and {names[1]} {len(second)}; both need one per dimension")
    numbers = dict(zip(_NUMBERS[encoding], (list(first), list(second)), strict=False))  # sin_cos keeps none: its width is all that counts
    return {"key": key, "dim": len(first), "encoding": encoding, **numbers}


def _only_absolute(modalities: Mapping[str, Any], where: str) -> None:
    action = _get(modalities, "action", dict, where)
    keys = _names(action, "modality_keys", f"{where}.action")
    configs = action.get("action_configs")
    if configs is None:
        return
    if not isinstance(configs, list) or len(configs) != len(keys):
        raise BadRequest(f"{where}.action.action_configs must hold one entry for each of the {len(keys)} modality_keys")
    for key, config in zip(keys, configs, strict=True):
        told = {name: str(_get(config, name, str, f"{where}.action.action_configs ({key})")).upper() for name in ("rep", "type", "format")}
        if told != {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT"}:
            kind = ", ".join(f"{name} {value}" for name, value in told.items())
            raise BadRequest(
                f"{where}.action: group {key!r} is declared {kind}; only rep ABSOLUTE, type NON_EEF, format DEFAULT is implemented, "
                "so choose another embodiment or checkpoint"
            )


def _pictures(kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    area = _get(kwargs, "use_albumentations", bool, where)
    target, crop = _pair(kwargs, "image_target_size", where), _pair(kwargs, "image_crop_size", where)
    if not area:
        return {"resize": "torchvision", "edge": None, "target": list(target), "crop": list(crop)}
    edge, fraction = kwargs.get("shortest_image_edge"), kwargs.get("crop_fraction")
    if fraction is not None and not 0 < _get(kwargs, "crop_fraction", (int, float), where) <= 1:
        raise BadRequest(f"{where}.crop_fraction is {fraction!r:.40}, no fraction of a side")
    return {
        "resize": "area",
        "edge": None if edge is None else _get(kwargs, "shortest_image_edge", int, where),
        "target": list(target),
        "crop": crop[0] / target[0] if fraction is None else float(fraction),
    }


def _prompt(folder: Path, views: int, formalize: bool) -> dict[str, Any]:
    """Renders the tokenizer's chat template once, around a marker, and keeps what stands on either side."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template, file = _chat_template(folder)
    _check_packing(folder / "preprocessor_config.json")
    pieces = _read(folder / "tokenizer.json").get("added_tokens", [])
    place = "<|image_pad|>"  # stands for one picture here, for its 64 tokens later
    if not any(isinstance(piece, dict) and piece.get("content") == place for piece in pieces):
        raise BadRequest(f"{folder / 'tokenizer.json'} has no token {place}; use the tokenizer of Qwen3-VL")
    marker = "  A marked  instruction. "  # blanks on purpose: a template that strips them would change what is tokenised
    content = [*({"type": "image"} for _ in range(views)), {"type": "text", "text": marker}]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    try:
        rendered = environment.from_string(template).render(
            messages=[{"role": "user", "content": content}], add_generation_prompt=False, tools=None
        )
    except (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"  # a template is a program, and may stumble as one
        raise BadRequest(f"{file}: the chat template cannot be rendered ({told}); use the tokenizer files of Qwen3-VL") from error
    parts = rendered.split(marker)
    if len(parts) != 2 or parts[0].count(place) != views:
        raise BadRequest(
            f"{file}: the chat template renders {rendered!r}, not one place for each of {views} pictures and then the text; "
            "use the tokenizer files of Qwen3-VL"
        )
    return {"before": parts[0], "after": parts[1], "image_token": place, "formalize": formalize}


def _check_packing(file: Path) -> None:
    if not file.is_file():
        return  # the shapes of the checkpoint's own tensors say the same
    config = _read(file)
    for key, wanted in _PACKING.items():
        if key in config and config[key] != wanted:
            raise BadRequest(
                f"{file}.{key} is {config[key]!r}, but GR00T's pictures are packed with {wanted!r}; use the files of Qwen3-VL-2B-Instruct"
            )


def _chat_template(folder: Path) -> tuple[str, Path]:
    if not folder.is_dir():
        raise BadRequest(
            f"{folder} does not exist; put the tokenizer files of Qwen3-VL-2B-Instruct there or name their folder with --tokenizer"
        )
    if not (folder / "tokenizer.json").is_file():
        raise BadRequest(f"{folder} has no tokenizer.json; copy it from the tokenizer of Qwen3-VL-2B-Instruct")
    if (plain := folder / "chat_template.jinja").is_file():
        try:
            return plain.read_text("utf-8"), plain
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"{plain}: cannot be read ({error})") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (file := folder / name).is_file() and isinstance(template := _read(file).get("chat_template"), str):
            return template, file
    raise BadRequest(
        f"{folder} has no chat template (chat_template.jinja, chat_template.json or tokenizer_config.json: chat_template); "
        "copy it from Qwen3-VL-2B-Instruct"
    )


def _embodiment(checkpoint: Path, asked: str | int | None, kwargs: Mapping[str, Any], where: str) -> tuple[str, int]:
    """The tag and its slot, from the checkpoint's own file. A number asks for the slot; nothing asks for the folder's name."""
    file = _find(checkpoint, "embodiment_id.json")
    slots = _read(file)
    for tag, slot in slots.items():
        if isinstance(slot, bool) or not isinstance(slot, int) or slot < 0:
            raise BadRequest(f"{file}: slot of {tag!r} is {slot!r}, no number from 0")
    statistics_file = _find(checkpoint, "statistics.json")
    whole = set(_get(kwargs, "modality_configs", dict, where)) & set(_read(statistics_file))
    usable = [tag for tag in slots if tag in whole]
    if isinstance(asked, str) and re.fullmatch(r"[+-]?[0-9]{1,9}", asked):
        asked = int(asked)
    if asked is None:
        tag = _by_folder(checkpoint.resolve().name, slots, usable, file)
    elif isinstance(asked, int):
        found = [tag for tag in usable if slots[tag] == asked]
        if len(found) != 1:
            reason = f"belongs to {', '.join(found)}" if found else "belongs to no tag with statistics and a modality configuration"
            raise BadRequest(f"embodiment {asked} {reason} in {file}; ask for one of {', '.join(usable) or 'none'} by name")
        tag = found[0]
    else:
        lower = asked.lower()
        known = [asked] if asked in slots else [tag for tag in slots if tag.lower() == lower]
        known = known or [tag for tag in slots if tag.lower() == ALIASES.get(lower)]
        if len(known) != 1:
            told = f"{asked!r} means any of {', '.join(known)}" if known else f"unknown embodiment {asked!r}"
            raise BadRequest(f"{told}; {file} has {', '.join(sorted(slots))}")
        (tag,) = known
    if tag not in whole:
        raise BadRequest(
            f"embodiment {tag!r} lacks statistics in {statistics_file} or an entry in {where}.modality_configs; "
            f"usable here with --embodiment: {', '.join(usable) or 'none'}"
        )
    return tag, int(slots[tag])


def _by_folder(name: str, slots: Mapping[str, int], usable: Sequence[str], file: Path) -> str:
    """libero_10 -> libero_sim: the one usable tag whose name, or whose first word, stands in the folder's name."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    text = f"_{'_'.join(words)}_"
    for matches in (
        [tag for tag in usable if f"_{tag.lower()}_" in text],
        [tag for tag in usable if re.findall(r"[a-z0-9]+", tag.lower())[0] in words],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise BadRequest(f"the folder name {name!r} fits the embodiments {', '.join(matches)} of {file}; name one with --embodiment")
    fallback = next((tag for tag in slots if tag.lower() == "unknown"), None)
    if fallback is None or fallback not in usable:
        raise BadRequest(
            f"the folder name {name!r} fits no embodiment of {file}; name one with --embodiment (usable: {', '.join(usable) or 'none'})"
        )
    log.warning("the folder name %r fits no embodiment of %s: taking %r, slot %d", name, file, fallback, slots[fallback])
    return fallback


def _find(checkpoint: Path, name: str) -> Path:
    for file in (checkpoint / name, checkpoint / "processor" / name):
        if file.is_file():
            return file
    raise BadRequest(f"{checkpoint} has no {name}, neither at its root nor in processor/; GR00T needs it")


def _read(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise BadRequest(f"{file} holds no JSON object; fetch it again")
    return content


def _get(content: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    if not isinstance(content, dict) or key not in content:
        raise BadRequest(f"{where} has no {key!r}; a missing field is never guessed")
    value = content[key]
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BadRequest(f"{where}.{key} is {value!r:.80}, no {_KINDS[kind]}")
    return value


def _names(content: Any, key: str, where: str, *, empty: bool = False) -> list[str]:
    values = _get(content, key, list, where)
    if not all(isinstance(value, str) for value in values) or len(set(values)) != len(values) or not (values or empty):
        raise BadRequest(f"{where}.{key} is {values!r}; it must hold different names")
    return cast(list[str], values)


def _some(content: Mapping[str, Any], key: str, of: Sequence[str], where: str) -> list[str]:
    """Some of the names `of`; null or nothing there means none of them."""
    if content.get(key) is None:
        return []
    values = _names(content, key, where, empty=True)
    if strange := [value for value in values if value not in of]:
        raise BadRequest(f"{where}.{key} names {strange[0]!r}, which is none of its modality_keys {', '.join(of)}")
    return values


def _pair(content: Any, key: str, where: str) -> tuple[int, int]:
    values = _get(content, key, list, where)
    if len(values) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
        raise BadRequest(f"{where}.{key} is {values!r}; it must hold a height and a width in pixels")
    return values[0], values[1]
