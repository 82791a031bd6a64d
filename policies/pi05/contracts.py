"""The three robots that pi0.5 is run for, as one table, and `policy.json`, which repeats the row that a bundle was made for."""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_eval.engines.weights import read_json
from vla_eval.types import BadRequest, ContractMismatch

from .configuration import VIEWS, Features, Said

BINS = 256  # of a state number in the prompt
PROMPT_TOKENS = 200  # the reference cuts what is longer
STATISTICS = "norm_stats.json"
MODEL_FAMILY = "pi05"
MARKS = {"add_bos": True, "add_eos": False}  # around a prompt's pieces
_ENGINES = ("max_dim", "max_text")  # numbers of policy.json that the engines decide, not the configuration
_PADDING = 1e-6  # of a range: numbers that openpi pads statistics with move less

_log = logging.getLogger(__name__)


class Camera(NamedTuple):
    """One picture slot of the model, by the robot's name for it."""

    name: str
    required: bool


@dataclass(frozen=True, slots=True)
class Configuration:
    """One openpi configuration: everything robot-facing, and nothing of it from a checkpoint."""

    name: str
    adapter: Literal["libero", "droid", "aloha"]
    state_dim: int
    action_dim: int  # of the robot; the model's is padded
    horizon: int
    discrete_state_input: bool  # the state is written into the prompt
    cameras: tuple[Camera, ...]  # in the model's order of slots
    ignored: tuple[str, ...]  # accepted and dropped
    opt_views: int  # that engines are tuned for
    asset_id: str  # where openpi puts the statistics, below assets/
    trained_for: tuple[str, ...]  # suites


CONFIGURATIONS: Mapping[str, Configuration] = {
    c.name: c
    for c in (
        Configuration(
            "pi05_libero", "libero", 8, 7, 10, False, (Camera("image", True), Camera("wrist_image", True)), (), 2,
            "physical-intelligence/libero", ("libero_spatial", "libero_object", "libero_goal", "libero_10"),
        ),
        Configuration(
            "pi05_droid", "droid", 8, 8, 15, True, (Camera("exterior_image_1_left", True), Camera("wrist_image_left", True)), (), 2,
            "droid", (),
        ),
        Configuration(
            "pi05_aloha", "aloha", 14, 14, 50, True,
            (Camera("cam_high", True), Camera("cam_left_wrist", False), Camera("cam_right_wrist", False)), ("cam_low",), 3, "trossen", (),
        ),
    )
}  # fmt: skip


class Range(NamedTuple):
    """The 1 % and 99 % quantiles of each number in the training data."""

    q01: NDArray[np.float64]  # [N]
    q99: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What normalisation needs, checked to cover the robot's numbers."""

    state: Range
    action: Range
    file: Path
    sha256: str


def choose(asked: str | None, said: Said) -> Configuration:
    """The configuration of an export: the one named, or pi05_libero where the checkpoint's features can mean nothing else.

    Raises BadRequest for an unknown name, for a checkpoint that does not say, and for a horizon that is not the configuration's.
    """
    if asked is None:
        if said.features != Features(state=8, action=7, views=2):
            raise BadRequest(
                f"{said.file} does not say which robot this checkpoint drives, and nothing else proves it; "
                f"name one with --policy-config {'|'.join(CONFIGURATIONS)}"
            )
        asked = "pi05_libero"
    configuration = CONFIGURATIONS.get(asked)
    if configuration is None:
        raise BadRequest(f"--policy-config {asked}: there are {', '.join(CONFIGURATIONS)}")
    if said.horizon is not None and said.horizon != configuration.horizon:
        raise BadRequest(
            f"{said.file} says {said.horizon} action steps, {asked} has {configuration.horizon}: engines of that pair would run and emit "
            "wrong commands; name the checkpoint's own --policy-config"
        )
    return configuration


def policy_json(
    c: Configuration, *, width: int, image: int, tokenizer: Mapping[str, Any], max_text: int, suites: Sequence[str] = ()
) -> dict[str, Any]:
    """What `policy.json` holds beside the export's identity. `width` is the model's padded action; any `suites` replace the table's."""
    return {
        "model_family": MODEL_FAMILY, "policy_config": c.name, "adapter": c.adapter, "discrete_state_input": c.discrete_state_input,
        "trained_for": list(suites or c.trained_for), "state": {"dim": c.state_dim, "num_bins": BINS},
        "action": {"dim": c.action_dim, "max_dim": width, "horizon": c.horizon},
        "cameras": {"slots": [camera._asdict() for camera in c.cameras], "ignored": list(c.ignored)},
        "image_resolution": [image, image], "tokenizer": {**tokenizer, "max_length": PROMPT_TOKENS, "max_text": max_text},
    }  # fmt: skip


def read_policy(said: Mapping[str, Any], where: Path) -> Configuration:
    """The configuration that a bundle's policy.json names, every robot-facing field of it held against the table's.

    Raises ContractMismatch, naming the field and both values: a foreign bundle would give plausible commands that are wrong.
    """
    name = said.get("policy_config")
    configuration = CONFIGURATIONS.get(name) if isinstance(name, str) else None
    if said.get("model_family") != MODEL_FAMILY or configuration is None:
        raise ContractMismatch(
            f"{where}: model_family {said.get('model_family')!r} with policy_config {name!r} is not implemented here; "
            f"there are {', '.join(CONFIGURATIONS)} of {MODEL_FAMILY!r}"
        )
    mine = policy_json(configuration, width=0, image=0, tokenizer=MARKS, max_text=0)
    for field in ("adapter", "discrete_state_input", "state", "cameras", "action", "tokenizer"):
        wanted, found = mine[field], said.get(field)
        parts = [(field, found, wanted)]
        if isinstance(wanted, dict):
            table = found if isinstance(found, dict) else {}
            parts = [(f"{field}.{key}", table.get(key), value) for key, value in wanted.items() if key not in _ENGINES]
        for path, has, value in parts:
            if has != value:
                raise ContractMismatch(f"{where}: {path} is {has!r}, {name} has {value!r}; export the checkpoint again")
    return configuration


def find_statistics(folder: Path, option: str, chosen: str | None = None) -> Path:
    """The one norm_stats.json below `folder`/assets, or the one of the set `chosen`. Raises BadRequest otherwise."""
    assets = folder / "assets"
    found = {str(file.parent.relative_to(assets)): file for file in sorted(assets.rglob(STATISTICS)) if file.is_file()}
    if chosen is not None:
        if chosen not in found:
            raise BadRequest(f"{assets} has no statistics of {chosen!r}; it has {', '.join(found) or 'none'}")
        return found[chosen]
    if not found:
        raise BadRequest(
            f"{assets} holds no {STATISTICS}, without which no state or action means anything; put the training's file at "
            f"assets/<asset id>/{STATISTICS}, or name it: {option}"
        )
    if len(found) > 1:
        raise BadRequest(f"{assets} holds the statistics of {' and of '.join(found)}; say which: {option}")
    return next(iter(found.values()))


def read_statistics(file: Path, c: Configuration) -> Statistics:
    """Quantiles of state and actions, with or without the outer `norm_stats` key.

    Raises BadRequest, naming file and field, for statistics that are missing, null, not finite, or shorter than the robot's numbers.
    A number that never moved in training is said in one warning.
    """
    said = read_json(file)
    said = said.get("norm_stats", said) if isinstance(said, dict) else said
    if not isinstance(said, dict):
        raise BadRequest(f"{file}: holds no table of statistics; fetch the file again")
    state, action = _range(file, said, "state", c.state_dim), _range(file, said, "actions", c.action_dim)
    still = [
        f"{name}[{i}]"
        for name, rows, dim in (("state", state, c.state_dim), ("actions", action, c.action_dim))
        for i in np.flatnonzero(rows.q01[:dim] == rows.q99[:dim])
    ]
    for name, rows, dim in (("state", state, c.state_dim), ("actions", action, c.action_dim)):
        if count := int(np.count_nonzero(rows.q99[dim:] - rows.q01[dim:] > _PADDING)):
            _log.warning("%s: %s has %d numbers more than %s; are these another robot's statistics?", file, name, count, c.name)
    if still:
        _log.warning("%s: %s never moved in the training data; the model is blind there", file, ", ".join(still))
    return Statistics(state, action, file, hashlib.sha256(file.read_bytes()).hexdigest())


def _range(file: Path, said: Mapping[str, Any], key: str, dim: int) -> Range:
    rows = said.get(key)
    if not isinstance(rows, dict):
        raise BadRequest(f"{file} has no {key!r}; it has {', '.join(said) or 'nothing'}")
    low, high = (_row(file, rows, key, name, dim) for name in ("q01", "q99"))
    if len(low) != len(high):
        raise BadRequest(f"{file}: {key}.q01 holds {len(low)} numbers and {key}.q99 {len(high)}; both need one per dimension")
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        if a > b:
            raise BadRequest(f"{file}: {key}.q01[{i}] is {a}, above q99's {b}; fetch the file again")
        if not math.isfinite(b - a):
            raise BadRequest(f"{file}: {key} runs from {a} to {b} in dimension {i}, which no number holds; fetch the file again")
    return Range(np.array(low), np.array(high))


def _row(file: Path, rows: Mapping[str, Any], key: str, name: str, dim: int) -> Sequence[float]:
    values = rows.get(name)
    if not isinstance(values, list):
        raise BadRequest(f"{file}: {key}.{name} is {values!r}; pi0.5 is normalised by quantiles, so fetch statistics that have them")
    if len(values) < dim:
        raise BadRequest(f"{file}: {key}.{name} holds {len(values)} numbers, the robot has {dim}; these are another robot's statistics")
    for i, value in enumerate(values):
        if not _finite(value):
            raise BadRequest(f"{file}: {key}.{name}[{i}] is {repr(value)[:40]}, no finite number; fetch the file again")
    return [float(value) for value in values]


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # JSON's whole numbers have no limit


assert all(len(c.cameras) <= VIEWS for c in CONFIGURATIONS.values())
