"""Implements the policy and the critic of one rank: log-probabilities, values, export, weights to transfer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fourfold.config import Config
from fourfold.nn import forward, router
from fourfold.nn.batching import TokenBatch
from fourfold.nn.sequence import Exchange
from fourfold.weights.source.base import ParameterSource, WeightSource
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.fused_params import whole_shape
from fourfold.weights.source.lora import MergedSource
from fourfold.weights.source.zero3 import Zero3Source, make_whole
from fourfold_trainer.zero import lora
from fourfold_trainer.zero.deepspeed_model import DeepSpeedModel
from fourfold_trainer.zero.export import export_model
from fourfold_trainer.zero.load_model import load_model
from fourfold_trainer.zero.partition import gathered_modules
from fourfold_trainer.zero.process_groups import device_of


class DeepSpeedPolicy(DeepSpeedModel):
    """Implements `Policy`."""

    def __init__(
        self, config: Config, model_folder: Path, *, rank: int, rank_count: int, exchange: Exchange | None = None
    ) -> None:
        """Load the model. The ranks of `exchange` share every row. Raises ConfigError if it cannot be trained."""
        self._rank_count, self._source_folder = rank_count, model_folder
        model = load_model(config, model_folder, device_of(config, rank))
        with gathered_modules(model):
            forward.install(model, float32_logits=config.model.head_dtype == "float32")
            self.routers = router.install(model, coef=config.trainer.router_aux_loss_coef, exchange=exchange)
        if exchange is not None:
            forward.share_rows(model, exchange)
        self.vocabulary_size = whole_shape(model.get_output_embeddings().weight)[0]
        table = config.trainer.lora
        self._adapters = lora.LoraAdapters(table, model, source=model_folder, seed=config.seed) if table.rank else None
        decay = config.trainer.ema_decay
        super().__init__(config, config.trainer, model, rank=rank, gpu=rank, ema_decay=decay)

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
        adapters = self._adapters
        rename = adapters.rename if adapters is not None else None
        source: ParameterSource = (
            Zero3Source(self._engine, rename=rename)
            if self._stage == 3
            else DenseSource(self._model, rank_count=self._rank_count, rename=rename)
        )
        if adapters is None:
            return source

        def gather() -> None:
            if self._stage == 3:
                make_whole(self._engine, adapters.parameters)

        return MergedSource(source, adapters.by_weight, gather=gather)

    def save(self, folder: Path, name: str) -> None:
        super().save(folder, name)
        if self._adapters is not None and self._rank == 0:
            self._adapters.write_record(folder)  # the model that the adapters belong to

    def _check(self, folder: Path) -> None:
        lora.check_record(folder, self._adapters)


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
