"""Errors as gRPC statuses, and back. The one table that both sides use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from fourfold.errors import (
    AlreadyExists,
    DeadlinePassed,
    FourfoldError,
    Internal,
    InvalidInput,
    NotFound,
    Overloaded,
    PermissionDenied,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from fourfold.text import clean, is_reason

DOMAIN: Final = "fourfold"
# The text travels in the trailers twice, in the status and percent-encoded; past 8 KiB in all
# gRPC replaces the whole status by its own error.
_MAX_MESSAGE_BYTES: Final = 2048
MAX_RETRY_SECONDS: Final = 60.0
"""Longest pause that a server can ask for; what asks for more is tried again after this."""

# What gRPC says of a connection that did not come about, and what it means.
_CONNECTING: Final = "failed to connect to all addresses"
_MEANINGS: Final = (
    ("Connection refused", "nothing listens there"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS; start it with the recipe that has [security], too"),
    ("certificate has expired", "its certificate has expired; make a new one with `fourfold certs renew DIR MEMBER`"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of our CA; both need files of one `fourfold certs DIR`"),
    (
        "Hostname Verification",
        "another member answers there than the one that is called, by its certificate; check its address, its "
        "--member-id, and that its file is the one that `fourfold certs` made for it",
    ),
    (
        "Socket closed",
        "it hung up at once: it is ending, or only one of us uses TLS, or it refuses our certificate; all need files "
        "of one `fourfold certs DIR`",
    ),
)

_BY_CODE: dict[str, type[FourfoldError]] = {
    cls.code: cls
    for cls in (
        InvalidInput,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        StaleEpoch,
        AlreadyExists,
        WrongState,
        Overloaded,
        Unavailable,
        DeadlinePassed,
        Internal,
    )
}


def to_status(error: FourfoldError) -> Status:
    """Return the status that carries `error`: its code, its text, one ErrorInfo, a RetryInfo if it has a delay."""
    number: int = grpc.StatusCode[error.code].value[0]
    text = _shortened(error.message)
    status = Status(code=number, message=text)
    status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    return status


def _shortened(text: str) -> str:
    """Return the longest beginning of `text` that is small enough when it is percent-encoded."""
    text = text.encode(errors="replace").decode()  # a path may hold surrogates
    size = 0
    for end, letter in enumerate(text):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode())
        if size > _MAX_MESSAGE_BYTES:
            return text[:end]
    return text


def from_rpc(error: grpc.aio.AioRpcError, *, peer: str) -> FourfoldError:
    """Return the error that the server raised, as the class it raised.

    Args:
        error: what a stub raised.
        peer: who was called, for the message, e.g. "rollout-0 at 127.0.0.1:5000".
    """
    code = error.code()
    text = _explained(clean(error.details() or code.name))
    cls = _BY_CODE.get(code.name, Internal)
    if code is grpc.StatusCode.CANCELLED:
        cls = Unavailable
    info, retry_after = _read_details(error)
    return cls(f"{peer}: {text}", reason=info or code.name, retry_after=retry_after)


def _explained(text: str) -> str:
    """Return what a server said as it is, and what gRPC says of a failed connection with its meaning before it."""
    if not text.startswith(_CONNECTING):
        return text
    cause = text.removeprefix(_CONNECTING).removeprefix("; last error: ")
    meaning = next((meaning for sign, meaning in _MEANINGS if sign in cause), "")
    return f"cannot connect: {meaning} ({cause})" if meaning else f"cannot connect: {cause}"


def _read_details(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    reason, retry_after = "", None
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):  # a stranger's server; the code and the text are enough
            for detail in Status.FromString(value).details:
                if detail.Is(ErrorInfo.DESCRIPTOR):
                    info = ErrorInfo()
                    detail.Unpack(info)
                    reason = info.reason if is_reason(info.reason) else ""
                elif detail.Is(RetryInfo.DESCRIPTOR):
                    retry = RetryInfo()
                    detail.Unpack(retry)
                    delay = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
                    retry_after = min(max(delay, 0.0), MAX_RETRY_SECONDS)
    return reason, retry_after
