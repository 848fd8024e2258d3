"""The policy of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
from torch import Tensor

from fourfold.config import Config
from fourfold.nn import forward
from fourfold.nn.batching import TokenBatch
from fourfold.weights.source import DenseSource, WeightSource
from fourfold.weights.zero3 import Zero3Source
from fourfold_trainer import checkpoint
from fourfold_trainer.zero.engine import Trained
from fourfold_trainer.zero.models import load_model

# Elements that the export gathers at once.
_GATHER_ELEMENTS: Final = 1 << 28


class DeepSpeedPolicy(Trained):
    """The `Policy` of one rank."""

    def __init__(self, config: Config, model_folder: Path, *, rank: int, rank_count: int) -> None:
        """Load the model; `join` was called before.

        Raises:
            ConfigError: the folder holds no model that can be trained.
        """
        self._rank_count, self._source_folder = rank_count, model_folder
        torch.manual_seed(config.seed * rank_count + rank)
        model = load_model(config, model_folder)
        forward.install(model)
        self._vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
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
        state: dict[str, Tensor] = {}
        for names, parameters in self._gather_groups():
            with deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3):
                if self._rank == 0:
                    state.update({n: p.detach().cpu().clone() for n, p in zip(names, parameters, strict=True)})
        if self._rank == 0:
            checkpoint.write_model(self._model, state, folder, source=self._source_folder)

    def weight_source(self) -> WeightSource:
        """Return where this rank's weights are."""
        if self._stage == 3:
            return Zero3Source(self._engine)
        return DenseSource(self._model, rank_count=self._rank_count)

    def _gather_groups(self) -> Iterator[tuple[list[str], list[Any]]]:
        """Yield names and parameters, as many at once as the gather limit allows."""
        names: list[str] = []
        parameters: list[Any] = []
        size = 0
        for name, parameter in self._model.named_parameters():
            count = int(getattr(parameter, "ds_numel", parameter.numel()))
            if parameters and size + count > _GATHER_ELEMENTS:
                yield names, parameters
                names, parameters, size = [], [], 0
            names.append(name)
            parameters.append(parameter)
            size += count
        yield names, parameters
