"""Names the files of a run that `RunFileService` sends, in the folder of the run and in a copy of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fourfold.coordinator.v1 import run_file_service_pb2 as pb

from ..state.sample_tokens import TOKENS_FILE
from ..state.samples import SAMPLES_FILE
from ..state.timeline import TIMELINE_FILE
from .run_names import CONFIG_FILE, METRICS_FILE, REPORT_FILE

EVALUATIONS_FILE: Final = "evaluations.jsonl"
"""File of a copy with the evaluations of the ledger."""
TOKENIZER_FILE: Final = "model/tokenizer.json"
FILES: Final[Mapping[pb.RunFile.ValueType, str]] = {  # in the order of copying: small ones first
    pb.RUN_FILE_RECIPE: CONFIG_FILE,
    pb.RUN_FILE_METRICS: METRICS_FILE,
    pb.RUN_FILE_EVALUATIONS: EVALUATIONS_FILE,
    pb.RUN_FILE_REPORT: REPORT_FILE,
    pb.RUN_FILE_TOKENIZER: TOKENIZER_FILE,
    pb.RUN_FILE_TIMELINE: TIMELINE_FILE,
    pb.RUN_FILE_SAMPLES: SAMPLES_FILE,
    pb.RUN_FILE_TOKENS: TOKENS_FILE,
}
