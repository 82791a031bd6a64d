"""Arrays from files that nobody vouches for: .npy and .npz, checked by their headers before anything is allocated. No pickle."""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from .types import BadRequest, Vector

LIMIT_BYTES = 2 << 30  # of one array, unless the caller knows better
_HEADER_BYTES = 10_000  # numpy's own limit of a header
# What the library raises for archives and headers that are none, beside its own BadZipFile.
_DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError)
_NO_HEADER = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
_KINDS = "biufcUS"  # numbers, booleans and plain text; objects and raw records are refused


def read_npy(path: str | os.PathLike[str], limit: int = LIMIT_BYTES) -> Vector:
    """The array of a .npy file. Raises BadRequest, naming the file, for objects, false sizes or more than `limit` bytes."""
    path = Path(path)
    with _opened(path) as file:
        return _array(file, path.stat().st_size, limit, str(path))


def read_npz(path: str | os.PathLike[str], limit: int = LIMIT_BYTES) -> dict[str, Vector]:
    """Every array of a .npz file, by its key. Raises BadRequest, naming file and key; `limit` bounds their sum."""
    path, found, total = Path(path), {}, 0
    with _opened(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise BadRequest(f"{path}: not a .npz archive ({error})") from error
        with archive:
            for member in archive.infolist():
                key = member.filename.removesuffix(".npy")
                if key in found:
                    raise BadRequest(f"{path}: {key!r} is there twice")
                total += member.file_size  # as claimed; reading stops there, whatever the archive inflates to
                if total > limit:
                    raise BadRequest(f"{path}: {key!r} brings the arrays to {total} bytes, more than the {limit} allowed here")
                try:
                    with archive.open(member) as stream:
                        found[key] = _array(stream, member.file_size, limit, f"{path}: {key!r}")
                except _DAMAGED as error:
                    raise BadRequest(f"{path}: {key!r} is damaged ({error})") from error
    return found


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, Vector], *, sync: bool = True) -> None:
    """All arrays into one .npz, under a temporary name first: a killed write leaves the old file or none.

    On the disk when this returns, unless `sync` leaves that to the caller.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)  # compressing takes longer than an episode's whole bookkeeping, and saves a third
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_plain(dtype: np.dtype, where: str) -> None:
    """Refuse dtypes that are more than numbers or text."""
    if dtype.hasobject or dtype.kind not in _KINDS:
        raise BadRequest(f"{where} holds {dtype}, which only an unpickler could read; store plain numbers instead")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read ({error.strerror})") from error


def _array(file: IO[bytes], size: int, limit: int, where: str) -> Vector:
    head = io.BytesIO(file.read(min(size, _HEADER_BYTES + 16)))
    try:
        version = npy.read_magic(head)
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran, dtype = read_header(head, max_header_size=_HEADER_BYTES)
    except _NO_HEADER as error:
        raise BadRequest(f"{where} is no .npy array ({error})") from error
    check_plain(dtype, where)
    if any(n < 0 for n in shape):
        raise BadRequest(f"{where} claims the shape {shape}; lengths cannot be negative")
    claimed, present = math.prod(shape) * dtype.itemsize, size - head.tell()
    if claimed != present:
        raise BadRequest(f"{where} claims {claimed} bytes by its shape {shape}, but {present} follow its header")
    if claimed > limit:
        raise BadRequest(f"{where} is {claimed} bytes, more than the {limit} allowed here")
    body = head.read()
    body += file.read(claimed - len(body))
    if len(body) != claimed or file.read(1):  # the attempt to read on makes an archive compare its checksum
        raise BadRequest(f"{where} ends after {len(body)} of {claimed} bytes")
    array = np.frombuffer(bytearray(body), dtype=dtype)
    return array.reshape(shape, order="F" if fortran else "C")
