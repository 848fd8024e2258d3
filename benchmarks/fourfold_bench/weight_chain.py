"""Measures gloo's chain of engines beside one broadcast to all of them, with toy engines in processes on this machine.

    chain       Fourfold's transport: the sender sends each chunk once, and each engine passes it on
    broadcast   one gloo group of sender and all engines, in buckets of 16 MiB: gloo sends along a binomial tree

Both run one after the other for each number of engines. All processes share this machine's cores, so that the wall time
grows with the engines in both; bytes and processor time of the sender are what the network and the trainer would see.
The cost model of `fourfold plan` continues the chain to more engines on a network.

    python -m fourfold_bench.weight_chain --engines 2,4,8,16,32,64 --save
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fourfold.host.scratch import Scratch
from fourfold.plan.weight_update import Link, chain_seconds, copies_seconds, simulate_chain
from fourfold.weights.digest import combine_digest, digest_of
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.tensor_sums import partial_sums
from fourfold.weights.transport.base import TransferGroup, make_receiver
from fourfold.weights.transport.waiting import Deadline
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_bench.tables import aligned
from fourfold_bench.weights.loop import LoopGroup

_SECONDS: Final = 300.0
_BUCKET_BYTES: Final = 16 << 20
_TENSORS: Final = 8
_EPOCH: Final = 1
_MODEL_BYTES: Final = {"1 GB": 10**9, "15 GB": 15 * 10**9}
_MODEL_ENGINES: Final = (1, 2, 8, 64, 128, 256, 512, 1024)
_MODEL_GBIT: Final = (10, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSettings(BenchmarkSettings):
    """The options of the benchmark."""

    engines: str = option("numbers of engines, one after another", default="2,4,8,16,32,64", metavar="N,...")
    megabytes: int = option("size of the weights in MiB", default=32, least=1)
    rounds: int = option("measured updates for each number and path", default=3, least=1)

    @property
    def counts(self) -> list[int]:
        """Return the numbers of engines."""
        return [int(word) for word in self.engines.split(",")]


class _Kept:
    """A sink that keeps what it takes."""

    def __init__(self) -> None:
        self.taken: list[tuple[Span, torch.Tensor]] = []

    def slot(self, span: Span) -> torch.Tensor | None:
        return None

    def take(self, span: Span, values: torch.Tensor) -> None:
        self.taken.append((span, values))

    def flush(self) -> None:
        pass


def _engine(
    pipe: multiprocessing.connection.Connection, manifest: bytes, count: int, index: int, rendezvous: str
) -> None:
    """Run one toy engine: "chain" and "broadcast" open a path, "receive" receives by it, "digest" sums."""
    torch.set_num_threads(1)
    parsed = Manifest.from_bytes(manifest)
    transport = make_receiver(
        "gloo", TransferGroup(epoch=_EPOCH, manifest=parsed, receiver_count=count), index, torch.device("cpu")
    )
    group: LoopGroup | None = None
    kept = _Kept()
    data = torch.empty(0, dtype=torch.uint8)
    with suppress(EOFError):
        while True:
            word, value = pipe.recv()
            if word == "chain":
                transport.accept([value])
                transport.open(Deadline(_SECONDS))
            elif word == "broadcast":
                kept = _Kept()
                transport.close()
                data = torch.empty(parsed.byte_count, dtype=torch.uint8)
                group = LoopGroup(Path(rendezvous), 1 + index, 1 + count, torch.device("cpu"), _SECONDS)
            elif word == "receive" and group is None:
                kept = _Kept()
                transport.receive(value, kept, Deadline(_SECONDS))
            elif word == "receive" and group is not None:
                for start in range(0, data.numel(), _BUCKET_BYTES):
                    group.broadcast(data[start : start + _BUCKET_BYTES])
            pipe.send(digest_of(parsed, partial_sums(parsed, kept.taken)) if word == "digest" else None)


class _Engines:
    """The processes of toy engines."""

    def __init__(self, manifest: Manifest, count: int, rendezvous: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fourfold_bench.weight_chain", "fourfold.weights.transport.gloo"])
        self._pipes = []
        self._processes = []
        for index in range(count):
            ours, theirs = context.Pipe()
            arguments = (theirs, manifest.to_bytes(), count, index, str(rendezvous))
            process = context.Process(target=_engine, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def start(self, word: str, value: Any = None) -> None:
        for pipe in self._pipes:
            pipe.send((word, value))

    def wait(self) -> list[Any]:
        """Return the answer of each engine."""
        answers = []
        for index, pipe in enumerate(self._pipes):
            if not pipe.poll(_SECONDS):
                raise TimeoutError(f"engine {index} of {len(self._pipes)} has not answered within {_SECONDS:.0f} s")
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()


@dataclass(slots=True)
class _Meter:
    """The sender's processor time and the bytes it wrote to files and sockets, and the clock."""

    wall: float
    cpu: float
    written: int

    @classmethod
    def now(cls) -> _Meter:
        used = resource.getrusage(resource.RUSAGE_SELF)
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        written = int(next(line.split()[1] for line in lines if line.startswith("wchar")))
        return cls(time.perf_counter(), used.ru_utime + used.ru_stime, written)

    def since(self, begin: _Meter) -> dict[str, float]:
        return {
            "seconds": self.wall - begin.wall,
            "sender_cpu_seconds": self.cpu - begin.cpu,
            "sender_megabytes": (self.written - begin.written) / 1e6,
        }


def _measure_count(weights: WeightSender, source: torch.Tensor, count: int, rounds: int) -> dict[str, Any]:
    """Measure both paths to `count` engines."""
    manifest = weights.manifest()
    scratch = Scratch("bench-chain")
    engines = _Engines(manifest, count, scratch.path / "store")
    try:
        began = time.perf_counter()
        engines.start("chain", weights.make_offer(_EPOCH, "gloo", count, timeout=_SECONDS))
        weights.open(_EPOCH, timeout=_SECONDS)
        engines.wait()
        joined = {"chain": time.perf_counter() - began}
        chain = []
        for version in range(rounds + 1):
            begin = _Meter.now()
            engines.start("receive", version)
            weights.send(_EPOCH, version, skip_sums=True, timeout=_SECONDS)
            engines.wait()
            chain.append(_Meter.now().since(begin))
        engines.start("digest")
        sums = partial_sums(manifest, ((s, source[s.tensor]) for s in manifest.spans))
        assert set(engines.wait()) == {combine_digest(manifest, [sums])}, "each engine has the sender's weights"
        weights.close()
        began = time.perf_counter()
        engines.start("broadcast")
        group = LoopGroup(scratch.path / "store", 0, 1 + count, torch.device("cpu"), _SECONDS)
        engines.wait()
        joined["broadcast"] = time.perf_counter() - began
        flat = source.view(torch.uint8).reshape(-1)
        broadcast = []
        for version in range(rounds + 1):
            begin = _Meter.now()
            engines.start("receive", version)
            for start in range(0, flat.numel(), _BUCKET_BYTES):
                group.broadcast(flat[start : start + _BUCKET_BYTES])
            engines.wait()
            broadcast.append(_Meter.now().since(begin))
        del group
    finally:
        engines.close()
        scratch.remove()
    result: dict[str, Any] = {"engines": count}
    for name, runs in (("chain", chain[1:]), ("broadcast", broadcast[1:])):  # the first warms up
        middle = {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}
        result[name] = {**middle, "join_seconds": round(joined[name], 3), "runs": [run["seconds"] for run in runs]}
    return result


def _model() -> list[dict[str, Any]]:
    """Return predictions of the plan's cost model for networks, and those of its simulation."""
    rows = []
    for name, byte_count in _MODEL_BYTES.items():
        for gbit in _MODEL_GBIT:
            link = Link(bytes_per_second=gbit * 1e9 / 8)
            for engines in _MODEL_ENGINES:
                row = {
                    "weights": name,
                    "gbit": gbit,
                    "engines": engines,
                    "chain_seconds": chain_seconds(byte_count, engines, link),
                    "simulated_seconds": simulate_chain(byte_count, [link] * engines)[-1],
                    "copies_seconds": copies_seconds(byte_count, engines, link),
                }
                rows.append({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    return rows


class ChainBenchmark(Benchmark[ChainSettings]):
    """Seconds of an update, and bytes and processor time of its sender."""

    name = "weight_chain"
    summary = "gloo's chain of engines beside one broadcast to all, by the number of engines"
    settings = ChainSettings
    libraries = ("torch",)

    def measure(self, settings: ChainSettings, run: BenchmarkRun) -> dict[str, Any]:
        torch.set_num_threads(1)
        model = torch.nn.Module()
        count = settings.megabytes * (1 << 20) // 2 // _TENSORS
        values = torch.randn(_TENSORS, count, generator=torch.Generator().manual_seed(0)).bfloat16()
        for index in range(_TENSORS):
            layer = torch.nn.Module()
            layer.register_parameter("weight", torch.nn.Parameter(values[index], requires_grad=False))
            model.add_module(f"layer{index}", layer)
        rows = []
        for engines in settings.counts:
            weights = WeightSender(DenseSource(model), rank=0, rank_count=1)
            rows.append(_measure_count(weights, values, engines, settings.rounds))
            print("\n".join(self.table({"results": {"measured": rows[-1:]}})), flush=True)
        return {"bytes": count * 2 * _TENSORS, "measured": rows, "model": _model()}

    def label(self, settings: ChainSettings) -> str:
        return "gloo-cpu"

    def table(self, document: Mapping[str, Any]) -> list[str]:
        head = ["engines", "path", "wall s", "sender MB", "sender CPU s", "join s"]
        rows = [head]
        for row in document["results"]["measured"]:
            for path in ("chain", "broadcast"):
                got = row[path]
                numbers = [got["seconds"], got["sender_megabytes"], got["sender_cpu_seconds"], got["join_seconds"]]
                rows.append([str(row["engines"]), path, *(f"{number:.2f}" for number in numbers)])
        lines = aligned(rows)
        if model := document["results"].get("model"):
            lines += ["", "model of chains on a network:"]
            keys = list(model[0])
            lines += aligned([[key.replace("_", " ") for key in keys], *([str(r[k]) for k in keys] for r in model)])
        return lines


if __name__ == "__main__":
    sys.exit(run_script(ChainBenchmark()))
