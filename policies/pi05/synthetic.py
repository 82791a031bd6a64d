"""A pi0.5 checkpoint of random numbers in the real layout: for tests, and for timing engines where no real one is at hand."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from vla_eval.engines.synth import Spread, write_checkpoint

from .configuration import EMBEDDING, HEAD, RELEASED, Geometry, Tower, Vision, plain, tensor_shapes
from .contracts import CONFIGURATIONS, STATISTICS
from .processor import TOKENIZER

ACTION_DIM = 32
TINY = Geometry(
    Vision(hidden=36, intermediate=44, heads=3, layers=2, image=224, patch=14, tokens_per_view=256, layer_norm_eps=1e-6),
    prefix=Tower(width=80, layers=2, mlp=72, heads=5, kv_heads=1, head_dim=16),
    expert=Tower(width=48, layers=2, mlp=56, heads=5, kv_heads=1, head_dim=16),
    table_rows=416, rms_norm_eps=1e-6, rope_theta=1e4, time_min_period=4e-3, time_max_period=4.0,
)  # fmt: skip
PIECES = 400
_LIBERO = {  # q01 and q99 of the real robot, roughly
    "state": [(-0.4, 0.14), (-0.27, 0.34), (0.04, 1.27), (1.51, 3.28), (-2.72, 2.41), (-1.08, 0.6), (0.002, 0.04), (-0.04, -0.002)],
    "actions": [(-0.71, 0.94), (-0.8, 0.87), (-0.94, 0.94), (-0.11, 0.13), (-0.16, 0.19), (-0.22, 0.34), (-1.0, 1.0)],
}
_SENTENCES = (
    "put both the alphabet soup and the tomato sauce in the basket", "turn on the stove and put the moka pot on it",
    "put the black bowl in the bottom drawer of the cabinet and close it", "put the white mug on the left plate",
    "pick up the book and place it in the back compartment of the caddy", "put the yellow and white mug in the microwave",
    "Task: open the middle drawer of the cabinet, State: 0 1 2 3 4 5 6 7 8 9 128 255 -1;", "Action: ",
)  # fmt: skip


def synth(
    out: Path,
    *,
    size: Literal["tiny", "full"] = "tiny",
    policy_config: Literal["pi05_libero", "pi05_droid", "pi05_aloha"] = "pi05_libero",
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    seed: int = 0,
) -> Path:
    """Write a pi0.5 checkpoint of random numbers: every name and shape of the released one, or a tiny one of the same layout.

    Export it with the same --policy-config; a tiny one also with --geometry, the file of that name in the folder.

    Args:
        out: The folder to write; it must be new or empty.
        size: full has the released model's shapes (7.2 GB in bf16); tiny runs in a second on a CPU.
        policy_config: Whose horizon and statistics.
        dtype: Of the stored numbers.
        seed: Of the numbers.
    """
    g, c = RELEASED if size == "full" else TINY, CONFIGURATIONS[policy_config]
    gain = 1.0 if size == "tiny" else 0.6  # a tiny network is enlarged, so that every branch counts; the full one would amplify rounding
    write_checkpoint(out, tensor_shapes(g, ACTION_DIM), lambda name, shape: _spread(name, shape, gain), dtype=dtype, seed=seed)
    config = {
        "action_dim": ACTION_DIM, "action_horizon": c.horizon, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m",
        "precision": "float32" if dtype == "fp32" else "bfloat16",
    }  # fmt: skip
    _write(out / "config.json", config)
    if size == "tiny":
        _write(out / "geometry.json", plain(g))
    _write(out / "assets" / c.asset_id / STATISTICS, {"norm_stats": _statistics(c.state_dim, c.action_dim)})
    (out / TOKENIZER).write_bytes(_tokenizer())
    return out


def _spread(name: str, shape: Sequence[int], gain: float) -> Spread:
    if name in (HEAD, EMBEDDING) or "position_embedding" in name:
        return Spread(0.0, 1.0)
    if ".dense." in name:
        return Spread(0.0, 0.4 if name.endswith("bias") else 1.1 * gain / math.sqrt(shape[1]))
    if "vision_tower" in name and "norm" in name:
        return Spread(1.0 if name.endswith("weight") else 0.0, 0.2)
    if len(shape) == 1:
        return Spread(0.0, 0.3 if name.endswith("weight") else 0.2)  # a Gemma norm's gain is 1 + weight
    return Spread(0.0, 1.15 * gain / math.sqrt(math.prod(shape[1:])))


def _statistics(state: int, actions: int) -> dict[str, Any]:
    found = {}
    for key, count in (("state", state), ("actions", actions)):
        known = _LIBERO[key]
        rows = [known[i] if count == len(known) else (-2.0, 2.0) for i in range(count)]
        found[key] = {
            "mean": [(a + b) / 2 for a, b in rows], "std": [(b - a) / 4 for a, b in rows],
            "q01": [a for a, _ in rows], "q99": [b for _, b in rows],
        }  # fmt: skip
    return found


def _tokenizer() -> bytes:
    """A byte-level SentencePiece model of PaliGemma's kind, learnt from a few instructions."""
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(_SENTENCES), model_writer=made, model_type="bpe", vocab_size=PIECES, byte_fallback=True,
        add_dummy_prefix=False, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, user_defined_symbols=["\n"], hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return made.getvalue()


def _write(path: Path, said: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
