"""Checks of samples: tokens, their log-probabilities and versions, seeds and limits."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from fourfold.bounds import MAX_NUMBER
from fourfold.contract import contract_problem
from fourfold.errors import WrongState
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.codec import read_floats, read_ints
from fourfold_tools.conformance.calls import (
    check_health_of,
    check_model,
    check_tokenizer_is,
    unary,
    with_unknown_field,
)
from fourfold_tools.conformance.checks import Checks, Skipped, Violation
from fourfold_tools.conformance.rollout.probe import FEW_TOKENS, SERVICE, RolloutProbe

SAMPLING: Final = Checks[RolloutProbe]()
_REPEATS: Final = 3
_SEEDS: Final = (0, 1, 123_456_789, MAX_NUMBER - 1)
_STEEP_SAMPLES: Final = 16
_MOST_FULL_CONTEXT: Final = 8192
_CERTAIN: Final = 1e-3
_PROMPTS: Final = 6
_MOST_TIED: Final = 4
_LARGEST_DIFFERENCE: Final = 10.0
"""A single log-probability may differ by this multiple of the tolerance, because rare tokens round worst."""


@SAMPLING.add
async def check_info(probe: RolloutProbe) -> None:
    """GetInfo has the model, the hash of its tokenizer, its limits, and a contract version of the same MAJOR."""
    info = await probe.get_info()
    check_model(info)
    if not 0 <= info.policy_version <= MAX_NUMBER:
        raise Violation(f"policy_version is {info.policy_version}; it must be in [0, 2^53]")
    if info.max_concurrent_samples < 0:
        raise Violation(f"max_concurrent_samples is {info.max_concurrent_samples}; it must be at least 0")
    if not info.max_concurrent_samples and not probe.agent:
        raise Violation("max_concurrent_samples is 0, which is for agents alone: none of them may sample here")
    if problem := contract_problem(info.contract_version):
        raise Violation(problem)
    again = await probe.get_info()
    if again.policy_version < info.policy_version:
        raise Violation(f"policy_version fell from {info.policy_version} to {again.policy_version}; it never does")
    again.policy_version = info.policy_version
    if again != info:
        raise Violation("a second GetInfo had another answer; model and limits must stay the same")
    probe.info = info


@SAMPLING.add
async def check_health(probe: RolloutProbe) -> None:
    """The health service answers SERVING for "" and for the full name of the service."""
    await check_health_of(probe.channel, SERVICE, seconds=probe.seconds)


@SAMPLING.add
async def check_tokenizer(probe: RolloutProbe) -> None:
    """The hash of the tokenizer is that of the run."""
    if not probe.tokenizer_sha256:
        raise Skipped("no --model was given")
    check_tokenizer_is(probe.tokenizer_sha256, probe.info.tokenizer_sha256)


@SAMPLING.add
async def check_sample(probe: RolloutProbe) -> None:
    """A sample has tokens of the vocabulary, a finite log-probability of at most 0 for each, and a finish reason."""
    for number in range(3):
        await probe.sample(probe.request(prompt=probe.prompt(number)))
    await probe.sample(probe.request(prompt=probe.prompt(3, size=1), request_id="a" * 128))


@SAMPLING.add
async def check_max_tokens(probe: RolloutProbe) -> None:
    """A sample has at most max_tokens tokens; fewer only with the finish reason STOP."""
    for most in (1, 2, 5):
        await probe.sample(probe.request(max_tokens=most, count=min(2, probe.most_samples)))


@SAMPLING.add
async def check_context(probe: RolloutProbe) -> None:
    """Prompt and completion together have at most max_context_tokens."""
    if (context := probe.info.max_context_tokens) > _MOST_FULL_CONTEXT:
        raise Skipped(f"a prompt of {context} tokens is too long for a check")
    request = probe.request(prompt=probe.prompt(size=context - 1))
    request.sampling_params.ClearField("max_tokens")
    await probe.sample(request)


@SAMPLING.add
async def check_several_samples(probe: RolloutProbe) -> None:
    """A call with several samples ends each of them, under its own sample_index."""
    if (count := min(4, probe.most_samples)) < 2:
        raise Skipped("the service takes one sample at a time")
    samples = await probe.sample(probe.request(count=count))
    if [sample.sample_index for sample in samples] != list(range(count)):
        raise Violation(f"the samples have the indices {[sample.sample_index for sample in samples]}")


@SAMPLING.add
async def check_streaming(probe: RolloutProbe) -> None:
    """With flush_interval the first token does not wait for the others; without it, a sample comes once."""
    for flush in (None, 0.0, 10.0):
        request = probe.request(flush=flush, count=min(2, probe.most_samples), temperature=0.0)
        chunks = defaultdict[int, list[pb.SampleChunk]](list)
        async for chunk in probe.client.generate(request):
            chunks[chunk.sample_index].append(chunk)
        for index, parts in chunks.items():
            tokens = sum(len(chunk.token_ids) // 4 for chunk in parts)
            if flush is not None and tokens > 1 and len([chunk for chunk in parts if chunk.token_ids]) < 2:
                raise Violation(f"sample {index} of {tokens} tokens came at once, with flush_interval = {flush:g} s")
            if flush is None and len(parts) > len({chunk.policy_version for chunk in parts}):
                raise Violation(f"sample {index} came in {len(parts)} chunks of one version, without flush_interval")


@SAMPLING.add
async def check_versions(probe: RolloutProbe) -> None:
    """Tokens have the version that GetInfo has, or a later one; an older policy is FAILED_PRECONDITION."""
    before = (await probe.get_info()).policy_version
    samples = await probe.sample(probe.request(min_policy_version=before, count=min(2, probe.most_samples), flush=0.0))
    after = (await probe.get_info()).policy_version
    for sample in samples:
        if sum(span.token_count for span in sample.version_spans) != len(sample.token_ids):
            raise Violation("the version spans of a sample do not add up to its tokens")
        for span in sample.version_spans:
            if not before <= span.policy_version <= after:
                raise Violation(
                    f"tokens have policy_version {span.policy_version}, and GetInfo had {before} before and {after} "
                    f"after them"
                )


def _agree(runs: Sequence[tuple[int, ...]]) -> bool:
    """Return whether two of the runs are equal. Not all: kernels round by the batch, and a rare token may differ."""
    return len(set(runs)) < len(runs)


@SAMPLING.add
async def check_greedy(probe: RolloutProbe) -> None:
    """At temperature 0 the tokens do not depend on the seed."""
    runs = [await probe.tokens(temperature=0.0, seed=seed) for seed in range(_REPEATS)]
    if not _agree(runs):
        raise Violation(f"{_REPEATS} greedy samples of one prompt have {_REPEATS} different completions")


@SAMPLING.add
async def check_seeds(probe: RolloutProbe) -> None:
    """The same seed gives the same tokens, 0 is a seed like any other, and without a seed each call draws its own."""
    by_seed = dict[int, tuple[int, ...]]()
    for seed in _SEEDS:
        runs = [await probe.tokens(seed=seed) for _ in range(_REPEATS)]
        if not _agree(runs):
            raise Violation(f"seed {seed} gave {_REPEATS} different completions of one prompt in {_REPEATS} calls")
        by_seed[seed] = runs[-1]
    if len(set(by_seed.values())) < 2:
        raise Skipped("all seeds give the same tokens: the model is almost certain of them")
    if len({await probe.tokens() for _ in range(_REPEATS)}) < 2:
        raise Violation(
            f"{_REPEATS} calls without a seed had the same tokens, and seeds change them; draw one for each"
        )


@SAMPLING.add
async def check_seed_of_each_sample(probe: RolloutProbe) -> None:
    """Sample i has the seed of the request plus i."""
    if (count := min(3, probe.most_samples)) < 2:
        raise Skipped("the service takes one sample at a time")
    alone = [[await probe.tokens(seed=7 + index) for _ in range(2)] for index in range(count)]
    if len({runs[0] for runs in alone}) < count:
        raise Skipped("different seeds give the same tokens: the model is almost certain of them")
    runs = [await probe.sample(probe.request(seed=7, count=count)) for _ in range(_REPEATS)]
    for index, expected in enumerate(alone):
        if not {tuple(run[index].token_ids.tolist()) for run in runs} & set(expected):
            raise Violation(f"sample {index} of a call with seed 7 differs from a sample with seed {7 + index}")


@SAMPLING.add
async def check_stop_tokens(probe: RolloutProbe) -> None:
    """A token of stop_token_ids ends its sample with STOP, and is part of it."""
    for seed in range(_REPEATS):
        free = await probe.tokens(temperature=0.0)
        if len(free) < 2:
            raise Skipped("the model ends the sample by itself")
        place = next((i for i, token in enumerate(free) if i and token not in free[:i]), 0)
        stop = free[place]
        (sample,) = await probe.sample(
            probe.request(temperature=0.0, stop_token_ids=[stop], max_tokens=FEW_TOKENS + seed)
        )
        got = sample.token_ids.tolist()
        if stop in got:  # `sample` has checked that it is the last
            return
        if tuple(got[: place + 1]) == free[: place + 1][:-1]:
            raise Violation(
                f"the stop token {stop} ended the sample and is missing in it; it is part of the completion"
            )
    raise Violation(f"the stop token {stop} was never sampled again; greedy samples of one prompt are equal")


@SAMPLING.add
async def check_score_tokens(probe: RolloutProbe) -> None:
    """ScoreTokens has a log-probability of at most 0 for each token, and NaN for the first."""
    tokens = probe.prompt(size=max(2, min(20, probe.info.max_context_tokens - 1)))
    values, version = await probe.score(tokens)
    again, _ = await probe.score(tokens)
    response = await unary(
        probe.stub.ScoreTokens, pb.ScoreTokensRequest(token_ids=tokens), peer=probe.peer, seconds=probe.seconds
    )
    raw = read_floats(response.logprobs)
    if not math.isnan(raw[0]):
        raise Violation(f"the first token has log-probability {raw[0]:g}; it has none, which is NaN")
    if raw[1:].max() > _CERTAIN:
        raise Violation(f"a token has log-probability {raw[1:].max():g}; it must be at most 0")
    if version == (await probe.get_info()).policy_version and not np.allclose(
        values[1:], again[1:], atol=probe.tolerance
    ):
        raise Violation("the same tokens twice have log-probabilities that differ by more than the tolerance")


@SAMPLING.add
async def check_logprobs(probe: RolloutProbe) -> None:
    """The log-probabilities of sampled tokens are those of ScoreTokens: at temperature 1, and of greedy samples."""
    for temperature in (1.0, 0.0):
        request = probe.request(temperature=temperature, count=min(4, probe.most_samples))
        await compare(probe, request, await probe.sample(request))


async def compare(probe: RolloutProbe, request: pb.GenerateRequest, samples: Sequence[Completion]) -> None:
    """Raise Violation unless the log-probabilities of samples at temperature 1 or 0 are those of ScoreTokens."""
    prompt = list(request.prompt_token_ids)
    differences = list[float]()
    for sample in samples:
        tokens = sample.token_ids.tolist()
        if len(prompt) + len(tokens) >= probe.info.max_context_tokens:
            continue  # one too many for ScoreTokens
        values, version = await probe.score([*prompt, *tokens])
        if {span.policy_version for span in sample.version_spans} == {version}:
            differences += np.abs(values[len(prompt) :] - sample.logprobs).tolist()
    if not differences:
        raise Skipped("the weights changed between sampling and scoring")
    mean, largest = sum(differences) / len(differences), max(differences)
    if mean > probe.tolerance or largest > probe.tolerance * _LARGEST_DIFFERENCE:
        temperature = request.sampling_params.temperature
        raise Violation(
            f"log-probabilities at temperature {temperature:g} differ from those of ScoreTokens by {mean:.3g} on "
            f"average and {largest:.3g} at most; the limits are {probe.tolerance:g} and "
            f"{probe.tolerance * _LARGEST_DIFFERENCE:g} nats"
        )


@SAMPLING.add
async def check_distribution(probe: RolloutProbe) -> None:
    """Log-probabilities count after top_k, temperature and top_p."""
    (certain,) = await probe.sample(probe.request(temperature=1.0, top_k=1))
    if not _tied(certain.logprobs.tolist()):
        raise Violation("with top_k = 1 a token has a log-probability other than 0; it counts after top_k")
    prompt, first = await _pair(probe)
    hot = await _first_tokens(probe, prompt, top_k=2, temperature=2.0)
    scale = math.log(sum(math.exp(value / 2) for value in first.values()))
    for token, value in hot.items():
        if token in first and abs(value - (first[token] / 2 - scale)) > probe.tolerance:
            raise Violation(
                f"with top_k = 2 a token has log-probability {first[token]:.3f} at temperature 1 and {value:.3f} at 2, "
                f"where it must be {first[token] / 2 - scale:.3f}"
            )
    narrow = await _first_tokens(probe, prompt, top_p=0.01, top_k=2, temperature=1.0)
    if len(narrow) > 1 or abs(next(iter(narrow.values()))) > probe.tolerance:
        raise Violation("with top_p = 0.01 of two tokens, one must be certain: its log-probability is 0")


async def _pair(probe: RolloutProbe) -> tuple[list[int], dict[int, float]]:
    """Return a prompt, and the log-probabilities of the two tokens that can follow it with top_k = 2."""
    totals = list[float]()
    for number in range(_PROMPTS):
        prompt = probe.prompt(number)
        first = await _first_tokens(probe, prompt, top_k=2, temperature=1.0)
        values = sorted(first.values(), reverse=True)
        # Rounded logits can be equal; engines keep all tokens that are equal to the last of the top_k.
        if len(values) > 2 and values[1] - values[-1] > _CERTAIN:
            raise Violation(f"with top_k = 2 the first token of one prompt was one of {len(values)}")
        total = sum(map(math.exp, values))
        if len(values) == 2 and abs(total - 1) <= probe.tolerance:
            return prompt, first
        if len(values) == 2:
            totals.append(total)
    if not totals:
        raise Skipped("for no prompt both of the two most probable tokens were sampled")
    raise Violation(f"with top_k = 2 both tokens have probabilities of {totals[0]:.3f} together; it must be 1")


def _tied(logprobs: Sequence[float]) -> bool:
    """Return whether each value is 0, or that of a token among a few with equal logits."""
    return all(min(abs(value + math.log(count)) for count in range(1, _MOST_TIED)) <= _CERTAIN for value in logprobs)


async def _first_tokens(
    probe: RolloutProbe, prompt: Sequence[int], *, top_k: int, temperature: float, top_p: float = 1.0
) -> dict[int, float]:
    """Return the log-probability of each token that one of several samples begins with."""
    found = dict[int, float]()
    left = _STEEP_SAMPLES
    params: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    while left > 0:
        count = min(left, probe.most_samples)
        request = probe.request(prompt=prompt, count=count, max_tokens=1, seed=left, **params)
        for sample in await probe.sample(request):
            found[int(sample.token_ids[0])] = float(sample.logprobs[0])
        left -= count
    return found


@SAMPLING.add
async def check_concurrent_calls(probe: RolloutProbe) -> None:
    """Concurrent calls get their own samples."""
    count = min(8, probe.info.max_concurrent_samples or 8)
    requests = [
        probe.request(prompt=probe.prompt(number), max_tokens=2 + number, flush=0.0 if number % 2 else None)
        for number in range(count)
    ]
    results = await asyncio.gather(*map(probe.sample, requests))
    for request, samples in zip(requests, results, strict=True):
        await compare(probe, request, samples)


@SAMPLING.add
async def check_unknown_fields(probe: RolloutProbe) -> None:
    """Unknown fields of a request are ignored."""
    chunks = list[pb.SampleChunk]()
    request = with_unknown_field(probe.request(temperature=0.0))
    request.sampling_params.CopyFrom(with_unknown_field(request.sampling_params))
    async for chunk in probe.client.generate(request):
        chunks.append(chunk)
    if not sum(len(read_ints(chunk.token_ids)) for chunk in chunks):
        raise Violation("a request with an unknown field has no tokens")


@SAMPLING.add
async def check_grammar(probe: RolloutProbe) -> None:
    """With a grammar, constrained_mask marks the tokens whose distribution it changed."""
    request = probe.request(max_tokens=FEW_TOKENS)
    request.sampling_params.grammar.regex = "[ab]{3}"
    try:
        samples = await probe.sample(request)
    except WrongState as error:
        raise Skipped(f"the service samples under no grammar: {error.message[:200]}") from None
    if not samples[0].constrained.any():
        raise Violation("a sample under the grammar [ab]{3} has no token in constrained_mask; the grammar forbids most")
