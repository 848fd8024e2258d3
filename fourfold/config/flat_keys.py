"""Translates the flat keys of older recipes, such as `algorithm.clip_low`, into tables such as [algorithm.loss].

Recipes had one flat table for the keys of all losses and estimators, with the kind as a string: `loss = "gspo"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fourfold.algorithm.advantages import ADVANTAGES
from fourfold.algorithm.losses import LOSSES
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
