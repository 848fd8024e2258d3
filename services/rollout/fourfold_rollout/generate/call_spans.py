"""Makes the spans of a Generate call's samples: `queue` until the engine has them, then `generate`."""

from __future__ import annotations

from collections import Counter
from typing import Final

from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.tracing import spans
from fourfold_rollout.generate.admission import GenerateCall


class CallSpans:
    """The spans of one call in the traces of its caller. The spans of a sample end with its last tokens."""

    def __init__(self, call: GenerateCall, model: str) -> None:
        """Begin `queue`."""
        self._call: Final = spans.current()
        self._phase = self._call.child("queue")
        self._tokens: Counter[int] = Counter()
        self._call.set(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": len(call.prompt_token_ids),
            }
        )

    def begin_generate(self) -> None:
        """Note that the engine has the samples."""
        self._phase.end_all()
        self._phase = self._call.child("generate")

    def add(self, chunk: pb.SampleChunk) -> None:
        """Note tokens that were sampled."""
        if not self._call:
            return
        index = chunk.sample_index
        self._tokens[index] += len(chunk.token_ids) // 4
        if chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            reason = pb.FinishReason.Name(chunk.finish_reason).removeprefix("FINISH_REASON_").lower()
            self._phase.end(index)
            self._call.end(
                index,
                {
                    "gen_ai.response.finish_reasons": (reason,),
                    "gen_ai.usage.output_tokens": self._tokens[index],
                    "fourfold.policy_version": chunk.policy_version,
                },
            )

    def close(self) -> None:
        """End the spans of unfinished samples."""
        self._phase.end_all()
