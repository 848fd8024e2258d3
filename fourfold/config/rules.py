"""Checks a recipe across its tables. Checks within one table are validators of that table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fourfold.address import is_loopback, split_target
from fourfold.bounds import TRAIN_MESSAGE_BYTES
from fourfold.config.agents import CONSTRAINED_TOOL_PARSERS
from fourfold.config.rows import check_no_rows, check_rows

# Encoding of a token: id, log-probability and rewards, two masks; and the fields that a sample has once.
_TOKEN_BYTES: Final = 4 + 4 + 4 + 2
_REFERENCE_BYTES: Final = 4
_SAMPLE_BYTES: Final = 4096

if TYPE_CHECKING:
    from fourfold.config.schema import Config


def check_tables(config: Config) -> None:
    """Check all that involves keys of several tables; ValueError has value, rule and fix of the first mistake."""
    if config.needs_engines:
        check_no_rows(config)
    else:
        check_rows(config)
    _check_lengths(config)
    if config.checkpoint.keep_best and not config.data.held_out:
        raise ValueError(
            f"checkpoint.keep_best = {config.checkpoint.keep_best} needs held-out scores, and there is no held-out "
            f"data; add [data.holdout] or [data.eval], or set it to 0"
        )
    _check_weight_backend(config)
    _check_asynchrony(config)
    _check_agents(config)
    _check_placement(config)
    _check_trainer_nodes(config)
    _check_min_ranks(config)
    _check_concurrent_samples(config)
    _check_ports(config)
    batch = config.batch
    if config.needs_engines:
        config.algorithm.check_batch(group_size=batch.group_size, samples_per_step=batch.samples_per_step)
        _check_units(config)
    _check_reference(config)
    _check_ranks(config)
    _check_precision(config)


def _check_lengths(config: Config) -> None:
    context = config.model.max_context_tokens
    lengths = [("sampling.max_new_tokens", config.sampling.max_new_tokens)]
    lengths += [
        (f"data.eval {held_out.name}: max_new_tokens", held_out.max_new_tokens) for held_out in config.eval_sets
    ]
    for key, length in lengths:
        if length >= context:
            raise ValueError(
                f"{key} = {length} leaves no room for a prompt; it must be below model.max_context_tokens = {context}"
            )
    budgets = [("batch.tokens_per_micro_batch", config.batch.tokens_per_micro_batch)]
    if config.needs_reference:
        budgets.append(("reference.tokens_per_batch", config.reference.tokens_per_batch))
    for key, tokens in budgets:
        if tokens < context:
            raise ValueError(
                f"{key} = {tokens} cannot hold one sample of model.max_context_tokens = {context}; raise the first or "
                f"lower the second"
            )

    token_bytes = _TOKEN_BYTES + (_REFERENCE_BYTES if config.needs_reference or config.prepares_reference else 0)
    token_bytes += 2 * _REFERENCE_BYTES * config.algorithm.loss.teacher_tokens  # id and log-probability of each
    most = (TRAIN_MESSAGE_BYTES - _SAMPLE_BYTES) // token_bytes
    if context > most:
        raise ValueError(
            f"model.max_context_tokens = {context}: a sample of that length has {context * token_bytes} bytes, and "
            f"TrainStep carries at most {TRAIN_MESSAGE_BYTES} bytes of one sample; lower it to {most}"
        )


def _check_units(config: Config) -> None:
    """Check that the samples of a group that are compared with each other fit in one micro-batch."""
    selection, batch, context = config.algorithm.selection, config.batch, config.model.max_context_tokens
    count = batch.group_size if selection.kind == "all-pairs" else 2
    if selection.makes_pairs and batch.tokens_per_micro_batch < count * context:
        raise ValueError(
            f"batch.tokens_per_micro_batch = {batch.tokens_per_micro_batch} cannot hold {count} samples of "
            f"model.max_context_tokens = {context}, and algorithm.selection.kind = `{selection.kind}` keeps so many "
            f"together; raise the first to {count * context}, or lower the second"
        )


def _check_reference(config: Config) -> None:
    """Check `reference.source`, and refuse keys for scores where the advantages read a teacher alone."""
    algorithm, source = config.algorithm, config.reference.source
    if source and not config.needs_reference:
        raise ValueError(
            f"reference.source = {source!r} has no effect: no term of the loss reads a reference; remove it, or set "
            f"algorithm.kl.coef, or algorithm.preset = `distill` or `on-policy-distill`"
        )
    if algorithm.loss.teacher_tokens and not source:
        raise ValueError(
            f"algorithm.loss.kind = `{algorithm.loss.kind}` learns from a teacher; set reference.source to its model"
        )
    if not algorithm.distills:
        return
    kind = f"algorithm.advantage.kind = `{algorithm.advantage.kind}`"
    if not source:
        raise ValueError(f"{kind} learns from a teacher; set reference.source to its model")
    if config.data.curriculum is not None:
        raise ValueError(f"data.curriculum draws prompts by their scores, which {kind} does not read; remove it")
    if not config.needs_scorer and config.reward != type(config).model_fields["reward"].get_default():
        raise ValueError(
            f"[reward] has no effect: {kind} reads no score; remove the table, or add held-out prompts ([data.holdout] "
            f"or [data.eval]), whose answers are then scored"
        )


def _check_asynchrony(config: Config) -> None:
    lag = config.asynchrony.max_policy_lag
    if not lag:
        return
    if config.rollout.sleep_mode:
        raise ValueError(
            f"asynchrony.max_policy_lag = {lag} has engines sample while the trainer trains, and rollout.sleep_mode "
            f"frees their memory meanwhile; set rollout.sleep_mode = false or max_policy_lag = 0"
        )


def _check_agents(config: Config) -> None:
    agents, group_size = config.agents, config.batch.group_size
    if agents.source == "none" and (config.environment.replicas or config.gateway.replicas):
        table = "environment" if config.environment.replicas else "gateway"
        raise ValueError(
            f"{table}.replicas = {getattr(config, table).replicas} starts services for agents, and agents.source = "
            f'"none" trains on none of their sessions; set agents.source = "tasks" or "groups", or replicas = 0'
        )
    if config.environment.tools and config.environment.replicas and not config.rollout.tool_parser:
        raise ValueError(
            'environment.tools gives the model tools, and rollout.tool_parser = "" reads no calls of them; set it to '
            'the parser of the model, such as "hermes"'
        )
    if config.environment.tool_calls != "free":
        _check_tool_calls(config)
    if agents.min_attempts > group_size:
        raise ValueError(
            f"agents.min_attempts = {agents.min_attempts} is above batch.group_size = {group_size}; lower it, or set "
            f"it to 0 for all attempts"
        )
    if agents.source != "none" and config.algorithm.advantage.needs_greedy_sample:
        raise ValueError(
            f'agents.source = "{agents.source}" and algorithm.advantage.kind = "{config.algorithm.advantage.kind}" '
            f"exclude each other: agents make no greedy attempt; choose another advantage"
        )
    process = next((t.name for t in config.reward if t.model is not None and t.model.kind == "process"), "")
    if process and agents.source != "none" and agents.reward == "service":
        raise ValueError(
            f'reward {process}: model.kind = "process" scores the steps of one answer, and agents.source = '
            f'"{agents.source}" has sessions of several; use a reward model of whole texts, or agents.source = "none"'
        )
    _check_data(config)


def _check_tool_calls(config: Config) -> None:
    """Check that there are tools, and a grammar for their calls."""
    environment, parser = config.environment, config.rollout.tool_parser
    if not environment.tools:
        raise ValueError(
            f'environment.tool_calls = "{environment.tool_calls}" constrains calls of tools, and environment.tools is '
            f'empty; name tools, or set tool_calls = "free"'
        )
    if parser not in CONSTRAINED_TOOL_PARSERS:
        raise ValueError(
            f'environment.tool_calls = "{environment.tool_calls}" needs a grammar for calls, and there is none for '
            f'rollout.tool_parser = "{parser}"; use one of {", ".join(CONSTRAINED_TOOL_PARSERS)}, or set tool_calls = '
            f'"free"'
        )


def _check_data(config: Config) -> None:
    """Check that there is training data, unless agents bring their own groups."""
    data, source = config.data, config.agents.source
    if not data.train and source != "groups":
        raise ValueError(
            f'data.train is missing, and agents.source = "{source}" takes its prompts from there; add [data.train] '
            f'with path = "FILE.jsonl", or set agents.source = "groups"'
        )
    if data.train and source == "groups":
        raise ValueError(
            'data.train is set, and agents.source = "groups" trains on the groups of agents alone; remove data.train, '
            'or set agents.source = "tasks"'
        )
    for held_out in data.eval if source != "none" else ():
        if held_out.temperature is not None or held_out.max_new_tokens is not None:
            raise ValueError(
                f"data.eval {held_out.title}: temperature and max_new_tokens are for answers that the coordinator "
                f'asks for, and agents.source = "{source}" has agents that sample as [sampling] says; remove the keys'
            )
    if data.held_out and source == "groups" and not config.needs_scorer:
        raise ValueError(
            'data.eval needs scores, and agents.reward = "agent" has no reward service; set agents.reward = "service", '
            "or remove data.eval"
        )


def _check_weight_backend(config: Config) -> None:
    """Check that weights that go from GPU to GPU start and end on GPUs."""
    backend, trainer = config.weights.backend, config.trainer
    if backend not in ("cuda_ipc", "nccl"):
        return
    for key, valid, value in (
        ("trainer.device", trainer.device == "cuda", f'"{trainer.device}"'),
        *((pool.key("gpus_per_replica"), pool.gpus_per_replica > 0, "0") for pool in config.rollout_pools),
        ("trainer.offload", "parameters" not in trainer.offload, f'"{trainer.offload}"'),
    ):
        if not valid:
            raise ValueError(
                f'weights.backend = "{backend}" moves weights between GPUs, and {key} = {value}; set weights.backend = '
                f'"auto", or keep both on GPUs'
            )


def _check_placement(config: Config) -> None:
    if not config.placement.colocated:
        return
    if config.trainer.device != "cuda":
        raise ValueError(
            f'placement.colocated = true needs services on GPUs, and trainer.device = "{config.trainer.device}"; set '
            f'it to "cuda"'
        )
    for pool in config.rollout_pools:
        if not pool.gpus_per_replica:
            raise ValueError(
                f"placement.colocated = true needs services on GPUs, and {pool.key('gpus_per_replica')} = 0; set it to "
                f"at least 1"
            )
    if config.weights.backend == "nccl":
        raise ValueError(
            'weights.backend = "nccl" and placement.colocated = true exclude each other: NCCL refuses two ranks on one '
            'GPU; set weights.backend = "auto"'
        )
    for pool in config.rollout_pools:
        if pool.kv_cache_gib is None:
            raise ValueError(
                f"placement.colocated = true needs {pool.key('kv_cache_gib')}: an engine that measures the free memory "
                f"fails when another service takes or frees some at the same time; set it to what the trainer leaves "
                f"(`fourfold plan` shows both), such as 8"
            )
    asked = [*(pool.gpu for pool in config.rollout_pools), config.trainer.gpu]
    asked += [config.reference.gpu] if config.reference_on_gpus else []
    rewards = [(table, model) for table, model in config.reward_models_on_gpus if not model.own_gpus]
    asked += [model.gpu for _, model in rewards]
    if len(types := set(asked) - {""}) > 1:
        raise ValueError(
            f"placement.colocated = true has services share GPUs, and they ask for {' and '.join(sorted(types))}; ask "
            f"for one type of GPU, set own_gpus = true for a reward model, or placement.colocated = false"
        )
    engines = sum(pool.replicas * pool.gpus_per_replica for pool in config.rollout_pools)
    count = max(engines, config.trainer_processes)
    held = [("reference", config.reference.replicas, 1)] if config.reference_on_gpus else []
    held += [(f"[[reward]] {table.name!r}", table.replicas, model.gpus_per_replica) for table, model in rewards]
    for name, replicas, gpus in held:
        if replicas * gpus > count:
            more = "" if name == "reference" else ", or set own_gpus = true for the model"
            raise ValueError(
                f"{name}.replicas = {replicas} on {count} shared GPUs puts two copies of one model on a GPU; set it to "
                f"at most {count // gpus}{more}"
            )


def _check_trainer_nodes(config: Config) -> None:
    """Check that the trainer can be divided among its nodes."""
    nodes, trainer = config.placement.trainer_nodes, config.trainer
    if nodes == 1:
        return
    text = f"placement.trainer_nodes = {nodes}"
    if trainer.ranks % nodes:
        more = -(-trainer.ranks // nodes) * nodes
        raise ValueError(
            f"{text} must divide trainer.ranks = {trainer.ranks}: every node holds as many ranks; set it to a divisor, "
            f"or trainer.ranks to {more}"
        )
    if config.critic_apart:
        raise ValueError(
            f"{text} and critic.ranks = {config.critic.ranks} exclude each other: a critic with ranks of its own is on "
            f"one machine with the policy; set critic.ranks = 0, or trainer_nodes = 1"
        )
    if config.weights.backend in ("shm", "cuda_ipc"):
        raise ValueError(
            f'{text} and weights.backend = "{config.weights.backend}" exclude each other: no process maps memory of '
            f'two machines; set weights.backend = "auto"'
        )
    if trainer.attach_seconds >= trainer.step_timeout_seconds:
        raise ValueError(
            f"{text}: trainer.attach_seconds = {trainer.attach_seconds:g} must be below trainer.step_timeout_seconds = "
            f"{trainer.step_timeout_seconds:g}, which limits the whole start; lower the first"
        )
    held = trainer.ranks // nodes
    for pool in config.rollout_pools if config.placement.colocated else ():
        if pool.replicas and held % pool.gpus_per_replica:
            raise ValueError(
                f"{text} and placement.colocated = true: {pool.key('gpus_per_replica')} = {pool.gpus_per_replica} does "
                f"not divide the {held} GPUs that the trainer has on each node, and an engine would be on two nodes; "
                f"set it to a divisor of {held}"
            )


def _check_min_ranks(config: Config) -> None:
    """Check that a trainer can go on with fewer ranks before the run gives it up."""
    trainer, nodes, wait = config.trainer, config.placement.trainer_nodes, config.retry.service_wait_seconds
    if not trainer.min_ranks:
        return
    text, held = f"trainer.min_ranks = {trainer.min_ranks}", trainer.ranks // nodes
    if trainer.attach_seconds >= wait:
        raise ValueError(
            f"{text}: trainer.attach_seconds = {trainer.attach_seconds:g} must be below retry.service_wait_seconds = "
            f"{wait:g}, after which the run ends without a trainer; lower the first, or raise the second to that and "
            f"the time that the model takes to load"
        )
    if nodes > 1 and trainer.min_ranks % held:
        raise ValueError(
            f"{text} must be a multiple of the {held} ranks on each of placement.trainer_nodes = {nodes}, because "
            f"nodes are lost as a whole; set it to {-(-trainer.min_ranks // held) * held}"
        )
    if config.critic_apart:
        raise ValueError(
            f"{text} and critic.ranks = {config.critic.ranks} exclude each other: a critic with ranks of its own is on "
            f"one machine with the policy; set critic.ranks = 0, or min_ranks = 0"
        )


def _check_concurrent_samples(config: Config) -> None:
    """Check that the samples of one prompt fit into an engine. A limit that is derived always has room for them."""
    rollout = config.rollout
    samples = {"batch.group_size": config.batch.group_size}
    for held_out in config.eval_sets:
        inherits = held_out.source is None or held_out.source.samples_per_prompt is None
        key = "evaluation.samples_per_prompt" if inherits else f"data.eval {held_out.name}: samples_per_prompt"
        samples[key] = held_out.samples_per_prompt
    for pool in config.rollout_pools:
        if (limit := pool.max_concurrent_samples) is None:
            continue
        text = f"{pool.key('max_concurrent_samples')} = {limit}"
        for key, count in samples.items():
            if count > limit:
                raise ValueError(
                    f"{text} is below {key} = {count}, and the samples of a prompt go to an engine in one call; raise "
                    f"it to at least {count}, remove it (it is then derived from the batch), or lower {key}"
                )
            if count == limit and rollout.public_listen:
                raise ValueError(
                    f"{text} equals {key}, and rollout.public_listen needs room for the samples of agents; raise it to "
                    f"at least {count + 1}, or remove it (it is then derived from the batch)"
                )


def _check_precision(config: Config) -> None:
    """Refuse gradients that are summed in bfloat16: a sum of many micro-batches loses what is 256 times smaller.

    The masters are float32 at every stage. At stage 0 DeepSpeed has no buffer for a sum in another format.
    """
    if config.trainer.zero_stage == 0 and config.model.dtype == "bfloat16":
        raise ValueError(
            "trainer.zero_stage = 0 adds the gradients of micro-batches in model.dtype = `bfloat16`; set zero_stage = "
            "1, which adds them in float32, or model.dtype = `float32`"
        )


def _check_ranks(config: Config) -> None:
    """Check that every rank gets a sample in every mini-batch."""
    batch, trainer = config.batch, config.trainer
    samples, mini_batches = batch.samples_per_step, batch.mini_batches_per_step
    if config.critic_apart and trainer.sequence_parallel_size > 1:
        raise ValueError(
            f"critic.ranks = {config.critic.ranks} and trainer.sequence_parallel_size = "
            f"{trainer.sequence_parallel_size} exclude each other; set critic.ranks = 0: the critic then shares the "
            f"ranks of the policy"
        )
    if config.critic_apart and samples < config.critic.ranks * mini_batches:
        raise ValueError(
            f"{samples} samples in {mini_batches} mini-batches cannot feed critic.ranks = {config.critic.ranks}; lower "
            f"it, or raise batch.prompts_per_step"
        )
    groups = trainer.data_parallel_size
    if samples < groups * mini_batches:
        ranks = "trainer ranks" if trainer.sequence_parallel_size == 1 else "groups of trainer ranks"
        if batch.rows_per_step:
            raise ValueError(
                f"batch.rows_per_step = {batch.rows_per_step} cannot feed {groups} {ranks} in {mini_batches} "
                f"mini-batches; raise it to at least {groups * mini_batches}"
            )
        raise ValueError(
            f"{batch.prompts_per_step} prompts x {batch.group_size} per group = {samples} samples cannot feed {groups} "
            f"{ranks} in {mini_batches} mini-batches; raise batch.prompts_per_step to at least "
            f"{-(-groups * mini_batches // batch.group_size)}"
        )


def _check_ports(config: Config) -> None:
    """Check the ports for callers outside of the run, as each service does at its start."""
    public = {name: getattr(config, name).public_listen for name in ("rollout", "gateway", "view")}
    ports = {f"{name}.public_listen": listen for name, listen in public.items()}
    for key, listen in [*ports.items(), ("gateway.http_listen", config.gateway.http_listen)]:
        if not listen:
            continue
        try:
            host, _ = split_target(listen)
        except ValueError as error:
            raise ValueError(f"{key} = {error}") from None
        if not config.security.directory and not is_loopback(host):
            raise ValueError(
                f'{key} = "{listen}" is beyond loopback, where a port needs TLS; run `fourfold certs DIR` and set '
                f"security.directory and security.tokens_file, or listen on 127.0.0.1"
            )
        if config.security.directory and key in ports and not config.security.tokens_file:
            raise ValueError(
                f'{key} = "{listen}" needs bearer tokens; set security.tokens_file to the tokens.txt that `fourfold '
                f"certs` made, or remove the key"
            )
