"""What a run begins from: SHA-256 of its models, and the lineage of those that earlier runs exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold_coordinator.launch.run_names import CONFIG_FILE, MODEL_FOLDER, REPORT_FILE
from fourfold_coordinator.reporting.lineage import keep_lineage, read_lineage
from fourfold_coordinator.reporting.report import BEGAN_FROM
from fourfold_coordinator.state.ledger import Ledger
from tests.fakes.toy import make_config
from tests.unit.model.test_folder import write_model


def make_recipe(root: Path, source: str, **changes: Any) -> Config:
    return make_config(root, model={"source": source}, **changes)


def make_run(name: str, began_from: dict[str, Any]) -> None:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text("steps = 4\n")
    (folder / REPORT_FILE).write_text(json.dumps({"steps": 4, "began_from": began_from}))
    write_model(folder / MODEL_FOLDER)
    weights = folder / MODEL_FOLDER / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + name.encode().ljust(4))


def test_the_last_report_has_the_lineage_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = str(write_model(tmp_path / "base"))
    first = read_lineage(make_recipe(tmp_path, base))
    assert first.keys() == {"model"} and first["model"].keys() == {"source", "sha256"}
    make_run("sft", first)
    make_run("rm", read_lineage(make_recipe(tmp_path, "run:sft")))
    reward = {"function": "", "model": {"source": "run:rm"}}
    tables: dict[str, Any] = {"critic": {"source": "run:rm"}, "reference": {"source": "run:sft"}, "reward": reward}
    last = read_lineage(make_recipe(tmp_path, "run:sft", algorithm={"preset": "ppo"}, **tables))
    assert list(last) == ["model", "critic", "reference", "reward reward"]
    assert last["critic"] == last["reward reward"] and last["reference"] == last["model"]
    assert (last["model"]["run"], last["critic"]["run"]) == ("sft", "rm")
    assert last["critic"]["began_from"]["model"] == last["model"]
    assert (
        last["model"]["began_from"]["model"] == first["model"] == {"source": base, "sha256": first["model"]["sha256"]}
    )
    digests = [entry["sha256"] for entry in (first["model"], last["model"], last["critic"])]
    assert len(set(digests)) == 3 and all(len(digest) == 64 for digest in digests)


def test_a_resumed_run_has_the_models_that_it_began_with(tmp_path: Path) -> None:
    ledger, base = Ledger(tmp_path / "ledger.sqlite"), write_model(tmp_path / "base")
    found = read_lineage(make_recipe(tmp_path, str(base)))
    keep_lineage(ledger, found)
    keep_lineage(ledger, {"model": {"source": str(base), "sha256": None}})
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    changed = read_lineage(make_recipe(tmp_path, str(base)))
    with pytest.raises(ConfigError, match=f"model: {base} has other files than those with which this run began"):
        keep_lineage(ledger, changed)
    assert json.loads(ledger.get(BEGAN_FROM)) == found
    keep_lineage(ledger, {"model": {**changed["model"], "source": "another"}})
    missing = read_lineage(make_recipe(tmp_path, str(tmp_path / "no")))
    assert missing == {"model": {"source": str(tmp_path / "no"), "sha256": None}}
