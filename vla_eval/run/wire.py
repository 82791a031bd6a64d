"""What crosses between processes: msgpack messages in frames of known length, arrays as {dtype, shape, data}. Nothing is ever unpickled.

A frame is four bytes of magic, eight of length (big-endian), then that many bytes of msgpack. The first twelve decide whether anything more
is read, so a stranger's bytes cost nothing.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np

from ..arrays import check_plain
from ..types import ActionChunk, BadRequest, EpisodeRecord, Interface, Meaning, Observation, Request, Task, VlaEvalError

MAGIC = b"VLA1"
LIMIT_BYTES = 256 << 20  # of one message: a few hundred pictures
_HEAD = struct.Struct(">4sQ")
_PIECE = 1 << 18  # memory follows the bytes that arrive, never the length that is claimed

Message = dict[str, Any]
T = TypeVar("T")


class WireError(VlaEvalError):
    """The other side sent something that is no message of ours, or is gone."""


class Connection:
    """One end of a stream socket, and the bytes of a message that is still arriving."""

    def __init__(self, end: socket.socket, limit: int = LIMIT_BYTES) -> None:
        self._end, self._limit = end, limit
        self._arrived = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, message: Message, seconds: float) -> None:
        """Send one message. Raises WireError if the other side is gone or does not take it within `seconds`."""
        frame = pack(message)
        self._end.settimeout(seconds)
        try:
            self._end.sendall(frame)
        except TimeoutError as error:
            raise WireError(f"a message of {len(frame)} bytes was not taken within {seconds:g} s") from error
        except OSError as error:
            raise WireError(f"the other process is gone ({error.strerror})") from error

    def receive(self, seconds: float) -> Message:
        """Wait for one message. Raises WireError if none is whole within `seconds`."""
        end = time.monotonic() + seconds
        while (message := self._whole()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise WireError(f"no message within {seconds:g} s")
            self._read(left)
        return message

    def arrived(self) -> list[Message]:
        """The messages that are whole, reading once what is there without waiting."""
        with contextlib.suppress(TimeoutError):
            self._read(0)
        messages = []
        while (message := self._whole()) is not None:
            messages.append(message)
        return messages

    def _read(self, seconds: float) -> None:
        self._end.settimeout(seconds)
        try:
            piece = self._end.recv(_PIECE)
        except (TimeoutError, BlockingIOError):
            return
        except OSError as error:
            raise WireError(f"the other process is gone ({error.strerror})") from error
        if not piece:
            raise WireError("the other process closed the connection")
        self._arrived += piece

    def _whole(self) -> Message | None:
        if len(self._arrived) < _HEAD.size:
            if not MAGIC.startswith(self._arrived[: len(MAGIC)]):
                raise WireError("these bytes are no frame of ours")
            return None
        magic, length = _HEAD.unpack_from(self._arrived)
        if magic != MAGIC:
            raise WireError("these bytes are no frame of ours")
        if length > self._limit:
            raise WireError(f"a message claims {length} bytes, more than the {self._limit} allowed here")
        if len(self._arrived) < _HEAD.size + length:
            return None
        with memoryview(self._arrived) as view:
            body = bytes(view[_HEAD.size : _HEAD.size + length])
        del self._arrived[: _HEAD.size + length]
        return unpack(body)


def pack(message: Message) -> bytes:
    """A message as one frame. Raises WireError for what is no plain data."""
    try:
        body: bytes = msgpack.packb(message, default=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a message of kind {message.get('kind')!r} holds something that is no plain data ({error})") from error
    return _HEAD.pack(MAGIC, len(body)) + body


def unpack(body: bytes) -> Message:
    """The message in a frame. Raises WireError for anything but a map whose arrays are what they claim."""
    try:
        message = msgpack.unpackb(body, object_hook=_array, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a message is no msgpack ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise WireError("a message is no map with a 'kind'")
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        check_plain(value.dtype, "an array in a message")
        # the map that openpi's policy servers use
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__}")


def _array(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in found:
        return found
    try:
        data, dtype, shape = found[b"data"], np.dtype(str(found[b"dtype"])), found[b"shape"]
        check_plain(dtype, "an array in a message")
    except (KeyError, TypeError, ValueError, BadRequest) as error:
        raise WireError(f"an array in a message is refused: {error}") from error
    if not isinstance(data, bytes) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"an array in a message claims the shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"an array in a message claims the shape {shape} of {dtype}, but {len(data)} bytes are there")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)  # a copy of its own: policies may write into it


def shallow(noun: Any) -> dict[str, Any]:
    """A dataclass as a map, its values as they are (`dataclasses.asdict` would copy every picture)."""
    return {field.name: getattr(noun, field.name) for field in fields(noun)}


def task_from(data: Any) -> Task:
    return _noun(Task, data)


def record_from(data: Any) -> EpisodeRecord:
    return _noun(EpisodeRecord, data)


def chunk_from(data: Any) -> ActionChunk:
    chunk = _noun(ActionChunk, data)
    if chunk.memory is not None and not isinstance(chunk.memory, bytes):
        raise WireError("a chunk's memory is no bytes")
    return chunk


def interface_from(data: Any) -> Interface:
    interface = _noun(Interface, data)
    try:
        return Interface(
            cameras={str(name): (int(h), int(w)) for name, (h, w) in interface.cameras.items()},
            state={str(key): Meaning(meaning) for key, meaning in interface.state.items()},
            action=[Meaning(meaning) for meaning in interface.action],
            control_hz=float(interface.control_hz),
            privileged=bool(interface.privileged),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise WireError(f"an interface in a message is none ({error})") from error


def request_from(data: Any) -> Request:
    request = _noun(Request, data)
    observation: Observation = request.observation
    try:
        if "privileged" in observation:  # msgpack has lists only
            goal = [tuple(conjunct) for conjunct in observation["privileged"]["goal"]]
            observation["privileged"]["goal"] = goal
    except (TypeError, KeyError) as error:
        raise WireError(f"an observation in a message is none ({error})") from error
    return request


def _noun(kind: type[T], data: Any) -> T:
    try:
        return kind(**data)
    except TypeError as error:
        raise WireError(f"a message holds no {kind.__name__} ({error})") from error
