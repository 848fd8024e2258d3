"""Begins a program that `Child.start` started, inside its process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fourfold import sandbox
from fourfold.host.process_tree import die_with_parent


class Inside(NamedTuple):
    """The pipes of the service, and the sandbox of this process; None: it has all rights of the service."""

    requests: BinaryIO
    replies: BinaryIO
    policy: sandbox.Policy | None


def begin(arguments: Sequence[str]) -> Inside:
    """Tie the life of this process to the service, `arguments[0]`, and enter the policy `arguments[1]` (JSON)."""
    die_with_parent(int(arguments[0]))
    requests, replies = _take_pipes()
    sys.path.append(str(Path.cwd()))  # last, so that no file there hides an installed package
    policy = sandbox.Policy.from_json(arguments[1]) if arguments[1] else None
    if policy is not None:
        sandbox.enter(policy)
    return Inside(requests, replies, policy)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes of the service to other descriptors; print() then writes to stderr and input() reads nothing.

    C code that uses descriptors 0 and 1 cannot disturb the protocol either.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies
