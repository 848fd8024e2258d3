"""Converts errors to gRPC statuses and back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from fourfold.errors import BY_CODE, FourfoldError, Internal, Unavailable
from fourfold.text import clean, is_reason

DOMAIN: Final = "fourfold"
# The text travels in the trailers twice: in the status and percent-encoded. If the trailers exceed 8 KiB, gRPC replaces
# the whole status by an error of its own.
_MAX_MESSAGE_BYTES: Final = 2048
# A longer pause that a server asks for is shortened to this.
MAX_RETRY_SECONDS: Final = 60.0

# gRPC's text for a failed connection, and explanations of the causes that follow it.
_CONNECTING: Final = "failed to connect to all addresses"
_EXPLANATIONS: Final = (
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


def to_status(error: FourfoldError) -> Status:
    """Return the status of `error`: code, text, one ErrorInfo, and a RetryInfo if the error has a delay."""
    number: int = grpc.StatusCode[error.code].value[0]
    status = Status(code=number, message=_shorten(error.message))
    status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.retry_after is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    return status


def _shorten(text: str) -> str:
    """Cut `text` to `_MAX_MESSAGE_BYTES` in its percent-encoded form, between characters."""
    text = text.encode(errors="replace").decode()  # paths can contain surrogates, which UTF-8 cannot encode
    size = 0
    for end, letter in enumerate(text):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode())
        if size > _MAX_MESSAGE_BYTES:
            return text[:end]
    return text


def from_rpc(error: grpc.aio.AioRpcError, *, peer: str) -> FourfoldError:
    """Return the error of the server `peer`, as an instance of the class that the server raised."""
    code = error.code()
    # A server that shuts down cancels its calls; another replica can serve them.
    cls = Unavailable if code is grpc.StatusCode.CANCELLED else BY_CODE.get(code.name, Internal)
    text = _explain(clean(error.details() or code.name))
    reason, retry_after = _read_details(error)
    return cls(f"{peer}: {text}", reason=reason or code.name, retry_after=retry_after)


def _explain(text: str) -> str:
    """Add an explanation to gRPC's text of a failed connection; return any other text unchanged."""
    if not text.startswith(_CONNECTING):
        return text
    cause = text.removeprefix(_CONNECTING).removeprefix("; last error: ")
    explanation = next((explanation for sign, explanation in _EXPLANATIONS if sign in cause), "")
    return f"cannot connect: {explanation} ({cause})" if explanation else f"cannot connect: {cause}"


def _read_details(error: grpc.aio.AioRpcError) -> tuple[str, float | None]:
    reason, retry_after = "", None
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):  # malformed details of another implementation; code and text are enough
            for detail in Status.FromString(value).details:
                info, retry = ErrorInfo(), RetryInfo()
                if detail.Unpack(info):
                    reason = info.reason if is_reason(info.reason) else ""
                elif detail.Unpack(retry):
                    delay = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
                    retry_after = min(max(delay, 0.0), MAX_RETRY_SECONDS)
    return reason, retry_after
