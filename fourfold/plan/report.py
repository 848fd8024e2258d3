"""`fourfold plan RECIPE`: what a run will do and need, as sentences and a table, before anything is started."""

from __future__ import annotations

import argparse
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.config import Config, DataSourceConfig
from fourfold.model import folder
from fourfold.model.folder import ModelShape
from fourfold.plan import sequence_parallel
from fourfold.plan.adapters import AdapterPlan, adapter_plan
from fourfold.plan.algorithm import algorithm_plan
from fourfold.plan.batch import BatchPlan, batch_plan
from fourfold.plan.engine import rollout_plan
from fourfold.plan.memory import GIB, MemoryRow, checkpoint_bytes, kv_bytes_per_token, memory_plan
from fourfold.plan.optimizer import optimizer_plan
from fourfold.plan.placement import gpu_plan
from fourfold.plan.weights import weight_plan

_WIDTH: Final = 110
_LABEL: Final = 12
_COLUMNS: Final = ("weights", "gradients", "optimizer", "activations", "kv_cache", "programs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fourfold plan`."""
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--resolved", action="store_true", help="print the recipe with every default written out")


def main(args: argparse.Namespace) -> int:
    """Print the plan of a recipe."""
    config = configuration.load(args.recipe)
    print(configuration.dump(config) if args.resolved else describe(config), end="")
    return 0


def describe(config: Config) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: the model is not there, or its rows cannot be shared as `trainer.sequence_parallel_size` says.
    """
    sequence_parallel.check(config)
    shape, plan = folder.shape(config.model.source), batch_plan(config)
    own_critic = config.algorithm.needs_critic and config.critic.source
    critic = folder.shape(config.critic.source) if own_critic else shape
    adapters = adapter_plan(config)
    trained = adapters.parameter_count if adapters else None
    rows = memory_plan(config, shape, critic, trained=trained)
    on_gpus = gpu_plan(config, rows)
    sentences = [
        ("model", _model(config, shape)),
        *([("lora", _lora(config, shape, adapters))] if adapters else []),
        ("data", _data(config)),
        ("held out", _held_out(config, plan)),
        ("one step", _step(config, plan)),
        *zip_longest(["algorithm"], algorithm_plan(config), fillvalue=""),
        ("the run", _run(config, plan, checkpoint_bytes(config, shape, critic, trained=trained))),
        ("trainer", _trainer(config, plan)),
        *zip_longest(["optimizer"], optimizer_plan(config), fillvalue=""),
        ("rollout", _rollout(config, shape)),
        ("reward", _reward(config)),
        ("reference", _reference(config)),
        *zip_longest(["placement"] if on_gpus else [], on_gpus, fillvalue=""),
        *zip_longest(["weights"], weight_plan(config, shape), fillvalue=""),
        ("policy lag", "0: each step is sampled by the weights that the step before it made."),
    ]
    title = f"{config.name}: {config.steps} steps of {config.algorithm.preset} on {config.model.source}"
    lines = [title, ""]
    for label, text in sentences:
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=label.ljust(_LABEL), subsequent_indent=" " * _LABEL, break_on_hyphens=False
        )
    return "\n".join([*lines, "", *memory_table(rows)]) + "\n"


def _model(config: Config, shape: ModelShape) -> str:
    tied = ", tied embeddings" if shape.tied else ""
    kind = "bfloat16 with float32 masters" if config.model.dtype == "bfloat16" else "float32"
    return (
        f"{shape.parameter_count / 1e6:,.1f}M parameters: {shape.layers} layers of {shape.hidden}, {shape.heads} heads "
        f"({shape.kv_heads} for keys and values), vocabulary {shape.vocabulary:,}{tied}. Trained in {kind}."
    )


def _lora(config: Config, shape: ModelShape, adapters: AdapterPlan) -> str:
    lora = config.trainer.lora
    share = adapters.parameter_count / shape.parameter_count
    return (
        f"adapters of rank {lora.rank} in {adapters.layers:,} linear layers ({', '.join(adapters.kinds)}), scale "
        f"{lora.scale:g}: {adapters.parameter_count / 1e6:,.2f}M parameters are trained, {share:.2%} of the model's; "
        f"the others stay as they are. Engines and exports get the sum."
    )


def _data(config: Config) -> str:
    data = config.data
    form = "as chat" if data.chat else "as plain text"
    system = f'; system prompt "{data.system_prompt}"' if data.system_prompt else "."
    return f"{_source(data.train)}, {form}{system}"


def _source(source: DataSourceConfig) -> str:
    if source.reasoning_gym:
        options = "".join(f"{key} {value}, " for key, value in source.options.items())
        return f"{source.size:,} rows made by reasoning-gym `{source.reasoning_gym}` ({options}seed {source.seed})"
    return f"{f'the first {source.size:,}' if source.size else 'all'} rows of {source.path}"


def _held_out(config: Config, plan: BatchPlan) -> str:
    if not plan.evaluations:
        return "nothing, so that no accuracy is measured; [data.holdout] or [data.eval] changes that."
    if (rule := config.data.holdout) is not None:
        same = (
            f"the same numbers in `{rule.field}`, in any order,"
            if rule.unordered_numbers
            else f"the same `{rule.field}`"
        )
        what = (
            f"{rule.groups} groups of rows, drawn with seed {config.seed} and never trained on; rows with {same} are "
            f"one group."
        )
    else:
        assert config.data.eval is not None
        what = f"{_source(config.data.eval)}."
    each = "each of their distinct prompts" if config.data.holdout else "each of their prompts"
    if config.evaluation.max_prompts:
        each = f"the first {config.evaluation.max_prompts:,} of their prompts"
    answers = config.evaluation.samples_per_prompt
    last = ", ".join(str(step) for step in plan.evaluations[1:][:6])
    more = f", ... {plan.evaluations[-1]}" if len(plan.evaluations) > 7 else ""
    word = "answer" if answers == 1 else "answers"
    return f"{what} {answers} sampled {word} to {each} before step 1 and after steps {last}{more}."


def _step(config: Config, plan: BatchPlan) -> str:
    batch = config.batch
    prompts = f"{batch.prompts_per_step} {'prompt' if batch.prompts_per_step == 1 else 'prompts'}"
    samples = f"{batch.group_size} {'sample' if batch.group_size == 1 else 'samples'}"
    return (
        f"{prompts} x {samples} = {plan.samples_per_step:,} trajectories of at most "
        f"{config.model.max_context_tokens:,} tokens, {config.sampling.max_new_tokens:,} of them sampled: at most "
        f"{plan.tokens_per_step:,} tokens, {plan.sampled_tokens_per_step:,} to train on, {_updates(config, plan)}."
    )


def _updates(config: Config, plan: BatchPlan) -> str:
    """How many optimizer steps a step makes, of how many samples each."""
    batch = config.batch
    if batch.updates_per_step == 1:
        return "in one optimizer step"
    each = f"{plan.samples_per_mini_batch:,} samples"
    if batch.samples_per_step % batch.mini_batches_per_step:
        each = f"at most {each}"
    if batch.epochs_per_step == 1:
        return f"in {batch.updates_per_step} optimizer steps of {each}"
    passes = f"{batch.epochs_per_step} times over all of them"
    return f"in {batch.updates_per_step} optimizer steps of {each}, {passes}"


def _run(config: Config, plan: BatchPlan, checkpoint: int) -> str:
    size, kept = f"{checkpoint / GIB:.1f} GiB", config.checkpoint
    best = f" and the {kept.keep_best} with the best held-out score" if kept.keep_best else ""
    return (
        f"{config.steps} steps = {plan.samples_in_run:,} trajectories. {len(plan.checkpoints)} "
        f"{'checkpoint' if len(plan.checkpoints) == 1 else 'checkpoints'} of about {size}; the newest "
        f"{kept.keep}{best} stay in runs/{config.name}/checkpoints."
    )


def _trainer(config: Config, plan: BatchPlan) -> str:
    trainer = config.trainer
    where = "started by hand, " if trainer.replicas == 0 else ""
    device = "GPU" if trainer.device == "cuda" else "CPU"
    ranks = f"{trainer.ranks} {'rank' if trainer.ranks == 1 else 'ranks'}"
    shared = trainer.sequence_parallel_size > 1
    owner = f"group of {trainer.sequence_parallel_size} ranks" if shared else "rank"
    each = f"{plan.samples_per_rank:,} of them on each {owner}, " if trainer.ranks > 1 else ""
    slices = (
        f" The {trainer.sequence_parallel_size} ranks of a group share every micro-batch (sequence parallelism): each "
        f"holds at most {-(-config.batch.tokens_per_micro_batch // trainer.sequence_parallel_size):,} tokens of it."
        if shared
        else ""
    )
    both = " for policy and critic" if config.algorithm.needs_critic else ""
    if config.critic_apart:
        own = f"{config.critic.ranks} {'rank' if config.critic.ranks == 1 else 'ranks'}"
        both = f" for the policy, and {own} of its own for the critic, at the same time"
    ema = (
        f" A moving average of the weights, decay {trainer.ema_decay:g} with each optimizer step, is exported, too, as "
        f"runs/{config.name}/model-ema."
        if trainer.ema_decay
        else ""
    )
    passes = "pass" if plan.micro_batches_per_step == 1 else "passes"
    split = ", but for the routers' loss" if trainer.router_aux_loss_coef else ""
    return (
        f"{where}{ranks} on {device}{both}, ZeRO stage {trainer.zero_stage}. The {plan.samples_per_step:,} "
        f"trajectories go, {each}in micro-batches of at most {config.batch.tokens_per_micro_batch:,} tokens: "
        f"{plan.samples_per_micro_batch:,} of full length, so {plan.micro_batches_per_step:,} {passes} at most. How "
        f"they are split changes nothing in the result{split}.{slices}{ema}"
    )


def _rollout(config: Config, shape: ModelShape) -> str:
    rollout = config.rollout
    where = _services(rollout.replicas)
    if rollout.gpus_per_replica:
        memory = f"{rollout.gpu_memory_utilization:.0%} of each GPU's memory; what the weights leave is KV cache"
        if rollout.kv_cache_gib:
            memory = f"{rollout.kv_cache_gib} GiB of KV cache on each"
        per_token = kv_bytes_per_token(config, shape)
        rounded = " Weights are rounded to fp8 as they arrive." if rollout.quantization else ""
        sleep = " It sleeps while the trainer trains." if rollout.sleep_mode else ""
        return (
            f"{where} on {rollout.gpus_per_replica} GPU each: {memory}, {per_token / 1024:,.0f} KiB a token. "
            f"{_at_once(config)}{rounded}{sleep}"
        )
    cache = rollout.kv_cache_gib or 1
    tokens = cache * GIB // kv_bytes_per_token(config, shape)
    full = tokens // config.model.max_context_tokens
    return (
        f"{where} on CPU: {cache} GiB of KV cache = {tokens:,} tokens = {full:,} samples of full "
        f"length. {_at_once(config)}"
    )


def _at_once(config: Config) -> str:
    """What an engine does at once, as the recipe says or as it follows from the batch."""
    limits = rollout_plan(config)
    options = "".join(f" {name} = {value}," for name, value in config.rollout.vllm.items())
    given = f" vLLM's own options:{options[:-1]}." if options else ""
    agents = f" ({limits.agent_samples:,} of them of agents)" if config.rollout.public_listen else ""
    return (
        f"At most {limits.concurrent_samples:,} samples run at once in each{agents}, and {limits.batched_tokens:,} "
        f"tokens in a step of the engine.{given}"
    )


def _reward(config: Config) -> str:
    reward = config.reward
    workers = "1 worker process" if reward.processes == 1 else f"{reward.processes} worker processes each"
    limit = f"{reward.timeout_seconds:g} s"
    return f"{_services(reward.replicas)}, {workers}: `{reward.verifier}`, at most {limit} for a sample."


def _reference(config: Config) -> str:
    if not config.needs_reference:
        return "none, because algorithm.kl.coef is 0."
    device = "GPU" if config.reference.device == "cuda" else "CPU"
    return f"{_services(config.reference.replicas)} on {device}, with the weights of {config.model.source}, frozen."


def _services(replicas: int) -> str:
    if replicas == 0:
        return "started by hand"
    return "1 service" if replicas == 1 else f"{replicas} services"


def memory_table(rows: list[MemoryRow]) -> list[str]:
    """Return the table of memory, one line per role, and the sum of what is not on GPUs."""
    head = ["GiB each", "number", *(name.replace("_", " ") for name in _COLUMNS), "total"]
    table = [head]
    for row in rows:
        where = f"{row.role}, per GPU" if row.on_gpu else row.role
        cells = [_gib(getattr(row, name)) for name in _COLUMNS]
        total = f"{row.share_of_gpu:.0%} of GPU" if row.share_of_gpu else _gib(row.total)
        table.append([where, str(row.count), *cells, total])
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    lines = []
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *cells]))
    cpu = sum(row.total * row.count for row in rows if not row.on_gpu)
    lines.append(f"Main memory, all of them together: about {cpu / GIB:.1f} GiB.")
    return lines


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"
