"""The version of the contract in `proto/`, and where its files are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

CONTRACT_VERSION: Final = "1.11"
"""MAJOR.MINOR. MINOR grows with every additive change, MAJOR with a change that breaks older clients."""
_INSTALLED: Final = Path(__file__).with_name("protos")
PROTO_DIR: Final = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1] / "proto"
"""The import root of the .proto files, and DESCRIPTOR_SET: in a wheel and in a checkout."""
DESCRIPTOR_SET: Final = "fourfold.binpb"
"""A `google.protobuf.FileDescriptorSet` with all imported files."""
_VERSION: Final = re.compile(r"[0-9]{1,6}\.[0-9]{1,6}")


def has_minor(version: str, minor: int) -> bool:
    """Return whether a service of contract `version` has what 1.`minor` added. An empty version is that of 1.0."""
    return bool(_VERSION.fullmatch(version)) and int(version.partition(".")[2]) >= minor


def contract_problem(version: str) -> str:
    """Return why a service of contract `version` cannot be used, with the remedy; empty: it can.

    An empty version is that of a service older than the field.
    """
    if not version:
        return ""
    if not _VERSION.fullmatch(version):
        return f"contract_version is {version[:40]!r}; it must be MAJOR.MINOR"
    theirs, ours = (int(v.partition(".")[0]) for v in (version, CONTRACT_VERSION))
    if theirs == ours:
        return ""
    return (
        f"the service has contract {version}, and this client {CONTRACT_VERSION}; both need the same major version: "
        f"upgrade {'this client' if theirs > ours else 'the service'}"
    )
