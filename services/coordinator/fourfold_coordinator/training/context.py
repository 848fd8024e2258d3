"""Holds the objects of one run that the training loop and its parts share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.config.placement import TRAINING_ROLES
from fourfold.config.schema import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role

from ..data.prompts import PromptSet
from ..reporting.run_totals import RunTotals
from ..routing.registry import ROLE_NAMES
from ..routing.router import Router
from ..routing.trainer_session import TrainerSession
from ..state.experiences import ExperienceStore
from ..state.files import DiskWriter
from ..state.ledger import Ledger
from ..state.run_board import RunBoard
from ..tasks.task_queue import TaskQueue
from .ports import Certificates, Scorers, ShadowScores, WeightPublisher
from .service_calls import ServiceCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run, assembled by `serve.py`."""

    config: Config
    folder: Path  # runs/<name>
    prompts: PromptSet
    ledger: Ledger
    experiences: ExperienceStore
    disk: DiskWriter  # all writes to the ledger and to the run's files use it
    board: RunBoard
    router: Router
    session: TrainerSession
    broker: WeightPublisher
    service_calls: ServiceCalls
    scorers: Scorers
    shadows: ShadowScores
    tasks: TaskQueue  # tasks for agents; empty if the recipe has no agents
    certificates: Certificates
    totals: RunTotals
    start_seconds: float  # longest wait for the services when the run starts

    def required_services(self, *, evaluate: bool = False) -> dict[int, int]:
        """Return the number of services of each role that the recipe asks for; 1 for those that users start.

        With `evaluate`, leave out those that only training needs.
        """
        counts: dict[int, int] = {Role.ROLE_TRAINER: 1}
        if self.config.needs_engines:
            counts[Role.ROLE_ROLLOUT] = self.config.rollout_replicas
        if self.config.needs_scorer:
            counts[Role.ROLE_REWARD] = sum(len(t.target) or max(t.replicas, 1) for t in self.config.reward)
        if self.config.agents.source != "none":
            counts[Role.ROLE_GATEWAY] = max(self.config.gateway.replicas, 1)
        if self.config.environment.replicas:
            counts[Role.ROLE_ENVIRONMENT] = self.config.environment.replicas
        if self.config.needs_reference:
            counts[Role.ROLE_REFERENCE] = max(self.config.reference.replicas, 1)
        return {role: n for role, n in counts.items() if not (evaluate and ROLE_NAMES[role] in TRAINING_ROLES)}
