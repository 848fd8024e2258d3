"""Reads a recipe from TOML and checks it, and writes it back. Errors give file, line and the nearest known key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Final

import pydantic

from fourfold.config.layers import Layers, read_layers
from fourfold.config.older_recipes import RefusedKey, drop_removed
from fourfold.config.schema import Config
from fourfold.errors import ConfigError
from fourfold.table import Table
from fourfold.text import nearest_name

# Names of other systems, by the key that they are for; with its table where several have one of that name.
_OTHER_NAMES: Final = {
    "learning_rate": "lr actor_learning_rate",
    "weight_decay": "wd l2",
    "max_grad_norm": "max_norm clip_grad grad_clip gradient_clipping",
    "warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "warmup_share": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "schedule": "scheduler lr_scheduler lr_scheduler_type",
    "trainer.lora.rank": "lora_rank lora_r",
    "trainer.gradient_checkpointing": "gradient_checkpointing",
    "group_size": "num_generations n_samples_per_prompt rollout_n n",
    "prompts_per_step": "batch_size train_batch_size rollout_batch_size",
    "mini_batches_per_step": "mini_batch_size ppo_mini_batch_size global_batch_size gradient_accumulation_steps",
    "tokens_per_micro_batch": "micro_batch_size micro_train_batch_size per_device_train_batch_size max_tokens_per_gpu",
    "epochs_per_step": "num_iterations ppo_epochs epochs num_epochs",
    "max_new_tokens": "max_tokens max_completion_length max_response_length generate_max_len rollout_max_response_len",
    "max_prompt_tokens": "max_prompt_length prompt_max_len",
    "max_context_tokens": "max_len max_length max_model_len max_seq_len",
    "algorithm.kl.coef": "beta kl_coef init_kl_coef kl_loss_coef",
    "algorithm.kl.estimator": "kl_estimator kl_loss_type",
    "algorithm.loss.clip_low": "eps_clip epsilon clip_ratio clip_range",
    "algorithm.loss.clip_high": "eps_clip_high epsilon_high clip_ratio_high",
    "algorithm.advantage.kind": "adv_estimator advantage_estimator",
    "algorithm.advantage.lam": "lam lambd gae_lambda",
    "algorithm.advantage.gamma": "gamma",
    "steps": "max_steps total_steps num_steps total_training_steps num_episodes total_epochs num_train_epochs",
    "source": "model_path pretrain model_name_or_path hf_checkpoint",
    "gpus_per_replica": "tensor_parallel_size tp vllm_tensor_parallel_size tensor_model_parallel_size",
    "replicas": "num_engines vllm_num_engines",
    "ranks": "num_gpus world_size num_processes nproc_per_node n_gpus_per_node num_gpus_per_node",
    "trainer_nodes": "nnodes num_nodes",
    "data.train.path": "dataset dataset_name prompt_data prompt_dataset train_files",
    "prompt_field": "input_key prompt_key",
    "answer_field": "label_key answer_key",
    "reward.function": "remote_rm_url reward_funcs",
    "checkpoint.every_steps": "save_steps save_freq save_interval",
    "evaluation.every_steps": "eval_steps test_freq eval_interval",
    "sinks": "report_to use_wandb logger",
    "name": "run_name experiment_name exp_name",
    "max_policy_lag": "max_staleness staleness async_queue_size",
}
_ALIASES: Final = {other: key for key, others in _OTHER_NAMES.items() for other in others.split()}
_LISTS: Final = (("reward",), ("rollout", "pool"), ("data", "train"), ("data", "eval"))  # tables with names


def load(path: str | Path, assignments: Sequence[str] = ()) -> Config:
    """Read and check a recipe, with the files that it includes and with keys of the command line (`KEY=VALUE`).

    Raises:
        ConfigError: with file, line, value, rule and fix of every mistake.
    """
    layers = read_layers(Path(path), assignments)
    return _check(layers.tables, layers)


def locate(path: Path, assignments: Sequence[str], *, table: str, text: str) -> str:
    """Return the place, as "file:line", of the first key of a recipe that a message about one of its tables names."""
    return read_layers(path, assignments).locate_mention((table,), text)


def from_tables(tables: Mapping[str, Any], *, source: str) -> Config:
    """Check a recipe that a program has made; in errors, `source` stands in place of file and line."""
    return _check(tables, Layers(start=source))


def _check(tables: Mapping[str, Any], layers: Layers) -> Config:
    kept, refused = drop_removed(tables)
    if refused:
        raise ConfigError("\n".join(_explain_removed(each, tables, layers) for each in refused))
    tables = kept
    try:
        return Config.model_validate(tables)
    except pydantic.ValidationError as error:
        errors = [each for each in error.errors() if not _is_inherited(each["loc"], tables)]
        raise ConfigError("\n".join(_explain(each, tables, layers) for each in errors)) from None


def _is_inherited(keys: tuple[int | str, ...], tables: Mapping[str, Any]) -> bool:
    """Return whether an error is that of a key of [rollout], which each of its pools has by inheritance, too."""
    if keys[:2] != ("rollout", "pool") or len(keys) < 4:
        return False
    rollout = tables["rollout"]
    pool, key = rollout["pool"][keys[2]], keys[3]
    return key in rollout and key not in pool


def _explain(error: Any, tables: Mapping[str, Any], layers: Layers) -> str:
    """Return one line of the form "file:line  key = value: rule"."""
    keys = tuple(str(part) for part in error["loc"])
    where, key = layers.locate(keys), _key_text(keys, tables) or "the recipe"
    if error["type"] == "extra_forbidden":
        return f"{where}  {key}: no such key.{_suggest(keys)}"
    if error["type"] == "missing":
        return f"{where}  {key}: missing, and it has no default; add it."
    rule = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # from a check of Fourfold, whose message contains the value
        return f"{layers.locate_mention(keys, rule)}  {key}: {rule}"
    if error["type"] == "model_type":  # Pydantic names a class of Python
        header = ".".join(part for part in keys if not part.isdecimal())
        rule = f"must be a table, {f'[[{header}]]' if keys[-1].isdecimal() else f'[{header}]'}"
    if error["type"] == "tuple_type":
        rule = "must be a list"
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        near = nearest_name(error["input"], re.findall("'([^']*)'", error["ctx"]["expected"]))
        rule += f"; did you mean `{near}`?" if near else ""
    return f"{where}  {key} = {error['input']!r}: {rule[:1].lower()}{rule[1:]}"


def _explain_removed(key: RefusedKey, tables: Mapping[str, Any], layers: Layers) -> str:
    where, name = layers.locate(key.keys), _key_text(key.keys, tables)
    return f"{where}  {name} = {key.value!r}: there is no such key any more; remove it: {key.instead}"


def _key_text(keys: tuple[str, ...], tables: Mapping[str, Any]) -> str:
    """Return a key as users know it; in a list of tables with the name of its table."""
    depth = next((i for i, key in enumerate(keys) if key.isdecimal() and keys[:i] in _LISTS), None)
    if depth is None:
        return ".".join(keys)
    path, rest = keys[:depth], keys[depth + 1 :]
    entries: Any = tables
    for key in path:
        entries = entries[key]
    if isinstance(entries, Mapping):
        return ".".join((*path, *rest))
    table, header = entries[int(keys[depth])], f"[[{'.'.join(path)}]]"
    name = table.get("name") if isinstance(table, Mapping) else None
    title = f"{header} {name!r}" if name else f"{header} number {int(keys[depth]) + 1}"
    return f"{title} {'.'.join(rest)}".strip()


def _suggest(keys: tuple[str, ...]) -> str:
    known, name = _known_keys(keys[:-1]), _ALIASES.get(keys[-1], keys[-1])
    tables = [table for table in Config.model_fields if name in _known_keys((table,))]
    near = nearest_name(name, known) if name == keys[-1] else ""  # a name of another system is no misspelling
    if name in known or "." in name or (not near and name in Config.model_fields):
        near = name
    elif not near and tables:
        near = f"{tables[0]}.{name}"
    if near:
        return f" Did you mean `{near}`?"
    return f" Known keys: {', '.join(sorted(known))}." if known else ""


def _known_keys(table: tuple[str, ...]) -> list[str]:
    model: Any = Config
    for part in (part for part in table if not part.isdecimal()):
        field = model.model_fields.get(part)
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, Table)), None)
        if model is None:
            return []
    return list(model.model_fields)


def dump(config: Config) -> str:
    """Return the recipe as TOML with every default written out; `load` reads it back to an equal Config."""
    return "\n".join(_dump_table(config.model_dump(exclude_none=True), ())) + "\n"


def _dump_table(table: dict[str, Any], path: tuple[str, ...], *, in_list: bool = False) -> list[str]:
    listed = {k for k, v in table.items() if (*path, k) in _LISTS and _is_list_of_tables(v)}
    scalars = {k: v for k, v in table.items() if not isinstance(v, dict) and k not in listed}
    lines = [f"{_dump_key(key)} = {toml_value(value)}" for key, value in scalars.items()]
    if path and (lines or not table):  # a table with nothing but tables inside needs no header
        header = ".".join(_dump_key(p) for p in path)
        lines = [f"[[{header}]]" if in_list else f"[{header}]", *lines]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", *_dump_table(value, (*path, key))]
        elif key in listed:
            lines += [line for entry in value for line in ("", *_dump_table(entry, (*path, key), in_list=True))]
    return lines


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key, such as `trainer.learning_rate`; tables of a list have their names in the key."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        elif _is_list_of_tables(value):
            for number, entry in enumerate(value):
                found |= flatten(entry, f"{prefix}{key}.{entry.get('name') or number}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _dump_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """Return a value in the syntax of TOML. Raises ConfigError: TOML has no such value."""
    match value:
        case bool():  # before int, because a bool is an int
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case date() | time():
            return value.isoformat()
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
        case list() | tuple():
            return "[" + ", ".join(toml_value(v) for v in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_dump_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    raise ConfigError(f"{value!r} cannot be written as TOML; use a string, number, boolean, date, list or table")


def fix_date(config: Config, run_dir: Path | None) -> Config:
    """Return a recipe in which `data.date` is set: its own, that of the run in `run_dir`, or else the local time.

    Chat templates write the date: with it, a run has the same prompts on every day and in every process.
    """
    if config.data.date:
        return config
    now = datetime.now()
    if run_dir is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):  # no file or date, or a file that its user is editing
            text = (run_dir / "config.toml").read_text(encoding="utf-8")
            now = datetime.fromisoformat(tomllib.loads(text)["data"]["date"])
    return with_date(config, now.isoformat(timespec="seconds"))


def with_date(config: Config, date: str) -> Config:
    """Return a recipe with another `data.date`."""
    return config.model_copy(update={"data": config.data.model_copy(update={"date": date})})
