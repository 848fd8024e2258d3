"""Defines `fourfold bench sft`, `dpo` and `reward-training`: their options, what they need, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench.gpus import default_device
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.models import SHAPE_NAMES
from fourfold_bench.tables import aligned

OURS: Final = "fourfold"
PACKED: Final = "trl"
SAME_ROWS: Final = "trl-rows"
_GPU: Final = {"shape": "0.43b", "rows": 20_000, "mean_tokens": 600, "max_tokens": 4096, "rows_per_step": 128}
_GPU_PAIRS: Final = _GPU | {"rows": 8_000, "rows_per_step": 64}
_CPU: Final = {"shape": "tiny", "rows": 300, "mean_tokens": 60, "max_tokens": 256, "rows_per_step": 8}
_SIZES: Final = "default 0.43b with 20,000 rows, or 8,000 pairs, of 600 tokens on average; small on CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSettings(BenchmarkSettings):
    """The options of the benchmarks of rows; by default those of `fourfold bench sft`."""

    kind: str = "sft"
    device: str = option("default cuda where there are GPUs", choices=("cpu", "cuda"))
    shape: str = option(_SIZES, choices=SHAPE_NAMES)
    rows: int = option(_SIZES, least=1)
    mean_tokens: int = option("mean of the lognormal lengths of a sample before the limit", least=16)
    max_tokens: int = option("tokens of the longest sample", least=16)
    rows_per_step: int = option(_SIZES, least=1)
    ranks: int = option("GPUs, or processes on CPU", default=1, least=1)
    steps: int = option("steps that are measured", default=20, least=1)
    warm_up: int = option("steps before them", default=5, least=1)
    tokens_per_micro_batch: int = option(default=32_768)
    zero_stage: int = option("ZeRO stage of all systems; 0 in TRL: DDP", choices=(), least=0, most=3)
    learning_rate: float = option("default 1e-4 for sft, else 1e-5", above=0)
    liger: bool = option("fused kernels, in all systems", default=False)
    checkpointing: bool = option("gradient checkpointing, in all systems", default=False)
    peer: str = option(
        f"another trainer on the same rows: {PACKED} packs them to --max-tokens (its best-fit decreasing), and pads "
        f"pairs in their order; {SAME_ROWS}, without pairs, takes the rows and their order as {OURS} does",
        default="",
        choices=("", PACKED, SAME_ROWS),
    )
    peer_pairs: int = option("pairs in a pass of the peer, which pads them to the longest", default=4, least=1)
    attention: str = option(
        "attention of TRL: packed is the kernel that Fourfold has, and for padded pairs PyTorch's without a mask; or a "
        "name of transformers",
        default="packed",
    )
    timeout: float = option("seconds for each run", default=1800.0, above=0)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        device = given.get("device") or default_device().partition(":")[0]
        pairs = cls.__dataclass_fields__["kind"].default != "sft"
        sizes = _CPU if device == "cpu" else _GPU_PAIRS if pairs else _GPU
        rest = {"zero_stage": 3 if given.get("ranks", 1) > 1 else 1, "learning_rate": 1e-5 if pairs else 1e-4}
        return {**sizes, **rest, **given, "device": device}

    def check(self) -> None:
        self._limit("tokens_per_micro_batch", least=self.max_tokens)
        self._limit("rows", least=self.rows_per_step)
        if self.liger and not self.on_gpus:
            raise ConfigError("--liger: these kernels need GPUs; omit it, or use --device cuda")
        if self.peer == SAME_ROWS and self.rows_per_step % self.ranks:
            raise ConfigError(f"--rows-per-step {self.rows_per_step}: {SAME_ROWS} deals them to --ranks {self.ranks}")
        if self.has_pairs and self.peer == SAME_ROWS:
            raise ConfigError(f"--peer {SAME_ROWS}: {PACKED} takes pairs as they are; use that")
        if self.has_pairs and self.peer and self.rows_per_step % (self.ranks * self.peer_pairs):
            raise ConfigError(
                f"--rows-per-step {self.rows_per_step}: {self.peer} deals them to --ranks {self.ranks} in passes of "
                f"--peer-pairs {self.peer_pairs}"
            )

    @property
    def has_pairs(self) -> bool:
        """Return true if a row is a pair."""
        return self.kind != "sft"

    @property
    def on_gpus(self) -> bool:
        """Return true if the run uses GPUs."""
        return self.device == "cuda"

    @property
    def devices(self) -> list[str]:
        """The GPUs."""
        return [f"cuda:{gpu}" for gpu in range(self.ranks)] if self.on_gpus else []

    @property
    def last_step(self) -> int:
        """The last measured step."""
        return self.warm_up + self.steps

    @property
    def loss_step(self) -> int:
        """The step whose loss is compared."""
        return min(20, self.last_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSettings(RowsSettings):
    """The options of `fourfold bench dpo`."""

    kind: str = "dpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrainingSettings(RowsSettings):
    """The options of `fourfold bench reward-training`."""

    kind: str = "reward-training"


class RowsBenchmark(Benchmark[RowsSettings]):
    """Measures the steps of a run of rows, and those of a peer."""

    libraries = ("torch", "transformers", "deepspeed", "liger-kernel", "trl", "accelerate", "flash-attn", "grpcio")

    def __init__(self, name: str, settings: type[RowsSettings], what: str) -> None:
        self.name, self.settings = name, settings
        self.summary = f"{what} through `fourfold run`, alone and beside TRL"

    def devices(self, settings: RowsSettings) -> Sequence[str]:
        return settings.devices

    def packages(self, settings: RowsSettings) -> Mapping[str, str]:
        trainer = "fourfold-trainer[gpu]" if settings.on_gpus else "fourfold-trainer"
        needed = {
            "torch": "fourfold[torch]",
            "transformers": "fourfold[torch]",
            "deepspeed": trainer,
            "fourfold_trainer": trainer,
            "fourfold_coordinator": "fourfold-coordinator",
        }
        if settings.liger:
            needed["liger_kernel"] = "fourfold-trainer[gpu,liger]"
        return needed | (dict.fromkeys(("trl", "datasets", "accelerate"), "trl") if settings.peer else {})

    def label(self, settings: RowsSettings) -> str:
        ranks = f"-{settings.ranks}x" if settings.ranks > 1 else "-"
        return f"{settings.shape}{ranks}{settings.device}{'-' if settings.peer else ''}{settings.peer}"

    def measure(self, settings: RowsSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.rows.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        settings, results = self.settings(**document["parameters"]), document["results"]
        head = (
            f"{settings.shape}, {settings.ranks} x {settings.device}, {settings.rows_per_step} rows per step of "
            f"{results['mean_tokens']:.0f} tokens on average; {settings.steps} steps after {settings.warm_up}"
        )
        peaks = {"tensors_gib": "tensors GiB", "reserved_gib": "reserved", "gpu_peak_gib": "GPU"}
        rows = [
            ["", "tokens/s", "s per step", "MFU", *peaks.values(), "first step", f"loss of step {settings.loss_step}"]
        ]
        for name, found in results["systems"].items():
            texts = [f"{found['tokens_per_second']:,.0f}", f"{found['step_seconds']:.3f}"]
            texts.append("" if found["mfu"] is None else f"{found['mfu']:.1%}")
            texts += ["" if found[peak] is None else f"{found[peak]:.1f}" for peak in peaks]
            rows.append([name, *texts, f"{found['first_step_after_seconds']:.1f} s", f"{found['loss']:.4f}"])
        ours = results["systems"][OURS]
        lines = [head, "", *aligned(rows), "", f"idle time of the trainer between steps: {ours['idle_share']:.2%}"]
        if settings.peer:
            theirs = results["systems"][settings.peer]
            lines.append(
                f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} times the tokens/s of {settings.peer}, "
                f"loss {ours['loss'] / theirs['loss'] - 1:+.2%}"
            )
        return lines


BENCHMARKS: Final = {
    benchmark.name: benchmark
    for benchmark in (
        RowsBenchmark("sft", RowsSettings, "supervised fine-tuning"),
        RowsBenchmark("dpo", DpoSettings, "DPO, whose reference is computed before step 1,"),
        RowsBenchmark("reward-training", RewardTrainingSettings, "training of a reward model on pairs"),
    )
}
