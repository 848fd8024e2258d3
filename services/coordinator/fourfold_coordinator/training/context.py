"""What the loop is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.config import Config

from ..data.prompts import PromptSet
from ..reporting.run_totals import MemoryMeter, RunTotals
from ..routing.certificates import CertificateMonitor
from ..routing.router import Router
from ..routing.trainer_session import TrainerSession
from ..state.disk_wait import DiskWriter
from ..state.ledger import Ledger
from ..state.run_board import RunBoard
from ..weights.broker import WeightBroker
from .evaluate import Evaluator
from .service_calls import ServiceCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run, put together."""

    config: Config
    folder: Path
    """runs/<name>."""
    prompts: PromptSet
    ledger: Ledger
    disk: DiskWriter
    """Makes every write to the ledger and to the run's files."""
    board: RunBoard
    router: Router
    session: TrainerSession
    broker: WeightBroker
    peers: ServiceCalls
    evaluator: Evaluator
    memory: MemoryMeter
    certificates: CertificateMonitor
    totals: RunTotals
    start_seconds: float
    """Longest wait for the services at the start."""
