"""One rank's models and optimizers in DeepSpeed, ZeRO stages 0 to 3. The only user of `deepspeed` here.

What DeepSpeed does on its own and we do not want: it divides the loss by its accumulation
steps (set to 1, boundaries are given explicitly, which stages 1 and 2 need) and averages
gradients over ranks (update.py multiplies by their number). The optimizer starts with learning
rate 0 and gets the right one with every update, because some stages run an empty step at the
start. DeepSpeed's checkpoints are pickles; ours are safetensors of the same buffers.

The environment of `ranks.environment` must be set before this module is imported: the device
that DeepSpeed uses is chosen then. `join` comes before the first model.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import deepspeed
import deepspeed.ops
import torch
import transformers
from deepspeed.comm import comm as deepspeed_comm
from torch import Tensor

from fourfold.config import Config, CriticConfig, TrainerConfig
from fourfold.errors import ConfigError, WrongState
from fourfold.nn import forward
from fourfold.nn.batching import TokenBatch
from fourfold.weights.source import DenseSource, WeightSource
from fourfold.weights.zero3 import Zero3Source
from fourfold_trainer import checkpoint, masters, shards
from fourfold_trainer.ema import Average

_ADAM_EPSILON: Final = 1e-8
# Elements of one gradient reduction: its buffer is allocated once, in the weights' dtype.
_BUCKET_ELEMENTS: Final = 20_000_000
# Elements that the export gathers at once.
_GATHER_ELEMENTS: Final = 1 << 28
_ADAM_STATE: Final = ("exp_avg", "exp_avg_sq", "step")


class _Trained:
    """One rank's part of one model and its optimizer. All methods belong to the thread that made it."""

    def __init__(
        self, config: Config, table: TrainerConfig | CriticConfig, model: Any, *, rank: int, ema: float = 0.0
    ) -> None:
        """Give the model to DeepSpeed.

        Args:
            config: of the run.
            table: where the optimizer's settings are.
            model: whole, on this rank.
            rank: of this process.
            ema: decay of the weights' moving average; 0: none is kept.
        """
        self._config, self._rank = config, rank
        self._max_grad_norm = table.max_grad_norm
        self._stage = config.trainer.zero_stage
        self._device = device_of(config, rank)
        self._engine: Any = deepspeed.initialize(
            model=model,
            optimizer=_optimizer(table, config.trainer.adam_betas, model),
            config=_settings(config, max_grad_norm=table.max_grad_norm),
            dist_init_required=False,
        )[0]
        self._model: Any = self._engine.module
        # Some stages have made an empty step: Adam must not count it.
        self._inner.state.clear()
        self._engine.train()
        self._masters = masters.find(self._engine.optimizer, self._model, stage=self._stage, rank=rank)
        self._average = Average(self._masters.tensors, decay=ema) if ema else None

    def _forward(self, **arguments: Any) -> Any:
        if self._engine.training != torch.is_grad_enabled():  # gradient checkpoints are for gradients alone
            self._engine.train(torch.is_grad_enabled())
        return self._engine(**arguments)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, averaged over ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def update(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
        """Clip and step; return the gradient's norm before clipping. Not finite: nothing was changed."""
        norm = self._step(learning_rate, self._max_grad_norm if max_grad_norm is None else max_grad_norm)
        if self._average is not None and math.isfinite(norm):
            self._average.update()
        return norm

    def _step(self, learning_rate: float, max_grad_norm: float) -> float:
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        self._clip_to(max_grad_norm)
        if self._is_plain:  # DeepSpeed checks nothing here
            norm = float(
                torch.nn.utils.get_total_norm([p.grad for p in self._model.parameters() if p.grad is not None])
            )
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return norm
            self._engine.step()
            return norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        return norm if self._engine.was_step_applied() else math.nan

    def _clip_to(self, norm: float) -> None:
        """Set what gradients are clipped to from now on; 0: they are not."""
        if self._is_plain:
            self._engine._config.gradient_clipping = norm
        else:
            self._engine.optimizer.clip_grad = norm

    def save(self, folder: Path, name: str) -> None:
        """Write this rank's masters, Adam's moments, average and random state."""
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        states = [self._state(index) for index in range(len(self._masters.tensors))]
        shards.write(folder / checkpoint.rank_file(name, self._rank), self._masters, states, random, rank=self._rank)

    def read(self, folder: Path, name: str) -> shards.Shard:
        """Read what this rank needs of all files; raise on every rank when one of them cannot."""
        kinds = [shards.MASTER, *_ADAM_STATE, *([shards.EMA] if self._average else [])]
        failure: WrongState | None = None
        shard = shards.Shard(states=[], random={})
        try:
            shard = shards.read(folder, name, self._masters, kinds, rank=self._rank)
        except WrongState as error:
            failure = error
        unreadable = torch.tensor([0 if failure is None else 1], device=self._device)
        torch.distributed.all_reduce(unreadable)
        if failure is not None:
            raise failure
        if unreadable.item():
            raise WrongState(f"another rank cannot read its part of {folder}; restore another checkpoint")
        return shard

    @torch.no_grad()
    def restore(self, shard: shards.Shard) -> None:
        """Go back to what `read` returned."""
        self._inner.state.clear()
        for index, (master, state) in enumerate(zip(self._masters.tensors, shard.states, strict=True)):
            master.data.copy_(state[shards.MASTER].view(master.shape))
            moments = {key: state[key] for key in _ADAM_STATE if key in state}
            if moments:
                shapes = {key: () if key == shards.STEP else master.shape for key in moments}
                self._inner.state[master] = {k: v.view(shapes[k]).to(master.device) for k, v in moments.items()}
            if self._average is not None:  # of a checkpoint that has none it begins with the weights
                self._average.tensors[index].copy_(state.get(shards.EMA, state[shards.MASTER]).view(master.shape))
        self._refresh()
        self._restore_random(shard)

    def _restore_random(self, shard: shards.Shard) -> None:
        """Go on with this rank's random numbers; a rank that is new begins others, by the seed and Adam's count."""
        count = int(max((state[shards.STEP].item() for state in shard.states if shards.STEP in state), default=0))
        key = f"{self._config.seed} {self._rank} {count}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "little"))
        if "cpu" in shard.random:
            torch.set_rng_state(shard.random["cpu"])
        if self._device.type == "cuda" and "cuda" in shard.random:
            torch.cuda.set_rng_state(shard.random["cuda"], self._device)

    @property
    def _is_plain(self) -> bool:
        """Stage 0 in float32: the engine's optimizer is the plain one, and the masters are the model itself."""
        return self._stage == 0 and self._config.model.dtype == "float32"

    @property
    def _inner(self) -> Any:
        """The AdamW inside of DeepSpeed's wrapper."""
        wrapper = self._engine.optimizer
        return wrapper if self._is_plain else wrapper.optimizer

    def _state(self, index: int) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of one master, by kind."""
        master = self._masters.tensors[index]
        state = {shards.MASTER: master, **self._inner.state.get(master, {})}
        if self._average is not None:
            state[shards.EMA] = self._average.tensors[index]
        return state

    def _refresh(self) -> None:
        """Make the weights of the forward pass from the masters, as the end of an update does."""
        wrapper = self._engine.optimizer
        if self._stage == 3:
            wrapper._partition_all_parameters()
            for index in range(len(wrapper.fp32_partitioned_groups_flat)):
                wrapper._reassign_or_swap_out_partitioned_parameters(index)
            wrapper._post_step(set())
        elif self._stage:
            wrapper.update_lp_params()
        elif not self._is_plain:
            for group, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
                for master, weight in zip(group, weights, strict=True):
                    weight.data.copy_(master)


class DeepSpeedPolicy(_Trained):
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

    def close(self) -> None:
        """Leave the process group."""
        self._engine.destroy()
        deepspeed_comm.destroy_process_group()
        deepspeed_comm.cdb = None  # so that a later `join` of this process starts afresh

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


class DeepSpeedCritic(_Trained):
    """The `Critic` of one rank: a body with a value head, of another folder or of the policy's."""

    def __init__(self, config: Config, model_folder: Path, *, rank: int) -> None:
        """Load the model; `join` was called before.

        Raises:
            ConfigError: the folder holds no model that can be trained.
        """
        model = load_model(config, model_folder)
        forward.install_values(model, forward.read_value_head(model_folder))
        super().__init__(config, config.critic, model, rank=rank)

    def values(self, batch: TokenBatch) -> Tensor:
        """Return float32 [k]: the value of the state before each asked token."""
        result: Tensor = self._forward(**forward.value_arguments(batch, self._device))
        return result


def load_model(config: Config, folder: Path) -> Any:
    """Return the model, ready to give log-probabilities.

    Raises:
        ConfigError: the folder holds no model that can be trained.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = getattr(torch, config.model.dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.source: {folder} cannot be loaded as a causal language model ({error}); give a Hugging Face "
            f"folder with config.json and safetensors weights"
        ) from None
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and config.model.max_context_tokens > longest:
        raise ConfigError(
            f"model.max_context_tokens = {config.model.max_context_tokens}, but {folder} was made for at most "
            f"{longest} tokens; lower it"
        )
    forward.disable_dropout(model)
    if config.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()  # type: ignore[no-untyped-call]
    return model.train()


def device_of(config: Config, rank: int) -> torch.device:
    """Return the device of a rank."""
    return torch.device(f"cuda:{rank}" if config.trainer.device == "cuda" else "cpu")


def join(config: Config, *, rank: int, rank_count: int, rendezvous: Path) -> None:
    """Join the process group: gloo or NCCL, over loopback alone (see `ranks.environment`).

    Args:
        config: of the run.
        rank: of this process.
        rank_count: number of ranks.
        rendezvous: path of a file that all ranks see, in a folder of this run alone.
    """
    if config.trainer.device == "cuda":
        torch.cuda.set_device(device_of(config, rank))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # torch 2.13 has new names for two collectives, and says so at every call of DeepSpeed's.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # DeepSpeed would compile an all-reduce through shared memory at its first use: 20 s, a compiler, and all ranks at
    # once. Only its inference calls it. With no operator known as compatible it looks for no compiler either.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend="nccl" if config.trainer.device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=rank_count,
        timeout=timedelta(seconds=config.trainer.step_timeout_seconds),
        auto_mpi_discovery=False,
        verbose=False,
    )


def _optimizer(
    table: TrainerConfig | CriticConfig, betas: tuple[float, float], model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Return AdamW; weight decay, where there is any, spares biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = table.weight_decay
    groups = [{"params": parameters, "weight_decay": 0.0}]
    if decay:
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=_ADAM_EPSILON, fused=True)


def _settings(config: Config, *, max_grad_norm: float) -> dict[str, Any]:
    stage = config.trainer.zero_stage
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": config.trainer.device == "cuda",
            "reduce_bucket_size": _BUCKET_ELEMENTS,
        },
        "steps_per_print": 1 << 40,
    }
    if stage:  # stage 0 has no such buffer and sums micro-batches in the weights' dtype
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
