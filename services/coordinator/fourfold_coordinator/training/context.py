"""What the loop is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.config import Config

from ..data.prompts import Prompts
from ..reporting.lifetime import Lifetime
from ..reporting.memory import MemoryMeter
from ..routing.certificates import Certificates
from ..routing.router import Router
from ..routing.trainer_session import TrainerSession
from ..state.disk_wait import DiskWait
from ..state.ledger import Ledger
from ..state.run_board import RunBoard
from ..weights.broker import Broker
from .evaluate import Evaluator
from .service_calls import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One run, put together."""

    config: Config
    folder: Path
    """runs/<name>."""
    prompts: Prompts
    ledger: Ledger
    disk: DiskWait
    """Makes every write to the ledger and to the run's files."""
    board: RunBoard
    router: Router
    session: TrainerSession
    broker: Broker
    peers: Peers
    evaluator: Evaluator
    memory: MemoryMeter
    certificates: Certificates
    lifetime: Lifetime
    start_seconds: float
    """Longest wait for the services at the start."""
