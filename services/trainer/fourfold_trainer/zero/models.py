"""Implements the policy and the critic of one rank: log-probabilities, values, export, weights to transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import deepspeed
from torch import Tensor

from fourfold.config import Config
from fourfold.nn import forward, router
from fourfold.nn.batching import TokenBatch
from fourfold.nn.sequence import Exchange
from fourfold.weights.source.base import ParameterSource, WeightSource
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.source.fused_params import named_weights
from fourfold.weights.source.lora import MergedSource, merged
from fourfold.weights.source.zero3 import Zero3Source, gathering, make_whole
from fourfold_trainer.checkpoint import store
from fourfold_trainer.zero import lora
from fourfold_trainer.zero.deepspeed_model import DeepSpeedModel
from fourfold_trainer.zero.load_model import load_model

# Elements that the export gathers at once: 1 GiB in float32 on each rank.
_GATHER_ELEMENTS: Final = 1 << 28
# Folder inside an export that holds the LoRA adapters alone.
_ADAPTER_FOLDER: Final = "adapter"


class DeepSpeedPolicy(DeepSpeedModel):
    """Implements `Policy`."""

    def __init__(
        self, config: Config, model_folder: Path, *, rank: int, rank_count: int, exchange: Exchange | None = None
    ) -> None:
        """Load the model. The ranks of `exchange` share every row. Raises ConfigError if it cannot be trained."""
        self._rank_count, self._source_folder = rank_count, model_folder
        model = load_model(config, model_folder)
        forward.install(model)
        if exchange is not None:
            forward.share_rows(model, exchange)
        self.routers = router.install(model, coef=config.trainer.router_aux_loss_coef, exchange=exchange)
        self.vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
        table = config.trainer.lora
        self._adapters = lora.LoraAdapters(table, model, source=model_folder, seed=config.seed) if table.rank else None
        decay = config.trainer.ema_decay
        super().__init__(config, config.trainer, model, rank=rank, gpu=rank, ema_decay=decay)

    def logprobs(self, batch: TokenBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        arguments = forward.batch_arguments(batch, self._device)
        result: tuple[Tensor, Tensor | None] = self._forward(**arguments, entropy=entropy)
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
        # ZeRO-3 prefetches parameters, and some are still in flight after a pass without gradients. GatheredParameters
        # then fails with "Cannot partition a param in flight"; `gathering` waits for them first.
        with gathering(self._engine) if self._stage == 3 else nullcontext():
            state: dict[str, Tensor] = {}
            # Every group needs the adapters, which are small: gather them once around all groups.
            with self._gathered(self._adapters.parameters if self._adapters is not None else []):
                for names, parameters in self._gather_groups():
                    with self._gathered(parameters):
                        if self._rank == 0:
                            state.update({n: self._exported(n, p) for n, p in zip(names, parameters, strict=True)})
                if self._rank == 0 and self._adapters is not None:
                    self._adapters.write(folder / _ADAPTER_FOLDER)
        if self._rank == 0:
            store.write_model(self._model, state, folder, source=self._source_folder)

    def _gathered(self, parameters: list[Any]) -> AbstractContextManager[Any]:
        """Return a context in which these parameters are whole on every rank; only valid inside `gathering`."""
        whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
        return whole if self._stage == 3 and parameters else nullcontext()

    def _exported(self, name: str, parameter: Any) -> Tensor:
        """Return a copy of a weight on the CPU, merged with its LoRA adapter."""
        weight: Tensor = parameter.detach()
        adapter = self._adapters.by_weight.get(name) if self._adapters is not None else None
        if adapter is not None:
            weight = merged(weight.reshape(-1), adapter).view(weight.shape)
        return weight.cpu().clone()

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

    def _gather_groups(self) -> Iterator[tuple[list[str], list[Any]]]:
        """Yield names and parameters in groups of at most _GATHER_ELEMENTS, or one parameter that is larger."""
        names: list[str] = []
        parameters: list[Any] = []
        size = 0
        for name, parameter in named_weights(self._model, self._adapters.rename if self._adapters else None):
            count = int(getattr(parameter, "ds_numel", parameter.numel()))
            if parameters and size + count > _GATHER_ELEMENTS:
                yield names, parameters
                names, parameters, size = [], [], 0
            names.append(name)
            parameters.append(parameter)
            size += count
        yield names, parameters


class DeepSpeedCritic(DeepSpeedModel):
    """Implements `Critic`: a body with a value head, from a folder of its own or the policy's."""

    def __init__(
        self, config: Config, model_folder: Path, *, rank: int, gpu: int, exchange: Exchange | None = None
    ) -> None:
        """Load the model. The ranks of `exchange` share every row. Raises ConfigError if it cannot be trained."""
        model = load_model(config, model_folder)
        forward.install_values(model, forward.read_value_head(model_folder))
        if exchange is not None:
            forward.share_rows(model, exchange)
        super().__init__(config, config.critic, model, rank=rank, gpu=gpu)

    def values(self, batch: TokenBatch) -> Tensor:
        result: Tensor = self._forward(**forward.value_arguments(batch, self._device))
        return result
