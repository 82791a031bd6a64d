"""What a pi0.5 checkpoint is: its sizes, its 812 tensors, and the two files that may stand beside them. W wide, D a head's width."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vla_eval.engines.weights import Checkpoint, read_json
from vla_eval.types import BadRequest

PREFIXES = ("model.",)  # LeRobot's own saves carry it, openpi's files do not
PALIGEMMA = "paligemma_with_expert.paligemma"
VISION = f"{PALIGEMMA}.model.vision_tower.vision_model"
PROJECTOR = f"{PALIGEMMA}.model.multi_modal_projector.linear"
PREFIX = f"{PALIGEMMA}.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
HEAD = f"{PALIGEMMA}.lm_head.weight"  # the token table: tied, and usually stored under this name alone
EMBEDDING = f"{PREFIX}.embed_tokens.weight"
DEAD_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"  # the expert predicts velocities, no tokens
VIEWS = 3  # picture slots of the model

_VARIANTS = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
_TEST_DATA = ("note", "tokenizer_pieces", "newline_id")  # of a geometry file: they describe a tokenizer, and no network

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vision:
    """SigLIP: every patch a token."""

    hidden: int
    intermediate: int
    heads: int
    layers: int
    image: int  # pixels, both ways
    patch: int
    tokens_per_view: int
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class Tower:
    """One of the two Gemmas."""

    width: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a checkpoint does not state and code must declare: the sizes behind the variant names."""

    vision: Vision
    prefix: Tower
    expert: Tower
    table_rows: int
    rms_norm_eps: float
    rope_theta: float
    time_min_period: float
    time_max_period: float

    @property
    def sites(self) -> int:
        """Places that the time modulates: two in each layer, and the final norm."""
        return 2 * self.expert.layers + 1


RELEASED = Geometry(
    Vision(hidden=1152, intermediate=4304, heads=16, layers=27, image=224, patch=14, tokens_per_view=256, layer_norm_eps=1e-6),
    prefix=Tower(width=2048, layers=18, mlp=16384, heads=8, kv_heads=1, head_dim=256),
    expert=Tower(width=1024, layers=18, mlp=4096, heads=8, kv_heads=1, head_dim=256),
    table_rows=257152, rms_norm_eps=1e-6, rope_theta=1e4, time_min_period=4e-3, time_max_period=4.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Features:
    """The robot that a LeRobot config describes."""

    state: int
    action: int
    views: int


@dataclass(frozen=True, slots=True)
class Said:
    """What config.json says of the model; nothing robot-facing is taken from it, only compared."""

    file: Path
    horizon: int | None = None  # of the policy: LeRobot's n_action_steps or openpi's action_horizon
    features: Features | None = None


def read_geometry(path: Path) -> Geometry:
    """Another geometry than the released one, from a JSON file with `vision`, `prefix` and `expert`. Raises BadRequest."""
    said = read_json(path)
    try:
        return geometry_from({name: value for name, value in said.items() if name not in _TEST_DATA})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequest(
            f"{path}: no geometry ({type(error).__name__}: {error}); it needs vision, prefix, expert and table_rows"
        ) from error


def geometry_from(said: Mapping[str, Any]) -> Geometry:
    """The geometry that plain JSON declares. A field too many or too few raises TypeError, numbers that do not fit ValueError, named."""
    rest, prefix = dict(said), dict(said["prefix"])
    vision, expert = Vision(**rest.pop("vision")), Tower(**rest.pop("expert"))
    rest.pop("prefix")
    numbers = {name: prefix.pop(name) for name in ("rms_norm_eps", "rope_theta")}
    geometry = Geometry(vision, Tower(**prefix), expert, **numbers, **rest)
    t = geometry.prefix
    for wrong, what in (
        (vision.hidden % vision.heads != 0, "vision.heads must divide vision.hidden"),
        (
            vision.image % vision.patch != 0 or vision.tokens_per_view != (vision.image // vision.patch) ** 2,
            "vision.tokens_per_view must be the patches of a picture",
        ),
        (
            (t.layers, t.heads, t.kv_heads, t.head_dim) != (expert.layers, expert.heads, expert.kv_heads, expert.head_dim),
            "prefix and expert must have the same layers, heads, kv_heads and head_dim: one attends to the other's keys",
        ),
        (t.kv_heads != 1, "kv_heads must be 1"),
        (t.head_dim % 2 != 0 or expert.width % 2 != 0, "head_dim and expert.width must be even"),
    ):
        if wrong:
            raise ValueError(what)
    return geometry


def plain(g: Geometry) -> dict[str, Any]:
    """The geometry as `geometry_from` reads it."""
    said = asdict(g)
    said["prefix"] |= {name: said.pop(name) for name in ("rms_norm_eps", "rope_theta")}
    return said


def read_config(checkpoint: Path, g: Geometry, width: int) -> Said:
    """openpi's or LeRobot's config.json, if there is one: held against geometry and action width. Raises BadRequest, in one sentence."""
    file = checkpoint / "config.json"
    if not file.exists():
        return Said(file)  # openpi's trainer writes none
    config = read_json(file)
    if not isinstance(config, dict):
        raise BadRequest(f"{file}: holds no table; fetch the file again")
    if config.get("type", "pi05") != "pi05":
        raise BadRequest(f"{file}: type is {config['type']!r}, not 'pi05'; --model must name what the checkpoint is of")
    for name, variant in _VARIANTS.items():
        if config.get(name) != variant:
            raise BadRequest(f"{file}: {name} is {config.get(name, 'absent')!r}; only {variant!r} is built")
    for name in ("max_action_dim", "action_dim"):
        if name in config and config[name] != width:
            raise BadRequest(f"{file}: {name} is {config[name]!r}, the weights have {width}; two checkpoints seem to be mixed")
    if not {"max_action_dim", "action_dim"} & set(config):
        raise BadRequest(f"{file}: neither action_dim (openpi) nor max_action_dim (LeRobot) is there; fetch the file again")
    side = [g.vision.image] * 2
    if config.get("image_resolution", side) != side:
        raise BadRequest(f"{file}: image_resolution is {config['image_resolution']!r}; only {side} is built")
    return Said(file, _horizon(file, config), _features(file, config))


def _horizon(file: Path, config: Mapping[str, Any]) -> int | None:
    """LeRobot's n_action_steps or openpi's action_horizon; never chunk_size, which is another number."""
    found = {name: config[name] for name in ("n_action_steps", "action_horizon") if config.get(name) is not None}
    for name, horizon in found.items():
        if not isinstance(horizon, int) or isinstance(horizon, bool) or horizon < 1:
            raise BadRequest(f"{file}: {name} is {horizon!r}, no whole number from 1; fetch the file again")
    if len(set(found.values())) > 1:
        raise BadRequest(f"{file}: n_action_steps is {found['n_action_steps']}, action_horizon {found['action_horizon']}; which is it?")
    return next(iter(found.values()), None)


def check_architecture(checkpoint: Checkpoint, g: Geometry = RELEASED) -> int:
    """The padded action width of a checkpoint whose tensors are pi0.5's, with exactly this geometry's shapes.

    Decided by the weights: pi0.5 has a time MLP and adaRMS norms in its expert, pi0 a state projection. Raises BadRequest for pi0, for a
    mixture of both, for tensors that are missing or of another shape; tensors that nobody knows are warned of.
    """
    held = checkpoint.tensors
    marks = {
        "time_mlp_in.weight": "time_mlp_in.weight" in held,
        "adaRMS norms in the expert": f"{EXPERT}.layers.0.input_layernorm.dense.weight" in held,
    }
    plain_norm = f"{EXPERT}.layers.0.input_layernorm.weight"
    pi0 = [name for name in ("state_proj.weight", "action_time_mlp_in.weight", plain_norm) if name in held]
    if any(marks.values()) and (pi0 or not all(marks.values())):
        has = [*(name for name, there in marks.items() if there), *pi0]
        lacks = "".join(f", but not {name}" for name, there in marks.items() if not there)
        raise BadRequest(f"{checkpoint.path}: the weights have {' and '.join(has)}{lacks}; pi0 and pi0.5 are mixed here, fetch it again")
    if pi0:
        raise BadRequest(f"{checkpoint.path}: a pi0 checkpoint ({pi0[0]}), not pi0.5; only pi0.5 is built")
    if not any(marks.values()):
        raise BadRequest(f"{checkpoint.path}: not a pi0.5 checkpoint, it has no 'time_mlp_in.weight'; --model must name what it is")
    projection = held.get("action_in_proj.weight")
    width = projection.shape[1] if projection is not None and len(projection.shape) == 2 else 0
    wanted = tensor_shapes(g, width or 32)
    optional = {HEAD, EMBEDDING, DEAD_HEAD, *dead_names(g)}
    for name, shape in (wanted | {EMBEDDING: wanted[HEAD]}).items():
        if name in held and held[name].shape != shape:
            raise BadRequest(f"{held[name].file}: {name!r} has shape {list(held[name].shape)}, {_said(g, str(list(shape)))}")
    missing = [name for name in wanted if name not in held and name not in optional]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadRequest(f"{checkpoint.path}: no tensor {', '.join(missing[:3])}{more}; the checkpoint is incomplete, fetch it again")
    strange = unknown(checkpoint, g)
    for root, layers in ((f"{VISION}.encoder", g.vision.layers), (PREFIX, g.prefix.layers), (EXPERT, g.expert.layers)):
        for name in strange:
            layer = re.match(rf"{re.escape(root)}\.layers\.(\d+)\.", name)
            if layer and int(layer[1]) >= layers:
                raise BadRequest(f"{checkpoint.path}: {name!r} is of a deeper network, {_said(g, f'{layers} layers')}")
    if strange:
        _log.warning("%s: %d tensors are none of pi0.5's and are not used: %s", checkpoint.path, len(strange), ", ".join(strange[:3]))
    return width


def _said(g: Geometry, what: str) -> str:
    if g == RELEASED:
        return f"the released model has {what}; declare this checkpoint's sizes with --geometry FILE"
    return f"--geometry says {what}; is it this checkpoint's?"


def tensor_shapes(g: Geometry, action_dim: int = 32) -> dict[str, tuple[int, ...]]:
    """Every stored tensor of such a checkpoint by its bare name, with its shape; the token table under its usual name, the head's."""
    v, p, e = g.vision, g.prefix, g.expert
    shapes: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, out: int, into: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (width,), (width,)

    shapes[f"{VISION}.embeddings.patch_embedding.weight"] = (v.hidden, 3, v.patch, v.patch)
    shapes[f"{VISION}.embeddings.patch_embedding.bias"] = (v.hidden,)
    shapes[f"{VISION}.embeddings.position_embedding.weight"] = (v.tokens_per_view, v.hidden)
    for i in range(v.layers):
        layer = f"{VISION}.encoder.layers.{i}"
        norm(f"{layer}.layer_norm1", v.hidden)
        norm(f"{layer}.layer_norm2", v.hidden)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            matrix(f"{layer}.self_attn.{name}", v.hidden, v.hidden)
        matrix(f"{layer}.mlp.fc1", v.intermediate, v.hidden)
        matrix(f"{layer}.mlp.fc2", v.hidden, v.intermediate)
    norm(f"{VISION}.post_layernorm", v.hidden)
    matrix(PROJECTOR, p.width, v.hidden)
    shapes[HEAD] = (g.table_rows, p.width)

    def gemma(root: str, t: Tower) -> None:
        for i in range(t.layers):
            layer = f"{root}.layers.{i}"
            matrix(f"{layer}.self_attn.q_proj", t.heads * t.head_dim, t.width, bias=False)
            matrix(f"{layer}.self_attn.k_proj", t.kv_heads * t.head_dim, t.width, bias=False)
            matrix(f"{layer}.self_attn.v_proj", t.kv_heads * t.head_dim, t.width, bias=False)
            matrix(f"{layer}.self_attn.o_proj", t.width, t.heads * t.head_dim, bias=False)
            matrix(f"{layer}.mlp.gate_proj", t.mlp, t.width, bias=False)
            matrix(f"{layer}.mlp.up_proj", t.mlp, t.width, bias=False)
            matrix(f"{layer}.mlp.down_proj", t.width, t.mlp, bias=False)

    gemma(PREFIX, p)
    gemma(EXPERT, e)
    for i in range(p.layers):
        shapes[f"{PREFIX}.layers.{i}.input_layernorm.weight"] = (p.width,)
        shapes[f"{PREFIX}.layers.{i}.post_attention_layernorm.weight"] = (p.width,)
    shapes[f"{PREFIX}.norm.weight"] = (p.width,)
    for site in site_names(g):
        matrix(f"{EXPERT}.{site}.dense", 3 * e.width, e.width)
    shapes[DEAD_HEAD] = (g.table_rows, e.width)
    matrix("action_in_proj", e.width, action_dim)
    matrix("action_out_proj", action_dim, e.width)
    matrix("time_mlp_in", e.width, e.width)
    matrix("time_mlp_out", e.width, e.width)
    return shapes


def site_names(g: Geometry) -> list[str]:
    """The expert's norms in the order of the modulation's rows."""
    layers = range(g.expert.layers)
    return [*(f"layers.{i}.{name}" for i in layers for name in ("input_layernorm", "post_attention_layernorm")), "norm"]


def dead_names(g: Geometry) -> list[str]:
    """The prefix tower behind its last keys and values: nothing reads what it would compute."""
    last = f"{PREFIX}.layers.{g.prefix.layers - 1}"
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
    return [*(f"{last}.{part}.weight" for part in parts), f"{PREFIX}.norm.weight"]


def unknown(checkpoint: Checkpoint, g: Geometry) -> list[str]:
    """Stored tensors that pi0.5 does not have."""
    known = {*tensor_shapes(g), EMBEDDING}
    return sorted((name for name in checkpoint.tensors if name not in known), key=_by_number)


def not_needed(checkpoint: Checkpoint, g: Geometry) -> list[str]:
    """Stored tensors that no graph reads: both names of the token table (a file of its own), the dead head, the dead tail, unknown ones."""
    return [HEAD, EMBEDDING, DEAD_HEAD, *dead_names(g), *unknown(checkpoint, g)]


def _features(file: Path, config: Mapping[str, Any]) -> Features | None:
    """LeRobot's feature table, if it is there and whole."""
    inputs, outputs = config.get("input_features"), config.get("output_features")
    if not inputs or not outputs:
        return None
    try:
        kinds = [(feature["type"], feature["shape"]) for feature in inputs.values()]
        (state,) = [int(shape[0]) for kind, shape in kinds if kind == "STATE"]
        (action,) = [int(feature["shape"][0]) for feature in outputs.values() if feature["type"] == "ACTION"]
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        raise BadRequest(f"{file}: input_features and output_features are not whole ({error}); fetch the file again") from error
    return Features(state, action, sum(kind == "VISUAL" for kind, _ in kinds))


def _by_number(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
