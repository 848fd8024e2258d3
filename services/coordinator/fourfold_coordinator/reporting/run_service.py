"""`RunService`: serves the state of the run to `fourfold watch` and to dashboards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1 import run_service_pb2_grpc as pb_grpc

from ..state.run_board import RunBoard

Context = grpc.aio.ServicerContext[Any, Any]


class RunServicer(pb_grpc.RunServiceServicer):
    """Shows the board and the weight plane."""

    def __init__(
        self, board: RunBoard, plane: Callable[[], pb.GetWeightPlaneResponse] = pb.GetWeightPlaneResponse
    ) -> None:
        self._board, self._plane = board, plane

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """Report the run once."""
        return pb.GetRunResponse(status=self._board.status)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        """Report the run at once and on every change."""
        async for status in self._board.changes():
            yield pb.WatchRunResponse(status=status)

    async def GetWeightPlane(self, request: pb.GetWeightPlaneRequest, context: Context) -> pb.GetWeightPlaneResponse:
        """Report how weights get to the engines."""
        return self._plane()
