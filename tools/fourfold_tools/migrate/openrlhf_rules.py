"""Converts the flags of OpenRLHF's `train_ppo_ray` that need more than a copy. The table is in `openrlhf.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from fourfold.config import PRESETS
from fourfold.errors import ConfigError
from fourfold_tools.migrate import common, openrlhf_rows
from fourfold_tools.migrate import openrlhf_shared as shared
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import parse_arguments
from fourfold_tools.migrate.openrlhf import TABLE
from fourfold_tools.migrate.shell import read_command

_TABLES: Final = {"train_ppo_ray": TABLE, **openrlhf_rows.TABLES}
_PROGRAM: Final = re.compile(rf"(openrlhf\.cli\.|openrlhf/cli/|^)({'|'.join(_TABLES)})(\.py)?$")
_OTHER: Final = re.compile(r"openrlhf[./]cli[./](\w+)")
_PRESETS: Final = {
    "gae": "openrlhf-ppo",
    "reinforce": "openrlhf-reinforce++",
    "reinforce_baseline": "openrlhf-reinforce++-baseline",
    "rloo": "openrlhf-rloo",
    "group_norm": "openrlhf-grpo",
    "dr_grpo": "openrlhf-dr-grpo",
}
_WHITENED: Final = ("gae", "reinforce", "reinforce_baseline")
_CORRECTIONS: Final = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence-mask-tis"}
# Before the names had dots, these flags were for policy and critic.
_ONCE_SHARED: Final = ("adam.weight_decay", "lr_scheduler", "lr_warmup_ratio", "max_norm")
_AGENT_TURNS: Final = 64
_REWARD_SECONDS: Final = 180.0


def convert(text: str, options: Options, variables: Mapping[str, str], environment: Mapping[str, str]) -> Draft:
    """Return the recipe of a script with a command of train_ppo_ray or of another trainer, or of a text with its flags.

    Raises:
        ConfigError: there is no such command, or a flag has a wrong value.
    """
    script = read_command(text, _PROGRAM, path=options.source, variables=variables, environment=environment)
    if not script.found and not (script.words and script.words[0].startswith("--")):
        other = next((match[1] for word in script.words if (match := _OTHER.search(word))), "")
        has = f"it runs {other}, which has no equivalent" if other else f"it has {len(script.words):,} other words"
        raise ConfigError(
            f"{options.source}: no command of openrlhf.cli.train_ppo_ray; {has}. Give a script that runs python3 -m "
            f"openrlhf.cli.NAME, NAME one of {', '.join(_TABLES)}, or a file with its flags"
        )
    named = _PROGRAM.search(script.program)
    words = [word[2:].partition("=")[0] for word in script.words if word.startswith("--")]
    trainer, guess = common.trainer(options, named[2] if named else "", _TABLES, words)
    flags = parse_arguments(_TABLES[trainer], script.words)
    for name in _ONCE_SHARED:
        if f"actor.{name}" in flags.values and "." not in flags.spellings[f"actor.{name}"]:
            flags.values.setdefault(f"critic.{name}", flags[f"actor.{name}"])
            flags.spellings.setdefault(f"critic.{name}", flags.spellings[f"actor.{name}"])
    draft = Draft(flags)
    for problem in filter(None, (*flags.problems, *script.notes, guess)):
        draft.check(problem)
    common.run_name(
        draft,
        options,
        [(name, flags[name] if flags.given(name) else None) for name in ("logger.wandb.run_name", "ckpt.output_dir")],
        "openrlhf",
    )
    if trainer in openrlhf_rows.TABLES:
        openrlhf_rows.convert(draft, options, " ".join(script.before))
    else:
        for rule in _RULES:
            rule(draft, options)
    draft.copy()
    _explain_leftovers(draft)
    draft.check_placeholders(script.placeholders)
    return draft


def _lengths_and_batch(draft: Draft, options: Options) -> None:
    flags = draft.flags
    prompts = common.require(flags["rollout.batch_size"], flags.title("rollout.batch_size"))
    group = common.require(flags["rollout.n_samples_per_prompt"], flags.title("rollout.n_samples_per_prompt"))
    per_update = common.require(flags["train.batch_size"], flags.title("train.batch_size"))
    common.mini_batches(
        draft, prompts * group, per_update, "rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size"
    )
    names = ["data.max_len"]
    context = flags["data.max_len"]
    older = flags.given("prompt_max_len") or flags.spellings.get("rollout.max_new_tokens") == "generate_max_len"
    new = flags["rollout.max_new_tokens"]
    if older and not flags.given("data.max_len"):
        names, new = ["prompt_max_len", "rollout.max_new_tokens"], new or 1024
        context = flags["prompt_max_len"] + new
    elif flags.given("prompt_max_len"):
        draft.leave("not needed: data.max_len limits prompt and completion together", "prompt_max_len")
    draft.set("model.max_context_tokens", context, *names)
    if new is None:
        draft.set(
            "sampling.max_new_tokens", context - 1, "rollout.max_new_tokens", note="what the prompt leaves of max_len"
        )
    else:
        draft.set("sampling.max_new_tokens", min(new, context - 1), "rollout.max_new_tokens")
    _micro_batches(draft, context)


def _micro_batches(draft: Draft, context: int) -> None:
    flags = draft.flags
    ring = shared.sequence_parallel(draft)
    dynamic = flags["train.dynamic_batch_enable"]
    reference_names = ["rollout.micro_batch_size"]
    wanted = flags["rollout.micro_batch_size"] * context
    if dynamic:
        limit = flags["train.max_tokens_per_gpu"]
        micro_names = ["train.max_tokens_per_gpu", "train.dynamic_batch_enable"]
        micro_names += ["ds.ring_attn_size"] if ring > 1 else []
        common.tokens(draft, "batch.tokens_per_micro_batch", limit * ring, context, *micro_names)
        draft.leave("not needed with dynamic_batch_enable", "train.micro_batch_size", "rollout.micro_batch_size")
        reference_names = ["rollout.max_tokens_per_gpu"]
        wanted = flags["rollout.max_tokens_per_gpu"] or limit
    else:
        draft.leave("not needed without dynamic_batch_enable", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu")
        common.tokens(
            draft, "batch.tokens_per_micro_batch", flags["train.micro_batch_size"] * context * ring, context,
            "train.micro_batch_size", "data.max_len",
        )  # fmt: skip
    if flags["algo.kl.init_coef"] > 0:
        least = max(context, common.MIN_REFERENCE_TOKENS)
        common.tokens(draft, "reference.tokens_per_batch", max(wanted, least), context, *reference_names)
    else:
        draft.leave("not needed: kl.init_coef is 0, so there is no reference", *reference_names)


def _steps_and_rates(draft: Draft, options: Options) -> None:
    flags = draft.flags
    limit = flags["data.max_samples"] if flags.given("data.max_samples") else 0
    names = ["train.num_episodes", "rollout.batch_size"]
    if limit:
        names.append("data.max_samples")
    count = common.steps(
        draft,
        options,
        limit=limit,
        passes=flags["train.num_episodes"],
        prompts=flags["rollout.batch_size"],
        names=names,
    )
    if flags["algo.dynamic_filtering_enable"]:
        draft.check(
            f"steps = {count}: the prompts that dynamic filtering replaces come from the same pass over the data in "
            f"OpenRLHF, so that it makes fewer steps; here a step always is one step"
        )
    shared.rates(draft, "actor.", "trainer", count)
    if _has_critic(draft):
        shared.rates(draft, "critic.", "critic", count)
    shared.optimizer(draft, "actor.")
    shared.deepspeed(draft)


def _algorithm(draft: Draft, options: Options) -> None:
    flags = draft.flags
    estimator, loss = flags["algo.advantage.estimator"], flags["actor.policy_loss_type"]
    sequence = loss == "gspo"
    preset = _PRESETS[estimator]
    if sequence and estimator == "group_norm":
        preset = "openrlhf-gspo"
    draft.set("algorithm.preset", preset, "algo.advantage.estimator")
    low_high = flags["actor.eps_clip_low_high"]
    clip_names = ["actor.eps_clip_low_high"] if low_high else ["actor.eps_clip"]
    low, high = low_high or (flags["actor.eps_clip"], flags["actor.eps_clip"])
    if low_high:
        draft.leave("not needed: eps_clip_low_high is set", "actor.eps_clip")
    draft.set("algorithm.aggregation", "sequence-mean" if sequence else "token-mean", "actor.policy_loss_type")
    draft.set("algorithm.loss.kind", loss, "actor.policy_loss_type")
    if sequence:
        draft.set("algorithm.loss.form", "sequence", "actor.policy_loss_type")
    draft.set("algorithm.loss.clip_low", low, *clip_names)
    draft.set("algorithm.loss.clip_high", high, *clip_names)
    dual = flags["actor.dual_clip"] or 0.0
    if sequence:
        draft.leave("no equivalent: the loss gspo has no dual clip", "actor.dual_clip")
    else:
        draft.set("algorithm.loss.dual_clip", dual, "actor.dual_clip")
    draft.set("algorithm.entropy_coef", flags["actor.entropy_coef"] or 0.0, "actor.entropy_coef")
    if flags["actor.entropy_coef"] and flags["rollout.temperature"] != 1:
        draft.check(
            "algorithm.entropy_coef: the entropy is that at sampling.temperature; OpenRLHF takes it at temperature 1"
        )
    _advantage(draft, estimator, preset)
    _correction(draft, sequence=sequence)


def _advantage(draft: Draft, estimator: str, preset: str) -> None:
    flags = draft.flags
    table = PRESETS[preset]["advantage"]
    for key, value in table.items():
        draft.set(f"algorithm.advantage.{key}", value, "algo.advantage.estimator")
    if estimator in ("gae", "reinforce"):
        draft.set("algorithm.advantage.gamma", flags["algo.advantage.gamma"], "algo.advantage.gamma")
    else:
        draft.leave(f"not needed: OpenRLHF uses gamma 1 with {estimator}, and so does Fourfold", "algo.advantage.gamma")
    if estimator == "gae":
        draft.set("algorithm.advantage.lam", flags["algo.advantage.lambd"], "algo.advantage.lambd")
    else:
        draft.leave(f"not needed: lambda is for gae, not for {estimator}", "algo.advantage.lambd")
    if estimator in _WHITENED:
        mode = "center" if flags["algo.advantage.no_std_norm"] else "full"
        draft.set("algorithm.whiten", mode, "algo.advantage.estimator", "algo.advantage.no_std_norm")
    else:
        draft.set("algorithm.whiten", "off", "algo.advantage.estimator")
        draft.leave(f"not needed: advantages of {estimator} are not whitened", "algo.advantage.no_std_norm")


def _correction(draft: Draft, *, sequence: bool) -> None:
    flags = draft.flags
    names: tuple[str, ...] = ("algo.advantage.is_correction_enable", "algo.advantage.is_correction_type")
    bounds = "algo.advantage.is_correction_threshold"
    if flags["use_icepop"]:
        flags.values["algo.advantage.is_correction_type"] = "icepop"
        names = (*names, "use_icepop")
    if not flags["algo.advantage.is_correction_enable"] or sequence:
        draft.set("algorithm.correction.kind", "none", names[0])
        draft.leave("not needed without is_correction_enable", *names[1:], bounds)
        if sequence and flags[names[0]]:
            draft.check(
                "algorithm.correction: with gspo, OpenRLHF puts the engine's log-probabilities in place of the old "
                "ones; Fourfold compares with those that the trainer recomputes"
            )
        return
    low, high = flags[bounds]
    draft.set("algorithm.correction.kind", _CORRECTIONS[flags[names[1]]], *names)
    draft.set("algorithm.correction.low", low, bounds)
    draft.set("algorithm.correction.high", high, bounds)


def _kl(draft: Draft, options: Options) -> None:
    flags = draft.flags
    coef = max(flags["algo.kl.init_coef"], 0.0)
    draft.set("algorithm.kl.coef", coef, "algo.kl.init_coef")
    in_loss, estimator = flags["algo.kl.use_loss"], flags["algo.kl.estimator"]
    names = ["algo.kl.estimator"]
    if flags["use_kl_estimator_k3"]:
        estimator, names = "k3", ["use_kl_estimator_k3"]
    if in_loss and estimator == "k1" and coef:
        estimator = "k2"
        draft.check(
            "algorithm.kl.estimator = k2: as a term of the loss, k1 has no gradient towards the reference; k2 has "
            "that of the KL divergence. Set kl.coef = 0 to train as OpenRLHF does with k1"
        )
    draft.set("algorithm.kl.placement", "loss" if in_loss else "reward", "algo.kl.use_loss")
    draft.set("algorithm.kl.estimator", estimator, *names)
    target = flags["algo.kl.target"] or 0.0
    draft.set("algorithm.kl.target", target if coef else 0.0, "algo.kl.target")
    if target:
        draft.set("algorithm.kl.horizon", flags["algo.kl.horizon"], "algo.kl.horizon")
    else:
        draft.leave("not needed without kl.target", "algo.kl.horizon")


def _shaping_and_filter(draft: Draft, options: Options) -> None:
    flags = draft.flags
    low, high = flags["reward.clip_range"]
    around_zero = low <= 0 < high
    draft.set("algorithm.shaping.clip", high if around_zero else max(abs(low), abs(high)), "reward.clip_range")
    if around_zero and low != -high:
        draft.set("algorithm.shaping.clip_low", low, "reward.clip_range")
    elif not around_zero:
        draft.check(
            f"algorithm.shaping.clip = {max(abs(low), abs(high)):g}: a clip keeps scores of 0, and reward.clip_range "
            f"is [{low:g}, {high:g}]; clip in the reward function instead"
        )
    buffer = flags["reward.overlong_buffer_len"]
    penalty = ("reward.overlong_penalty_factor", "algorithm.shaping.overlong_penalty")
    if buffer:
        longest = draft.lines["sampling",]["max_new_tokens"].value
        draft.set(
            "algorithm.shaping.overlong_buffer", min(buffer / longest, 1.0), "reward.overlong_buffer_len",
            note=f"/ {longest:,} tokens",
        )  # fmt: skip
        draft.set(penalty[1], flags[penalty[0]], penalty[0])
    else:
        draft.set("algorithm.shaping.overlong_buffer", 0.0, "reward.overlong_buffer_len")
        draft.leave("not needed without overlong_buffer_len", penalty[0])
    coef = flags["reward.stop_properly_penalty_coef"]
    if coef is not None:
        draft.set("algorithm.shaping.truncated", coef, "reward.stop_properly_penalty_coef")
    keep, limits = "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"
    if flags[keep]:
        draft.set("algorithm.filter.keep", "mean-inside", keep)
        draft.set("algorithm.filter.low", flags[limits][0], limits)
        draft.set("algorithm.filter.high", flags[limits][1], limits)
    else:
        draft.set("algorithm.filter.keep", "all", keep)
        draft.leave("not needed without dynamic_filtering_enable", limits)


def _reward(draft: Draft, options: Options) -> None:
    flags = draft.flags
    url, folder = flags["reward.remote_url"], flags["reward.model_name_or_path"]
    groups = ("reward.num_nodes", "reward.num_gpus_per_node", "train.colocate_critic_reward")
    agent = flags["train.agent_func_path"]
    if not agent:
        _one_reward(draft, url, folder)
    if agent or url:
        who = "the agent file" if agent else "reward.remote_url"
        unused = ["reward.model_name_or_path", *groups, "reward.normalize_enable"]
        draft.leave(f"not needed: {who} has the rewards, and no reward model is loaded", *unused)
        if agent:
            draft.leave("not needed: the agent file has the rewards", "reward.remote_url")
        return
    draft.set(
        "algorithm.shaping.normalize", flags["reward.normalize_enable"], "reward.normalize_enable",
        note="by the running mean and deviation" if flags["reward.normalize_enable"] else "",
    )  # fmt: skip
    if flags["reward.normalize_enable"]:
        draft.check(
            "algorithm.shaping.normalize: scores are normalised by their running mean and deviation; OpenRLHF takes "
            "both from the config.json of the reward model"
        )


def _one_reward(draft: Draft, url: str | None, folder: str | None) -> None:
    flags = draft.flags
    if url:
        first, *others = url.split(",")
        if first.endswith(".py"):
            draft.set("reward.function", f"{first}:reward_func", "reward.remote_url")
            draft.set("reward.timeout_seconds", 60.0, note="per sample; OpenRLHF has no limit")
            draft.check(
                "reward.function runs in a sandbox: without network, and with few environment variables and 8 GiB; "
                "reward.network, environment and memory_gib change that"
            )
        else:
            draft.set("reward.http", first, "reward.remote_url")
            draft.set("reward.timeout_seconds", _REWARD_SECONDS, note="OpenRLHF's limit")
        if others:
            draft.check(
                f"reward.http has the first of {len(others) + 1} addresses, among which OpenRLHF divides the samples; "
                f"put a load balancer in front of them and give its address"
            )
    elif folder:
        common.model(draft, "reward.model.source", folder, "reward.model_name_or_path")
        draft.set("reward.model.device", "cuda")
        draft.set("reward.model.chat", False, note="it reads the text of the sampled tokens, as in OpenRLHF")
        names = ["train.colocate_critic_reward"] if flags["train.colocate_critic_reward"] else []
        count, note = flags["reward.num_nodes"] * flags["reward.num_gpus_per_node"], "one GPU each"
        if gpus := _shared_gpus(draft):
            count, note = min(count, gpus), "a whole model on each GPU"
        elif names or flags["train.colocate_all"]:
            count, note = 1, "on a GPU of its own"
        draft.set("reward.replicas", count, "reward.num_nodes", "reward.num_gpus_per_node", *names, note=note)
    else:
        draft.set("reward.function", "rewards.py:reward_func", note="CHECK: the command names no reward")
        draft.check("reward.function: the command names no reward; write FILE.py:FUNCTION, model or http")


def _shared_gpus(draft: Draft) -> int:
    """Return the GPUs that all services share; 0 if they share none."""
    flags = draft.flags
    if not flags["train.colocate_all"] or flags["train.async_enable"]:
        return 0
    ranks = flags["actor.num_nodes"] * flags["actor.num_gpus_per_node"]
    return int(max(ranks, (flags["vllm.num_engines"] or 1) * flags["vllm.tensor_parallel_size"]))


def _has_critic(draft: Draft) -> bool:
    return bool(draft.flags["algo.advantage.estimator"] == "gae")


def _critic(draft: Draft, options: Options) -> None:
    flags = draft.flags
    if not _has_critic(draft):
        reason = f"not needed: {flags['algo.advantage.estimator']} has no critic"
        draft.leave(reason, *(name for name in TABLE if name.startswith("critic.")))
        return
    source, names = flags["critic.model_name_or_path"], ["critic.model_name_or_path"]
    if source is None and not flags["reward.remote_url"] and not flags["train.agent_func_path"]:
        source, names = flags["reward.model_name_or_path"], [*names, "reward.model_name_or_path"]
    if source:
        common.model(draft, "critic.source", source, *names)
    start = max(flags["critic.freezing_steps"], 0) + 1
    draft.set("critic.policy_starts_at_step", start, "critic.freezing_steps")
    draft.set("critic.value_clip", flags["critic.value_clip"], "critic.value_clip")
    nodes, gpus = flags["critic.num_nodes"], flags["critic.num_gpus_per_node"]
    apart = not flags["train.colocate_all"] and flags["actor.num_nodes"] == 1 and flags["ds.ring_attn_size"] == 1
    draft.set(
        "critic.ranks", nodes * gpus if apart else 0, "critic.num_nodes", "critic.num_gpus_per_node",
        note="" if apart else "on the ranks of the policy",
    )  # fmt: skip
    if any(flags[f"critic.{key}"] != flags[f"actor.{key}"] for key in ("optim", "adam.betas")):
        draft.check("critic: it has the optimizer and the betas of the policy")


def _placement(draft: Draft, options: Options) -> None:
    flags = draft.flags
    nodes, gpus = flags["actor.num_nodes"], flags["actor.num_gpus_per_node"]
    ranks = common.require(nodes * gpus, "actor.num_nodes x actor.num_gpus_per_node")
    asynchronous, shared = flags["train.async_enable"], bool(_shared_gpus(draft))
    draft.set("trainer.device", "cuda")
    draft.set("trainer.ranks", ranks, "actor.num_nodes", "actor.num_gpus_per_node")
    draft.set("placement.colocated", shared, "train.colocate_all", *(["train.async_enable"] if asynchronous else []))
    draft.set("placement.trainer_nodes", nodes, "actor.num_nodes")
    if nodes > 1:
        draft.check(
            f"placement.trainer_nodes = {nodes} needs a Ray cluster; docs/two-machines.md has ranks started by hand"
        )
    engines = flags["vllm.num_engines"]
    if not engines:
        draft.check("rollout.replicas = 1: the command has no vllm.num_engines")
    draft.set("rollout.replicas", engines or 1, "vllm.num_engines")
    if shared:
        common.colocated(draft, "vllm.gpu_memory_utilization")
    else:
        draft.set("rollout.gpu_memory_utilization", flags["vllm.gpu_memory_utilization"], "vllm.gpu_memory_utilization")
    draft.set("rollout.sleep_mode", shared and flags["vllm.enable_sleep"], "vllm.enable_sleep")
    if flags["train.colocate_all"] and asynchronous:
        draft.check(
            "placement.colocated = false: with async_enable, OpenRLHF shares GPUs among policy and reference alone; "
            "here each service has its own"
        )
    _reference(draft)


def _reference(draft: Draft) -> None:
    flags = draft.flags
    sizes = ("ref.num_nodes", "ref.num_gpus_per_node")
    if flags["algo.kl.init_coef"] <= 0:
        draft.leave("not needed: kl.init_coef is 0, so there is no reference", *sizes, "train.colocate_actor_ref")
        return
    wanted = flags[sizes[0]] * flags[sizes[1]]
    draft.set("reference.device", "cuda")
    if gpus := _shared_gpus(draft):
        draft.set("reference.replicas", min(wanted, gpus), *sizes, note="a whole model on each GPU")
        draft.leave("not needed: colocate_all includes it", "train.colocate_actor_ref")
        return
    together = flags["train.colocate_actor_ref"] or flags["train.colocate_all"]
    names = [*sizes, *(["train.colocate_actor_ref"] if flags["train.colocate_actor_ref"] else [])]
    note = "on a GPU of its own" if together else "a whole model on a GPU of its own, each"
    draft.set("reference.replicas", 1 if together else wanted, *names, note=note)
    if together:
        draft.check(
            "reference.replicas = 1: policy and reference share GPUs in OpenRLHF. Fourfold shares the GPUs of all "
            "services or of none, so the reference needs one more GPU"
        )


def _data(draft: Draft, options: Options) -> None:
    flags = draft.flags
    common.model(draft, "model.source", flags["actor.model_name_or_path"], "actor.model_name_or_path")
    text = flags["data.input_template"]
    template = common.template(draft, text, flags["data.input_key"]) if text else None
    if not template:
        draft.leave("no equivalent of this template; see the points to check", "data.input_template")
    shared.train_sources(draft, "data.prompt_dataset", "data.prompt_probs", "data.prompt_split", template)
    if flags["data.max_images_per_prompt"]:
        draft.check("model.source: images are not supported; this recipe trains on the text of the prompts alone")
    if flags["rollout.top_p"] < 1:
        draft.check(
            f"sampling: rollout.top_p = {flags['rollout.top_p']:g} has no equivalent; completions are sampled from the "
            f"whole distribution"
        )


def _evaluation(draft: Draft, options: Options) -> None:
    flags = draft.flags
    evaluates = flags["eval.dataset"] and flags["eval.steps"] > 0
    best = flags["ckpt.best_metric_key"]
    if evaluates:
        sources = [part.strip() for part in flags["eval.dataset"].split(",")]
        keys = {"split": (flags["eval.split"], "eval.split")}
        if flags["train.agent_func_path"]:
            draft.leave("no equivalent: agents sample with sampling.temperature, always", "eval.temperature")
        else:
            keys["temperature"] = (flags["eval.temperature"], "eval.temperature")
        common.sources(draft, "data.eval", [{"path": (path, "eval.dataset"), **keys} for path in sources])
        draft.set("evaluation.every_steps", flags["eval.steps"], "eval.steps")
        draft.set("evaluation.samples_per_prompt", flags["eval.n_samples_per_prompt"], "eval.n_samples_per_prompt")
        draft.set("checkpoint.keep_best", 0 if best == "none" else 1, "ckpt.best_metric_key")
    else:
        reason = "not needed: the command makes no evaluations (eval.dataset and eval.steps)"
        draft.leave(reason, *(name for name in TABLE if name.startswith("eval.")), "ckpt.best_metric_key")
    shared.checkpoints_and_trackers(draft)


def _asynchrony_and_agents(draft: Draft, options: Options) -> None:
    flags = draft.flags
    mode, queue, partial = "train.async_enable", "train.async_queue_size", "train.partial_rollout_enable"
    if flags[mode]:
        draft.set("asynchrony.max_policy_lag", flags[queue], mode, queue)
        draft.set("weights.pause", "recompute" if flags[partial] else "wait", partial)
    else:
        draft.set("asynchrony.max_policy_lag", 0, mode)
        draft.leave("not needed without async_enable", queue, partial)
    if flags["train.enable_ema"]:
        draft.set("trainer.ema_decay", flags["train.ema_beta"], "train.enable_ema", "train.ema_beta")
    else:
        draft.set("trainer.ema_decay", 0.0, "train.enable_ema")
        draft.leave("not needed without enable_ema", "train.ema_beta")
    path = flags["train.agent_func_path"]
    if not path:
        return
    episodes = flags["rollout.batch_size"] * flags["rollout.n_samples_per_prompt"]
    name = "train.agent_func_path"
    draft.set("environment.replicas", 1)
    draft.set("environment.kind", "openrlhf", name)
    draft.set("environment.source", f"{path}:AgentExecutor", name)
    draft.set("environment.max_turns", _AGENT_TURNS, note="OpenRLHF has no limit")
    draft.set("environment.concurrent_episodes", episodes, note="OpenRLHF has no limit")
    draft.set("agents.source", "tasks", name)
    draft.set("agents.reward", "agent", name)
    draft.set("gateway.replicas", 1)
    draft.check(
        "environment.source runs without network, with 8 GiB and 600 s for an episode; environment.network, memory_gib "
        "and episode_seconds change that"
    )


def _explain_leftovers(draft: Draft) -> None:
    """Name the older flags whose meaning is in a line that has another name."""
    for name in ("use_kl_estimator_k3", "bf16", "use_icepop"):
        if draft.flags.given(name) and not draft.flags[name]:
            draft.leave("not needed: it is off", name)


_RULES: Final[tuple[Callable[[Draft, Options], None], ...]] = (
    _lengths_and_batch,
    _steps_and_rates,
    _algorithm,
    _kl,
    _shaping_and_filter,
    _reward,
    _critic,
    _placement,
    _data,
    _evaluation,
    _asynchrony_and_agents,
)
