"""Starts an engine, its gateway and vLLM's own server, one engine at a time, and the clients of each way."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from fourfold.config import Config, from_tables
from fourfold.errors import DeadlinePassed
from fourfold_bench.gateway.benchmark import BARE_PROXY, DIRECT, GatewaySettings
from fourfold_bench.gateway.client import percentiles
from fourfold_bench.gpus import visible
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.models import write_config, write_tokenizer
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.vllm_process import CPU_BLOCK_TOKENS, server_environment

_START_SECONDS: Final = 900.0
_CLIENT_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.2
_GATEWAY, _VLLM = "gateway", "vllm"
# The prompt of a chat has exactly the tokens of its text.
_TEMPLATE: Final = "{% for m in messages %}{{ m.content }}{% endfor %}"


def measure(settings: GatewaySettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure each way; return JSON values.

    Raises:
        Unavailable: a process died; with the end of its log.
        DeadlinePassed: a process did not start or end in time.
    """
    with BenchProcesses(run.folder) as processes:
        given = settings.write(run.folder / "settings.json")
        model = _write_model(settings, processes)
        config = recipe(settings, model, http_port=_free_port())
        path = processes.write_recipe(config)
        say("starting the engine")
        engine = _start_engine(settings, processes, path)
        listen = ("--listen", "127.0.0.1:0", "--run-dir", str(run.folder / "run"), "--engine", engine)
        processes.start(_GATEWAY, "-m", "fourfold", "serve", "gateway", path, *listen, env=visible("cpu"))
        (gateway,) = processes.ready(_GATEWAY, timeout=_START_SECONDS)
        http_target = config.gateway.http_listen
        targets = {DIRECT: engine, "grpc": gateway, "http": http_target, "http-logprobs": http_target}
        if BARE_PROXY in settings.ways:
            processes.start(BARE_PROXY, "-m", "fourfold_bench.gateway.bare_proxy", engine, env=visible("cpu"))
            (targets[BARE_PROXY],) = processes.ready(BARE_PROXY, timeout=_START_SECONDS)
        measured = [way for way in settings.ways if way != _VLLM and not (settings.rate and way == DIRECT)]
        ways = {way: _measure_way(settings, processes, given, way, targets) for way in measured}
        if run.profile is not None:
            run.profile.begin(_GATEWAY, processes.pid(_GATEWAY))
            _measure_way(settings, processes, given, measured[-1], targets, name="profiled")
            run.profile.end()
        if _VLLM in settings.ways:
            processes.end(_GATEWAY)
            processes.end("rollout")
            say("starting vLLM's server")
            targets[_VLLM] = _start_vllm(settings, processes, model)
            ways[_VLLM] = _measure_way(settings, processes, given, _VLLM, targets)
    return {"ways": ways}


def _write_model(settings: GatewaySettings, processes: BenchProcesses) -> Path:
    """Write a model whose tokenizer has a chat template; return its folder."""
    if settings.engine == "echo":
        model = write_config(processes.folder / "model", settings.shape, context=settings.context)
        write_tokenizer(model, settings.shape)
        (model / "model.safetensors").touch()  # nothing reads it
    else:
        model = processes.write_model(settings.shape, context=settings.context)
    (model / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (model / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return model


def _start_engine(settings: GatewaySettings, processes: BenchProcesses, recipe_path: str) -> str:
    if settings.engine == "echo":
        processes.start("rollout", "-m", "fourfold_bench.gateway.echo", recipe_path, env=visible("cpu"))
    else:
        processes.serve("rollout", recipe_path, env=visible(settings.device))
    (target,) = processes.ready("rollout", timeout=_START_SECONDS)
    return target


def _start_vllm(settings: GatewaySettings, processes: BenchProcesses, model: Path) -> str:
    """Start `vllm serve`; return its host:port when it answers."""
    port = _free_port()
    words = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--served-model-name", "bench", "--dtype", "bfloat16", "--generation-config", "vllm"]
    # vLLM refuses prompts by their characters; twice the context admits the longest words.
    words += ["--max-model-len", str(2 * settings.context), "--max-num-seqs", str(settings.concurrency)]
    if settings.on_gpu:
        words += ["--gpu-memory-utilization", str(settings.engine_memory)]
    else:
        words += ["--block-size", str(CPU_BLOCK_TOKENS)]
    if settings.eager:
        words += ["--enforce-eager"]
    env = server_environment(kv_cache_gib=0 if settings.on_gpu else settings.kv_cache_gib)
    processes.start(_VLLM, *words, env=env | visible(settings.device))
    end = time.monotonic() + _START_SECONDS
    answers = False

    def ready() -> bool:
        nonlocal answers
        answers = _answers(port)
        if not answers:
            time.sleep(_POLL_SECONDS)
        return answers

    processes.wait(_VLLM, timeout=end - time.monotonic(), until=ready)
    if not answers:
        raise DeadlinePassed(f"vLLM's server ended before it was ready; the log is {processes.log(_VLLM)}")
    return f"127.0.0.1:{port}"


def _answers(port: int) -> bool:
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _measure_way(
    settings: GatewaySettings,
    processes: BenchProcesses,
    given: Path,
    way: str,
    targets: Mapping[str, str],
    *,
    name: str = "",
) -> dict[str, Any]:
    """Run the clients of one way; return its numbers."""
    say(f"measuring {name or way}")
    names = [f"client-{name or way}-{index}" for index in range(settings.clients)]
    outs = [processes.folder / f"{each}.json" for each in names]
    gateway = None if way in (DIRECT, _VLLM) else psutil.Process(processes.pid(_served_by(way)))
    before = _cpu_seconds(gateway)
    for index, (each, out) in enumerate(zip(names, outs, strict=True)):
        words = ("-m", "fourfold_bench.gateway.client", str(given), str(index), way, json.dumps(targets), str(out))
        processes.start(each, *words, env=visible("cpu"))
    processes.wait(*names, timeout=_CLIENT_SECONDS)
    cpu = _cpu_seconds(gateway) - before
    results = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    latencies = [value for result in results for value in result["latencies"][way]]
    found: dict[str, Any] = {"requests": len(latencies), **percentiles(latencies)}
    if settings.rate:
        direct = percentiles(results[0]["latencies"][DIRECT])
        found |= {f"direct_{key}": value for key, value in direct.items()}
        found["added_p50_ms"] = found["p50_ms"] - direct["p50_ms"]
        found["cpu_ms_per_request"] = 1e3 * cpu / results[0]["calls"]
        return found
    found["tokens_per_second"] = len(latencies) * settings.new_tokens / settings.seconds
    say(f"{name or way}: {found['tokens_per_second']:,.0f} tokens/s")
    if gateway is not None:
        share = settings.seconds / (settings.seconds + settings.warm_up)
        found["cpu_ms_per_request"] = 1e3 * cpu * share / max(len(latencies), 1)
    return found


def _served_by(way: str) -> str:
    """Return the name of the process between the clients of a way and the engine."""
    return BARE_PROXY if way == BARE_PROXY else _GATEWAY


def _cpu_seconds(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def recipe(settings: GatewaySettings, model: Path, *, http_port: int) -> Config:
    """Return the recipe of the engine and of the gateway.

    Raises:
        ConfigError: the settings break a rule of recipes.
    """
    return from_tables(
        {
            "name": "bench-gateway",
            "steps": 1,
            "model": {"source": str(model), "max_context_tokens": settings.context},
            "data": {"train": {"path": "none.jsonl"}, "chat": False},
            "sampling": {"max_new_tokens": settings.new_tokens},
            "batch": {
                "prompts_per_step": settings.concurrency,
                "group_size": 2,
                "tokens_per_micro_batch": max(4096, settings.context),
            },
            "rollout": {
                "gpus_per_replica": int(settings.on_gpu),
                "gpu_memory_utilization": settings.engine_memory,
                "kv_cache_gib": None if settings.on_gpu else settings.kv_cache_gib,
                "max_concurrent_samples": max(2, settings.concurrency),
                "enforce_eager": settings.eager,
            },
            "gateway": {"http_listen": f"127.0.0.1:{http_port}"},
        },
        source="the benchmark's recipe",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
