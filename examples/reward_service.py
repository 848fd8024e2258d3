"""A complete reward service in one file, with grpcio and the generated stubs only. Port it to any language.

    python examples/reward_service.py 127.0.0.1:50053

It scores how short a completion is. The contract is `proto/fourfold/reward/v1/reward_service.proto`. Check a service:
`fourfold conformance reward HOST:PORT`. A run calls it with `[reward] target = "HOST:PORT"` in its recipe. A Python
function needs less code: see examples/reward_function.py. With TLS and registration: examples/typescript/src/reward.
"""

from __future__ import annotations

import re
import sys
from concurrent import futures
from typing import Any

import grpc

from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1 import reward_service_pb2_grpc as pb_grpc

MAX_SAMPLES, MAX_BYTES = 1024, 8 << 20


class ShortIsBetter(pb_grpc.RewardServiceServicer):
    """1 for an empty completion, 0 for 1000 characters or more."""

    def GetInfo(self, request: pb.GetInfoRequest, context: grpc.ServicerContext) -> pb.GetInfoResponse:
        """Return the name of the scorer and its limits."""
        return pb.GetInfoResponse(name="short-is-better@1", max_sample_count=MAX_SAMPLES)

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:
        """Return one score per item, in the order of the request."""
        ids = [item.experience.sample_id for item in request.items]
        if not 1 <= len(ids) <= MAX_SAMPLES or request.ByteSize() > MAX_BYTES or len(set(ids)) < len(ids):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"send 1 to {MAX_SAMPLES} items of unique ids, up to 8 MiB")
        if not all(re.fullmatch("[A-Za-z0-9_-]{1,128}", sample_id) for sample_id in ids):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a sample_id is 1 to 128 characters of [A-Za-z0-9_-]")
        return pb.ScoreResponse(scores=[self.score(item) for item in request.items])

    def score(self, item: pb.ScoreItem) -> pb.SampleScore:
        """Score one sample; an error of the sample does not fail the call."""
        sample_id = item.experience.sample_id
        if item.verifier:
            error = pb.SampleError(code=5, reason="NOT_FOUND", message=f"no verifier {item.verifier[:100]!r} here")
            return pb.SampleScore(sample_id=sample_id, error=error)
        return pb.SampleScore(sample_id=sample_id, score=max(0.0, 1 - len(item.completion_text) / 1000))


def main(listen: str) -> None:
    """Serve until the process ends."""
    options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", 16 << 20), ("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=options)
    pb_grpc.add_RewardServiceServicer_to_server(ShortIsBetter(), server)
    port = server.add_insecure_port(listen)
    server.start()
    sys.stdout.write(f"READY {listen.rpartition(':')[0]}:{port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/reward_service.py HOST:PORT")
    main(sys.argv[1])
