"""Records that are there again after any kill, and what is done about those that are not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fourfold_coordinator.state.segments import BadRecord, SegmentFiles

BODIES = [b"first", b"x" * 300, b"\x00"]


def append(files: SegmentFiles, *bodies: bytes) -> list[tuple[int, int]]:
    """Append bodies, each in two parts."""
    return files.append([[body[:1], memoryview(body)[1:]] for body in bodies])


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def test_records_are_read_back_by_the_next_process(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    places = append(files, *BODIES[:2]) + append(files, *BODIES[2:])
    later = SegmentFiles(tmp_path)
    assert [later.read(*place) for place in places] == BODIES
    (place,) = append(later, b"later")
    assert place[0] == 2, "a new process appends to a segment of its own"
    assert later.read(*place) == b"later"


def test_a_segment_that_is_full_is_followed_by_another(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, segment_bytes=100)
    places = [append(files, b"x" * 60)[0] for _ in range(4)]
    assert [number for number, _ in places] == [1, 1, 2, 2]
    assert [files.read(*place) for place in places] == [b"x" * 60] * 4


def test_a_tail_that_a_kill_tore_at_any_byte_is_cut_off_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = SegmentFiles(tmp_path)
    whole = append(files, *BODIES[:2])
    (path,) = paths(tmp_path)
    good = path.stat().st_size
    append(files, b"torn", b"as well")
    data = path.read_bytes()
    for size in range(good, len(data)):
        caplog.clear()
        path.write_bytes(data[:size])
        again = SegmentFiles(tmp_path)
        assert [again.read(*place) for place in whole] == BODIES[:2]
        first = good + 8 + len(b"torn")
        kept = first if size >= first else good
        assert path.stat().st_size == kept
        warned = f"cut off a torn record: file={path} offset={kept} bytes={size - kept}"
        assert (warned in caplog.text) == (size > kept)


@pytest.mark.parametrize("tail", [bytes(4096), b"\xff" * 64, b""])
def test_what_a_power_loss_leaves_at_the_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    files = SegmentFiles(tmp_path)
    append(files, *BODIES)
    (path,) = paths(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data + tail)
    SegmentFiles(tmp_path)
    assert path.read_bytes() == data
    path.write_bytes(tail)  # not even the magic bytes
    SegmentFiles(tmp_path)
    assert path.read_bytes() == b""


def test_a_record_with_a_changed_byte_is_not_returned(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path)
    (place,) = append(files, b"arrays of a sample")
    (path,) = paths(tmp_path)
    data = path.read_bytes()
    for index in range(place[1], len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ 64]) + data[index + 1 :])
        with pytest.raises(BadRecord, match=f"record at byte {place[1]}"):
            files.read(*place)
    with pytest.raises(BadRecord, match="No such file"):
        files.read(9, 4)


def test_an_append_that_the_disk_refuses_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = SegmentFiles(tmp_path)
    places = append(files, *BODIES)
    (path,) = paths(tmp_path)
    size = path.stat().st_size
    write = os.write

    def write_ten(descriptor: int, parts: list[bytes]) -> int:
        return write(descriptor, b"".join(parts)[:10])

    def refuse(descriptor: int, data: memoryview) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", write_ten)
        patch.setattr(os, "write", refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                append(files, b"y" * 33)
    assert paths(tmp_path) == [path] and path.stat().st_size == size
    places += append(files, b"again")
    assert [files.read(*place) for place in places] == [*BODIES, b"again"]
    SegmentFiles(tmp_path)
    assert not caplog.records


def test_an_append_that_the_disk_takes_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, write, bodies = SegmentFiles(tmp_path), os.write, [bytes([n]) * n for n in range(1, 256)] * 5
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda descriptor, parts: write(descriptor, b"".join(parts)[:1000]))
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5000]))
        places = append(files, *bodies)
    places += append(files, *bodies)  # more parts than one call takes
    assert [files.read(*place) for place in places] == bodies * 2


def test_segments_that_are_not_needed_are_deleted_and_numbers_are_not_used_again(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, segment_bytes=1)
    places = [append(files, body)[0] for body in BODIES]
    (tmp_path / "notes.txt").write_text("of a user")
    files.keep_only({2})
    assert [path.name for path in paths(tmp_path)] == ["00000002.segment"] and (tmp_path / "notes.txt").exists()
    assert files.read(*places[1]) == BODIES[1]
    files.keep_only(())
    (place,) = append(files, b"new")
    assert place[0] == 4 and files.read(*place) == b"new"
