"""P16: a code is bytes from elsewhere: what does not fit is a ValueError, and nothing of a tensor is unpickled."""

from __future__ import annotations

import math
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aiodist.codecs import (
    QSGD,
    SVD,
    Codec,
    Half,
    Incoming,
    Int8,
    Json,
    Lossless,
    ObjectCodec,
    Outgoing,
    Pickle,
    RandomK,
    TopK,
)

CODECS: list[Codec] = [Half(), TopK(0.1), QSGD(bits=4, bucket=32), Int8(), RandomK(0.1), SVD(2), Lossless()]
every = pytest.mark.parametrize("codec", CODECS, ids=str)
objects = pytest.mark.parametrize("codec", [Pickle(), Json()], ids=str)


def sample(numel: int = 100, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def code_of(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def raw(code: Tensor) -> bytes:
    return code.numpy().tobytes()


@every
def test_p16_truncated_and_extended(codec: Codec) -> None:
    code = codec.encode(sample())
    for length in range(code.numel()):
        with pytest.raises(ValueError, match="code"):
            codec.decode(code[:length], torch.float32, 100)
    for more in (1, 4, 1000):
        with pytest.raises(ValueError, match="code"):
            codec.decode(torch.cat([code, torch.zeros(more, dtype=torch.uint8)]), torch.float32, 100)


@every
def test_p16_another_dtype_or_numel(codec: Codec) -> None:
    code = codec.encode(sample())
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.float8_e5m2):
        with pytest.raises(ValueError, match=r"of 100 x float32: expected \w+ of 100 x \w+"):
            codec.decode(code, dtype, 100)
    for numel in (-1, 0, 99, 101, 1 << 40):
        with pytest.raises(ValueError, match=rf"of 100 x float32: expected \w+ of {numel} x float32"):
            codec.decode(code, torch.float32, numel)


@every
def test_p16_a_code_of_another_codec(codec: Codec) -> None:
    for other in CODECS:
        if other is not codec:
            with pytest.raises(ValueError, match="expected"):
                codec.decode(other.encode(sample()), torch.float32, 100)
    with pytest.raises(ValueError, match="a code by codec 200 of 100 x dtype 99"):
        codec.decode(code_of(struct.pack("<BBHIQ", 200, 99, 0, 0, 100)), torch.float32, 100)


@every
def test_p16_what_is_no_code(codec: Codec) -> None:
    code = codec.encode(sample())
    for wrong in (
        code.float(),
        code.view(1, -1),
        code.view(torch.int8),
        torch.empty(20, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(ValueError, match="expected flat uint8 on the CPU"):
            codec.decode(wrong, torch.float32, 100)


def test_p16_other_settings() -> None:
    code = QSGD(bits=4, bucket=32).encode(sample(64))
    one = QSGD(bits=4).encode(sample(1))
    with pytest.raises(ValueError, match="bits=4: expected QSGD"):
        QSGD(bits=8).decode(one, torch.float32, 1)  # as many bytes
    with pytest.raises(ValueError, match="bytes: expected"):
        QSGD(bits=8, bucket=32).decode(code, torch.float32, 64)
    with pytest.raises(ValueError, match="bytes: expected"):
        TopK(0.2).decode(TopK(0.1).encode(sample()), torch.float32, 100)


def test_p16_indices_out_of_range() -> None:
    code = TopK(0.1).encode(sample())
    indices = struct.unpack("<10i", raw(code)[16:56])
    for bad in (
        (-1, *indices[1:]),
        (*indices[:-1], 100),
        (*indices[:-1], 2**31 - 1),
        indices[::-1],
        (indices[0],) * 10,
    ):
        forged = raw(code)[:16] + struct.pack("<10i", *bad) + raw(code)[56:]
        with pytest.raises(ValueError, match=r"indices go from .* expected ascending, below 100"):
            TopK(0.1).decode(code_of(forged), torch.float32, 100)


def test_p16_forged_parameters() -> None:
    head = bytearray(raw(Half().encode(sample(4))))
    struct.pack_into("<I", head, 4, 0xFFFFFFFF)
    with pytest.raises(ValueError, match="exponent"):
        Half().decode(code_of(bytes(head)), torch.float32, 4)
    levels = bytearray(raw(QSGD(bits=4, bucket=4).encode(sample(4))))
    levels[-1] = 0xFF
    with pytest.raises(ValueError, match="with level 15: expected at most 14"):
        QSGD(bits=4, bucket=4).decode(code_of(bytes(levels)), torch.float32, 4)


def decode_or_refuse(codec: Codec, code: Tensor, dtype: torch.dtype, numel: int) -> None:
    try:
        decoded = codec.decode(code, dtype, numel)
    except ValueError:
        return
    assert (decoded.dtype, decoded.shape) == (dtype, (numel,))


@pytest.mark.drawn(1)
@every
@given(data=st.data())
def test_p16_any_bytes(codec: Codec, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    numel = data.draw(st.integers(0, 70))
    code = bytearray(raw(codec.encode(sample(numel, dtype))))
    for place in data.draw(st.lists(st.integers(0, len(code) - 1), max_size=4)):
        code[place] = data.draw(st.integers(0, 255))
    code = code[: data.draw(st.integers(len(code) - 3, len(code)))] + data.draw(st.binary(max_size=3))
    decode_or_refuse(codec, code_of(bytes(code)), dtype, numel)
    decode_or_refuse(codec, code_of(data.draw(st.binary(max_size=80))), dtype, numel)


def test_p16_a_code_that_unpacks_to_more_is_refused() -> None:
    bomb = zlib.compress(bytes(1 << 24))
    code = code_of(raw(Lossless().encode(sample()))[:16] + bomb)
    with pytest.raises(ValueError, match="of 401 bytes or more"):
        Lossless().decode(code, torch.float32, 100)
    with pytest.raises(ValueError, match="or damaged"):
        Lossless().decode(torch.cat([Lossless().encode(sample()), code_of(b"more")]), torch.float32, 100)


@given(place=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 20), whole=st.booleans())
def test_p16_damaged_messages_change_nothing(place: int, value: int, cut: int, whole: bool) -> None:
    outgoing, incoming = Outgoing(QSGD()), Incoming(QSGD())
    t = sample(200)
    good = [outgoing.encode(0, "w", t + step) for step in range(3)]
    incoming.decode("w", good[0], t.dtype, 200)
    damaged = bytearray(raw(good[0] if whole else good[1]))
    damaged[place % 16] = value
    damaged = damaged[: len(damaged) - cut]
    try:
        incoming.decode("w", code_of(bytes(damaged)), t.dtype, 200)
    except ValueError:
        for message in good[1:]:
            found = incoming.decode("w", message, t.dtype, 200)
        held = outgoing.held(0, "w")
        assert held is not None
        assert torch.equal(found, held)


# Objects

PLAIN: list[object] = [
    None,
    True,
    7,
    -(2**70),
    0.5,
    "text \u00e9 \ud800",
    [],
    {},
    {"a": [1, {"b": None}]},
    {"": "x" * 100_000},
]


@objects
@pytest.mark.parametrize("obj", PLAIN, ids=lambda obj: repr(obj)[:20])
def test_p10_objects_come_back(codec: ObjectCodec, obj: object) -> None:
    code = codec.encode(obj)
    assert (code.dtype, code.dim()) == (torch.uint8, 1)
    before = raw(code)
    decoded = codec.decode(code)
    assert decoded == obj
    assert type(decoded) is type(obj)
    assert raw(code) == before


@pytest.mark.thorough
@settings(deadline=None, max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_p10_objects_of_every_shape(obj: object) -> None:
    assert Json().decode(Json().encode(obj)) == obj
    assert Pickle().decode(Pickle().encode(obj)) == obj


def test_p10_pickle_has_memory_of_its_own() -> None:
    array = np.arange(1000.0)
    code = Pickle().encode({"array": array, "set": {1, 2}})
    decoded = Pickle().decode(code)
    code.zero_()
    decoded["array"][0] = 5
    assert array[0] == 0
    assert decoded["array"][1:].tolist() == array[1:].tolist()
    assert decoded["set"] == {1, 2}


def test_p10_what_json_cannot_say() -> None:
    with pytest.raises(TypeError, match="set"):
        Json().encode({1, 2})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="Circular"):
        Json().encode(loop)
    assert Json().decode(Json().encode((1, 2))) == [1, 2]
    found = Json().decode(Json().encode([math.nan, math.inf]))
    assert math.isnan(found[0])
    assert found[1] == math.inf


@objects
def test_p16_damaged_objects(codec: ObjectCodec) -> None:
    code = codec.encode({"text": "a" * 20})
    for length in range(code.numel()):
        with pytest.raises(ValueError, match="code"):
            codec.decode(code[:length])
    with pytest.raises(ValueError, match="code"):
        codec.decode(torch.cat([code, code]))
    for place in range(code.numel()):
        damaged = code.clone()
        damaged[place] ^= 0x41
        if not 2 <= place < 4:  # sixteen bits that objects do not use
            with pytest.raises(ValueError, match="code"):
                codec.decode(damaged)
    other = Json() if isinstance(codec, Pickle) else Pickle()
    with pytest.raises(ValueError, match="a code by"):
        codec.decode(other.encode(1))


def framed(kind: int, payload: bytes) -> Tensor:
    return code_of(struct.pack("<BBHIQ", kind, 4, 0, zlib.crc32(payload), len(payload)) + payload)


def test_p16_forged_objects() -> None:
    kind = int(Json().encode(1)[0])
    for payload in (b"", b"{", b"\xff\xfe\xfa", b"[" * 200_000):
        with pytest.raises(ValueError):  # noqa: PT011  - json's own words
            Json().decode(framed(kind, payload))
    with pytest.raises(ValueError, match="without an object"):
        Pickle().decode(framed(int(Pickle().encode(1)[0]), b"short"))


class Trap:
    """The code that unpickles it knows."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise KeyboardInterrupt('unpickled')",)


def test_p16_only_pickle_unpickles() -> None:
    trap = Pickle().encode(Trap())
    with pytest.raises(KeyboardInterrupt, match="unpickled"):
        Pickle().decode(trap)
    bare = code_of(pickle.dumps(Trap()))
    for code in (trap, bare, torch.cat([Half().encode(torch.ones(4)), bare])):
        for codec in CODECS:
            with pytest.raises(ValueError, match="code"):
                codec.decode(code, torch.float32, 4)
        with pytest.raises(ValueError, match="code"):
            Json().decode(code)
    with pytest.raises(ValueError, match="code"):
        Pickle().decode(bare)  # not even this
