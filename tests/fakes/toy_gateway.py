"""A gateway for the loop's tests: leases tasks, answers `a * b` as the toy engines do, and puts trajectories.

A trajectory has two turns with an observation between them; `segments` > 1 repeats it as further segments.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from fourfold.config import Config
from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.coordinator.v1 import experience_service_pb2_grpc as pb_grpc
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.rpc.channel import open_channel
from fourfold.sample import Sample, VersionSpan
from fourfold.sample.wire import encode
from tests.fakes.toy import END, START, Member, Services

OBSERVATION = [START, ord("?")]


def trajectory(
    task: pb.LeasedTask, *, version: int = 0, segments: int = 1, reward: float | None = None
) -> pb.Trajectory:
    """Return a trajectory of two turns for each segment; the reward depends on the attempt unless it is given."""
    question = json.loads(task.messages_json)[-1]["content"] if task.messages_json else task.text
    found = re.findall(r"(\d+) \* (\d+)", question)
    answer = str(int(found[-1][0]) * int(found[-1][1])) if found else "1"
    prompt = [START, *question.encode()[:20]]
    turn = [*answer.encode(), END]
    ids = np.array([*prompt, *turn, *OBSERVATION, *turn], np.int32)
    mask = np.array([False] * len(prompt) + [True] * len(turn) + [False] * 2 + [True] * len(turn))
    spans = [(-1, len(prompt)), (version, len(turn)), (-1, 2), (version, len(turn))]
    samples = [
        Sample(
            sample_id=task.task_id if k == 0 else f"{task.task_id}-seg{k}",
            group_id=task.group_id,
            token_ids=ids,
            behavior_logprobs=np.where(mask, np.float32(-0.5), np.float32(np.nan)).astype(np.float32),
            action_mask=mask,
            loss_mask=mask,
            version_spans=tuple(VersionSpan(policy_version=v, token_count=n) for v, n in spans),
            temperature=1.0,
            trajectory_id=task.task_id,
            segment_index=k,
            segment_count=segments,
        )
        for k in range(segments)
    ]
    message = pb.Trajectory(
        task_id=task.task_id, segments=[encode(s) for s in samples], turn_count=2, metrics={"steps": 2.0}
    )
    message.reward = float(task.sample_index % 2) if reward is None else reward
    return message


class FakeGateway(Member):
    """Registers as a gateway; `work` attempts tasks until it is cancelled or killed."""

    role = Role.ROLE_GATEWAY

    def __init__(self, member_id: str, config: Config, *, version: Callable[[], int] = lambda: 0) -> None:
        super().__init__(member_id, config)
        self.version, self.segments = version, 1
        self.tasks: list[pb.LeasedTask] = []
        self.results: list[pb.PutResult] = []
        self.on_task: Callable[[pb.LeasedTask], pb.Trajectory | str | None] = self.attempt
        """Returns a trajectory, a reason to release the task with, or None to do nothing."""

    def services(self) -> Services:
        return []

    def attempt(self, task: pb.LeasedTask) -> pb.Trajectory:
        return trajectory(task, version=self.version(), segments=self.segments)

    def stub(self, coordinator: str) -> Any:
        channel = open_channel(coordinator, None)
        self._channels.append(channel)
        return pb_grpc.ExperienceServiceStub(channel)

    def start_work(self, coordinator: str) -> None:
        self._tasks.append(asyncio.create_task(self._work(self.stub(coordinator))))

    async def _work(self, stub: Any) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):  # the run may not have begun, or is over
                request = pb.LeaseTasksRequest(max_task_count=4, gateway=self.member_id)
                request.wait.FromMilliseconds(500)
                for task in (await stub.LeaseTasks(request, timeout=5)).tasks:
                    self.tasks.append(task)
                    await self._finish(stub, task)
                continue
            await asyncio.sleep(0.05)

    async def _finish(self, stub: Any, task: pb.LeasedTask) -> None:
        outcome = self.on_task(task)
        if isinstance(outcome, str):
            released = pb.ReleasedTask(task_id=task.task_id, reason=outcome)
            await stub.ReleaseTasks(pb.ReleaseTasksRequest(tasks=[released]), timeout=5)
        elif outcome is not None:
            response = await stub.PutTrajectories(pb.PutTrajectoriesRequest(trajectories=[outcome]), timeout=5)
            self.results += response.results


def new_attempt_id() -> str:
    return uuid.uuid4().hex
