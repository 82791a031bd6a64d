"""Observation to engine inputs, engine outputs to actions. V views, P patches a view, S tokens, T steps, D numbers of a robot."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_eval.images import crop_centre, pad_to_square, stretch_antialiased, stretch_antialiased_float, stretch_area
from vla_eval.types import BadRequest, Image, InvalidObservation, Vector

from ..sight import Pictures as Unpacked
from ..sight import Reading, area
from .contract import FRAMES, LEAST_PIXELS, MERGE, MOST_PIXELS, PATCH, Contract, Group, Pictures, Prompt

VALUES = 3 * FRAMES * PATCH * PATCH  # numbers in a packed patch
_HALF = np.float32(127.5)  # x / 255 to (x - 0.5) / 0.5, in one step


@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of the network from which position tables are made."""

    text_head_dim: int
    text_theta: float
    mrope_section: tuple[int, int, int]  # frequencies that follow time, row, column
    vision_head_dim: int
    vision_theta: float
    positions: int  # rows of the learned table, a square
    image_token: int

    @classmethod
    def of(cls, geometry: Mapping[str, Any]) -> Layout:
        """From the backbone geometry that the bundle was built with."""
        text, vision = geometry["text"], geometry["vision"]
        sections = [int(n) for n in text["mrope_section"]]
        return cls(
            text_head_dim=int(text["head_dim"]),
            text_theta=float(text["rope_theta"]),
            mrope_section=(sections[0], sections[1], sections[2]),
            vision_head_dim=int(vision["hidden"]) // int(vision["heads"]),
            vision_theta=float(vision["rope_theta"]),
            positions=int(vision["num_positions"]),
            image_token=int(geometry["token_ids"]["image_pad"]),
        )


@dataclass(frozen=True, slots=True)
class VisionTables:
    """What the visual engine wants beside the patches, rows in the patches' order."""

    rotary: NDArray[np.float32]  # [V·P, head_dim / 2] angles, row then column
    cu_seqlens: NDArray[np.int32]  # [V + 1] where each view begins and the last one ends
    position_index: NDArray[np.int64]  # [4, V·P] rows of the learned table
    position_weight: NDArray[np.float32]  # [4, V·P] their bilinear weights


# --- pictures ---------------------------------------------------------------------------------------------------------------------


def see(picture: Image, how: Pictures) -> Image:
    """The evaluation transform: pad to a square, resize, cut out the middle, resize again; then Qwen's own limits of size."""
    height, width = _shown(how)
    resize = stretch_area if how.resize == "area" else stretch_antialiased_float
    return stretch_antialiased(resize(_cut(picture, how), height, width), *packed_size(height, width), how="bicubic")


def unpacked(pictures: Sequence[Image], how: Pictures) -> Unpacked:
    """The pictures as a card packs them: before the last stretch of `see` where its kernel does the same, else after it."""
    cut = [_cut(picture, how) for picture in pictures]
    shown, size = _shown(how), (cut[0].shape[0], cut[0].shape[1])
    if how.resize == "area" and shown == packed_size(*shown) and (size == shown or area(size, shown) is not None):
        return Unpacked(tuple(cut))
    return Unpacked(tuple(see(picture, how) for picture in pictures))


def _cut(picture: Image, how: Pictures) -> Image:
    """All of `see` up to the middle that is cut out, as a view."""
    picture = pad_to_square(picture)  # the reference always does, whatever letter_box_transform says
    height, width = _shown(how)
    resize = stretch_area if how.resize == "area" else stretch_antialiased_float
    cut = (int(height * how.crop), int(width * how.crop)) if isinstance(how.crop, float) else how.crop
    return crop_centre(resize(picture, height, width), max(1, cut[0]), max(1, cut[1]))


def _shown(how: Pictures) -> tuple[int, int]:
    """Height and width of what the checkpoint was trained to see."""
    return how.target if how.edge is None else (how.edge, how.edge)


@lru_cache(maxsize=64)
def packed_size(height: int, width: int) -> tuple[int, int]:
    """Height and width that Qwen's packing gives a picture: multiples of 32, between 65,536 and 16,777,216 pixels."""
    unit = PATCH * MERGE
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if tall * wide > MOST_PIXELS:
        shrink = math.sqrt(height * width / MOST_PIXELS)
        return max(unit, math.floor(height / shrink / unit) * unit), max(unit, math.floor(width / shrink / unit) * unit)
    if tall * wide < LEAST_PIXELS:
        grow = math.sqrt(LEAST_PIXELS / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return tall, wide


def seen_grid(how: Pictures) -> tuple[int, int]:
    """Rows and columns of patches that `see` and `pack` make of any picture."""
    height, width = packed_size(*_shown(how))
    return height // PATCH, width // PATCH


def pack(pictures: Sequence[Image], into: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """[V·P, 1536]: views one after another; merge blocks in raster order, 2×2 patches inside; per patch channel, frame, y, x.

    The pictures have one size, a multiple of 32; a still picture is both of its frames. `into` is written and returned, if given:
    3 MB of fresh memory cost more page faults than the arithmetic takes.
    """
    height, width = pictures[0].shape[:2]
    count = height // PATCH * (width // PATCH)
    packed = np.empty((len(pictures) * count, VALUES), np.float32) if into is None else into
    patches = packed.reshape(len(pictures), count, 3, FRAMES, PATCH * PATCH)
    for view, picture in zip(patches, pictures, strict=True):
        first = view[:, :, 0]
        np.subtract(_in_patches(picture), _HALF, out=first, dtype=np.float32)
        np.divide(first, _HALF, out=first)
        view[:, :, 1] = first
    return packed


@lru_cache(maxsize=4)
def reading(size: tuple[int, int]) -> Reading:
    """`pack` as a card does it, for pictures of that size."""
    which = _in_patches(np.arange(size[0] * size[1] * 3, dtype=np.int32).reshape(*size, 3))
    bytes_ = np.arange(256, dtype=np.float32)
    return Reading(size, np.repeat(which[:, :, None], FRAMES, axis=2).ravel(), (bytes_ - _HALF) / _HALF)


def _in_patches(picture: Vector) -> Vector:
    """[H, W, 3] -> [P, 3, 256]: merge blocks in raster order, 2×2 patches inside."""
    rows, columns = picture.shape[0] // (PATCH * MERGE), picture.shape[1] // (PATCH * MERGE)
    blocks = picture.reshape(rows, MERGE, PATCH, columns, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    patches: Vector = np.ascontiguousarray(blocks).reshape(-1, 3, PATCH * PATCH)
    return patches


@lru_cache(maxsize=16)
def vision_tables(layout: Layout, views: int, grid: tuple[int, int]) -> VisionTables:
    """Positions of the patches of `views` pictures of `grid` (rows, columns) patches. Read-only: every request shares them."""
    row, column = _merge_order(grid)
    # float32 throughout, as the reference computes them
    frequency = 1.0 / layout.vision_theta ** (
        np.arange(0, layout.vision_head_dim // 2, 2, dtype=np.float32) / (layout.vision_head_dim // 2)
    )
    rotary = np.concatenate([np.outer(row, frequency), np.outer(column, frequency)], axis=1, dtype=np.float32)
    index, weight = _interpolation(row, column, grid, math.isqrt(layout.positions))
    cu_seqlens = np.arange(views + 1, dtype=np.int32) * np.int32(row.size)
    tables = VisionTables(np.tile(rotary, (views, 1)), cu_seqlens, np.tile(index, (1, views)), np.tile(weight, (1, views)))
    for table in (tables.rotary, tables.cu_seqlens, tables.position_index, tables.position_weight):
        table.flags.writeable = False
    return tables


def _merge_order(grid: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch in the order of `pack`."""
    order = np.arange(grid[0] * grid[1]).reshape(grid[0] // MERGE, MERGE, grid[1] // MERGE, MERGE).transpose(0, 2, 1, 3).ravel()
    return order // grid[1], order % grid[1]


def _interpolation(
    row: NDArray[np.int64], column: NDArray[np.int64], grid: tuple[int, int], side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Bilinear: four rows of the learned side×side table and their weights, for patches spread evenly over it."""
    y = np.linspace(0, side - 1, grid[0], dtype=np.float32)[row]
    x = np.linspace(0, side - 1, grid[1], dtype=np.float32)[column]
    top, left = y.astype(np.int64), x.astype(np.int64)
    bottom, right = np.minimum(top + 1, side - 1), np.minimum(left + 1, side - 1)
    down, across = y - top.astype(np.float32), x - left.astype(np.float32)
    index = np.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right])
    weight = np.stack([(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across])
    return index, weight.astype(np.float32)


# --- text -------------------------------------------------------------------------------------------------------------------------


def formalize(instruction: str) -> str:
    """Lower case, without any character that is neither word character nor white space; underscores stay."""
    return re.sub(r"[^\w\s]", "", instruction.lower())


class Tokens:
    """Token ids of an instruction and its pictures, remembered: a task has one instruction."""

    def __init__(self, folder: Path, prompt: Prompt, per_picture: int) -> None:
        """Raises BadRequest for a folder without a readable tokenizer.json, or one that does not know the picture's token."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
        except Exception as error:  # the library raises bare Exception for any malformed file
            raise BadRequest(f"{file}: cannot be read as a tokenizer ({error}); export the checkpoint again") from error
        self._tokenizer.no_truncation()  # a file may carry both, as whoever saved it last used it
        self._tokenizer.no_padding()
        image = self._tokenizer.token_to_id(prompt.image_token)
        if image is None:
            raise BadRequest(f"{file} does not know {prompt.image_token}, which stands for a picture; use the tokenizer of Qwen3-VL")
        self.image_token: int = image
        self._prompt = prompt
        self._repeat = per_picture
        self.ids = lru_cache(maxsize=256)(self._ids)

    def id_of(self, token: str) -> int | None:
        """A token's id; None: the tokenizer does not know it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def _ids(self, instruction: str) -> NDArray[np.int64]:
        """[S] ids of the rendered turn, each picture's place repeated for its tokens; read-only."""
        text = formalize(instruction) if self._prompt.formalize else instruction
        rendered = self._prompt.before + text + self._prompt.after
        ids = np.asarray(self._tokenizer.encode(rendered, add_special_tokens=False).ids, np.int64)
        places, wanted = int(np.count_nonzero(ids == self.image_token)), self._prompt.before.count(self._prompt.image_token)
        if places != wanted:
            raise InvalidObservation(f"the instruction {instruction!r} itself contains {self._prompt.image_token}; remove it")
        ids = np.repeat(ids, np.where(ids == self.image_token, self._repeat, 1))
        ids.flags.writeable = False
        return ids


def positions(ids: NDArray[np.int64], image_token: int, grid: tuple[int, int]) -> NDArray[np.int64]:
    """[3, S] time, row and column of each token: text counts on; a picture stands at one time, its tokens on a raster.

    `grid` counts patches; tokens are merged two by two. The token after a picture continues past the picture's longer side.
    """
    rows, columns = grid[0] // MERGE, grid[1] // MERGE
    raster = np.stack([np.zeros(rows * columns, np.int64), *(axis.ravel() for axis in np.indices((rows, columns)))])
    found = np.empty((3, ids.size), np.int64)
    token, position = 0, 0
    while token < ids.size:
        if ids[token] == image_token:
            found[:, token : token + raster.shape[1]] = position + raster
            token, position = token + raster.shape[1], position + max(rows, columns)
        else:
            found[:, token] = position
            token, position = token + 1, position + 1
    return found


def prompt_rotary(layout: Layout, ids: NDArray[np.int64], grid: tuple[int, int]) -> NDArray[np.float32]:
    """`text_rotary` of a whole prompt, remembered: a task asks with one prompt. Read-only."""
    return _prompt_rotary(layout, ids.astype(np.int64, copy=False).tobytes(), grid)


@lru_cache(maxsize=256)
def _prompt_rotary(layout: Layout, ids: bytes, grid: tuple[int, int]) -> NDArray[np.float32]:
    table = text_rotary(layout, positions(np.frombuffer(ids, np.int64), layout.image_token, grid))
    table.flags.writeable = False
    return table


def text_rotary(layout: Layout, position: NDArray[np.int64]) -> NDArray[np.float32]:
    """[S, head_dim]: half cosines, half sines in token order. Frequencies take time, row, column in turn (interleaved mRoPE).

    Frequency i follows the row if i mod 3 = 1, the column if i mod 3 = 2, each within its section, and time otherwise.
    """
    half = layout.text_head_dim // 2
    frequency = (
        1.0 / np.float32(layout.text_theta) ** (np.arange(0, layout.text_head_dim, 2, dtype=np.float32) / layout.text_head_dim)
    ).astype(np.float32)
    axis = np.zeros(half, np.int64)
    for which in (1, 2):
        axis[which : 3 * layout.mrope_section[which] : 3] = which
    angle = position[axis].T.astype(np.float32) * frequency  # [S, half]
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


# --- the robot's numbers ----------------------------------------------------------------------------------------------------------


def encode_state(contract: Contract, state: Mapping[str, Vector]) -> NDArray[np.float32]:
    """[1, width]: every group [D] float32 in the model's terms, one after another, zeros to the end."""
    encoded = np.zeros((1, contract.state_width), np.float32)
    if contract.exclude_state:
        return encoded
    start = 0
    for parts, whole in _runs(contract.state):
        values = np.concatenate([state[group.key] for group in parts], axis=-1)
        encoded[0, start : start + whole.encoded] = encode(whole, values, clip=contract.clip_state)
        start += whole.encoded
    return encoded


@lru_cache(maxsize=16)
def _runs(groups: tuple[Group, ...]) -> tuple[tuple[tuple[Group, ...], Group], ...]:
    """Neighbours that are scaled alike, and one group with all their numbers: ten calls of numpy for a robot instead of ten a group."""
    runs = []
    # sines of all numbers before cosines of all would be another order
    for _, alike in itertools.groupby(groups, lambda group: (group.encoding, group.key if group.encoding == "sin_cos" else "")):
        parts = tuple(alike)
        first = tuple(number for group in parts for number in group.first)
        second = tuple(number for group in parts for number in group.second)
        runs.append((parts, Group("", sum(group.dim for group in parts), parts[0].encoding, first, second)))
    return tuple(runs)


def encode(group: Group, values: Vector, *, clip: bool) -> NDArray[np.float32]:
    """[..., D] float32 in the robot's units -> [..., encoded] in the model's. A dimension that never moved gives 0."""
    if group.encoding == "sin_cos":
        return np.concatenate([np.sin(values), np.cos(values)], axis=-1, dtype=np.float32)
    first, span, moved = _numbers(group)
    with np.errstate(over="ignore"):  # a tiny deviation may carry a value beyond float32; the runtime refuses what is not finite
        share = ((values - first) / span).astype(np.float32)  # rounded before doubling, as the reference does
    if group.encoding == "mean_std":
        return np.where(moved, share, values).astype(np.float32)  # without a deviation the value passes through
    scaled = np.where(moved, np.float32(2.0) * share - np.float32(1.0), np.float32(0.0))
    return scaled.clip(-1.0, 1.0) if clip else scaled


@lru_cache(maxsize=256)
def _ends(group: Group) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.asarray(group.first), np.asarray(group.second)


@lru_cache(maxsize=256)
def _numbers(group: Group) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """First numbers, what to divide by, and which dimensions ever moved."""
    first, second = _ends(group)
    moved = np.ones(group.dim, np.bool_)
    moved[list(group.constant)] = False
    span = second if group.encoding == "mean_std" else second - first
    return first, np.where(moved, span, 1.0), moved


def decode_chunk(contract: Contract, chunk: Vector) -> dict[str, NDArray[np.float32]]:
    """[..., model horizon, width] in the model's terms -> group: [..., horizon, D] float32 in the robot's units."""
    actions, start = {}, 0
    for parts, whole in _runs(contract.action):
        decoded, place = decode(whole, chunk[..., : contract.horizon, start : start + whole.dim]), 0
        for group in parts:
            actions[group.key] = decoded[..., place : place + group.dim]
            place += group.dim
        start += whole.dim
    return actions


def decode(group: Group, values: Vector) -> NDArray[np.float32]:
    """[..., D] in the model's terms -> float32 in the robot's units. Bounds clip; a constant dimension decodes to its constant."""
    first, second = _ends(group)
    if group.encoding == "mean_std":
        return np.where(second != 0.0, values * second + first, values).astype(np.float32)
    half = (values.clip(-1.0, 1.0) + np.float32(1.0)) / np.float32(2.0)
    decoded: NDArray[np.float32] = (half * (second - first) + first).astype(np.float32)
    return decoded
