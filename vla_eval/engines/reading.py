"""Files that are read ahead: threads read and hash each byte once, and what is handed on is the memory that was hashed."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HEAD = 256  # bytes that tell what a file is that is not what it should be
_PIECE = 8 << 20  # bytes that a thread reads at once, and that are hashed while it reads the next
_CORES = max(os.cpu_count() or 1, 2)
_HASHING = ThreadPoolExecutor(min(_CORES, 16), "hashing")  # a file each: a digest is one thread's work
_READING = ThreadPoolExecutor(min(_CORES, 8), "reading")  # pieces of all of them; apart, since who hashes waits for these


class Contents(NamedTuple):
    """What a file held when it was read."""

    head: bytes  # its first bytes
    data: NDArray[np.uint8] | None  # all of it, in memory of ours; None if it is not of that size and digest


def begin(path: Path, size: int, sha256: str) -> Future[Contents]:
    """Read a file in threads, from now on. Its size is looked at before memory is taken.

    The result raises OSError where it cannot be read.
    """
    return _HASHING.submit(_contents, path, size, sha256)


def head_of(path: Path) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as file:
        return file.read(HEAD)


def _contents(path: Path, size: int, sha256: str) -> Contents:
    with path.open("rb", buffering=0) as file:
        handle = file.fileno()
        if os.fstat(handle).st_size != size:
            return Contents(os.pread(handle, HEAD, 0), None)
        data, digest = np.empty(size, np.uint8), hashlib.sha256()
        pieces = [data[start : start + _PIECE] for start in range(0, size, _PIECE)]
        filled = [_READING.submit(_fill, handle, piece, i * _PIECE) for i, piece in enumerate(pieces)]
        try:
            for piece, whole in zip(pieces, filled, strict=True):
                if not whole.result():  # it became shorter meanwhile
                    return Contents(os.pread(handle, HEAD, 0), None)
                digest.update(piece.data)
        finally:
            wait(filled)  # before the file is closed
    return Contents(data[:HEAD].tobytes(), data if digest.hexdigest() == sha256 else None)


def _fill(handle: int, piece: NDArray[np.uint8], start: int) -> bool:
    """Whether the file had that many bytes there."""
    view, done = piece.data, 0
    while done < len(view):
        count = os.preadv(handle, [view[done:]], start + done)
        if not count:
            return False
        done += count
    return True
