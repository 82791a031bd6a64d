"""What crosses between processes: msgpack messages in frames of known length, arrays as {dtype, shape, data}. Nothing is ever unpickled.

A frame is four bytes of magic, eight of length (big-endian), then that many bytes of msgpack. The first twelve decide whether anything more
is read, so a stranger's bytes cost nothing. A policy is asked every few steps, so what its observations repeat (the shapes of things)
crosses once, and what they measure crosses as one run of numbers, whose names and lengths have crossed before.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np

from ..arrays import check_plain
from ..types import ActionChunk, BadRequest, EpisodeRecord, Interface, InvalidObservation, Meaning, Request, Task, Vector, VlaEvalError

MAGIC = b"VLA1"
LIMIT_BYTES = 256 << 20  # of one message: a few hundred pictures
_HEAD = struct.Struct(">4sQ")
_PIECE = 1 << 18  # memory follows the bytes that arrive, never the length that is claimed
_FLOAT = np.dtype(np.float64)
_STEADY = ("extents", "shapes", "parents")  # of the privileged observation: what a task's steps hardly ever change
_MEASURED = ("poses", "joints", "regions")  # of the privileged observation: what every step changes

Message = dict[str, Any]
Known = dict[str, Any]  # what of a request has crossed and need not again: its steady maps, and the form of its numbers
T = TypeVar("T")


class Form(NamedTuple):
    """What a run of numbers is: of each map its vectors, by name, and where in the run they lie."""

    places: list[tuple[str, list[tuple[str, slice]]]]
    length: int


class WireError(VlaEvalError):
    """The other side sent something that is no message of ours, or is gone."""


class Connection:
    """One end of a stream socket, and the bytes of a message that is still arriving."""

    def __init__(self, end: socket.socket, limit: int = LIMIT_BYTES) -> None:
        self._end, self._limit = end, limit
        self._arrived, self._piece = bytearray(), memoryview(bytearray(_PIECE))

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, message: Message, seconds: float) -> None:
        """Send one message. Raises WireError if the other side is gone or does not take it within `seconds`."""
        frame = pack(message)
        try:
            sent = self._end.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise _gone(error) from error
        if sent < len(frame):
            self._send_rest(frame, sent, seconds)

    def receive(self, seconds: float) -> Message:
        """Wait for one message. Raises WireError if none is whole within `seconds`."""
        end = time.monotonic() + seconds
        while (message := self._whole()) is None:
            if not self._ready(select.POLLIN, end):
                raise WireError(f"no message within {seconds:g} s")
            self._read()
        return message

    def arrived(self) -> list[Message]:
        """The messages that are whole, reading once what is there without waiting."""
        self._read()
        messages = []
        while self._arrived and (message := self._whole()) is not None:
            messages.append(message)
        return messages

    def _send_rest(self, frame: bytes, sent: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while sent < len(frame):
            if not self._ready(select.POLLOUT, end):
                raise WireError(f"a message of {len(frame)} bytes was not taken within {seconds:g} s")
            try:
                sent += self._end.send(memoryview(frame)[sent:], socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _gone(error) from error

    def _ready(self, event: int, end: float) -> bool:
        """Wait until the socket can be read or written, or until `end`; whether it can."""
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(max(0.0, 1000 * (end - time.monotonic()))))

    def _read(self) -> None:
        try:
            size = self._end.recv_into(self._piece, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise _gone(error) from error
        if not size:
            raise WireError("the other process closed the connection")
        self._arrived += self._piece[:size]

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
        with memoryview(self._arrived) as view, view[_HEAD.size : _HEAD.size + length] as body:
            message = unpack(body)
        del self._arrived[: _HEAD.size + length]
        return message


def _gone(error: OSError) -> WireError:
    return WireError(f"the other process is gone ({error.strerror})")


def pack(message: Message) -> bytes:
    """A message as one frame. Raises WireError for what is no plain data."""
    try:
        body: bytes = msgpack.packb(message, default=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a message of kind {message.get('kind')!r} holds something that is no plain data ({error})") from error
    return _HEAD.pack(MAGIC, len(body)) + body


def unpack(body: bytes | memoryview) -> Message:
    """The message in a frame. Raises WireError for anything but a map whose arrays are what they claim."""
    try:
        message = msgpack.unpackb(body, object_hook=_array, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a message is no msgpack ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise WireError("a message is no map with a 'kind'")
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # the map that openpi's policy servers use
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": _text(value.dtype), b"shape": value.shape}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__}")


def _array(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in found:
        return found
    try:
        data, dtype, shape = found[b"data"], _dtype(found[b"dtype"]), found[b"shape"]
    except (KeyError, TypeError, ValueError, BadRequest) as error:
        raise WireError(f"an array in a message is refused: {error}") from error
    if not isinstance(data, bytes) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise WireError(f"an array in a message claims the shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"an array in a message claims the shape {shape} of {dtype}, but {len(data)} bytes are there")
    return np.ndarray(shape, dtype, bytearray(data))  # a copy of its own: policies may write into it


@lru_cache(maxsize=64)
def _text(dtype: np.dtype) -> str:
    check_plain(dtype, "an array in a message")
    return dtype.str


@lru_cache(maxsize=64)
def _dtype(text: Any) -> np.dtype:
    dtype = np.dtype(str(text))
    check_plain(dtype, "an array in a message")
    return dtype


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


def request_map(request: Request, known: Known) -> tuple[Message, Known]:
    """A request as a map, without what the other side knows; and what that knows once it has this map."""
    observation: dict[str, Any] = dict(request.observation)
    groups, now = {"state": observation.pop("state")}, Known()
    if "privileged" in observation:
        news: dict[str, Any] = dict(observation["privileged"])
        groups |= {key: news.pop(key) for key in _MEASURED if key in news}
        for key in _STEADY:
            if key in news and _same(news[key], known.get(key)):
                now[key] = known[key]
                del news[key]
            elif key in news and all(_still(value) for value in news[key].values()):
                now[key] = dict(news[key])
        observation["privileged"] = news
    try:
        form = [(key, [(name, value.dtype, value.shape) for name, value in group.items()]) for key, group in groups.items()]
    except AttributeError as error:
        raise InvalidObservation(f"state, poses, joints and regions of an observation have to be arrays by name ({error})") from error
    again = form == known.get("form")
    now["form"], now["run"] = form, known["run"] if again else [key for key, arrays in form if _are_vectors(arrays)]
    return {
        "observation": observation,
        "other": {key: group for key, group in groups.items() if key not in now["run"]},
        "form": None if again else [(key, list(groups[key]), [len(value) for value in groups[key].values()]) for key in now["run"]],
        "numbers": b"".join([value.tobytes() for key in now["run"] for value in groups[key].values()]),
        "seed": request.seed,
        "task": request.task,
        "trial": request.trial,
        "step": request.step,
        "memory": request.memory,
    }, now


def request_from(data: Any, known: Known) -> Request:
    """The request that `request_map` made a map of; `known` is what came before, and is brought up to date. Policies cannot write to it."""
    try:
        observation, form = data.pop("observation"), data.pop("form")
        if form is not None:
            known["form"] = _placed(form)
        groups = data.pop("other") | _spread(known["form"], data.pop("numbers"))
        observation["state"] = groups.pop("state")
        if "privileged" in observation:
            news = observation["privileged"]
            for key in _STEADY:
                if key in news:
                    known[key] = {name: _fixed(value) for name, value in news[key].items()}
            truth = observation["privileged"] = news | groups | {key: dict(known[key]) for key in _STEADY if key in known}
            truth["goal"] = [tuple(conjunct) for conjunct in truth["goal"]]  # msgpack has lists only
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise WireError(f"an observation in a message is none ({error})") from error
    return _noun(Request, {**data, "observation": observation})


def _are_vectors(arrays: list[tuple[str, np.dtype, tuple[int, ...]]]) -> bool:
    return all(dtype == _FLOAT and len(shape) == 1 for _, dtype, shape in arrays)


def _spread(form: Form, numbers: bytes) -> dict[str, dict[str, Vector]]:
    """A run of numbers as the maps that it was made of; policies may write into them."""
    if len(numbers) != form.length * _FLOAT.itemsize:
        raise WireError(f"an observation in a message claims {form.length} numbers, but holds {numbers!r:.80}")
    run: Vector = np.frombuffer(bytearray(numbers), _FLOAT)
    return {key: {name: run[place] for name, place in places} for key, places in form.places}


def _placed(form: Any) -> Form:
    """Where in a run each vector lies."""
    at, found = 0, []
    for key, names, lengths in form:
        if not all(type(name) is str for name in names) or not all(type(length) is int and length >= 0 for length in lengths):
            raise WireError(f"an observation in a message claims the numbers {names!r:.80} of lengths {lengths!r:.80}")
        places = []
        for name, length in zip(names, lengths, strict=True):
            places.append((name, slice(at, at + length)))
            at += length
        found.append((key, places))
    return Form(found, at)


def _same(now: Mapping[str, Any], then: Mapping[str, Any] | None) -> bool:
    """Whether these are the very things that were sent: text, or arrays that nobody can have written to since."""
    return then is not None and list(now) == list(then) and all(_unchanged(value, then[name]) for name, value in now.items())


def _unchanged(now: Any, then: Any) -> bool:
    return not now.flags.writeable and now is then if isinstance(now, np.ndarray) else bool(now == then)


def _still(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or (not value.flags.writeable and value.base is None)


def _fixed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    return value


def _noun(kind: type[T], data: Any) -> T:
    try:
        return kind(**data)
    except TypeError as error:
        raise WireError(f"a message holds no {kind.__name__} ({error})") from error
