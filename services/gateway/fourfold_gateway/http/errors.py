"""Converts errors to HTTP responses, in the format of the API that was called."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from fourfold.errors import FourfoldError, InvalidInput, Overloaded, Unavailable

Dialect = Literal["openai", "anthropic"]

# HTTP status by the gRPC status code of a FourfoldError. WrongState becomes 400: SDKs repeat a request after 409.
_STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 400,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
# HTTP status by reason. 410 tells an agent, without reading the body, that no later call succeeds.
_STATUS_OF_REASON: Final = {"RUN_ENDED": 410}
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_SECONDS: Final = 1.0  # Retry-After of a retryable error without a delay of its own


class RequestError(InvalidInput):
    """A request that HTTP alone refuses, with its own status code."""

    def __init__(
        self, message: str, *, param: str = "", status: int = 400, details: Mapping[str, Any] | None = None
    ) -> None:
        """Make an error. `param` is the path of the wrong parameter, such as "messages[0].role"; `details` are those
        that Anthropic's SDK reads.
        """
        super().__init__(message)
        self.details = details
        self.param = param
        self.status = status


def status_of(error: FourfoldError) -> int:
    """Return the HTTP status code of an error."""
    if isinstance(error, RequestError):
        return error.status
    return _STATUS_OF_REASON.get(error.reason) or _STATUS.get(error.code, 500)


def error_body(error: FourfoldError, dialect: Dialect) -> dict[str, Any]:
    """Return the JSON body of an error."""
    status = status_of(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if dialect == "anthropic":
        details = error.details if isinstance(error, RequestError) else None
        extra = {"details": dict(details)} if details else {}
        return {"type": "error", "error": {"type": kind, "message": error.message, **extra}}
    param = error.param if isinstance(error, RequestError) else ""
    return {"error": {"message": error.message, "type": kind, "param": param or None, "code": error.reason.lower()}}


def error_headers(error: FourfoldError) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a client whether and when to retry."""
    if not isinstance(error, Overloaded | Unavailable):
        # Both SDKs read this header; without it they repeat a request after each 408, 409 and 5xx.
        return [(b"x-should-retry", b"false")] if status_of(error) < 500 else []
    seconds = _SECONDS if error.retry_after is None else max(error.retry_after, 0.0)
    return [
        (b"retry-after", b"%d" % math.ceil(seconds)),
        (b"retry-after-ms", b"%d" % math.ceil(seconds * 1000)),
        (b"x-should-retry", b"true"),
    ]


def encode(value: Any) -> bytes:
    """Return compact JSON as UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
