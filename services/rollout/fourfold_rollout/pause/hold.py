"""Keeps back the tokens of a version that is committed but not released, and delivers or drops them later.

hold --> release: held outputs are delivered in order
  '----> drop:    held outputs, and those of the version that still come, are discarded --> end_drop
"""

from __future__ import annotations

from typing import Protocol

from fourfold_rollout.engine import SampleOutput


class TokenSink(Protocol):
    """Receives the outputs that `TokenHold` lets pass."""

    def deliver(self, index: int, version: int, output: SampleOutput) -> None:
        """Take the next tokens of a sample."""

    def drop(self, index: int, version: int) -> None:
        """End a sample whose tokens of `version` were discarded."""


class TokenHold:
    """Passes every output of one engine on to its sink: now, on release, or never."""

    def __init__(self) -> None:
        self.version = 0  # of the weights that sample now or sampled last
        self._held: int | None = None
        self._dropping = False
        self._waiting: list[tuple[TokenSink, int, SampleOutput]] = []

    @property
    def holding(self) -> bool:
        return self._held is not None

    def pass_on(self, sink: TokenSink, index: int, version: int, output: SampleOutput) -> None:
        """Deliver, keep or discard one output, by the version that sampled it."""
        if version != self._held:
            sink.deliver(index, version, output)
        elif not self._dropping:
            self._waiting.append((sink, index, output))
        elif output.finish is not None:
            sink.drop(index, version)

    def hold(self) -> None:
        """Keep back the outputs of the present version. Outputs of older versions still pass."""
        self._held = self.version

    def release(self) -> None:
        """Deliver the held outputs in order. Does nothing without a hold."""
        if self._held is None or self._dropping:
            return
        version, waiting = self._held, self._waiting
        self._held, self._waiting = None, []
        for sink, index, output in waiting:
            sink.deliver(index, version, output)

    def drop(self) -> None:
        """Discard the held outputs and end the samples that had finished. Does nothing without a hold."""
        if self._held is None or self._dropping:
            return
        self._dropping = True
        waiting, self._waiting = self._waiting, []
        for sink, index, output in waiting:
            if output.finish is not None:
                sink.drop(index, self._held)

    def end_drop(self) -> None:
        """Stop dropping: the engine has no more tokens of the dropped version."""
        if self._dropping:
            self._held, self._dropping = None, False

    def forget(self, sink: TokenSink) -> None:
        """Discard the held outputs of a sink whose caller has left."""
        if self._waiting:
            self._waiting = [entry for entry in self._waiting if entry[0] is not sink]
