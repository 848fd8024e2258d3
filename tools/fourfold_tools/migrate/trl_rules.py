"""Converts the options of TRL's GRPO that need more than a copy. The table is in `trl.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.text import clean
from fourfold_tools.migrate import common, trl_rows, trl_shared
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.documents import read_keywords, read_yaml
from fourfold_tools.migrate.draft import Draft
from fourfold_tools.migrate.flags import Flag, Flags, names_of, parse_arguments
from fourfold_tools.migrate.shell import Script, read_command
from fourfold_tools.migrate.trl import TABLE

_TABLES: Final = {"grpo": TABLE, **trl_rows.TABLES}
# Of scripts with the word reward, only those of reward models: other files have the rewards of GRPO.
_PROGRAM: Final = re.compile(
    r"(^|/)((trl/scripts/)?(grpo|sft|dpo|kto|reward_modeling)[\w-]*(\.py)?|trl\.scripts\.(grpo|sft|dpo|kto|reward)"
    r"|train_(grpo|sft|dpo|kto|reward)\.py|scripts/reward\.py|reward)$"
)
_CLASS: Final = re.compile(r"\b(GRPO|SFT|DPO|KTO|Reward)(?:Config|Trainer)\s*\(")
_EPSILON: Final = 1e-4
# Losses without clips: the option of each key.
_SOFT: Final[Mapping[str, Mapping[str, str]]] = {
    "sapo": {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"},
    "vespo": {
        "power_positive": "vespo_k_pos",
        "rate_positive": "vespo_lambda_pos",
        "power_negative": "vespo_k_neg",
        "rate_negative": "vespo_lambda_neg",
    },
}
_CORRECTIONS: Final = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence-tis",
    "sequence_mask": "sequence-sum-mask-tis",
}
_PROMPT_TOKENS: Final = 1024
_THINK_ANSWER: Final = r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"
_THINK: Final = r"<think>(?!.*<think>)(.*?)</think>.*"


def convert(text: str, options: Options, variables: Mapping[str, str], environment: Mapping[str, str]) -> Draft:
    """Return the recipe of a YAML file, of a Python file with GRPOConfig(...), or of a command such as `trl sft`.

    Raises:
        ConfigError: there is no configuration of such a trainer, or an option has a wrong value.
    """
    notes: list[str] = []
    launcher = ""
    placeholders: Mapping[str, str] = {}
    if called := _CLASS.search(text):
        calls = (f"{called[1]}Config", f"{called[1]}Trainer", "LoraConfig", "ModelConfig")
        values, varying = read_keywords(text, options.source, calls)
        trainer, guess = common.trainer(options, called[1].lower(), _TABLES, list(values))
        flags = _from_values(values, _TABLES[trainer])
        notes = [f"{name} has a value that is only known when the file runs; it is left out" for name in varying]
    elif re.search(r"(^|\s)--[a-z]", text):
        script = read_command(text, _PROGRAM, path=options.source, variables=variables, environment=environment)
        named = next((one for one in _TABLES if one in script.program.rpartition("/")[2]), "")
        words = [word[2:].partition("=")[0] for word in script.words if word.startswith("--")]
        trainer, guess = common.trainer(options, named, _TABLES, words)
        flags, launcher = _from_command(script, options, _TABLES[trainer]), " ".join(script.before)
        notes, placeholders = script.notes, script.placeholders
    else:
        values = read_yaml(text, options.source)
        trainer, guess = common.trainer(options, "", _TABLES, list(values))
        flags = _from_values(values, _TABLES[trainer])
    draft = Draft(flags)
    for problem in filter(None, (*flags.problems, *notes, guess)):
        draft.check(problem)
    trl_shared.processes(draft, options, launcher)
    common.run_name(draft, options, [("run_name", flags["run_name"]), ("output_dir", flags["output_dir"])], "trl")
    sinks = common.listed_trackers(draft, "report_to", ("none", "None"))
    settings = {"project": "project", "tensorboard_dir": "logging_dir", "wandb_entity": "wandb_entity"}
    settings["group"] = "wandb_run_group"
    common.trackers(draft, sinks, {f"logging.{key}": flag for key, flag in settings.items()})
    if trainer in trl_rows.TABLES:
        trl_rows.convert(draft, options, trainer)
    else:
        for rule in _RULES:
            rule(draft, options)
    draft.copy()
    draft.check_placeholders(placeholders)
    return draft


def _from_values(values: Mapping[str, Any], table: Mapping[str, Flag]) -> Flags:
    flags, known = Flags(table, ""), names_of(table)
    if "r" in values and "use_peft" not in values:  # LoraConfig(r=...)
        flags.values["use_peft"] = True
    for name, value in values.items():
        if name in known:
            if value is not None or table[known[name]].kind in ("any", "float", "int", "text"):
                flags.add(name, known[name], value)
        else:
            flags.add_unknown(name)
    return flags


def _from_command(script: Script, options: Options, table: Mapping[str, Flag]) -> Flags:
    if not script.found and not (script.words and script.words[0].startswith("--")):
        raise ConfigError(
            f"{options.source}: no command that runs a trainer of TRL (trl sft, or a file grpo*.py), no "
            f"GRPOConfig(...) and no YAML; give a script, a Python file or a YAML file"
        )
    words, files = list(script.words), list[str]()
    for index in range(len(words) - 1, -1, -1):
        name, equals, value = words[index].partition("=")
        if name in ("--config", "--config_file"):
            files.append(value if equals else (words[index + 1 :] or [""])[0])
            del words[index : index + (1 if equals else 2)]
    flags = parse_arguments(table, words)
    flags.problems += [f"the command reads {file}, which is a file of its own; import that file, too" for file in files]
    return flags


def _updates(draft: Draft) -> int:
    """Return the optimizer steps of one step."""
    batch = draft.lines["batch",]
    return int(batch["mini_batches_per_step"].value * common.require(draft.flags["num_iterations"], "num_iterations"))


def _batch(draft: Draft, options: Options) -> None:
    flags = draft.flags
    ranks = draft.lines["trainer",]["ranks"].value
    each = common.require(flags["per_device_train_batch_size"], "per_device_train_batch_size") * ranks
    accumulated = common.require(flags["gradient_accumulation_steps"], "gradient_accumulation_steps")
    group = common.require(flags["num_generations"], "num_generations", 2)
    generated = flags["generation_batch_size"] or each * (flags["steps_per_generation"] or accumulated)
    per_update = each * accumulated
    samples = max(generated, per_update)
    names = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    names += [name for name in ("generation_batch_size", "steps_per_generation") if flags[name]]
    if samples % group:
        raise ConfigError(
            f"{samples} samples of a step ({each // ranks} per device x {ranks} processes x {samples // each}) are no "
            f"multiple of num_generations = {group}; give the number of processes with --gpus N"
        )
    draft.set(
        "batch.prompts_per_step", samples // group, *names, "num_generations", note=f"{samples:,} samples / {group}"
    )
    common.mini_batches(draft, samples, per_update, *names)
    if generated < per_update:
        draft.check(
            f"batch.prompts_per_step: TRL samples {per_update // generated} times for one optimizer step; here it is "
            f"one step"
        )
    new = common.require(flags["max_completion_length"], "max_completion_length")
    names, context = ["vllm_max_model_length"], flags["vllm_max_model_length"]
    if not context:
        names = ["max_prompt_length", "max_completion_length"]
        context = (flags["max_prompt_length"] or _PROMPT_TOKENS) + new
        if not flags["max_prompt_length"]:
            draft.check(
                f"model.max_context_tokens = {context}: TRL has no limit of the prompt, and {_PROMPT_TOKENS} tokens "
                f"are assumed; longer prompts are left out"
            )
    draft.set("model.max_context_tokens", max(context, new + 1), *names)
    draft.leave("not needed: vllm_max_model_length limits prompt and completion together", "max_prompt_length")
    wanted = each // ranks * max(context, new + 1)
    common.tokens(draft, "batch.tokens_per_micro_batch", wanted, max(context, new + 1), "per_device_train_batch_size")


def _steps_and_rates(draft: Draft, options: Options) -> None:
    flags, updates = draft.flags, _updates(draft)
    fixed = max(math.ceil(flags["max_steps"] / updates), 1) if flags["max_steps"] > 0 else 0
    prompts = draft.lines["batch",]["prompts_per_step"].value
    count = common.steps(
        draft, options, limit=0, passes=flags["num_train_epochs"], prompts=prompts,
        names=["max_steps"] if fixed else ["num_train_epochs"], fixed=fixed,
    )  # fmt: skip
    if fixed:
        draft.leave("not needed: max_steps is set", "num_train_epochs")
    else:
        draft.leave("not needed: num_train_epochs counts", "max_steps")
    trl_shared.rates(draft, count, updates)
    trl_shared.evaluation_and_checkpoints(draft, count, updates, "num_generations_eval")


def _loss(draft: Draft, options: Options) -> None:
    flags = draft.flags
    kind, level = flags["loss_type"], flags["importance_sampling_level"]
    modes = {"grpo": "sequence-mean", "sapo": "sequence-mean", "dr_grpo": "constant-length", "luspo": "sequence-sum"}
    draft.set("algorithm.preset", "trl-grpo")
    draft.set("algorithm.aggregation", modes.get(kind, "token-mean"), "loss_type")
    if kind == "bnpo":
        draft.check(
            "algorithm.aggregation: bnpo averages over the tokens of each micro-batch; token-mean over the whole step"
        )
    high = flags["epsilon_high"] if flags["epsilon_high"] is not None else flags["epsilon"]
    high_name = "epsilon_high" if flags["epsilon_high"] is not None else "epsilon"
    if kind == "cispo":
        draft.set("algorithm.loss.kind", "cispo", "loss_type")
        draft.set("algorithm.loss.ratio_max", high, high_name)
        draft.leave("not needed: cispo bounds the ratio from above alone", "epsilon", "delta")
    elif kind in _SOFT:
        draft.set("algorithm.loss.kind", kind, "loss_type")
        for key, name in _SOFT[kind].items():
            draft.set(f"algorithm.loss.{key}", flags[name], name)
        draft.leave(f"not needed: {kind} clips nothing", "epsilon", "epsilon_high", "delta")
    else:
        sequence = level == "sequence"
        draft.set("algorithm.loss.kind", "gspo" if sequence else "ppo", "importance_sampling_level")
        draft.set("algorithm.loss.clip_low", flags["epsilon"], "epsilon")
        draft.set("algorithm.loss.clip_high", high, high_name)
        if sequence:
            draft.set("algorithm.loss.form", "sequence", "importance_sampling_level")
            draft.leave("no equivalent: the loss gspo has no second bound", "delta")
        else:
            draft.set("algorithm.loss.dual_clip", flags["delta"] or 0.0, "delta")
    if kind in ("cispo", "sapo") and level == "sequence":
        draft.check(f"algorithm.loss: {kind} has a ratio for each token; importance_sampling_level has no equivalent")
    if kind in ("cispo", "sapo", "vespo"):
        of = "sample" if kind == "vespo" else "token"
        draft.leave(f"not needed: {kind} has a ratio for each {of}", "importance_sampling_level")
    for other in _SOFT.keys() - {kind}:
        draft.leave(f"not needed without {other}", *_SOFT[other].values())
    truncated = "mask_truncated_completions"
    draft.set("algorithm.shaping.mask_truncated", flags[truncated], truncated)
    # TRL divides by the number of all samples, or by the number of the tokens that are left.
    if flags[truncated] and kind in modes:
        draft.set("algorithm.shaping.count_masked", True, truncated)


def _advantage_and_kl(draft: Draft, options: Options) -> None:
    flags = draft.flags
    given = str(flags["scale_rewards"]).lower()
    scale = {"true": "group", "false": "none"}.get(given, given)
    if scale not in ("group", "none", "batch"):
        raise ConfigError(f"scale_rewards = {scale} is unknown; choose group, batch or none")
    if flags["multi_objective_aggregation"] == "normalize_then_sum":
        draft.set("algorithm.advantage.kind", "gdpo", "multi_objective_aggregation")
        draft.set("algorithm.advantage.epsilon", _EPSILON, note="TRL's")
        draft.leave("not needed: normalize_then_sum normalises each reward", "scale_rewards")
    elif scale == "group":
        draft.set("algorithm.advantage.kind", "grpo", "scale_rewards")
    else:
        draft.set("algorithm.advantage.kind", "dr-grpo", "scale_rewards")
        if scale == "batch":
            draft.set("algorithm.whiten", "full", "scale_rewards")
            draft.check(
                "algorithm.whiten: scale_rewards = batch divides by the deviation of all rewards of the batch; here "
                "advantages are divided by theirs over the batch's tokens"
            )
    draft.set("algorithm.kl.coef", flags["beta"], "beta")
    draft.set("algorithm.kl.placement", "loss", "beta")
    draft.set("algorithm.kl.estimator", "k3", "beta")
    draft.set("algorithm.kl.k3_max", 0.0, "beta")
    weighted = "use_bias_correction_kl"
    if not flags["beta"]:
        draft.leave("not needed without beta", weighted)
        return
    draft.set("algorithm.kl.importance_weighted", flags[weighted], weighted)
    if flags[weighted] and flags["importance_sampling_level"] == "sequence":
        draft.check(
            "algorithm.kl.importance_weighted: TRL weighs by the ratio of the sample, here by that of each token"
        )
    context = draft.lines["model",]["max_context_tokens"].value
    draft.set("reference.device", "cuda")
    draft.set("reference.tokens_per_batch", max(context, common.MIN_REFERENCE_TOKENS), "beta")


def _correction(draft: Draft, options: Options) -> None:
    flags = draft.flags
    names = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
    bounds = ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
    mask = "off_policy_mask_threshold"
    weighs, threshold, folded = flags["use_vllm"] and flags[names[0]], flags[mask], flags["loss_type"] == "vespo"
    if threshold is not None and threshold <= 0:
        raise ConfigError(f"{mask} = {threshold:g} must be above 0: TRL suggests 0.5; correct it, or remove it")
    if weighs and not folded:
        kind = _CORRECTIONS[flags[names[1]]]
        draft.set("algorithm.correction.kind", kind, *names)
        draft.set("algorithm.correction.low", flags[bounds[0]] or 0.0, bounds[0])
        draft.set("algorithm.correction.high", flags[bounds[1]] or 1e9, bounds[1])
        if threshold is not None:
            draft.leave("no equivalent beside vllm_importance_sampling_correction: a recipe has one correction", mask)
            draft.check(
                f"algorithm.correction.kind = {kind}: TRL has {mask} = {threshold:g} beside it, and a recipe has one "
                f"correction; for that mask in its place, write kind = off-policy-mask and low = "
                f"{math.exp(-threshold):.6g}"
            )
        return
    if folded and flags["use_vllm"] and not weighs:
        draft.check("algorithm.loss.kind = vespo: it compares with the engine; TRL does not without its correction")
    reason = "vespo has the ratio to the engine in its weight" if weighs else "there is no such correction"
    draft.leave(f"not needed: {reason}", *names, *bounds)
    if threshold is None:
        draft.set("algorithm.correction.kind", "none", *(("loss_type",) if folded else ("use_vllm", names[0])))
    else:
        draft.set("algorithm.correction.kind", "off-policy-mask", mask)
        draft.set("algorithm.correction.low", math.exp(-threshold), mask)


def _placement(draft: Draft, options: Options) -> None:
    flags = draft.flags
    ranks = draft.lines["trainer",]["ranks"].value
    parallel = common.require(flags["vllm_tensor_parallel_size"], "vllm_tensor_parallel_size")
    shared = not flags["use_vllm"] or flags["vllm_mode"] == "colocate"
    draft.set("placement.colocated", shared, "vllm_mode")
    if shared:
        draft.set("rollout.replicas", max(ranks // parallel, 1), "use_vllm", note="on the GPUs of the trainer")
        common.colocated(draft, "vllm_gpu_memory_utilization")
        draft.set("rollout.sleep_mode", flags["vllm_enable_sleep_mode"], "vllm_enable_sleep_mode")
        if flags["beta"]:
            draft.set("reference.replicas", ranks, "beta", note="a whole model on each GPU")
    else:
        draft.set("rollout.replicas", 1, "use_vllm", note="the server")
        draft.check(
            "rollout: the options of the vLLM server are in its own command; write replicas and gpus_per_replica"
        )
        draft.leave("not needed: the server has its own", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")
        if flags["beta"]:
            draft.set("reference.replicas", 1, "beta", note="on a GPU of its own")
    trl_shared.dtype(draft)
    trl_shared.lora(draft)


def _rewards(draft: Draft, options: Options) -> None:
    flags = draft.flags
    functions, model = flags["reward_funcs"], flags["reward_model_name_or_path"]
    entries = [("reward_model_name_or_path", model)] if model else []
    entries += [("reward_funcs", name) for name in functions]
    weights = flags["reward_weights"] or []
    try:
        weights = [float(weight) for weight in (weights if isinstance(weights, list | tuple) else [weights])]
    except (TypeError, ValueError):
        raise ConfigError(f"reward_weights = {clean(str(weights), 80)} must be a list of numbers; correct it") from None
    if weights and len(weights) != len(entries):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {len(entries)} rewards; give one for each reward of "
            f"reward_funcs"
        )
    if not entries:
        draft.set("reward.function", "rewards.py:reward", note="CHECK: the configuration names no reward")
        draft.check("reward.function: the configuration names no reward; write FILE.py:FUNCTION or model")
    for index, (flag, name) in enumerate(entries):
        table = f"reward.{index}" if len(entries) > 1 else "reward"
        if len(entries) > 1:
            draft.set(f"{table}.name", _scorer_name(name, index))
        _one_reward(draft, table, flag, name)
        if weights:
            draft.set(f"{table}.weight", weights[index], "reward_weights")
    if "soft_overlong_punishment" not in functions:
        draft.leave("not needed without soft_overlong_punishment", "max_completion_len", "soft_punish_cache")


def _last(name: str) -> str:
    return re.split(r"[.:]", name)[-1]


def _scorer_name(name: str, index: int) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", _last(name)).strip("-")[:48] + f"-{index}"


def _one_reward(draft: Draft, table: str, flag: str, name: str) -> None:
    if flag == "reward_model_name_or_path":
        common.model(draft, f"{table}.model.source", name, flag)
        draft.set(f"{table}.model.device", "cuda")
        return
    # The whole names are those of open-r1; a function of the user's file may end in such a name, too.
    match name, _last(name):
        case ("accuracy", _) | (_, "accuracy_reward" | "reasoning_accuracy_reward"):
            draft.set(f"{table}.function", "math_verify", flag)
            draft.set("data.answer_field", "solution", flag, note="the column of accuracy_reward")
            draft.check(
                f"reward: {_last(name)} becomes math_verify, which compares the final expression by the same library"
            )
        case _, "think_format_reward":
            draft.set(f"{table}.function", "format", flag)
            draft.set(f"{table}.options", {"pattern": _THINK}, flag)
        case "format", _:
            draft.set(f"{table}.function", "format", flag)
            draft.set(f"{table}.options", {"pattern": _THINK_ANSWER}, flag)
        case "soft_overlong_punishment", _:
            longest, cache = draft.flags["max_completion_len"], draft.flags["soft_punish_cache"]
            draft.set(f"{table}.function", "length", flag)
            limits = {"target_tokens": longest - cache, "max_tokens": longest, "min": -1.0}
            draft.set(f"{table}.options", limits, "max_completion_len", "soft_punish_cache")
        case _, "get_soft_overlong_punishment":
            draft.set(f"{table}.function", "length", flag)
            draft.set(f"{table}.options", {"target_tokens": 1024, "max_tokens": 1280, "min": -1.0}, flag)
            draft.check("reward: length has the limits of trl grpo (1280 and 256); change them to yours")
        case _ if ":" in name:
            draft.set(f"{table}.function", name, flag)
            draft.check(f"reward: {name} is in a script that trains when it is loaded; move it to a file of its own")
        case _ if "." in name:
            module, _, function = name.rpartition(".")
            draft.set(f"{table}.function", f"{module}:{function}", flag)
        case _:
            draft.set(f"{table}.function", f"rewards.py:{name or 'reward'}", flag, note="CHECK: write the file")
            draft.check(f"reward: {name or 'a reward'} is known by its name alone; write the file that has it")


def _data(draft: Draft, options: Options) -> None:
    flags = draft.flags
    trl_shared.model_and_sources(draft)
    draft.set("data.order", "shuffled" if flags["shuffle_dataset"] else "file", "shuffle_dataset")
    column = "dataset_prompt_column"  # open-r1 makes messages of it
    draft.set("data.prompt_field", flags[column], column, note="" if flags.given(column) else "TRL's column")
    draft.set("data.chat", True, note="" if flags.given(column) else "CHECK: false if the prompts are plain texts")
    if not flags.given(column):
        draft.check(trl_shared.PLAIN_TEXTS)
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"):
        if flags.given(name) and flags[name] not in (None, 0, 1, 1.0, "1.0", "1", "0", -1, {}):
            draft.check(
                f"sampling: {name} = {flags[name]} has no equivalent; completions are sampled with temperature alone"
            )
    if flags["top_entropy_quantile"] < 1:
        draft.check("algorithm.loss: top_entropy_quantile has no equivalent; every sampled token is trained on")


_RULES: Final[tuple[Callable[[Draft, Options], None], ...]] = (
    _batch,
    _steps_and_rates,
    _loss,
    _advantage_and_kl,
    _correction,
    _placement,
    _rewards,
    _data,
)
