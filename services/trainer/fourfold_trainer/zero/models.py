"""Implements the models of one rank: log-probabilities, values and scores, export, weights to transfer."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
from torch import Tensor
from transformers.modeling_layers import GenericForTokenClassification

from fourfold.config import Config
from fourfold.errors import ConfigError, Unavailable
from fourfold.model.classifier import CLASSIFIER, STEP_CLASSIFIER
from fourfold.nn import forward, router
from fourfold.nn.batching import TokenBatch
from fourfold.nn.scores import scored_rows
from fourfold.nn.sequence import Exchange
from fourfold.plan.models import sends_adapters
from fourfold.weights.source.base import ParameterSource, WeightSource
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.fused_params import SentParameter, sent_parameters, whole_shape
from fourfold.weights.source.lora import AdapterSource, MergedSource, merged
from fourfold.weights.source.zero3 import Zero3Source, gathering, make_whole
from fourfold_trainer.checkpoint import model_export
from fourfold_trainer.zero import lora
from fourfold_trainer.zero.deepspeed_model import DeepSpeedModel
from fourfold_trainer.zero.load_model import load_model
from fourfold_trainer.zero.lora import LoraAdapters
from fourfold_trainer.zero.partition import gathered_modules
from fourfold_trainer.zero.process_groups import device_of

# Elements that are gathered at once: 1 GiB in float32 on each rank.
_GATHER_ELEMENTS: Final = 1 << 28
# Folder inside an export that holds the LoRA adapters alone.
_ADAPTER_FOLDER: Final = "adapter"


def export_model(
    engine: Any, folder: Path, *, source: Path, stage: int, rank: int, adapters: LoraAdapters | None = None
) -> None:
    """Gather some parameters at a time; rank 0 writes them before the next ones are gathered. A collective.

    Args:
        engine: of DeepSpeed, with the model.
        folder: an existing one.
        source: folder that the model came from, for its tokenizer.
        stage: of ZeRO.
        rank: of this process.
        adapters: of the model, which are merged into the weights, and written alone, too.

    Raises Unavailable when the disk refuses.
    """
    model = engine.module
    ignored = model._keys_to_ignore_on_save or ()
    rename = adapters.rename if adapters is not None else None
    sent = [one for one in sent_parameters(model, rename) if one[0] not in ignored]
    specs = {one.name: (p.dtype, one.shape) for _, p, slices in sent for one in slices}
    failure: Unavailable | None = None  # of rank 0, which gathers on: the others would wait for it
    writer = model_export.WeightsWriter(folder, specs) if rank == 0 else None

    def gathered(parameters: list[Any]) -> AbstractContextManager[Any]:
        whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
        return whole if stage == 3 and parameters else nullcontext()

    # ZeRO-3 prefetches parameters, and some are still in flight after a pass without gradients. GatheredParameters
    # then fails with "Cannot partition a param in flight"; `gathering` waits for them first.
    with gathering(engine) if stage == 3 else nullcontext():
        # Every group needs the adapters, which are small: gather them once around all groups.
        trained = adapters.parameters if adapters is not None else []
        with gathered(trained):
            for group in _groups(sent):
                with gathered([parameter for _, parameter, _ in group if not any(parameter is one for one in trained)]):
                    if writer is not None and failure is None:
                        failure = _write(writer, group, adapters)
            if rank == 0 and adapters is not None and failure is None:
                adapters.write(folder / _ADAPTER_FOLDER)
    if writer is not None:
        writer.close()
        if failure is not None:
            raise failure
        writer.finish()
        model_export.write_companions(model, folder, source=source, settings=_classifier_settings(model, source))


def _classifier_settings(model: Any, source: Path) -> dict[str, Any]:
    """Return what config.json has in addition if the model has a head of values: that of a classifier with one label.

    transformers reads its folder as a ...ForSequenceClassification, or, if each step has a score, as a
    ...ForTokenClassification. `critic.source` and `reward.model.source` take it.
    """
    if not hasattr(model, "score"):
        return {}
    of_steps = getattr(model, "scores_steps", False)
    name = type(model).__name__.replace("ForCausalLM", STEP_CLASSIFIER if of_steps else CLASSIFIER)
    pad = model_export.pad_token_id(model.config.get_text_config(), source)
    labels = {"num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}}
    # vLLM passes the output of a classifier through a sigmoid unless it is a regression.
    settings = {"architectures": [name], **labels, "problem_type": "regression"}
    if of_steps:  # the head has no bias; without this key transformers adds one
        settings["token_classification_bias"] = False
    return settings | ({} if pad is None else {"pad_token_id": pad})


def _write(
    writer: model_export.WeightsWriter, group: Sequence[SentParameter], adapters: LoraAdapters | None
) -> Unavailable | None:
    """Write parameters that are whole on this rank, merged with their LoRA adapters; return the disk's error."""
    try:
        for name, parameter, slices in group:
            flat = parameter.detach().reshape(-1)
            if adapters is not None and (adapter := adapters.by_weight.get(name)) is not None:
                flat = merged(flat, adapter)
            for one in slices:
                writer.write(one.name, flat[one.start : one.start + one.count])
    except Unavailable as error:
        return error
    return None


def _groups(sent: Sequence[SentParameter]) -> Iterator[list[SentParameter]]:
    """Yield parameters in groups of at most _GATHER_ELEMENTS, or one parameter that is larger."""
    group: list[SentParameter] = []
    size = 0
    for one in sent:
        count = math.prod(whole_shape(one[1]))
        if group and size + count > _GATHER_ELEMENTS:
            yield group
            group, size = [], 0
        group.append(one)
        size += count
    yield group


class DeepSpeedPolicy(DeepSpeedModel):
    """Implements `Policy`."""

    def __init__(
        self, config: Config, model_folder: Path, *, rank: int, rank_count: int, exchange: Exchange | None = None
    ) -> None:
        """Load the model. The ranks of `exchange` share every row. Raises ConfigError if it cannot be trained."""
        self._rank_count, self._source_folder = rank_count, model_folder
        model = load_model(config, model_folder, device_of(config, rank))
        self.vocabulary_size = whole_shape(model.get_output_embeddings().weight)[0]
        with gathered_modules(model):
            self._install(model, config)
            self.routers = router.install(model, coef=config.trainer.router_aux_loss_coef, exchange=exchange)
        if exchange is not None:
            forward.share_rows(model, exchange)
        table = config.trainer.lora
        self._adapters = lora.LoraAdapters(table, model, source=model_folder, seed=config.seed) if table.rank else None
        decay = config.trainer.ema_decay
        super().__init__(config, config.trainer, model, rank=rank, gpu=rank, ema_decay=decay)

    def _install(self, model: Any, config: Config) -> None:
        """Replace the head of the model, which is gathered."""
        forward.install(model, float32_logits=config.model.head_dtype == "float32")

    def logprobs(
        self, batch: TokenBatch, *, entropy: bool = False, energy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        arguments = forward.batch_arguments(batch, self._device)
        result: tuple[Tensor, Tensor | None] = self._forward(**arguments, entropy=entropy, energy=energy)
        return result

    def export(self, folder: Path, *, ema: bool = False) -> None:
        if not ema:
            return self._export(folder)
        assert self._average is not None, "rank 0 requests the average only if trainer.ema_decay is set"
        try:
            with self._average.swapped_in():
                self._copy_masters_to_weights()
                self._export(folder)
        finally:
            self._copy_masters_to_weights()

    def _export(self, folder: Path) -> None:
        export_model(
            self._engine,
            folder,
            source=self._source_folder,
            stage=self._stage,
            rank=self._rank,
            adapters=self._adapters,
        )

    def weight_source(self) -> WeightSource:
        adapters, ranks = self._adapters, self._rank_count

        def gather() -> None:
            if self._stage == 3 and adapters is not None:
                make_whole(self._engine, adapters.parameters)

        model = self._config.model.model_copy(update={"source": str(self._source_folder)})  # its place on this machine
        if adapters is not None and sends_adapters(self._config.model_copy(update={"model": model})):
            return AdapterSource(adapters.peft_parameters, adapters.spec, rank_count=ranks, gather=gather)
        rename = adapters.rename if adapters is not None else None
        source: ParameterSource = (
            Zero3Source(self._engine, rename=rename)
            if self._stage == 3
            else DenseSource(self._model, rank_count=ranks, rename=rename)
        )
        return source if adapters is None else MergedSource(source, adapters.by_weight, gather=gather)

    def save(self, folder: Path, name: str) -> None:
        super().save(folder, name)
        if self._adapters is not None and self._rank == 0:
            self._adapters.write_record(folder)  # the model that the adapters belong to

    def _check(self, folder: Path) -> None:
        lora.check_record(folder, self._adapters)


class DeepSpeedScorer(DeepSpeedPolicy):
    """The reward model of a run whose loss reads scores: it takes the place of the policy, with its optimizer.

    The head is that of a critic. It begins with the weights of a reward model's folder, or with zeros.
    """

    def _install(self, model: Any, config: Config) -> None:
        forward.install_values(model, forward.read_value_head(self._source_folder))
        self._pad_id = model_export.pad_token_id(model.config.get_text_config(), self._source_folder)
        # An adapter reads the one of the model.
        model.scores_steps = self._of_steps = config.algorithm.loss.reads == "steps"
        if self._of_steps:
            check_step_classifier(type(model), self._source_folder)

    def logprobs(
        self, batch: TokenBatch, *, entropy: bool = False, energy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the score of each sample, float32 [s], in place of log-probabilities; the batch asks for one of each.

        It is read where transformers and the reward service read it: after the last token that fills up no batch. A
        process reward model has one score after each token that the batch asks for, float32 [k].
        """
        if self._of_steps:
            rows = torch.from_numpy(batch.rows + 1)
        else:
            assert len(batch.rows) == len(batch.lengths), "a sample has one score"
            rows = torch.from_numpy(scored_rows(batch.token_ids, batch.lengths, self._pad_id))
        result: Tensor = self._forward(**(forward.value_arguments(batch, self._device) | {"rows": rows}))
        return result, None


def check_step_classifier(language_model: type[Any], folder: Path) -> None:
    """Raise ConfigError if transformers has no token classifier with a head `score` for a language model's class."""
    name = language_model.__name__.replace("ForCausalLM", STEP_CLASSIFIER)
    found = getattr(sys.modules[language_model.__module__], name, None)
    if found is None or not issubclass(found, GenericForTokenClassification):
        raise ConfigError(
            f"{folder}: transformers has no {name} with a head `score`, as which a process reward model is exported; "
            f"use another architecture, such as LlamaForCausalLM or Qwen2ForCausalLM"
        )


class DeepSpeedCritic(DeepSpeedModel):
    """Implements `Critic`: a body with a value head, from a folder of its own or the policy's."""

    def __init__(
        self, config: Config, model_folder: Path, *, rank: int, gpu: int, exchange: Exchange | None = None
    ) -> None:
        """Load the model. The ranks of `exchange` share every row. Raises ConfigError if it cannot be trained."""
        self._source_folder = model_folder
        model = load_model(config, model_folder, device_of(config, gpu))
        with gathered_modules(model):
            forward.install_values(model, forward.read_value_head(model_folder))
        if exchange is not None:
            forward.share_rows(model, exchange)
        super().__init__(config, config.critic, model, rank=rank, gpu=gpu)

    def export(self, folder: Path) -> None:
        export_model(self._engine, folder, source=self._source_folder, stage=self._stage, rank=self._rank)

    def values(self, batch: TokenBatch) -> Tensor:
        result: Tensor = self._forward(**forward.value_arguments(batch, self._device))
        return result
