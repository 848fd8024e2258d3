"""Posts JSON to a server that is not trusted: with limits on time and size, without redirects or cookies.

A failure is a `WebError` with the reason of an outcome. Its text has host and path of the address, but neither its
query, nor its password, nor a header, because these may hold keys.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from fourfold.errors import ConfigError
from fourfold.host.proxies import proxy_for
from fourfold.install import install_command
from fourfold.text import clean, public_url

if TYPE_CHECKING:
    import aiohttp

_MAX_TEXT: Final = 300
_SECRET_LENGTH: Final = 7  # shorter words of a header, such as Bearer, are no secrets
_LONGEST_WAIT: Final = 1 << 30  # seconds of a Retry-After; a larger integer may have no float
_OVERLOADED: Final = frozenset({408, 409, 425, 429})
_REFUSED: Final = frozenset({401, 403, 404, 407})


class WebError(Exception):
    """A request without a usable response. `reason` is a key of ERROR_CODES."""

    def __init__(self, reason: str, message: str, *, again: bool, retry_after: float = 0.0) -> None:
        """`again`: the same request may succeed later, after `retry_after` seconds if the server said so."""
        super().__init__(message)
        self.reason = reason
        self.again = again
        self.retry_after = retry_after


class JsonClient:
    """Keeps the connections to one server."""

    def __init__(
        self, url: str, *, key: str, connections: int, max_bytes: int, headers: Mapping[str, str] | None = None
    ) -> None:
        """Check the address; `start` opens the client.

        Args:
            key: of the recipe, for errors.
            max_bytes: of a response.

        Raises:
            ConfigError: the address has no host, or a port that is no number.
        """
        try:
            parts = urlsplit(url)
            self._host, _ = parts.hostname or "", parts.port
        except ValueError:  # its text may have a part of a password
            raise ConfigError(f"{key} is no address; write http://HOST:PORT/PATH") from None
        if not self._host:
            raise ConfigError(f"{key} has no host; write http://HOST:PORT/PATH")
        self.title = public_url(url).partition("://")[2]
        """Host and path, without secrets."""
        self._url, self._headers = url, dict(headers or {})
        self._connections, self._max_bytes = connections, max_bytes
        self._proxy = proxy_for(url)
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Open the client. Raises ConfigError: aiohttp is not installed."""
        try:
            import aiohttp
        except ImportError:
            raise ConfigError(
                f"scorers of the kinds http and judge need the package aiohttp: "
                f"{install_command('fourfold-reward[http]')}"
            ) from None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small response could become a huge text
            trust_env=False,  # it would also send passwords of ~/.netrc
            timeout=aiohttp.ClientTimeout(),  # `post` has its own limit, which a slow drip of bytes does not extend
            headers={"Accept": "application/json", "Accept-Encoding": "identity", **self._headers},
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, body: Any, *, timeout: float) -> dict[str, Any]:
        """Send one request; return the JSON object of the response.

        Raises:
            WebError: there is no such response within `timeout` seconds.
            TimeoutError: there is none at all.
        """
        import aiohttp

        assert self._session is not None, "start() opens it"
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(timeout):
                async with self._session.post(
                    self._url, data=data, headers=headers, allow_redirects=False, proxy=self._proxy
                ) as response:
                    text = await self._read(response)
        except aiohttp.ClientHttpProxyError as error:  # of the proxy, before the server was asked
            raise self._status_error(error.status, b"", "") from None
        except aiohttp.ClientResponseError as error:  # no HTTP, or headers of the wrong form or size
            raise WebError(
                "BAD_RESPONSE", f"{self.title} sent no valid HTTP: {clean(error.message, _MAX_TEXT)}", again=True
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise WebError("UNREACHABLE", f"{self.title}: {_show(error)}", again=True) from None
        if response.status != HTTPStatus.OK:
            raise self._status_error(response.status, text, response.headers.get("Retry-After", ""))
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise self._bad(f"no JSON: {self._excerpt(text)}") from None
        if not isinstance(found, dict):
            raise self._bad(f"a JSON {type(found).__name__} where an object belongs")
        return found

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise self._bad(f"Content-Encoding {encoding[:40]!r}, which the request did not allow")
        text = bytearray()
        async for part in response.content.iter_chunked(1 << 16):
            text += part
            if len(text) > self._max_bytes:
                raise self._bad(f"more than {self._max_bytes} bytes")
        return bytes(text)

    def redact(self, text: str) -> str:
        """Return a text of the server without the keys of the request, which it may repeat."""
        for header in self._headers.values():
            for secret in header.split():
                text = text.replace(secret, "***") if len(secret) >= _SECRET_LENGTH else text
        return text

    def _excerpt(self, text: bytes) -> str:
        return repr(clean(self.redact(text.decode(errors="replace")), _MAX_TEXT))

    def _bad(self, what: str) -> WebError:
        return WebError("BAD_RESPONSE", f"{self.title} sent {what}", again=True)

    def _status_error(self, status: int, text: bytes, retry_after: str) -> WebError:
        said = f"{self.title} answered with status {status}: {self._excerpt(text)}"
        if status in _REFUSED:
            hints = {404: "check the address", 407: "check user and password of the proxy of the environment"}
            hint = hints.get(status, "check the key and its rights")
            return WebError("REFUSED", f"{self.title} answered with status {status}; {hint}", again=False)
        if status >= 500 or status in _OVERLOADED:
            return WebError("OVERLOADED", said, again=True, retry_after=_seconds(retry_after))
        if 300 <= status < 400:
            return WebError("BAD_RESPONSE", f"{said}; redirects are not followed: give the final address", again=False)
        return WebError("BAD_RESPONSE", said, again=False)


def _seconds(retry_after: str) -> float:
    """Return the seconds of a header Retry-After, which has a number or a date; 0 without a usable one."""
    try:
        return float(min(max(int(retry_after), 0), _LONGEST_WAIT))
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _show(error: BaseException) -> str:
    """Return type and cause. The texts of other errors contain the whole address, which may have a key."""
    return clean(f"{type(error).__name__}: {getattr(error, 'strerror', None) or ''}".rstrip(": "), _MAX_TEXT)
