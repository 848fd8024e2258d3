"""Samples under a grammar from a real vLLM CPU engine with a tiny model: their text, log-probabilities and masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fourfold.errors import InvalidInput
from fourfold.rollout.client import AsyncRolloutClient, Completion, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from fourfold_rollout.engine import GrammarConstraint
from fourfold_rollout.vllm.text.grammar import GrammarCompiler
from tests.support.rollout_process import Publisher, Service, request, start, until_sampled

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TinyModel = Callable[..., Path]
PROMPT = [5, 17, 99, 42, 7]
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["kg", "m"]},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "unit", "sure"],
    "additionalProperties": False,
}
JSON = pb.Grammar(json_schema=json.dumps(SCHEMA))
TAGS = pb.Grammar(
    structural_tag_json=json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["#"],
                "tags": [{"begin": "#", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "#"}],
            },
        }
    )
)


@pytest.fixture(scope="module")
def service(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = tiny_model("qwen2", dtype="float32")
    running = start(model, tmp_path_factory.mktemp("grammars"), dtype="float32", program="tests.support.slow_rollout")
    yield running
    running.close()


@pytest.fixture
async def channel(service: Service) -> AsyncIterator[Any]:
    opened = open_channel(service.target, None)
    yield opened
    await opened.close()


@pytest.fixture
def client(channel: Any) -> AsyncRolloutClient:
    return AsyncRolloutClient(channel, peer="rollout-0")


class Reference:
    """The distributions of the model in transformers, and its grammars."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.grammars = GrammarCompiler(folder, threads=1)
        self.stops = [int(self.model.generation_config.eos_token_id)]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        return logits

    def expect(self, constraint: GrammarConstraint, prompt: list[int], sample: Completion) -> tuple[Any, Any]:
        """Return the log-probabilities and the mask that the tokens of a sample must have."""
        ids = sample.token_ids.tolist()
        prefix = prompt[len(prompt) - constraint.prefix_count :]
        state = self.grammars.start(constraint, self.stops, prefix)
        logits = self.logits([*prompt, *ids])[len(prompt) - 1 : -1]
        bits = torch.zeros((1, -(-self.grammars.vocabulary_size // 32)), dtype=torch.int32)
        values, flags = [], []
        for token, row in zip(ids, logits, strict=True):
            flags.append(state.fill(bits, 0))
            words = bits[0].numpy().view(np.uint32)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(row)].astype(bool)
            assert flags[-1] == (not allowed.all())
            values.append(float(row[token] - row[torch.from_numpy(allowed)].logsumexp(0)))
            assert state.accept(token)
        return np.array(values), np.array(flags)


@pytest.fixture(scope="module")
def reference(service: Service) -> Reference:
    return Reference(service.model)


def constrained(grammar: pb.Grammar, *, prompt: Sequence[int] = PROMPT, **fields: Any) -> pb.GenerateRequest:
    message = request(**fields)
    message.sampling_params.grammar.CopyFrom(grammar)
    del message.prompt_token_ids[:]
    message.prompt_token_ids.extend(prompt)
    return message


def constraint_of(grammar: pb.Grammar, prefix_count: int = 0) -> GrammarConstraint:
    kind: Any = grammar.WhichOneof("kind")
    return GrammarConstraint(kind=kind, text=getattr(grammar, kind), prefix_count=prefix_count)


def check(reference: Reference, grammar: pb.Grammar, sample: Completion, prompt: list[int], prefix: int = 0) -> None:
    values, flags = reference.expect(constraint_of(grammar, prefix), prompt, sample)
    np.testing.assert_allclose(sample.logprobs, np.minimum(values, 0), atol=2e-3)
    mask = sample.constrained if len(sample.constrained) else np.zeros(len(flags), bool)
    assert mask.tolist() == flags.tolist()


async def test_a_hundred_samples_of_a_schema_are_json_that_fits_it(
    client: AsyncRolloutClient, reference: Reference
) -> None:
    samples: list[Completion] = []
    for seed in range(0, 100, 25):
        samples += await client.complete(constrained(JSON, samples=25, max_tokens=400, seed=seed), timeout=120)
    finished = [s for s in samples if s.finish_reason == pb.FINISH_REASON_STOP]
    assert len(samples) == 100
    assert len(finished) > 90  # white space may go on for ever
    for sample in finished:
        value = json.loads(reference.tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True))
        assert set(value) == {"answer", "unit", "sure"}
        assert 0 <= value["answer"] <= 999
    for sample in finished[:20]:
        check(reference, JSON, sample, PROMPT)
        assert sample.constrained.all()  # JSON forbids some token everywhere


async def test_the_free_text_of_a_structural_tag_is_unconstrained(
    client: AsyncRolloutClient, reference: Reference
) -> None:
    samples = await client.complete(constrained(TAGS, samples=24, max_tokens=120), timeout=120)
    masks = np.concatenate([s.constrained if len(s.constrained) else np.zeros(len(s.token_ids), bool) for s in samples])
    assert masks.any()
    assert not masks.all()
    for sample in samples:
        check(reference, TAGS, sample, PROMPT)


async def test_other_samples_of_the_batch_have_their_own_distribution(
    client: AsyncRolloutClient, reference: Reference
) -> None:
    free = request(samples=4, max_tokens=40)
    both = client.complete(free, timeout=60), client.complete(constrained(JSON, samples=4, max_tokens=40), timeout=60)
    plain, bound = await asyncio.gather(*both)
    alone = await client.complete(request(samples=4, max_tokens=40), timeout=60)
    assert [s.token_ids.tolist() for s in plain] == [s.token_ids.tolist() for s in alone]
    assert not any(len(s.constrained) for s in plain)
    for sample in bound:
        check(reference, JSON, sample, PROMPT)


async def test_a_sample_continues_from_its_tokens(client: AsyncRolloutClient, reference: Reference) -> None:
    (first,) = await client.complete(constrained(JSON, max_tokens=6), timeout=60)
    prompt = [*PROMPT, *first.token_ids.tolist()]
    message = constrained(JSON, prompt=prompt, max_tokens=400, grammar_prefix_count=6)
    (rest,) = await client.complete(message, timeout=60)
    check(reference, JSON, rest, prompt, prefix=6)
    whole = reference.tokenizer.decode([*first.token_ids.tolist(), *rest.token_ids.tolist()], skip_special_tokens=True)
    assert rest.finish_reason != pb.FINISH_REASON_STOP or json.loads(whole)
    wrong = constrained(JSON, prompt=[*PROMPT, *reference.tokenizer.encode("x")], grammar_prefix_count=1)
    with pytest.raises(InvalidInput, match="does not accept token"):
        await client.complete(wrong, timeout=60)


@pytest.mark.parametrize("mode", ["KEEP", "RECOMPUTE", "ABORT"])
async def test_weight_updates_keep_the_state_of_the_grammar(
    service: Service, channel: Any, client: AsyncRolloutClient, reference: Reference, mode: str
) -> None:
    version = (await client.get_info(timeout=5)).policy_version
    publisher = Publisher(RolloutControlClient(channel, peer="rollout-0"), version=version, dtype="float32")
    await publisher.open(service.model)
    grammar = pb.Grammar(regex="([a-z]{3} ){100}")
    call = asyncio.create_task(client.complete(constrained(grammar, samples=4, max_tokens=150), timeout=120))
    await until_sampled(client, 20)
    await publisher.begin(getattr(control_pb, f"PAUSE_MODE_{mode}"))
    await publisher.send()
    await publisher.commit()
    samples = await call
    assert mode == "ABORT" or any(len(sample.version_spans) == 2 for sample in samples)
    for sample in samples:
        ids = sample.token_ids.tolist()
        if sample.finish_reason == pb.FINISH_REASON_STOP:
            assert ids.pop() in reference.stops
        reference.grammars.start(constraint_of(grammar), reference.stops, ids)  # refuses tokens that do not fit
        assert sample.constrained.all()


async def test_scores_are_those_of_transformers(client: AsyncRolloutClient, reference: Reference) -> None:
    ids = request().prompt_token_ids[:] * 3
    values, _ = await client.score_tokens(ids, timeout=30)
    expected = reference.logits(ids)[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert np.isnan(values[0])
    np.testing.assert_allclose(values[1:], expected.numpy(), atol=2e-3)
