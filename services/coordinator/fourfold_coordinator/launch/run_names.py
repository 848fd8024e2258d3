"""Names in the folder of a run, and of the variable with which its coordinator is restarted."""

from __future__ import annotations

from typing import Final

ADDRESS_FILE: Final = "coordinator.address"
CONFIG_FILE: Final = "config.toml"
REPORT_FILE: Final = "report.json"
METRICS_FILE: Final = "metrics.jsonl"
MODEL_FOLDER: Final = "model"
EMA_FOLDER: Final = "model-ema"
CRITIC_FOLDER: Final = "critic"
STEP_FOLDER: Final = "model-step-"
EVALUATIONS_FOLDER: Final = "evaluations"  # of a run: a folder for each `fourfold eval`
EVALUATION_FILE: Final = "evaluation.json"
HARNESS_FILE: Final = "lm-eval.json"  # tasks of lm-evaluation-harness to run: {"tasks", "include_path"}
ANSWERS_FILE: Final = "answers.jsonl"  # of `fourfold eval`
SAMPLING_FILE: Final = "sampling.json"  # of `fourfold sample`: what it makes
GROUPS_FILE: Final = "groups.jsonl"  # of `fourfold sample`: rows and scores by prompt
LEDGER_FILE: Final = "ledger.sqlite"
FAILED_SUFFIX: Final = ".failed"  # of the folder of a start that failed before its first step
RUN_LOCK: Final = ".lock"  # of `fourfold run`
COORDINATOR_LOCK: Final = "coordinator.lock"
STOP_FILE: Final = ".stopped"  # what stopped the run
LATEST: Final = "latest"
# In the environment of a coordinator that the launcher restarted: how the one before it died.
DEATH_VARIABLE: Final = "FOURFOLD_COORDINATOR_DEATH"
