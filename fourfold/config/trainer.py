"""`[trainer]` and `[critic]`: the models that are trained, and where."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fourfold.config.lora import LoraConfig
from fourfold.config.table import Seconds, Table


class TrainerConfig(Table):
    """The trainer service."""

    replicas: Literal[0, 1] = 1
    """1: the launcher starts it; 0: it is started by hand."""
    ranks: int = Field(default=1, ge=1)
    """Processes; on GPUs one GPU each."""
    sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every micro-batch, each with an equal part of its tokens (DeepSpeed-Ulysses), for contexts that
    one rank cannot hold. Divides `ranks` and the models' attention heads. 1: every rank has its own micro-batches."""
    device: Literal["cpu", "cuda"] = "cpu"
    zero_stage: Literal[0, 1, 2, 3] = 3
    learning_rate: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine would reach their end one step after the last."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which it rises in a straight line to `learning_rate`."""
    final_learning_rate_share: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of `learning_rate`."""
    weight_decay: float = Field(default=0.0, ge=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Of policy and critic. muon: the matrices of the layers by Muon; embeddings, heads, norms and biases by AdamW."""
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Keep a moving average of the weights: after every optimizer step it is ema_decay * average + (1 - ema_decay) *
    weights. The run exports it beside the model, as `model-ema`. 0: none."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (Switch Transformers; 1e-3 is usual), added to the
    policy's loss. 0: none. The experts' load is in the metrics either way. A model without routers is refused."""
    gradient_checkpointing: bool = False
    offload: Literal["none", "optimizer", "optimizer+parameters"] = "none"
    """What of policy and critic GPUs leave in main memory. optimizer: masters and moments, which the CPU updates;
    needs `zero_stage` 1 to 3. optimizer+parameters: the weights, too, which come layer by layer; needs 3."""
    liger_kernels: bool = False
    """Fused kernels for norms, rotary embeddings and gated MLPs (package liger-kernel), on CUDA."""
    step_timeout_seconds: Seconds = 3600.0
    """Longest time one step, checkpoint or export may take."""
    lora: LoraConfig = LoraConfig()

    @property
    def data_parallel_size(self) -> int:
        """ranks / sequence_parallel_size: groups of ranks with micro-batches of their own."""
        return self.ranks // self.sequence_parallel_size

    @model_validator(mode="after")
    def _equal_groups(self) -> Self:
        if self.ranks % self.sequence_parallel_size:
            more = -(-self.ranks // self.sequence_parallel_size) * self.sequence_parallel_size
            raise ValueError(
                f"sequence_parallel_size = {self.sequence_parallel_size} does not divide ranks = {self.ranks}; set it "
                f"to a divisor, or ranks to {more}"
            )
        return self

    @model_validator(mode="after")
    def _can_offload(self) -> Self:
        lowest = {"none": 0, "optimizer": 1, "optimizer+parameters": 3}[self.offload]
        if self.zero_stage < lowest:
            stages = "3" if lowest == 3 else "1, 2 or 3"
            raise ValueError(
                f'offload = "{self.offload}" needs zero_stage {stages}, and it is {self.zero_stage}; set zero_stage = '
                f'{lowest}, or offload = "{"optimizer" if self.zero_stage else "none"}"'
            )
        if self.lora.rank and self.offload == "optimizer+parameters":
            raise ValueError(
                f'offload = "{self.offload}" and lora.rank = {self.lora.rank} do not go together: the weights would be '
                f'merged with adapters that lie elsewhere; set offload = "none", or lora.rank = 0'
            )
        return self

    @model_validator(mode="after")
    def _kernels_need_a_gpu(self) -> Self:
        if self.liger_kernels and self.device != "cuda":
            raise ValueError('`liger_kernels` run on GPUs alone; set device = "cuda", or remove them')
        return self


class CriticConfig(Table):
    """The critic, part of the trainer; there is one when `algorithm.advantage` is `gae`."""

    source: str = ""
    """A folder as for `model.source`; a reward or value model keeps its head. Empty: the policy's, with a new head."""
    ranks: int = Field(default=0, ge=0)
    """0: it is in the policy's ranks, and they take turns. Above 0: it has as many processes of its own, on GPUs after
    the policy's, and both work at the same time."""
    learning_rate: float = Field(default=9e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    final_learning_rate_share: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    value_clip: float = Field(default=0.5, ge=0)
    """A value may move by this much in one step; 0: any."""
    policy_starts_at_step: int = Field(default=1, ge=1)
    """Before this step only the critic is trained."""
