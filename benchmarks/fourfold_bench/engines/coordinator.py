"""The coordinator process of the benchmark: the real coordinator, and a watch of its event loop.

python -m fourfold_bench.engines.coordinator RECIPE RUN_DIR RESULT.json
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.service.lifecycle import ServeOptions
from fourfold_coordinator.routing.registry import Member, MemberChange
from fourfold_coordinator.serve import Coordinator

_WATCH_SECONDS: Final = 0.005


class LoopWatch:
    """Measures the event loop, the CPU time of each step, and the start-up."""

    def __init__(self, coordinator: Coordinator, engines: int) -> None:
        self._coordinator, self._engines = coordinator, engines
        self.start_seconds = 0.0  # from the first registration of an engine until all get calls
        self.start_gap = 0.0  # longest gap until then
        self.start_cpu = 0.0  # CPU seconds until then
        self.expired_leases = 0
        self.steps: list[dict[str, float]] = []
        coordinator._registry.add_listener(self._on_member)

    def _on_member(self, _member: Member, change: MemberChange) -> None:
        self.expired_leases += change is MemberChange.EXPIRED

    async def run(self) -> None:
        """Measure until cancelled."""
        first, last_look, gap = 0.0, 0.0, 0.0
        wall, cpu, step = time.monotonic(), time.process_time(), 0
        while True:
            began = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            gap = max(gap, now - began - _WATCH_SECONDS)
            if not self.start_seconds and now - last_look > 0.05:
                replicas = self._coordinator._router.replicas(Role.ROLE_ROLLOUT)
                if replicas and not first:
                    first, cpu = now, time.process_time()
                last_look = now
                if len(replicas) == self._engines and not any(replica.unusable_reason for replica in replicas):
                    self.start_seconds, self.start_gap, gap = now - first, gap, 0.0
                    self.start_cpu = time.process_time() - cpu
            if (done := self._coordinator._board.status.step) > step:
                times = time.monotonic(), time.process_time()
                self.steps.append({"seconds": times[0] - wall, "cpu": times[1] - cpu, "gap": gap})
                (wall, cpu), step, gap = times, done, 0.0

    def document(self) -> dict[str, Any]:
        """Return the measurements as JSON values; the first step has the start-up in its times."""
        return {
            "start_seconds": self.start_seconds,
            "start_gap": self.start_gap,
            "start_cpu": self.start_cpu,
            "expired_leases": self.expired_leases,
            "steps": self.steps,
        }


async def run(recipe: Path, folder: Path, result: Path) -> int:
    """Run the coordinator to its end, and write what the watch measured; return the exit code."""
    config = configuration.load(recipe)
    options = ServeOptions(role="coordinator", recipe=recipe, config=config, member_id="coordinator-0", run_dir=folder)
    coordinator = Coordinator(options, folder)
    watch = LoopWatch(coordinator, config.rollout_replicas)
    task = asyncio.create_task(watch.run())
    try:
        return await coordinator.run()
    finally:
        task.cancel()
        await asyncio.to_thread(result.write_text, json.dumps(watch.document()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(asyncio.run(run(*map(Path, sys.argv[1:]))))
