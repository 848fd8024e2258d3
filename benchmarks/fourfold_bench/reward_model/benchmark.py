"""Defines `fourfold bench reward-model`: its options, what it needs, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fourfold.errors import ConfigError
from fourfold_bench.gpus import default_device
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.models import SHAPE_NAMES, SHAPES, text_of
from fourfold_bench.tables import aligned

BACKEND: Final = "RewardModelBackend.score"
GRPC: Final = "service, gRPC Score"
PLAIN: Final = "transformers, "
"""Begins the names of the ways without Fourfold; the attention implementation follows."""
GOAL: Final = 1.3
_FIRST_WORD: Final = 3  # 0 pads
_GPU: Final[dict[str, Any]] = {
    "shape": "0.5b",
    "tokens": 600_000,
    "seconds": 12.0,
    "tokens_per_batch": 16_384,
    "dtype": "bfloat16",
}
_CPU: Final[dict[str, Any]] = {
    "shape": "tiny",
    "tokens": 20_000,
    "seconds": 3.0,
    "tokens_per_batch": 2048,
    "dtype": "float32",
}
_QUICK: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSettings(BenchmarkSettings):
    """The options of `fourfold bench reward-model`."""

    device: str = option("cpu, cuda:0, ...; default cuda:0 where there is a GPU")
    shape: str = option("of the model; default 0.5b on a GPU, tiny on CPU", choices=SHAPE_NAMES)
    dtype: str = option("default bfloat16 on a GPU, float32 on CPU", choices=("bfloat16", "float32"))
    tokens: int = option("of all texts of a round; default 600000 on a GPU, 20000 on CPU", least=256)
    shortest: int = option("tokens of the shortest text", default=64, least=2)
    longest: int = option("tokens of the longest text", default=4096, least=4)
    median: int = option("tokens of the median text; the lengths are log-normal", default=600, least=2)
    sigma: float = option("standard deviation of the logarithms of the lengths", default=0.9, above=0, most=3)
    seconds: float = option("of the measurement of each way; default 12 on a GPU, 3 on CPU", above=0)
    tokens_per_batch: int = option("of the service; default 16384 on a GPU, 2048 on CPU", least=16)
    samples_per_call: int = option("samples of one call of the service", default=64, least=1, most=4096)
    limit: float = option("seconds after which no other round begins, with all preparations", default=210.0, above=0)
    quick: bool = option("a quarter of the tokens and of the time", default=False)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        device = given.get("device") or default_device()
        defaults = dict(_CPU if device == "cpu" else _GPU)
        if given["quick"]:
            defaults |= {"tokens": defaults["tokens"] // _QUICK, "seconds": defaults["seconds"] / _QUICK}
        return {**defaults, **given, "device": device}

    def check(self) -> None:
        if not self.shortest <= self.median <= self.longest:
            raise ConfigError(
                f"--median {self.median}: it must be from --shortest, {self.shortest}, to --longest, {self.longest}"
            )

    @property
    def on_gpu(self) -> bool:
        """Return true if the model runs on a GPU."""
        return self.device != "cpu"

    def texts(self) -> list[list[int]]:
        """Return the tokens of each text of a round: the same for all ways, in a random order of lengths."""
        random = np.random.default_rng(0)
        vocabulary, left = SHAPES[self.shape]["vocab_size"], self.tokens
        texts = []
        while left > 0:
            drawn = np.exp(random.normal(np.log(self.median), self.sigma))
            size = int(np.clip(drawn, self.shortest, self.longest))
            texts.append([int(word) for word in random.integers(_FIRST_WORD, vocabulary, size)])
            left -= size
        return texts


def prompt_and_completion(ids: Sequence[int]) -> tuple[str, str]:
    """Return a text in two parts; the first has a third of its tokens."""
    middle = max(1, len(ids) // 3)
    return text_of(list(ids[:middle])) + " ", text_of(list(ids[middle:]))


class RewardModelBenchmark(Benchmark[RewardModelSettings]):
    """Measures the tokens per second of a reward model: in the service, and with plain transformers."""

    name = "reward-model"
    summary = "a reward model in the reward service against plain transformers, sorted by length and padded"
    settings = RewardModelSettings
    libraries = ("torch", "transformers", "accelerate", "triton", "flash-attn", "tokenizers", "grpcio", "protobuf")

    def devices(self, settings: RewardModelSettings) -> Sequence[str]:
        return [settings.device]

    def packages(self, settings: RewardModelSettings) -> Mapping[str, str]:
        names = ("torch", "transformers", "tokenizers", "jinja2", "fourfold_reward")
        return dict.fromkeys(names, "fourfold-reward[models]")

    def label(self, settings: RewardModelSettings) -> str:
        return f"{settings.shape}-{settings.device.replace(':', '')}"

    def measure(self, settings: RewardModelSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.reward_model.measure import measure

        return measure(settings, run)

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        found = [f"{name}: {way['error']}" for name, way in results["ways"].items() if way.get("error")]
        return found + [f"scores differ: {text}" for text in results["disagreements"]]

    def table(self, document: Mapping[str, Any]) -> list[str]:
        parameters, results = document["parameters"], document["results"]
        head = (
            f"{parameters['shape']} in {parameters['dtype']} on {parameters['device']}: {results['texts']} texts of "
            f"{parameters['shortest']} to {parameters['longest']} tokens, {results['tokens']:,} tokens; medians of "
            f"{results['rounds']} rounds in turn; passes: {results.get('passes', 'unknown')}"
        )
        rows = [["", "tokens/s", "of transformers", "s a round", "rounds"]]
        for name, way in results["ways"].items():
            if "tokens_per_second" not in way:
                rows.append([name, "failed", "", "", ""])
                continue
            ratio = f"{way['ratio']:.3f}" if "ratio" in way else ""
            runs = " ".join(f"{value:.2f}" for value in way["seconds"])
            rows.append([name, f"{way['tokens_per_second']:,.0f}", ratio, f"{way['median_seconds']:.3f}", runs])
        lines = [head, "", *aligned(rows), ""]
        for name, way in results["ways"].items():
            if sizes := way.get("batch_sizes"):
                tried = ", ".join(f"{size}: {speed:,.0f}" for size, speed in sizes.items())
                lines.append(f"{name}: batch size {way['batch_size']}; tokens/s by batch size: {tried}")
            if "difference" in way:
                lines.append(f"{name}: scores differ by at most {way['difference']:.4g} (standard deviation 1)")
        return [*lines, f"goal on one GPU: at least {GOAL} times transformers"]


BENCHMARK: Final = RewardModelBenchmark()
