"""Assembles one sample of a turn from the chunks of engines: tokens, text, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import read_ints
from fourfold.sample.sampled import SampledTokens, TokenDraft

# Decoded text ends with this character when tokens of its last character are still missing.
_INCOMPLETE: Final = "\ufffd"
_REASONS: Final = {
    rollout.FINISH_REASON_STOP: pb.FINISH_REASON_STOP,
    rollout.FINISH_REASON_LENGTH: pb.FINISH_REASON_LENGTH,
}


class TextStream:
    """Converts token ids to text incrementally."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._read = 0  # decode from an earlier token: a tokenizer may drop the space of the first one

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Return the new text. A character with missing tokens is held back until they arrive, or until `last`."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        text = self._tokenizer.decode(self._ids[self._begin :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not last):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return text[len(before) :]


class TurnText:
    """The tokens and the text of one sample in progress."""

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.index = index
        self.finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
        self.ids: list[int] = []
        self.text = ""  # without special tokens, before a stop string
        self.stopped = False  # a stop string was found: later chunks are ignored
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer)
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._sent = 0  # characters of `text` that were passed on
        self._draft = TokenDraft()

    def add(self, chunk: rollout.SampleChunk) -> pb.TurnChunk:
        """Add a checked chunk; return the agent's chunk for it, without a finish_reason."""
        ids, logprobs = read_ints(chunk.token_ids).tolist(), chunk.logprobs
        finished = chunk.finish_reason != rollout.FINISH_REASON_UNSPECIFIED
        if self._stop:
            ids = ids[: self._count_until_stop(ids, finished)]
            logprobs = logprobs[: 4 * len(ids)]
        else:
            self.text += self._stream.add(ids, last=finished)
        self.ids += ids
        self._draft.append(chunk, len(ids))
        if self.stopped:
            self.finish_reason = pb.FINISH_REASON_STOP
        elif finished:
            self.finish_reason = _REASONS[chunk.finish_reason]
        return pb.TurnChunk(
            sample_index=self.index,
            token_ids=np.array(ids, "<i4").tobytes(),
            logprobs=logprobs,
            policy_version=chunk.policy_version,
            text=self._new_text(),
        )

    def tokens(self) -> SampledTokens:
        """Return what was sampled."""
        return SampledTokens(**self._draft.fields())

    def raw_text(self) -> str:
        """Return the text with special tokens, for the parsers of tool calls and reasoning.

        The stop token at the end is left out, as in vLLM's own API, because parsers would keep its text in the content.
        """
        if self.stopped:
            return self.text
        ends = bool(self.ids) and self.ids[-1] in self._tokenizer.stop_token_ids
        return self._tokenizer.decode(self.ids[:-1] if ends else self.ids, skip_special=False)

    def _count_until_stop(self, ids: Sequence[int], finished: bool) -> int:
        """Add the text of tokens one by one; return their number up to the one that completes a stop string."""
        for position, token in enumerate(ids):
            last = finished and position == len(ids) - 1
            before = len(self.text)
            self.text += self._stream.add([token], last=last)
            begin = max(before - self._longest + 1, 0)
            found = [at for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
            if found:
                self.text, self.stopped = self.text[: min(found)], True
                return position + 1
        return len(ids)

    def _new_text(self) -> str:
        """Return the text that the agent does not have yet, without an end that may begin a stop string."""
        end = len(self.text)
        if self.finish_reason == pb.FINISH_REASON_UNSPECIFIED and self._longest:
            end = max(end - self._longest + 1, self._sent)
        text, self._sent = self.text[self._sent : end], max(end, self._sent)
        return text
