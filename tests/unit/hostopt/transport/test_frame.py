"""Frames are read once, in order and unchanged; everything else is refused."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostopt.errors import ProtocolError
from hostopt.transport.frame import HEADER_BYTES, FrameReader, FrameWriter, Origin
from hostopt.transport.message import FINISH_CHANNEL, Tag

TAG = Tag(channel=1, step=2, bucket=3, round=4, chunk=5, segment=6, signature=7)
LARGEST = Tag(FINISH_CHANNEL, 2**64 - 1, *[2**32 - 1] * 5)
ORIGIN = Origin(job=8, incarnation=9)

numbers = st.integers(0, 2**32 - 1)
tags = st.builds(Tag, numbers, st.integers(0, 2**64 - 1), *[numbers] * 5)


def frame_of(payload: bytes, checksum: bool = True, tag: Tag = TAG) -> bytes:
    """The first frame of a stream."""
    return FrameWriter(ORIGIN, checksum).write(tag, payload)


def read(message: bytes) -> tuple[Tag, memoryview] | None:
    """Reads the first frame of a stream."""
    return FrameReader(ORIGIN).read(message)


@given(tags, st.binary(max_size=300), st.booleans())
def test_round_trip(tag: Tag, payload: bytes, checksum: bool) -> None:
    message = frame_of(payload, checksum, tag)
    assert len(message) == 64 + len(payload)
    read_back = read(message)
    assert read_back is not None
    found_tag, result = read_back
    assert isinstance(found_tag, Tag)
    assert found_tag == tag
    assert result == payload
    assert result.readonly


@pytest.mark.parametrize("tag", [Tag(0, 0), LARGEST])
def test_smallest_and_largest_tag(tag: Tag) -> None:
    result = read(frame_of(b"", tag=tag))
    assert result is not None
    assert result[0] == tag


@pytest.mark.parametrize("checksum", [True, False])
def test_frame_layout(checksum: bool) -> None:
    header = b"HO" + bytes([5, checksum]) + struct.pack("<IQIIIIIQ", 1, 2, 3, 4, 5, 6, 7, 3)
    writer = FrameWriter(ORIGIN, checksum)
    for number in range(3):
        begin = header + struct.pack("<IQI", 8, 9, number)
        crc = zlib.crc32(begin + b"abc" if checksum else begin)
        assert writer.write(TAG, b"abc") == begin + struct.pack("<I", crc) + b"abc"


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "i8"])
def test_the_payload_is_aligned_for_numpy(dtype: str) -> None:
    assert HEADER_BYTES % 64 == 0
    array = np.arange(100, dtype=dtype)
    result = read(frame_of(array.view(np.uint8).data))
    assert result is not None
    values = np.frombuffer(result[1], dtype)
    assert values.flags.aligned
    np.testing.assert_array_equal(values, array)


# --- refused frames ---------------------------------------------------------------------------


def changed(position: int, value: bytes) -> bytes:
    good = frame_of(bytes(1000))
    return good[:position] + value + good[position + len(value) :]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"", "0 bytes"),
        (b"HO", "2 bytes"),
        (frame_of(b"")[:-1], "63 bytes.*64"),
        (frame_of(bytes(4096))[:1064], "expected 4096 bytes of payload, got 1000"),
        (frame_of(bytes(1000)) + b"x", "expected 1000 bytes of payload, got 1001"),
        (changed(0, b"GE"), "GE"),
        (changed(2, b"\x01"), "version 1.*version 5"),
        (changed(36, struct.pack("<Q", 2**64 - 1)), f"expected {2**64 - 1} bytes"),
        (changed(600, b"\x01"), "step 2, bucket 3, round 4, chunk 5, segment 6.*checksum"),
        (b"GET / HTTP/1.1\r\n" * 8, "GE"),
    ],
    ids=[
        "empty",
        "magic",
        "header",
        "short",
        "long",
        "not-ours",
        "version",
        "length",
        "flipped",
        "http",
    ],
)
def test_malformed_frames_are_refused(bad: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read(bad)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(message)


@given(st.binary(max_size=100), st.data())
def test_a_flipped_bit_anywhere_is_detected(payload: bytes, data: st.DataObject) -> None:
    message = bytearray(frame_of(payload))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        read(bytes(message))


@given(st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_flipped_header_bit_is_detected_without_payload_checksum(bit: int) -> None:
    message = bytearray(frame_of(bytes(100), checksum=False))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        read(bytes(message))


@given(st.binary(max_size=100), st.data())
def test_a_truncated_or_extended_frame_is_detected(payload: bytes, data: st.DataObject) -> None:
    message = frame_of(payload, checksum=False)
    length = data.draw(st.integers(0, 2 * len(message)).filter(lambda n: n != len(message)))
    with pytest.raises(ProtocolError):
        read((message + bytes(len(message)))[:length])


@pytest.mark.parametrize("origin", [Origin(8, 10), Origin(7, 9)])
def test_a_frame_of_another_job_or_incarnation_is_refused(origin: Origin) -> None:
    with pytest.raises(ProtocolError, match=r"job 00000008, incarnation 0+9, expected"):
        FrameReader(origin).read(frame_of(b"abc"))


# --- order of frames --------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=10))
def test_repeated_frames_are_ignored(again: list[int]) -> None:
    writer, reader = FrameWriter(ORIGIN, False), FrameReader(ORIGIN)
    frames = [writer.write(TAG, bytes([n])) for n in range(5)]
    taken = []
    for number, message in enumerate(frames):
        for repeated in [n for n in again if n < number]:
            assert reader.read(frames[repeated]) is None
        result = reader.read(message)
        assert result is not None
        taken.append(result[1][0])
    assert taken == list(range(5))


def test_a_missing_frame_is_detected() -> None:
    writer, reader = FrameWriter(ORIGIN, False), FrameReader(ORIGIN)
    frames = [writer.write(TAG, b"") for _ in range(4)]
    assert reader.read(frames[0]) is not None
    with pytest.raises(ProtocolError, match="2 frame"):
        reader.read(frames[3])


def test_sequence_numbers_wrap_around() -> None:
    writer, reader = FrameWriter(ORIGIN, False), FrameReader(ORIGIN)
    writer._next = reader._next = 2**32 - 2
    frames = [writer.write(TAG, bytes([n])) for n in range(4)]
    for message in frames:
        result = reader.read(message)
        assert result is not None
        assert reader.read(message) is None
