"""Checks what trainer and engines answer in a weight update. All functions raise PeerFault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fourfold.rpc.channel import require

MAX_DEVICES: Final = 4096
"""Devices, workers or ranks of one service."""
MAX_OFFER_BYTES: Final = 4096
_UUID_BYTES: Final = 16
_SUM_BYTES: Final = 16


def check_devices(uuids: Sequence[bytes], *, peer: str, name: str) -> None:
    """Check the ids of GPUs."""
    require(len(uuids) <= MAX_DEVICES, f"{len(uuids)} devices; at most {MAX_DEVICES}", peer=peer, name=name)
    sizes = {len(uuid) for uuid in uuids} - {_UUID_BYTES}
    rule = f"a device UUID has {min(sizes, default=0)} bytes; it must have {_UUID_BYTES}"
    require(not sizes, rule, peer=peer, name=name)


def check_digest(digest: bytes, *, peer: str, name: str) -> None:
    """Check a SHA-256."""
    require(len(digest) == 32, f"a digest has {len(digest)} bytes; it must have 32", peer=peer, name=name)


def check_sums(sums: bytes, *, peer: str, name: str) -> None:
    """Check the sums of tensors; none are sums, too."""
    rule = f"sums have {len(sums)} bytes; each tensor needs {_SUM_BYTES}"
    require(len(sums) % _SUM_BYTES == 0, rule, peer=peer, name=name)


def check_offers(offers: Sequence[bytes], *, peer: str, name: str) -> None:
    """Check the offers of the trainer's ranks, and log none of them."""
    rule = f"{len(offers)} offers; there must be 1 to {MAX_DEVICES}, one a rank"
    require(1 <= len(offers) <= MAX_DEVICES, rule, peer=peer, name=name)
    largest = max(map(len, offers))
    rule = f"an offer has {largest} bytes; it may have {MAX_OFFER_BYTES}"
    require(largest <= MAX_OFFER_BYTES, rule, peer=peer, name=name)
