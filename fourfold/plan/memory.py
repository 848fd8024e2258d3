"""Estimates by formula how much memory each role of a recipe needs, before anything runs.

With P parameters, N trainer ranks, b bytes of a weight (bfloat16: 2, float32: 4):

    trainer, per rank    weights     b P        at ZeRO stage 3 b P / N, and b for each of the first 1e9 parameters,
                                                which DeepSpeed gathers for the passes; b for each of a larger layer
                         gradients   4 P        summed in float32, divided by N from stage 2; b P at stage 0
                         optimizer   12 P       divided by N from stage 1: float32 master and both Adam moments (Muon
                                                has one); with bfloat16 or offloading 4 P more for the update, a flat
                                                copy of the gradients; on a GPU it comes when the activations are
                                                gone, and the larger of both counts, in `activations`
                         activations of one micro-batch, kept for the backward pass, divided by
                                     trainer.sequence_parallel_size, and its logits
                         average     4 P        with trainer.ema_decay, divided by N from stage 1; in `optimizer`
                         With LoRA, P of gradients, optimizer and average is the number of adapter parameters.
    offloaded, per rank  in main memory: `optimizer`; at stage 3 the gradients, at stages 1 and 2 b P / N, the new
                         weights; with optimizer+parameters the weights, b P / N; the device keeps the gathered ones
    host, per rank       in main memory, of a trainer on GPUs, at its start and for its checkpoints; never a whole model
                         at stage 3: the larger of
                         weights     b P / N    DeepSpeed moves the partitions into one buffer (stage 3)
                         optimizer   12 P       what a rank reads of a checkpoint, divided by N from stage 1; with an
                                                average 16 P. Nothing with offloading, where it is in place
                         An export takes a rank the weights that are gathered, at most 1 GiB or one parameter.
    critic, per rank     weights, gradients and optimizer as the trainer's, no average. In the policy's ranks its passes
                         and its update come after the policy's: `activations` is what they take more than those. With
                         critic.ranks it has activations of its own
    transfer             weights     b P        one copy in shared memory, which the engines read in place; with gloo
                                                one in every engine worker; none between GPUs
    rollout, reference   weights     b P        of the pool's own dtype, divided by the GPUs of a tensor-parallel engine
                         KV cache    2 * layers * kv_heads * head_dim * b per token
    reward model         weights     b P        of its own dtype, divided by reward.model.gpus_per_replica

Measured on H100 and H200, in GiB; the formulas with the tokens of the largest micro-batch, without "programs":

    trainer of 0.5B, one rank         28.2, by formula 26.9; with Liger 23.2 and 21.9; with checkpointing 12.5 and 12.4
    trainer of 1.5B, two ranks        with Liger 43.4 and 40.6
    trainer of 7B, Liger              two ranks 108.5 and 104.6; four with checkpointing 42 and 40.9
    7B, hybrid, optimizer offloaded   trainer 17.0 and 15.9; the fullest GPU, with engine and reference, 48.2 and 48.4

Raw: `trainer_speed-*-memory-*` and `step-7b-hybrid-sleep-offload-*` in benchmarks/results.

The column "programs" is the memory that a process holds before it loads a model: interpreter, libraries, threads; on a
GPU, what it takes besides. 0.43B, hybrid on two H200, Liger, 9 GiB of KV cache; measured per process and by formula:

    tokens of a micro-batch     rank             engine           reference       GPU
    36,864                      43.1 and 41.2    11.6 and 11.6    4.9 and 4.4     59.2 and 57.3
    73,728                      75.6 and 73.3    11.6 and 11.6    5.9 and 6.3     92.8 and 91.2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fourfold.config import Config, RewardConfig, RolloutPool
from fourfold.config.reward import RewardModelConfig
from fourfold.errors import ConfigError
from fourfold.model.classifier import ClassifierFolder
from fourfold.model.folder import ModelShape, folder_shape
from fourfold.plan.batch import engine_limits
from fourfold.plan.models import ModelSizes

GIB: Final = 1 << 30
BYTES_PER_WEIGHT: Final = {"bfloat16": 2, "float32": 4}
_MIB: Final = 1 << 20
# fourfold/nn/logprobs.py makes the logits of 2^26 elements at once, in float32, and a few copies of them.
_LOGITS_ELEMENTS: Final = 1 << 26
_LOGITS_COPIES: Final = 3
# DeepSpeed's stage3_max_reuse_distance: weights that are needed again this soon stay gathered in between.
_GATHERED_PARAMETERS: Final = 10**9
# Measured: memory of each process after its imports (proportional set size).
_TRAINER_PROGRAM: Final = 700 * _MIB
_ROLLOUT_PROGRAM: Final = 1300 * _MIB
_REFERENCE_PROGRAM: Final = 600 * _MIB
_REWARD_PROGRAM: Final = 60 * _MIB
_GATEWAY_PROGRAM: Final = 140 * _MIB
_ENVIRONMENT_PROGRAM: Final = 90 * _MIB  # each process; an environment may take more, up to environment.memory_gib
_COORDINATOR_PROGRAM: Final = 240 * _MIB  # with the launcher and its guard
# Measured on H100 and H200: memory of a GPU that a process takes besides what it allocates at its peak: the context,
# and of a rank NCCL's buffers and blocks that the allocator keeps, of an engine its captured graphs.
_TRAINER_ON_GPU: Final = 4 * GIB
_OTHERS_ON_GPU: Final = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one process of a role, or of one of its GPUs."""

    role: str
    count: int
    """Processes or GPUs of this size."""
    on_gpu: bool
    weights: int = 0
    gathered: int = 0
    """Part of `weights` that exists only during a pass."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    programs: int = 0
    share_of_gpu: float = 0.0
    """Above 0: the engine takes this share of its GPU, and uses all that the weights leave for its KV cache."""

    @property
    def total(self) -> int:
        """Bytes of all parts together, except an engine's share of its GPU."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache + self.programs


def weight_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of all weights in `model.dtype`, as engines receive them."""
    return shape.parameter_count * _bytes_per_weight(config)


def kv_bytes_per_token(pool: RolloutPool, shape: ModelShape) -> int:
    """Return the bytes of one token in the KV cache of an engine."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * _pool_bytes_per_weight(pool)


def kv_cache_tokens(pool: RolloutPool, shape: ModelShape) -> int | None:
    """Return the tokens that fit into the KV cache of one replica; None if it has what is left of its GPUs."""
    gib = pool.kv_cache_gib or (None if pool.gpus_per_replica else 1)
    if gib is None:
        return None
    return gib * GIB * max(pool.gpus_per_replica, 1) // kv_bytes_per_token(pool, shape)


def checkpoint_bytes(config: Config, sizes: ModelSizes) -> int:
    """Return the bytes of one checkpoint: masters, moments and average of the policy, and those of a critic."""
    of_critic = _state_bytes(config, sizes.critic) if config.algorithm.needs_critic else 0
    return _state_bytes(config, sizes.policy, sizes.trained, average=bool(config.trainer.ema_decay)) + of_critic


def memory_plan(config: Config, sizes: ModelSizes) -> list[MemoryRow]:
    """Return one row per role that the recipe uses, the trainer first, and one for weights in transfer."""
    shape = sizes.policy
    rows = _split_offloaded(config, _trainer(config, shape, sizes.trained), shape)
    if config.algorithm.needs_critic:
        rows += _split_offloaded(config, _critic(config, sizes), sizes.critic)
    rows += [_rollout(config, shape, pool) for pool in config.rollout_pools]
    if config.trainer.device == "cuda":
        rows += _hosts(config, sizes)
    if config.needs_engines and not config.weights_stay_on_gpus:
        rows.append(_transfer(config, shape))
    if config.needs_reference:
        rows.append(_reference(config, sizes.reference or shape))
    tables = config.reward if config.needs_scorer else ()
    started = [table for table in tables if not (table.target or table.model)]
    for table in started:
        role = "reward" if len(started) == 1 else f"reward {table.name}"
        programs = (1 + table.processes) * _REWARD_PROGRAM  # the service and its workers
        rows.append(MemoryRow(role=role, count=max(table.replicas, 1), on_gpu=False, programs=programs))
    rows += [_reward_model(table, table.model) for table in tables if table.model is not None]
    if config.agents.source != "none":
        gateways = max(config.gateway.replicas, 1)
        rows.append(MemoryRow(role="gateway", count=gateways, on_gpu=False, programs=_GATEWAY_PROGRAM))
    if config.environment.replicas:
        programs = (1 + config.environment.processes) * _ENVIRONMENT_PROGRAM
        count = config.environment.replicas
        rows.append(MemoryRow(role="environment", count=count, on_gpu=False, programs=programs))
    rows.append(MemoryRow(role="coordinator", count=1, on_gpu=False, programs=_COORDINATOR_PROGRAM))
    return rows


def _trainer(config: Config, shape: ModelShape, trained: int | None = None) -> MemoryRow:
    stage, ranks = config.trainer.zero_stage, config.trainer.ranks
    count = shape.parameter_count if trained is None else trained
    weights = weight_bytes(config, shape)
    shares = ranks if stage >= 1 else 1
    on_gpu, offloaded = config.trainer.device == "cuda", config.trainer.offload != "none"
    update_after_passes = on_gpu and not offloaded
    flat_copy = 4 * count // shares if config.model.dtype == "bfloat16" or offloaded else 0
    kept = _state_bytes(config, shape, trained, average=bool(config.trainer.ema_decay)) // shares
    passing = activation_bytes(config, shape) + logits_bytes(config, shape)
    gathered = min(shape.parameter_count, max(_GATHERED_PARAMETERS, shape.largest_block)) if stage == 3 else 0
    gathered *= _bytes_per_weight(config)
    second = weights // config.trainer.zero_hpz_partition_size if config.trainer.zero_hpz_partition_size > 1 else 0
    return MemoryRow(
        role="trainer",
        count=ranks,
        on_gpu=on_gpu,
        weights=weights // ranks + second + gathered if stage == 3 else weights,
        gathered=gathered,
        gradients=4 * count // (ranks if stage >= 2 else 1) if stage else _bytes_per_weight(config) * count,
        optimizer=kept + (0 if update_after_passes else flat_copy),
        activations=max(passing, flat_copy if update_after_passes else 0),
        programs=_TRAINER_ON_GPU if on_gpu else _TRAINER_PROGRAM,
    )


def _critic(config: Config, sizes: ModelSizes) -> MemoryRow:
    """Return the memory that the critic adds to each of the trainer's ranks, or that of its own ranks."""
    table = {"ema_decay": 0.0, "ranks": config.critic_ranks}
    row = _trainer(config.model_copy(update={"trainer": config.trainer.model_copy(update=table)}), sizes.critic)
    if config.critic_apart:
        return replace(row, role="critic")
    more = row.activations - _trainer(config, sizes.policy, sizes.trained).activations
    return replace(row, role="critic", activations=max(more, 0), programs=0)


def _hosts(config: Config, sizes: ModelSizes) -> list[MemoryRow]:
    """Return the main memory of the processes of a trainer on GPUs, besides what is offloaded."""
    rows = [_host(config, "trainer", sizes.policy, sizes.trained, config.trainer.ranks, bool(config.trainer.ema_decay))]
    if config.algorithm.needs_critic:
        critic = _host(config, "critic", sizes.critic, None, config.critic_ranks, average=False)
        rows.append(critic if config.critic_apart else replace(critic, programs=0))
    return rows


def _host(config: Config, role: str, shape: ModelShape, trained: int | None, ranks: int, average: bool) -> MemoryRow:
    stage = config.trainer.zero_stage
    moved = weight_bytes(config, shape) // ranks if stage == 3 else 0
    restored = _state_bytes(config, shape, trained, average=average) // (ranks if stage else 1)
    if config.trainer.offload != "none":
        moved = restored = 0
    return MemoryRow(
        role=f"{role}, host",
        count=ranks,
        on_gpu=False,
        weights=moved if moved > restored else 0,
        optimizer=restored if restored >= moved else 0,
        programs=_TRAINER_PROGRAM,
    )


def _split_offloaded(config: Config, whole: MemoryRow, shape: ModelShape) -> list[MemoryRow]:
    """Return the row of a trained model, or with offloading two: its part on the device and its part in main memory."""
    if config.trainer.offload == "none":
        return [whole]
    is_last_stage = config.trainer.zero_stage == 3
    partition = weight_bytes(config, shape) // whole.count
    weights_leave = config.trainer.offload == "optimizer+parameters"
    on_device = replace(
        whole,
        weights=whole.weights - (partition if weights_leave else 0),
        gradients=0 if is_last_stage else whole.gradients,
        optimizer=0,
    )
    in_main_memory = MemoryRow(
        role=f"{whole.role}, offloaded",
        count=whole.count,
        on_gpu=False,
        weights=0 if is_last_stage and not weights_leave else partition,
        gradients=whole.gradients if is_last_stage else 0,
        optimizer=whole.optimizer,
    )
    return [on_device, in_main_memory]


def _state_bytes(config: Config, shape: ModelShape, trained: int | None = None, *, average: bool = False) -> int:
    """Return the bytes of masters, moments and average: AdamW has two moments per parameter, Muon one of a matrix."""
    count = shape.parameter_count if trained is None else trained
    whole = (16 if average else 12) * count
    if config.trainer.optimizer == "adamw":
        return whole
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2) if trained is None else 0
    return whole - 4 * (count - embeddings)


def _rollout(config: Config, shape: ModelShape, pool: RolloutPool) -> MemoryRow:
    gpus, width = pool.gpus_per_replica, _pool_bytes_per_weight(pool)
    row = MemoryRow(
        role=pool.member_prefix,
        count=pool.services * max(gpus, 1),
        on_gpu=gpus > 0,
        weights=shape.parameter_count * width // max(gpus, 1),
        programs=_OTHERS_ON_GPU if gpus else _ROLLOUT_PROGRAM,
    )
    if gpus and not pool.kv_cache_gib:
        return replace(row, share_of_gpu=pool.gpu_memory_utilization)
    return replace(
        row,
        activations=layer_bytes_per_token(shape, width) * engine_limits(config, pool).batched_tokens,
        kv_cache=(pool.kv_cache_gib or 1) * GIB,
    )


def _transfer(config: Config, shape: ModelShape) -> MemoryRow:
    workers = sum(pool.services * max(pool.gpus_per_replica, 1) for pool in config.rollout_pools)
    copies = workers if config.weights.backend == "gloo" else 1
    return MemoryRow(role="transfer", count=copies, on_gpu=False, weights=weight_bytes(config, shape))


def _reference(config: Config, shape: ModelShape) -> MemoryRow:
    return MemoryRow(
        role="reference",
        count=max(config.reference.replicas, 1),
        on_gpu=config.reference.device == "cuda",
        weights=weight_bytes(config, shape),
        activations=layer_bytes_per_token(shape, _bytes_per_weight(config)) * config.reference.tokens_per_batch
        + logits_bytes(config, shape),
        programs=_OTHERS_ON_GPU if config.reference.device == "cuda" else _REFERENCE_PROGRAM,
    )


def _reward_model(table: RewardConfig, model: RewardModelConfig) -> MemoryRow:
    """Return the memory of each GPU of a reward model, which are split by layers, or of each process on CPU.

    The sizes of a layer are unknown for some architectures; then its activations are left out.
    """
    folder = ClassifierFolder.read(model.source, process=model.kind == "process")
    width = BYTES_PER_WEIGHT[model.dtype]
    try:
        layer = layer_bytes_per_token(folder_shape(folder.path), width)
    except ConfigError:
        layer = 0
    gpus = model.gpus_per_replica if model.device == "cuda" else 1
    return MemoryRow(
        role=f"reward model {table.name}",
        count=max(table.replicas, 1) * gpus,
        on_gpu=model.device == "cuda",
        weights=folder.parameter_count * width // gpus,
        activations=layer * model.tokens_per_batch,
        programs=_OTHERS_ON_GPU if model.device == "cuda" else _REFERENCE_PROGRAM,
    )


def activation_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes that a rank keeps of a micro-batch for the backward pass.

    With gradient checkpointing: one layer, and the inputs of all. With sequence parallelism: its part of the tokens.
    """
    tokens = -(-config.batch.tokens_per_micro_batch // config.trainer.sequence_parallel_size)
    layer = layer_bytes_per_token(shape, _bytes_per_weight(config), liger=config.trainer.liger_kernels)
    if config.trainer.gradient_checkpointing:
        return tokens * (layer + shape.layers * shape.hidden * _bytes_per_weight(config))
    return tokens * layer * shape.layers


def logits_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of the float32 logits that exist at once, with their copies; 0 if scores are trained."""
    if config.algorithm.loss.trains == "scores":
        return 0
    samples = config.batch.tokens_per_micro_batch // config.model.max_context_tokens
    rows = max(samples, 1) * (config.sampling.max_new_tokens or config.model.max_context_tokens)
    return min(rows * shape.vocabulary, _LOGITS_ELEMENTS) * 4 * _LOGITS_COPIES


def layer_bytes_per_token(shape: ModelShape, width: int, *, liger: bool = False) -> int:
    """Return the bytes that one decoder layer keeps per token. Fused attention kernels keep no score matrix.

    `width` is the bytes of a number. Hidden-sized: the results of both norms before and after their weights, and two
    float32 copies inside the norms. Also rotated queries and keys, values, attention output, and four of the MLP's
    inner size. Liger's norms keep their input instead of a copy, and its MLP one result less.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    elements = 4 * shape.hidden + 2 * queries + 2 * keys + (3 if liger else 4) * shape.intermediate
    return elements * width + (0 if liger else 2 * 4 * shape.hidden)


def _bytes_per_weight(config: Config) -> int:
    return BYTES_PER_WEIGHT[config.model.dtype]


def _pool_bytes_per_weight(pool: RolloutPool) -> int:
    return BYTES_PER_WEIGHT[pool.dtype]
