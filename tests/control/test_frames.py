"""Frames and bodies arrive unchanged, and other bytes are refused."""

import json
import math
from typing import Any

import pytest

from aiodist.frames import MAX_FRAME, FrameKind, FrameReader, WireError, frame, pack, unpack


@pytest.mark.parametrize(
    "payload",
    [
        None,
        True,
        -(2**70),
        1.5,
        math.inf,
        "",
        "äöü\ud800",
        b"",
        b"\x00\xff" * 100,
        [b"a", [b"b", {"c": b"d", "e": []}], b""],
        {"nested": {"deep": [1, {"x": None}]}, "": 0},
    ],
)
def test_what_is_packed_is_unpacked(payload: Any) -> None:
    assert unpack(pack(payload)) == payload


def test_tuples_arrive_as_lists_and_views_as_bytes() -> None:
    assert unpack(pack((1, (2, bytearray(b"x"), memoryview(b"y"))))) == [1, [2, b"x", b"y"]]


@pytest.mark.parametrize("payload", [object(), {1, 2}, 1j, [object()]])
def test_other_types_are_refused_where_they_are_sent(payload: Any) -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        pack(payload)


def test_the_placeholder_cannot_be_forged() -> None:
    for forged in ([b"real", {"\0bytes": 0}], {"\0bytes": "AA=="}, "\0bytes"):
        with pytest.raises(ValueError, match="cannot hold the string"):
            pack(forged)


def test_a_payload_that_contains_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        pack(endless)


@pytest.mark.parametrize(
    "body", [b"", b"\0\0", b"\xff\xff\xff\xff", pack(b"x")[:-6], b"\0\0\0\0\0\0\0\1{", pack("x")[:-1]]
)
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        unpack(body)


def test_deep_nesting_is_refused_not_fatal() -> None:
    text = b"[" * 100_000
    with pytest.raises(WireError):
        unpack(text)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_stream_is_cut_into_frames_wherever_it_breaks(step: int) -> None:
    bodies = [b"", b"x" * 500, json.dumps(list(range(50))).encode()]
    stream = b"".join(frame(FrameKind.MESSAGE, number, body) for number, body in enumerate(bodies, start=-1))
    reader = FrameReader()
    found = [got for at in range(0, len(stream), step) for got in reader.feed(stream[at : at + step])]
    assert found == [(FrameKind.MESSAGE, number, body) for number, body in enumerate(bodies, start=-1)]


def test_a_frame_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match=rf"{MAX_FRAME + 1} bytes.*at most {MAX_FRAME} bytes \(64 MiB\)"):
        frame(FrameKind.MESSAGE, body=bytes(MAX_FRAME + 1))
    with pytest.raises(WireError, match="announced a frame of 1213486160 bytes"):
        list(FrameReader().feed(b"HTTP/1.1 400 Bad Request\r\n"))
