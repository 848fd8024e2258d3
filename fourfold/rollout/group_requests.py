"""Makes the Generate requests of one group, for first calls and continuations, and joins the tokens of the calls.

A sample that an engine left unfinished is continued from its token ids, on any engine:

    first request     prompt                 max_tokens      seed + index
    continuation      prompt + ids so far    the rest of it  a seed derived from the group's, the index and the length

Neither depends on the engine or on the time, so that equal interruptions give equal requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fourfold.arrays import Int32Array
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.sample.sampled import join_fields
from fourfold.seeds import derive_seed

Parts = tuple[Completion, ...]  # the checked parts of one sample, one for each call that sampled at least one token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRequest:
    """The request of a group to the engines."""

    name: str  # beginning of its request ids
    prompt_token_ids: Int32Array
    params: rollout.SamplingParams  # with max_tokens and seed
    count: int  # samples
    version: int  # lowest policy version that an engine may have
    sample_ids: tuple[str, ...] = ()  # names for traces; empty: the samples have none
    engine: tuple[str, str] | None = None  # member id and incarnation: to ask as long as it is usable; None: any

    def plan(
        self, unfinished: Mapping[int, Parts], *, number: int, flush_seconds: float | None
    ) -> list[tuple[rollout.GenerateRequest, list[int]]]:
        """Return the requests for some samples, each with the indices of its samples, in their order.

        Neighbours without a token share a request. Each other sample has a prompt of its own, and so a request.

        Args:
            unfinished: Parts of each sample, by index in ascending order.
            number: Unique in the group; part of the request ids.
            flush_seconds: Longest time for which an engine keeps tokens; None: until their sample is finished.
        """
        # Consecutive samples without tokens have the same index - position, and so form a group. The key of a sample
        # with tokens is its index, so that it has a group of its own.
        numbered = enumerate(unfinished.items())
        runs = groupby(numbered, key=lambda e: (e[1][0], True) if e[1][1] else (e[1][0] - e[0], False))
        samples = [[index for _, (index, _) in run] for _, run in runs]
        result = []
        for indices in samples:
            name = f"{self.name}-{number}" if len(samples) == 1 else f"{self.name}-{number}-{indices[0]}"
            request = self._request(name, indices[0], unfinished[indices[0]], len(indices))
            if flush_seconds is not None:
                request.flush_interval.FromNanoseconds(int(flush_seconds * 1e9))
            result.append((request, indices))
        return result

    def _request(self, name: str, index: int, parts: Parts, count: int) -> rollout.GenerateRequest:
        params, done = rollout.SamplingParams(), token_count(parts)
        params.CopyFrom(self.params)
        params.seed = self.params.seed + index  # the engine adds the index of the sample in the request
        if done:
            params.max_tokens -= done
            # With the first seed, an engine that counts draws from 0 would repeat the noise of the first tokens.
            params.seed = derive_seed(self.params.seed, "continue", index, done)
        return rollout.GenerateRequest(
            request_id=name,
            prompt_token_ids=np.concatenate([self.prompt_token_ids, *(p.token_ids for p in parts)]).tolist(),
            sampling_params=params,
            sample_count=count,
            min_policy_version=self.version,
            grammar_prefix_count=done if params.HasField("grammar") else 0,
        )

    def finish_reason(self, parts: Parts, stop_token_ids: frozenset[int]) -> rollout.FinishReason.ValueType:
        """Return the finish reason of a sample with at least one part; FINISH_REASON_UNSPECIFIED if unfinished."""
        last = parts[-1]
        if last.finish_reason in (rollout.FINISH_REASON_STOP, rollout.FINISH_REASON_LENGTH):
            return last.finish_reason
        # The engine was interrupted between the last token and its finish_reason.
        if int(last.token_ids[-1]) in stop_token_ids:
            return rollout.FINISH_REASON_STOP
        if token_count(parts) >= self.params.max_tokens:
            return rollout.FINISH_REASON_LENGTH
        return rollout.FINISH_REASON_UNSPECIFIED


def token_count(parts: Iterable[Completion]) -> int:
    """Return the number of tokens of some parts together."""
    return sum(len(part.token_ids) for part in parts)


def join_parts(index: int, parts: Parts, finish_reason: rollout.FinishReason.ValueType) -> Completion:
    """Return a sample of at least one part as one completion; every token keeps the version that sampled it."""
    if len(parts) == 1 and parts[0].finish_reason == finish_reason:
        return parts[0]
    return Completion(sample_index=index, finish_reason=finish_reason, **join_fields(parts))
