"""Joins each prompt with the answer of another one: what KTO measures its distance on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fourfold.arrays import EMPTY_FLOATS
from fourfold.errors import InvalidInput
from fourfold.sample.sample import Sample


def mismatched(samples: Sequence[Sample], *, max_tokens: int) -> list[Sample]:
    """Return for each sample its prompt with the answer of the next one, the first after the last; without a score.

    A rotation by one pairs no sample with itself, as a reversal does with the middle one of an odd number. The new
    samples are in the groups of their prompts. Their log-probabilities and those of the reference are not known yet.

    Args:
        samples: the labelled answers of a step in the order of the data, each in one segment, with an answer.
        max_tokens: longest sample; a longer answer is cut on the right.

    Raises:
        InvalidInput: fewer than two samples, or a prompt leaves no room for a token of an answer.
    """
    if len(samples) < 2:
        raise InvalidInput(f"a step of {len(samples)} samples has no answers of other prompts; send at least 2")
    return [_joined(one, samples[(i + 1) % len(samples)], max_tokens) for i, one in enumerate(samples)]


def _joined(one: Sample, other: Sample, max_tokens: int) -> Sample:
    prompt, start = int(np.argmax(one.action_mask)), int(np.argmax(other.action_mask))
    stop = start + max_tokens - prompt
    if stop <= start:
        raise InvalidInput(
            f"sample {one.sample_id} has a prompt of {prompt} tokens, which leaves no room for an answer in "
            f"{max_tokens}; leave it out, or raise model.max_context_tokens"
        )
    before = np.zeros(prompt, np.bool_)
    return replace(
        one,
        sample_id=f"{one.sample_id}-mismatched",
        token_ids=np.concatenate([one.token_ids[:prompt], other.token_ids[start:stop]]),
        action_mask=np.concatenate([before, other.action_mask[start:stop]]),
        loss_mask=np.concatenate([before, other.loss_mask[start:stop]]),
        behavior_logprobs=EMPTY_FLOATS,
        reference_logprobs=EMPTY_FLOATS,
        token_rewards=EMPTY_FLOATS,
        version_spans=(),
        score=None,
        terms=(),
        trajectory_id="",
    )
