"""Keeps every file of a checkpoint on two machines, or on storage that several machines share.

    save      each rank writes its file on its machine
              files that only one machine sees are copied: to rank 0's machine, or from there to the next one
    restore   files that a machine does not see are copied to it

The files that a machine sees decide, not a setting: on shared storage nothing is copied. Files travel over the network
of the collectives, from rank to rank.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fourfold.errors import InvalidInput
from fourfold_trainer.checkpoint.store import STATE_FILE, put_in_place, remove, sync, write_text, writing

_PART_BYTES: Final = 16 << 20
_COPYING: Final = ".copying-"


@dataclass(frozen=True, slots=True)
class FileCopy:
    """A file that one rank sends to another."""

    name: str  # relative to the folder that both have under the same name
    size: int  # bytes
    source: int  # rank
    target: int


def list_files(folder: Path) -> dict[str, int]:
    """Return the sizes of all complete files in a folder and the folders in it, by relative path."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith(_COPYING):
            found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def copies_to_keep(seen: Sequence[Mapping[str, int]], machines: Sequence[range]) -> list[FileCopy]:
    """Return the copies after which rank 0's machine and a second one have every file.

    Args:
        seen: the files that each machine sees, and their sizes.
        machines: the ranks of each machine, rank 0's first.
    """
    copies = []
    for name in sorted({name for files in seen for name in files}):
        holders = [index for index, files in enumerate(seen) if name in files]
        if 0 not in holders:
            copies.append(_copy(name, seen, machines, holders[0], 0))
        elif len(holders) == 1:
            copies.append(_copy(name, seen, machines, 0, 1))
    return copies


def copies_to_read(
    seen: Sequence[Mapping[str, int]], machines: Sequence[range], wanted: Mapping[str, int]
) -> list[FileCopy]:
    """Return the copies after which every machine sees all `wanted` files; some machine must see each in full."""
    copies = []
    for name, size in wanted.items():
        holders = [index for index, files in enumerate(seen) if files.get(name) == size]
        for index in range(len(machines)):
            if index not in holders:
                copies.append(_copy(name, seen, machines, holders[0], index))
    return copies


def _copy(
    name: str, seen: Sequence[Mapping[str, int]], machines: Sequence[range], source: int, target: int
) -> FileCopy:
    # Several ranks of a machine send and receive side by side.
    spread = sum(name.encode())
    ranks = machines[source], machines[target]
    return FileCopy(name, seen[source][name], *(each[spread % len(each)] for each in ranks))


def copy_files(folder: Path, copies: Sequence[FileCopy], *, rank: int, group: Any) -> None:
    """Send and receive this rank's share of `copies`; all ranks of `group` call it with the same ones.

    Raises:
        InvalidInput: a name leaves the folder.
        Unavailable: the disk refuses a write.
    """
    for copy in copies:
        path = folder / copy.name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise InvalidInput(f"the name {copy.name!r:.100} leaves {folder}; it must be a file in it")
        if rank == copy.source:
            _send(path, copy, group)
        elif rank == copy.target:
            with writing(path):
                _receive(path, copy, group)


def _send(path: Path, copy: FileCopy, group: Any) -> None:
    with path.open("rb") as file:
        for start in range(0, copy.size, _PART_BYTES):
            part = torch.zeros(min(_PART_BYTES, copy.size - start), dtype=torch.uint8)
            file.readinto(part.numpy().data)
            torch.distributed.send(part, copy.target, group=group)


def _receive(path: Path, copy: FileCopy, group: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{_COPYING}{path.name}-{os.getpid()}")
    with partial.open("wb") as file:
        for start in range(0, copy.size, _PART_BYTES):
            part = torch.empty(min(_PART_BYTES, copy.size - start), dtype=torch.uint8)
            torch.distributed.recv(part, copy.source, group=group)
            file.write(part.numpy().data)
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def commit(partial: Path, target: Path, record: str) -> None:
    """Make `partial` the checkpoint `target` on this machine, with the text of its record file.

    Does nothing on machines that share the folder with rank 0, which commits it.
    """
    if (partial / STATE_FILE).exists() or not partial.is_dir():
        return
    write_text(partial / STATE_FILE, record)
    put_in_place(partial, target)
    shutil.rmtree(partial, ignore_errors=True)


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove all other checkpoints from a folder, and partial files of a crash."""
    for path in folder.glob(f"*/{STATE_FILE}"):
        if path.parent.name not in names and not path.parent.name.startswith("."):
            remove(path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteCheckpoint:
    """A checkpoint whose files are all on some machine."""

    name: str
    files: dict[str, int]  # sizes by path relative to the folder of checkpoints, with the record
    stale: list[int]  # indices of machines with another checkpoint of the same name


def newest_complete(
    seen: Sequence[Mapping[str, int]], records: Sequence[Mapping[str, str]]
) -> CompleteCheckpoint | None:
    """Return the newest checkpoint all files of which are on some machine; None if there is none.

    A machine that was away while its ranks were missing may have a checkpoint of the same step from another history,
    with the files of more ranks.

    Args:
        seen: the files in the folder of checkpoints that each machine sees.
        records: the texts of the record files there, by name of the checkpoint.
    """
    read = [{name: fields for name, text in machine.items() if (fields := _record(text))} for machine in records]
    for name in sorted({name for machine in read for name in machine}, reverse=True):
        for index, machine in enumerate(read):  # prefer the files of rank 0's machine
            if name not in machine or machine[name] in [other.get(name) for other in read[:index]]:
                continue
            stale = [i for i, other in enumerate(read) if other.get(name, machine[name]) != machine[name]]
            same = [holder for i, holder in enumerate(seen) if i not in stale]
            files = {f"{name}/{file}": size for file, size in machine[name]["files"].items()}
            if all(any(holder.get(file) == size for holder in same) for file, size in files.items()):
                files[f"{name}/{STATE_FILE}"] = seen[index].get(f"{name}/{STATE_FILE}", 0)
                return CompleteCheckpoint(name=name, files=files, stale=stale)
    return None


def _record(text: str) -> dict[str, Any]:
    """Return the record of a checkpoint, without the score, which is added later; {} if it is damaged."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        record = {**json.loads(text), "score": None}
        if all(isinstance(size, int) for size in record["files"].values()):
            return record
    return {}
