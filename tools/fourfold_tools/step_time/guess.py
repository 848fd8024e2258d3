"""Guesses the rates of the cost model before the first run, from data sheets of GPUs, or from a product on this CPU.

    trainer    a token takes its FLOP / (share of the peak x ranks), and an optimizer step some time of its own
    engine     a step reads the weights (`base`), computes each sample (`per_sample`), reads the KV cache
    publish    the bytes of the weights at the speed of a copy, and the calls of an update

`tests/unit/tools/step_time/test_guess.py` compares the guesses for an H200 with measured steps; those are within a
factor of two. The shares of a CPU are from one measured run, and other GPUs have those of the H200.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fourfold.config import Config
from fourfold.host.gpu_speed import gpu_speed
from fourfold.host.hardware import Gpu
from fourfold.model.folder import ModelShape
from fourfold.plan.memory import kv_bytes_per_token, weight_bytes
from fourfold.plan.models import ModelSizes
from fourfold.plan.weight_update import update_bytes
from fourfold.rollout.engine_step import EngineStep
from fourfold.text import format_duration
from fourfold_tools.step_time.cost import Rates, predict
from fourfold_tools.step_time.rates import Basis, workload

_USUAL_GPU: Final = "H100"
_SIZE: Final = 1024  # rows of the matrices that measure a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The speed of one rank of the trainer, or of one GPU or replica of the engines."""

    title: str
    train_flops: float  # FLOP/s of passes with gradients
    update_seconds: float  # of an optimizer step, beside its FLOP
    engine_flops: float  # FLOP/s of a decoding batch
    bytes_per_second: float  # of memory, as an engine reads it
    copy_bytes_per_second: float  # of weights from the trainer to the engines
    publish_seconds: float  # of a weight update, beside its bytes
    step_seconds: float  # of an engine step at least
    sample_seconds: float  # of each sample in it, beside its FLOP


def device_of(config: Config, gpus: Sequence[Gpu]) -> Device | None:
    """Return the device of a recipe; None if its GPUs are unknown. `gpus`: those of this machine."""
    if config.trainer.device == "cpu":
        flops = cpu_flops()
        return Device(
            title="this machine's CPU, by a product of matrices" + _load_note(),
            train_flops=0.6 * flops,
            update_seconds=1.0,
            engine_flops=0.5 * flops,
            bytes_per_second=8e9,
            copy_bytes_per_second=2.5e9,
            publish_seconds=2.0,
            step_seconds=10e-3,
            sample_seconds=0.1e-3,
        )
    name = gpus[0].name if gpus else _USUAL_GPU
    if (speed := gpu_speed(name)) is None:
        return None
    return Device(
        title=f"the data sheet of {name}" + ("" if gpus else ", as this machine has no GPU"),
        train_flops=0.45 * speed.flops,
        update_seconds=0.4,
        engine_flops=0.7 * speed.flops,
        bytes_per_second=0.8 * speed.bytes_per_second,
        copy_bytes_per_second=50e9,
        publish_seconds=0.2,
        step_seconds=1.5e-3,
        sample_seconds=5e-6,
    )


def _load_note() -> str:
    """Return a warning if other work takes more than a quarter of this machine."""
    load = os.getloadavg()[0]
    return f" beside other work (load {load:.1f}: it is faster alone)" if load > (os.cpu_count() or 1) / 4 else ""


@functools.cache
def cpu_flops() -> float:
    """Return the float32 FLOP/s of this machine: the best of three products."""
    import numpy as np  # the plans of other recipes need no numpy

    matrix = np.ones((_SIZE, _SIZE), np.float32)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return 2 * _SIZE**3 / min(seconds)


def guess(config: Config, sizes: ModelSizes, device: Device, prompt_tokens: float | None) -> Basis:
    """Return rates of the device, for samples that all have `sampling.max_new_tokens`.

    `prompt_tokens` is the mean of the training prompts; None: unread, and as long as the recipe allows.
    """
    longest = config.sampling.max_new_tokens
    prompt = float(config.model.max_context_tokens - longest) if prompt_tokens is None else prompt_tokens
    shape, pool = sizes.policy, config.rollout_pools[0]
    width, used = max(pool.gpus_per_replica, 1), parameters_per_token(shape)
    engine = EngineStep(
        base=max(weight_bytes(config, shape) / width / device.bytes_per_second, device.step_seconds),
        per_sample=2 * used / width / device.engine_flops + device.sample_seconds,
        per_context_token=kv_bytes_per_token(pool, shape) / width / device.bytes_per_second,
    )
    tokens = prompt + longest
    reference = 0.0
    if config.needs_reference:
        samples = config.batch.prompts_per_step * config.batch.group_size
        passes = samples * tokens * _forward_flop(sizes.reference or shape, tokens)
        reference = passes / max(config.reference.replicas, 1) / device.train_flops
    publish = device.publish_seconds + update_bytes(config, shape) / device.copy_bytes_per_second
    return Basis(
        rates=Rates(
            engine_step=engine,
            prefill_tokens_per_second=device.engine_flops * width / (2 * used),
            train_tokens_per_second=config.trainer.ranks * device.train_flops / _train_flop(config, sizes, tokens),
            publish_seconds=publish,
            pause_seconds=publish,
            reward_seconds=reference,
            other_seconds=config.batch.updates_per_step * device.update_seconds,
        ),
        prompt_tokens=prompt,
        mean_new_tokens=longest,
        longest_new_tokens=longest,
    )


def guess_text(config: Config, sizes: ModelSizes, device: Device, prompt_tokens: float | None) -> tuple[str, float]:
    """Return a sentence on the time of a step and of the run, and the seconds of the run."""
    basis, lag = guess(config, sizes, device, prompt_tokens), config.asynchrony.max_policy_lag
    work = workload(config, sizes.policy, basis, lag)
    step = predict(basis.rates, work, lag).step_seconds
    samples = config.batch.prompts_per_step * config.batch.group_size
    tokens = samples * (basis.prompt_tokens + basis.mean_new_tokens)
    training = tokens / basis.rates.train_tokens_per_second + basis.rates.other_seconds
    steps = f"{_about(step * config.steps)} for the {config.steps:,} steps"
    text = (
        f"a guess from {device.title}; on an H200, guesses were within a factor of two. About {_about(step)} a step, "
        f"of which the trainer takes {_about(training)}, and {steps}, if every answer has "
        f"{basis.longest_new_tokens:,} tokens; without scoring, evaluations and checkpoints."
    )
    return text, step * config.steps


def _about(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else format_duration(seconds)


def parameters_per_token(shape: ModelShape) -> int:
    """Return the parameters that a token uses: in a mixture of experts, only those of its experts."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate) + shape.vocabulary * shape.hidden


def _forward_flop(shape: ModelShape, tokens: float, *, head: bool = True) -> float:
    """Return the FLOP of one token in a forward pass over a sample (services/trainer, fourfold_trainer/flops.py)."""
    used = parameters_per_token(shape) - (0 if head else shape.vocabulary * shape.hidden)
    return 2 * used + 2 * shape.layers * shape.heads * shape.head_dim * tokens


def _train_flop(config: Config, sizes: ModelSizes, tokens: float) -> float:
    """Return the FLOP of one token in all passes of a step: forward, twice it backward, or once with an adapter."""
    update = (2 if sizes.adapters else 3) + config.trainer.gradient_checkpointing
    before = config.batch.updates_per_step > 1
    flop = (update * config.batch.epochs_per_step + before) * _forward_flop(sizes.policy, tokens)
    if config.algorithm.needs_critic:
        flop += (3 * config.batch.epochs_per_step + 1) * _forward_flop(sizes.critic, tokens, head=False)
    return flop
