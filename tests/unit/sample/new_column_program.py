"""Sends the made-up column `routes` of `test_new_column.py` from an engine's outputs to a batch of the trainer."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

import fourfold

_MESSAGES: Final = ("SampleChunk", "Experience")


class _Pool:
    """The pool of messages; those of samples get the field `routes`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def AddSerializedFile(self, data: bytes) -> Any:
        file = FileDescriptorProto.FromString(data)
        for message in file.message_type:
            if message.name in _MESSAGES:
                kind, label = FieldDescriptorProto.TYPE_BYTES, FieldDescriptorProto.LABEL_OPTIONAL
                message.field.add(name="routes", json_name="routes", number=100, type=kind, label=label)
        return self._pool.AddSerializedFile(file.SerializeToString())


def main() -> None:
    """Compare what the trainer gets with what the engine has put."""
    pool: Any = _Pool(descriptor_pool.Default())
    descriptor_pool.Default = lambda: pool
    fourfold.__path__.insert(0, sys.argv[1])
    folder = Path(sys.argv[1])

    from fourfold.sample.columns import Samples
    from fourfold.sample.wire import decode, encode

    samples = [sample_of_engines(), *samples_of_a_session(folder)]
    samples.append(replace(samples[0], sample_id="without", routes=samples[0].routes[:0]))
    received = Samples.of(decode(encode(sample), vocabulary_size=100, max_tokens=50) for sample in samples)
    from fourfold.config.algorithm import AlgorithmConfig
    from fourfold_trainer.step.batch import TrainBatch

    batch = TrainBatch.of(received, AlgorithmConfig()).samples
    found = [batch.array("routes", i).tolist() for i in range(4)]
    none = [9, 9]
    assert found[0] == [none, none, [0, 1], [2, 3], none, [4, 5]], found[0]  # an engine without it sampled the third
    assert found[1] == [none, [0, 1], none, [2, 3]], found[1]
    assert found[2] == [none, [4, 5]], found[2]
    assert found[3] == [none] * 6, found[3]


def tokens(first: int, count: int, *, routes: bool = True) -> dict[str, Any]:
    """Return the columns of `count` tokens."""
    columns: dict[str, Any] = {
        "token_ids": np.arange(10, 10 + count, dtype=np.int32),
        "logprobs": np.full(count, -0.5, np.float32),
    }
    if routes:
        columns["routes"] = np.arange(2 * first, 2 * (first + count), dtype=np.uint16).reshape(-1, 2)
    return columns


def sample_of_engines() -> Any:
    """Return a sample of three engines, as the coordinator makes it; the second one does not return the column."""
    from fourfold.rollout.group_requests import join_parts
    from fourfold.rollout.v1 import rollout_service_pb2 as rollout
    from fourfold_coordinator.data.prompts import own_prompt
    from fourfold_coordinator.state.samples import build_sample

    parts = [completion(**tokens(0, 2)), completion(**tokens(0, 1, routes=False)), completion(**tokens(2, 1))]
    whole = join_parts(0, tuple(parts), rollout.FINISH_REASON_STOP)
    prompt = own_prompt("?", answer="", metadata_json="{}")
    object.__setattr__(prompt, "token_ids", np.array([1, 2], np.int32))
    return build_sample(prompt, whole, sample_id="s", group_id="g", temperature=1.0)


def completion(**columns: Any) -> Any:
    """Pass an output of an engine through the service, which splits it in two, to the client."""
    from fourfold.rollout.client import CompletionDraft
    from fourfold.rollout.stream_check import StreamCheck
    from fourfold.rollout.v1 import rollout_service_pb2 as rollout
    from fourfold_rollout.engine import Finish, SampleOutput
    from fourfold_rollout.generate.outputs import CallOutputs
    from fourfold_rollout.pause.hold import TokenHold

    chunks = list[rollout.SampleChunk]()

    async def run() -> None:
        hold = TokenHold()
        outputs = CallOutputs(1, hold, chunks.append)
        outputs.boundary(0, 1)
        hold.version = 1
        outputs.put(0, SampleOutput(finish=Finish.ABORTED, **columns))

    asyncio.run(run())
    check, draft = StreamCheck(rollout.GenerateRequest(), peer="engine"), CompletionDraft(0)
    for chunk in chunks:
        check.add(chunk)
        draft.add(chunk)
    return draft.join()


def samples_of_a_session(folder: Path) -> list[Any]:
    """Return the samples of a session with two segments, whose turns the gateway has stored and read again."""
    from fourfold.agent.v1.agent_service_pb2 import FINISH_REASON_STOP
    from fourfold.sample.wire import decode
    from fourfold_gateway.store import SessionStore, StoredTurn
    from fourfold_gateway.trajectory import Limits, Sampling, SessionTokens

    limits = Limits(max_segments=4, max_context_tokens=50)
    session, turns = SessionTokens(limits), []
    for prompt, first in (([1], 0), ([1, 10, 2], 1), ([3], 2)):
        pending = session.begin_turn(prompt, Sampling(temperature=1.0))
        turns.append(session.finish_turn(pending, completion(**tokens(first, 1)), finish_reason=FINISH_REASON_STOP))

    async def store_and_load() -> list[StoredTurn]:
        store = SessionStore(folder)
        await store.add_turns("a", [StoredTurn(turn=turn) for turn in turns])
        found = await store.load_turns("a")
        await store.stop()
        return found

    stored = asyncio.run(store_and_load())
    messages = SessionTokens.restore(limits, [each.turn for each in stored]).to_experiences("t", "g")
    return [decode(message, vocabulary_size=100, max_tokens=50) for message in messages]


if __name__ == "__main__":
    main()
