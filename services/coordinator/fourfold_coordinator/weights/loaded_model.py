"""Admits engines with the weights of their model folder, for an evaluation without a trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError
from fourfold.rollout.v1 import rollout_control_service_pb2 as control

from ..routing.replica import INFO_SECONDS, Replica
from ..routing.router import Router, rest_after

log = logging.getLogger("fourfold.coordinator")

_TICK_SECONDS: Final = 0.25


class LoadedModel:
    """Lets the router use every engine that has version 0, the weights of its model folder. `run` is a task."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def run(self) -> None:
        """Admit engines as they come, until cancelled."""
        while True:
            await self._router.wait_for_change(timeout=_TICK_SECONDS)
            began = time.perf_counter()
            new = [r for r in self._router.replicas(Role.ROLE_ROLLOUT) if r.present and r.version < 0]
            await asyncio.gather(*map(self._admit, new))
            await rest_after(began)

    async def _admit(self, replica: Replica) -> None:
        try:
            about = await replica.call(replica.engine_control.describe(timeout=INFO_SECONDS))
        except FourfoldError as error:
            self._router.record_failure(replica, error)
            return
        if about.policy_version or about.weight_state != control.WEIGHT_STATE_CLEAN:
            text = f"it has weights of version {about.policy_version} of a run; restart it with the model to evaluate"
            self._router.set_unusable_reason(replica, text)
            return
        replica.version = 0
        self._router.record_success(replica)
        self._router.set_unusable_reason(replica, "")
