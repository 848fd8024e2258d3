"""Scrapes metrics endpoints over HTTP, and knows what each service exports."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from fourfold.service import exporter
from fourfold_coordinator.reporting import metrics_source as coordinator
from fourfold_gateway import metrics_source as gateway
from fourfold_reward import metrics_source as reward
from fourfold_reward.environment import metrics_source as environment
from fourfold_reward.reference import metrics_source as reference
from fourfold_rollout import metrics_source as rollout
from fourfold_trainer.service import metrics_source as trainer

EXPORTED_BY_SERVICE = {
    "every service": exporter.COMMON,
    "coordinator": coordinator.EXPORTED,
    "rollout": rollout.EXPORTED,
    "gateway": gateway.EXPORTED,
    "trainer": trainer.EXPORTED,
    "reward": reward.EXPORTED,
    "environment": environment.EXPORTED,
    "reference": reference.EXPORTED,
}


async def http(target: str, request: str = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") -> tuple[int, str, str]:
    """Send a request; return status, header fields and body of the response."""
    host, _, port = target.rpartition(":")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request.encode())
            response = (await reader.read()).decode()
        finally:
            writer.close()
    head, _, body = response.partition("\r\n\r\n")
    return int(head.split()[1]), head, body


def parse(page: str, families_of: Any = text_string_to_metric_families) -> dict[str, Metric]:
    """Return the families of a page, by the name that docs/monitoring.md has; by default of the text format."""
    families = {}
    for family in families_of(page):
        families[family.name + "_total" * (family.type == "counter")] = family
    return families


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """Return the value of one sample, which must be there."""
    (found,) = [s.value for f in families.values() for s in f.samples if s.name == name and s.labels == labels]
    return found


def check_exported(families: dict[str, Metric], role: str) -> None:
    """Check that the page of a service has what the docs promise, and nothing else of ours."""
    promised = {e.name: e for e in (*exporter.COMMON, *EXPORTED_BY_SERVICE[role])}
    ours = {name: family for name, family in families.items() if not name.startswith("process_")}
    assert ours.keys() == promised.keys()
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} <= families.keys()
    for name, family in ours.items():
        assert (family.type, family.documentation) == (promised[name].kind, promised[name].help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(promised[name].labels)


def discovered(run_dir: Path, member: str) -> str:
    """Return the address that a service wrote for Prometheus' file-based discovery."""
    (group,) = json.loads((run_dir / "metrics" / f"{member}.json").read_text())
    (target,) = group["targets"]
    return str(target)
