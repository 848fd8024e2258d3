"""Sends the weights of an engine to late engines from a thread, in place of the trainer's ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from fourfold.errors import CONSEQUENCES, FourfoldError
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.tensor_sums import partial_sums
from fourfold.weights.transport.base import Backend, TransferGroup, make_sender
from fourfold.weights.transport.staging import span_view
from fourfold.weights.transport.waiting import Deadline

_log = logging.getLogger(__name__)
_JOIN_SECONDS = 10.0


class HeldShards:
    """Implements `WeightSource` with the shards of all ranks as they arrived: uint8 [bytes] each."""

    def __init__(self, manifest: Manifest, shards: Sequence[torch.Tensor]) -> None:
        self._manifest, self._shards = manifest, shards

    def manifest(self) -> Manifest:
        return self._manifest

    def begin_round(self) -> None:
        pass

    def read(self, span: Span) -> torch.Tensor:
        return span_view(self._manifest, self._shards[span.rank], span)

    def is_view(self, span: Span) -> bool:
        return True

    def end_round(self) -> None:
        pass


class WeightFeed:
    """One transfer to late receivers, by gloo: one sender for each rank of the manifest."""

    def __init__(self, group: TransferGroup, shards: Sequence[torch.Tensor], version: int, timeout: float) -> None:
        """Make the offers and start the thread. Raises WrongState: see `listen_address`."""
        self._source = HeldShards(group.manifest, shards)
        self._manifest = group.manifest
        ranks = range(group.manifest.rank_count)
        self._senders = [make_sender(Backend.GLOO, group, rank, self._source) for rank in ranks]
        self.offers = [sender.offer() for sender in self._senders]
        self.sums = b""
        """Sums of the weights sent; empty until everything was sent."""
        self._thread = threading.Thread(target=self._run, args=(version, timeout), name="weights-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the transfer. Any number of times."""
        for sender in self._senders:
            sender.abort()
        self._thread.join(_JOIN_SECONDS)

    def _run(self, version: int, timeout: float) -> None:
        deadline = Deadline(timeout)
        try:
            for sender in self._senders:
                sender.open(deadline)
            for sender in self._senders:
                sender.send(version, deadline)
            self.sums = partial_sums(self._manifest, ((span, self._source.read(span)) for span in self._manifest.spans))
            _log.info("Weights sent to late engines. version=%d", version)
        except FourfoldError as error:  # the late engines report errors, and the coordinator chooses another sender
            level = logging.INFO if error.reason in CONSEQUENCES else logging.WARNING
            _log.log(level, "Late engines could not be fed. version=%d error=%s", version, error)
        finally:
            for sender in self._senders:
                sender.close()
