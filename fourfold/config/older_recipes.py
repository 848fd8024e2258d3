"""Reads the keys of older recipes: translates flat keys of [algorithm], and drops or refuses removed keys.

Recipes had one flat table for the keys of all losses and estimators, with the kind as a string: `loss = "gspo"`. Flat
keys, such as `algorithm.clip_low`, become tables, such as [algorithm.loss].

The folder of a run has all keys of its recipe with their values (`config.toml`), also those that the user never set.
A removed key is therefore accepted with the value that every run has now, and runs of an older version resume. Another
value is an error that says what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fourfold.algorithm.advantages.base import ADVANTAGES
from fourfold.algorithm.losses.base import LOSSES
from fourfold.config.algorithm import default_tables

# Old key -> new key, for each table.
_KEYS: Final = {
    "advantage": {"advantage_epsilon": "epsilon", "gamma": "gamma", "gae_lambda": "lam", "hole_mode": "hole_mode"},
    "loss": {
        "clip_low": "clip_low",
        "clip_high": "clip_high",
        "dual_clip": "dual_clip",
        "gspo_form": "form",
        "ratio_min": "ratio_min",
        "ratio_max": "ratio_max",
        "sapo_tau_positive": "tau_positive",
        "sapo_tau_negative": "tau_negative",
    },
}


def translate(tables: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str], dict[str, dict[str, Any]]]:
    """Return the tables of a recipe without flat keys, the flat keys that it had, and the new tables of [algorithm]."""
    algorithm = tables.get("algorithm")
    flat, new = list[str](), dict[str, dict[str, Any]]()
    if not isinstance(algorithm, Mapping):
        return tables, flat, new
    for name, keys in _KEYS.items():
        found = [key for key in (name, *keys) if key in algorithm]
        if found and isinstance(algorithm.get(name, ""), str):
            new[name] = _table(name, algorithm, {keys[key]: algorithm[key] for key in found if key != name})
            flat += found
    kept = {key: value for key, value in algorithm.items() if key not in flat}
    return {**tables, "algorithm": kept | new}, flat, new


def _table(name: str, algorithm: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new table `name` for the flat keys `given`; those that its kind never read are left out."""
    preset = default_tables(algorithm.get("preset", "grpo"))[name]
    kind = algorithm.get(name, preset["kind"])
    registry = LOSSES if name == "loss" else ADVANTAGES
    try:
        known = registry.find(kind).model_fields
    except ValueError:  # unknown kind: the new table gives the error, with file and line
        return {"kind": kind}
    # In old recipes, the values of a preset also applied to another kind of loss, if that kind has the key.
    values = {"kind": kind, **given} if kind == preset["kind"] else {**preset, **given, "kind": kind}
    # A gamma other than 1 stays even if the kind has no such key: the new table refuses it, as the old table did.
    return {key: value for key, value in values.items() if key in known or (key == "gamma" and value != 1)}


@dataclass(frozen=True, slots=True)
class RemovedKey:
    """A key that recipes had once."""

    value: Any  # what every run has now, as a file has it; None: the key was unset
    instead: str  # what to use in place of the key


@dataclass(frozen=True, slots=True)
class RefusedKey:
    """A removed key with a value that no run has now."""

    keys: tuple[str, ...]  # with the index in a list of tables
    value: Any
    instead: str


_TOKEN_LIMITS: Final = "an agent gets limits of its own from its token (`fourfold certs token add`)"

REMOVED_KEYS: Final = {
    "data.curriculum.min_weight": RemovedKey(0.1, "a prompt that is always or never solved is drawn in 1 of 10 turns"),
    "data.curriculum.window": RemovedKey(2, "the success rate of a prompt is that of its latest 2 groups"),
    "data.min_prompt_tokens": RemovedKey(0, "leave short rows out of the file, or by data.train.skip"),
    "logging.mlflow_uri": RemovedKey("", "set the variable MLFLOW_TRACKING_URI"),
    "logging.wandb_mode": RemovedKey("auto", 'set the variable WANDB_MODE, such as "offline"'),
    "reward.allowed_verifiers": RemovedKey(
        [], "add a table [[reward]] for each function, and choose by `where` or data.scorers_field"
    ),
    "reward.cache_samples": RemovedKey(65_536, "the coordinator keeps 65536 scores of a scorer that says it is pure"),
    "reward.hedge_seconds": RemovedKey(0.0, "lower reward.timeout_seconds, after which a call goes to another service"),
    "rollout.agents.calls_per_second": RemovedKey(100.0, _TOKEN_LIMITS),
    "rollout.agents.concurrent_calls": RemovedKey(128, _TOKEN_LIMITS),
    "rollout.agents.coordinator_share": RemovedKey(
        0.75, "a run keeps three quarters of its engines; raise rollout.max_concurrent_samples to give agents more"
    ),
    "rollout.agents.tokens_in_flight": RemovedKey(None, _TOKEN_LIMITS),
    "rollout.hedge_after": RemovedKey(
        0.0, "calls of an engine that stalls or whose lease ends continue on another one without it"
    ),
    "trainer.gradient_reduction": RemovedKey("float32", "ranks sum their gradients in float32"),
}
REMOVED_TABLES: Final = ("rollout.agents",)


def drop_removed(tables: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[RefusedKey]]:
    """Return a recipe without removed keys, and those of its keys whose value cannot be dropped."""
    refused = list[RefusedKey]()
    return _drop(tables, (), (), refused), refused


def without_removed(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return one table of an older version without its removed keys, whatever their values are."""
    return _drop(table, (name,), (name,), [])


def _drop(
    table: Mapping[str, Any], path: tuple[str, ...], keys: tuple[str, ...], refused: list[RefusedKey]
) -> Mapping[str, Any]:
    """Return a table without removed keys; `path` is its name, and `keys` has the indices of lists, too."""
    kept = dict[str, Any]()
    for key, value in table.items():
        name = ".".join((*path, str(key)))
        removed = REMOVED_KEYS.get(name)
        if removed is None:
            inside = _drop_inside(value, (*path, key), (*keys, key), refused)
            if inside or name not in REMOVED_TABLES:
                kept[key] = inside
        elif value != removed.value:
            refused.append(RefusedKey((*keys, key), value, removed.instead))
    return kept


def _drop_inside(value: Any, path: tuple[str, ...], keys: tuple[str, ...], refused: list[RefusedKey]) -> Any:
    if isinstance(value, Mapping):
        return _drop(value, path, keys, refused)
    if isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):  # a list of tables
        return [_drop_inside(entry, path, (*keys, str(index)), refused) for index, entry in enumerate(value)]
    return value
