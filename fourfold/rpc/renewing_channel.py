"""A channel whose certificate may be renewed while it is used.

grpc fixes the credentials of a channel when the channel is made: after a renewal it would connect again
with the old certificate, until that has expired. This one makes a new channel for the calls that begin
after the renewal. Calls that are under way keep the old channel until they end; it goes with the last.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import grpc

from fourfold.security.access import Security
from fourfold.security.material import Material


class RenewingChannel(grpc.aio.Channel):
    """Passes every call to a channel that was made with the present certificate."""

    def __init__(self, security: Security, make: Callable[[], grpc.aio.Channel]) -> None:
        """Make the first channel.

        Args:
            security: tells when the certificate changes.
            make: returns a channel with the present one.
        """
        self._security: Final = security
        self._make: Final = make
        self._material: Material = security.material
        self._channel = make()
        self._closed = False

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """As of grpc."""
        return _Method(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """As of grpc."""
        return _Method(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """As of grpc."""
        return _Method(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """As of grpc."""
        return _Method(self, "stream_stream", args, options)

    def current(self) -> grpc.aio.Channel:
        """Return the channel for a call that begins now."""
        material = self._security.material
        if material is not self._material and not self._closed:
            # Not closed: that would cancel its calls. grpc destroys it when the last of them lets go of it.
            self._material, self._channel = material, self._make()
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        """Close it; calls get `grace` seconds to end."""
        self._closed = True
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As of grpc."""
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As of grpc."""
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As of grpc."""
        await self.current().channel_ready()

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _Method:
    """One method of a stub; bound anew for each channel."""

    def __init__(self, owner: RenewingChannel, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._owner, self._kind, self._args, self._options = owner, kind, args, options
        self._channel: grpc.aio.Channel | None = None
        self._bound: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        channel = self._owner.current()
        if channel is not self._channel:
            self._channel, self._bound = channel, getattr(channel, self._kind)(*self._args, **self._options)
        return self._bound(*args, **options)
