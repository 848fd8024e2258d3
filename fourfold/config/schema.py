"""Defines the tables and keys of a recipe, with their defaults and the rules within one table.

Every service is started with the same recipe and reads the tables that it needs, so services cannot disagree. Names
contain the units: `_seconds`, `_tokens`, `_gib`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from fourfold.address import is_loopback
from fourfold.config.agents import AgentsConfig, EnvironmentConfig, GatewayConfig
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.config.placement import PlacementConfig
from fourfold.config.reward import RewardConfig, RewardModelConfig, check_scorers
from fourfold.config.rollout import RolloutConfig, RolloutPool
from fourfold.config.rows import RowKeys
from fourfold.config.rules import check_tables
from fourfold.config.sources import EvalSet, EvalSourceConfig, TrainSourceConfig, check_sources
from fourfold.config.table import GpuType, Name, Seconds, Temperature, check_gpu_type
from fourfold.config.trainer import CriticConfig, TrainerConfig
from fourfold.table import Table

SinkName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class LoggingConfig(Table):
    """`[logging]`: sends the metrics of every step to experiment trackers. Nothing there can slow or stop the run."""

    sinks: list[SinkName] = Field(default=[])
    """Trackers that get the metrics; each is a process of its own."""
    project: str = Field(default="fourfold", min_length=1, max_length=128)
    """Project of W&B and trackio, and experiment of MLflow."""
    group: str = Field(default="", max_length=128)
    """Group of runs in W&B and trackio; a tag in MLflow. Empty: none."""
    tags: list[Name] = Field(default=[])
    """Tags of the run in W&B and MLflow."""
    wandb_entity: str = Field(default="", max_length=128)
    """User or team of W&B; empty: the account's default."""
    tensorboard_dir: str = ""
    """Folder of TensorBoard's event files; empty: a folder of the run, found by `tensorboard --logdir runs`."""

    @field_validator("sinks")
    @classmethod
    def _different(cls, value: list[SinkName]) -> list[SinkName]:
        if twice := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f'"{twice}" is there twice; remove one')
        return value


class ModelConfig(Table):
    """The model that is trained; the reference is a frozen copy of it."""

    source: str
    """Hugging Face model folder, relative to the working directory; `hf:OWNER/NAME`, a model of the Hugging Face Hub,
    with `@REVISION` if it is not the newest; `run:NAME`, the export of an earlier run in `runs/`, or of a step of it,
    `run:NAME@STEP` or `run:NAME@best`; or `builtin:NAME` (`fourfold.model.folder`)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in the forward passes. The optimizer's masters are float32."""
    head_dtype: Literal["", "float32"] = ""
    """Type of the logits in trainer, reference and engines. float32: the sums of the products of hidden states and
    output embedding are not rounded to bfloat16 (ScaleRL, arXiv 2510.13786). Empty: that of the weights."""
    max_context_tokens: int = Field(default=1024, ge=8)
    """Maximum number of tokens of a prompt and its completion together."""


class HoldoutConfig(Table):
    """Task groups that are held out of training for evaluation. Rows with the same key form one group."""

    field: str = "expression"
    """Metadata field with the key of a row. Empty: the prompt itself."""
    unordered_numbers: bool = False
    """Use the set of numbers in the field as key: `3 * 4` and `4 * 3` are one group."""
    groups: int = Field(ge=1)
    """Groups to hold out, drawn with the run's seed."""


CURRICULUM_GROUPS: Final = 2
"""Latest groups of a prompt from which its success rate is computed: older ones are those of another policy."""
CURRICULUM_LEAST: Final = 0.1
"""Probability that a prompt is drawn when its turn comes, although its success rate is 0 or 1: with 0, a run would not
notice that a prompt teaches again. It is 1 at a rate of 0.5, and for a prompt without a score."""


class CurriculumConfig(Table):
    """Fewer prompts that the policy lately solved always, or never. Without this table, no prompt is skipped."""

    success: float = 1.0
    """An attempt with this score or a higher one is a success; the rewards of turns do not count."""


class DataConfig(RowKeys):
    """Prompts for training and evaluation, or rows to train on."""

    train: tuple[TrainSourceConfig, ...] = Field(default=(), strict=False)
    """Training data: one table [data.train], or several [[data.train]]. Runs with agents.source = "groups" have
    none."""
    eval: tuple[EvalSourceConfig, ...] = Field(default=(), strict=False)
    """Held-out sets from sources of their own: one table [data.eval], or several [[data.eval]]."""
    eval_overlap: Literal["error", "warn"] = "error"
    """Reaction to prompts of `eval` that are training prompts, too; case and spaces are ignored."""
    holdout: HoldoutConfig | None = None
    """A held-out set that is taken out of the training data; its name is "holdout"."""
    curriculum: CurriculumConfig | None = None
    """Skip training prompts by their recent success rate."""
    prompt_field: str = ""
    """Column with the prompt: a text, or a list of chat messages. Empty: `question`; of rows, recognised by its
    name."""
    answer_field: str = ""
    """Column with the reference answer, which the data need not have; or COLUMN.KEY, for a key of an object in a
    column, as "reward_model.ground_truth". Empty: `answer`. Of rows, the answer that is trained on; empty: recognised
    by its name."""
    columns: tuple[str, ...] = Field(default=(), strict=False)
    """Columns that are the metadata of a prompt, for scorers and agents, besides those that the recipe names elsewhere.
    Empty: all; but if the metadata of a row are above 64 KiB, columns that no scorer reads are left out."""
    scorers_field: str = ""
    """Column with the names of the scorers of a row, a text or a list; rows without it have those whose `where` fits.
    Empty: there is none."""
    answer_from_messages: bool = False
    """Take a last message of the assistant out of the prompt; it is the reference answer of a row without one in
    `answer_field`. false: such rows are refused."""
    tools_field: str = "tools"
    """Column with the tools of a row, for the chat template, which the data need not have: a list as in OpenAI's chat
    completions, or one as JSON text. Empty: there is none."""
    chat: bool = True
    """Apply the tokenizer's chat template. false: the text is the whole prompt."""
    chat_template: str = ""
    """Path of a Jinja file in place of the chat templates of the model; services on other machines read it at the same
    path. The trained model has it, too. Empty: those of the model."""
    system_prompt: str = ""
    """System message before a text prompt; empty: none."""
    date: str = ""
    """Date that chat templates write (`strftime_now`), as `2026-11-28` or `2026-11-28T06:30:00`. Empty: the local time
    at which the run begins; the run's config.toml then has it."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Most tokens of a training prompt; rows with longer ones are left out. 0: what leaves room in
    `model.max_context_tokens`."""
    order: Literal["shuffled", "file"] = "shuffled"
    """Order of the training prompts. shuffled: by the run's seed, differently in every pass. file: as they are in the
    files, in every pass, for data that is sorted by difficulty."""

    @field_validator("date", mode="before")
    @classmethod
    def _check_date(cls, value: Any) -> Any:
        if isinstance(value, datetime.date):  # TOML has dates
            return value.isoformat()
        try:
            if value:
                datetime.datetime.fromisoformat(value)
        except (ValueError, TypeError):
            raise ValueError(f'{value!r} is no date; write it as "2026-11-28" or "2026-11-28T06:30:00"') from None
        return value

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_more_sources(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, Mapping | TrainSourceConfig) else value

    @field_validator("train")
    @classmethod
    def _different_sources(cls, value: tuple[TrainSourceConfig, ...]) -> tuple[TrainSourceConfig, ...]:
        check_sources(value)
        return value

    @field_validator("eval", mode="before")
    @classmethod
    def _one_or_more_sets(cls, value: Any) -> Any:
        return (value,) if isinstance(value, Mapping | EvalSourceConfig) else value

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        names = ["holdout"] if self.holdout else []
        for number, source in enumerate(self.eval):
            if (name := source.title) in names:
                raise ValueError(
                    f'data.eval.{number}.name = "{name}" is the name of another held-out set, too, and their metrics '
                    f"would be the same; set another one"
                )
            names.append(name)
        if self.holdout and not self.train:
            raise ValueError("`holdout` takes groups of rows from `train`, which is missing; add it, or use `eval`")
        if self.curriculum and not self.train:
            raise ValueError("`curriculum` skips prompts of `train`, which is missing; add it, or remove `curriculum`")
        return self

    @property
    def prompt_column(self) -> str:
        """Column of a prompt that an engine answers."""
        return self.prompt_field or "question"

    @property
    def answer_column(self) -> str:
        """Column of the reference answer to such a prompt."""
        return self.answer_field or "answer"

    @property
    def names_sources(self) -> bool:
        """True if training prompts have the name of their source: with several sources, or a source with a `name`."""
        return len(self.train) > 1 or any(source.name for source in self.train)

    @property
    def held_out(self) -> bool:
        """True if the recipe has evaluation data."""
        return bool(self.eval) or self.holdout is not None


class BatchConfig(Table):
    """Sizes of a step. `fourfold plan` prints all numbers that follow from them."""

    prompts_per_step: int = Field(default=0, ge=0)
    """Prompts of one step; each is sampled `group_size` times. 0: a run of rows."""
    group_size: int = Field(default=0, ge=0, le=256)
    """Samples of one prompt. Most advantage estimators compare them with each other. 0: a run of rows."""
    rows_per_step: int = Field(default=0, ge=0)
    """Answers of the data that one step trains on, in place of `prompts_per_step` and `group_size`: a run of rows
    starts no engines. 0: engines sample the answers."""
    tokens_per_micro_batch: int = Field(default=4096, ge=16)
    """Maximum number of tokens in one forward and backward pass of a rank, or of the ranks that share a micro-batch
    (`trainer.sequence_parallel_size`)."""
    mini_batches_per_step: int = Field(default=1, ge=1)
    """Optimizer steps per pass over the batch, each on an equal part of its samples, drawn at random."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Passes over the batch in one step."""

    @model_validator(mode="after")
    def _prompts_or_rows(self) -> Self:
        prompts = {"prompts_per_step": self.prompts_per_step, "group_size": self.group_size}
        if self.rows_per_step:
            if given := next((key for key, value in prompts.items() if value), None):
                raise ValueError(
                    f"{given} = {prompts[given]} is for answers that engines sample, and rows_per_step = "
                    f"{self.rows_per_step} trains on those of the data; remove one"
                )
        elif missing := next((key for key, value in prompts.items() if not value), None):
            raise ValueError(
                f"`{missing}` is missing or 0; set it to at least 1, or set rows_per_step in place of prompts_per_step "
                f"and group_size to train on the answers of the data"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Samples of one step: prompts_per_step * group_size, or rows_per_step."""
        return self.rows_per_step or self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        """mini_batches_per_step * epochs_per_step: optimizer steps of one training step."""
        return self.mini_batches_per_step * self.epochs_per_step


class SamplingConfig(Table):
    """Sampling of completions. There is no top_p or top_k: the engine would renormalise its log-probabilities over the
    nucleus, and every importance ratio would be biased."""

    temperature: Temperature = 1.0
    """From 0.01 to 2."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Maximum number of tokens of a completion; at least 1. 0: a run of rows, which samples nothing."""
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(default=(), max_length=64, strict=False)
    """Token ids that end a completion, in addition to the model's own. At most 64: engines and gateways refuse more."""

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


class ReferenceConfig(Table):
    """The reference services; started only if `algorithm.kl.coef` is above 0, or the loss or the advantages read the
    reference. In a run of rows, only if `source` names another model than `model.source`."""

    source: str = ""
    """Model of the reference, as `model.source`, with the same vocabulary: the teacher of the advantage `distillation`
    and of the loss `distill`, or the reference of another loss. Empty: the model that training begins with."""
    replicas: int = Field(default=1, ge=0)
    """Services that the launcher starts; 0: they are started by hand."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: each replica has a GPU."""
    gpu: GpuType = ""
    """Type of the GPUs, as `rollout.gpu`. Empty: any."""
    tokens_per_batch: int = Field(default=8192, ge=16)
    """Maximum number of tokens in one forward pass."""

    @model_validator(mode="after")
    def _check_gpu(self) -> Self:
        check_gpu_type(self.gpu, self.device)
        return self


PauseMode = Literal["keep", "recompute", "wait", "abort"]


class WeightsConfig(Table):
    """Weight updates: the transport of new weights to the engines, and its verification."""

    backend: Literal["auto", "cuda_ipc", "nccl", "shm", "gloo"] = "auto"
    """Transport. auto: the fastest that works for each engine: cuda_ipc (an engine on the same GPUs, or on GPUs with
    peer access to them, reads the trainer's memory), nccl (other GPUs), shm (shared memory of the machine), gloo
    (network)."""
    interface: str = Field(default="", max_length=64)
    """Network interface of trainer and engines on which gloo listens, as "eth0". Empty: that of the address by which
    the coordinator reaches each of them (`--advertise`)."""
    adapters: Literal["auto", "merged"] = "auto"
    """What a run with `trainer.lora` sends to the engines. auto: the adapters, if all engines can take them (see
    `fourfold plan`), else as merged. merged: the sum of weights and adapters, rounded to `model.dtype`."""
    pause: Literal["auto", "keep", "recompute", "wait", "abort"] = "auto"
    """Running requests during an update. keep: they are paused and continue under the new weights, with the KV cache of
    the old ones. recompute: the same, but the new weights compute their KV cache again. wait: they finish first. abort:
    they end with the tokens they have, and continue from these as new requests. auto: wait if
    `asynchrony.max_policy_lag` is 0, else keep."""
    timeout_seconds: Seconds = 120.0
    """Longest time of one update, from pause to resume."""
    verify_first: int = Field(default=3, ge=0)
    """Updates with a checksum of every tensor on both sides, at the start and after an engine joined, left or
    failed."""
    verify_every: int = Field(default=10, ge=1)
    """After these updates, versions that are a multiple of this have checksums. A probe prompt is compared after every
    update."""
    probe_tolerance: float = Field(default=0.25, gt=0)
    """Largest mean difference between the log-probabilities of trainer and engine on the probe prompt after an update,
    in nats per token."""


class AsynchronyConfig(Table):
    """Overlap of sampling and training."""

    max_policy_lag: int = Field(default=0, ge=0, le=64)
    """Most policy versions by which the weights that sampled a token may be behind those that its step updates. 0:
    sampling and training alternate. 1 or more: engines sample while the trainer trains, up to this many steps ahead.
    The keys of this table may change while the run goes on: edit `config.toml` in its folder."""
    stale: Literal["drop", "train"] = "drop"
    """Groups that became older than `max_policy_lag`, as after a failure. drop: not trained on (reason STALE). train:
    trained on; choose an algorithm with an importance correction."""
    target_mismatch: float = Field(default=0.0, ge=0)
    """Largest mean |old - behavior| of trained tokens, in nats, that the run aims at: above it, the coordinator lowers
    the policy lag, and raises it again below. 0: the lag stays at `max_policy_lag`."""

    @model_validator(mode="after")
    def _lag_to_lower(self) -> Self:
        if self.target_mismatch and not self.max_policy_lag:
            raise ValueError(
                f"target_mismatch = {self.target_mismatch:g} lowers the policy lag, and max_policy_lag = 0 leaves "
                f"nothing to lower; raise max_policy_lag, or remove target_mismatch"
            )
        return self


class EvaluationConfig(Table):
    """Evaluation on held-out sets: `data.eval` and `data.holdout`."""

    every_steps: int = Field(default=10, ge=1)
    """Steps between two evaluations. There is one before the first step and one after the last, too."""
    samples_per_prompt: int = Field(default=1, ge=1, le=256)
    """Answers to each held-out prompt; a set may have its own number."""
    max_prompts: int = Field(default=0, ge=0)
    """Maximum number of prompts of a held-out set; 0: all. A set may have its own number."""
    success: float = 1.0
    """An answer with this score or a higher one is a success, as pass@k and maj@k count."""
    metric: Literal["", "loss", "accuracy"] = ""
    """Score of held-out pairs and labelled answers, which `checkpoint.keep_best` compares. Empty: accuracy. Other rows
    have one score alone: answers and texts their loss, rows of a reward model the accuracy."""


class CheckpointConfig(Table):
    """Checkpoints of coordinator and trainer."""

    every_steps: int = Field(default=10, ge=1)
    """Steps between two checkpoints. There is one after the last step, too."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(default=0, ge=0)
    """Number of checkpoints with the highest held-out score to keep, too; of equal ones the newer. Checkpoints of steps
    without an evaluation have no score."""
    export_every_steps: int = Field(default=0, ge=0)
    """Steps between two exports of the model to `model-step-N` in the run's folder, which stay there; 0: only the
    last weights are exported, to `model`."""


class RetryConfig(Table):
    """Failures that the run tolerates before it drops a sample or stops."""

    infrastructure: int = Field(default=5, ge=0)
    """Tries of a group that may fail because a service is dead, draining or overloaded."""
    data: int = Field(default=1, ge=0)
    """Tries of a group that may fail because of its content, such as a reward function that raises."""
    service_wait_seconds: Seconds = 120.0
    """Longest wait for a service of a needed role, or for room on a full disk; then the run stops with the reason."""
    restarts: int = Field(default=3, ge=0)
    """Times that the launcher restarts a dead service, or a coordinator that was killed, before the run trains its next
    step. After a trainer's death the run continues from the last checkpoint; after a coordinator's the trainer keeps
    its weights."""


class SecurityConfig(Table):
    """TLS between services, and tokens for agents. Without TLS, services bind loopback only."""

    directory: str = ""
    """Folder of `fourfold certs` with ca.pem and the MEMBER.pem of each service on this machine; empty: no TLS."""
    tokens_file: str = ""
    """File with the SHA-256 digests of tokens for the ports `public_listen` of [rollout], [gateway] and [view], and for
    `gateway.http_listen`; `fourfold certs token` changes it."""
    http_names: list[str] = Field(default=[])
    """Names, without ports, under which a reverse proxy passes requests on to HTTP ports without TLS (the gateway, the
    metrics), when it keeps the Host header of its clients. Requests to other names than loopback's get 421."""


class MetricsConfig(Table):
    """Metrics for a monitoring system (docs/monitoring.md)."""

    endpoint: bool = False
    """Serve metrics in the format of Prometheus over HTTP, on a free loopback port of each service. The services write
    their ports to `metrics/` in the run's folder, for Prometheus' file-based discovery."""
    tokens: bool = True
    """Write tokens.jsonl, from which `fourfold view` shows each token with its log-probability: about 5 bytes for each
    token of a trajectory."""


class ViewConfig(Table):
    """`fourfold view` on other machines (docs/view.md)."""

    public_listen: str = ""
    """host:port of the coordinator at which a token with the scope `view` reads the run, with its prompts and
    completions (TLS); empty: none."""


class TracingConfig(Table):
    """Traces of samples for OpenTelemetry (docs/monitoring.md). Without `file` and `endpoint` there are none."""

    file: bool = False
    """Write the spans of each service to `traces/MEMBER.jsonl` in the run's folder, as lines of OTLP JSON."""
    endpoint: str = ""
    """Collector, Jaeger or Tempo that gets the spans by OTLP: `http://HOST:4318` or `grpc://HOST:4317` on this machine,
    `https://...` or `grpcs://...` elsewhere. Empty: none."""
    sample_ratio: float = Field(default=0.01, ge=0, le=1)
    """Share of the samples that are traced. The sample id decides, so that a repeated run traces the same ones."""

    @field_validator("endpoint")
    @classmethod
    def _tls_elsewhere(cls, value: str) -> str:
        if not value:
            return value
        url = urlsplit(value)
        if url.scheme not in ("http", "https", "grpc", "grpcs") or not url.hostname or url.username or url.query:
            raise ValueError(
                f"{value!r} is no address of a collector; give http://HOST:PORT or grpc://HOST:PORT, and headers such "
                f"as a token in the variable OTEL_EXPORTER_OTLP_HEADERS"
            )
        if url.scheme in ("http", "grpc") and not is_loopback(url.hostname):
            raise ValueError(
                f"{value!r} sends traces to another machine without TLS; use {url.scheme}s://, or a collector on "
                f"127.0.0.1 that sends them on"
            )
        return value


class Config(Table):
    """The whole recipe of a run."""

    name: Name
    """Name of the run, and of its folder under runs/."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the order of the prompts, of sampling, of the mini-batches and of held-out groups."""
    steps: int = Field(default=0, ge=0)
    """Training steps of the run; at least 1, unless `data.passes` says it."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    batch: BatchConfig
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    reward: tuple[RewardConfig, ...] = Field(default=(RewardConfig(),), strict=False)
    """The scorers: one table [reward], or several [[reward]]."""
    reference: ReferenceConfig = ReferenceConfig()
    agents: AgentsConfig = AgentsConfig()
    gateway: GatewayConfig = GatewayConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    weights: WeightsConfig = WeightsConfig()
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    retry: RetryConfig = RetryConfig()
    security: SecurityConfig = SecurityConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    logging: LoggingConfig = LoggingConfig()
    view: ViewConfig = ViewConfig()
    placement: PlacementConfig = PlacementConfig()

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_more_scorers(cls, value: Any) -> Any:
        return (value,) if isinstance(value, Mapping | RewardConfig) else value

    @field_validator("reward")
    @classmethod
    def _different_scorers(cls, value: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
        check_scorers(value)
        return value

    def scorer(self, name: str) -> RewardConfig:
        """Return the table [[reward]] of this name, the first one for an empty name; raise KeyError."""
        if name:
            return {table.name: table for table in self.reward}[name]
        return self.reward[0]

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """The held-out sets, that of `data.holdout` first."""
        sources: list[EvalSourceConfig | None] = [None] if self.data.holdout else []
        return tuple(self._eval_set(source) for source in [*sources, *self.data.eval])

    def _eval_set(self, source: EvalSourceConfig | None) -> EvalSet:
        own = {} if source is None else source.model_dump(exclude_none=True)
        evaluation, sampling = self.evaluation, self.sampling
        return EvalSet(
            name="holdout" if source is None else source.title,
            source=source,
            samples_per_prompt=own.get("samples_per_prompt", evaluation.samples_per_prompt),
            max_prompts=own.get("max_prompts", evaluation.max_prompts),
            temperature=own.get("temperature", sampling.temperature),
            max_new_tokens=own.get("max_new_tokens", sampling.max_new_tokens),
        )

    @property
    def rollout_pools(self) -> tuple[RolloutPool, ...]:
        """The pools of engines with every key filled in: none in a run of rows; else one without a name if the recipe
        has no [[rollout.pool]]."""
        return self.rollout.pools(self.model.dtype) if self.needs_engines else ()

    def rollout_pool(self, name: str) -> RolloutPool:
        """Return the pool of this name, the first one for an empty name; raise KeyError."""
        pools = self.rollout_pools
        return {pool.name: pool for pool in pools}[name] if name else pools[0]

    @property
    def rollout_replicas(self) -> int:
        """Rollout services of all pools, at least 1 of each."""
        return sum(pool.services for pool in self.rollout_pools)

    @property
    def pause_mode(self) -> PauseMode:
        """`weights.pause` without `auto`."""
        if self.weights.pause != "auto":
            return self.weights.pause
        return "keep" if self.asynchrony.max_policy_lag else "wait"

    @property
    def needs_engines(self) -> bool:
        """True if engines sample what is trained on, and not if the data has it."""
        return not self.batch.rows_per_step

    @property
    def needs_reference(self) -> bool:
        """True if the run has reference services: with engines, for a teacher, or for rows that are compared with
        another model than the one that training begins with."""
        other = self.prepares_reference and self.reference.source not in ("", self.model.source)
        return (
            other or (self.needs_engines and self.algorithm.needs_reference) or self.algorithm.loss.teacher_tokens > 0
        )

    @property
    def prepares_reference(self) -> bool:
        """True if the reference log-probabilities of the rows are computed before the first step: by the reference
        services if the run has them (`needs_reference`), and else by the trainer."""
        return not self.needs_engines and self.algorithm.loss.needs_reference

    @property
    def samples_per_row(self) -> int:
        """Samples that a step has for each row: two of a pair, or an answer and one to another prompt. 1 with engines:
        group_size counts them."""
        loss = self.algorithm.loss
        return 2 if self.batch.rows_per_step and (loss.reads == "pairs" or loss.measures_distance) else 1

    @property
    def needs_scorer(self) -> bool:
        """True if the run has reward services: not if agents bring the reward of every trajectory, with rows, or if a
        teacher takes the place of scores, unless held-out answers are scored."""
        if not self.needs_engines or (self.algorithm.distills and not self.data.held_out):
            return False
        return self.agents.source == "none" or self.agents.reward == "service"

    @property
    def reference_on_gpus(self) -> bool:
        """True if the run has reference services, each on a GPU."""
        return self.needs_reference and self.reference.device == "cuda"

    @property
    def reward_models_on_gpus(self) -> list[tuple[RewardConfig, RewardModelConfig]]:
        """The scorers of the run that are reward models on GPUs."""
        found = [(table, table.model) for table in self.reward if table.model and self.needs_scorer]
        return [(table, model) for table, model in found if model.device == "cuda"]

    @property
    def shares_gpus(self) -> bool:
        """True if the trainer frees GPU memory between its steps, because other services need it."""
        return self.trainer.device == "cuda" and (bool(self.placement.colocated) or self.rollout.sleep_mode)

    @property
    def critic_apart(self) -> bool:
        """True if the run has a critic with ranks of its own."""
        return self.algorithm.needs_critic and self.critic.ranks > 0

    @property
    def critic_ranks(self) -> int:
        """Ranks with a part of the critic, if the run has one."""
        return self.critic.ranks or self.trainer.ranks

    @property
    def critic_data_parallel_size(self) -> int:
        """Ranks, or groups of ranks with sequence parallelism, that train the critic on different micro-batches."""
        return self.critic.ranks if self.critic_apart else self.trainer.data_parallel_size

    @property
    def weights_stay_on_gpus(self) -> bool:
        """True if new weights can go from GPU to GPU without main memory."""
        on_gpus = self.trainer.device == "cuda" and all(pool.gpus_per_replica for pool in self.rollout_pools)
        return on_gpus and "parameters" not in self.trainer.offload and self.weights.backend not in ("shm", "gloo")

    @property
    def trainer_processes(self) -> int:
        """Ranks of the trainer, including those of a separate critic; each uses one GPU if `device` is cuda."""
        return self.trainer.ranks + (self.critic.ranks if self.critic_apart else 0)

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        check_tables(self)
        return self
