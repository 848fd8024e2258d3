"""Starts a rollout service process with a real vLLM CPU engine, and a trainer of one rank that publishes weights."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import select
import socket
import subprocess
import sys
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from google.protobuf.duration_pb2 import Duration

from fourfold.host.process_tree import PARENT_PID_VARIABLE
from fourfold.rollout.client import AsyncRolloutClient, Completion, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from tests.support.tiny_models import VOCABULARY_SIZE

CONTEXT: Final = 512
SAMPLES: Final = 32
START_SECONDS: Final = 400.0
_names = itertools.count()

RECIPE: Final = """
name = "tiny"
steps = 1
model = {{ source = "{model}", max_context_tokens = {context}, dtype = "{dtype}" }}
data = {{ train = {{ reasoning_gym = "products", size = 8 }} }}
batch = {{ prompts_per_step = 1, group_size = 2 }}
sampling = {{ max_new_tokens = 8 }}
rollout = {{ max_concurrent_samples = {samples}, public_listen = "{public}" }}
weights = {{ timeout_seconds = 20.0 }}
"""


@dataclass(slots=True)
class Service:
    process: subprocess.Popen[str]
    target: str
    public: str
    errors: Path
    model: Path

    def close(self) -> None:
        """Kill the process and close its pipe."""
        self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child


def start(
    model: Path,
    folder: Path,
    temporary: Path | None = None,
    program: str = "fourfold",
    *,
    dtype: str = "bfloat16",
    running: int | None = None,
    text: str = "",
) -> Service:
    """Start a service and wait for its READY line.

    Its recipe is `text`, or RECIPE for the model and `dtype`. Its temporary files go to `temporary`. In the slow
    program, at most `running` samples run at once.
    """
    recipe, errors = folder / "tiny.toml", folder / "stderr.log"
    public = f"127.0.0.1:{free_port()}"
    fields = {"model": model, "context": CONTEXT, "samples": SAMPLES, "public": public}
    recipe.write_text(text or RECIPE.format(**fields, dtype=dtype))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "OMP_"))}
    env |= {PARENT_PID_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "1"}  # outputs are half processed as often as they can be
    env |= {"TMPDIR": str(temporary)} if temporary else {}
    env |= {"SLOW_ROLLOUT_RUNNING": str(running)} if running else {}
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", program, "serve", "rollout", str(recipe)],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=folder,
        )  # fmt: skip
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline() if readable else ""
    if not line.startswith("READY "):
        process.kill()
        raise AssertionError(f"the service is not ready: {line!r}\n{errors.read_text()[-4000:]}")
    return Service(process, line.split()[1], public, errors, model)


def free_port() -> int:
    """Return a free port outside the range of outgoing connections, which could take it before the service does."""
    ports = list(range(20_000, 30_000))
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def gone(process: psutil.Process, seconds: float) -> bool:
    """Return whether a process ends within `seconds`."""
    end = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def request(
    prompt: int = 0,
    *,
    samples: int = 1,
    max_tokens: int = 8,
    seed: int = 1,
    name: str = "",
    flush: int | None = None,
    **fields: Any,
) -> pb.GenerateRequest:
    """Return a request with prompt number `prompt`; `flush` is in nanoseconds."""
    params = {"max_tokens": max_tokens, "seed": seed, **fields.pop("params", {})}
    if flush is not None:
        fields["flush_interval"] = Duration(seconds=flush // 10**9, nanos=flush % 10**9)
    return pb.GenerateRequest(
        request_id=name or f"call-{next(_names)}",
        prompt_token_ids=np.random.default_rng(prompt).integers(3, VOCABULARY_SIZE, 12).tolist(),
        sample_count=samples,
        sampling_params=pb.SamplingParams(**params),
        **fields,
    )


async def running_count(client: AsyncRolloutClient) -> int:
    async with aclosing(client.watch_load(period=0.05, timeout=5)) as reports:
        return (await anext(reports)).running_sample_count


async def until_running(client: AsyncRolloutClient, some: bool, seconds: float = 10) -> None:
    """Wait until samples are in the engine, or with `some` False until none is."""
    async with asyncio.timeout(seconds):
        while (await running_count(client) > 0) != some:
            await asyncio.sleep(0.01)


async def sampled_count(client: AsyncRolloutClient) -> int:
    async with aclosing(client.watch_load(period=0.05, timeout=5)) as reports:
        return (await anext(reports)).sampled_token_count


async def until_sampled(client: AsyncRolloutClient, count: int, seconds: float = 10) -> None:
    """Wait until the engine has returned `count` more tokens."""
    async with asyncio.timeout(seconds), aclosing(client.watch_load(period=0.01, timeout=seconds)) as reports:
        first = await anext(reports)
        async for report in reports:
            if report.sampled_token_count - first.sampled_token_count >= count:
                return


def plain(samples: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(s.token_ids.tolist(), s.logprobs.tolist()) for s in samples]


class Publisher:
    """A trainer of one rank that publishes the weights of model folders, one after the other."""

    _epochs = itertools.count(100)

    def __init__(
        self, control: RolloutControlClient, *, version: int, dtype: str = "bfloat16", timeout: float = 10
    ) -> None:
        self._control, self._dtype, self._timeout = control, dtype, timeout
        self.epoch, self.version = -1, version
        self._sender: Any = None

    async def open(self, folder: Path) -> Any:
        """Open a new epoch to send the weights of a folder; return them as a torch model."""
        import torch
        import transformers

        from fourfold.weights.sender import WeightSender
        from fourfold.weights.source.dense import DenseSource

        dtype = getattr(torch, self._dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.epoch = next(self._epochs)
        self._sender = WeightSender(DenseSource(model, dtype=dtype), rank=0, rank_count=1)
        offer = self._sender.make_offer(self.epoch, "shm", 1, timeout=self._timeout)
        manifest = self._sender.manifest().to_bytes()
        await asyncio.gather(
            self._control.open(
                epoch=self.epoch, backend="shm", manifest=manifest, offers=[offer],
                receiver_count=1, first_receiver_index=0, timeout=self._timeout,
            ),
            asyncio.to_thread(self._sender.open, self.epoch, timeout=self._timeout),
        )  # fmt: skip
        return model

    async def begin(self, pause_mode: Any = control_pb.PAUSE_MODE_KEEP) -> None:
        """Begin an update to the next version."""
        version = self.version + 1
        await self._control.begin(
            epoch=self.epoch, policy_version=version, pause_mode=pause_mode, timeout=self._timeout
        )
        self.version = version

    async def send(self) -> None:
        """Send the version and check that both sides have the same digest."""
        from fourfold.weights.digest import digest_of

        sent, digest = await asyncio.gather(
            asyncio.to_thread(self._sender.send, self.epoch, self.version, timeout=self._timeout),
            self._control.receive(epoch=self.epoch, policy_version=self.version, timeout=self._timeout),
        )
        assert digest == digest_of(self._sender.manifest(), sent.partial_sums)

    async def commit(self, *, hold: bool = False) -> None:
        await self._control.commit(epoch=self.epoch, policy_version=self.version, hold=hold, timeout=self._timeout)

    async def release(self) -> None:
        await self._control.release(epoch=self.epoch, policy_version=self.version, timeout=self._timeout)

    async def abort(self) -> Any:
        return await self._control.abort(epoch=self.epoch, timeout=self._timeout)
