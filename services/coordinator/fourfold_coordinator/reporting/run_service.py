"""`RunService`: serves the status of the run to `fourfold watch` and to dashboards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from fourfold.contract import CONTRACT_VERSION
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1 import run_service_pb2_grpc as pb_grpc

from ..state.run_board import RunBoard

Context = grpc.aio.ServicerContext[Any, Any]


class RunServicer(pb_grpc.RunServiceServicer):
    """Serves the run board and the status of the weight plane."""

    def __init__(
        self, board: RunBoard, weight_plane: Callable[[], pb.GetWeightPlaneResponse] = pb.GetWeightPlaneResponse
    ) -> None:
        self._board, self._weight_plane = board, weight_plane

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(status=self._board.status, contract_version=CONTRACT_VERSION)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        """Yield the status now and after every change."""
        async for response in self._board.changes(changes_only=request.changes_only):
            yield response

    async def GetWeightPlane(self, request: pb.GetWeightPlaneRequest, context: Context) -> pb.GetWeightPlaneResponse:
        return self._weight_plane()
