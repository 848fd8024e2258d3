"""The critic of one rank."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fourfold.config import Config
from fourfold.nn import forward
from fourfold.nn.batching import TokenBatch
from fourfold.nn.sequence import Exchange
from fourfold_trainer.zero.engine import Trained
from fourfold_trainer.zero.models import load_model


class DeepSpeedCritic(Trained):
    """The `Critic` of one rank: a body with a value head, of another folder or of the policy's."""

    def __init__(
        self, config: Config, model_folder: Path, *, rank: int, gpu: int, exchange: Exchange | None = None
    ) -> None:
        """Load the model; `join` was called before. The ranks of `exchange` share every row.

        Raises:
            ConfigError: the folder holds no model that can be trained.
        """
        model = load_model(config, model_folder)
        forward.install_values(model, forward.read_value_head(model_folder))
        if exchange is not None:
            forward.share_rows(model, exchange)
        super().__init__(config, config.critic, model, rank=rank, gpu=gpu)

    def values(self, batch: TokenBatch) -> Tensor:
        """Return float32 [k]: the value of the state before each asked token."""
        result: Tensor = self._forward(**forward.value_arguments(batch, self._device))
        return result
