"""The policy of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
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
from fourfold_trainer.zero.engine import Trained
from fourfold_trainer.zero.models import load_model

# Elements that the export gathers at once.
_GATHER_ELEMENTS: Final = 1 << 28
# Folder in an export, of the adapters alone.
_ADAPTER_FOLDER: Final = "adapter"


class DeepSpeedPolicy(Trained):
    """The `Policy` of one rank."""

    def __init__(
        self, config: Config, model_folder: Path, *, rank: int, rank_count: int, exchange: Exchange | None = None
    ) -> None:
        """Load the model; `join` was called before. The ranks of `exchange` share every row.

        Raises:
            ConfigError: the folder holds no model that can be trained.
        """
        self._rank_count, self._source_folder = rank_count, model_folder
        torch.manual_seed(config.seed * rank_count + rank)
        model = load_model(config, model_folder)
        forward.install(model)
        if exchange is not None:
            forward.share_rows(model, exchange)
        self.routers = router.install(model, coef=config.trainer.router_aux_loss_coef, exchange=exchange)
        """Those of a mixture of experts, or None."""
        self._vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
        table = config.trainer.lora
        self._adapters = lora.Adapters(table, model, source=model_folder, seed=config.seed) if table.rank else None
        super().__init__(config, config.trainer, model, rank=rank, ema=config.trainer.ema_decay)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self._vocabulary_size

    def logprobs(self, batch: TokenBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return float32 [k] log-probabilities, and entropies where asked."""
        arguments = forward.batch_arguments(batch, self._device)
        result: tuple[Tensor, Tensor | None] = self._forward(**arguments, entropy=entropy)
        return result

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        count = torch.tensor([int(flag)], device=self._device)
        torch.distributed.all_reduce(count)
        return bool(count.item())

    def export(self, folder: Path, *, ema: bool = False) -> None:
        """Gather the weights, or their average; rank 0 writes them as a Hugging Face folder."""
        if not ema:
            return self._export(folder)
        assert self._average is not None, "rank 0 asks only where the recipe has one"
        try:
            with self._average.exchanged():
                self._refresh()
                self._export(folder)
        finally:
            self._refresh()

    def _export(self, folder: Path) -> None:
        with gathering(self._engine) if self._stage == 3 else nullcontext():
            state: dict[str, Tensor] = {}
            # Adapters are part of every group's weights; they are small.
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
        """Gather parameters for a block; only inside of `gathering`."""
        whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
        return whole if self._stage == 3 and parameters else nullcontext()

    def _exported(self, name: str, parameter: Any) -> Tensor:
        """Return a weight on the CPU, with its adapter in it."""
        weight: Tensor = parameter.detach()
        adapter = self._adapters.by_weight.get(name) if self._adapters is not None else None
        if adapter is not None:
            weight = merged(weight.reshape(-1), adapter).view(weight.shape)
        return weight.cpu().clone()

    def _make_adapters_whole(self) -> None:
        if self._adapters is not None and self._stage == 3:
            make_whole(self._engine, self._adapters.parameters)

    def weight_source(self) -> WeightSource:
        """Return where this rank's weights are."""
        rename = self._adapters.rename if self._adapters is not None else None
        source: ParameterSource = (
            Zero3Source(self._engine, rename=rename)
            if self._stage == 3
            else DenseSource(self._model, rank_count=self._rank_count, rename=rename)
        )
        if self._adapters is None:
            return source
        return MergedSource(source, self._adapters.by_weight, gather=self._make_adapters_whole)

    def save(self, folder: Path, name: str) -> None:
        """Write this rank's masters, and what adapters belong to."""
        super().save(folder, name)
        if self._adapters is not None and self._rank == 0:
            self._adapters.write_record(folder)

    def _check(self, folder: Path) -> None:
        lora.check_record(folder, self._adapters)

    def _gather_groups(self) -> Iterator[tuple[list[str], list[Any]]]:
        """Yield names and parameters, as many at once as the gather limit allows."""
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
