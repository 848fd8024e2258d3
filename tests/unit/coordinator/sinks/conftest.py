"""A run folder with metrics and an evaluation before training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fourfold import config as configuration
from fourfold.config import Config
from fourfold_coordinator.launch.run_names import CONFIG_FILE, LEDGER_FILE, METRICS_FILE
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import Ledger


class RunFolder:
    """The files of a run that sinks read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.config: Config = configuration.load("recipes/quickstart.toml", ["name=demo", "logging.project=tests"])
        (folder / CONFIG_FILE).write_text(configuration.dump(self.config))
        ledger = Ledger(folder / LEDGER_FILE)
        ledger.add_eval(EvalRow(0, 0.25, 0.125, 8, 0, []))
        ledger.close()

    def write_steps(self, rewards: Sequence[float], *, minute: int = 0) -> None:
        """Write metrics.jsonl with one step for each reward; `minute` differs between processes of the run."""
        rows: list[dict[str, object]] = [
            {
                "step": step,
                "reward/mean": reward,
                "kl": None,
                "diagnosis": "",
                "end_time": f"2026-11-26T01:{minute:02}:{step:02}.000Z",
                "alarms": [],
            }
            for step, reward in enumerate(rewards, start=1)
        ]
        (self.folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "demo")
    run.write_steps([0.25, 0.5, 0.75])
    return run
