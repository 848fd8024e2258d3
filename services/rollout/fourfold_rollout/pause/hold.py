"""What tokens pass on their way out: it knows the version that samples now, and keeps a held one back."""

from __future__ import annotations

from typing import Protocol

from fourfold_rollout.engine import SampleOutput


class TokenSink(Protocol):
    """Gets what the gate lets out."""

    def deliver(self, index: int, version: int, output: SampleOutput) -> None:
        """Take the next tokens of a sample."""
        ...

    def drop(self, index: int, version: int) -> None:
        """End a sample; the tokens of `version` that it has are lost."""
        ...


class TokenHold:
    """One for an engine.

    hold      outputs of the present version wait here, those of older ones pass
    release   what waits goes out, in order
    drop      what waits is forgotten, and what still comes of that version; `end` when nothing comes any more
    """

    def __init__(self) -> None:
        self.version = 0
        """Of the weights that sample now, or did last."""
        self._held: int | None = None
        self._dropping = False
        self._waiting: list[tuple[TokenSink, int, SampleOutput]] = []

    @property
    def holding(self) -> bool:
        """Whether it keeps anything back, or drops it."""
        return self._held is not None

    def pass_on(self, taker: TokenSink, index: int, version: int, output: SampleOutput) -> None:
        """Let an output out to its taker, now, later or never."""
        if version != self._held:
            taker.deliver(index, version, output)
        elif not self._dropping:
            self._waiting.append((taker, index, output))
        elif output.finish is not None:
            taker.drop(index, version)

    def hold(self) -> None:
        """Keep back what the present version samples."""
        self._held = self.version

    def release(self) -> None:
        """Let everything out. Without a hold: does nothing."""
        if self._held is None or self._dropping:
            return
        version, waiting = self._held, self._waiting
        self._held, self._waiting = None, []
        for taker, index, output in waiting:
            taker.deliver(index, version, output)

    def drop(self) -> None:
        """Never let it out; samples that had finished end now. Without a hold: does nothing."""
        if self._held is None or self._dropping:
            return
        self._dropping = True
        waiting, self._waiting = self._waiting, []
        for taker, index, output in waiting:
            if output.finish is not None:
                taker.drop(index, self._held)

    def end(self) -> None:
        """End a drop: nothing of that version is in the engine any more."""
        if self._dropping:
            self._held, self._dropping = None, False

    def forget(self, taker: TokenSink) -> None:
        """Let out nothing of a taker that has gone."""
        if self._waiting:
            self._waiting = [entry for entry in self._waiting if entry[0] is not taker]
