"""The toy model of the loop's tests, its data and recipe, and what its services share.

The policy is one integer, its weights. It answers `a * b` rightly with a probability that grows
with it; a training step that finds something to learn adds 1. The services around it are real
gRPC servers with real leases.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
from grpc_health.v1 import health_pb2
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.service.membership import Membership

VOCABULARY = 258
START = 256
END = 257
MANIFEST = b'{"tensors":[["one","integer",[1]]]}'
Context = grpc.aio.ServicerContext[Any, Any]
Services = list[tuple[Any, Callable[[Any, grpc.aio.Server], None]]]


def write_model(folder: Path) -> Path:
    """A model folder with a byte-level tokenizer and no weights to speak of."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>")])
    library.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}<|start|>"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "eos_token_id": END}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_data(path: Path, *, digits: int = 10) -> Path:
    """Every product of two digits, in both orders, as JSONL."""
    pairs = [(a, b) for a in range(digits) for b in range(digits)]
    rows = [{"question": f"{a} * {b} =", "answer": str(a * b), "expression": f"{a} * {b}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(root: Path, **changes: Any) -> Config:
    """A recipe for the toy model; `changes` replace whole tables or fields of them."""
    recipe: dict[str, Any] = {
        "name": "toy",
        "seed": 3,
        "steps": 4,
        "model": {"source": str(write_model(root / "model-folder")), "max_context_tokens": 64},
        "data": {
            "train": {"path": str(write_data(root / "data.jsonl"))},
            "holdout": {"field": "expression", "unordered_numbers": True, "groups": 4},
        },
        "sampling": {"max_new_tokens": 8},
        "batch": {"prompts_per_step": 3, "group_size": 4, "tokens_per_micro_batch": 256},
        "evaluation": {"every_steps": 2, "samples_per_prompt": 2},
        "checkpoint": {"every_steps": 2},
        "retry": {"service_wait_seconds": 20.0},
        "weights": {"timeout_seconds": 5.0},
    }
    for key, value in changes.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(recipe)


def toy_logprobs(weights: int, token_ids: np.ndarray[Any, Any]) -> Float32Array:
    """Return the policy's log-probabilities of some tokens: float32 [n], the first NaN."""
    values = -(1 + weights / 8) * (token_ids % 7 + 1) / 7
    values[0] = np.nan
    return values.astype(np.float32)


def toy_answer(prompt: str, seed: int, weights: int) -> tuple[str, float]:
    """A sampled answer and its log-probability."""
    found = re.findall(r"(\d+) \* (\d+)", prompt)
    product = int(found[-1][0]) * int(found[-1][1])
    right = 1 - 0.7 / (1 + weights)
    if random.Random(f"{prompt}/{seed}/{weights}").random() < right:
        return str(product), math.log(right)
    return str(product + 1), math.log(1 - right)


def weights_digest(weights: int, version: int, *, skip_sums: bool) -> bytes:
    """Of the toy's weights, or of their version alone."""
    return hashlib.sha256(f"version {version}".encode() if skip_sums else weights_sums(weights)).digest()


def weights_sums(weights: int) -> bytes:
    """Of the toy's one tensor."""
    return weights.to_bytes(16, "little")


_wires: dict[tuple[int, int], asyncio.Future[int]] = {}  # by epoch and version


def send(epoch: int, version: int, weights: int) -> None:
    """Put weights where an engine finds them: what shared memory is to the real ones."""
    wire = _wires.setdefault((epoch, version), asyncio.get_running_loop().create_future())
    if not wire.done():
        wire.set_result(weights)


async def receive(epoch: int, version: int) -> int:
    """Wait for the weights of a version."""
    return await _wires.setdefault((epoch, version), asyncio.get_running_loop().create_future())


class Member(ABC):
    """A service that registers, and that can be killed."""

    role: ClassVar[Role.ValueType]

    def __init__(self, member_id: str, config: Config) -> None:
        self.member_id, self.config = member_id, config
        self.tokenizer_sha256 = tokenizer_sha256(Path(config.model.source))
        self.target = ""
        self.scorer = ""
        """Name of the table [[reward]] that a reward service serves; empty: the first."""
        self.journal: list[str] = []
        """The calls that this member received, in order. Several members may share one list."""
        self.clock: Clock = SYSTEM_CLOCK
        """Paces the renewals of the lease."""
        self._server = Server(listen="127.0.0.1:0", security=None)
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []
        self._membership: Membership | None = None
        self._incarnation = uuid.uuid4().hex  # of this process, whatever coordinator it joins

    @abstractmethod
    def services(self) -> Services:
        """Descriptor and registration of each service."""

    async def start(self) -> None:
        """Listen."""
        for descriptor, register in self.services():
            self._server.add(descriptor, register, self)
        self.target = await self._server.start()
        self._server.set_ready(True)

    async def join(self, coordinator: str) -> None:
        """Register at a coordinator and keep the lease alive; call it again for another coordinator."""
        if not self.target:
            await self.start()
        await self._leave_alone()
        channel = open_channel(coordinator, None)
        self._channels.append(channel)
        self._membership = Membership(
            MembershipClient(channel, peer="coordinator"),
            member_id=self.member_id,
            role=self.role,
            target=self.target,
            tokenizer_sha256=self.tokenizer_sha256,
            on_drain=lambda: None,
            clock=self.clock,
            scorer=self.scorer,
        )
        self._membership.incarnation = self._incarnation
        self._tasks.append(asyncio.create_task(self._membership.run()))

    async def leave(self) -> None:
        """Give the lease back, as a service does that drains; it still answers."""
        assert self._membership is not None
        for task in self._tasks:
            task.cancel()
        await self._membership.leave(timeout=5)
        await self._leave_alone()

    async def stop_answering(self) -> None:
        """Answer no health check, as a process that hangs: another process may take its place."""
        await self._server._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)

    async def kill(self) -> None:
        """Vanish, as after SIGKILL: no goodbye, calls in flight are cut."""
        await self._leave_alone()
        await self._server.stop(0)

    async def _leave_alone(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        for channel in self._channels:
            await channel.close()
        self._tasks, self._channels = [], []
