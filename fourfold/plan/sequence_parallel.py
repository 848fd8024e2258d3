"""Whether the ranks of the trainer can share a packed row, by the sizes of the models: before anything is started."""

from __future__ import annotations

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.model import folder


def check(config: Config) -> None:
    """Refuse a `trainer.sequence_parallel_size` that does not divide the attention heads of policy and critic.

    Key and value heads need no rule: those that it does not divide are repeated.

    Raises:
        ConfigError: it does not, or a model is not there.
    """
    size = config.trainer.sequence_parallel_size
    if size == 1:
        return
    sources = [("model.source", config.model.source)]
    if config.algorithm.needs_critic and config.critic.source:
        sources.append(("critic.source", config.critic.source))
    for key, source in sources:
        heads = folder.shape(source).heads
        if heads % size:
            fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0 and config.trainer.ranks % n == 0)
            raise ConfigError(
                f"trainer.sequence_parallel_size = {size} does not divide the {heads} attention heads of {key} = "
                f"{source!r}; with trainer.ranks = {config.trainer.ranks} choose one of: {fit}"
            )
