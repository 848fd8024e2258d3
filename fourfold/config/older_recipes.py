"""Drops or refuses the keys of older recipes that were removed.

The folder of a run has all keys of its recipe with their values (`config.toml`), also those that the user never set.
A removed key is therefore accepted with the value that every run has now, and runs of an older version resume. Another
value is an error that says what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


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
