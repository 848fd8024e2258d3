"""Soak test of a rollout service: calls of every kind run beside weight updates of every kind, for minutes.

After each round of traffic no sample may be in the engine, and the resources of the service must not grow from round to
round. FOURFOLD_SOAK_MINUTES is the duration of all rounds; without it there is one round, in which memory is not
compared. The numbers are written to the file FOURFOLD_SOAK_RESULT.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fourfold.errors import AlreadyExists, DeadlinePassed, InvalidInput, Overloaded, Unavailable, WrongState
from fourfold.rollout.client import AsyncRolloutClient, Completion, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from tests.support.rollout_process import (
    SAMPLES,
    Publisher,
    Service,
    plain,
    request,
    running_count,
    start,
    until_running,
)
from tests.support.soak_measure import LEAST_ROUNDS, Row, grown, held, memory, write
from tests.support.tiny_models import VOCABULARY_SIZE

MINUTES: Final = float(os.environ.get("FOURFOLD_SOAK_MINUTES", "0"))
RESULT: Final = os.environ.get("FOURFOLD_SOAK_RESULT", "")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200 + 60 * MINUTES)]

log = logging.getLogger(__name__)
TinyModel = Callable[..., Path]

ROUND_SECONDS: Final = 13.0
# oneDNN caches the kernels of this many shapes, about 0.6 MiB each. Each matrix has a shape for every number of tokens
# in a step, so with the default of 1024 the engine's memory would grow for minutes.
KERNELS: Final = "64"
CALLERS: Final = 12
MODES: Final = tuple(mode for mode in control_pb.PauseMode.values() if mode)
BAD: Final[tuple[tuple[dict[str, Any], type[Exception]], ...]] = (
    ({"prompt_token_ids": []}, InvalidInput),
    ({"prompt_token_ids": [VOCABULARY_SIZE]}, InvalidInput),
    ({"prompt_token_ids": [1] * 600}, InvalidInput),
    ({"sample_count": 0}, InvalidInput),
    ({"sample_count": SAMPLES + 1}, InvalidInput),
    ({"sampling_params": pb.SamplingParams(temperature=3.0)}, InvalidInput),
    ({"sampling_params": pb.SamplingParams(top_k=0)}, InvalidInput),
    ({"request_id": "no spaces"}, InvalidInput),
    ({"min_policy_version": 1 << 40}, WrongState),
)


class Soak:
    """Callers, and a trainer that publishes. `counts` has the outcomes of the calls and updates."""

    def __init__(self, client: AsyncRolloutClient, publisher: Publisher, folders: list[Path]) -> None:
        self.counts: Counter[str] = Counter()
        self._client, self._publisher, self._folders = client, publisher, folders
        self._committed = {publisher.version}
        self._numbers = itertools.count()
        self._over = asyncio.Event()

    async def round(self, seconds: float) -> None:
        """Make calls and updates for `seconds`, and wait for the last response."""
        self._over.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CALLERS):
                tasks.create_task(self._call_on(random.Random(next(self._numbers))))
            tasks.create_task(self._publish_on(random.Random(next(self._numbers))))
            await asyncio.sleep(seconds)
            self._over.set()

    async def warm_up(self) -> None:
        """Sample in every way once: the first step of each kind may take longer than an update waits."""
        calls = [self._client.complete(self._message(random.Random(-n)), timeout=100) for n in range(1, 6)]
        await asyncio.gather(*calls)

    async def publish(self, folder: Path) -> None:
        """Publish the weights of a folder while nothing is sampled."""
        await self._publisher.open(folder)
        assert await self._begin(control_pb.PAUSE_MODE_WAIT)
        await self._send(hold=False)

    async def _call_on(self, choice: random.Random) -> None:
        ways = [self._whole] * 5 + [self._cancelled] * 2 + [self._late, self._bad, self._twice]
        while not self._over.is_set():
            way = choice.choice(ways)
            try:
                await way(choice, self._message(choice))
                self.counts[way.__name__] += 1
            except Overloaded as error:
                self.counts["overloaded"] += 1
                assert error.retry_after
                await asyncio.sleep(error.retry_after * choice.random())

    def _message(self, choice: random.Random) -> pb.GenerateRequest:
        return request(
            choice.randrange(20),
            samples=choice.choice((1, 1, 2, 4, 8)),
            max_tokens=choice.choice((1, 3, 20, 60, 100)),
            seed=choice.randrange(1 << 40),
            flush=choice.choice((None, None, 0, 15_000_000)),
            params={"temperature": choice.choice((0.0, 0.7, 1.0)), "top_p": choice.choice((0.9, 1.0))},
        )

    async def _whole(self, choice: random.Random, message: pb.GenerateRequest) -> None:
        self._check(message, await self._client.complete(message, timeout=60))

    async def _cancelled(self, choice: random.Random, message: pb.GenerateRequest) -> None:
        message.sampling_params.max_tokens = 200
        call = asyncio.create_task(self._client.complete(message, timeout=60))
        await asyncio.wait({call}, timeout=choice.random() * choice.choice((0.01, 0.1, 0.5)))
        call.cancel()
        with suppress(asyncio.CancelledError):
            self._check(message, await call)

    async def _late(self, choice: random.Random, message: pb.GenerateRequest) -> None:
        message.sampling_params.max_tokens = 200
        with suppress(DeadlinePassed, Unavailable):  # Unavailable: an update lasts longer than the call can wait
            self._check(message, await self._client.complete(message, timeout=0.06 + 0.4 * choice.random()))

    async def _bad(self, choice: random.Random, message: pb.GenerateRequest) -> None:
        changes, error = choice.choice(BAD)
        for name in changes:
            message.ClearField(name)  # type: ignore[arg-type]
        message.MergeFrom(pb.GenerateRequest(**changes))
        with pytest.raises(error):
            await self._client.complete(message, timeout=60)

    async def _twice(self, choice: random.Random, message: pb.GenerateRequest) -> None:
        """Make two calls of one id: the second is refused, unless the first has ended."""
        message.sampling_params.max_tokens = 60
        calls = (self._client.complete(message, timeout=60) for _ in range(2))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                assert isinstance(answer, AlreadyExists | Overloaded), answer
            else:
                self._check(message, answer)

    def _check(self, message: pb.GenerateRequest, samples: list[Completion]) -> None:
        """Check that every sample is complete, and of published versions in ascending order."""
        self.counts["samples"] += len(samples)
        for sample in samples:
            count, ended = len(sample.token_ids), sample.finish_reason
            limit = message.sampling_params.max_tokens
            assert count <= limit
            assert count == limit or ended in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_ABORTED)
            assert count or ended == pb.FINISH_REASON_ABORTED
            assert len(sample.logprobs) == count
            assert np.isfinite(sample.logprobs).all() and (sample.logprobs <= 0).all()
            assert ((sample.token_ids >= 0) & (sample.token_ids < VOCABULARY_SIZE)).all()
            versions = [span.policy_version for span in sample.version_spans]
            assert sum(span.token_count for span in sample.version_spans) == count
            assert versions == sorted(set(versions)) and self._committed.issuperset(versions)
            self.counts["tokens"] += count
            self.counts["crossed an update"] += len(versions) > 1
            self.counts["aborted by an update"] += ended == pb.FINISH_REASON_ABORTED

    async def _publish_on(self, choice: random.Random) -> None:
        while not self._over.is_set():
            await self._publisher.open(choice.choice(self._folders))
            for _ in range(choice.randrange(1, 4)):
                await asyncio.sleep(choice.random())
                if await self._begin(choice.choice(MODES)) and choice.random() < 0.8:
                    await self._send(hold=choice.random() < 0.5)
                else:
                    assert await self._publisher.abort() == control_pb.WEIGHT_STATE_CLEAN
                    self.counts["updates given up"] += 1
                    break  # the epoch is over

    async def _begin(self, mode: Any) -> bool:
        """Pause the engine; return False if the samples did not end in time (PAUSE_MODE_WAIT)."""
        try:
            await self._publisher.begin(mode)
        except DeadlinePassed:
            if mode != control_pb.PAUSE_MODE_WAIT:
                raise
            self.counts["waited in vain"] += 1
            return False
        self.counts[f"begun: {control_pb.PauseMode.Name(mode)}"] += 1
        return True

    async def _send(self, *, hold: bool) -> None:
        await self._publisher.send()
        self._committed.add(self._publisher.version)
        await self._publisher.commit(hold=hold)
        if hold:
            await asyncio.sleep(0.02)
            await self._publisher.release()
        self.counts["updates"] += 1
        self.counts["updates held"] += hold


async def greedy(client: AsyncRolloutClient) -> Any:
    return plain(await client.complete(request(7, max_tokens=100, params={"temperature": 0.0}), timeout=60))


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[Service], Any]]:
    channels: list[Any] = []

    def open_one(service: Service) -> Any:
        channels.append(open_channel(service.target, None))
        return channels[-1]

    yield open_one
    for channel in channels:
        await channel.close()


async def test_nothing_is_lost_left_or_grows(
    tiny_model: TinyModel, tmp_path: Path, connect: Callable[[Service], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS)
    folders = [tiny_model("qwen2", seed=seed) for seed in range(3)]
    places = [tmp_path / name for name in ("soak", "fresh", "t")]
    for place in places:
        place.mkdir()
    service = start(folders[0], places[0], places[2])
    try:
        channel = connect(service)
        client, control = AsyncRolloutClient(channel, peer="rollout-0"), RolloutControlClient(channel, peer="rollout-0")
        soak = Soak(client, Publisher(control, version=0), folders)
        await soak.warm_up()
        rows: list[Row] = []
        begun = time.monotonic()
        while time.monotonic() < begun + 60 * MINUTES or len(rows) < (LEAST_ROUNDS if MINUTES else 1):
            await soak.round(ROUND_SECONDS)
            await soak.publish(folders[1])
            await until_running(client, False, seconds=5)
            # As many as may be in flight: there is room only if no call of the traffic is left.
            message = request(samples=SAMPLES, max_tokens=2)
            assert len(await client.complete(message, timeout=60)) == SAMPLES
            assert await running_count(client) == 0
            state = await control.describe(timeout=5)
            assert (state.weight_state, state.update_phase) == (control_pb.WEIGHT_STATE_CLEAN, "")
            seconds = time.monotonic() - begun
            rows.append(Row(seconds, held(service, places[2]), memory(service), dict(soak.counts)))
            log.info("%s", rows[-1])
        last = await greedy(client)
    finally:
        service.close()
    fresh = start(folders[1], places[1])
    try:
        same = await greedy(AsyncRolloutClient(connect(fresh), peer="fresh")) == last
    finally:
        fresh.close()
    if RESULT:
        write(Path(RESULT), rows, minutes=MINUTES, same_as_fresh=same)
    assert same
    assert not MINUTES or not grown(rows), rows
    assert min(soak.counts[name] for name in ("crossed an update", "aborted by an update", "updates given up")) > 0
