"""A reward service of another program: `python -m tests.support.versioned_reward VERSION MODE_FILE`.

The score of a completion depends on the version, so that a test can tell from a score who gave it. The mode file has
the way in which the service is broken: hang, nan or count; anything else, or no file: it works.
"""

from __future__ import annotations

import sys
import time
from concurrent import futures
from pathlib import Path

import grpc

from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1 import reward_service_pb2_grpc as pb_grpc


def score_of(completion: str, version: int) -> float:
    """Return the score that a version gives; never 0, which a run must not invent."""
    return version + (len(completion) % 7 + 1) / 8


class Versioned(pb_grpc.RewardServiceServicer):
    def __init__(self, version: int, mode: Path) -> None:
        self.version, self.mode = version, mode

    def _mode(self) -> str:
        return self.mode.read_text() if self.mode.exists() else ""

    def GetInfo(self, request: pb.GetInfoRequest, context: grpc.ServicerContext) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(name=f"length@{self.version}")

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:
        mode = self._mode()
        scores = [
            pb.SampleScore(
                sample_id=item.experience.sample_id,
                score=float("nan") if mode == "nan" else score_of(item.completion_text, self.version),
            )
            for item in request.items
        ]
        while self._mode() == "hang" and context.is_active():
            time.sleep(0.05)
        return pb.ScoreResponse(scores=scores[1:] if mode == "count" else scores)


def main(version: int, mode: Path) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
    pb_grpc.add_RewardServiceServicer_to_server(Versioned(version, mode), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"READY 127.0.0.1:{port}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
