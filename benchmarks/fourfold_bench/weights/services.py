"""The same through the real services, trainer and rollout, called as the coordinator does.

    step of the trainer -> SendWeights, BeginWeights at once -> ReceiveWeights -> CommitWeights(hold) -> ReleaseWeights

The stall is what the engine measures, from the moment that nothing is sampled to the moment that it is told to go on.
The coordinator's probe lies between commit and release, where the engine samples already; it is left out here.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.errors import Unavailable
from fourfold.host.scratch import Scratch
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rpc.channel import call, open_channel
from fourfold.trainer.client import AsyncTrainerClient
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold.weights.manifest import Manifest
from fourfold_bench.devices import visible
from fourfold_bench.memory import GpuMemory
from fourfold_bench.shapes import write_config
from fourfold_bench.weights.numbers import Phase, Seconds, summary, usual_gap
from fourfold_bench.weights.settings import Settings
from fourfold_bench.weights.streams import Streams

_READY_SECONDS: Final = 400.0
_STOP_SECONDS: Final = 10.0
_STEP_SECONDS: Final = 300.0
_TOKENS_BETWEEN: Final = 4
_ROW: Final = np.arange(3, 35, dtype=np.int32)

_RECIPE: Final = """
name = "bench"
steps = 1
[model]
source = "{folder}"
max_context_tokens = {context}
[data.train]
reasoning_gym = "products"
size = 64
[sampling]
max_new_tokens = 16
[batch]
prompts_per_step = 1
group_size = 2
[rollout]
gpus_per_replica = {gpus}
gpu_memory_utilization = {memory}
max_concurrent_samples = {streams}
enforce_eager = {eager}
[trainer]
device = "{device}"
ranks = {ranks}
zero_stage = {stage}
learning_rate = 1e-4
"""


async def run(settings: Settings) -> dict[str, Any]:
    """Measure; returns JSON values like `rounds.run`."""
    scratch = Scratch("bench")
    started: list[asyncio.subprocess.Process] = []
    try:
        recipe = _prepare(settings, scratch.path)
        trainer, rollout_service = await asyncio.gather(
            _serve("trainer", recipe, scratch.path, settings.trainer_devices, started),
            _serve("rollout", recipe, scratch.path, (settings.engine_device,), started),
        )
        async with open_channel(trainer, None) as to_trainer, open_channel(rollout_service, None) as to_rollout:
            return await _Bench(settings, to_trainer, to_rollout).run()
    finally:
        for process in started:
            if process.returncode is None:
                process.terminate()
        for process in started:
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                process.kill()
        scratch.remove()


def _prepare(settings: Settings, scratch: Path) -> Path:
    """Write the model, with weights, and the recipe."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = write_config(scratch / "model", settings.shape)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    make: Any = transformers.AutoModelForCausalLM
    make.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    recipe = scratch / "recipe.toml"
    text = _RECIPE.format(
        folder=folder,
        context=settings.context,
        gpus=1 if settings.on_gpus else 0,
        memory=settings.engine_memory,
        streams=max(2, settings.streams),  # the recipe has groups of two
        eager=str(settings.eager).lower(),
        device="cuda" if settings.on_gpus else "cpu",
        ranks=len(settings.trainer_devices),
        stage=3 if settings.zero3 else 0,
    )
    recipe.write_text(text, encoding="utf-8")
    return recipe


async def _serve(
    role: str, recipe: Path, scratch: Path, devices: Sequence[str], started: list[asyncio.subprocess.Process]
) -> str:
    """Start a service that sees these devices; return its host:port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fourfold", "serve", role, str(recipe)),
        *("--listen", "127.0.0.1:0", "--run-dir", str(scratch / "run")),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **visible(*devices)},
    )
    started.append(process)
    assert process.stdout is not None, "a pipe"
    async with asyncio.timeout(_READY_SECONDS):
        while line := await process.stdout.readline():
            if line.startswith(b"READY "):
                return line.split()[1].decode()
    raise Unavailable(f"the {role} service of the benchmark ended; its messages are above")


class _Bench:
    def __init__(self, settings: Settings, to_trainer: Any, to_rollout: Any) -> None:
        self._settings = settings
        self._trainer = AsyncTrainerClient(to_trainer, peer="trainer")
        self._sender = weight_grpc.TrainerWeightServiceStub(to_trainer)
        self._engine = control_grpc.RolloutControlServiceStub(to_rollout)
        self._streams = Streams(settings, AsyncRolloutClient(to_rollout, peer="rollout"))
        self._epoch = int(time.time())
        self._version = 0
        self._manifest: Manifest

    async def run(self) -> dict[str, Any]:
        """Run everything."""
        settings = self._settings
        memory = GpuMemory([*settings.trainer_devices, settings.engine_device])
        await self._streams.start()
        try:
            await self._streams.wait_for(_TOKENS_BETWEEN, timeout=_STEP_SECONDS)
            before = memory.used()
            opens = []
            for _ in range(2):
                began = time.perf_counter()
                report = await self._open()
                opens.append(time.perf_counter() - began)
            opened = memory.used()
            await self._rounds(settings.warm_up, verify=True)
            plain = await self._rounds(settings.rounds, verify=False)
            verified = await self._rounds(settings.verified_rounds, verify=True)
            peak = memory.peak()
            tokens = await self._end_streams()
        finally:
            await self._streams.stop()
            memory.stop()
        return {
            "bytes": self._manifest.byte_count,
            "tensors": len(self._manifest.tensors),
            "applied": {"direct": report.direct_tensor_count, "reload": report.reload_tensor_count},
            "open": summary(opens),
            "gigabytes_per_second": round(self._manifest.byte_count / statistics.median(plain["receive"]) / 1e9, 2),
            "gpu_mib": {d: {"open": round(opened[d] - before[d]), "most": round(peak[d] - before[d])} for d in before},
            "plain": {name: summary(values) for name, values in plain.items()},
            "verified": {name: summary(values) for name, values in verified.items()},
            "token_gap": summary([usual_gap(self._streams.times)]),
            "tokens": tokens,
            **self._waits(plain),
        }

    def _waits(self, plain: Phase) -> dict[str, Any]:
        """Return what clients waited: for first tokens, and in the round with the longest gap beside its stall."""
        if not self._streams.first_token:
            return {}
        rounds = zip(plain["longest_gap"], plain["stall"], strict=True)
        gap, stall = max(rounds, key=lambda times: times[0] - times[1])
        return {
            "first_token": summary(self._streams.first_token),
            "worst_round": {"gap_ms": round(1000 * gap, 3), "stall_ms": round(1000 * stall, 3)},
        }

    async def _end_streams(self) -> dict[str, int]:
        """Have the engine give up what runs, with the tokens it has, and account for all of them."""
        self._streams.end()
        fixed: dict[str, Any] = {"epoch": self._epoch, "policy_version": self._version + 1}
        begin = control.BeginWeightsRequest(**fixed, pause_mode=control.PAUSE_MODE_ABORT)
        await self._call(self._engine.BeginWeights, begin)
        await self._call(self._engine.AbortWeights, control.AbortWeightsRequest(epoch=self._epoch))
        return await self._streams.account(timeout=self._settings.timeout)

    async def _open(self) -> control.OpenWeightsResponse:
        settings = self._settings
        layout = await self._call(self._sender.GetManifest, weight.GetManifestRequest())
        about = await self._call(self._engine.DescribeEngine, control.DescribeEngineRequest())
        self._manifest = Manifest.from_bytes(layout.manifest)
        self._epoch += 1
        terms = {"epoch": self._epoch, "backend": settings.chosen_backend, "receiver_count": about.worker_count}
        offers = await self._call(self._sender.MakeOffer, weight.MakeOfferRequest(**terms))
        joining = control.OpenWeightsRequest(**terms, manifest=layout.manifest, offers=offers.offers)
        report, _ = await asyncio.gather(
            self._call(self._engine.OpenWeights, joining),
            self._call(self._sender.OpenWeights, weight.OpenWeightsRequest(epoch=self._epoch)),
        )
        answer: control.OpenWeightsResponse = report
        return answer

    async def _rounds(self, count: int, *, verify: bool) -> Phase:
        phase: Phase = {}
        for _ in range(count):
            self._version = await self._step()
            await self._streams.wait_for(_TOKENS_BETWEEN, timeout=_STEP_SECONDS)
            asked = time.perf_counter()
            row = await self._update(self._version, verify=verify)
            answered = time.perf_counter()
            await self._streams.wait_for(2, timeout=_STEP_SECONDS)
            gap = self._streams.longest_gap(asked, answered)
            row |= {"whole": answered - asked, "gap": gap - usual_gap(self._streams.times), "longest_gap": gap}
            for name, value in row.items():
                phase.setdefault(name, []).append(value)
        return phase

    async def _update(self, version: int, *, verify: bool) -> Seconds:
        fixed: dict[str, Any] = {"epoch": self._epoch, "policy_version": version}
        at = [time.perf_counter()]
        sending = asyncio.create_task(
            self._call(self._sender.SendWeights, weight.SendWeightsRequest(**fixed, skip_sums=not verify))
        )
        begin = control.BeginWeightsRequest(**fixed, pause_mode=control.PAUSE_MODE_KEEP)
        await self._call(self._engine.BeginWeights, begin)
        at.append(time.perf_counter())
        receive = control.ReceiveWeightsRequest(**fixed, skip_sums=not verify)
        received = await self._call(self._engine.ReceiveWeights, receive)
        at.append(time.perf_counter())
        sent = await sending
        if sent.weights_digest != received.weights_digest:
            raise Unavailable(f"version {version} did not arrive as it was sent")
        at.append(time.perf_counter())
        committed = await self._call(self._engine.CommitWeights, control.CommitWeightsRequest(**fixed, hold=True))
        at.append(time.perf_counter())
        await self._call(self._engine.ReleaseWeights, control.ReleaseWeightsRequest(**fixed))
        at.append(time.perf_counter())
        names = ("begin", "receive", "compare", "commit", "release")
        return {name: b - a for name, a, b in zip(names, at, at[1:], strict=False)} | {"stall": committed.pause_seconds}

    async def _step(self) -> int:
        """Train one step on a row of nothing in particular; return the version."""
        step = (await self._trainer.get_status(timeout=_STEP_SECONDS)).step + 1
        weights = np.full(len(_ROW), 1e-3, np.float32)
        weights[0] = 0  # nothing comes before the first token
        await self._trainer.forward_backward([_ROW], [weights], step=step, timeout=_STEP_SECONDS)
        await self._trainer.optim_step(step, timeout=_STEP_SECONDS)
        return (await self._trainer.get_status(timeout=_STEP_SECONDS)).policy_version

    async def _call(self, method: Any, request: Any) -> Any:
        return await call(method, request, timeout=self._settings.timeout, peer="service")
