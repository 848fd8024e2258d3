"""Tests how the messages of a child are found in the bytes that it has written."""

from __future__ import annotations

import pytest

from fourfold.workers import frames
from fourfold.workers.frames import Frames, Lines


def test_a_frame_of_the_largest_size_is_read_to_its_end() -> None:
    data = bytearray(frames.HEADER.pack(100) + b"x" * 98)
    assert Frames(100).split(data) == []
    data += b"xx" + frames.HEADER.pack(2) + b"{}" + b"\x01"
    assert Frames(100).split(data) == [b"x" * 100, b"{}"]
    assert data == b"\x01"


def test_a_frame_above_the_limit_is_refused_after_those_before_it() -> None:
    data = bytearray(frames.HEADER.pack(2) + b"{}" + frames.HEADER.pack(101))
    assert Frames(100).split(data) == [b"{}"]
    with pytest.raises(ValueError, match="it announced 101 bytes; at most 100 are allowed"):
        Frames(100).split(data)


def test_lines_are_found_with_their_ends_and_a_long_one_is_refused_after_those_before_it() -> None:
    data = bytearray(b"1\n2\n" + b"x" * 8)
    assert Lines(8).split(data) == [b"1\n", b"2\n"]
    assert Lines(8).split(data) == []
    for rest in (b"x", b"x\n"):
        with pytest.raises(ValueError, match="a line of over 8 bytes"):
            Lines(8).split(bytearray(data + rest))
