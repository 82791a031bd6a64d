"""A GR00T N1.7 checkpoint of random numbers in the real layout: for tests, and for timing engines where no real one is at hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from vla_eval.engines.synth import Spread, write_checkpoint

from .configuration import EMBEDDING, HEAD, RELEASED, Architecture, Geometry, Text, Vision, tensor_shapes

SLOT = 7  # of the embodiment that the synthetic processor files describe; a real checkpoint has another

FULL = Architecture(
    RELEASED, embodiments=32, state_dim=132, action_dim=132, horizon=40, positions=1024, hidden=1024,
    dit_layers=32, dit_heads=32, dit_head_dim=48, vl_layers=4, vl_heads=32, vl_head_dim=64, text_every=2, buckets=1000,
)  # fmt: skip
_TINY = Geometry(
    Vision(
        hidden=32, intermediate=64, heads=2, depth=4, deepstack_after_blocks=(0, 1, 2), patch=16, temporal_patch=2, merge=2,
        num_positions=2304, out_hidden=64, rope_theta=1e4, layer_norm_eps=1e-6,
    ),
    Text(
        hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, layers_kept=3, mrope_section=(4, 2, 2), mrope_interleaved=True,
        rope_theta=5e6, rms_norm_eps=1e-6, vocab_rows=512,
    ),
    {"image_pad": 508, "video_pad": 509, "vision_start": 506, "vision_end": 507, "im_start": 504, "im_end": 505, "pad": 503},
)  # fmt: skip
TINY = replace(
    FULL, geometry=_TINY, hidden=24, dit_layers=4, dit_heads=2, dit_head_dim=16, vl_layers=1, vl_heads=4, vl_head_dim=16
)  # fmt: skip

_STATE = {  # q01 and q99 of the real robot, roughly
    "x": [(-0.39, 0.15)], "y": [(-0.28, 0.33)], "z": [(0.45, 1.26)], "roll": [(1.88, 3.3)], "pitch": [(-2.89, 2.75)],
    "yaw": [(-1.16, 0.69)], "gripper": [(0.002, 0.04), (-0.04, -0.002)],
}  # fmt: skip
_ACTION = {
    "x": [(-0.64, 0.77)], "y": [(-0.77, 0.85)], "z": [(-0.76, 0.94)], "roll": [(-0.1, 0.14)], "pitch": [(-0.15, 0.16)],
    "yaw": [(-0.27, 0.33)], "gripper": [(0.0, 1.0)],
}  # fmt: skip
_SENTENCES = (
    "put both the alphabet soup and the tomato sauce in the basket", "turn on the stove and put the moka pot on it",
    "put the black bowl in the bottom drawer of the cabinet and close it", "put the white mug on the left plate",
    "pick up the book and place it in the back compartment of the caddy", "put the yellow and white mug in the microwave",
    "pick up the black bowl next to the ramekin and place it on the plate", "put the wine bottle on top of the cabinet",
    "open the middle drawer of the cabinet", "push the plate to the front of the stove", "put the cream cheese in the bowl",
    "pick up the butter and place it in the basket", "put the chocolate pudding to the right of the plate", "user",
)  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


def synth(out: Path, *, size: Literal["tiny", "full"] = "tiny", dtype: Literal["bf16", "fp16", "fp32"] = "bf16", seed: int = 0) -> Path:
    """Write a GR00T N1.7 checkpoint of random numbers: every name and shape of the released one, or a tiny one of the same layout.

    Export it with --embodiment libero_sim; a tiny one also with --geometry, the file of that name in the folder.

    Args:
        out: The folder to write; it must be new or empty.
        size: full has the released model's shapes (6.9 GB in bf16); tiny runs in a second on a CPU.
        dtype: Of the stored numbers.
        seed: Of the numbers.
    """
    a = FULL if size == "full" else TINY
    shapes = tensor_shapes(a)
    shapes[HEAD] = shapes[EMBEDDING]
    # A tiny network is enlarged, so that attention is peaked and every branch counts; the full one would amplify rounding.
    gain = 1.0 if size == "tiny" else 0.6
    write_checkpoint(out, shapes, lambda name, shape: _spread(name, shape, gain), dtype=dtype, seed=seed, tied={HEAD: EMBEDDING})
    for name, said in (
        ("config.json", _config(a, dtype)), ("processor_config.json", _processor(a)), ("statistics.json", _statistics()),
        ("embodiment_id.json", {"libero_sim": SLOT, "new_embodiment": 10}),
    ):  # fmt: skip
        _write(out / name, said)
    if size == "tiny":
        _write(out / "geometry.json", asdict(a.geometry))
    _write_tokenizer(out / "tokenizer", a.geometry)
    return out


def _spread(name: str, shape: Sequence[int], gain: float) -> Spread:
    if re.search(r"(norm\d?|layernorm|vlln)\.weight$", name):
        factor = 1.5 if "q_norm" in name or "k_norm" in name else 1.0
        return Spread(factor, 0.3 * factor)
    if len(shape) == 1 or name.endswith(".b"):
        return Spread(0.0, 0.2)
    if name in (EMBEDDING, HEAD) or "pos" in name.rsplit(".", 2)[-2]:
        return Spread(0.0, 1.0)
    fan_in = shape[1] if name.endswith(".W") else math.prod(shape[1:])
    if re.search(r"(qkv|q_proj|k_proj|to_q|to_k)\.weight$", name):
        gain *= 1.5
    elif re.search(r"(linear_fc1|net\.0\.proj)\.weight$", name):
        gain *= 2.0  # far enough into the GELU to tell one kind from another
    else:
        gain *= 1.15
    return Spread(0.0, gain / math.sqrt(fan_in))


def _config(a: Architecture, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Gr00tN1d7"], "model_type": "Gr00tN1d7", "dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(dtype, "float32"),
        "model_name": "nvidia/Cosmos-Reason2-2B", "backbone_model_type": "qwen", "backbone_embedding_dim": a.text.hidden,
        "select_layer": a.text.layers_kept, "hidden_size": a.hidden, "input_embedding_dim": a.width, "max_state_dim": a.state_dim,
        "max_action_dim": a.action_dim, "action_horizon": a.horizon, "num_inference_timesteps": 4, "num_timestep_buckets": a.buckets,
        "max_num_embodiments": a.embodiments, "max_seq_len": a.positions, "state_history_length": 1, "use_vlln": True,
        "add_pos_embed": True, "use_alternate_vl_dit": True, "attend_text_every_n_blocks": a.text_every, "use_percentiles": True,
        "diffusion_model_cfg": {
            "num_layers": a.dit_layers, "num_attention_heads": a.dit_heads, "attention_head_dim": a.dit_head_dim, "output_dim": a.hidden,
            "norm_type": "ada_norm", "interleave_self_attention": True, "positional_embeddings": None,
        },
        "vl_self_attention_cfg": {
            "num_layers": a.vl_layers, "num_attention_heads": a.vl_heads, "attention_head_dim": a.vl_head_dim,
            "positional_embeddings": None,
        },
    }  # fmt: skip


def _processor(a: Architecture) -> dict[str, Any]:
    def modality(keys: Sequence[str], steps: int = 1) -> dict[str, Any]:
        plain = {"sin_cos_embedding_keys": None, "mean_std_embedding_keys": None, "action_configs": None}
        return {"delta_indices": list(range(steps)), "modality_keys": list(keys), **plain}

    modalities = {
        "video": modality(["image", "wrist_image"]), "state": modality([*_STATE]), "action": modality([*_ACTION], 16),
        "language": modality(["annotation.human.action.task_description"]),
    }  # fmt: skip
    kwargs = {
        "modality_configs": {"libero_sim": modalities}, "image_crop_size": [230, 230], "image_target_size": [256, 256],
        "shortest_image_edge": 256, "crop_fraction": 0.95, "use_albumentations": True, "letter_box_transform": False,
        "model_name": "nvidia/Cosmos-Reason2-2B", "model_type": "qwen", "formalize_language": True, "max_state_dim": a.state_dim,
        "max_action_dim": a.action_dim, "max_action_horizon": a.horizon, "use_percentiles": True, "use_mean_std": False,
        "clip_outliers": True, "apply_sincos_state_encoding": False, "use_relative_action": False, "exclude_state": False,
    }  # fmt: skip
    return {"processor_class": "Gr00tN1d7Processor", "processor_kwargs": kwargs}


def _statistics() -> dict[str, Any]:
    def numbers(bounds: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
        low, high = zip(*bounds, strict=True)
        middle, wide = [(a + b) / 2 for a, b in bounds], [b - a for a, b in bounds]
        return {
            "q01": list(low), "q99": list(high), "mean": middle, "std": [w / 4 for w in wide],
            "min": [a - w / 8 for a, w in zip(low, wide, strict=True)], "max": [b + w / 8 for b, w in zip(high, wide, strict=True)],
        }  # fmt: skip

    sides = {"state": _STATE, "action": _ACTION}
    return {"libero_sim": {side: {key: numbers(bounds) for key, bounds in groups.items()} for side, groups in sides.items()}}


def _write_tokenizer(folder: Path, geometry: Geometry) -> None:
    """A byte-level BPE of the same kind as the real one, learnt from a dozen instructions, with the geometry's own special ids."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.normalizers import NFC
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    learnt = Tokenizer(BPE())
    learnt.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    learnt.train_from_iterator(_SENTENCES, trainer)
    model = json.loads(learnt.to_str())["model"]
    special = {f"<|{name}|>": number for name, number in geometry.token_ids.items() if name != "pad"}
    special["<|endoftext|>"] = geometry.token_ids["pad"]
    made = Tokenizer(BPE(vocab={**model["vocab"], **special}, merges=[(a, b) for a, b in model["merges"]]))
    made.normalizer, made.pre_tokenizer, made.decoder = NFC(), ByteLevel(add_prefix_space=False), Decoder()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, said: Any) -> None:
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
