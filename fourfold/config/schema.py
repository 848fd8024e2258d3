"""What a recipe may say: every table and key, its default and its rules.

Every service is started with the same recipe and reads the tables it needs, so that nothing
can disagree. Units are in the names: `_seconds`, `_tokens`, `_bytes`.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fourfold.config.algorithm import AlgorithmConfig
from fourfold.config.placement import PlacementConfig
from fourfold.config.rollout import RolloutConfig
from fourfold.config.table import Name, Seconds, Table, Temperature
from fourfold.config.trainer import CriticConfig, TrainerConfig


class ModelConfig(Table):
    """The policy that is trained; the reference is a frozen copy of it."""

    source: str
    """A Hugging Face model folder, relative to the working directory, or `builtin:NAME` (`fourfold.model.folder`)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in the forward passes; the optimizer's masters are float32."""
    max_context_tokens: int = Field(default=1024, ge=8)
    """Longest prompt plus completion."""


class DataSourceConfig(Table):
    """Where prompts come from: a file or folder (`path`), or a generator (`reasoning_gym`)."""

    path: str = ""
    """JSONL or Parquet file, or a Hugging Face dataset folder (`save_to_disk`)."""
    reasoning_gym: str = ""
    """Name of a reasoning-gym task."""
    options: dict[str, Any] = Field(default={})
    """Options of the reasoning-gym task."""
    size: int = Field(default=0, ge=0)
    """Rows to take; 0: all of a file. A generator needs a size."""
    seed: int = Field(default=0, ge=0)
    """Seed of the generator."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path and self.reasoning_gym:
            raise ValueError(
                f"path = {self.path!r} and reasoning_gym = {self.reasoning_gym!r}: rows have one source; remove one"
            )
        if not self.path and not self.reasoning_gym:
            raise ValueError(
                "path and reasoning_gym are empty: rows have one source; set path to a file or folder, or "
                'reasoning_gym to a task such as "products"'
            )
        if self.reasoning_gym and not self.size:
            raise ValueError(
                f"reasoning_gym = {self.reasoning_gym!r} makes rows without end; set size, how many to take, such as "
                f"size = 4096"
            )
        if self.options and not self.reasoning_gym:
            raise ValueError(
                f"options = {self.options} are a reasoning-gym task's, and path = {self.path!r}; remove them"
            )
        return self


class HoldoutConfig(Table):
    """Keeps whole task groups out of training, for evaluation: rows of one group have the same key."""

    field: str = "expression"
    """Metadata field that holds the key."""
    unordered_numbers: bool = False
    """Key by the numbers in the field, whatever their order: `3 * 4` and `4 * 3` are one group."""
    groups: int = Field(ge=1)
    """Number of groups to hold out, drawn with the run's seed."""


class DataConfig(Table):
    """Prompts for training and evaluation."""

    train: DataSourceConfig
    eval: DataSourceConfig | None = None
    """Separate evaluation data; exclusive with `holdout`."""
    holdout: HoldoutConfig | None = None
    """Splits evaluation groups off the training data."""
    prompt_field: str = "question"
    """Column of the prompt: a text, or a list of chat messages."""
    answer_field: str = "answer"
    """Column of the reference answer; may be absent in the data."""
    chat: bool = True
    """Apply the tokenizer's chat template; false: the text is the prompt as it is."""
    system_prompt: str = ""
    """System message put before a text prompt; empty: none."""

    @model_validator(mode="after")
    def _one_eval(self) -> Self:
        if self.eval and self.holdout:
            raise ValueError("`eval` and `holdout` both make evaluation data; keep one")
        return self

    @property
    def held_out(self) -> bool:
        """Whether there is evaluation data."""
        return self.eval is not None or self.holdout is not None


class BatchConfig(Table):
    """The batch knobs; everything else is derived and printed by `fourfold plan`."""

    prompts_per_step: int = Field(ge=1)
    """Prompts, each sampled `group_size` times, that make one step."""
    group_size: int = Field(ge=1, le=256)
    """Samples of one prompt; most advantages compare them."""
    tokens_per_micro_batch: int = Field(default=4096, ge=16)
    """Most tokens in one forward and backward pass of one rank, or of the `trainer.sequence_parallel_size` ranks that
    share it."""
    mini_batches_per_step: int = Field(default=1, ge=1)
    """Optimizer steps on one pass over the batch, each on an equal part of its samples, drawn at random."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Passes over the batch."""

    @property
    def samples_per_step(self) -> int:
        """prompts_per_step * group_size."""
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        """mini_batches_per_step * epochs_per_step: optimizer steps of one training step."""
        return self.mini_batches_per_step * self.epochs_per_step


class SamplingConfig(Table):
    """How completions are sampled. There is no top_p or top_k: the engine would renormalise
    its log-probabilities over the nucleus and every importance ratio would be biased."""

    temperature: Temperature = 1.0
    """In [0.01, 2]."""
    max_new_tokens: int = Field(ge=1)
    stop_token_ids: tuple[int, ...] = Field(default=(), strict=False)  # TOML has lists
    """Token ids that end a completion, besides the model's own."""

    @model_validator(mode="before")
    @classmethod
    def _no_nucleus(cls, value: Any) -> Any:
        for key in ("top_p", "top_k"):
            if isinstance(value, dict) and key in value:
                raise ValueError(
                    f"`{key}` is refused for training rollouts: the engine renormalises over the nucleus and the "
                    f"trainer does not, so every importance ratio would be wrong; remove it, or use `temperature`"
                )
        return value


class RewardConfig(Table):
    """The reward services."""

    replicas: int = Field(default=1, ge=0)
    """Services that the launcher starts; 0: they are started by hand."""
    verifier: str = "exact_match"
    """A built-in name (`fourfold serve reward --list`), `package.module:function`, or `file.py:function`."""
    timeout_seconds: Seconds = 10.0
    """Longest time one sample may take to score; then its outcome is an error."""
    processes: int = Field(default=1, ge=1)
    """Worker processes of one service."""
    on_error: Literal["wait", "drop", "stop"] = "wait"
    """What the run does when a scorer fails: it is gone, hangs, answers rubbish, or has an error for every sample. A
    missing score is never a zero. wait: samples wait until a scorer works again, at most `wait_seconds`. drop: samples
    are dropped with the reason, once their `retry` tries are used up. stop: the run ends then. An error of single
    samples, while others have a score, drops them under wait, too."""
    wait_seconds: Seconds = 1800.0
    """Longest time for which a run waits for a scorer that fails; then it ends with the first error."""
    lost_rounds: int = Field(default=3, ge=1)
    """Times `batch.prompts_per_step` groups that a step may lose for want of scores before any group has them; then the
    run ends with the reasons."""
    allowed_verifiers: tuple[str, ...] = Field(default=(), strict=False)  # TOML has lists
    """Names of verifiers that a caller may ask for besides `verifier`. Where `reasoning_gym` is offered, a sample's
    metadata may name the tasks of [data] and those that are here as `reasoning_gym:TASK`."""
    evaluate_text: bool = False
    """Whether reasoning-gym tasks may be offered that run text of the answer as code (`fourfold serve reward --list`
    names them). They run in a sandbox."""
    sandbox: Literal["auto", "off"] = "auto"
    """auto: scorers run with few rights, as far as this machine enforces that (`fourfold doctor`). off: with all rights
    and variables of the service."""
    network: bool = False
    """Whether a reward function of yours may open sockets."""
    environment: tuple[str, ...] = Field(default=(), strict=False)
    """Environment variables that a reward function of yours sees besides PATH, HOME and the like: names."""
    memory_gib: int = Field(default=8, ge=1)
    """Most private memory of one process of a reward function of yours."""


class ReferenceConfig(Table):
    """The reference services; started only when `algorithm.kl.coef` is above 0."""

    replicas: int = Field(default=1, ge=0)
    device: Literal["cpu", "cuda"] = "cpu"
    tokens_per_batch: int = Field(default=8192, ge=16)
    """Most tokens in one forward pass."""


class WeightsConfig(Table):
    """How new weights reach the engines."""

    backend: Literal["auto", "cuda_ipc", "nccl", "shm", "gloo"] = "auto"
    """How they travel. auto: for each engine the fastest that goes: cuda_ipc (an engine on the same GPUs, or GPUs with
    peer access to them, reads the trainer's memory), nccl (other GPUs), shm (memory of the machine), gloo (network)."""
    pause: Literal["keep", "wait", "abort"] = "wait"
    """What running requests do when an update comes. keep: they stop where they are and go on under the new weights,
    with the keys and values that the old ones computed. wait: they finish first. abort: they end with what they have,
    and are sampled anew."""
    timeout_seconds: Seconds = 120.0
    """Longest time one update may take, from pause to resume."""
    verify_first: int = Field(default=3, ge=0)
    """Updates whose tensors are summed on both sides and compared, bit for bit, whenever an engine came, went or
    failed."""
    verify_every: int = Field(default=10, ge=1)
    """After those, the versions that are: multiples of this. 1: all. A probe prompt is compared after every update."""
    probe_tolerance: float = Field(default=0.25, gt=0)
    """Largest mean difference, in nats per token, between the trainer's and an engine's log-probabilities of
    the probe prompt after an update."""


class EvaluationConfig(Table):
    """Held-out evaluation; needs `data.eval` or `data.holdout`."""

    every_steps: int = Field(default=10, ge=1)
    """Also before the first step and after the last."""
    samples_per_prompt: int = Field(default=1, ge=1, le=256)
    max_prompts: int = Field(default=0, ge=0)
    """0: all held-out prompts."""


class CheckpointConfig(Table):
    """Checkpoints of the whole run."""

    every_steps: int = Field(default=10, ge=1)
    """Also after the last step."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay."""
    keep_best: int = Field(default=0, ge=0)
    """Checkpoints with the highest held-out score that stay, too; of equal ones the newer. Those of steps without an
    evaluation have no score."""


class RetryConfig(Table):
    """What the run survives before it gives a sample up, or itself."""

    infrastructure: int = Field(default=5, ge=0)
    """Tries that a group may lose to dead, draining or overloaded services."""
    data: int = Field(default=1, ge=0)
    """Tries that a group may lose to its own content, such as a reward that raises."""
    service_wait_seconds: Seconds = 120.0
    """Longest wait for a service of a needed role, or for room on a full disk, before the run stops and says which."""
    restarts: int = Field(default=3, ge=0)
    """Times the launcher starts a dead service again, and the run goes back to its last checkpoint for a trainer that
    died. A coordinator that dies ends the run."""


class SecurityConfig(Table):
    """TLS between services and tokens for agents. Without it everything stays on loopback."""

    directory: str = ""
    """Folder made by `fourfold certs`: ca.pem, and MEMBER.pem of each service on this machine. Empty: no TLS."""
    tokens_file: str = ""
    """File of SHA-256 token digests that may use the public rollout port; `fourfold certs token` changes it."""


class Config(Table):
    """A run."""

    name: Name
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(ge=1)
    """Steps to train."""
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    sampling: SamplingConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    reference: ReferenceConfig = ReferenceConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    retry: RetryConfig = RetryConfig()
    security: SecurityConfig = SecurityConfig()
    placement: PlacementConfig = PlacementConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm compares with the reference policy."""
        return self.algorithm.kl.coef > 0

    @property
    def reference_on_gpus(self) -> bool:
        """Whether there are reference services, each on a GPU."""
        return self.needs_reference and self.reference.device == "cuda"

    @property
    def shares_gpus(self) -> bool:
        """Whether the trainer gives GPU memory back between its steps, because others need it."""
        return self.trainer.device == "cuda" and (bool(self.placement.colocated) or self.rollout.sleep_mode)

    @property
    def critic_apart(self) -> bool:
        """Whether there is a critic with ranks of its own."""
        return self.algorithm.needs_critic and self.critic.ranks > 0

    @property
    def critic_ranks(self) -> int:
        """Ranks that have a part of the critic, where there is one."""
        return self.critic.ranks or self.trainer.ranks

    @property
    def critic_data_parallel_size(self) -> int:
        """Shares that the critic's micro-batches are dealt in."""
        return self.critic.ranks if self.critic_apart else self.trainer.data_parallel_size

    @property
    def weights_stay_on_gpus(self) -> bool:
        """Whether new weights can go from GPU to GPU, past main memory."""
        on_gpus = self.trainer.device == "cuda" and self.rollout.gpus_per_replica > 0
        return on_gpus and "parameters" not in self.trainer.offload and self.weights.backend not in ("shm", "gloo")

    @property
    def trainer_processes(self) -> int:
        """All ranks of the trainer, the critic's own among them; on GPUs one GPU each."""
        return self.trainer.ranks + (self.critic.ranks if self.critic_apart else 0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sampling.max_new_tokens >= self.model.max_context_tokens:
            raise ValueError(
                f"sampling.max_new_tokens = {self.sampling.max_new_tokens} leaves no room for a prompt; it must be "
                f"below model.max_context_tokens = {self.model.max_context_tokens}"
            )
        if self.batch.tokens_per_micro_batch < self.model.max_context_tokens:
            raise ValueError(
                f"batch.tokens_per_micro_batch = {self.batch.tokens_per_micro_batch} cannot hold one sample of "
                f"model.max_context_tokens = {self.model.max_context_tokens}; raise the first or lower the second"
            )
        if self.needs_reference and self.reference.tokens_per_batch < self.model.max_context_tokens:
            raise ValueError(
                f"reference.tokens_per_batch = {self.reference.tokens_per_batch} cannot hold one sample of "
                f"model.max_context_tokens = {self.model.max_context_tokens}; raise the first or lower the second"
            )
        if self.checkpoint.keep_best and not self.data.held_out:
            raise ValueError(
                f"checkpoint.keep_best = {self.checkpoint.keep_best} needs held-out scores, and there is no held-out "
                f"data; add [data.holdout] or [data.eval], or set it to 0"
            )
        if self.weights.backend in ("cuda_ipc", "nccl"):
            self._check_gpu_backend()
        self.placement.check(self)
        self.rollout.check(self)
        batch = self.batch
        self.algorithm.check_batch(group_size=batch.group_size, samples_per_step=batch.samples_per_step)
        groups = self.trainer.data_parallel_size
        if self.critic_apart and self.trainer.sequence_parallel_size > 1:
            raise ValueError(
                f"critic.ranks = {self.critic.ranks} and trainer.sequence_parallel_size = "
                f"{self.trainer.sequence_parallel_size} do not go together; set critic.ranks = 0: the critic then "
                f"shares the ranks and rows of the policy"
            )
        if self.critic_apart and batch.samples_per_step < self.critic.ranks * batch.mini_batches_per_step:
            raise ValueError(
                f"{batch.samples_per_step} samples in {batch.mini_batches_per_step} mini-batches cannot feed "
                f"critic.ranks = {self.critic.ranks}; lower it, or raise batch.prompts_per_step"
            )
        if batch.samples_per_step < groups * batch.mini_batches_per_step:
            what = "trainer ranks" if self.trainer.sequence_parallel_size == 1 else "groups of trainer ranks"
            raise ValueError(
                f"{batch.prompts_per_step} prompts x {batch.group_size} per group = {batch.samples_per_step} samples "
                f"cannot feed {groups} {what} in {batch.mini_batches_per_step} mini-batches; raise "
                f"batch.prompts_per_step to at least "
                f"{-(-groups * batch.mini_batches_per_step // batch.group_size)}"
            )
        return self

    def _check_gpu_backend(self) -> None:
        for key, right, value in (
            ("trainer.device", self.trainer.device == "cuda", f'"{self.trainer.device}"'),
            ("rollout.gpus_per_replica", self.rollout.gpus_per_replica > 0, "0"),
            ("trainer.offload", "parameters" not in self.trainer.offload, f'"{self.trainer.offload}"'),
        ):
            if not right:
                raise ValueError(
                    f'weights.backend = "{self.weights.backend}" moves weights between GPUs, and {key} = {value}; set '
                    f'weights.backend = "auto", or keep both on GPUs'
                )
