"""Synthetic checkpoints: real names and shapes, random numbers, written shard by shard, a few tensors drawn ahead."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..types import BadRequest, Vector
from .graph import NUMPY, PRECISIONS
from .weights import INDEX, write_tensors

SHARD_BYTES = 5_000_000_000
_PIECE = 8 << 20  # numbers drawn at once
_THREADS = min(8, os.cpu_count() or 1)  # that draw; numpy lets the others run meanwhile


class Spread(NamedTuple):
    """What a tensor's numbers are drawn from: a normal distribution."""

    mean: float
    std: float


def write_checkpoint(
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    spread: Callable[[str, Sequence[int]], Spread],
    *,
    dtype: str = "bf16",
    seed: int = 0,
    tied: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Shards and their index into an empty folder. A tensor's numbers depend on its name and the seed alone.

    `tied` names tensors that repeat another one's numbers. Raises BadRequest for a folder that holds something.
    """
    if dtype not in PRECISIONS:
        raise BadRequest(f"--dtype {dtype}: choose one of {', '.join(PRECISIONS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadRequest(f"{folder} is not empty; choose a new folder for a synthetic checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    kind, item = NUMPY[PRECISIONS[dtype]], np.dtype(NUMPY[PRECISIONS[dtype]]).itemsize
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        bytes_ = math.prod(shape) * item
        if shards[-1] and size + bytes_ > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    files: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS, "drawing") as pool:
        waiting, drawn = iter([name for shard in shards for name in shard]), dict[str, Future[list[Vector]]]()

        def draw_next() -> None:
            if (name := next(waiting, None)) is not None:
                source = (tied or {}).get(name, name)
                drawn[name] = pool.submit(_numbers, source, shapes[name], spread(name, shapes[name]), seed, kind)

        def pieces(name: str) -> Iterator[Vector]:
            yield from drawn.pop(name).result()
            draw_next()

        for _ in range(_THREADS):
            draw_next()
        for i, shard in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(folder / file, {name: (kind, shapes[name], pieces(name)) for name in shard})
            files |= dict.fromkeys(shard, file)
    total = sum(math.prod(shape) * item for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _numbers(name: str, shape: Sequence[int], spread: Spread, seed: int, kind: Any) -> list[Vector]:
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big"))
    left, found = math.prod(shape), list[Vector]()
    while left:
        piece = rng.standard_normal(min(left, _PIECE), np.float32)
        piece *= np.float32(spread.std)
        piece += np.float32(spread.mean)
        left -= piece.size
        found.append(piece.astype(kind))
    return found
