"""Real vLLM CPU engines get LoRA adapters: afterwards they compute what transformers and PEFT compute."""

from __future__ import annotations

import asyncio
import multiprocessing.connection
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold.errors import WrongState
from fourfold.weights.local import Publisher, PublishFailed
from fourfold_rollout.engine import EngineSettings, SampleRequest
from tests.support.adapter_trainer import AdapterTrainer
from tests.support.answer import answer_of
from tests.support.weight_engine import PROMPTS, Engine, running_engine
from tests.support.weight_trainer import Trainer

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]

TinyModel = Callable[..., Path]
ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Layers with adapters, scale and backend: parts of the layers that vLLM joins, and scales that are no power of two.
CASES: Final = {
    "qwen2": (("q_proj", "v_proj", "down_proj"), 0.7, "gloo"),
    "qwen3": (ALL, 2.0, "shm"),
    "gemma": (("up_proj", "o_proj"), 3.0, "gloo"),
    "llama": (ALL, 1.5, "shm"),  # last: the tests below go on with its engine
}
EXACT: Final = 1e-4


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as running:
        yield running


def _start(engine: Engine, folder: Path, targets: tuple[str, ...]) -> None:
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "lora_target_modules": list(targets)}
    engine.load(folder, dtype="float32", **options)
    engine.verb("weights_describe")


@pytest.mark.parametrize("family", CASES)
def test_an_updated_engine_equals_peft(family: str, engine: Engine, tiny_model: TinyModel) -> None:
    targets, scale, backend = CASES[family]
    folder = tiny_model(family, 1, "float32")
    _start(engine, folder, targets)
    trainer = AdapterTrainer(folder, targets=targets, scale=scale)
    base = engine.generate()
    assert trainer.distance(PROMPTS, base) < EXACT, "version 0 is the base"
    with Publisher([trainer.sender], [engine], backend=backend) as publisher:
        for version in (1, 2, 3):
            trainer.step()
            before = engine.generate()
            publisher.publish(version)
            after = engine.generate()
            assert trainer.distance(PROMPTS, after) < EXACT < 0.1 < trainer.distance(PROMPTS, before)


@pytest.fixture
def trainer(engine: Engine, tiny_model: TinyModel) -> AdapterTrainer:
    """The trainer of a Llama engine that holds its adapters."""
    targets, scale, backend = CASES["llama"]
    folder = tiny_model("llama", 1, "float32")
    if engine.weights != folder:
        _start(engine, folder, targets)
    found = AdapterTrainer(folder, targets=targets, scale=scale)
    found.step()
    with Publisher([found.sender], [engine], backend=backend) as publisher:
        publisher.publish(1)
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_update_that_ends_half_way_leaves_the_last_adapter(
    backend: str, trainer: AdapterTrainer, engine: Engine
) -> None:
    before = engine.generate()
    trainer.step()
    with Publisher([trainer.sender], [engine], backend=backend, timeout=20) as publisher:
        trainer.source.dies_at = len(trainer.source.manifest().tensors) // 2
        with pytest.raises(PublishFailed, match="died") as caught:
            publisher.publish(2)
        assert caught.value.clean
        assert engine.generate() == before
        trainer.source.dies_at = -1
        publisher.publish(3)
    assert trainer.distance(PROMPTS, engine.generate()) < EXACT


def test_what_does_not_fit_is_refused_before_anything_changes(
    trainer: AdapterTrainer, engine: Engine, tiny_model: TinyModel
) -> None:
    folder = tiny_model("llama", 1, "float32")

    def refused(senders: list[Any], says: str) -> None:
        before = engine.generate()
        with Publisher(senders, [engine], backend="shm") as publisher:
            with pytest.raises(PublishFailed, match=says) as caught:
                publisher.open()
            assert caught.value.clean
            assert isinstance(caught.value.__cause__, WrongState)
        assert engine.generate() == before

    other = AdapterTrainer(tiny_model("llama", 2, "float32"), targets=ALL)
    refused([other.sender], r"belong to other weights \(fingerprint \w{12}\) than those of this engine")
    refused([AdapterTrainer(folder, targets=ALL, rank=16).sender], r"have rank 16, and this engine .* at most 8")
    refused([AdapterTrainer(folder, targets=["lm_head"]).sender], "an adapter of lm_head; engines take none of")
    refused(Trainer(folder).senders, "sends whole weights, and this engine was started for LoRA adapters")
    engine.load(folder, dtype="float32")
    refused([trainer.sender], "sends LoRA adapters, and this engine was started for whole weights")


PROMPTS_OF_BLOCKS: Final = [[*range(3, 103), index] for index in range(3)]


def test_a_rollout_engine_serves_adapters_and_no_prefix_of_an_old_one(tiny_model: TinyModel) -> None:
    """Through the service's engine: table of log-probabilities, decode loops, probes, and its cache of prefixes."""
    found = answer_of(_served, tiny_model("qwen3", 1, "float32"))
    # The control: a prefix of the old adapter is wrong, and it is read.
    distance, cached = found.pop("same salt")
    assert cached and distance > 0.01
    assert {name: cached for name, (_, cached) in found.items()} == {"version 0": False, "repeated": True, "new": False}
    assert max(distance for distance, _ in found.values()) < EXACT


def _served(pipe: multiprocessing.connection.Connection, folder: Path) -> None:
    from fourfold_rollout.vllm import environment

    settings = EngineSettings(
        folder=folder, dtype="float32", max_context_tokens=512, max_concurrent_samples=4, max_batched_tokens=512,
        enforce_eager=True, kv_cache_gib=1, gpus=0, gpu_memory_utilization=0.5, seed=0, adapter_rank=4,
        adapter_layers=ALL,
    )  # fmt: skip
    environment.prepare(settings, "127.0.0.1")
    from fourfold_rollout.vllm.engine import VllmEngine

    pipe.send(asyncio.run(_compare(VllmEngine.start(settings, fork=True), folder)))


async def _compare(engine: Any, folder: Path) -> dict[str, tuple[float, bool]]:
    """Return the largest difference to PEFT in nats, and whether cached prefixes were read, for some requests."""
    from fourfold_rollout.warm_up import prove_updates, warm_up

    class Blocking:
        def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
            replies: list[Any] = asyncio.run_coroutine_threadsafe(
                engine._call(method, *args, timeout=20), loop
            ).result()
            return replies

    def publish() -> None:
        with Publisher([trainer.sender], [Blocking()], backend="shm") as publisher:
            publisher.publish(1)

    trainer, loop = AdapterTrainer(folder, targets=ALL), asyncio.get_running_loop()
    await engine.attach(print)
    await warm_up(engine)
    await prove_updates(engine)
    found = {"version 0": await _sampled(engine, trainer, "v0"), "repeated": await _sampled(engine, trainer, "v0")}
    trainer.step()
    await asyncio.to_thread(publish)
    found["same salt"] = await _sampled(engine, trainer, "v0")
    found["new"] = await _sampled(engine, trainer, "v1")
    await engine.close()
    return found


async def _sampled(engine: Any, trainer: AdapterTrainer, salt: str) -> tuple[float, bool]:
    from tests.support.logprob_driver import RecordingSink

    cached: list[int] = []
    processor = engine._llm.output_processor
    process = processor.process_outputs

    def look(outputs: list[Any], *args: Any, **keywords: Any) -> Any:
        cached.extend(one.prefill_stats.num_cached_tokens for one in outputs if one.prefill_stats)
        return process(outputs, *args, **keywords)

    processor.process_outputs = look
    sink = RecordingSink(len(PROMPTS_OF_BLOCKS))
    await engine.submit(
        [
            SampleRequest(
                key=f"{salt}-{id(sink)}-{index}", prompt_token_ids=prompt, temperature=1.0, top_p=1.0, top_k=0,
                max_tokens=20, stop_token_ids=(), seed=index, cache_salt=salt, streaming=False, sink=sink, index=index,
            )
            for index, prompt in enumerate(PROMPTS_OF_BLOCKS)
        ]
    )  # fmt: skip
    await sink.end()
    processor.process_outputs = process
    outputs = [(sample["ids"], sample["logprobs"]) for sample in sink.answer()]
    scored = await engine.prompt_logprobs(PROMPTS_OF_BLOCKS[0], first=False)  # reads no cached prefix
    exact = trainer.logprobs(PROMPTS_OF_BLOCKS[0])
    assert max(abs(one - two) for one, two in zip(scored[1:], exact, strict=True)) < EXACT
    return trainer.distance(PROMPTS_OF_BLOCKS, outputs), cached[0] > 0
