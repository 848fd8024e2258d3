"""Holds one model and its optimizer in DeepSpeed on one rank: backward pass, optimizer step, save and restore."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Final

import deepspeed
import torch
from torch import Tensor

from fourfold.config import Config, CriticConfig, TrainerConfig
from fourfold.errors import WrongState
from fourfold_trainer.checkpoint import shards
from fourfold_trainer.flops import size_of
from fourfold_trainer.optim import master_weights
from fourfold_trainer.optim.ema import WeightAverage
from fourfold_trainer.optim.muon import MOMENTUM, Muon
from fourfold_trainer.zero.deepspeed_config import deepspeed_config, make_optimizer
from fourfold_trainer.zero.gradients import KeptGradient, intercepted
from fourfold_trainer.zero.load_model import speed_up
from fourfold_trainer.zero.partition import pin_frozen
from fourfold_trainer.zero.process_groups import device_of, leave

_ADAM_STATE: Final = ("exp_avg", "exp_avg_sq", shards.STEP)
_MUON_STATE: Final = (MOMENTUM,)


class DeepSpeedModel:
    """One rank's part of one model and its optimizer. `TrainedModel` documents the methods.

    All methods must run in the thread that created it.
    """

    def __init__(
        self,
        config: Config,
        table: TrainerConfig | CriticConfig,
        model: Any,
        *,
        rank: int,
        gpu: int,
        ema_decay: float = 0.0,
    ) -> None:
        """Pass a model from `load_model` to DeepSpeed.

        Args:
            table: the optimizer's settings of this model.
            ema_decay: decay of the weights' moving average; 0: keep no average.
        """
        self._config, self._rank = config, rank
        self._max_grad_norm = table.max_grad_norm
        self._stage = config.trainer.zero_stage
        self._device = device_of(config, gpu)
        self.size = size_of(model)
        speed_up(config, model)
        optimizer = make_optimizer(config, table, model)
        settings = deepspeed_config(config, model, max_grad_norm=table.max_grad_norm)
        if config.trainer.offload == "optimizer+parameters" and config.trainer.device == "cuda":
            pin_frozen(model)
        self._engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        self._model: Any = self._engine.module
        # Some ZeRO stages have run an empty optimizer step by now, which Adam must not count.
        self._inner.state.clear()
        self._engine.train()
        self._masters = master_weights.find_master_weights(
            self._engine.optimizer, self._model, stage=self._stage, rank=rank
        )
        if isinstance(self._inner, Muon):
            self._inner.attach(self._masters, device=self._device, dtype=getattr(torch, config.model.dtype))
        self._average = WeightAverage(self._masters.tensors, decay=ema_decay) if ema_decay else None
        self._kept = KeptGradient(self._masters, self._device)

    def _forward(self, **arguments: Any) -> Any:
        # Train mode switches gradient checkpointing on, which a pass without gradients does not need. Read the flag of
        # the model: DeepSpeed's engine has one of its own, which `train` does not change.
        if self._model.training != torch.is_grad_enabled():
            self._engine.train(torch.is_grad_enabled())
        return self._engine(**arguments)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # DeepSpeed averages over ranks, always; optimizer_step.py multiplies the loss by their number.
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def optimizer_step(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
        norm = self._step(learning_rate, self._max_grad_norm if max_grad_norm is None else max_grad_norm)
        if self._average is not None and math.isfinite(norm):
            self._average.update()
        return norm

    def keep_gradient(self) -> int:
        self._kept.clear()
        with intercepted(self._inner, self._kept.keep):
            norm = self._step(0.0, 0.0)
        if not math.isfinite(norm):
            self._kept.clear()
        return self._kept.byte_count

    def compare_gradient(self) -> list[float]:
        with intercepted(self._inner, self._kept.compare):
            norm = self._step(0.0, 0.0)
        products = self._kept.products()
        return products if math.isfinite(norm) else []

    def _step(self, learning_rate: float, max_grad_norm: float) -> float:
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        if self._stage == 0:  # DeepSpeed uses the optimizer unwrapped, and does not check for overflow
            self._engine._config.gradient_clipping = max_grad_norm  # private: the setting cannot change otherwise
            gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if math.isfinite(norm):
                self._engine.step()
            else:
                self._engine.zero_grad()
            return norm
        self._engine.optimizer.clip_grad = max_grad_norm
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if self._engine.was_step_applied():
            return norm
        if self._stage in (1, 2) and self._config.trainer.offload != "none":
            # DeepSpeed 0.19.8 keeps a gradient that is not finite here, and would add later ones to it.
            self._engine.optimizer.averaged_gradients.clear()
        return math.nan

    def save(self, folder: Path, name: str) -> None:
        # DeepSpeed's own checkpoints are pickles, and fit only the same number of ranks and the same stage.
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        states = [self._state(index) for index in range(len(self._masters.tensors))]
        shards.write(folder, name, self._masters, states, random, rank=self._rank)

    def read(self, folder: Path, name: str) -> shards.Shard:
        kinds = [shards.MASTER, *_ADAM_STATE, *_MUON_STATE, *([shards.EMA] if self._average else [])]
        failure: WrongState | None = None
        shard = shards.Shard(states=[], random={})
        try:
            self._check(folder)
            shard = shards.read(folder, name, self._masters, kinds, rank=self._rank)
        except WrongState as error:
            failure = error
        any_failed = self.any_rank(failure is not None)  # all raise, or the others would wait in `restore`
        if failure is not None:
            raise failure
        if any_failed:
            raise WrongState(f"another rank cannot read its part of {folder}; restore another checkpoint")
        return shard

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. A collective."""
        count = torch.tensor([int(flag)], device=self._device)
        torch.distributed.all_reduce(count)
        return bool(count.item())

    def _check(self, folder: Path) -> None:
        """Raise WrongState for a checkpoint that does not fit this model; a hook for subclasses."""

    @torch.no_grad()
    def restore(self, shard: shards.Shard) -> None:
        self._inner.state.clear()
        for index, (master, state) in enumerate(zip(self._masters.tensors, shard.states, strict=True)):
            master.data.copy_(state[shards.MASTER].view(master.shape))
            # Moments of another optimizer are ignored; this one then begins without any.
            kinds = _MUON_STATE if isinstance(self._inner, Muon) and self._inner.trains(master) else _ADAM_STATE
            if all(key in state for key in kinds):
                moments = {key: state[key] for key in kinds}
                shapes = {key: () if key == shards.STEP else master.shape for key in moments}
                self._inner.state[master] = {k: v.view(shapes[k]).to(master.device) for k, v in moments.items()}
            if self._average is not None:  # if the checkpoint has no average, it begins with the weights
                self._average.tensors[index].copy_(state.get(shards.EMA, state[shards.MASTER]).view(master.shape))
        self._copy_masters_to_weights()
        # A rank that the checkpoint does not have gets a state derived from the seed, its number and Adam's count.
        count = int(max((state[shards.STEP].item() for state in shard.states if shards.STEP in state), default=0))
        key = f"{self._config.seed} {self._rank} {count}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "little"))
        if "cpu" in shard.random:
            torch.set_rng_state(shard.random["cpu"])
        if self._device.type == "cuda" and "cuda" in shard.random:
            torch.cuda.set_rng_state(shard.random["cuda"], self._device)

    def close(self) -> None:
        self._engine.destroy()
        leave()  # the group of all models of this process

    @property
    def _inner(self) -> Any:
        """Return the torch optimizer inside DeepSpeed's wrapper; stage 0, which is float32 alone, has no wrapper."""
        wrapper = self._engine.optimizer
        return wrapper.optimizer if self._stage else wrapper

    def _state(self, index: int) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps of one master, by kind."""
        master = self._masters.tensors[index]
        state = {shards.MASTER: master, **self._inner.state.get(master, {})}
        if self._average is not None:
            state[shards.EMA] = self._average.tensors[index]
        return state

    def _copy_masters_to_weights(self) -> None:
        """Set the weights of the forward pass from the masters, with the private calls that end DeepSpeed's `step`."""
        wrapper = self._engine.optimizer
        if self._stage == 3:
            # A pass leaves some parameters whole; partition them first, or they would keep the old values.
            wrapper._partition_all_parameters()
            for index in range(len(wrapper.fp32_partitioned_groups_flat)):
                wrapper._reassign_or_swap_out_partitioned_parameters(index)
            wrapper._post_step(set())
        elif self._stage:
            wrapper.update_lp_params()
