"""Defines `[trainer]`, `[trainer.lora]` and `[critic]`: the models that are trained, and their optimizers."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from fourfold.config.table import GpuType, Seconds, check_gpu_type
from fourfold.table import Table

ALL_LINEAR: Final = "all-linear"


class LoraConfig(Table):
    """`[trainer.lora]`: train low-rank adapters (LoRA, arXiv 2106.09685) in place of the weights.

    A linear layer W [out, in] becomes W + scale * B A, and only B [out, rank] and A [rank, in] are trained. Engines and
    exports get the sum, under the names of the model. There is no dropout: it would make log-probabilities random.
    """

    rank: int = Field(default=0, ge=0, le=4096)
    """Rank of every adapter. 0: all weights are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """scale = alpha / rank, so that the best learning rate hardly depends on the rank."""
    target_modules: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1, strict=False)
    """Layers that get an adapter: ends of module names, such as ["q_proj", "v_proj"], or "all-linear" for every linear
    layer except the output embedding."""
    use_rslora: bool = False
    """scale = alpha / sqrt(rank) (arXiv 2312.03732): high ranks then learn as fast as low ones."""

    @property
    def scale(self) -> float:
        """Factor of B A, from alpha and rank."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ValueError(f'`target_modules` has "{ALL_LINEAR}" and other names; keep one or the other')
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if not self.rank and changed:
            raise ValueError(f"`{changed[0]}` has no effect without adapters; set `rank` above 0, such as 16")
        return self


class TrainerConfig(Table):
    """`[trainer]`: the trainer service, its ranks and the optimizer."""

    replicas: Literal[0, 1] = 1
    """1: the launcher starts the trainer. 0: it is started by hand."""
    ranks: int = Field(default=1, ge=1)
    """Processes; with `device = "cuda"` each uses one GPU."""
    sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every micro-batch, each with an equal part of its tokens (DeepSpeed-Ulysses), for contexts that
    do not fit on one rank. Must divide `ranks` and the models' attention heads. 1: no rank shares micro-batches."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: each rank has a GPU."""
    gpu: GpuType = ""
    """Type of the GPUs, as `rollout.gpu`. Empty: any."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """What DeepSpeed divides among the ranks. 0: nothing; with model.dtype = `float32` alone. 1: the state of the
    optimizer. 2: also the gradients. 3: also the weights."""
    zero_hpz_partition_size: int = Field(default=1, ge=1)
    """Above 1: hierarchical partitioning (ZeRO++ hpZ, arXiv 2306.10209). So many ranks, those of one machine, keep a
    second copy of the weights among them, from which backward passes gather: no weights cross machines there. Must
    divide `ranks`; needs `zero_stage` 3. Its steps equal those without it; its speed was not measured."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of the policy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. linear and cosine reach their final value one step after the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps with a reduced learning rate at the beginning: step s of w has s / (w + 1) of `learning_rate`."""
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """The same as a share of all steps, in place of `warmup_steps`."""
    final_learning_rate_share: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of linear and cosine, as a share of `learning_rate`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, as in AdamW; norms and biases have none."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of policy and critic. muon: Muon for the matrices of the layers, AdamW for embeddings, heads, norms and
    biases."""
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    """Decay of AdamW's averages of the gradient and of its square."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """L2 norm to which larger gradients are scaled down."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Above 0: keep a moving average of the weights. After every optimizer step it becomes ema_decay * average +
    (1 - ema_decay) * weights. The run exports it beside the model, as `model-ema`."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (Switch Transformers; usually 1e-3), which is added to
    the policy's loss. Needs a model with routers, unless it is 0. The metrics have the load of the experts in any
    case."""
    gradient_checkpointing: bool = False
    """Keep no activations inside of layers, and compute them again in the backward pass: less memory, slower steps."""
    offload: Literal["none", "optimizer", "optimizer+parameters"] = "none"
    """State of policy and critic that is kept in main memory instead of on the GPUs. optimizer: masters and moments,
    updated by the CPU; needs `zero_stage` 1 to 3. optimizer+parameters: also the weights, copied to the GPU layer by
    layer; needs `zero_stage` 3. There is no offload to disks (NVMe): checkpoints and transfers read this state."""
    liger_kernels: bool = False
    """Use fused kernels for norms, rotary embeddings and gated MLPs (package liger-kernel); needs CUDA."""
    step_timeout_seconds: Seconds = 3600.0
    """Longest time that one step, checkpoint or export may take."""
    attach_seconds: Seconds = 600.0
    """Longest time that rank 0 waits for the ranks on other machines (`fourfold serve trainer --rank`)."""
    min_ranks: int = Field(default=0, ge=0)
    """Fewest ranks that train while other machines are missing: after `attach_seconds` the trainer goes on from its
    last checkpoint with those that are there, if these are so many, and takes others in after a checkpoint. A multiple
    of `sequence_parallel_size` and `zero_hpz_partition_size`. 0: the trainer ends without all `ranks`."""
    lora: LoraConfig = LoraConfig()

    @property
    def data_parallel_size(self) -> int:
        """ranks / sequence_parallel_size: groups of ranks with micro-batches of their own."""
        return self.ranks // self.sequence_parallel_size

    def warmup(self, step_count: int) -> int:
        """Return the number of warm-up steps of a run with so many steps."""
        return self.warmup_steps or round(self.warmup_share * step_count)

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps and self.warmup_share:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_share = {self.warmup_share:g} exclude each other; "
                f"remove one"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.ranks % self.sequence_parallel_size:
            more = -(-self.ranks // self.sequence_parallel_size) * self.sequence_parallel_size
            raise ValueError(
                f"sequence_parallel_size = {self.sequence_parallel_size} must divide ranks = {self.ranks}; set it to a "
                f"divisor, or ranks to {more}"
            )
        return self

    @property
    def rank_unit(self) -> int:
        """Number of which every possible number of ranks is a multiple."""
        return math.lcm(self.sequence_parallel_size, self.zero_hpz_partition_size)

    @model_validator(mode="after")
    def _check_min_ranks(self) -> Self:
        if self.min_ranks > self.ranks or self.min_ranks % self.rank_unit:
            raise ValueError(
                f"min_ranks = {self.min_ranks} must be at most ranks = {self.ranks} and a multiple of {self.rank_unit} "
                f"(sequence_parallel_size and zero_hpz_partition_size); set it to a multiple, or to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_hierarchy(self) -> Self:
        size = self.zero_hpz_partition_size
        if size == 1:
            return self
        for key, value, wrong, rule in (
            ("ranks", self.ranks, self.ranks % size, "it must divide them"),
            ("zero_stage", self.zero_stage, self.zero_stage != 3, "it needs stage 3"),
            ("offload", self.offload, self.offload == "optimizer+parameters", "offloaded weights have no second copy"),
            ("lora.rank", self.lora.rank, self.lora.rank, "adapters are whole on every rank"),
        ):
            if wrong:
                raise ValueError(
                    f"zero_hpz_partition_size = {size} and {key} = {value} exclude each other: {rule}; set "
                    f"zero_hpz_partition_size = 1, or change {key}"
                )
        return self

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        lowest = {"none": 0, "optimizer": 1, "optimizer+parameters": 3}[self.offload]
        if self.zero_stage < lowest:
            stages = "3" if lowest == 3 else "1, 2 or 3"
            raise ValueError(
                f'offload = "{self.offload}" needs zero_stage {stages}, not {self.zero_stage}; set zero_stage = '
                f'{lowest}, or offload = "{"optimizer" if self.zero_stage else "none"}"'
            )
        if self.lora.rank and self.offload == "optimizer+parameters":
            # The engine's copy is W + scale * B A, and W would be in main memory while B and A are not.
            raise ValueError(
                f'offload = "{self.offload}" and lora.rank = {self.lora.rank} exclude each other: adapters cannot be '
                f'merged with offloaded weights; set offload = "none", or lora.rank = 0'
            )
        return self

    @model_validator(mode="after")
    def _check_kernels(self) -> Self:
        check_gpu_type(self.gpu, self.device)
        if self.liger_kernels and self.device != "cuda":
            raise ValueError('`liger_kernels` need a GPU; set device = "cuda", or remove them')
        return self


class CriticConfig(Table):
    """The critic, part of the trainer. There is one if `algorithm.advantage` needs it, as `gae` does. The run exports
    it beside the model, as `critic`."""

    source: str = ""
    """Model as for `model.source`; a reward or value model keeps its head. Empty: the policy's model, with a new
    head."""
    ranks: int = Field(default=0, ge=0)
    """0: the critic shares the policy's ranks, and its passes come after the policy's. Above 0: it has so many
    processes of its own, on the GPUs after the policy's, and both models are trained at the same time."""
    learning_rate: float = Field(default=9e-6, gt=0)
    """Learning rate of the critic."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """As `trainer.schedule`."""
    warmup_steps: int = Field(default=0, ge=0)
    """As `trainer.warmup_steps`."""
    final_learning_rate_share: float = Field(default=0.0, ge=0, le=1)
    """As `trainer.final_learning_rate_share`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """As `trainer.weight_decay`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """As `trainer.max_grad_norm`."""
    value_clip: float = Field(default=0.5, ge=0)
    """Largest change of a value in one step; 0: no limit."""
    policy_starts_at_step: int = Field(default=1, ge=1)
    """First step in which the policy is trained; before it only the critic is."""
