"""The trainer and the scorer of the simulated run, in one process: they accept everything and compute nothing.

python -m fourfold_bench.engines.peers ADDRESS_FILE TOKENIZER_SHA256
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc

from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.process_tree import die_with_parent
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc.channel import SERVER_OPTIONS, open_channel
from fourfold.service.membership import Membership
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold_bench.engines.driver import VOCABULARY_SIZE, probe_logprobs, wait_for_address

_CONTEXT_TOKENS: Final = 1 << 16


class IdleTrainer:
    """A trainer that skips every step, so that no weights are sent."""

    def __init__(self, tokenizer_sha256: bytes) -> None:
        self._tokenizer_sha256, self._step = tokenizer_sha256, 0

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the methods that a coordinator calls."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            "fourfold.trainer.v1.TrainerService",
            {
                "GetStatus": unary(self._get_status),
                "TrainStep": grpc.stream_unary_rpc_method_handler(self._train_step),
                "ComputeLogprobs": unary(
                    self._compute_logprobs, request_deserializer=trainer.ComputeLogprobsRequest.FromString
                ),
                "SaveCheckpoint": unary(self._save_checkpoint),
                "ExportModel": unary(self._export_model),
            },
        )

    async def _get_status(self, request: bytes, context: Any) -> bytes:
        status = trainer.TrainerStatus(
            step=self._step,
            phase=trainer.TRAINER_PHASE_WAITING,
            checkpoint_step=-1,
            rank_count=1,
            tokenizer_sha256=self._tokenizer_sha256,
            vocabulary_size=VOCABULARY_SIZE,
            max_context_tokens=_CONTEXT_TOKENS,
        )
        return trainer.GetStatusResponse(status=status).SerializeToString()

    async def _train_step(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in messages:
            pass
        self._step += 1
        return trainer.TrainStepResponse(step=self._step, skipped_reason="NO_ADVANTAGE").SerializeToString()

    async def _compute_logprobs(self, request: trainer.ComputeLogprobsRequest, context: Any) -> bytes:
        rows = [probe_logprobs(len(e.token_ids) // 4) for e in request.experiences]
        return trainer.ComputeLogprobsResponse(logprobs=rows).SerializeToString()

    async def _save_checkpoint(self, request: bytes, context: Any) -> bytes:
        return trainer.SaveCheckpointResponse(step=self._step).SerializeToString()

    async def _export_model(self, request: bytes, context: Any) -> bytes:
        return trainer.ExportModelResponse(path="nowhere").SerializeToString()


def scorer() -> grpc.GenericRpcHandler:
    """Return a reward service that scores at once: 0 or 1 by the last digit of the sample's id."""

    async def get_info(request: bytes, context: Any) -> bytes:
        return reward.GetInfoResponse(name="ready@1").SerializeToString()

    async def score(request: reward.ScoreRequest, context: Any) -> bytes:
        names = [item.experience.sample_id for item in request.items]
        scores = [reward.SampleScore(sample_id=name, score=float(int(name[-1]) % 2)) for name in names]
        return reward.ScoreResponse(scores=scores).SerializeToString()

    return grpc.method_handlers_generic_handler(
        "fourfold.reward.v1.RewardService",
        {
            "GetInfo": grpc.unary_unary_rpc_method_handler(get_info),
            "Score": grpc.unary_unary_rpc_method_handler(score, request_deserializer=reward.ScoreRequest.FromString),
        },
    )


async def _serve(address_file: Path, tokenizer_sha256: bytes) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((IdleTrainer(tokenizer_sha256).handler(), scorer()))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(f"READY {target}", flush=True)
    address = await asyncio.to_thread(wait_for_address, address_file)
    client = MembershipClient(open_channel(address, None), peer="coordinator")
    await Membership(
        client,
        member_id="trainer-0",
        role=Role.ROLE_TRAINER,
        target=target,
        tokenizer_sha256=tokenizer_sha256,
        on_drain=lambda: None,
    ).run()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_serve(Path(sys.argv[1]), bytes.fromhex(sys.argv[2])))
