"""Fuzzes every service of the contract: no call ends with INTERNAL or UNKNOWN, and no call leaks memory.

Real servicers on one real server, with fast fake engines. CI makes 4,000 calls; FOURFOLD_FUZZ_CALLS changes
the number (`make soak` makes 100,000), FOURFOLD_FUZZ_SEED the seed. README.md has the figures.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found]

from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc
from fourfold.reference.v1 import reference_service_pb2 as reference_pb
from fourfold.reference.v1 import reference_service_pb2_grpc as reference_grpc
from fourfold.reward.v1 import reward_service_pb2 as reward_pb
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as rollout_pb
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.trainer.v1 import trainer_service_pb2 as trainer_pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight_pb
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from tests.conftest import Serve
from tests.security.fuzz import Call, Fuzz
from tests.security.fuzz_system import HINTS, SERVICES, System, serve_all

COUNT: Final = int(os.environ.get("FOURFOLD_FUZZ_CALLS", "4000"))
SEED: Final = int(os.environ.get("FOURFOLD_FUZZ_SEED", "1"))
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120 + COUNT / 20)]

AT_ONCE: Final = 24
# Seconds after which the caller cancels a call with a distant deadline or none; the second is for endless streams.
PATIENCE_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.03
# Text of grpc's Python client for a call that ended while the client was writing (grpc#36066), not of a server. A
# server's INTERNAL error would be in the log, which the test checks too.
CLIENTS_OWN: Final = "Internal error from Core"
# Calls that need a service in the right state. If none of them succeeds, the other calls met too few states.
ENOUGH: Final = 50_000
DEEP: Final = (
    "/fourfold.trainer.v1.TrainerService/TrainStep",
    "/fourfold.trainer.v1.TrainerService/ForwardBackward",
    "/fourfold.trainer.v1.TrainerService/SaveCheckpoint",
    "/fourfold.trainer.v1.TrainerWeightService/OpenWeights",
    "/fourfold.rollout.v1.RolloutService/Generate",
    "/fourfold.rollout.v1.RolloutControlService/BeginWeights",
    "/fourfold.reward.v1.RewardService/Score",
    "/fourfold.reference.v1.ReferenceService/ComputeLogprobs",
    "/fourfold.coordinator.v1.MembershipService/Register",
)
# Of the whole process: servers, clients and fake engines. gRPC and the allocator keep some memory.
GROWTH_BYTES: Final = 48 << 20


@pytest.fixture
async def system(serve: Serve, tmp_path: Path) -> AsyncIterator[System]:
    async with serve_all(serve, tmp_path) as made:
        yield made


async def send(channel: grpc.aio.Channel, call: Call) -> tuple[str, str]:
    """Make a call; return the name of its status code, and the status text."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    make: Any = kinds[call.streams_requests, call.streams_responses](call.path)
    given = {"timeout": call.timeout, "metadata": call.metadata}
    running: Any = make(**given) if call.streams_requests else make(call.messages[0], **given)
    answered = False
    patience = LOOK_SECONDS if call.streams_responses else PATIENCE_SECONDS
    try:
        async with asyncio.timeout(0.005 if call.cancels else patience):
            if call.streams_requests:
                with suppress(asyncio.InvalidStateError, ExecuteBatchError):  # the call has ended
                    for message in call.messages:
                        await running.write(message)
                    if call.ends:
                        await running.done_writing()
            if call.streams_responses:
                while await running.read() is not grpc.aio.EOF:
                    answered = True
                code, said = (await running.code()).name, str(await running.details())
                return ("CLIENTS_OWN", "") if said == CLIENTS_OWN else (code, said)
            await running
            return "OK", ""
    except TimeoutError:
        return "OK" if answered else "GIVEN_UP", ""
    except grpc.aio.AioRpcError as error:
        if error.details() == CLIENTS_OWN:
            return "CLIENTS_OWN", ""
        return error.code().name, str(error.details())
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
        return "CANCELLED", ""
    finally:
        running.cancel()


def resident() -> int:
    """Return the private memory of this process in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10


async def test_no_call_is_answered_with_an_internal_error(system: System, caplog: pytest.LogCaptureFixture) -> None:
    codes: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    wrong: list[str] = []
    calls = Fuzz(SERVICES, seed=SEED, hints=HINTS, good=system.live.good()).calls(COUNT)
    began, done, warm, before = time.monotonic(), 0, COUNT // 5, 0

    async def work() -> None:
        nonlocal done, before
        for call in calls:
            code, said = await send(system.channel, call)
            codes[code] += 1
            taken[call.path] += code == "OK"
            if code in ("INTERNAL", "UNKNOWN"):
                wrong.append(f"{code} {call.path} {said[:200]!r} {[m[:60] for m in call.messages]} {call.metadata}")
            done += 1
            if done == warm:
                before = resident()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    grown = resident() - before
    seconds = time.monotonic() - began
    sys.stdout.write(
        f"\nseed {SEED}: {done} calls in {seconds:.0f} s, {dict(codes.most_common())}, wrong {len(wrong)}, memory "
        f"{before / 2**20:.1f} MiB after {warm} calls, then {grown / 2**20:+.1f} MiB\n"
    )
    assert not wrong, "\n".join(wrong[:20])
    assert not system.fatal and not system.unhandled, (system.fatal, system.unhandled[:5])
    assert not (logged := [r.getMessage() for r in caplog.records if _is_ours(r)]), logged[:5]
    await _everyone_answers(system.channel)
    if COUNT >= ENOUGH:
        assert all(taken[path] for path in DEEP), {path: taken[path] for path in DEEP}
    assert grown < GROWTH_BYTES
    assert set(codes) >= {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "NOT_FOUND"}


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record reports an error of ours, not a caller that disconnected."""
    kind = record.exc_info[0] if record.exc_info else None
    gone = kind is not None and kind.__module__.startswith("grpc.")
    return record.name.startswith("fourfold") and record.levelno >= logging.ERROR and not gone


async def _everyone_answers(channel: grpc.aio.Channel) -> None:
    """Check that each service still answers a plain call."""
    await rollout_grpc.RolloutServiceStub(channel).GetInfo(rollout_pb.GetInfoRequest(), timeout=10)
    await control_grpc.RolloutControlServiceStub(channel).DescribeEngine(control_pb.DescribeEngineRequest(), timeout=10)
    await reward_grpc.RewardServiceStub(channel).GetInfo(reward_pb.GetInfoRequest(), timeout=10)
    await reference_grpc.ReferenceServiceStub(channel).GetInfo(reference_pb.GetInfoRequest(), timeout=10)
    await trainer_grpc.TrainerServiceStub(channel).GetStatus(trainer_pb.GetStatusRequest(), timeout=10)
    await weight_grpc.TrainerWeightServiceStub(channel).GetManifest(weight_pb.GetManifestRequest(), timeout=10)
    await run_grpc.RunServiceStub(channel).GetRun(run_pb.GetRunRequest(), timeout=10)
    step = trainer_pb.RaisePolicyVersionRequest(policy_version=0)
    await trainer_grpc.TrainerServiceStub(channel).RaisePolicyVersion(step, timeout=10)
