"""Frames: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from hostopt.errors import ProtocolError
from hostopt.transport import frame
from hostopt.transport.base import FINISH_CHANNEL, Tag

TAG = Tag(channel=1, step=2, bucket=3, round=4, chunk=5, segment=6, layout=7)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 33])
@pytest.mark.parametrize("tag", [TAG, Tag(0, 0), Tag(FINISH_CHANNEL, 2**64 - 1, *[2**32 - 1] * 5)])
def test_round_trip(tag: Tag, payload: bytes) -> None:
    encoded = frame.encode(tag, memoryview(payload))
    assert len(encoded) == 64 + len(payload)
    found_tag, found = frame.decode(encoded)
    assert isinstance(found_tag, Tag)
    assert found_tag == tag
    assert found == payload
    assert found.readonly


def test_the_bytes_of_a_frame() -> None:
    header = b"HO" + bytes([1, 0]) + struct.pack("<IQIIIIIQ", 1, 2, 3, 4, 5, 6, 7, 3) + bytes(20)
    assert frame.encode(TAG, b"abc") == header + b"abc"


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "i8"])
def test_the_payload_is_aligned_for_numpy(dtype: str) -> None:
    assert frame.HEADER_BYTES % 64 == 0
    array = np.arange(100, dtype=dtype)
    _, payload = frame.decode(frame.encode(TAG, array.view(np.uint8).data))
    found = np.frombuffer(payload, dtype)
    assert found.flags.aligned
    np.testing.assert_array_equal(found, array)


def changed(position: int, value: bytes) -> bytes:
    good = frame.encode(TAG, bytes(1000))
    return good[:position] + value + good[position + len(value) :]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"", "0 bytes"),
        (b"HO", "2 bytes"),
        (frame.encode(TAG, b"")[:-1], "63 bytes.*64"),
        (frame.encode(TAG, bytes(1000))[:-1], "1000 bytes.*999"),
        (frame.encode(TAG, bytes(1000)) + b"x", "1000 bytes.*1001"),
        (changed(0, b"GE"), "GE"),
        (changed(2, b"\x02"), "version 2.*version 1"),
        (changed(36, struct.pack("<Q", 2**64 - 1)), f"{2**64 - 1} bytes"),
        (b"GET / HTTP/1.1\r\n" * 8, "GE"),
    ],
    ids=["empty", "magic", "header", "short", "long", "not-ours", "version", "length", "http"],
)
def test_what_is_not_a_frame(bad: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        frame.decode(bad)


def test_random_bytes_raise_nothing_else() -> None:
    rng = np.random.default_rng(11)
    good = bytearray(frame.encode(TAG, bytes(100)))
    accepted = 0
    for _ in range(10_000):
        bad = good[: rng.integers(len(good) + 1)]
        for position in rng.integers(0, max(len(bad), 1), 3)[: len(bad)]:
            bad[position] ^= rng.integers(1, 256)
        try:
            tag, payload = frame.decode(bytes(bad))
        except ProtocolError:
            continue
        accepted += 1
        assert len(payload) == len(bad) - frame.HEADER_BYTES
        assert all(0 <= number < 2**64 for number in tag)
    assert accepted < 1000
