"""Converts the options of verl that need more than a copy. The table is in `verl.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_tools.migrate import common
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.documents import flatten, read_yaml
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import Flag, Flags, names_of
from fourfold_tools.migrate.shell import read_command
from fourfold_tools.migrate.verl import PATTERNS, TABLE

_PROGRAM: Final = re.compile(r"(verl[./]trainer[./]|[./])main_(ppo|dapo|\w*ppo\w*)(\.py)?$")
_OTHER: Final = re.compile(r"[\w./-]*[./]\w*(main|train|eval|generat)\w*")
_OVERRIDE: Final = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.\-/@]*)=(.*)", re.DOTALL)
_REFERENCE: Final = re.compile(r"\$\{([^${}]*)\}")
_ACTOR: Final = "actor_rollout_ref.actor"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_MODEL: Final = "actor_rollout_ref.model"
_CORRECTION: Final = "algorithm.rollout_correction"
_KL_KINDS: Final = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_AGGREGATIONS: Final = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum": "sequence-sum",
    "seq-mean-token-sum-norm": "constant-length",
}
# Estimator -> advantage, whitening.
_ESTIMATORS: Final = {
    "gae": ("gae", "full"),
    "grpo": ("grpo", "off"),
    "grpo_vectorized": ("grpo", "off"),
    "grpo_passk": ("pass-at-k", "off"),
    "reinforce_plus_plus": ("reinforce", "full"),
    "reinforce_plus_plus_baseline": ("reinforce-baseline", "full"),
    "remax": ("remax", "off"),
    "rloo": ("rloo", "off"),
    "rloo_vectorized": ("rloo", "off"),
    "opo": ("opo", "off"),
    "gpg": ("gpg", "off"),
    "optimal_token_baseline": ("otb", "off"),
    "tir_optimal_token_baseline": ("otb", "off"),
}
_DISCOUNTED: Final = ("gae", "reinforce_plus_plus")
_LOSSES: Final = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "sapo": "sapo",
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "gpg": "reinforce",
}
# rollout_rs and rollout_is -> correction.
_CORRECTIONS: Final = {
    ("", ""): "none",
    ("", "token"): "tis",
    ("", "sequence"): "sequence-tis",
    ("token_k1", ""): "icepop",
    ("token_k1", "token"): "icepop",
    ("token_k3", ""): "token-k3-mask",
    ("seq_sum_k1", ""): "sequence-sum-mask",
    ("seq_sum_k1", "sequence"): "sequence-sum-mask-tis",
    ("seq_mean_k1", ""): "sequence-mask",
    ("seq_mean_k1", "token"): "sequence-mask-tis",
    ("seq_mean_k2", ""): "sequence-k2-mask",
    ("seq_mean_k3", ""): "sequence-k3-mask",
}
# Names of verl before January 2026. Their thresholds bound the ratio; those of today bound its inverse.
_OLDER_REJECTIONS: Final = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_ROUNDS: Final = 1000


def convert(text: str, options: Options, variables: Mapping[str, str], environment: Mapping[str, str]) -> Draft:
    """Return the recipe of a script with a command of main_ppo, of Hydra's overrides, or of a YAML file.

    Raises:
        ConfigError: there is no such configuration, or an option has a wrong value.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    placeholders: dict[str, str] = {}
    if _PROGRAM.search(text) or re.search(r"main_\w*ppo", text) or re.search(r"^\s*[\w.+]+\.\w+=", text, re.MULTILINE):
        script = read_command(text, _PROGRAM, path=options.source, variables=variables, environment=environment)
        values, problems = _overrides(script.words)
        notes, placeholders = [*script.notes, *(problems if script.found else [])], script.placeholders
        notes += [] if script.found else _other_program(script.words, options.source)
    elif ":" in text:
        values = flatten(read_yaml(text, options.source), options.source)
    if not values:
        raise ConfigError(
            f"{options.source}: no command of verl.trainer.main_ppo and no options; give a script that runs python3 -m "
            f"verl.trainer.main_ppo, a file with its KEY=VALUE, or a YAML file"
        )
    draft = Draft(_flags(values, options.source))
    for problem in (*draft.flags.problems, *notes):
        draft.check(problem)
    if any(re.search(r"(^|\.)megatron\.", name) for name in values) or "megatron" in str(
        values.get(f"{_ACTOR}.strategy")
    ):
        draft.check(
            "trainer.zero_stage = 3: DeepSpeed divides the model among all ranks, in place of Megatron's parallelism"
        )
    for rule in _RULES:
        rule(draft, options)
    draft.copy()
    draft.check_placeholders(placeholders)
    return draft


def _other_program(words: list[str], source: str) -> list[str]:
    """Return what to check if a script runs a variant of main_ppo; raise ConfigError if it runs no RL at all."""
    other = next((word for word in words if _OTHER.fullmatch(word)), "")
    if re.search("sft|generation|eval", re.split(r"[./]", other.removesuffix(".py"))[-1]):
        raise ConfigError(
            f"{source}: no command of verl.trainer.main_ppo; it runs {other}, which has no equivalent. Give a script "
            f"that runs python3 -m verl.trainer.main_ppo, or a file with its KEY=VALUE"
        )
    return [f"the script runs {other} in place of main_ppo; what that does differently is left out"] if other else []


def _overrides(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return values by name from Hydra's KEY=VALUE, and what is none."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if match and match[1] != "~" and not word.startswith("--"):
            values[match[2]] = _value(match[3])
        elif word.startswith("--config"):
            problems.append(f"{word[:80]}: its file has further options; import it, too, or write them as KEY=VALUE")
        elif match := re.fullmatch(r"<([\w@]+)>", word):
            problems.append(
                f"the command has ${match[1]}, which may stand for more options; import again with --define "
                f"{match[1]}='...'"
            )
        elif not word.startswith("--"):
            problems.append(f"{word[:80]!r} is no KEY=VALUE; it is left out")
    return values, problems


def _value(text: str) -> Any:
    """Return a value of Hydra's grammar: null, a list, or a text without its quotes."""
    text = text.strip()
    if text in ("null", "None", "none", ""):
        return None
    if text[:1] in "[{":
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return [part.strip(" '\"") for part in text.strip("[]{}").split(",")]
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _flags(values: Mapping[str, Any], source: str) -> Flags:
    table, known = dict(TABLE), names_of(TABLE)
    flags = Flags(table, "")
    for name, raw in values.items():
        value, found = _resolve(raw, values), known.get(name)
        if found is not None:
            if value is not None or table[found].kind in ("any", "float", "int", "text"):
                flags.add(name, found, value)
            continue
        reason = next((reason for pattern, reason in PATTERNS if pattern.search(name)), "")
        if reason:
            table[name] = Flag(name=name, kind="any", default=None, how=reason)
            flags.add(name, name, value)
        else:
            flags.add_unknown(name)
    return flags


def _resolve(value: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value with the references of OmegaConf to other options, as ${data.max_prompt_length}, filled in."""
    if isinstance(value, list):
        return [_resolve(part, values, depth) for part in value]
    if not isinstance(value, str) or depth > 8:
        return value
    if match := _REFERENCE.fullmatch(value):
        name, _, fallback = match[1].removeprefix("oc.select:").partition(",")
        return _resolve(values.get(name.strip(), fallback.strip() or None), values, depth + 1)
    return _REFERENCE.sub(lambda m: str(values.get(m[1], f"<{m[1].rpartition(':')[2]}>")), value)[:4096]


def _batch(draft: Draft, options: Options) -> None:
    flags = draft.flags
    name, logger = "trainer.experiment_name", "trainer.logger"
    common.run_name(draft, options, [(name, (flags[name] or "").replace("/", "-"))], "verl")
    sinks = common.listed_trackers(draft, logger, ("console", "file"))
    common.trackers(draft, sinks, {"logging.project": "trainer.project_name"})
    prompts = common.require(flags["data.train_batch_size"], "data.train_batch_size")
    per_update = common.require(flags[f"{_ACTOR}.ppo_mini_batch_size"], "ppo_mini_batch_size")
    group = common.require(flags[f"{_ROLLOUT}.n"], "rollout.n")
    common.mini_batches(
        draft, prompts * group, per_update * group, "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"
    )
    new, prompt = flags["data.max_response_length"], flags["data.max_prompt_length"]
    context = common.require(new, "data.max_response_length") + common.require(prompt, "data.max_prompt_length")
    draft.set("model.max_context_tokens", context, "data.max_prompt_length", "data.max_response_length")
    draft.set("data.max_prompt_tokens", prompt, "data.max_prompt_length")
    draft.set("data.order", "shuffled" if flags["data.shuffle"] else "file", "data.shuffle")
    draft.set("sampling.max_new_tokens", new, "data.max_response_length")
    ranks = flags[f"{_ACTOR}.ulysses_sequence_parallel_size"]
    micro, limit = f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"
    if flags[f"{_ACTOR}.use_dynamic_bsz"]:
        common.tokens(
            draft, "batch.tokens_per_micro_batch", flags[limit] * ranks, context, limit, f"{_ACTOR}.use_dynamic_bsz"
        )
        draft.leave("not needed with use_dynamic_bsz", micro)
    else:
        common.tokens(draft, "batch.tokens_per_micro_batch", (flags[micro] or 1) * context * ranks, context, micro)
        draft.leave("not needed without use_dynamic_bsz", limit, f"{_ACTOR}.use_dynamic_bsz")
    draft.set("seed", 42 if flags["data.seed"] is None else flags["data.seed"], "data.seed")


def _steps_and_rates(draft: Draft, options: Options) -> None:
    flags = draft.flags
    fixed, limit = flags["trainer.total_training_steps"] or 0, max(flags["data.train_max_samples"] or 0, 0)
    names = ["trainer.total_training_steps"] if fixed > 0 else ["trainer.total_epochs", "data.train_batch_size"]
    count = common.steps(
        draft, options, limit=limit, passes=flags["trainer.total_epochs"], prompts=flags["data.train_batch_size"],
        names=names, fixed=max(fixed, 0),
    )  # fmt: skip
    if fixed > 0:
        draft.leave("not needed: total_training_steps is set", "trainer.total_epochs")
    if limit:
        draft.set("data.train.size", limit, "data.train_max_samples", note="at most")
    else:
        draft.leave("not needed: all rows", "data.train_max_samples")
    prefixes = {_ACTOR: "trainer"} | ({"critic": "critic"} if _has_critic(draft) else {})
    for prefix, table in prefixes.items():
        kind = str(flags[f"{prefix}.optim.lr_scheduler_type"] or "constant")
        given, share = flags[f"{prefix}.optim.lr_warmup_steps"], flags[f"{prefix}.optim.lr_warmup_steps_ratio"]
        counted = given is not None and given >= 0
        warmup = given if counted else int((share or 0.0) * count)
        common.schedule(
            draft, table, "constant_with_warmup" if kind == "constant" else kind, [f"{prefix}.optim.lr_scheduler_type"],
            warmup=warmup,
            warmup_names=[f"{prefix}.optim.lr_warmup_steps" + ("" if counted else "_ratio")],
            final=flags[f"{prefix}.optim.min_lr_ratio"] or 0.0, final_names=[f"{prefix}.optim.min_lr_ratio"],
        )  # fmt: skip
        draft.leave(
            "not needed: lr_warmup_steps counts" if counted else "not needed: lr_warmup_steps_ratio counts",
            *(f"{prefix}.optim.lr_warmup_steps{end}" for end in ("", "_ratio")),
        )
        common.gradient_limit(draft, f"{table}.max_grad_norm", flags[f"{prefix}.grad_clip"], f"{prefix}.grad_clip")


def _has_critic(draft: Draft) -> bool:
    return bool(draft.flags["algorithm.adv_estimator"] == "gae")


def _loss(draft: Draft, options: Options) -> None:
    flags = draft.flags
    mode_name, low, high = f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"
    mode = flags[mode_name]
    kind = _LOSSES.get(mode)
    if kind is None:
        raise ConfigError(f"{mode_name} = {mode} has no equivalent; import with one of {', '.join(_LOSSES)}")
    aggregation, names = flags[f"{_ACTOR}.loss_agg_mode"], [f"{_ACTOR}.loss_agg_mode"]
    if mode in ("gspo", "sapo", "geo_mean"):
        aggregation, names = "seq-mean-token-mean", [mode_name]
        draft.leave(f"not needed: {mode} always averages over the tokens of a sample", f"{_ACTOR}.loss_agg_mode")
    draft.set("algorithm.aggregation", _AGGREGATIONS[aggregation], *names)
    if aggregation == "seq-mean-token-sum-norm":
        draft.check(
            "algorithm.aggregation = constant-length: verl adds up the samples, Fourfold averages them; gradients "
            "differ by their number, which AdamW undoes and max_grad_norm does not"
        )
    draft.set("algorithm.loss.kind", kind, mode_name)
    clip_low = flags[low] if flags[low] is not None else flags[f"{_ACTOR}.clip_ratio"]
    clip_high = flags[high] if flags[high] is not None else flags[f"{_ACTOR}.clip_ratio"]
    unused = {"ppo": (f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg")}
    taus, dual = unused["ppo"], f"{_ACTOR}.clip_ratio_c"
    if kind in ("ppo", "gspo", "gmpo"):
        draft.set("algorithm.loss.clip_low", clip_low, low)
        draft.set("algorithm.loss.clip_high", clip_high, high)
    if kind == "ppo":
        draft.set("algorithm.loss.dual_clip", flags[dual], dual)
    elif kind == "gspo":
        draft.set("algorithm.loss.form", "token", mode_name)
    elif kind == "cispo":
        draft.set("algorithm.loss.ratio_min", max(1 - clip_low, 0.0), low)
        draft.set("algorithm.loss.ratio_max", 1 + clip_high, high)
    elif kind == "sapo":
        draft.set("algorithm.loss.tau_positive", flags[taus[0]], taus[0])
        draft.set("algorithm.loss.tau_negative", flags[taus[1]], taus[1])
    draft.leave(f"not needed with the loss {mode}", *({*taus, dual, low, high} - draft.converted))


def _advantage(draft: Draft, options: Options) -> None:
    flags = draft.flags
    name = "algorithm.adv_estimator"
    estimator, scaled = flags[name], "algorithm.norm_adv_by_std_in_grpo"
    if estimator not in _ESTIMATORS:
        raise ConfigError(f"{name} = {estimator} has no equivalent; import with one of {', '.join(_ESTIMATORS)}")
    kind, whiten = _ESTIMATORS[estimator]
    if kind == "grpo" and not flags[scaled]:
        kind = "dr-grpo"
    draft.set("algorithm.preset", "verl-ppo" if estimator == "gae" else "verl-grpo", name)
    draft.set("algorithm.advantage.kind", kind, name, *([scaled] if estimator.startswith("grpo") else []))
    if kind == "pass-at-k":
        draft.set("algorithm.advantage.normalize", flags[scaled], scaled)
    if not estimator.startswith("grpo"):
        draft.leave("not needed: it is for grpo", scaled)
    draft.set("algorithm.whiten", whiten, name)
    if estimator in _DISCOUNTED:
        draft.set("algorithm.advantage.gamma", flags["algorithm.gamma"], "algorithm.gamma")
    else:
        draft.leave(f"not needed: {estimator} discounts nothing", "algorithm.gamma")
    if estimator == "gae":
        draft.set("algorithm.advantage.lam", flags["algorithm.lam"], "algorithm.lam")
    else:
        draft.leave("not needed: lambda is for gae", "algorithm.lam")
    if estimator == "gpg":
        draft.check(
            "algorithm.advantage.kind = gpg: it scales by the share of samples in groups whose scores differ, verl by "
            "that of samples whose score is not 0"
        )
    if kind == "otb":
        draft.check(
            "algorithm.advantage.kind = otb: the last tokens of a prompt's longest sample, which no other sample has, "
            "get advantage 0, in verl their return; and importance weights of rollout_is do not change the baseline"
        )
    keep, rounds = "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"
    draft.set("algorithm.filter.keep", "varied" if flags[keep] else "all", keep)
    if flags[keep]:
        draft.set("algorithm.filter.max_rounds", flags[rounds] or _ROUNDS, rounds)
    else:
        draft.leave("not needed without filter_groups.enable", rounds)


def _kl(draft: Draft, options: Options) -> None:
    flags = draft.flags
    reward = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    loss = (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")
    control = ("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")
    in_reward, in_loss = flags[reward[0]], flags[loss[0]]
    used, unused = (loss, reward) if in_loss else (reward, loss)
    coef = flags[used[1]] if in_loss or in_reward else 0.0
    draft.leave("not needed: there is no such KL term", *unused, *(() if coef else used))
    if in_loss and in_reward:
        draft.check(
            "algorithm.kl: verl has both a KL loss and a KL reward here; Fourfold has one term, and it is the loss"
        )
    name = str(flags[used[2]])
    kind = "k2" if in_loss and name.endswith("+") else _KL_KINDS.get(name.removesuffix("+"))
    if kind is None:
        kind = "k2"
        draft.check(f"algorithm.kl.estimator = k2: {name} has no equivalent")
    if in_loss and kind == "k1" and coef:
        kind = "k2"
        draft.check("algorithm.kl.estimator = k2: as a term of the loss, k1 has no gradient towards the reference")
    draft.set("algorithm.kl.coef", coef, *([used[1]] if coef else [loss[0], reward[0]]))
    draft.set("algorithm.kl.placement", "loss" if in_loss or not in_reward else "reward", used[0])
    draft.set("algorithm.kl.estimator", kind, *([used[2]] if coef else []))
    adaptive = in_reward and not in_loss and flags[control[0]] == "adaptive" and coef
    draft.set(
        "algorithm.kl.target", flags[control[1]] if adaptive else 0.0, control[0], *([control[1]] if adaptive else [])
    )
    if adaptive:
        draft.set("algorithm.kl.horizon", flags[control[2]], control[2])
    else:
        draft.leave("not needed: the coefficient is constant", *control[1:])
    estimator = draft.lines["algorithm", "advantage"]["kind"].value
    if in_reward and not in_loss and estimator == "rloo":
        draft.set("algorithm.advantage.kl_in_score", True, reward[0])
    elif in_reward and not in_loss and estimator not in ("gae", "reinforce", "remax"):
        draft.check(
            "algorithm.kl.placement = reward: verl adds the KL of a sample to its score before samples are compared; "
            "here it is subtracted from the tokens after that"
        )


def _correction(draft: Draft, options: Options) -> None:
    flags = draft.flags
    reject, weigh, limit = (f"{_CORRECTION}.{name}" for name in ("rollout_rs", "rollout_is", "rollout_is_threshold"))
    first, _, others = str(flags[reject] or "").partition(",")
    rejects, weighs = _OLDER_REJECTIONS.get(first.strip(), first.strip()), str(flags[weigh] or "")
    found = next(pair for pair in ((rejects, weighs), (rejects, ""), ("", weighs), ("", "")) if pair in _CORRECTIONS)
    kind, cap = _CORRECTIONS[found], _positive(flags[limit], 2.0)
    geometric = kind == "tis" and flags[f"{_ACTOR}.policy_loss.loss_mode"] == "geo_mean"
    kind = "geometric-tis" if geometric else kind
    used = [name for name, part in zip((reject, weigh), found, strict=True) if part]
    draft.set("algorithm.correction.kind", kind, *(used if rejects or weighs else (reject, weigh)))
    high = cap
    if found[0]:
        high = _rejection_bounds(draft, first.strip())
    elif found[1]:
        draft.set("algorithm.correction.low", 0.0)
        draft.set("algorithm.correction.high", cap, limit)
    title = f"algorithm.correction.kind = {kind}:"
    if others or found != (rejects, weighs):
        draft.check(
            f"{title} rollout_rs = {flags[reject]} with rollout_is = {flags[weigh]} has no equivalent; `fourfold plan` "
            f"prints the formula that remains"
        )
    elif found == ("token_k1", ""):
        draft.check(f"{title} the tokens that are kept are weighed by their ratio, in verl by 1")
    elif geometric:
        draft.check(f"{title} the mean of a sample's ratios is bounded by {cap:g}, in verl each ratio")
    elif all(found) and (kind == "sequence-mask-tis" or high > cap):
        draft.check(f"{title} what is kept is weighed by its whole ratio, in verl by at most {cap:g}")
    bounds = (limit, f"{_CORRECTION}.rollout_rs_threshold", f"{_CORRECTION}.rollout_rs_threshold_lower")
    draft.leave("not needed without it", *bounds)
    draft.leave("no equivalent: see algorithm.correction", reject, weigh)


def _rejection_bounds(draft: Draft, mode: str) -> float:
    """Set the bounds of a mask, and return the upper one."""
    flags, name, lower = draft.flags, f"{_CORRECTION}.rollout_rs_threshold", f"{_CORRECTION}.rollout_rs_threshold_lower"
    older = mode in _OLDER_REJECTIONS
    given = flags[name]
    if given is None and older:
        given = _positive(flags[f"{_CORRECTION}.rollout_is_threshold"], 2.0)
    parts = [_positive(part, 0.0) for part in str(given).partition(",")[0].split("_", 1)]
    of_ratio = older or mode.endswith("_k1")
    if 0.0 in parts or (len(parts) == 2 and not of_ratio):
        raise ConfigError(
            f"{name} = {given} must be a positive number, or LOWER_UPPER with a mode of k1, for rollout_rs = {mode}; "
            f"correct it in the file"
        )
    high = parts[-1]
    low = parts[0] if len(parts) == 2 else 1 / high
    if older:
        low = flags[lower] or low
    elif of_ratio:  # k1 is the log of the inverse ratio
        low, high = 1 / high, 1 / low
    if of_ratio:
        draft.set("algorithm.correction.low", low, lower if older else name)
    draft.set("algorithm.correction.high", high, name)
    return high


def _positive(value: Any, fallback: float) -> float:
    try:
        return float(value) if value is not None and float(value) > 0 else fallback
    except (TypeError, ValueError):
        return fallback


def _placement(draft: Draft, options: Options) -> None:
    flags = draft.flags
    gpus, nodes = flags["trainer.n_gpus_per_node"], flags["trainer.nnodes"]
    ranks = common.require(gpus, "trainer.n_gpus_per_node") * common.require(nodes, "trainer.nnodes")
    parallel = common.require(flags[f"{_ROLLOUT}.tensor_model_parallel_size"], "tensor_model_parallel_size")
    draft.set("trainer.device", "cuda")
    draft.set("trainer.ranks", ranks, "trainer.n_gpus_per_node", "trainer.nnodes")
    draft.set("trainer.zero_stage", 3, note="FSDP divides weights, gradients and optimizer, too")
    draft.set("model.dtype", "bfloat16", note="float32 masters, as in verl")
    draft.set("placement.trainer_nodes", nodes, "trainer.nnodes")
    if nodes > 1:
        draft.check(
            f"placement.trainer_nodes = {nodes} needs a Ray cluster; docs/two-machines.md has ranks started by hand"
        )
    draft.set("rollout.replicas", max(ranks // parallel, 1), "trainer.n_gpus_per_node", "trainer.nnodes")
    draft.set("rollout.gpus_per_replica", parallel, f"{_ROLLOUT}.tensor_model_parallel_size")
    common.colocated(draft, f"{_ROLLOUT}.gpu_memory_utilization")
    group = flags[f"{_ROLLOUT}.n"]
    for name, key, least in (
        (f"{_ROLLOUT}.max_num_batched_tokens", "rollout.max_batched_tokens", 64),
        (f"{_ROLLOUT}.max_num_seqs", "rollout.max_concurrent_samples", group),
    ):
        if flags.given(name) and flags[name]:
            draft.set(key, max(flags[name], least), name)
    if draft.lines["algorithm", "kl"]["coef"].value:
        context = draft.lines["model",]["max_context_tokens"].value
        draft.set("reference.device", "cuda")
        draft.set("reference.replicas", ranks, note="a whole model on each GPU")
        name = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
        least = max(context, common.MIN_REFERENCE_TOKENS)
        common.tokens(draft, "reference.tokens_per_batch", flags[name] or least, context, name)
    else:
        draft.leave("not needed: there is no reference", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu")


def _models(draft: Draft, options: Options) -> None:
    flags = draft.flags
    common.model(draft, "model.source", flags[f"{_MODEL}.path"], f"{_MODEL}.path")
    if flags[f"{_MODEL}.lora_rank"]:
        draft.set("trainer.lora.alpha", flags[f"{_MODEL}.lora_alpha"], f"{_MODEL}.lora_alpha")
        draft.set("trainer.lora.target_modules", list(flags[f"{_MODEL}.target_modules"]), f"{_MODEL}.target_modules")
        draft.set("weights.adapters", "merged" if flags[f"{_MODEL}.lora.merge"] else "auto", f"{_MODEL}.lora.merge")
    else:
        names = [f"{_MODEL}.lora_alpha", f"{_MODEL}.target_modules", f"{_MODEL}.lora.merge"]
        draft.leave("not needed without lora_rank", *names)
    if not _has_critic(draft):
        estimator = flags["algorithm.adv_estimator"]
        names = [name for name in flags.table if name.startswith("critic.")]
        draft.leave(f"not needed: {estimator} has no critic", *names, "trainer.critic_warmup")
        return
    if flags["critic.model.path"]:
        common.model(draft, "critic.source", flags["critic.model.path"], "critic.model.path")
    draft.set("critic.learning_rate", flags["critic.optim.lr"], "critic.optim.lr")
    draft.set("critic.weight_decay", flags["critic.optim.weight_decay"], "critic.optim.weight_decay")
    draft.set("critic.value_clip", flags["critic.cliprange_value"], "critic.cliprange_value")
    draft.set("critic.policy_starts_at_step", max(flags["trainer.critic_warmup"], 1), "trainer.critic_warmup")


def _rewards(draft: Draft, options: Options) -> None:
    flags = draft.flags
    path, name = "custom_reward_function.path", "custom_reward_function.name"
    if flags["reward_model.enable"]:
        common.model(
            draft,
            "reward.model.source",
            flags["reward_model.model.path"],
            "reward_model.enable",
            "reward_model.model.path",
        )
        draft.set("reward.model.device", "cuda")
        pool = "reward_model.enable_resource_pool"
        draft.set("reward.model.own_gpus", flags[pool], pool)
    elif flags[path]:
        draft.set("reward.function", f"{flags[path]}:fourfold_reward", path, name, note="CHECK: add the adapter")
        draft.check(
            f"reward.function: add to {flags[path]}: def fourfold_reward(sample): return {flags[name]}(sample.metadata["
            f'"data_source"], sample.completion, sample.answer_value, sample.metadata.get("extra_info"))'
        )
    else:
        draft.set("reward.function", "math_verify", note="CHECK: verl chooses by the column data_source")
        draft.check(
            "reward.function = math_verify: verl chooses the reward by the column data_source; math_verify compares "
            "final expressions, last_number numbers, code_tests programs, and [[reward]] where = {data_source = [...]} "
            "mixes them"
        )
    if not flags["reward_model.enable"]:
        draft.leave(
            "not needed without reward_model.enable",
            "reward_model.model.path",
            "reward_model.enable",
            "reward_model.enable_resource_pool",
        )
    if not flags[path] or flags["reward_model.enable"]:
        draft.leave("not needed without custom_reward_function.path", name, path)
    prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if flags[f"{prefix}.enable"]:
        longest = flags["data.max_response_length"]
        draft.set("algorithm.shaping.overlong_buffer", min(flags[f"{prefix}.len"] / longest, 1.0), f"{prefix}.enable",
                  f"{prefix}.len", note=f"/ {longest:,} tokens")  # fmt: skip
    else:
        draft.set("algorithm.shaping.overlong_buffer", 0.0, f"{prefix}.enable")
        draft.leave("not needed without overlong_buffer_cfg.enable", f"{prefix}.len", f"{prefix}.penalty_factor")


def _data(draft: Draft, options: Options) -> None:
    flags = draft.flags
    files = "data.train_files"
    common.sources(draft, "data.train", [{"path": (file, files)} for file in flags[files] if file])
    draft.set("data.answer_field", "reward_model.ground_truth", note="of verl's files")
    for name, off in ((f"{_ROLLOUT}.top_p", 1), (f"{_ROLLOUT}.top_k", -1)):
        if flags[name] not in (off, 0, None):
            draft.check(
                f"sampling: {name} = {flags[name]} has no equivalent; completions are sampled with temperature alone"
            )
    every, held_out = flags["trainer.test_freq"], "data.val_files"
    held_out_files = [file for file in flags[held_out] if file]
    samples, temperature = f"{_ROLLOUT}.val_kwargs.n", f"{_ROLLOUT}.val_kwargs.temperature"
    if every and every > 0 and held_out_files:
        common.sources(draft, "data.eval", [
            {"path": (file, held_out), "temperature": (flags[temperature], temperature)} for file in held_out_files
        ])  # fmt: skip
        draft.set("evaluation.every_steps", every, "trainer.test_freq")
        draft.set("evaluation.samples_per_prompt", flags[samples], samples)
    else:
        draft.leave("not needed: test_freq makes no evaluations", held_out, "trainer.test_freq", samples, temperature)
    saves = flags["trainer.save_freq"]
    draft.set("checkpoint.every_steps", saves if saves and saves > 0 else 10, "trainer.save_freq")
    if flags["trainer.max_actor_ckpt_to_keep"]:
        draft.set("checkpoint.keep", flags["trainer.max_actor_ckpt_to_keep"], "trainer.max_actor_ckpt_to_keep")


_RULES: Final[tuple[Callable[[Draft, Options], None], ...]] = (
    _batch,
    _steps_and_rates,
    _loss,
    _advantage,
    _kl,
    _correction,
    _placement,
    _models,
    _rewards,
    _data,
)
