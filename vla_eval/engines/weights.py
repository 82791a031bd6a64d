"""A checkpoint's tensors, read one at a time: a reader that knows which of them nobody asked for."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..types import BadRequest, Progress, Vector

INDEX = "model.safetensors.index.json"
FLOAT16_LIMIT = 65520.0  # the first magnitude that float16 rounds to infinity
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BITS: dict[int, Any] = {2: np.uint16, 4: np.uint32}
_HEADER_LIMIT = 100 << 20  # bytes, the format's own
_JSON_LIMIT = 64 << 20
_PROCESSORS = "policy_*processor*.safetensors"  # what LeRobot saves of its processors beside the weights
_WINDOW = 4096  # bytes of each tensor's head, middle and tail that the fingerprint covers
_PIECE = 16 << 20  # numbers held at once while a file is looked through


_TOLD = 10**6  # bytes: progress is told in MB


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor: where its bytes lie, and what is still to be done to them when they are read."""

    name: str
    shape: tuple[int, ...]
    dtype: Any  # of the file: numpy's float32 or float16, ml_dtypes' bfloat16
    file: Path
    offset: int  # of its first byte
    seen: set[str] = field(repr=False, compare=False)  # of its checkpoint: the names that were read
    heard: list[Callable[[int], None]] = field(repr=False, compare=False)  # of its checkpoint: who is told how many bytes were read
    change: Callable[[Vector], Vector] | None = field(default=None, compare=False)

    @property
    def bytes(self) -> int:
        """In the file."""
        return int(math.prod(self.shape) * np.dtype(self.dtype).itemsize)

    def read(self) -> Vector:
        """The numbers, in the file's type."""
        self.seen.add(self.name.partition("|")[0])
        array = self._bytes(0, math.prod(self.shape))
        return (array if self.change is None else self.change(array)).reshape(self.shape)

    def floats(self) -> NDArray[np.float32]:
        """The numbers as float32, whatever the file's type is."""
        numbers: NDArray[np.float32] = self.read().astype(np.float32)
        return numbers

    def row(self, index: int) -> Tensor:
        """One entry of the first axis; only its bytes are read."""
        return self.rows(index, index + 1).reshaped(self.shape[1:])

    def rows(self, start: int, stop: int) -> Tensor:
        """Some entries of the first axis; only their bytes are read."""
        assert self.change is None
        assert 0 <= start < stop <= self.shape[0], (self.name, start, stop)
        stride = math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize
        shape, name = (stop - start, *self.shape[1:]), f"{self.name}|{start}:{stop}"
        return replace(self, name=name, shape=shape, offset=self.offset + start * stride)

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        """The same numbers under another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self.name, shape)
        return replace(self, shape=tuple(shape))

    def transposed(self) -> Tensor:
        """A matrix with its axes swapped."""
        shape = self.shape
        return self.changed("transposed", lambda array: array.reshape(shape).T, shape[::-1])

    def changed(self, how: str, change: Callable[[Vector], Vector], shape: Sequence[int] | None = None) -> Tensor:
        """The tensor after a change that `how` names; `change` is given the flat numbers in the file's type."""
        assert self.change is None, f"{self.name} is changed twice"
        return replace(self, name=f"{self.name}|{how}", shape=tuple(shape or self.shape), change=change)

    def pieces(self) -> Iterator[Vector]:
        """The flat numbers, at most `_PIECE` of them at once, whatever change was asked for."""
        self.seen.add(self.name.partition("|")[0])
        size = math.prod(self.shape)
        for start in range(0, size, _PIECE):
            yield self._bytes(start, min(_PIECE, size - start))

    def _bytes(self, start: int, count: int) -> Vector:
        with self.file.open("rb") as file:
            file.seek(self.offset + start * np.dtype(self.dtype).itemsize)
            array: Vector = np.fromfile(file, self.dtype, count)
        if array.size != count:
            raise BadRequest(f"{self.file}: {self.name!r} ends early; fetch the file again")
        for tell in self.heard:
            tell(array.nbytes)
        return array


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors under one prefix, by the rest of their names."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tensors[self.prefix + name]
        except KeyError:
            raise BadRequest(f"the checkpoint has no tensor {self.prefix + name!r}; fetch it whole, or name the model it is of") from None

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def under(self, part: str | int) -> Weights:
        """The tensors one step further down: `w.under("blocks").under(3)["norm1.weight"]`."""
        return Weights(self.tensors, f"{self.prefix}{part}.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The safetensors files of one folder, their headers checked; numbers are read when they are asked for."""

    path: Path
    tensors: Mapping[str, Tensor]
    fingerprint: str  # SHA-256 over names, headers and windows of every tensor: sensitive near those windows only
    seen: set[str] = field(repr=False)
    heard: list[Callable[[int], None]] = field(repr=False)
    prefixes: tuple[str, ...] = ()  # that it was opened with

    @property
    def weights(self) -> Weights:
        """All tensors, by their full names."""
        return Weights(self.tensors)

    def check_all_read(self, not_needed: Iterable[str]) -> None:
        """Raise BadRequest with the tensors that were neither read nor named as not needed: a forgotten layer cannot hide."""
        left = sorted(set(self.tensors) - self.seen - set(not_needed))
        if left:
            raise BadRequest(f"{self.path}: nothing asked for {_listed(left)}; this is not the architecture that was taken for granted")

    def check_numbers(self, limit: float = math.inf) -> None:
        """Look at every number. Raises BadRequest, naming the tensor, for NaN, infinity, and for magnitudes of `limit` or more."""
        for tensor in self.tensors.values():
            worst = max((_largest(piece) for piece in tensor.pieces()), default=0.0)
            if not math.isfinite(worst):
                raise BadRequest(f"{tensor.file}: {tensor.name!r} holds NaN or infinity; fetch the file again")
            if worst >= limit:
                raise BadRequest(f"{tensor.file}: {tensor.name!r} holds {worst:g}, too large for float16; choose --dtype bf16 or fp32")
        self.seen.clear()

    def followed(self, progress: Progress, times: int) -> Followed:
        """Tells `progress` from now on how far work is that reads the whole checkpoint so many times."""
        size = sum(tensor.bytes for tensor in self.tensors.values())
        reading = Followed(progress, times * size)
        self.heard.append(reading.read)
        return reading


@dataclass
class Followed:
    """Work on a checkpoint, and how much of it was read."""

    progress: Progress
    total: int  # bytes
    what: str = ""
    done: int = 0

    def read(self, count: int) -> None:
        """So many bytes more."""
        self.done = min(self.done + count, self.total)
        self.progress(self.what, self.done // _TOLD, self.total // _TOLD)


def open_checkpoint(path: str | os.PathLike[str], prefixes: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint in a folder: an index with its shards, or every .safetensors file there is but those of LeRobot's processors.

    One of `prefixes` that all names share is taken off. Raises BadRequest for a file that is cut short, damaged or no safetensors, for
    shards that are missing or hold a name twice, and for names of which only some carry a prefix.
    """
    folder, seen, digest = Path(path), set[str](), hashlib.sha256()
    heard: list[Callable[[int], None]] = []
    tensors: dict[str, Tensor] = {}
    for file in _shards(folder):
        for tensor in _header(file, seen, heard, digest):
            if tensor.name in tensors:
                raise BadRequest(f"{folder}: {tensor.name!r} stands in {tensors[tensor.name].file.name} and in {file.name}; remove one")
            tensors[tensor.name] = tensor
    return Checkpoint(folder, _without_prefix(folder, tensors, prefixes), digest.hexdigest(), seen, heard, tuple(prefixes))


def token_table(checkpoint: Checkpoint, *names: str) -> Tensor:
    """The token table, which may be stored as embedding, as tied head, or as both.

    Raises BadRequest if none is there, or if two are and differ: then the head is not tied, and this model has no use for one.
    """
    found = [checkpoint.tensors[name] for name in names if name in checkpoint.tensors]
    if not found:
        raise BadRequest(f"{checkpoint.path}: no token table under {' or '.join(map(repr, names))}; fetch the whole checkpoint")
    first, *others = found
    for other in others:
        if first.shape != other.shape or not all(np.array_equal(a, b) for a, b in zip(first.pieces(), other.pieces(), strict=True)):
            raise BadRequest(f"{checkpoint.path}: {first.name!r} and {other.name!r} differ; this model ties them, keep the right one")
    return first


def read_tensors(file: Path, data: NDArray[np.uint8] | None = None) -> dict[str, Vector]:
    """Every array of one safetensors file, as parts of one piece of memory: `data`, where its bytes are read already.

    Raises BadRequest as `open_checkpoint` does.
    """
    whole: NDArray[np.uint8] = np.fromfile(file, np.uint8) if data is None else data
    length = _header_length(file, whole[:8].tobytes(), whole.size)
    tensors = _entries(file, whole[8 : 8 + length].tobytes(), whole.size, set(), [])
    return {t.name: whole[t.offset : t.offset + t.bytes].view(t.dtype).reshape(t.shape) for t in tensors}


def write_tensors(file: Path, entries: Mapping[str, tuple[Any, Sequence[int], Iterable[Vector]]]) -> None:
    """A safetensors file, streamed: for each name its dtype, its shape, and its numbers in pieces of any size."""
    header, end = {}, 0
    for name, (dtype, shape, _) in entries.items():
        size = math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _names()[np.dtype(dtype)], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, _, pieces) in entries.items():
            for piece in pieces:
                np.ascontiguousarray(piece, dtype).tofile(stream)
            assert stream.tell() == 8 + len(text) + header[name]["data_offsets"][1], f"{name!r} is not as long as its shape says"


def read_json(path: Path) -> Any:
    """A JSON file of any sane size. Raises BadRequest, naming it, if it is missing, too large or not JSON."""
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise BadRequest(f"{path}: {path.stat().st_size} bytes are too many for a JSON file of this kind")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read ({error.strerror}); is the checkpoint or bundle complete?") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path}: not JSON ({error}); fetch it again") from error


def _shards(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BadRequest(f"{folder}: no such folder; --checkpoint wants the folder with the .safetensors files")
    index = folder / INDEX
    if index.exists():
        table = read_json(index)
        names = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise BadRequest(f"{index}: 'weight_map' is no table of tensor and file names; fetch the file again")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        files = sorted(file for file in folder.glob("*.safetensors") if not fnmatch(file.name, _PROCESSORS))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise BadRequest(f"{folder}: {_listed(missing) if missing else 'no .safetensors file'} is missing; fetch the whole checkpoint")
    return files


def _header(file: Path, seen: set[str], heard: list[Callable[[int], None]], digest: Any) -> list[Tensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        text = stream.read(_header_length(file, stream.read(8), size))
        tensors = _entries(file, text, size, seen, heard)
        digest.update(file.name.encode() + b"\0" + text)
        for tensor in tensors:
            end = tensor.offset + tensor.bytes
            for at in (tensor.offset, (tensor.offset + end - _WINDOW) // 2, end - _WINDOW):
                stream.seek(max(at, tensor.offset))
                digest.update(stream.read(min(_WINDOW, tensor.bytes)))
    return tensors


def _header_length(file: Path, head: bytes, size: int) -> int:
    """Of the header's text, from the file's first eight bytes."""
    length = int.from_bytes(head, "little")
    if head.startswith(b"version "):
        raise BadRequest(f"{file}: a large-file pointer, not the file itself; fetch it with git lfs or hf download")
    if len(head) < 8 or not 2 <= length <= min(_HEADER_LIMIT, size - 8):
        raise BadRequest(f"{file}: not a safetensors file, or cut short ({size} bytes); fetch it again")
    return length


def _entries(file: Path, text: bytes, size: int, seen: set[str], heard: list[Callable[[int], None]]) -> list[Tensor]:
    """What the header's text tells, in the order of the file, which it must cover to its last byte."""
    end = 8 + len(text)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = sorted((_entry(file, name, said, end, seen, heard) for name, said in entries.items()), key=lambda t: t.offset)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequest(f"{file}: its safetensors header is damaged ({type(error).__name__}: {error}); fetch it again") from error
    for tensor in tensors:
        if tensor.offset != end:
            raise BadRequest(f"{file}: {tensor.name!r} begins at byte {tensor.offset}, not at {end}; fetch the file again")
        end = tensor.offset + tensor.bytes
        if end > size:
            raise BadRequest(f"{file}: {tensor.name!r} would end at byte {end}, the file has {size}: cut short; fetch it again")
    if end != size:
        raise BadRequest(f"{file}: its header speaks of {end} bytes, the file has {size}: cut short or damaged; fetch it again")
    return tensors


def _entry(file: Path, name: str, said: Mapping[str, Any], start: int, seen: set[str], heard: list[Callable[[int], None]]) -> Tensor:
    if said["dtype"] not in _DTYPES:
        raise BadRequest(f"{file}: {name!r} is {said['dtype']}; only F32, F16 and BF16 checkpoints are read")
    dtype, shape, (begin, end) = _DTYPES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
    if any(not isinstance(n, int) or n < 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name!r} has a negative or fractional length")
    if end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{name!r} claims {end - begin} bytes for the shape {list(shape)}")
    return Tensor(name, shape, dtype, file, start + begin, seen, heard)


def _without_prefix(folder: Path, tensors: dict[str, Tensor], prefixes: Sequence[str]) -> dict[str, Tensor]:
    for prefix in prefixes:
        count = sum(name.startswith(prefix) for name in tensors)
        if count == len(tensors):
            return {name.removeprefix(prefix): replace(t, name=name.removeprefix(prefix)) for name, t in tensors.items()}
        if count:
            raise BadRequest(f"{folder}: {count} of {len(tensors)} names begin with {prefix!r}; two checkpoints seem to be mixed there")
    return tensors


def _largest(numbers: Vector) -> float:
    """The largest magnitude, NaN above infinity: without its sign bit a float's bits order as its magnitude does."""
    bits = numbers.view(_BITS[numbers.dtype.itemsize])
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return float(np.array(np.max(bits & ~sign)).view(numbers.dtype))


def _names() -> dict[Any, str]:
    return {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def _listed(names: Sequence[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
