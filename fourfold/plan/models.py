"""Reads the sizes of a recipe's models, and checks the recipe against them: sequence parallelism, layers for LoRA."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from fourfold.config import Config, LoraConfig
from fourfold.config.trainer import ALL_LINEAR
from fourfold.errors import ConfigError
from fourfold.model import folder
from fourfold.model.folder import ModelShape
from fourfold.model.tokenizer import check_same_vocabulary
from fourfold.text import nearest_name

MAX_ADAPTER_RANK: Final = 512
"""Highest `max_lora_rank` of vLLM."""
# Names of output embeddings that are matrices of their own, and of the head of a reward model.
_HEADS: Final = ("lm_head.weight", "embed_out.weight", "score.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """The LoRA adapters of a model."""

    layers: int  # linear layers that get an adapter
    kinds: tuple[str, ...]  # names of these layers inside their blocks, such as `q_proj`
    parameter_count: int  # elements of all adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of the models of a recipe."""

    policy: ModelShape  # in a run that trains a reward model, that one
    critic: ModelShape  # from the policy's source, unless the recipe trains a critic from another one
    adapters: AdapterPlan | None  # None if all weights of the policy are trained
    trained_head: int = 0  # parameters that are trained beside the adapters: the head of a reward model
    reference: ModelShape | None = None  # None: the policy's

    @property
    def trained(self) -> int | None:
        """Parameters of the policy that are trained; None: all."""
        return self.adapters.parameter_count + self.trained_head if self.adapters else None


def check_models(config: Config) -> None:
    """Check that policy, critic and reference have all needed files, and the reference the policy's vocabulary."""
    folder.check(config.model.source)
    if config.needs_reference and (source := config.reference.source):
        folder.check(source, "reference.source")
        if source != config.model.source and folder.is_ready(source) and folder.is_ready(config.model.source):
            check_same_vocabulary(folder.resolve(config.model.source), folder.resolve(source), key="reference.source")
    if config.algorithm.needs_critic and config.critic.source:
        folder.check(config.critic.source, "critic.source")


def model_sizes(config: Config) -> ModelSizes:
    """Read the models of a recipe from their config.json and file headers; its LoRA layers must exist."""
    check_models(config)
    scores = config.algorithm.loss.trains == "scores"
    policy = (_with_value_head if scores else folder.shape)(config.model.source)
    critic = _with_value_head(config.critic.source or config.model.source) if config.algorithm.needs_critic else policy
    own_reference = config.needs_reference and config.reference.source
    return ModelSizes(
        policy=policy,
        critic=critic,
        adapters=adapter_plan(config),
        trained_head=policy.hidden if scores else 0,
        reference=folder.shape(config.reference.source) if own_reference else None,
    )


def _with_value_head(source: str) -> ModelShape:
    """Return the sizes of a model with a head of values in place of its output embedding."""
    shape, tensors = folder.shape(source), folder.tensor_shapes(source)
    heads = sum(math.prod(tensors[name]) for name in _HEADS if name in tensors)
    return replace(shape, parameter_count=shape.parameter_count - heads + shape.hidden)


def check_context(config: Config) -> None:
    """Check that the model was made for sequences as long as `model.max_context_tokens`."""
    longest = folder.max_positions(config.model.source)
    if longest is not None and config.model.max_context_tokens > longest:
        raise ConfigError(
            f"model.max_context_tokens = {config.model.max_context_tokens}, but {config.model.source} was made for at "
            f"most {longest} tokens; lower it"
        )


def check_sequence_parallel(config: Config) -> None:
    """Check that `trainer.sequence_parallel_size` divides the attention heads of policy and critic.

    Key and value heads need no rule: those that the size does not divide are repeated.
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


def adapter_plan(config: Config) -> AdapterPlan | None:
    """Return the adapters of a recipe, whose layers the model must have; None if all weights are trained."""
    lora = config.trainer.lora
    if not lora.rank:
        return None
    shapes = linear_shapes(config.model.source)
    chosen = select_adapter_layers(shapes, lora)
    return AdapterPlan(
        layers=len(chosen),
        kinds=tuple(sorted({name.rpartition(".")[2] for name in chosen})),
        parameter_count=sum(lora.rank * sum(shapes[name]) for name in chosen),
    )


def sends_adapters(config: Config) -> bool:
    """Return whether the engines of a run get LoRA adapters; otherwise they get whole weights."""
    return config.trainer.lora.rank > 0 and config.needs_engines and not adapter_obstacle(config)


def adapter_obstacle(config: Config) -> str:
    """Return why the engines of a run with `trainer.lora` get merged weights; empty: they get the adapters.

    Trainer and engines call this with the same recipe and model, and find the same.
    """
    pools = config.rollout_pools
    if config.weights.adapters == "merged":
        return 'weights.adapters = "merged"'
    if config.trainer.lora.rank > MAX_ADAPTER_RANK:
        return f"vLLM takes adapters up to rank {MAX_ADAPTER_RANK}"
    if config.rollout.sleep_mode:
        return "engines with rollout.sleep_mode drop their weights in each step, and adapters do not replace them"
    if any(pool.quantization for pool in pools):
        return "engines with rollout.quantization round the weights below the adapters"
    if any(pool.pipeline_parallel_size > 1 for pool in pools):
        return "engines with rollout.pipeline_parallel_size above 1 hold a part of the layers each"
    if any(pool.gpus_per_replica for pool in pools):
        return "engines on GPUs were not measured with adapters yet"
    if any(".experts." in name for name in folder.tensor_shapes(config.model.source)):
        return "the model has experts"
    return ""


def linear_shapes(source: str) -> Mapping[str, tuple[int, int]]:
    """Return [out, in] of a model's linear layers by name: the matrices inside its numbered blocks."""
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in folder.tensor_shapes(source).items()
        if name.endswith(".weight")
        and len(shape) == 2
        and any(part.isdecimal() for part in name.split("."))
        # A checkpoint holds experts as separate matrices, but the model holds them as one tensor, not as layers.
        and ".experts." not in name
    }


def select_adapter_layers(names: Collection[str], lora: LoraConfig) -> list[str]:
    """Return the layers in `names` that end in one of `lora.target_modules` and so get an adapter, in their order.

    The ConfigError of a target without a layer has the nearest name.
    """
    if lora.target_modules == (ALL_LINEAR,):
        if not names:
            raise ConfigError("trainer.lora.target_modules: the model has no linear layer; set trainer.lora.rank = 0")
        return list(names)
    known = sorted({name.rpartition(".")[2] for name in names})
    for target in lora.target_modules:
        if not any(_ends_with(name, target) for name in names):
            near = nearest_name(target.rpartition(".")[2], known)
            hint = f"; did you mean {near!r}?" if near else "."
            raise ConfigError(
                f"trainer.lora.target_modules: the model has no linear layer {target!r}{hint} Its linear layers are "
                f"{', '.join(known)}: give some of these, or {ALL_LINEAR!r}"
            )
    return [name for name in names if any(_ends_with(name, target) for target in lora.target_modules)]


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")  # whole parts of the name: "proj" does not match "q_proj"
