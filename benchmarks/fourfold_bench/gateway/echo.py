"""A rollout service without a model, which answers each request at once.

python -m fourfold_bench.gateway.echo RECIPE
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from fourfold.config import Config, load
from fourfold.errors import WrongState
from fourfold.host.process_tree import die_with_parent
from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer, add_RolloutServiceServicer_to_server
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.rpc.server import Server

Context = grpc.aio.ServicerContext[Any, Any]
_FIRST_WORD: Final = 3
_LOAD_SECONDS: Final = 1.0


class EchoRollout(RolloutServiceServicer):
    """Answers with the tokens 3, 4, 5 ... up to the limit of the request."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            model=self._config.model.source,
            tokenizer_sha256=self._tokenizer.sha256,
            max_context_tokens=self._config.model.max_context_tokens,
            vocabulary_size=self._tokenizer.vocabulary_size,
            max_concurrent_samples=1024,
        )

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        count = request.sampling_params.max_tokens
        ids = _FIRST_WORD + np.arange(count, dtype=np.int32) % (self._tokenizer.vocabulary_size - _FIRST_WORD)
        chunk = pb.SampleChunk(
            token_ids=pack_ints(ids),
            logprobs=pack_floats(np.full(count, -1.2345678, np.float32)),
            finish_reason=pb.FINISH_REASON_LENGTH,
        )
        yield pb.GenerateResponse(chunks=[chunk])

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.WatchLoadResponse]:
        while True:
            yield pb.WatchLoadResponse()
            await asyncio.sleep(_LOAD_SECONDS)

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Context) -> pb.ScoreTokensResponse:
        raise WrongState("this engine has no model")

    async def ParseCompletion(self, request: pb.ParseCompletionRequest, context: Context) -> pb.ParseCompletionResponse:
        raise WrongState("this engine has no model")


async def _serve(config: Config) -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    servicer = EchoRollout(config, Tokenizer.load(config.model.source))
    server.add(pb.DESCRIPTOR.services_by_name["RolloutService"], add_RolloutServiceServicer_to_server, servicer)
    sys.stdout.write(f"READY {await server.start()}\n")
    sys.stdout.flush()
    server.set_ready(True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_serve(load(Path(sys.argv[1]))))
