"""Pictures, prompts and numbers as pi0.5 sees them, and back. V views, S prefix tokens, T prompt tokens, H horizon, N numbers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_eval.images import fit_with_border
from vla_eval.types import BadRequest, Image, InvalidObservation, Vector

from ..sight import Pictures, Reading, bordered
from .contracts import BINS, MARKS, PROMPT_TOKENS, Range

TOKENIZER = "paligemma_tokenizer.model"
TOKENIZER_NAMES = (TOKENIZER, "tokenizer.model")  # openpi's and the model hub's name for the same file
TOKENIZER_PLACES = tuple(f"{folder}{name}" for folder in ("", "text_tokenizer/") for name in TOKENIZER_NAMES)  # in a checkpoint
_EPSILON = 1e-6  # part of openpi's formula, not a guard: with equal quantiles it decides the result
_LIMIT = 64 << 20  # bytes of a tokenizer file; PaliGemma's has 4 MB
_EDGES = np.linspace(-1, 1, BINS + 1)[:-1]

_log = logging.getLogger(__name__)


class Tokens:
    """PaliGemma's SentencePiece model: prompts to token ids."""

    def __init__(self, file: Path) -> None:
        """Raises BadRequest for a file that is missing or is no SentencePiece model with a beginning-of-sequence piece."""
        import sentencepiece

        if not file.is_file():
            raise BadRequest(f"{file} is no file; PaliGemma's SentencePiece model is wanted; name it with --tokenizer FILE")
        if file.stat().st_size > _LIMIT:
            raise BadRequest(f"{file}: {file.stat().st_size} bytes are too many for a tokenizer")
        content = file.read_bytes()
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise BadRequest(f"{file}: no SentencePiece model; fetch PaliGemma's tokenizer.model again") from error
        if self._pieces.bos_id() < 0:
            raise BadRequest(f"{file}: has no beginning-of-sequence piece, so it is not PaliGemma's; fetch that one")
        self.file = file
        self.size: int = self._pieces.vocab_size()
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._line = lru_cache(maxsize=256)(self._of_line)  # a task has one instruction

    def ids(self, prompt: str, state: Vector | None = None) -> NDArray[np.int64]:
        """[T]: the cleaned text and a newline; with a normalised state [N], which is then written into the prompt, the longer form.

        Longer than 200 tokens: cut as the reference does, with a warning, where that loses words only. Raises InvalidObservation where
        it would lose the action marker.
        """
        text = clean(prompt)
        if state is None:
            ids = self._line(text)
            if len(ids) > PROMPT_TOKENS:
                _log.warning("a prompt of %d tokens is cut to %d, as in training: %r", len(ids), PROMPT_TOKENS, text[:60])
        else:
            written = " ".join(str(number) for number in bins(state))
            ids = self._encoded(f"Task: {text}, State: {written};\nAction: ", bos=True)
            if len(ids) > PROMPT_TOKENS:
                raise InvalidObservation(
                    f"the prompt is {len(ids)} tokens long; beyond {PROMPT_TOKENS} it loses its action marker: shorten the instruction"
                )
        return np.array(ids[:PROMPT_TOKENS], np.int64)

    def _of_line(self, text: str) -> list[int]:
        return [*self._encoded(text, bos=True), *self._encoded("\n", bos=False)]

    def _encoded(self, text: str, *, bos: bool) -> list[int]:
        encoded: list[int] = self._pieces.encode(text, add_bos=bos, add_eos=False)
        return encoded

    def about(self) -> dict[str, Any]:
        """What policy.json says of it."""
        return {"sentencepiece_sha256": self.sha256, "pieces": self.size, **MARKS}


def clean(prompt: str) -> str:
    """The text without blanks around it; underscores and newlines become blanks. Case and punctuation stay."""
    return prompt.strip().replace("_", " ").replace("\n", " ")


def bins(state: Vector) -> list[int]:
    """Normalised numbers as their bins: 0 … 255 over [-1, 1); −1 below, 255 at 1.0 and above."""
    return [int(number) for number in np.digitize(state, bins=_EDGES) - 1]


def normalise(x: Vector, stats: Range) -> NDArray[np.float64]:
    """(x − q01) / (q99 − q01 + 1e-6) · 2 − 1 over the last axis; statistics beyond its width are not looked at, nothing is clamped."""
    low, high = stats.q01[: x.shape[-1]], stats.q99[: x.shape[-1]]
    scaled: NDArray[np.float64] = (x - low) / (high - low + _EPSILON) * 2.0 - 1.0
    return scaled


def unnormalise(x: Vector, stats: Range) -> NDArray[np.float64]:
    """The inverse of `normalise`; numbers beyond the statistics pass through."""
    n = min(x.shape[-1], len(stats.q01))
    low, high = stats.q01[:n], stats.q99[:n]
    back = (x[..., :n].astype(np.float64) + 1.0) / 2.0 * (high - low + _EPSILON) + low
    return np.concatenate([back, x[..., n:].astype(np.float64)], axis=-1)


def picture(value: Vector) -> Image:
    """[H, W, 3] uint8 from a robot's picture: channels may come first, and floats in [0, 1] are cut, not rounded, to 0 … 255."""
    if np.issubdtype(value.dtype, np.floating):
        value = (255 * value).astype(np.uint8)
    return np.ascontiguousarray(np.moveaxis(value, 0, -1) if value.shape[0] == 3 else value)


def pixels(pictures: Sequence[Image], side: int) -> NDArray[np.float32]:
    """[V, 3, side, side] in [−1, 1]: resized with padding, whose black becomes −1."""
    seen = np.stack([fit_with_border(one, side, side) for one in pictures])
    return np.ascontiguousarray(_numbers(seen).transpose(0, 3, 1, 2))


def unpacked(pictures: Sequence[Image], side: int) -> Pictures:
    """The pictures as a card resizes and packs them: of any one size that its kernel fits as we do here, else fitted."""
    sizes = {picture.shape[:2] for picture in pictures}
    if len(sizes) == 1 and (sizes == {(side, side)} or bordered(*sizes, side) is not None):
        return Pictures(tuple(pictures))
    return Pictures(tuple(fit_with_border(picture, side, side) for picture in pictures))


@lru_cache(maxsize=4)
def reading(side: int) -> Reading:
    """`pixels` as a card makes them, of pictures that fit already."""
    order = np.arange(side * side * 3, dtype=np.int32).reshape(side, side, 3).transpose(2, 0, 1)
    return Reading((side, side), np.ascontiguousarray(order).ravel(), _numbers(np.arange(256, dtype=np.uint8)))


def _numbers(seen: NDArray[np.uint8]) -> NDArray[np.float32]:
    return seen.astype(np.float32) / np.float32(255) * 2 - 1


def rotary(first: int, count: int, head_dim: int, theta: float) -> NDArray[np.float32]:
    """[count, head_dim] of the positions first, first + 1, …: half cosines, half sines. In float32 throughout, as the reference's are."""
    frequency = (1.0 / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    angle = np.arange(first, first + count, dtype=np.float32)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def schedule(steps: int) -> NDArray[np.float32]:
    """[steps] times from 1 towards 0, accumulated in float32 as the reference accumulates them."""
    times, t, dt = np.empty(steps, np.float32), np.float32(1.0), np.float32(-1.0 / steps)
    for step in range(steps):
        times[step] = t
        t = np.float32(t + dt)
    return times
