"""A real engine of two workers, which vLLM lets share a model on a CPU, too.

They join an epoch both or neither, and with two stages each takes the weights of its own layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fourfold.errors import MODEL_MISMATCH, WrongState
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from tests.support.weight_engine import running_engine
from tests.support.weight_trainer import Trainer

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


def test_what_the_first_worker_alone_refuses_leaves_the_open_epoch_in_both(tiny_model: Callable[..., Path]) -> None:
    one, two = (tiny_model("llama", seed) for seed in (1, 2))
    with running_engine(patience=240) as engine:
        engine.load(one, tensor_parallel_size=2, distributed_executor_backend="mp", disable_custom_all_reduce=True)
        trainer = Trainer(two, workers=2)
        trainer.open(engine)

        # Each worker cuts its share out of the larger tensors, and only the first can tell that something is left over.
        config = transformers.AutoConfig.from_pretrained(two)
        config.intermediate_size *= 2
        wider = Trainer(two, workers=2)
        auto: Any = transformers.AutoModelForCausalLM
        wider.model = auto.from_config(config).to(torch.bfloat16)
        wider.senders = [WeightSender(DenseSource(wider.model), rank=0, rank_count=1)]
        with pytest.raises(WrongState, match="leave out parts of") as caught:
            wider.open(engine)
        assert caught.value.reason == MODEL_MISMATCH

        trainer.update(engine)  # raises what either of them answers as an error


@pytest.mark.soak
@pytest.mark.timeout(580)  # two starts of an engine with two workers
def test_each_stage_of_a_pipeline_takes_the_weights_of_its_layers(tiny_model: Callable[..., Path]) -> None:
    one, two = (tiny_model("llama_tied", seed) for seed in (1, 2))  # the last stage has a copy of the embedding
    with running_engine(patience=240) as engine:

        def load(folder: Path, **arguments: Any) -> Any:
            engine.load(folder, **arguments)
            engine.verb("weights_describe")  # see PipelineWorker
            return engine.generate()

        stages = {
            "pipeline_parallel_size": 2, "distributed_executor_backend": "mp",
            "worker_extension_cls": "tests.support.pipeline_worker.PipelineWorker",
        }  # fmt: skip
        fresh_two, fresh_one = load(two, **stages), load(one, **stages)
        assert fresh_one != fresh_two
        trainer = Trainer(two, workers=2)
        trainer.open(engine)
        assert engine.generate() == fresh_one, "opening changes nothing"
        trainer.update(engine)
        assert engine.generate() == fresh_two

        # vLLM's loader drops a tensor of this name without an error. Each stage would leave it to the other.
        more = Trainer(two, workers=2)
        extra = torch.nn.Module()
        extra.inv_freq = torch.nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
        more.model.model.layers[0].rotary_emb = extra
        more.senders = [WeightSender(DenseSource(more.model), rank=0, rank_count=1)]
        with pytest.raises(WrongState, match=r"no place for model.layers.0.rotary_emb.inv_freq") as caught:
            more.open(engine)
        assert caught.value.reason == MODEL_MISMATCH

        trainer.become(one)
        trainer.update(engine)
        assert engine.generate() == fresh_one
