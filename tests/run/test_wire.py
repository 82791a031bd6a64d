"""The wire refuses everything that is not what it says it is, before it costs anything."""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: TID251 - to see it refused
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_eval.run.wire import (
    MAGIC,
    Connection,
    Known,
    WireError,
    chunk_from,
    interface_from,
    pack,
    request_from,
    request_map,
    shallow,
    unpack,
)
from vla_eval.types import ARM_ACTION, ARM_STATE, ActionChunk, Interface, InvalidObservation, Observation, Request


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Connection(ours, limit=1 << 20), theirs


class Bomb:
    def __reduce__(self) -> Any:
        return os.putenv, ("VLA_EVAL_EXPLODED", "1")


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_on_the_socket_is_refused_and_never_loaded(ends: tuple[Connection, socket.socket], protocol: int) -> None:
    connection, stranger = ends
    stranger.sendall(pickle.dumps(Bomb(), protocol=protocol))
    with pytest.raises(WireError, match="no frame of ours"):
        connection.receive(5)
    assert "VLA_EVAL_EXPLODED" not in os.environ


def test_a_pickle_inside_a_frame_is_refused(ends: tuple[Connection, socket.socket]) -> None:
    body = pickle.dumps(Bomb())
    ends[1].sendall(struct.pack(">4sQ", MAGIC, len(body)) + body)
    with pytest.raises(WireError, match=r"no msgpack|no map"):
        ends[0].receive(5)


def test_a_message_survives_the_wire_in_pieces(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    frame = pack({"kind": "x", "array": np.arange(6, dtype=">i2").reshape(2, 3), "text": "ü", "none": None, "flag": np.bool_(True)})
    for index in range(len(frame) - 1):
        other.sendall(frame[index : index + 1])
        assert connection.arrived() == []
    other.sendall(frame[-1:] + frame)
    first, second = connection.arrived()
    assert first["text"] == "ü"
    assert first["flag"] is True
    np.testing.assert_array_equal(first["array"], [[0, 1, 2], [3, 4, 5]])
    assert first["array"].flags.writeable
    assert second["array"].dtype == np.dtype(">i2")


def test_a_claimed_length_costs_no_memory(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    other.sendall(struct.pack(">4sQ", MAGIC, 56 << 30))
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="claims 60129542144 bytes, more than the 1048576 allowed"):
            connection.receive(5)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # one piece of the stream is 1 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("shape", "dtype", "data", "says"),
    [
        ([1 << 40, 1 << 40], "<f8", b"", "claims the shape"),
        ([-1], "<f8", b"12345678", "claims the shape"),
        ([2.0], "<f8", b"1" * 16, "claims the shape"),
        ([True], "<f8", b"12345678", "claims the shape"),
        ([3], "<f8", b"12345678", "claims the shape"),
        ([], "<f8", b"", "claims the shape"),
        ([1], "|O", b"12345678", "only an unpickler"),
        ([1], "|V8", b"12345678", "only an unpickler"),
        ([1], "rubbish", b"12345678", "refused"),
        (None, "<f8", b"12345678", "claims the shape"),
    ],
)
def test_an_array_that_is_not_what_it_claims_is_refused(shape: Any, dtype: str, data: bytes, says: str) -> None:
    array = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    with pytest.raises(WireError, match=says):
        unpack(msgpack.packb({"kind": "x", "array": array}))


def test_an_array_of_objects_is_never_sent() -> None:
    with pytest.raises(Exception, match="only an unpickler"):
        pack({"kind": "x", "array": np.array([None], object)})


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(body: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(unpack(body)["kind"], str)


def test_silence_and_a_closed_end_are_said(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    with pytest.raises(WireError, match=r"no message within 0\.01 s"):
        connection.receive(0.01)
    other.close()
    with pytest.raises(WireError, match="closed the connection"):
        connection.receive(5)


def test_a_reader_that_never_reads_does_not_hold_the_writer(ends: tuple[Connection, socket.socket]) -> None:
    with pytest.raises(WireError, match="was not taken within"):
        ends[0].send({"kind": "x", "data": b"0" * (8 << 20)}, 0.05)


def test_nouns_cross_the_wire_unchanged() -> None:
    request = Request(
        Observation(
            images={"front": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)},
            state={"eef_pos": np.array([0.1, -0.0, np.pi])},
            instruction="lift",
            privileged={
                "goal": (("on", "a", "b"),), "holds": [False], "poses": {"a": np.zeros(7)}, "joints": {}, "regions": {},
                "extents": {}, "shapes": {}, "parents": {"b": "a"},
            },
        ),
        seed=2**32 - 1, task="t@p/0", trial=3, step=8, memory=b"\x00\xff",
    )  # fmt: skip
    back = request_from(unpack(pack({"kind": "x", "r": request_map(request, {})[0]})[12:])["r"], {})
    assert (back.seed, back.task, back.trial, back.step, back.memory) == (2**32 - 1, "t@p/0", 3, 8, b"\x00\xff")
    assert back.observation["state"]["eef_pos"].tobytes() == request.observation["state"]["eef_pos"].tobytes()
    assert back.observation["privileged"]["goal"] == [("on", "a", "b")]
    np.testing.assert_array_equal(back.observation["images"]["front"], request.observation["images"]["front"])
    interface = Interface(cameras={"front": (2, 2)}, state=ARM_STATE, action=ARM_ACTION, control_hz=20)
    assert interface_from(unpack(pack({"kind": "x", "i": shallow(interface)})[12:])["i"]) == Interface(
        {"front": (2, 2)}, dict(ARM_STATE), list(ARM_ACTION), 20.0
    )
    chunk = chunk_from(unpack(pack({"kind": "x", "c": shallow(ActionChunk(np.ones((2, 7), np.float32), {"pack": 0.5}, b"m"))})[12:])["c"])
    assert chunk.actions.dtype == np.float32
    assert chunk.seconds == {"pack": 0.5}
    assert chunk.memory == b"m"


class Asking:
    """Both ends of a worker's questions."""

    def __init__(self) -> None:
        self.here: Known = {}
        self.there: Known = {}

    def ask(self, truth: Any) -> tuple[int, Any]:
        """The bytes that crossed, and the truth that arrived."""
        request = Request(Observation(images={}, state={}, instruction="lift", privileged=truth), 1, "t@p/0", 0, 0, None)
        asked, self.here = request_map(request, self.here)
        frame = pack({"kind": "ask", "request": asked})
        return len(frame), request_from(unpack(frame[12:])["request"], self.there).observation["privileged"]


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def truth(shapes: dict[str, Any], **more: Any) -> Any:
    found = {"goal": [("on", "a", "b")], "holds": [True], "poses": {}, "joints": {}, "regions": {}, "extents": {}, "shapes": shapes}
    return {**found, "parents": {"a": "b"}, **more}


def test_what_an_observation_repeats_crosses_once_and_arrives_each_time() -> None:
    asking, shapes = Asking(), {name: read_only(np.random.default_rng(0).random((100 + len(name), 4))) for name in ("a", "bb")}
    first, _ = asking.ask(truth(dict(shapes)))
    for _ in range(3):
        later, arrived = asking.ask(truth(dict(shapes)))
        assert first - later > 2 * 100 * 4 * 8
        assert list(arrived["shapes"]) == ["a", "bb"]
        for name, points in shapes.items():
            np.testing.assert_array_equal(arrived["shapes"][name], points)
        assert arrived["parents"] == {"a": "b"}


def test_what_changed_in_place_or_was_replaced_crosses_again() -> None:
    asking, points = Asking(), np.zeros((2, 4))
    asking.ask(truth({"a": points}))
    points[0] = 7
    np.testing.assert_array_equal(asking.ask(truth({"a": points}))[1]["shapes"]["a"], [[7] * 4, [0] * 4])
    whole = np.zeros((2, 4))
    view = read_only(whole[:])  # nobody can write to it, but to what it shows
    asking.ask(truth({"a": view}))
    whole[1] = 3
    np.testing.assert_array_equal(asking.ask(truth({"a": view}))[1]["shapes"]["a"], [[0] * 4, [3] * 4])
    lock = read_only(np.zeros((2, 4)))
    asking.ask(truth({"a": lock}))
    lock.flags.writeable = True
    lock[1] = 5
    np.testing.assert_array_equal(asking.ask(truth({"a": lock}))[1]["shapes"]["a"], [[0] * 4, [5] * 4])
    fixed = {"a": read_only(np.ones((2, 4)))}
    asking.ask(truth(fixed))
    fixed["a"] = read_only(np.full((2, 4), 2.0))  # in the same map
    fixed["b"] = read_only(np.ones((1, 4)))
    arrived = asking.ask(truth(fixed))[1]["shapes"]
    assert (arrived["a"] == 2).all()
    assert list(arrived) == ["a", "b"]
    assert asking.ask(truth({}, parents={"a": "c"}))[1]["parents"] == {"a": "c"}
    assert asking.ask(truth({}, parents={}))[1]["shapes"] == {}


def test_a_policy_cannot_change_what_later_requests_share() -> None:
    asking, shapes = Asking(), {"a": read_only(np.ones((2, 4)))}
    for _ in range(2):
        _, arrived = asking.ask(truth(shapes))
        with pytest.raises(ValueError, match="read-only"):
            arrived["shapes"]["a"][0, 0] = 5
        del arrived["shapes"]["a"], arrived["parents"]["a"], arrived["extents"]
    assert list(asking.ask(truth(shapes))[1]["shapes"]) == ["a"]


def test_numbers_arrive_by_name_whatever_their_type_and_shape_and_can_be_written_to() -> None:
    poses = {name: np.arange(7.0) + number for number, name in enumerate("abc")}
    mixed: dict[str, Any] = {"a": np.zeros(3), "b": np.ones(3, np.float32), "c": np.zeros((2, 2)), "d": np.array(2.0)}
    asking = Asking()
    for turn in range(2):
        _, arrived = asking.ask(truth({}, poses=poses, joints=mixed, regions={"n": np.array([]), "m": np.array([3.0, 4.0])[::-1]}))
        assert list(arrived["poses"]) == list("abc"), turn
        for name, pose in poses.items():
            np.testing.assert_array_equal(arrived["poses"][name], pose)
        arrived["poses"]["a"][:] = -1
        arrived["joints"]["a"][:] = -1
        np.testing.assert_array_equal(arrived["poses"]["b"], poses["b"])
        assert {name: (array.dtype, array.shape) for name, array in arrived["joints"].items()} == {
            name: (array.dtype, array.shape) for name, array in mixed.items()
        }
        assert (arrived["joints"]["b"] == 1).all()
        assert arrived["regions"]["n"].shape == (0,)
        np.testing.assert_array_equal(arrived["regions"]["m"], [4.0, 3.0])


def test_numbers_whose_form_changes_arrive_as_what_they_are_now() -> None:
    asking = Asking()
    for poses in (
        {"a": np.array([1.0, 2.0]), "b": np.array([3.0])},
        {"a": np.array([1.0]), "b": np.array([2.0, 3.0])},  # as many numbers
        {"b": np.array([2.0, 3.0]), "a": np.array([1.0])},
        {"c": np.array([2.0, 3.0]), "a": np.array([1.0])},
        {"c": np.array([2.0, 3.0], np.float32), "a": np.array([1.0])},
        {"c": np.array([[2.0, 3.0]]), "a": np.array([1.0])},
        {},
        {"c": np.array([2.0, 3.0]), "a": np.array([1.0])},
    ):
        _, arrived = asking.ask(truth({}, poses=poses, joints={"j": np.array([9.0])}))
        assert list(arrived["poses"]) == list(poses)
        for name, numbers in poses.items():
            assert (arrived["poses"][name].dtype, arrived["poses"][name].tolist()) == (numbers.dtype, numbers.tolist())
        assert arrived["joints"]["j"].tolist() == [9.0]


def test_numbers_that_are_no_arrays_are_said_and_not_sent() -> None:
    with pytest.raises(InvalidObservation, match=r"poses, joints and regions of an observation have to be arrays by name \('list'"):
        Asking().ask(truth({}, poses={"a": [1.0, 2.0]}))


def test_names_of_numbers_cross_once() -> None:
    asking, poses = Asking(), {f"{number:0100}": np.zeros(7) for number in range(10)}
    first, _ = asking.ask(truth({}, poses=poses))
    later, arrived = asking.ask(truth({}, poses=poses))
    assert later < first - 10 * 100
    assert list(arrived["poses"]) == list(poses)


def test_requests_with_and_without_truth_may_take_turns() -> None:
    here, there = Known(), Known()
    for turn, privileged in enumerate((True, False, True, False)):
        observation = Observation(images={}, state={"x": np.array([turn, 1.0])}, instruction="lift")
        if privileged:
            observation["privileged"] = truth({"a": read_only(np.ones((2, 4)))}, poses={"p": np.array([5.0])})
        asked, here = request_map(Request(observation, 1, "t@p/0", 0, 0, None), here)
        arrived = request_from(unpack(pack({"kind": "ask", "request": asked})[12:])["request"], there).observation
        assert arrived["state"]["x"].tolist() == [turn, 1.0]
        assert ("privileged" in arrived) == privileged
        if privileged:
            assert arrived["privileged"]["poses"]["p"].tolist() == [5.0]
            assert (arrived["privileged"]["shapes"]["a"] == 1).all()


@pytest.mark.parametrize(
    ("form", "numbers"),
    [
        ([["state", ["a"], [3]]], bytes(16)),
        ([["state", ["a"], [1]]], bytes(16)),
        ([["state", ["a"], [2]]], bytes(15)),
        ([["state", ["a"], [-2]], ["poses", ["b"], [4]]], bytes(16)),
        ([["state", ["a"], [2.0]]], bytes(16)),
        ([["state", ["a"], [True]]], bytes(8)),
        ([["state", ["a", "b"], [2]]], bytes(16)),
        ([["state", [7], [2]]], bytes(16)),
        ([["state", [["a"]], [2]]], bytes(16)),
        ([["poses", ["a"], [2]]], bytes(16)),
        ([["state", "a"]], bytes(16)),
        (["state"], bytes(16)),
        (7, bytes(16)),
        (None, bytes(16)),  # of which nothing has been said before
        ([["state", ["a"], [2]]], None),
        ([["state", ["a"], [2]]], 16),
    ],
)
def test_numbers_that_are_not_what_they_claim_are_refused(form: Any, numbers: Any) -> None:
    request = {"observation": {"images": {}, "instruction": "lift"}, "other": {}, "form": form, "numbers": numbers}
    with pytest.raises(WireError, match="observation in a message"):
        request_from(request | {"seed": 1, "task": "t@p/0", "trial": 0, "step": 0, "memory": None}, {})


@pytest.mark.parametrize("wrong", [{}, None, 7, [1, 2], {"observation": 1, "form": [], "numbers": b"", "other": {}}])
def test_what_is_no_request_is_refused(wrong: Any) -> None:
    with pytest.raises(WireError, match="in a message"):
        request_from(wrong, {})


def test_a_message_larger_than_the_socket_holds_arrives_whole(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    picture = np.random.default_rng(0).integers(0, 256, (900, 1000, 3), np.uint8)
    reader = Connection(other)
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(reader.receive, 30)
        connection.send({"kind": "x", "picture": picture}, 30)
        np.testing.assert_array_equal(arrived.result()["picture"], picture)


@pytest.mark.parametrize("wrong", [{}, {"actions": 1, "extra": 2}, {"actions": 1, "memory": "text"}, [1, 2], None])
def test_a_map_that_is_no_chunk_is_refused(wrong: Any) -> None:
    with pytest.raises(WireError):
        chunk_from(wrong)
