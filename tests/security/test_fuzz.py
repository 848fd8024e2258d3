"""Calls of every kind to every service of the contract: none is answered with INTERNAL or UNKNOWN, and none leaks.

Real servicers on one real server, with engines that do nothing for long. 4,000 calls in CI; FOURFOLD_FUZZ_CALLS says
how many (`make soak` makes 100,000) and FOURFOLD_FUZZ_SEED which. README.md has the figures.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from fourfold.clock import SystemClock
from fourfold.coordinator.v1 import membership_service_pb2 as membership_pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as membership_grpc
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
from fourfold.wire import encode, pack_floats, pack_ints
from fourfold_coordinator.membership import MembershipServicer
from fourfold_coordinator.registry import Registry
from fourfold_coordinator.run_service import RunBoard, RunServicer
from fourfold_reward import loader
from fourfold_reward.pool import WorkerPool
from fourfold_reward.reference.servicer import Loaded, ReferenceServicer
from fourfold_reward.serve import find_offered
from fourfold_reward.servicer import RewardServicer
from fourfold_rollout.admission import Limits
from fourfold_rollout.control_servicer import Identity, RolloutControlServicer
from fourfold_rollout.servicer import RolloutServicer, ServedModel
from fourfold_rollout.weights import EngineWeights
from fourfold_trainer.core import TrainerCore
from fourfold_trainer.servicer import TrainerServicer
from fourfold_trainer.weight_servicer import TrainerWeightServicer
from tests.conftest import Serve
from tests.fakes.engine import CONTEXT, STOP_TOKEN, VOCABULARY
from tests.fakes.engine import FakeEngine as FakeSampler
from tests.fakes.trainer_engine import FakeEngine as FakeTrainerEngine
from tests.fakes.trainer_engine import group_of
from tests.fakes.trainer_service import config
from tests.security.fuzz import Call, Fuzz, Good

COUNT: Final = int(os.environ.get("FOURFOLD_FUZZ_CALLS", "4000"))
SEED: Final = int(os.environ.get("FOURFOLD_FUZZ_SEED", "1"))
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120 + COUNT / 20)]

SHA256: Final = b"t" * 32
AT_ONCE: Final = 16
# A call that its caller gives up, when it has no deadline or a far one.
PATIENCE_SECONDS: Final = 2.0
# Of the whole process: servers, clients and the engines' stand-ins. gRPC and the allocator keep some.
GROWTH_BYTES: Final = 48 << 20
SERVICES: Final = (
    "fourfold.rollout.v1.RolloutService",
    "fourfold.rollout.v1.RolloutControlService",
    "fourfold.reward.v1.RewardService",
    "fourfold.reference.v1.ReferenceService",
    "fourfold.trainer.v1.TrainerService",
    "fourfold.trainer.v1.TrainerWeightService",
    "fourfold.coordinator.v1.MembershipService",
    "fourfold.coordinator.v1.RunService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
)
HINTS: Final[dict[str, Sequence[Any]]] = {
    "sample_id": ("a", "b", "c"),
    "group_id": ("g",),
    "request_id": ("r1", "r2", "r3"),
    "member_id": ("rollout-0", "rollout-1", "trainer-0"),
    "incarnation": ("a" * 32, "b" * 32),
    "target": ("127.0.0.1:5000", "127.0.0.1:5001"),
    "tokenizer_sha256": (SHA256,),
    "backend": ("shm", "gloo"),
    "name": ("model", "export"),
    "service": ("", *SERVICES),
    "token_ids": (pack_ints([1, 2, 3]), pack_ints([4, 5])),
    "epoch": (1, 2, 3, 4, 5),
    "tags": ("weights", "kv_cache"),
    "temperature": (1.0, 0.5),
    "symbol": SERVICES,
} | dict.fromkeys(
    ("policy_version", "step", "part", "group", "level", "receiver_count", "first_receiver_index", "role"), (0, 1, 2, 3)
)


def _generate(pick: random.Random) -> list[Message]:
    params = rollout_pb.SamplingParams(max_tokens=pick.randrange(1, 5), seed=pick.randrange(9))
    prompt, name = [1, 2, 3][: pick.randrange(1, 4)], f"r{pick.randrange(50)}"
    count = pick.randrange(1, 3)
    return [
        rollout_pb.GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, sample_count=count)
    ]


def _open(pick: random.Random) -> list[Message]:
    more: dict[str, Any] = {"receiver_count": 1, "first_receiver_index": 0, "offers": [b"o"], "manifest": b"m"}
    return [control_pb.OpenWeightsRequest(epoch=pick.randrange(1, 1 << 20), backend="shm", **more)]


def _step(pick: random.Random) -> list[Message]:
    samples = [encode(one) for one in group_of([0, 1, 0, 1][: pick.randrange(1, 5)], seed=pick.randrange(5))]
    step = pick.randrange(1, 6)
    cut = pick.randrange(len(samples) + 1)
    return [trainer_pb.TrainStepRequest(step=step, experiences=part) for part in (samples[:cut], samples[cut:])]


def _part(pick: random.Random) -> list[Message]:
    (sample,) = group_of([1], seed=pick.randrange(5))
    weights = np.zeros(len(sample.token_ids), np.float32)
    weights[1:] = pick.uniform(-1, 1)
    one = trainer_pb.WeightedSample(experience=encode(sample), loss_weights=pack_floats(weights))
    step, part = pick.randrange(1, 6), pick.randrange(1, 4)
    return [trainer_pb.ForwardBackwardRequest(step=step, part=part, samples=[one])]


def _score(pick: random.Random) -> list[Message]:
    samples = group_of([0, 1, 0, 1][: pick.randrange(1, 5)])
    items = [reward_pb.ScoreItem(experience=encode(one), completion_text=pick.choice("abc")) for one in samples]
    return [reward_pb.ScoreRequest(items=items)]


def _register(pick: random.Random) -> list[Message]:
    return [
        membership_pb.RegisterRequest(
            member_id=f"rollout-{pick.randrange(8)}",
            incarnation=pick.choice("abc") * 32,
            role=membership_pb.ROLE_ROLLOUT,
            target=f"127.0.0.1:{5000 + pick.randrange(8)}",
            tokenizer_sha256=SHA256,
        )
    ]


def _lookup(module: Any) -> Good:
    return lambda pick: [module.ComputeLogprobsRequest(experiences=[encode(one) for one in group_of([1, 0])])]


GOOD: Final[dict[str, Good]] = {
    "RolloutService.Generate": _generate,
    "RolloutControlService.OpenWeights": _open,
    "TrainerService.TrainStep": _step,
    "TrainerService.ForwardBackward": _part,
    "TrainerService.ComputeLogprobs": _lookup(trainer_pb),
    "ReferenceService.ComputeLogprobs": _lookup(reference_pb),
    "RewardService.Score": _score,
    "MembershipService.Register": _register,
}


class Sampler(FakeSampler):
    """Samples by itself, and forgets what is finished."""

    async def sample(self) -> None:
        """Give every running sample a token, for ever."""
        while True:
            with suppress(AssertionError):  # asleep
                self.tick()
            self.samples = self.running
            self.log.clear()
            self.batches.clear()
            await asyncio.sleep(0.002)


class Trainer(FakeTrainerEngine):
    """Forgets what tests of the trainer look at."""

    def _enter(self, what: str) -> None:
        super()._enter(what)
        for kept in (self.order, self.shares, self.settings, self.weighted, self.optim_steps):
            kept.clear()
        self.aborted.clear()


class Reference:
    """A model of nothing."""

    vocabulary_size = VOCABULARY
    tokens_per_batch = 64

    def logprobs(self, token_ids: Sequence[Any], temperatures: Sequence[float], **_: Any) -> list[Any]:
        return [np.full(len(ids), -1, np.float32) for ids in token_ids]


class System:
    """All services, and what went wrong in them."""

    def __init__(self, channel: grpc.aio.Channel, trainer: TrainerCore, fatal: list[str]) -> None:
        self.channel, self.trainer, self.fatal = channel, trainer, fatal
        self.unhandled: list[str] = []


@pytest.fixture
async def system(serve: Serve, tmp_path: Path) -> AsyncIterator[System]:
    engine, fatal = Sampler(kv_cache_tokens=100), list[str]()
    limits = Limits(
        max_context_tokens=CONTEXT, vocabulary_size=VOCABULARY, max_concurrent_samples=8,
        kv_cache_tokens=engine.description.kv_cache_tokens, stop_token_ids=(STOP_TOKEN,),
    )  # fmt: skip
    weights = EngineWeights(engine, update_timeout=0.5)
    rollout = RolloutServicer(ServedModel(name="tiny", tokenizer_sha256=SHA256, limits=limits), engine, weights)
    control = RolloutControlServicer(Identity(model_sha256=SHA256, host_id="here"), engine, weights, update_timeout=0.5)
    core = TrainerCore(config(), run_dir=tmp_path, make_engine=Trainer, fatal=fatal.append)
    registry = Registry(clock=SystemClock(), tokenizer_sha256=SHA256)
    board = RunBoard(name="fuzz", step_count=4, clock=SystemClock())
    (tmp_path / "mine.py").write_text("def reward(sample):\n    return float(len(sample.completion))\n")
    pool = WorkerPool(
        verifier=loader.find("mine.py:reward", directory=tmp_path), options={}, processes=1, timeout_seconds=1.0,
        on_failure=fatal.append,
    )  # fmt: skip
    reward = RewardServicer(pool, lambda name: find_offered(name, pool.verifier))
    reference = ReferenceServicer(name="tiny", max_context_tokens=CONTEXT)
    reference.set_ready(Loaded(model=Reference(), tokenizer_sha256=SHA256))  # type: ignore[arg-type]
    added = [
        (rollout_pb, "RolloutService", rollout_grpc, rollout),
        (control_pb, "RolloutControlService", control_grpc, control),
        (trainer_pb, "TrainerService", trainer_grpc, TrainerServicer(core, tokenizer_sha256=SHA256)),
        (weight_pb, "TrainerWeightService", weight_grpc, TrainerWeightServicer(core)),
        (membership_pb, "MembershipService", membership_grpc, MembershipServicer(registry)),
        (run_pb, "RunService", run_grpc, RunServicer(board)),
        (reward_pb, "RewardService", reward_grpc, reward),
        (reference_pb, "ReferenceService", reference_grpc, reference),
    ]
    channel = await serve(
        *(
            (module.DESCRIPTOR.services_by_name[name], getattr(stubs, f"add_{name}Servicer_to_server"), servicer)
            for module, name, stubs, servicer in added
        )
    )
    await core.start()
    await pool.start()
    reward.set_ready()
    made = System(channel, core, fatal)
    asyncio.get_running_loop().set_exception_handler(lambda _, about: made.unhandled.append(str(about)))
    tasks = [asyncio.create_task(engine.sample()), asyncio.create_task(_expire(registry))]
    yield made
    for task in tasks:
        task.cancel()
    await reference.close()
    await pool.close()
    await weights.close()
    await core.stop()


async def _expire(registry: Registry) -> None:
    while True:
        registry.expire()
        await asyncio.sleep(1)


async def send(channel: grpc.aio.Channel, call: Call) -> tuple[str, str]:
    """Make a call to its end; return the name of its code, and what was said."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    make: Any = kinds[call.streams_requests, call.streams_responses](call.path)
    given = {"timeout": call.timeout, "metadata": call.metadata}
    running: Any = make(**given) if call.streams_requests else make(call.messages[0], **given)
    try:
        async with asyncio.timeout(0.01 if call.cancels else PATIENCE_SECONDS):
            if call.streams_requests:
                with suppress(asyncio.InvalidStateError):
                    for message in call.messages:
                        await running.write(message)
                    if call.ends:
                        await running.done_writing()
            if call.streams_responses:
                for _ in range(3):
                    if await running.read() is grpc.aio.EOF:
                        break
                else:
                    return "OK", ""
                return (await running.code()).name, str(await running.details())
            await running
            return "OK", ""
    except TimeoutError:
        return "GIVEN_UP", ""
    except grpc.aio.AioRpcError as error:
        return error.code().name, str(error.details())
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
        return "CANCELLED", ""
    finally:
        running.cancel()


def resident() -> int:
    """Return the bytes that this process has in memory, of its own."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10


async def test_no_call_is_answered_with_an_internal_error(system: System) -> None:
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    calls = Fuzz(SERVICES, seed=SEED, hints=HINTS, good=GOOD).calls(COUNT)
    began, done, warm, before = time.monotonic(), 0, max(COUNT // 5, 1), 0
    while group := list(islice(calls, AT_ONCE)):
        for call, (code, said) in zip(
            group, await asyncio.gather(*(send(system.channel, c) for c in group)), strict=True
        ):
            codes[code] += 1
            if code in ("INTERNAL", "UNKNOWN"):
                wrong.append(f"{code} {call.path} {said[:200]!r} {[m[:60] for m in call.messages]} {call.metadata}")
        if done < warm <= done + len(group):
            before = resident()
        done += len(group)
    grown = resident() - before
    seconds = time.monotonic() - began
    sys.stdout.write(
        f"\nseed {SEED}: {done} calls in {seconds:.0f} s, {dict(codes.most_common())}, wrong {len(wrong)}, memory "
        f"{before / 2**20:.1f} MiB after {warm} calls, then {grown / 2**20:+.1f} MiB\n"
    )
    assert not wrong, "\n".join(wrong[:20])
    assert not system.fatal and not system.unhandled, (system.fatal, system.unhandled[:5])
    await _everyone_answers(system.channel)
    assert grown < GROWTH_BYTES
    assert set(codes) >= {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "NOT_FOUND"}


async def _everyone_answers(channel: grpc.aio.Channel) -> None:
    """Each service answers a call that asks for nothing special."""
    await rollout_grpc.RolloutServiceStub(channel).GetInfo(rollout_pb.GetInfoRequest(), timeout=10)
    await control_grpc.RolloutControlServiceStub(channel).DescribeEngine(control_pb.DescribeEngineRequest(), timeout=10)
    await reward_grpc.RewardServiceStub(channel).GetInfo(reward_pb.GetInfoRequest(), timeout=10)
    await reference_grpc.ReferenceServiceStub(channel).GetInfo(reference_pb.GetInfoRequest(), timeout=10)
    await trainer_grpc.TrainerServiceStub(channel).GetStatus(trainer_pb.GetStatusRequest(), timeout=10)
    await weight_grpc.TrainerWeightServiceStub(channel).GetManifest(weight_pb.GetManifestRequest(), timeout=10)
    await run_grpc.RunServiceStub(channel).GetRun(run_pb.GetRunRequest(), timeout=10)
    step = trainer_pb.RaisePolicyVersionRequest(policy_version=0)
    await trainer_grpc.TrainerServiceStub(channel).RaisePolicyVersion(step, timeout=10)
