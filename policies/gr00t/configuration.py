"""What GR00T N1.7 is made of: sizes declared, read from config.json, and held against the checkpoint's own tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vla_eval.engines.weights import Checkpoint, read_json
from vla_eval.types import BadRequest

PREFIXES = ("_groot_model.",)  # LeRobot puts this before every name
VISUAL = "backbone.model.model.visual"
TEXT = "backbone.model.model.language_model"
EMBEDDING, HEAD = f"{TEXT}.embed_tokens.weight", "backbone.model.lm_head.weight"
FREQUENCIES = 256  # width of the DiT's time embedding before its first layer
MOST = 1 << 31  # no length of a network reaches it

_SIGNATURE = (  # tensors that together only this architecture has
    f"{VISUAL}.deepstack_merger_list.0.norm.weight",
    f"{TEXT}.layers.0.self_attn.q_norm.weight",
    "action_head.action_encoder.W2.W",
    "action_head.model.transformer_blocks.0.norm1.linear.weight",
)


@dataclass(frozen=True, slots=True)
class Vision:
    """The Qwen3-VL vision tower."""

    hidden: int
    intermediate: int
    heads: int
    depth: int
    deepstack_after_blocks: tuple[int, ...]
    patch: int
    temporal_patch: int
    merge: int  # patches along each side of a merged token
    num_positions: int  # rows of the position table: a square
    out_hidden: int
    rope_theta: float
    layer_norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patch_values(self) -> int:
        """Numbers in one packed patch: channels, frames, rows, columns."""
        return 3 * self.temporal_patch * self.patch**2


@dataclass(frozen=True, slots=True)
class Text:
    """The Cosmos-Reason2 (Qwen3-VL) decoder, cut after `layers_kept`."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers_kept: int
    mrope_section: tuple[int, ...]  # frequencies that follow time, height, width
    mrope_interleaved: bool
    rope_theta: float
    rms_norm_eps: float
    vocab_rows: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a checkpoint does not state and code must declare."""

    vision: Vision
    text: Text
    token_ids: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything the graphs are drawn from. W wide inside the DiT."""

    geometry: Geometry
    embodiments: int  # slots of the per-embodiment weights
    state_dim: int
    action_dim: int
    horizon: int  # of the model; the robot's is shorter
    positions: int  # rows of the action position table
    hidden: int  # of encoder, decoder and the DiT's output
    dit_layers: int
    dit_heads: int
    dit_head_dim: int
    vl_layers: int
    vl_heads: int
    vl_head_dim: int
    text_every: int  # every so many cross-attention blocks look at the text, the others at the pictures
    buckets: int  # of time, over the whole flow

    @property
    def vision(self) -> Vision:
        return self.geometry.vision

    @property
    def text(self) -> Text:
        return self.geometry.text

    @property
    def width(self) -> int:
        return self.dit_heads * self.dit_head_dim

    @property
    def cross_blocks(self) -> range:
        """The DiT blocks that look at pictures and text; the others look at the actions."""
        return range(0, self.dit_layers, 2)


RELEASED = Geometry(
    Vision(
        hidden=1024, intermediate=4096, heads=16, depth=24, deepstack_after_blocks=(5, 11, 17), patch=16, temporal_patch=2, merge=2,
        num_positions=2304, out_hidden=2048, rope_theta=1e4, layer_norm_eps=1e-6,
    ),
    Text(
        hidden=2048, intermediate=6144, heads=16, kv_heads=8, head_dim=128, layers_kept=16, mrope_section=(24, 20, 20),
        mrope_interleaved=True, rope_theta=5e6, rms_norm_eps=1e-6, vocab_rows=151936,
    ),
    {"image_pad": 151655, "video_pad": 151656, "vision_start": 151652, "vision_end": 151653, "im_start": 151644, "im_end": 151645,
     "pad": 151643},
)  # fmt: skip


def read_geometry(path: Path) -> Geometry:
    """Another geometry than the released one, from a JSON file with `text`, `vision` and `token_ids`. Raises BadRequest."""
    said = read_json(path)
    try:
        return geometry_from(said)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"{path}: no geometry ({type(error).__name__}: {error}); it needs text, vision and token_ids") from error


def geometry_from(said: Mapping[str, Any]) -> Geometry:
    """The geometry that plain JSON declares. A field too many or too few raises TypeError, numbers that do not fit ValueError, named."""
    v, t = Vision(**_plain("vision", Vision, said["vision"])), Text(**_plain("text", Text, said["text"]))
    for wrong, what in (
        (t.mrope_interleaved is not True, "text.mrope_interleaved must be true: only that is built"),
        (len(t.mrope_section) != 3 or 2 * sum(t.mrope_section) != t.head_dim, "text.mrope_section must sum to half of head_dim"),
        (t.heads % t.kv_heads != 0, "text.kv_heads must divide heads"),
        (v.hidden % v.heads != 0 or v.head_dim % 4 != 0, "vision.heads must divide hidden into widths that are multiples of 4"),
        (v.out_hidden != t.hidden, "vision.out_hidden must be text.hidden"),
        (
            not all(i < v.depth for i in v.deepstack_after_blocks) or list(v.deepstack_after_blocks) != sorted({*v.deepstack_after_blocks}),
            "vision.deepstack_after_blocks must be blocks that exist, in ascending order",
        ),
        (math.isqrt(v.num_positions) ** 2 != v.num_positions, "vision.num_positions must be a square"),
        (len(v.deepstack_after_blocks) > t.layers_kept, "text.layers_kept must be no less than the DeepStack taps"),
    ):
        if wrong:
            raise ValueError(what)
    tokens = {str(name): number for name, number in said["token_ids"].items()}
    if "image_pad" not in tokens or not all(_whole(number, 0) for number in tokens.values()):
        raise ValueError("token_ids must be whole numbers from 0, image_pad among them")
    return Geometry(v, t, tokens)


def _plain(where: str, kind: type[Vision] | type[Text], said: Mapping[str, Any]) -> dict[str, Any]:
    """A part's fields, of the types that the dataclass declares: lengths are whole and positive, eps and theta finite."""
    kinds, found = get_type_hints(kind), dict(said)
    for name, value in said.items():
        declared = kinds.get(name)
        if declared is int and not _whole(value, 1):
            raise ValueError(f"{where}.{name} is {value!r}, wanted a whole number from 1")
        if declared is float and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST):
            raise ValueError(f"{where}.{name} is {value!r}, wanted a positive number")
        if declared == tuple[int, ...]:
            if not isinstance(value, list | tuple) or not all(_whole(n, 0) for n in value):
                raise ValueError(f"{where}.{name} is {value!r}, wanted a list of whole numbers")
            found[name] = tuple(value)
    return found


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < MOST


def read_architecture(checkpoint: Checkpoint, geometry: Geometry = RELEASED) -> Architecture:
    """What the checkpoint holds, decided by its tensors. Raises BadRequest, in one sentence, if it is not GR00T N1.7 of that geometry.

    `config.json` must say what shapes cannot; a field it lacks is never guessed.
    """
    missing = [name for name in _SIGNATURE if name not in checkpoint.tensors]
    if missing:
        raise BadRequest(f"{checkpoint.path}: not a GR00T N1.7 checkpoint, it has no {missing[0]!r}; --model must name what it is")
    file = checkpoint.path / "config.json"
    config = read_json(file)
    if not isinstance(config, dict):
        raise BadRequest(f"{file}: holds no table; fetch the file again")
    dit, vl = _table(file, config, "diffusion_model_cfg"), _table(file, config, "vl_self_attention_cfg")
    for where, table, name, wanted in (
        ("", config, "use_alternate_vl_dit", True), ("", config, "use_vlln", True), ("", config, "add_pos_embed", True),
        ("", config, "state_history_length", 1),
        ("diffusion_model_cfg.", dit, "interleave_self_attention", True), ("diffusion_model_cfg.", dit, "norm_type", "ada_norm"),
        ("diffusion_model_cfg.", dit, "positional_embeddings", None), ("vl_self_attention_cfg.", vl, "positional_embeddings", None),
    ):  # fmt: skip
        if name not in table or table[name] != wanted:
            raise BadRequest(f"{file}: {where}{name} is {table.get(name, 'absent')!r}; only {wanted!r} is built")
    architecture = Architecture(
        geometry=geometry,
        embodiments=_number(file, config, "max_num_embodiments"),
        state_dim=_number(file, config, "max_state_dim"),
        action_dim=_number(file, config, "max_action_dim"),
        horizon=_number(file, config, "action_horizon"),
        positions=_number(file, config, "max_seq_len"),
        hidden=_number(file, config, "hidden_size"),
        dit_layers=_number(file, dit, "num_layers", "diffusion_model_cfg."),
        dit_heads=_number(file, dit, "num_attention_heads", "diffusion_model_cfg."),
        dit_head_dim=_number(file, dit, "attention_head_dim", "diffusion_model_cfg."),
        vl_layers=_number(file, vl, "num_layers", "vl_self_attention_cfg."),
        vl_heads=_number(file, vl, "num_attention_heads", "vl_self_attention_cfg."),
        vl_head_dim=_number(file, vl, "attention_head_dim", "vl_self_attention_cfg."),
        text_every=_number(file, config, "attend_text_every_n_blocks"),
        buckets=_number(file, config, "num_timestep_buckets"),
    )
    for name, said, held in (
        ("select_layer", _number(file, config, "select_layer"), geometry.text.layers_kept),
        ("backbone_embedding_dim", _number(file, config, "backbone_embedding_dim"), geometry.text.hidden),
        ("input_embedding_dim", _number(file, config, "input_embedding_dim"), architecture.width),
        ("diffusion_model_cfg.output_dim", _number(file, dit, "output_dim"), architecture.hidden),
        ("vl_self_attention heads x attention_head_dim", architecture.vl_heads * architecture.vl_head_dim, geometry.text.hidden),
    ):
        if said != held:
            raise BadRequest(f"{file}: {name} is {said}, the geometry says {held}; `vla-eval export … --geometry FILE` declares another")
    _check_shapes(checkpoint, architecture)
    return architecture


def trained_steps(checkpoint: Path) -> int:
    """The denoise steps that the checkpoint itself takes. Raises BadRequest if it does not say."""
    file = checkpoint / "config.json"
    said = read_json(file)
    if not _whole(said.get("num_inference_timesteps"), 1):
        told = f"num_inference_timesteps is {said.get('num_inference_timesteps', 'absent')!r}"
        raise BadRequest(f"{file}: {told}, wanted a whole number from 1, which is never guessed; name --steps")
    return int(said["num_inference_timesteps"])


def tensor_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a checkpoint by name, with its shape; the tied head is left out."""
    v, t, w = a.vision, a.text, a.width
    merged = v.merge**2 * v.hidden
    shapes: dict[str, tuple[int, ...]] = {}

    def matrix(name: str, out: int, into: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str, width: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (width,)
        if bias:
            shapes[f"{name}.bias"] = (width,)

    def by_embodiment(name: str, into: int, out: int) -> None:
        shapes[f"{name}.W"], shapes[f"{name}.b"] = (a.embodiments, into, out), (a.embodiments, out)

    shapes[f"{VISUAL}.patch_embed.proj.weight"] = (v.hidden, 3, v.temporal_patch, v.patch, v.patch)
    shapes[f"{VISUAL}.patch_embed.proj.bias"] = (v.hidden,)
    shapes[f"{VISUAL}.pos_embed.weight"] = (v.num_positions, v.hidden)
    for i in range(v.depth):
        block = f"{VISUAL}.blocks.{i}"
        norm(f"{block}.norm1", v.hidden)
        norm(f"{block}.norm2", v.hidden)
        matrix(f"{block}.attn.qkv", 3 * v.hidden, v.hidden)
        matrix(f"{block}.attn.proj", v.hidden, v.hidden)
        matrix(f"{block}.mlp.linear_fc1", v.intermediate, v.hidden)
        matrix(f"{block}.mlp.linear_fc2", v.hidden, v.intermediate)
    mergers = {f"{VISUAL}.merger": v.hidden} | {f"{VISUAL}.deepstack_merger_list.{j}": merged for j in range(len(v.deepstack_after_blocks))}
    for merger, width in mergers.items():
        norm(f"{merger}.norm", width)
        matrix(f"{merger}.linear_fc1", merged, merged)
        matrix(f"{merger}.linear_fc2", v.out_hidden, merged)

    shapes[EMBEDDING] = (t.vocab_rows, t.hidden)
    for i in range(t.layers_kept):
        layer = f"{TEXT}.layers.{i}"
        matrix(f"{layer}.self_attn.q_proj", t.heads * t.head_dim, t.hidden, bias=False)
        matrix(f"{layer}.self_attn.k_proj", t.kv_heads * t.head_dim, t.hidden, bias=False)
        matrix(f"{layer}.self_attn.v_proj", t.kv_heads * t.head_dim, t.hidden, bias=False)
        matrix(f"{layer}.self_attn.o_proj", t.hidden, t.heads * t.head_dim, bias=False)
        norm(f"{layer}.self_attn.q_norm", t.head_dim, bias=False)
        norm(f"{layer}.self_attn.k_norm", t.head_dim, bias=False)
        matrix(f"{layer}.mlp.gate_proj", t.intermediate, t.hidden, bias=False)
        matrix(f"{layer}.mlp.up_proj", t.intermediate, t.hidden, bias=False)
        matrix(f"{layer}.mlp.down_proj", t.hidden, t.intermediate, bias=False)
        norm(f"{layer}.input_layernorm", t.hidden, bias=False)
        norm(f"{layer}.post_attention_layernorm", t.hidden, bias=False)
    norm(f"{TEXT}.norm", t.hidden, bias=False)

    norm("action_head.vlln", t.hidden)
    for i in range(a.vl_layers):
        block = f"action_head.vl_self_attention.transformer_blocks.{i}"
        for name in ("norm1", "norm3"):
            norm(f"{block}.{name}", t.hidden)
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            matrix(f"{block}.attn1.{name}", t.hidden, t.hidden)
        matrix(f"{block}.ff.net.0.proj", 4 * t.hidden, t.hidden)
        matrix(f"{block}.ff.net.2", t.hidden, 4 * t.hidden)
    by_embodiment("action_head.state_encoder.layer1", a.state_dim, a.hidden)
    by_embodiment("action_head.state_encoder.layer2", a.hidden, w)
    by_embodiment("action_head.action_encoder.W1", a.action_dim, w)
    by_embodiment("action_head.action_encoder.W2", 2 * w, w)
    by_embodiment("action_head.action_encoder.W3", w, w)
    by_embodiment("action_head.action_decoder.layer1", a.hidden, a.hidden)
    by_embodiment("action_head.action_decoder.layer2", a.hidden, a.action_dim)
    shapes["action_head.position_embedding.weight"] = (a.positions, w)
    matrix("action_head.model.timestep_encoder.timestep_embedder.linear_1", w, FREQUENCIES)
    matrix("action_head.model.timestep_encoder.timestep_embedder.linear_2", w, w)
    for i in range(a.dit_layers):
        block = f"action_head.model.transformer_blocks.{i}"
        matrix(f"{block}.norm1.linear", 2 * w, w)
        matrix(f"{block}.attn1.to_q", w, w)
        matrix(f"{block}.attn1.to_k", w, t.hidden if i in a.cross_blocks else w)
        matrix(f"{block}.attn1.to_v", w, t.hidden if i in a.cross_blocks else w)
        matrix(f"{block}.attn1.to_out.0", w, w)
        matrix(f"{block}.ff.net.0.proj", 4 * w, w)
        matrix(f"{block}.ff.net.2", w, 4 * w)
    matrix("action_head.model.proj_out_1", 2 * w, w)
    matrix("action_head.model.proj_out_2", a.hidden, w)
    return shapes


def not_needed(checkpoint: Checkpoint, a: Architecture) -> list[str]:
    """Stored tensors that the policy has no use for: the tied head, the final norm, text layers behind the last kept one."""
    kept = tuple(f"{TEXT}.layers.{i}." for i in range(a.text.layers_kept))
    unused = (HEAD, f"{TEXT}.norm.weight", EMBEDDING)
    return [name for name in checkpoint.tensors if name in unused or (name.startswith(f"{TEXT}.layers.") and not name.startswith(kept))]


def _check_shapes(checkpoint: Checkpoint, a: Architecture) -> None:
    held = checkpoint.tensors
    for name, layers in (("DiT", a.dit_layers), ("VL", a.vl_layers), ("vision", a.vision.depth), ("text", a.text.layers_kept)):
        if layers > len(held):
            raise BadRequest(f"{checkpoint.path}: {layers} {name} layers are declared, the checkpoint has {len(held)} tensors in all")
    wanted = tensor_shapes(a)
    for name, shape in wanted.items():
        found = held.get(name) or (held.get(HEAD) if name == EMBEDDING else None)
        if found is None and name != f"{TEXT}.norm.weight":
            raise BadRequest(
                f"{checkpoint.path}: no tensor {name!r}, which this architecture has; the checkpoint is another variant or incomplete"
            )
        if found is not None and found.shape != shape:
            raise BadRequest(f"{found.file}: {name!r} has shape {list(found.shape)}, the geometry says {list(shape)}; is --geometry right?")
    strange = sorted(set(held) - set(wanted) - set(not_needed(checkpoint, a)))
    if strange:
        raise BadRequest(
            f"{checkpoint.path}: {strange[0]!r} (1 of {len(strange)} such tensors) belongs to another variant, which is not built"
        )


def _number(file: Path, table: Mapping[str, Any], name: str, where: str = "") -> int:
    value = table.get(name)
    if not _whole(value, 1):
        raise BadRequest(f"{file}: {where}{name} is {table.get(name, 'absent')!r}, wanted a whole number from 1; it is never guessed")
    return int(value)  # type: ignore[arg-type]


def _table(file: Path, table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    if not isinstance(value, dict):
        raise BadRequest(f"{file}: {name} is {table.get(name, 'absent')!r}, wanted a table; it is never guessed")
    return value
