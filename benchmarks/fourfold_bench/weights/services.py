"""Measures weight updates through the trainer and rollout services, called as the coordinator calls them.

    step of the trainer -> SendWeights, BeginWeights at once -> ReceiveWeights -> CommitWeights(hold) -> ReleaseWeights

The stall is measured by the engine, from the moment that nothing is sampled to the moment that it resumes. The
coordinator's probe comes between commit and release, when the engine samples again; it is not part of this benchmark.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.config import Config, from_tables
from fourfold.errors import Unavailable
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import call, open_channel
from fourfold.trainer.client import AsyncTrainerClient
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold.weights.manifest import Manifest
from fourfold_bench.gpus import GpuMemory, visible
from fourfold_bench.models import SHAPES
from fourfold_bench.processes import BenchProcesses
from fourfold_bench.record import percentiles
from fourfold_bench.streams import Streams, streaming_request
from fourfold_bench.weights.benchmark import WeightSettings

_READY_SECONDS: Final = 400.0
_STEP_SECONDS: Final = 300.0
_STREAM_SECONDS: Final = 3600.0
_TOKENS_BETWEEN: Final = 4
_PROMPT_TOKENS: Final = 16
_ROW: Final = np.arange(3, 35, dtype=np.int32)
_RECENT: Final = 500  # newest messages of a stream; older ones tell nothing about the current round

Seconds = dict[str, float]
"""Seconds of one round, by name."""
Phase = dict[str, list[float]]
"""Seconds of all rounds of a kind, by name."""


def measure(settings: WeightSettings, folder: Path) -> dict[str, Any]:
    with BenchProcesses(folder) as processes:
        model = processes.write_model(settings.shape, context=settings.context)
        path = processes.write_recipe(recipe(settings, model))
        processes.serve("trainer", path, env=visible(*settings.trainer_devices))
        processes.serve("rollout", path, env=visible(settings.engine_device))
        targets = processes.ready("trainer", "rollout", timeout=_READY_SECONDS)
        return asyncio.run(_measure(settings, *targets))


async def _measure(settings: WeightSettings, trainer: str, engine: str) -> dict[str, Any]:
    async with open_channel(trainer, None) as to_trainer, open_channel(engine, None) as to_rollout:
        return await _ServiceRounds(settings, to_trainer, to_rollout).run()


def recipe(settings: WeightSettings, model: Path) -> Config:
    """Return the recipe of the services.

    Raises:
        ConfigError: the settings break a rule of recipes.
    """
    return from_tables(
        {
            "name": "bench",
            "steps": 1,
            "model": {"source": str(model), "max_context_tokens": settings.context},
            "data": {"train": {"reasoning_gym": "products", "size": 64}},
            "sampling": {"max_new_tokens": 16},
            "batch": {"prompts_per_step": 1, "group_size": 2},
            "rollout": {
                "gpus_per_replica": int(settings.on_gpus),
                "gpu_memory_utilization": settings.engine_memory,
                "max_concurrent_samples": max(2, settings.streams),  # groups have at least two samples
                "enforce_eager": settings.eager,
            },
            "trainer": {
                "device": "cuda" if settings.on_gpus else "cpu",
                "ranks": len(settings.trainer_devices),
                "zero_stage": 3 if settings.zero3 else 1,
                "offload": settings.offload,
                "learning_rate": 1e-4,
            },
        },
        source="the benchmark's recipe",
    )


class _ServiceRounds:
    def __init__(self, settings: WeightSettings, to_trainer: Any, to_rollout: Any) -> None:
        self._settings = settings
        self._trainer = AsyncTrainerClient(to_trainer, peer="trainer")
        self._sender = weight_grpc.TrainerWeightServiceStub(to_trainer)
        self._engine = control_grpc.RolloutControlServiceStub(to_rollout)
        client = AsyncRolloutClient(to_rollout, peer="rollout")
        self._streams = Streams(client, self._stream_request, callers=settings.streams, timeout=_STREAM_SECONDS)
        self._epoch = int(time.time())
        self._version = 0
        self._manifest: Manifest

    async def run(self) -> dict[str, Any]:
        """Run all rounds; return JSON values."""
        settings, streams = self._settings, self._streams
        with GpuMemory([*settings.trainer_devices, settings.engine_device]) as gpus:
            await streams.start()
            try:
                await streams.wait_for(_TOKENS_BETWEEN, timeout=_STEP_SECONDS)
                before = gpus.used()
                opens = []
                for _ in range(2):
                    began = time.perf_counter()
                    report = await self._open()
                    opens.append(time.perf_counter() - began)
                opened = gpus.used()
                await self._rounds(settings.warm_up, verify=True)
                plain = await self._rounds(settings.rounds, verify=False)
                verified = await self._rounds(settings.verified_rounds, verify=True)
                peak = gpus.peak()
                tokens = await self._end_streams()
            finally:
                await streams.stop()
        byte_count = self._manifest.byte_count
        return {
            "bytes": byte_count,
            "tensors": len(self._manifest.tensors),
            "applied": {"direct": report.direct_tensor_count, "reload": report.reload_tensor_count},
            "open": percentiles(opens),
            "gigabytes_per_second": round(byte_count / statistics.median(plain["receive"]) / 1e9, 2),
            "gpu_mib": {d: {"open": round(opened[d] - before[d]), "most": round(peak[d] - before[d])} for d in before},
            "plain": {name: percentiles(values) for name, values in plain.items()},
            "verified": {name: percentiles(values) for name, values in verified.items()},
            "token_gap": percentiles([_usual_gap(streams.times)]),
            "tokens": tokens,
            **self._waits(plain),
        }

    def _waits(self, plain: Phase) -> dict[str, Any]:
        """Return the times that clients waited: for first tokens, and in the round with the longest gap."""
        if not self._streams.first_token:
            return {}
        rounds = zip(plain["longest_gap"], plain["stall"], strict=True)
        gap, stall = max(rounds, key=lambda times: times[0] - times[1])
        return {
            "first_token": percentiles(self._streams.first_token),
            "worst_round": {"gap_ms": round(1000 * gap, 3), "stall_ms": round(1000 * stall, 3)},
        }

    def _stream_request(self, index: int, count: int) -> rollout.GenerateRequest:
        settings, vocabulary = self._settings, SHAPES[self._settings.shape]["vocab_size"]
        # The first requests differ in length, so that the streams do not all restart in one step.
        offset = settings.context // 2 * index // settings.streams if not count else 0
        params = rollout.SamplingParams(max_tokens=settings.context - _PROMPT_TOKENS - 1 - offset)
        prompt = [(7 * index + i) % vocabulary for i in range(_PROMPT_TOKENS)]
        return streaming_request(f"stream-{index}-{count}", prompt, params, flush_seconds=settings.flush_seconds)

    async def _end_streams(self) -> dict[str, int]:
        """Abort all requests, which return the tokens that they have, and count the tokens of all requests."""
        self._streams.end()
        fixed: dict[str, Any] = {"epoch": self._epoch, "policy_version": self._version + 1}
        begin = control.BeginWeightsRequest(**fixed, pause_mode=control.PAUSE_MODE_ABORT)
        await self._call(self._engine.BeginWeights, begin)
        await self._call(self._engine.AbortWeights, control.AbortWeightsRequest(epoch=self._epoch))
        return await self._streams.account(timeout=self._settings.timeout)

    async def _open(self) -> control.OpenWeightsResponse:
        layout = await self._call(self._sender.GetManifest, weight.GetManifestRequest())
        about = await self._call(self._engine.DescribeEngine, control.DescribeEngineRequest())
        self._manifest = Manifest.from_bytes(layout.manifest)
        self._epoch += 1
        terms = {"epoch": self._epoch, "backend": self._settings.backend, "receiver_count": about.worker_count}
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
            gaps, usual = self._streams.longest_gaps(asked, answered), _usual_gap(self._streams.times)
            longest, mean = max(gaps, default=0.0), sum(gaps) / max(1, len(gaps))
            row |= {"whole": answered - asked, "gap": longest - usual, "mean_gap": mean - usual, "longest_gap": longest}
            for name, value in row.items():
                phase.setdefault(name, []).append(value)
        return phase

    async def _update(self, version: int, *, verify: bool) -> Seconds:
        fixed: dict[str, Any] = {"epoch": self._epoch, "policy_version": version}
        at = [time.perf_counter()]
        sending = asyncio.create_task(
            self._call(self._sender.SendWeights, weight.SendWeightsRequest(**fixed, skip_sums=not verify))
        )
        mode = control.PauseMode.Value(f"PAUSE_MODE_{self._settings.pause.upper()}")
        begin = control.BeginWeightsRequest(**fixed, pause_mode=mode)
        await self._call(self._engine.BeginWeights, begin)
        at.append(time.perf_counter())
        receive = control.ReceiveWeightsRequest(**fixed, skip_sums=not verify)
        received = await self._call(self._engine.ReceiveWeights, receive)
        at.append(time.perf_counter())
        sent = await sending
        if sent.weights_digest != received.weights_digest:
            raise Unavailable(f"version {version}: the digests of sender and receiver differ")
        at.append(time.perf_counter())
        committed = await self._call(self._engine.CommitWeights, control.CommitWeightsRequest(**fixed, hold=True))
        at.append(time.perf_counter())
        await self._call(self._engine.ReleaseWeights, control.ReleaseWeightsRequest(**fixed))
        at.append(time.perf_counter())
        seconds = [end - start for start, end in itertools.pairwise(at)]
        names = ("begin", "receive", "compare", "commit", "release")
        return dict(zip(names, seconds, strict=True)) | {"stall": committed.pause_seconds}

    async def _step(self) -> int:
        """Train one step on an arbitrary row; return the policy version."""
        step = (await self._trainer.get_status(timeout=_STEP_SECONDS)).step + 1
        weights = np.full(len(_ROW), 1e-3, np.float32)
        weights[0] = 0  # the first token has no prediction
        await self._trainer.forward_backward([_ROW], [weights], step=step, timeout=_STEP_SECONDS)
        await self._trainer.optim_step(step, timeout=_STEP_SECONDS)
        return (await self._trainer.get_status(timeout=_STEP_SECONDS)).policy_version

    async def _call(self, method: Any, request: Any) -> Any:
        return await call(method, request, timeout=self._settings.timeout, peer="service")


def _usual_gap(times: Sequence[list[float]]) -> float:
    """Return the median time between two messages of a stream; 0 without streams.

    `times` is when each stream got its messages; the lists may grow meanwhile.
    """
    gaps = [b - a for recent in (one[-_RECENT:] for one in times) for a, b in itertools.pairwise(recent)]
    return statistics.median(gaps) if gaps else 0.0
