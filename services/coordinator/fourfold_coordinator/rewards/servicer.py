"""Implements ScorerService: translates between messages and `scorers.py`, which has the rules."""

from __future__ import annotations

import logging
import math
from typing import Any, Final

import grpc

from fourfold.config import RewardConfig
from fourfold.coordinator.v1 import scorer_service_pb2 as pb
from fourfold.coordinator.v1 import scorer_service_pb2_grpc as pb_grpc
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import InvalidInput, Unavailable, WrongState

from ..routing.router import Router
from .scorers import Deployment, Scorer, ScorerTable
from .scoring import Scoring
from .shadows import Shadows

log = logging.getLogger("fourfold.coordinator")

Context = grpc.aio.ServicerContext[Any, Any]
_MAX_TARGETS: Final = 256


class ScorerServicer(pb_grpc.ScorerServiceServicer):
    """Lists and changes the scorers; UNAVAILABLE until the run is assembled."""

    def __init__(self, table: ScorerTable, router: Router) -> None:
        self._table, self._router = table, router
        self._scoring: Scoring | None = None
        self._shadows: Shadows | None = None

    def open(self, scoring: Scoring, shadows: Shadows) -> None:
        """Serve from now on."""
        self._scoring, self._shadows = scoring, shadows

    async def ListScorers(self, request: pb.ListScorersRequest, context: Context) -> pb.ListScorersResponse:
        """List the scorers."""
        return pb.ListScorersResponse(scorers=[self._to_proto(scorer) for scorer in self._table.scorers])

    async def ChangeScorer(self, request: pb.ChangeScorerRequest, context: Context) -> pb.ChangeScorerResponse:
        """Change one scorer."""
        self._check_open()
        scorer = await self._change(request)
        log.info("scorer changed: scorer=%s change=%s", request.name, request.WhichOneof("change"))
        return pb.ChangeScorerResponse(scorer=None if scorer is None else self._to_proto(scorer))

    async def _change(self, request: pb.ChangeScorerRequest) -> Scorer | None:
        table, name = self._table, request.name
        match request.WhichOneof("change"):
            case "add":
                weight = request.add.weight if request.add.HasField("weight") else 1.0
                return await table.add(_added(name, weight, request.add.deployment))
            case "swap":
                return await table.swap(name, _targets(request.swap))
            case "canary":
                return await table.swap(name, _targets(request.canary.deployment), share=request.canary.share)
            case "shadow":
                compares = request.shadow.compare_gradients
                return await table.shadow(name, _targets(request.shadow.deployment), compares_gradients=compares)
            case "promote":
                return await table.promote(name, lambda scorer: self._check_promotion(scorer, request.promote))
            case "rollback":
                return await table.rollback(name)
            case "remove":
                await table.remove(name)
                return None
            case "rescore":
                return await table.score_again(name)
        raise InvalidInput("change is not set; set one of the fields of `change`, such as swap")

    def _check_promotion(self, scorer: Scorer, conditions: pb.Promote) -> None:
        """Raise WrongState if the conditions of a promotion do not hold."""
        wanted = conditions.HasField("min_rank_correlation") or conditions.min_samples
        if not wanted:
            return
        meter = None if self._shadows is None else self._shadows.agreement(scorer)
        if scorer.canary is not None or meter is None:
            raise WrongState(
                f"scorer {scorer.name} has no shadow to be promoted; the conditions are for a shadow: leave them out"
            )
        if meter.count < conditions.min_samples:
            raise WrongState(
                f"the shadow of {scorer.name} has {meter.count} compared samples, below min_samples = "
                f"{conditions.min_samples}; wait for more steps"
            )
        if not conditions.HasField("min_rank_correlation"):
            return
        lowest, found = conditions.min_rank_correlation, meter.rank_correlation()
        if found is None or found < lowest:
            text = "unknown, as one of the two gives equal scores" if found is None else f"{found:.3f}"
            raise WrongState(
                f"the rank correlation of the shadow of {scorer.name} is {text}, below min_rank_correlation = "
                f"{lowest:g}, over {meter.count} samples",
                reason="AGREEMENT_TOO_LOW",
            )

    def _check_open(self) -> None:
        if self._scoring is None:
            raise Unavailable("the coordinator reads its data; try again", reason="STARTING", retry_after=1.0)

    def _to_proto(self, scorer: Scorer) -> pb.Scorer:
        meter = None if self._shadows is None else self._shadows.agreement(scorer)
        return pb.Scorer(
            name=scorer.name,
            weight=scorer.table.weight,
            live=self._deployment(scorer, scorer.live),
            canary=self._deployment(scorer, scorer.canary),
            canary_share=scorer.share,
            shadow=self._deployment(scorer, scorer.shadow),
            previous=self._deployment(scorer, scorer.previous),
            agreement=None if meter is None else meter.to_proto(),
        )

    def _deployment(self, scorer: Scorer, deployment: Deployment | None) -> pb.Deployment | None:
        if deployment is None:
            return None
        replicas = self._router.replicas(Role.ROLE_REWARD, deployment.pool)
        used = deployment in scorer.deployments
        calls = self._scoring.calls_of(scorer, deployment) if self._scoring is not None and used else None
        works = any(not r.unusable_reason and not r.failure_text for r in replicas)
        return pb.Deployment(
            targets=deployment.targets,
            scorers=self._table.names(deployment),
            samples=0 if calls is None else calls.sample_count,
            problem="" if works or not used else self._router.explain(Role.ROLE_REWARD, deployment.pool),
        )


def _targets(deployment: pb.NewDeployment) -> tuple[str, ...]:
    if len(deployment.targets) > _MAX_TARGETS:
        raise InvalidInput(f"targets has {len(deployment.targets)} entries; at most {_MAX_TARGETS} are allowed")
    return tuple(deployment.targets)


def _added(name: str, weight: float, deployment: pb.NewDeployment) -> RewardConfig:
    """Return the table of a new scorer; raise InvalidInput for a value that a recipe may not have."""
    targets = _targets(deployment)
    if not targets or not all(targets):
        raise InvalidInput("targets is empty; give the address HOST:PORT of a reward service")
    if not math.isfinite(weight) or abs(weight) > 1e6:
        raise InvalidInput(f"weight is {weight}; it must be a number of at most a million")
    try:
        return RewardConfig(name=name, target=targets, weight=weight)
    except ValueError:
        raise InvalidInput(
            f"name = {name[:64]!r}, targets = {list(targets)[:4]}: the name must be 1 to 64 characters of "
            f"[A-Za-z0-9_-], and the addresses must differ"
        ) from None
