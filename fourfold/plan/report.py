"""Implements `fourfold plan RECIPE`: describes a run and its memory before a process is started."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.config import (
    Config,
    CriticConfig,
    DataSourceConfig,
    EvalSet,
    RewardConfig,
    RolloutPool,
    TrainerConfig,
    TrainSourceConfig,
    block_counts,
)
from fourfold.config.reward import RewardModelConfig
from fourfold.config.sources import MIXTURE_BLOCK
from fourfold.errors import ConfigError
from fourfold.host.hardware import available_memory, smallest_memory, visible_gpus
from fourfold.model import runs
from fourfold.model.classifier import ClassifierFolder
from fourfold.model.folder import ModelShape
from fourfold.plan.agents import agents_plan
from fourfold.plan.algorithm import algorithm_plan, noise_warnings
from fourfold.plan.asynchrony import lag_plan
from fourfold.plan.batch import BatchPlan, batch_plan, engine_limits
from fourfold.plan.chain import Link, describe_chain, expected_run, load_chain, named
from fourfold.plan.memory import (
    GIB,
    MemoryRow,
    checkpoint_bytes,
    kv_bytes_per_token,
    kv_cache_tokens,
    memory_plan,
)
from fourfold.plan.models import AdapterPlan, check_context, check_sequence_parallel, model_sizes
from fourfold.plan.placement import gpu_plan, memory_warnings, node_plan
from fourfold.plan.preflight import Preflight, RenderedRow, check_recipe
from fourfold.plan.speed import SpeedPredictor, load_predictor
from fourfold.plan.weight_update import lora_update, update_bytes, update_cost
from fourfold.text import align_columns, printable

_WIDTH: Final = 110
_LABEL: Final = 12
_MARKS: Final = ("{+", "+}")  # of inserted words, as wdiff writes them
_SHOWN_PARTS: Final = 12  # of a rendered row
_SHOWN_BEGIN, _SHOWN_END = 400, 200  # characters of a part
_COLUMNS: Final = ("weights", "gradients", "optimizer", "activations", "kv_cache", "programs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        type=Path,
        nargs="+",
        help="TOML file of the run; several: of runs in this order, as of `fourfold run`",
    )
    parser.add_argument(
        "--rates",
        type=Path,
        metavar="RUN",
        help="folder of a run, such as runs/NAME: predict step time and speed-up from its metrics",
    )
    configuration.add_set_option(parser, "batch.group_size=4")
    parser.add_argument(
        "--skip-checks",
        action="store_true",
        help="do not read data, reward functions and certificates, which may be on another machine",
    )
    parser.add_argument("--resolved", action="store_true", help="print the recipe with every default written out")


def main(args: argparse.Namespace) -> int:
    """Print the plan of recipes, or a recipe with all defaults."""
    links = load_chain(args.recipe, args.set)
    if args.resolved and args.rates:
        raise ConfigError("--resolved and --rates exclude each other: a recipe has no rates; give one of them")
    if args.resolved and len(links) > 1:
        raise ConfigError(f"--resolved prints one recipe, and {len(links)} are given; give one of them")
    if args.resolved:
        print(configuration.dump(links[0].config), end="")
        return 0
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    predictor, planned = load_predictor(args.rates), list[Link]()
    with runs.expect_runs() as expect:
        for link in links:
            with named(link.file) if len(links) > 1 else nullcontext():
                found = Preflight(link.config) if args.skip_checks else _check(link, args.set)
                text = describe(found.config, found, predictor)
            print("\n" * bool(planned) + text, end="", flush=True)
            print("".join(f"{line}\n" for line in rendered_lines(found.rendered, colour=colour)), end="")
            planned.append(Link(file=link.file, config=found.config))
            expect(found.config.name, expected_run(found.config))
        if len(links) > 1:
            print(f"\n{describe_chain(planned)}")
    return 0


def rendered_lines(rows: Sequence[RenderedRow], *, colour: bool) -> list[str]:
    """Return rows as text, with the tokens of the loss in green or between marks."""
    if not rows:
        return []
    begin, end = ("\x1b[32m", "\x1b[0m") if colour else _MARKS
    how = "green" if colour else f"between {begin} and {end}"
    lines = ["", f"The first rows of step 1; what is in the loss is {how}."]
    for row in rows:
        parts = list(row.parts)
        if (more := len(parts) - _SHOWN_PARTS) > 0:
            parts[_SHOWN_PARTS - 2 : -2] = [(f" [... {more:,} parts ...] ", False)]
        text = "".join(f"{begin}{_shortened(text)}{end}" if in_loss else _shortened(text) for text, in_loss in parts)
        lines += ["", f"{row.title}:", *(f"  {line}" for line in text.split("\n"))]
    return lines


def _shortened(text: str) -> str:
    """Return the text of others for a terminal, without the middle of a long one."""
    if (more := len(text) - _SHOWN_BEGIN - _SHOWN_END) > 0:
        text = f"{text[:_SHOWN_BEGIN]} [... {more:,} characters ...] {text[-_SHOWN_END:]}"
    return printable(text)


def _check(link: Link, assignments: Sequence[str]) -> Preflight:
    from fourfold.security.access import VIEWER, Security  # imports gRPC, which a plan without checks need not load

    Security.load(link.config.security, VIEWER)  # as `fourfold run` does first
    return check_recipe(link.config, link.file, assignments)


def describe(config: Config, found: Preflight | None = None, predictor: SpeedPredictor | None = None) -> str:
    """Return the plan as text; its models must exist and fit the recipe.

    `found` has the results of the checks of data and rewards. Without a predictor, the speed is guessed.
    """
    found = found or Preflight(config)
    check_context(config)
    check_sequence_parallel(config)
    sizes, plan = model_sizes(config), batch_plan(config)
    shape = sizes.policy
    rows = memory_plan(config, sizes)
    gpus = visible_gpus()
    gpu_bytes = smallest_memory(gpus)
    host_bytes = None if gpu_bytes is None else available_memory()  # a plan may be made on another machine
    warnings = memory_warnings(config, sizes, gpu_count=len(gpus), gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    speed = (predictor or load_predictor()).predict(config, sizes, gpus, found)
    # Label and paragraphs.
    parts: list[tuple[str, Iterable[str]]] = [
        ("model", [_model(config, shape)]),
        ("lora", [_lora(config, shape, sizes.adapters)] if sizes.adapters else []),
        ("data", [_data(config), *found.notes.get("data", ())]),
        ("held out", [_held_out(config, plan), *found.notes.get("held out", ())]),
        ("one step", [_step(config, plan)]),
        ("algorithm", algorithm_plan(config)),
        ("the run", [_run(config, plan, checkpoint_bytes(config, sizes))]),
        ("trainer", [_trainer(config, plan)]),
        ("optimizer", _optimizer(config)),
        ("rollout", [_rollout(config, pool, shape) for pool in config.rollout_pools]),
        ("agents", agents_plan(config)),
        ("reward", [_reward(config), *found.notes.get("reward", ())]),
        ("reference", [_reference(config)]),
        ("placement", gpu_plan(config, rows, gpu_bytes, here=len(gpus))),
        ("nodes", node_plan(config, sizes)),
        ("warning", [*warnings, *noise_warnings(config), *found.warnings, *speed.warnings]),
        ("weights", _weights(config, shape) if config.needs_engines else []),
        ("policy lag", lag_plan(config, shape) if config.needs_engines else []),
        ("speed", [speed.text]),
    ]
    length = f"{config.steps} steps" if config.steps else _passes(config.data.passes)
    title = f"{config.name}: {length} of {config.algorithm.preset} on {config.model.source}"
    lines = [title, ""]
    for label, texts in parts:
        for number, text in enumerate(texts):
            begin, indent = ("" if number else label).ljust(_LABEL), " " * _LABEL
            lines += textwrap.wrap(text, _WIDTH, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False)
    if speed.table:
        lines += ["", *speed.table]
    return "\n".join([*lines, "", *memory_table(rows)]) + "\n"


def _model(config: Config, shape: ModelShape) -> str:
    tied = ", tied embeddings" if shape.tied else ""
    kind = "bfloat16 with float32 masters" if config.model.dtype == "bfloat16" else "float32"
    if config.model.head_dtype and config.model.dtype == "bfloat16":
        kind += " and float32 logits"
    return (
        f"{shape.parameter_count / 1e6:,.1f}M parameters: {shape.layers} layers of {shape.hidden}, {shape.heads} heads "
        f"({shape.kv_heads} for keys and values), vocabulary {shape.vocabulary:,}{tied}. Trained in {kind}."
    )


def _lora(config: Config, shape: ModelShape, adapters: AdapterPlan) -> str:
    lora = config.trainer.lora
    share, update = adapters.parameter_count / shape.parameter_count, lora_update(config, shape)
    sent = f" {update[0].upper()}{update[1:]}." if update else ""
    return (
        f"adapters of rank {lora.rank} in {adapters.layers:,} linear layers ({', '.join(adapters.kinds)}), scale "
        f"{lora.scale:g}: {adapters.parameter_count / 1e6:,.2f}M parameters are trained, {share:.2%} of the model's; "
        f"the others are frozen.{sent} Exports hold the merged weights and the adapters."
    )


def _data(config: Config) -> str:
    data = config.data
    form = "as chat" if data.chat else "as plain text"
    system = f'; system prompt "{data.system_prompt}"' if data.system_prompt else "."
    if not data.train:
        return "none: agents bring their own groups of attempts."
    order = ", in the order of the files" if data.order == "file" else ""
    return f"{_sources(data.train)}, {form}{order}{system}"


def _sources(sources: Sequence[TrainSourceConfig]) -> str:
    if len(sources) == 1:
        return _source(sources[0])
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return "one pool of " + "; ".join(f"{source.title} ({_source(source)})" for source in sources)
    shares = [count / MIXTURE_BLOCK for count in block_counts(weights)]
    parts = (f"{share:.1%} {one.title} ({_source(one)})" for share, one in zip(shares, sources, strict=True))
    return f"a mixture of {'; '.join(parts)}, exact in each {MIXTURE_BLOCK:,} prompts"


def _source(source: DataSourceConfig) -> str:
    if source.reasoning_gym:
        options = "".join(f"{key} {value}, " for key, value in source.options.items())
        return f"{source.size:,} rows made by reasoning-gym `{source.reasoning_gym}` ({options}seed {source.seed})"
    part = " ".join(filter(None, (source.config, source.split)))
    rows = f"the first {source.size:,}" if source.size else "all"
    return f"{rows} rows of {source.path}{f' ({part})' if part else ''}"


def _held_out(config: Config, plan: BatchPlan) -> str:
    if not plan.evaluations:
        if not config.needs_engines:
            return "nothing."
        return "nothing, so no accuracy is measured; add [data.holdout] or [data.eval] to measure it."
    sets = " ".join(_held_out_set(config, held_out) for held_out in config.eval_sets)
    steps = ", ".join(str(step) for step in plan.evaluations[1:7])
    more = f", ... {plan.evaluations[-1]}" if len(plan.evaluations) > 7 else ""
    after = "steps" if len(plan.evaluations) > 2 else "step"
    return f"{sets} before step 1 and after {after} {steps}{more}."


def _held_out_set(config: Config, held_out: EvalSet) -> str:
    """Return the rows of a held-out set, and the answers to them, without the steps."""
    rule = config.data.holdout
    if held_out.source is None and rule is not None:
        key = f"`{rule.field}`" if rule.field else "prompt"
        if rule.unordered_numbers:
            key = f"numbers in {key if rule.field else 'the prompt'}, in any order,"
        rows = (
            f"{rule.groups} groups of rows, drawn with seed {config.seed} and never trained on; rows with the same "
            f"{key} form one group."
        )
        prompts = "each of their distinct prompts"
    else:
        assert held_out.source is not None
        rows, prompts = f"{_source(held_out.source)}.", "each of their prompts"
    if held_out.max_prompts:
        prompts = f"the first {held_out.max_prompts:,} of their prompts"
    if not config.needs_engines:
        measured = "scores" if config.algorithm.loss.trains == "scores" else "loss"
        return f"{rows} The {measured} of {prompts.replace('prompts', 'rows')}"
    answers = _count(held_out.samples_per_prompt, "greedy answer" if held_out.temperature == 0 else "sampled answer")
    return f"{rows} {answers} to {prompts}"


def _step(config: Config, plan: BatchPlan) -> str:
    batch = config.batch
    if batch.rows_per_step:
        row = {"pairs": "pair", "labels": "labelled answer"}.get(config.algorithm.loss.reads, "row")
        samples = f": {plan.samples_per_step:,} samples" if config.samples_per_row > 1 else ""
        longest = config.model.max_context_tokens
        return (
            f"{_count(batch.rows_per_step, row)}{samples} of at most {longest:,} tokens: at most "
            f"{plan.tokens_per_step:,} tokens, {_updates(config, plan)}. The last step of a pass may have fewer {row}s."
        )
    return (
        f"{_count(batch.prompts_per_step, 'prompt')} x {_count(batch.group_size, 'sample')} = "
        f"{plan.samples_per_step:,} trajectories of at most "
        f"{config.model.max_context_tokens:,} tokens, {config.sampling.max_new_tokens:,} of them sampled: at most "
        f"{plan.tokens_per_step:,} tokens, {plan.sampled_tokens_per_step:,} to train on, {_updates(config, plan)}."
    )


def _updates(config: Config, plan: BatchPlan) -> str:
    batch = config.batch
    if batch.updates_per_step == 1:
        return "in one optimizer step"
    each = f"{plan.samples_per_mini_batch:,} samples"
    if batch.samples_per_step % batch.mini_batches_per_step:
        each = f"at most {each}"
    epochs = f", {batch.epochs_per_step} times over all of them" if batch.epochs_per_step > 1 else ""
    return f"in {batch.updates_per_step} optimizer steps of {each}{epochs}"


def _run(config: Config, plan: BatchPlan, checkpoint: int) -> str:
    size, kept = f"{checkpoint / GIB:.1f} GiB", config.checkpoint
    best = f" and the {kept.keep_best} with the best held-out score" if kept.keep_best else ""
    if config.batch.rows_per_step:
        passes = config.data.passes
        amount = f"{_passes(passes)} over the rows" if passes else f"at most {plan.samples_in_run:,} rows"
    else:
        amount = f"{plan.samples_in_run:,} trajectories"
    steps = f"{config.steps} steps = " if config.steps else ""  # counted by the check of the data
    return (
        f"{steps}{amount}. {_count(len(plan.checkpoints), 'checkpoint')} "
        f"of about {size}; the newest {kept.keep}{best} stay in runs/{config.name}/checkpoints."
    )


def _trainer(config: Config, plan: BatchPlan) -> str:
    trainer, tokens = config.trainer, config.batch.tokens_per_micro_batch
    by_hand = "started by hand, " if trainer.replicas == 0 else ""
    device = "GPU" if trainer.device == "cuda" else "CPU"
    models = " for policy and critic" if config.algorithm.needs_critic else ""
    if config.critic_apart:
        models = f" for the policy, and {_count(config.critic.ranks, 'rank')} for the critic at the same time"
    size = trainer.sequence_parallel_size
    owner = f"group of {size} ranks" if size > 1 else "rank"
    each = f", {plan.samples_per_rank:,} per {owner}," if trainer.ranks > 1 else ""
    exception = " except the routers' loss" if trainer.router_aux_loss_coef else ""
    samples = "trajectories" if config.needs_engines else "samples" if config.samples_per_row > 1 else "rows"
    passes = "pass" if plan.micro_batches_per_step == 1 else "passes"
    text = (
        f"{by_hand}{_count(trainer.ranks, 'rank')} on {device}{models}, ZeRO stage {trainer.zero_stage}. The "
        f"{plan.samples_per_step:,} {samples}{each} are packed into micro-batches of at most {tokens:,} tokens: "
        f"{plan.samples_per_micro_batch:,} of full length, so at most {plan.micro_batches_per_step:,} {passes}. The "
        f"packing does not change the result{exception}."
    )
    if size > 1:
        text += (
            f" The {size} ranks of a group share every micro-batch (sequence parallelism): each holds at most "
            f"{-(-tokens // size):,} tokens of it."
        )
    if trainer.zero_hpz_partition_size > 1:
        text += (
            f" Groups of {trainer.zero_hpz_partition_size} ranks keep a second copy of the weights "
            f"(zero_hpz_partition_size); its speed over several machines was not measured."
        )
    if trainer.ema_decay:
        text += (
            f" A moving average of the weights (decay {trainer.ema_decay:g} per optimizer step) is exported as "
            f"runs/{config.name}/model-ema, too."
        )
    return text


def _optimizer(config: Config) -> list[str]:
    """Return one paragraph for the policy, one for a critic, and one on offloading."""
    trainer = config.trainer
    beta1, beta2 = trainer.adam_betas
    adamw = f"AdamW with betas {beta1:g} and {beta2:g}"
    kind = {
        "adamw": adamw,
        "muon": f"Muon with momentum {trainer.muon_momentum:g} for the layers' matrices, {adamw} for the rest",
    }[trainer.optimizer]
    lines = [f"{kind}; {_learning_rate(trainer, config.steps)}"]
    if config.algorithm.needs_critic:
        lines.append(f"critic: the same; {_learning_rate(config.critic, config.steps)}")
    if trainer.offload != "none":
        parts = "Masters and moments" if trainer.offload == "optimizer" else "Weights, masters and moments"
        text = f"{parts} stay in main memory, and the CPU updates them."
        if trainer.device == "cpu":
            text += " On CPU this saves no memory and costs time."
        elif trainer.offload == "optimizer+parameters":
            text += " The weights of each layer are copied to the GPU for its passes."
        lines.append(text)
    return lines


def _learning_rate(table: TrainerConfig | CriticConfig, steps: int) -> str:
    """Return learning rate, weight decay and gradient clipping of a model."""
    warmup, warmup_steps = "", table.warmup(steps) if isinstance(table, TrainerConfig) else table.warmup_steps
    if warmup_steps:
        warmup = f", reached after {_count(warmup_steps, 'step')}"
    if table.schedule == "constant":
        schedule = "constant" if not warmup else "constant from then on"
    else:
        schedule = f"{table.schedule} decay to {table.final_learning_rate_share:.3g} of it after step {steps}"
    decay = f"weight decay {table.weight_decay:g}, " if table.weight_decay else ""
    return (
        f"learning rate {table.learning_rate:g}{warmup}, {schedule}; {decay}gradients clipped to a norm of "
        f"{table.max_grad_norm:g}."
    )


def _rollout(config: Config, pool: RolloutPool, shape: ModelShape) -> str:
    where = f"{f'{pool.name}: ' if pool.name else ''}{_services(pool.replicas)}"
    dtype = f" Weights are converted to {pool.dtype} as they arrive." if pool.dtype != config.model.dtype else ""
    if pool.gpus_per_replica:
        memory = f"{pool.gpu_memory_utilization:.0%} of each GPU's memory, for weights and KV cache"
        if pool.kv_cache_gib:
            memory = f"{pool.kv_cache_gib} GiB of KV cache on each"
        per_token = kv_bytes_per_token(pool, shape)
        rounded = " Weights are rounded to fp8 as they arrive." if pool.quantization else ""
        sleep = " It sleeps while the trainer trains." if config.rollout.sleep_mode else ""
        stages = f", in {pool.pipeline_parallel_size} stages" if pool.pipeline_parallel_size > 1 else ""
        return (
            f"{where} on {pool.gpus_per_replica} {pool.gpu or 'GPU'} each{stages}: {memory}, "
            f"{per_token / 1024:,.0f} KiB per token. {_engine_limits(config, pool)}{dtype}{rounded}{sleep}"
        )
    cache = pool.kv_cache_gib or 1
    tokens = kv_cache_tokens(pool, shape) or 0
    full = tokens // config.model.max_context_tokens
    return (
        f"{where} on CPU: {cache} GiB of KV cache = {tokens:,} tokens = {full:,} samples of full "
        f"length. {_engine_limits(config, pool)}{dtype}"
    )


def _engine_limits(config: Config, pool: RolloutPool) -> str:
    limits = engine_limits(config, pool)
    options = "".join(f" {name} = {value}," for name, value in pool.vllm.items())
    given = f" vLLM's own options:{options[:-1]}." if options else ""
    agents = f" ({limits.agent_samples:,} of them from agents)" if config.rollout.public_listen else ""
    return (
        f"Each engine runs at most {limits.concurrent_samples:,} samples at once{agents} and processes at most "
        f"{limits.batched_tokens:,} tokens per engine step.{given}"
    )


def _reward(config: Config) -> str:
    if not config.needs_engines:
        return "none, because the data has the answers."
    if not config.needs_scorer and config.algorithm.distills:
        return "none, because a teacher takes the place of scores."
    if not config.needs_scorer:
        return "none, because agents reward their sessions themselves."
    if len(config.reward) == 1:
        return _scorer(config.reward[0])
    terms = " + ".join(f"{table.weight:g} {table.name}" for table in config.reward)
    return " ".join([f"score = {terms}.", *(f"{table.name}: {_scorer(table)}" for table in config.reward)])


def _scorer(table: RewardConfig) -> str:
    limit = f"at most {table.timeout_seconds:g} s per sample"
    if table.target:
        return f"{_services(len(table.target))} at {', '.join(table.target)}, which this run does not start."
    if table.kind in ("function", "command"):
        workers = "1 worker process" if table.processes == 1 else f"{table.processes} worker processes each"
        return f"{_services(table.replicas)}, {workers}: `{table.title}`, {limit}."
    if table.model is not None:
        return _reward_model(table, table.model)
    return f"{_services(table.replicas)}: {table.kind} `{table.title}`, {limit}."


def _reward_model(table: RewardConfig, model: RewardModelConfig) -> str:
    folder = ClassifierFolder.read(model.source, process=model.kind == "process")
    where = f"{model.gpus_per_replica} {model.gpu or 'GPU'}" if model.device == "cuda" else "CPU"
    each = " each" if model.device == "cuda" and table.replicas != 1 else ""
    longest = model.max_tokens or folder.longest
    limit = f"of at most {longest:,} tokens" if longest else "of any length"
    steps = ""
    if model.kind == "process":
        steps = (
            f" It scores each step, which ends with {model.steps!r}; scores of steps before the last are token rewards."
        )
    return (
        f"{_services(table.replicas)} on {where}{each}: the reward model `{model.source}`, "
        f"{folder.parameter_count / 1e6:,.1f}M parameters in {model.dtype}. Texts {limit}; passes of "
        f"{model.tokens_per_batch:,} tokens without padding.{steps}"
    )


def _reference(config: Config) -> str:
    if config.prepares_reference and not config.needs_reference:
        return (
            f"none to start: before step 1 the trainer computes the log-probabilities of each row of the first pass "
            f"under {config.model.source}, without gradients, and keeps them in data.cache."
        )
    if not config.needs_reference:
        return "none, because algorithm.kl.coef is 0."
    device = config.reference.gpu or "GPU" if config.reference.device == "cuda" else "CPU"
    source = config.reference.source or config.model.source
    found = f"{_services(config.reference.replicas)} on {device}, with the frozen weights of {source}."
    if config.prepares_reference:
        found += (
            " Before step 1 they compute the log-probabilities of each row of the first pass, which data.cache keeps; "
            "they then wait until the run ends."
        )
    return found


_WEIGHT_PATHS: Final = {
    "cuda_ipc": "read by the engine's GPUs from the trainer's memory (CUDA IPC)",
    "nccl": "from GPU to GPU by NCCL",
    "shm": "through shared memory",
    "gloo": "by gloo",
}
_WEIGHT_PAUSES: Final = {
    "keep": "Running samples are paused, and continue under the new weights with the KV cache of the old ones.",
    "recompute": "Running samples are paused, and continue under the new weights, which compute their KV cache again.",
    "wait": "Running samples finish first.",
    "abort": "Running samples leave their engine with their tokens, and continue from these as new requests.",
}


def _weights(config: Config, shape: ModelShape) -> list[str]:
    """Return paragraphs on the transport of new weights, its cost, and running samples and verification."""
    weights = config.weights
    path = _WEIGHT_PATHS.get(weights.backend)
    if path is None and config.weights_stay_on_gpus:
        path = (
            f"{_WEIGHT_PATHS['cuda_ipc']} if they can access it, else by NCCL, or through main memory if neither works"
        )
    elif path is None:
        path = "through shared memory, or by gloo to engines on other machines or in other containers"
    engines = config.rollout_replicas
    receivers = "the engine" if engines == 1 else f"each of {engines} engines"
    probe = "the log-probabilities of a probe prompt after every update"
    if weights.verify_every == 1:
        verified = f"Checksums of all tensors are compared with the trainer's, and {probe}."
    else:
        begin = f"in the first {weights.verify_first} updates and " if weights.verify_first else ""
        every = f"every {weights.verify_every} versions"
        verified = f"Checksums of all tensors are compared with the trainer's {begin}{every}, {probe}."
    size = update_bytes(config, shape)
    amount = f"{size / GIB:.2f} GiB" if size > GIB // 20 else f"{size / 1e6:.1f} MB"
    return [
        f"{amount} go to {receivers} after every step, {path}.",
        f"{_WEIGHT_PAUSES[config.pause_mode]} {verified}",
        update_cost(config, shape),
    ]


def _services(replicas: int) -> str:
    return _count(replicas, "service") if replicas else "started by hand"


def _passes(number: float) -> str:
    return f"{number:g} pass" if number == 1 else f"{number:g} passes"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def memory_table(rows: list[MemoryRow]) -> list[str]:
    """Return the lines of the memory table, one per role, and the sum of the main memory."""
    table = [["GiB each", "number", *(name.replace("_", " ") for name in _COLUMNS), "total"]]
    for row in rows:
        where = f"{row.role}, per GPU" if row.on_gpu else row.role
        cells = [_gib(getattr(row, name)) for name in _COLUMNS]
        total = f"{row.share_of_gpu:.0%} of GPU" if row.share_of_gpu else _gib(row.total)
        table.append([where, str(row.count), *cells, total])
    main_memory = sum(row.total * row.count for row in rows if not row.on_gpu)
    return [*align_columns(table), f"Main memory in total: about {main_memory / GIB:.1f} GiB."]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"
