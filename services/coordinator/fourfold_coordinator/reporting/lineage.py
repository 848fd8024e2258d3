"""Records the models that a run begins with, for `began_from` of report.json.

{"model": {"source": "run:sft", "sha256": "5d0c...", "run": "sft", "began_from": {"model": {...}}}, "critic": {...}}

A model that a run has exported has the name of the run and what that run began from: the last report of a chain of runs
has the lineage of its model, also when the earlier folders are gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fourfold.config.schema import Config
from fourfold.errors import ConfigError
from fourfold.model import folder as model_folder
from fourfold.model.classifier import folder_digest

from ..launch.run_names import CONFIG_FILE, REPORT_FILE
from ..state.ledger import Ledger
from .report import BEGAN_FROM


def read_lineage(config: Config) -> dict[str, Any]:
    """Return what a run begins from, by the part that it becomes: model, critic, reference, reward NAME.

    It reads the weights once; call it in a thread. A folder that this machine does not have, as that of a reward model
    on another machine, has null in place of its SHA-256.
    """
    sources = {"model": config.model.source}
    if config.algorithm.needs_critic and config.critic.source:
        sources["critic"] = config.critic.source
    if config.needs_reference and config.reference.source:
        sources["reference"] = config.reference.source
    tables = config.reward if config.needs_scorer else ()
    sources |= {f"reward {table.name}": table.model.source for table in tables if table.model is not None}
    return {part: _origin(source) for part, source in sources.items()}


def _origin(source: str) -> dict[str, Any]:
    try:
        folder = model_folder.resolve(source)
        found: dict[str, Any] = {"source": source, "sha256": folder_digest(folder)}
    except (ConfigError, OSError):
        return {"source": source, "sha256": None}
    if (folder.parent / CONFIG_FILE).is_file():
        found |= {"run": folder.parent.name, "began_from": _earlier(folder.parent)}
    return found


def _earlier(run: Path) -> Any:
    try:
        return json.loads((run / REPORT_FILE).read_text(encoding="utf-8"))["began_from"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # of an earlier release, or not ended
        return {}


def keep_lineage(ledger: Ledger, found: Mapping[str, Any]) -> None:
    """Store what the run begins from in the ledger.

    Raises:
        ConfigError: the run has begun from other weights under the same source.
    """
    known = json.loads(ledger.get(BEGAN_FROM) or "{}")
    for part, now in found.items():
        before = known.get(part)
        if before is None or before["source"] != now["source"] or before["sha256"] is None:
            known[part] = now
        elif now["sha256"] not in (None, before["sha256"]):
            raise ConfigError(
                f"{part}: {now['source']} has other files than those with which this run began (SHA-256 "
                f"{now['sha256'][:12]}, before {before['sha256'][:12]}); restore them, or start a new run"
            )
    ledger.put({BEGAN_FROM: json.dumps(known)})


def model_digest(ledger: Ledger, part: Literal["model", "reference"] = "model") -> str | None:
    """Return the SHA-256 of the model that a run began with, or of its reference; None if it is not known."""
    found: str | None = json.loads(ledger.get(BEGAN_FROM) or "{}").get(part, {}).get("sha256")
    return found


def origin_digests(ledger: Ledger, recipe: Path) -> dict[str, str | None]:
    """Return the SHA-256 of the model that a run began with, and of its recipe, as `model_sha256`, `recipe_sha256`."""
    return {"model_sha256": model_digest(ledger), "recipe_sha256": hashlib.sha256(recipe.read_bytes()).hexdigest()}
