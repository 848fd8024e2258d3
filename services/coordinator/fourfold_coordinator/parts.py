"""What the loop is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.config import Config

from .broker import Broker
from .certificates import Certificates
from .disk_wait import DiskWait
from .evaluate import Evaluator
from .ledger import Ledger
from .lifetime import Lifetime
from .memory import MemoryMeter
from .peers import Peers
from .prompts import Prompts
from .routing import Router
from .run_service import RunBoard
from .trainer_session import TrainerSession


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
