"""Clients of a reference service: log-probabilities of samples under the frozen model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from numpy.typing import ArrayLike

from fourfold.arrays import Float32Array
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.reference.v1 import reference_service_pb2_grpc as pb_grpc
from fourfold.rpc.client import AsyncClient, SyncClient, blocking
from fourfold.rpc.logprobs import compute_logprobs
from fourfold.sample import Sample
from fourfold.sample.wire import from_samples, from_token_ids
from fourfold.types.v1.experience_pb2 import Experience


class AsyncReferenceClient(AsyncClient):
    """Computes log-probabilities under the reference policy, with asyncio.

    All methods raise FourfoldError. Timeouts are seconds; the default is the client's.
    """

    _role = "reference"

    @cached_property
    def _stub(self) -> pb_grpc.ReferenceServiceAsyncStub:
        return pb_grpc.ReferenceServiceStub(self._open())

    async def get_info(self, *, timeout: float | None = None) -> pb.GetInfoResponse:
        """Return model, tokenizer hash and limits."""
        info = await self._call(self._stub.GetInfo, pb.GetInfoRequest(), timeout)
        check = self._check(info)
        check.contract(info.contract_version)
        check.model(info)
        return info

    async def forward(
        self, token_ids: Sequence[ArrayLike], *, temperature: float = 1.0, timeout: float | None = None
    ) -> list[Float32Array]:
        """Compute the log-probability of every token.

        Args:
            token_ids: int [n] per sample; n is 2 to the context length.
            temperature: divides the logits; in (0, 2].
            timeout: seconds for all samples; a large batch takes several calls.

        Returns:
            One float32 [n] per sample, in order; the first value of each is NaN, the others are finite.

        Raises:
            InvalidInput: A sample is malformed; the message has its index.
        """
        return await self._compute(from_token_ids(token_ids, temperature), timeout)

    async def compute_logprobs(self, samples: Sequence[Sample], *, timeout: float | None = None) -> list[Float32Array]:
        """Compute the log-probability of every token of `samples`, at the temperature of each; see `forward`."""
        return await self._compute(from_samples(samples), timeout)

    async def _compute(self, asked: Iterable[Experience], timeout: float | None) -> list[Float32Array]:
        return await compute_logprobs(self, self._stub.ComputeLogprobs, pb.ComputeLogprobsRequest, asked, timeout)


class ReferenceClient(SyncClient[AsyncReferenceClient]):
    """Computes log-probabilities under the reference policy; each method blocks. Asyncio: AsyncReferenceClient."""

    _async_type = AsyncReferenceClient
    get_info = blocking(AsyncReferenceClient.get_info)
    forward = blocking(AsyncReferenceClient.forward)
    compute_logprobs = blocking(AsyncReferenceClient.compute_logprobs)
