"""Keeps the scorers of a run, and replaces them while it goes on. Changes are durable.

A scorer is a term of the score: a table [[reward]] of the recipe, or one that was added. Its deployments are services
that may take each other's place:

    live      its scores count
    canary    scores a share of the groups in place of the live one; a group is never split
    shadow    scores the same samples as the live one, and does not count
    previous  was live before; `rollback` makes it live again

These changes give a deployment a share of the groups. With all groups it is live, and canary and shadow end:

    swap      new services get all groups: new -> live -> previous
    canary    new services get a share of the groups: new -> canary
    promote   the canary, or else the shadow, gets all groups: canary or shadow -> live -> previous
    rollback  the live services get all groups; without canary and shadow, the previous ones: previous <-> live

A change applies at once to every sample that is not in a step yet. Calls to a deployment that is no longer in use are
cancelled and repeated, and its groups are scored again when a step takes them. So no step mixes versions of one scorer,
except with a canary.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from fourfold.config.older_recipes import without_removed
from fourfold.config.reward import MAX_SCORERS, RewardConfig
from fourfold.config.schema import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError, InvalidInput, NotFound, Unavailable, WrongState
from fourfold.host.cancellation import completed
from fourfold.host.clock import utc_text

from ..routing.registry import Registry
from ..routing.replica import NOT_INSPECTED, CancelScopes
from ..routing.router import Router

T = TypeVar("T")

STATE_KEY: Final = "scorers"  # of the ledger
COSTS_KEY: Final = "scorer_costs_usd"  # of the ledger
_ANSWER_SECONDS: Final = 12.0  # time limit for a new service to report its name
_MAX_HISTORY: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Services of one scorer that may take each other's place."""

    pool: str  # unique in the run
    targets: tuple[str, ...] = ()  # addresses; empty: the services that registered for the scorer
    scorers: tuple[str, ...] = field(default=(), compare=False)  # name@version of the targets when they were added


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """One term of the score."""

    table: RewardConfig
    live: Deployment
    canary: Deployment | None = None
    share: float = 0.0  # share of the groups for the canary
    shadow: Deployment | None = None
    compares_gradients: bool = False
    previous: Deployment | None = None

    @property
    def name(self) -> str:
        return self.table.name

    def deployment_for(self, group_id: str) -> Deployment:
        """Return the deployment that scores a group; the same one until the scorers change."""
        if self.canary is None:
            return self.live
        digest = hashlib.sha256(f"{self.canary.pool} {group_id}".encode()).digest()
        return self.canary if int.from_bytes(digest[:8], "big") < self.share * 2**64 else self.live

    @property
    def deployments(self) -> list[Deployment]:
        """Return the deployments that get calls."""
        return [d for d in (self.live, self.canary, self.shadow) if d is not None]


def permanent_id(target: str) -> str:
    """Return the member id of the reward service at an address."""
    return f"reward-at-{re.sub('[^A-Za-z0-9]+', '-', target)}"[:120]


class ScorerTable:
    """The scorers of a run. Not thread-safe."""

    def __init__(self, config: Config, registry: Registry, router: Router) -> None:
        self._registry, self._router = registry, router
        self._recipe = [table.model_dump_json() for table in config.reward] if config.needs_scorer else []
        tables = config.reward if config.needs_scorer else ()
        self.scorers = tuple(Scorer(table=t, live=Deployment(pool=t.name, targets=t.target)) for t in tables)
        self.revision = 0
        """Number of changes that require all groups to be scored again, even if the names of their scorers stay."""
        self.history: list[dict[str, Any]] = []  # the changes so far
        self.costs: dict[str, float] = {}
        """US dollars that each scorer has cost in the whole run; durable after each step (`changed_costs`)."""
        self._pools = 0  # number of deployments made in the run
        self._members: dict[str, list[str]] = {}  # member ids of the services known by their address, by pool
        self._in_use = defaultdict[str, CancelScopes](CancelScopes)  # by pool
        self._saved_costs = ""
        self.check: Callable[[RewardConfig, Deployment], Awaitable[None]] = _accept
        """Checks new services; raises WrongState if they do not score."""
        self._save: Callable[[str], Awaitable[None]] | None = None
        self._lock = asyncio.Lock()  # one change at a time

    # -- start ------------------------------------------------------------------------------------------------------

    def restore(self, state: str, save: Callable[[str], Awaitable[None]]) -> None:
        """Continue from the state of an earlier coordinator, if the tables of the recipe are still the same.

        Adds services with an address to the registry; `save` makes a state durable. Raises ConfigError for a wrong
        address.
        """
        self._save = save
        found = json.loads(state) if state else {}
        if found.get("recipe") == self._recipe:
            self.scorers = tuple(_from_json(entry) for entry in found["scorers"])
            self.revision, self.history, self._pools = found["revision"], found["history"], found["pools"]
        for scorer in self.scorers:
            for deployment in scorer.deployments:
                self._add_members(deployment)

    def restore_costs(self, costs: str) -> None:
        """Continue with the costs that an earlier coordinator saved; a crash loses those of one step."""
        self.costs.update(json.loads(costs) if costs else {})
        self._saved_costs = costs

    def changed_costs(self) -> dict[str, str]:
        """Return the entry of the ledger with the costs; empty if they have not changed since the last call."""
        costs = json.dumps(self.costs) if self.costs else ""
        changed = {COSTS_KEY: costs} if costs and costs != self._saved_costs else {}
        self._saved_costs = costs
        return changed

    def _state(self, scorers: Sequence[Scorer], revision: int, history: Sequence[dict[str, Any]]) -> str:
        return json.dumps(
            {
                "recipe": self._recipe,
                "scorers": [_to_json(scorer) for scorer in scorers],
                "revision": revision,
                "history": list(history),
                "pools": self._pools,
            }
        )

    def _add_members(self, deployment: Deployment) -> None:
        """Add the services of a deployment to the registry; raise ConfigError, and add none, for a wrong address."""
        taken = {member.member_id for member in self._registry.members()}
        added = self._members.setdefault(deployment.pool, [])
        try:
            for target in deployment.targets:
                name = permanent_id(target)
                while name in taken:
                    name += "-x"
                self._registry.add_permanent(name, Role.ROLE_REWARD, target, pool=deployment.pool)
                taken.add(name)
                added.append(name)
        except ConfigError:
            self._remove_members(deployment)
            raise

    def _remove_members(self, deployment: Deployment) -> None:
        for name in self._members.pop(deployment.pool, []):
            self._registry.remove_permanent(name)

    # -- use --------------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[RewardConfig]:
        """The tables [[reward]] of the scorers."""
        return [scorer.table for scorer in self.scorers]

    def get(self, name: str) -> Scorer | None:
        """Return a scorer by its name; None if it was removed."""
        return next((scorer for scorer in self.scorers if scorer.name == name), None)

    async def while_in_use(self, deployment: Deployment, work: Awaitable[T]) -> tuple[T] | None:
        """Await work with a deployment; cancel it and return None when the deployment is no longer in use."""
        if not any(deployment in scorer.deployments for scorer in self.scorers):
            if asyncio.iscoroutine(work):
                work.close()
            return None
        return await self._in_use[deployment.pool].run(work)

    # -- changes ----------------------------------------------------------------------------------------------------

    async def add(self, table: RewardConfig) -> Scorer:
        """Add a term to the score, by the addresses in `table`. The errors are those of `swap`."""
        async with self._lock:
            if self.get(table.name) is not None:
                raise WrongState(f"there is a scorer {table.name} already; give the new one another name, or use swap")
            if len(self.scorers) >= MAX_SCORERS:
                raise WrongState(f"the run has {MAX_SCORERS} scorers, the most that are allowed; remove one first")
            deployment = await self._deploy(table, table.target)
            scorer = Scorer(table=table, live=deployment)
            await self._commit((*self.scorers, scorer), scorer.name, "add", deployment, all_again=True)
            return scorer

    async def swap(self, name: str, targets: Sequence[str], *, share: float | None = None) -> Scorer:
        """Make other services live, or let them score a share of the groups as a canary.

        Args:
            share: of a canary, above 0 and below 1. None: the services become live.

        Raises:
            NotFound: There is no such scorer.
            InvalidInput: An address is malformed, or the share is out of its range.
            Unavailable: A service does not answer.
            WrongState: The services do not fit the run, or do not score; or there is a canary already.
        """
        async with self._lock:
            scorer = self._find(name)
            if share is None:
                return await self._swap(scorer, await self._deploy(scorer.table, targets), "swap")
            if not 0 < share < 1:
                raise InvalidInput(f"share is {share:g}; it must be above 0 and below 1, such as 0.25")
            if scorer.canary is not None:
                raise WrongState(f"scorer {name} has a canary already; promote it, or roll it back first")
            return await self._swap(scorer, await self._deploy(scorer.table, targets), "canary", share=share)

    async def shadow(self, name: str, targets: Sequence[str], *, compares_gradients: bool) -> Scorer:
        """Let other services score next to the live ones, without effect. The errors are those of `swap`."""
        async with self._lock:
            scorer = self._find(name)
            if scorer.shadow is not None:
                raise WrongState(f"scorer {name} has a shadow already; promote it, or roll it back first")
            if compares_gradients and (other := next((s.name for s in self.scorers if s.compares_gradients), "")):
                raise WrongState(f"the gradients of the shadow of {other} are compared, and a run compares one; end it")
            deployment = await self._deploy(scorer.table, targets)
            changed = replace(scorer, shadow=deployment, compares_gradients=compares_gradients)
            return await self._replace(changed, "shadow", deployment)

    async def promote(self, name: str, allow: Callable[[Scorer], None]) -> Scorer:
        """Make the canary, or else the shadow, live; `allow` raises WrongState if it must not be.

        Raises NotFound, or WrongState if there is neither.
        """
        async with self._lock:
            scorer = self._find(name)
            deployment = scorer.canary or scorer.shadow
            if deployment is None:
                raise WrongState(f"scorer {name} has neither a canary nor a shadow; start one, or use swap")
            allow(scorer)
            return await self._swap(scorer, deployment, "promote")

    async def rollback(self, name: str) -> Scorer:
        """Remove canary and shadow; without them, make the previous services live again.

        The previous services need not answer: they may be started later. Raises NotFound, or WrongState if there are no
        previous services.
        """
        async with self._lock:
            scorer = self._find(name)
            if scorer.canary is not None or scorer.shadow is not None:
                return await self._swap(scorer, scorer.live, "rollback")
            if scorer.previous is None:
                raise WrongState(f"scorer {name} has no canary, no shadow and no previous services; nothing to undo")
            deployment = scorer.previous
            if deployment.targets:  # the name of an ended pool is not reused
                deployment = replace(deployment, pool=self._new_pool(name))
                self._add_members(deployment)
            return await self._swap(scorer, deployment, "rollback")

    async def remove(self, name: str) -> None:
        """Remove a term of the score; raise NotFound, or WrongState for the last one."""
        async with self._lock:
            scorer = self._find(name)
            if len(self.scorers) == 1:
                raise WrongState(f"{name} is the only scorer, and a run needs one; add another one first, or use swap")
            others = tuple(s for s in self.scorers if s.name != name)
            await self._commit(others, name, "remove", scorer.live, all_again=True)

    async def score_again(self, name: str) -> Scorer:
        """Score all samples again that are not in a step yet; raise NotFound."""
        async with self._lock:
            scorer = self._find(name)
            await self._commit(self.scorers, name, "rescore", scorer.live, all_again=True)
            return scorer

    # -- parts of changes -------------------------------------------------------------------------------------------

    def _find(self, name: str) -> Scorer:
        if (scorer := self.get(name)) is None:
            known = ", ".join(s.name for s in self.scorers) or "none, because agents bring all rewards"
            raise NotFound(f"no scorer {name[:64]!r}; there are: {known}")
        return scorer

    def _new_pool(self, name: str) -> str:
        self._pools += 1
        return f"{name}.{self._pools}"

    async def _deploy(self, table: RewardConfig, targets: Sequence[str]) -> Deployment:
        """Return a deployment whose services have answered and passed `check`; add nothing otherwise."""
        if not targets:
            raise InvalidInput("targets is empty; give the address HOST:PORT of a reward service")
        if len(set(targets)) < len(targets):
            raise InvalidInput(f"targets = {list(targets)} has an address twice; remove it")
        deployment = Deployment(pool=self._new_pool(table.name), targets=tuple(targets))
        try:
            self._add_members(deployment)
        except ConfigError as error:
            raise InvalidInput(f"targets: {error}") from None
        try:
            await self._wait_until_known(deployment)
            await self.check(table, deployment)
        except BaseException:
            self._remove_members(deployment)
            raise
        return replace(deployment, scorers=self.names(deployment))

    async def _wait_until_known(self, deployment: Deployment) -> None:
        """Wait until every service has told its name; raise Unavailable or WrongState."""
        router, end = self._router, self._router.clock.monotonic() + _ANSWER_SECONDS
        while True:
            reasons = {r.member.target: r.unusable_reason for r in router.replicas(Role.ROLE_REWARD, deployment.pool)}
            if misfits := {t: why for t, why in reasons.items() if why not in ("", NOT_INSPECTED)}:
                raise WrongState("; ".join(f"{target}: {why}" for target, why in misfits.items()))
            if not any(reasons.values()):
                return
            if router.clock.monotonic() >= end:
                text = router.explain(Role.ROLE_REWARD, deployment.pool)
                raise Unavailable(
                    f"no answer within {_ANSWER_SECONDS:g} s ({text}); start the service first, and give its address",
                    reason="SCORER_SILENT",
                )
            await router.wait_for_change(timeout=0.1)

    async def _swap(self, scorer: Scorer, deployment: Deployment, event: str, *, share: float = 1.0) -> Scorer:
        """Give a share of the groups to a deployment; with all of them it is live, without canary and shadow."""
        if share < 1:
            changed = replace(scorer, canary=deployment, share=share)
            return await self._replace(changed, event, deployment, share=share)
        previous = scorer.previous if deployment == scorer.live else scorer.live
        return await self._replace(Scorer(table=scorer.table, live=deployment, previous=previous), event, deployment)

    async def _replace(self, changed: Scorer, event: str, deployment: Deployment, **facts: Any) -> Scorer:
        scorers = tuple(changed if s.name == changed.name else s for s in self.scorers)
        await self._commit(scorers, changed.name, event, deployment, **facts)
        return changed

    async def _commit(
        self,
        scorers: tuple[Scorer, ...],
        name: str,
        event: str,
        deployment: Deployment,
        *,
        all_again: bool = False,
        **facts: Any,
    ) -> None:
        """Make a change durable, then apply it; end the deployments that are no longer in use.

        A change that cannot be made durable ends `deployment`, if it is a new one.
        """
        entry = {"time": utc_text(self._router.clock.now()), "scorer": name, "change": event}
        entry |= {"services": self.describe(deployment), **facts}
        history = [*self.history, entry][-_MAX_HISTORY:]
        revision = self.revision + all_again

        async def apply() -> None:
            try:
                if self._save is not None:
                    await self._save(self._state(scorers, revision, history))
            except BaseException:
                self._end_unused((deployment,))
                raise
            before = [d for scorer in self.scorers for d in scorer.deployments]
            self.scorers, self.revision, self.history = scorers, revision, history
            self._end_unused(before)
            self._router.notify()

        # The caller may time out or leave. If only the ledger had the change, the next coordinator would use other
        # scorers than this one.
        await completed(apply())

    def _end_unused(self, deployments: Iterable[Deployment]) -> None:
        used = {d.pool for scorer in self.scorers for d in scorer.deployments}
        for gone in {d.pool: d for d in deployments if d.pool not in used}.values():
            self._remove_members(gone)
            if (calls := self._in_use.pop(gone.pool, None)) is not None:
                calls.cancel()

    def describe(self, deployment: Deployment) -> str:
        """Describe a deployment for users: name@version and addresses."""
        members = [r.member.member_id for r in self._router.replicas(Role.ROLE_REWARD, deployment.pool)]
        where = ", ".join(deployment.targets) or ", ".join(members) or "none registered"
        return f"{', '.join(self.names(deployment)) or 'unknown'} at {where}"

    def names(self, deployment: Deployment) -> tuple[str, ...]:
        """Return name@version of the services of a deployment; for an ended one, those at its start."""
        replicas = self._router.replicas(Role.ROLE_REWARD, deployment.pool)
        return tuple(dict.fromkeys(r.scorer for r in replicas if r.scorer)) or deployment.scorers


async def _accept(_table: RewardConfig, _deployment: Deployment) -> None:
    return


def _to_json(scorer: Scorer) -> dict[str, Any]:
    def deployment(value: Deployment | None) -> Any:
        return None if value is None else {"pool": value.pool, "targets": value.targets, "scorers": value.scorers}

    return {
        "table": scorer.table.model_dump(mode="json"),
        "live": deployment(scorer.live),
        "canary": deployment(scorer.canary),
        "share": scorer.share,
        "shadow": deployment(scorer.shadow),
        "compares_gradients": scorer.compares_gradients,
        "previous": deployment(scorer.previous),
    }


def _from_json(entry: dict[str, Any]) -> Scorer:
    def deployment(value: Any) -> Deployment | None:
        if value is None:
            return None
        targets, scorers = tuple(value["targets"]), tuple(value["scorers"])
        return Deployment(pool=value["pool"], targets=targets, scorers=scorers)

    live = deployment(entry["live"])
    assert live is not None, "every scorer has a live deployment"
    return Scorer(
        table=RewardConfig.model_validate(without_removed(entry["table"], "reward")),
        live=live,
        canary=deployment(entry["canary"]),
        share=entry["share"],
        shadow=deployment(entry["shadow"]),
        compares_gradients=entry["compares_gradients"],
        previous=deployment(entry["previous"]),
    )
