"""Checks what a service says of the model that it serves; rollout, reference and trainer say it in the same fields."""

from __future__ import annotations

from typing import Final, Protocol

from fourfold.bounds import MAX_NUMBER
from fourfold.rpc.channel import require

LARGEST_OF_ENGINE: Final = 1 << 40
"""A run gives its weights a higher version than any engine claims to hold: engines must leave room for that."""


class ModelInfo(Protocol):
    """The fields that are checked."""

    tokenizer_sha256: bytes
    max_context_tokens: int
    vocabulary_size: int


def check_model(info: ModelInfo, *, peer: str, name: str = "GetInfo") -> None:
    """Check tokenizer and sizes.

    Raises:
        PeerFault: names the value that cannot be.
    """
    check_tokenizer(info.tokenizer_sha256, peer=peer, name=name)
    for field in ("max_context_tokens", "vocabulary_size"):
        value = getattr(info, field)
        require(value >= 0, f"{field} is {value}; it must be at least 0", peer=peer, name=name)


def check_tokenizer(digest: bytes, *, peer: str, name: str) -> None:
    """Check the digest of a tokenizer: empty where there is none.

    Raises:
        PeerFault: it is none.
    """
    rule = f"tokenizer_sha256 has {len(digest)} bytes; a SHA-256 has 32"
    require(len(digest) in (0, 32), rule, peer=peer, name=name)


def check_version(version: int, *, peer: str, name: str, largest: int = MAX_NUMBER) -> None:
    """Check a policy version.

    Raises:
        PeerFault: it is below 0 or above `largest`.
    """
    rule = f"policy_version is {version}; it must be in [0, {largest}]"
    require(0 <= version <= largest, rule, peer=peer, name=name, kind="BAD_VERSION")
