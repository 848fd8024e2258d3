"""Conversion of errors to gRPC statuses and back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from fourfold import errors
from fourfold.rpc.status import from_rpc, to_status


def subclasses() -> list[type[errors.FourfoldError]]:
    # Subclasses in other modules never cross the wire.
    known = [cls for cls in errors.FourfoldError.__subclasses__() if cls.__module__ == errors.__name__]
    return sorted(known, key=lambda cls: cls.__name__)


WIRE = [cls for cls in subclasses() if cls is not errors.ConfigError]  # ConfigError never crosses the wire


def rpc_error(code: grpc.StatusCode, details: str | None, *metadata: tuple[str, Any]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


def sent(error: errors.FourfoldError) -> grpc.aio.AioRpcError:
    status = to_status(error)
    code = grpc.StatusCode[error.code]
    return rpc_error(code, status.message, ("grpc-status-details-bin", status.SerializeToString()))


def test_every_error_has_a_status_code_of_its_own() -> None:
    codes = [cls.code for cls in WIRE]
    assert len(codes) >= 11
    assert sorted(codes) == sorted(set(codes))
    assert all(hasattr(grpc.StatusCode, code) for code in codes)


@pytest.mark.parametrize("cls", subclasses())
def test_the_reason_is_the_class_name_unless_given(cls: type[errors.FourfoldError]) -> None:
    assert cls("x").reason == "".join(f"_{c}" if c.isupper() else c for c in cls.__name__).upper().lstrip("_")
    assert cls("x", reason="MINE").reason == "MINE"


def test_a_status_carries_one_error_info_and_a_delay_only_where_there_is_one() -> None:
    status = to_status(errors.NotFound("gone"))
    assert (status.code, status.message, len(status.details)) == (5, "gone", 1)
    status = to_status(errors.Overloaded("full", retry_after=0.25))
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("OVERLOADED", "fourfold")
    assert retry.retry_delay.ToNanoseconds() == 250_000_000


@pytest.mark.parametrize("cls", WIRE)
def test_an_error_comes_back_as_the_class_that_was_raised(cls: type[errors.FourfoldError]) -> None:
    error = from_rpc(sent(cls("text", reason="MINE", retry_after=2.0)), peer="rollout-0")
    assert type(error) is cls
    assert (error.message, error.reason, error.retry_after) == ("rollout-0: text", "MINE", 2.0)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlinePassed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNKNOWN, errors.Internal),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Internal),
        (grpc.StatusCode.DATA_LOSS, errors.Internal),
    ],
)
def test_a_status_of_the_transport_or_of_another_implementation_is_an_error_too(
    code: grpc.StatusCode, cls: type[errors.FourfoldError]
) -> None:
    error = from_rpc(rpc_error(code, None), peer="p")
    assert type(error) is cls
    assert (error.message, error.reason) == (f"p: {code.name}", code.name)


def test_malformed_and_unknown_details_are_ignored() -> None:
    other = Status()
    other.details.add().Pack(Status(code=1))
    broken = Status()
    broken.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    for data in (b"\xff\xff", other.SerializeToString(), broken.SerializeToString()):
        error = from_rpc(rpc_error(grpc.StatusCode.NOT_FOUND, "x", ("grpc-status-details-bin", data)), peer="p")
        assert (type(error), error.reason, error.retry_after) == (errors.NotFound, "NOT_FOUND", None)
    with pytest.raises(DecodeError):  # proves that the first status is malformed
        Status.FromString(b"\xff\xff")


def test_a_text_is_cut_to_what_fits_the_trailers_and_to_whole_letters() -> None:
    for letter, count in (("a", 2048), ("%", 682), ("\u00e9", 341), ("\U0001f600", 170), ("\n", 682)):
        assert to_status(errors.NotFound(letter * 5000)).message == letter * count
    assert to_status(errors.NotFound("\udcff path")).message == "? path"
    assert to_status(errors.NotFound("short")).message == "short"


@pytest.mark.parametrize("seconds", [-5, 315_360_000, 2**62])
def test_the_pause_that_a_server_asks_for_is_bounded(seconds: int) -> None:
    status = to_status(errors.Overloaded("full"))
    retry = RetryInfo()
    retry.retry_delay.seconds = seconds
    status.details.add().Pack(retry)
    metadata = ("grpc-status-details-bin", status.SerializeToString())
    error = from_rpc(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata), peer="p")
    assert error.retry_after == (60.0 if seconds > 0 else 0.0)


def test_the_texts_of_a_server_are_made_safe() -> None:
    status = Status(code=5, message="x")
    status.details.add().Pack(ErrorInfo(reason="no\x1b[31m reason"))
    metadata = ("grpc-status-details-bin", status.SerializeToString())
    error = from_rpc(rpc_error(grpc.StatusCode.NOT_FOUND, "\x1b[2Jgone\nERROR forged", metadata), peer="p")
    assert (error.message, error.reason) == ("p: gone ERROR forged", "NOT_FOUND")
