"""One model and its optimizer in DeepSpeed, on one rank: what policy and critic have in common.

The optimizer starts with learning rate 0 and gets the right one with every update, because some
stages run an empty step at the start. DeepSpeed's checkpoints are pickles; ours are safetensors
of the same buffers.
"""

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
from fourfold_trainer.checkpoint import shards, store
from fourfold_trainer.flops import ModelSize
from fourfold_trainer.optim import masters
from fourfold_trainer.optim.ema import Average
from fourfold_trainer.optim.muon import MOMENTUM, Muon
from fourfold_trainer.zero import offload
from fourfold_trainer.zero.group import device_of, leave
from fourfold_trainer.zero.models import speed_up
from fourfold_trainer.zero.settings import deepspeed_settings, make_optimizer

_ADAM_STATE: Final = ("exp_avg", "exp_avg_sq", shards.STEP)
_MUON_STATE: Final = (MOMENTUM,)


class Trained:
    """One rank's part of one model and its optimizer. All methods belong to the thread that made it."""

    def __init__(
        self,
        config: Config,
        table: TrainerConfig | CriticConfig,
        model: Any,
        *,
        rank: int,
        gpu: int | None = None,
        ema: float = 0.0,
    ) -> None:
        """Give the model to DeepSpeed.

        Args:
            config: of the run.
            table: where the optimizer's settings are.
            model: whole, on this rank.
            rank: of this process.
            gpu: of this process; None: that of the same number.
            ema: decay of the weights' moving average; 0: none is kept.
        """
        self._config, self._rank = config, rank
        self._max_grad_norm = table.max_grad_norm
        self._stage = config.trainer.zero_stage
        self._device = device_of(config, rank if gpu is None else gpu)
        self.size = ModelSize.of(model)  # before it is partitioned
        speed_up(config, model)
        optimizer = make_optimizer(config, table, model)
        settings = deepspeed_settings(config, model, max_grad_norm=table.max_grad_norm)
        if config.trainer.offload == "optimizer+parameters":
            offload.partition(model, settings, self._device)
        self._engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        self._model: Any = self._engine.module
        # Some stages have made an empty step: Adam must not count it.
        self._inner.state.clear()
        self._engine.train()
        self._masters = masters.find(self._engine.optimizer, self._model, stage=self._stage, rank=rank)
        if isinstance(self._inner, Muon):
            self._inner.attach(self._masters, device=self._device, dtype=getattr(torch, config.model.dtype))
        self._average = Average(self._masters.tensors, decay=ema) if ema else None

    def _forward(self, **arguments: Any) -> Any:
        # Gradient checkpoints are for gradients alone. The flag is the model's: the engine's own never changes.
        if self._model.training != torch.is_grad_enabled():
            self._engine.train(torch.is_grad_enabled())
        return self._engine(**arguments)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, averaged over ranks."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def optimizer_step(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
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
        if self._engine.was_step_applied():
            return norm
        if self._stage in (1, 2) and self._config.trainer.offload != "none":
            # DeepSpeed 0.19.8 forgets to: the next gradients would be added to the one that is not finite.
            self._engine.optimizer.averaged_gradients.clear()
        return math.nan

    def _clip_to(self, norm: float) -> None:
        """Set what gradients are clipped to from now on; 0: they are not."""
        if self._is_plain:
            self._engine._config.gradient_clipping = norm
        else:
            self._engine.optimizer.clip_grad = norm

    def save(self, folder: Path, name: str) -> None:
        """Write this rank's masters, the optimizer's moments, average and random state."""
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        states = [self._state(index) for index in range(len(self._masters.tensors))]
        shards.write(folder / store.rank_file(name, self._rank), self._masters, states, random, rank=self._rank)

    def read(self, folder: Path, name: str) -> shards.Shard:
        """Read what this rank needs of all files; raise on every rank when one of them cannot."""
        kinds = [shards.MASTER, *_ADAM_STATE, *_MUON_STATE, *([shards.EMA] if self._average else [])]
        failure: WrongState | None = None
        shard = shards.Shard(states=[], random={})
        try:
            self._check(folder)
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

    def _check(self, folder: Path) -> None:
        """Raise WrongState for a checkpoint whose shards do not say all that they must."""

    @torch.no_grad()
    def restore(self, shard: shards.Shard) -> None:
        """Go back to what `read` returned."""
        self._inner.state.clear()
        for index, (master, state) in enumerate(zip(self._masters.tensors, shard.states, strict=True)):
            master.data.copy_(state[shards.MASTER].view(master.shape))
            # What another optimizer has left is of no use to this one, which begins without moments then.
            kinds = _MUON_STATE if isinstance(self._inner, Muon) and self._inner.trains(master) else _ADAM_STATE
            if all(key in state for key in kinds):
                moments = {key: state[key] for key in kinds}
                shapes = {key: () if key == shards.STEP else master.shape for key in moments}
                self._inner.state[master] = {k: v.view(shapes[k]).to(master.device) for k, v in moments.items()}
            if self._average is not None:  # of a checkpoint that has none it begins with the weights
                self._average.tensors[index].copy_(state.get(shards.EMA, state[shards.MASTER]).view(master.shape))
        self._refresh()
        self._restore_random(shard)

    def close(self) -> None:
        """Leave the process group, which every model of this process is in."""
        self._engine.destroy()
        leave()

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
        """The optimizer inside of DeepSpeed's wrapper."""
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
