"""Every error a user or a caller can meet, and the gRPC status each one becomes.

    FourfoldError
    |- ConfigError         bad recipe or command line; never crosses the wire
    |- InvalidInput        INVALID_ARGUMENT     never retry
    |- Unauthenticated     UNAUTHENTICATED      no or bad token
    |- PermissionDenied    PERMISSION_DENIED    this caller may not do that
    |- NotFound            NOT_FOUND            lease, incarnation, checkpoint: register again
    |- StaleEpoch          ABORTED              weight group moved on: join again
    |- AlreadyExists       ALREADY_EXISTS       same id, other bytes
    |- WrongState          FAILED_PRECONDITION  wait for a state change
    |- Overloaded          RESOURCE_EXHAUSTED   wait retry_after seconds
    |- Unavailable         UNAVAILABLE          back off, try another replica
    |- DeadlinePassed      DEADLINE_EXCEEDED    took longer than allowed
    `- Internal            INTERNAL             our bug; the text stays in the log
       `- PeerFault                             an answer that breaks the contract; never crosses the wire

A message says the value, the rule and the fix. Servicers raise these; the interceptor in
`fourfold.rpc.interceptors` turns them into a status with one `ErrorInfo`, and
`fourfold.rpc.status.from_rpc` turns that back into the same class on the caller's side. This
module imports nothing heavy: the command line uses it too.
"""

from __future__ import annotations

from typing import ClassVar, Final

# Reasons by which an engine says that it can never take the trainer's weights: another try changes nothing.
ARCHITECTURE_NOT_VERIFIED: Final = "ARCHITECTURE_NOT_VERIFIED"
CANNOT_SLEEP: Final = "CANNOT_SLEEP"
MODEL_MISMATCH: Final = "MODEL_MISMATCH"
NO_BACKEND: Final = "NO_BACKEND"
WEIGHTS_REFUSED: Final = frozenset({ARCHITECTURE_NOT_VERIFIED, MODEL_MISMATCH, NO_BACKEND})


class FourfoldError(Exception):
    """Base of all errors that are meant to be read by people."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""

    def __init__(self, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        """Make an error.

        Args:
            message: value, rule, fix; shown to the caller, so no secrets.
            reason: UPPER_SNAKE_CASE for programs; default: the class name.
            retry_after: seconds after which a retry may succeed, or None.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason or _upper_snake(type(self).__name__)
        self.retry_after = retry_after


class ConfigError(FourfoldError, ValueError):
    """A recipe, an argument or a file given by the user is wrong."""

    code = "INVALID_ARGUMENT"


class InvalidInput(FourfoldError, ValueError):
    """A request that can never succeed."""

    code = "INVALID_ARGUMENT"


class Unauthenticated(FourfoldError):
    """No token, or one that is not known."""

    code = "UNAUTHENTICATED"


class PermissionDenied(FourfoldError):
    """A known caller that may not call this."""

    code = "PERMISSION_DENIED"


class NotFound(FourfoldError):
    """A lease, an incarnation, a checkpoint that is not there."""

    code = "NOT_FOUND"


class StaleEpoch(FourfoldError):
    """The weight group of this epoch is gone."""

    code = "ABORTED"


class AlreadyExists(FourfoldError):
    """An id that is known with other bytes, or that is live."""

    code = "ALREADY_EXISTS"


class WrongState(FourfoldError):
    """A request that another state would allow."""

    code = "FAILED_PRECONDITION"


class Overloaded(FourfoldError):
    """Too much work in flight; `retry_after` says when to come back."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(FourfoldError):
    """Starting, draining, updating, or dead."""

    code = "UNAVAILABLE"


class DeadlinePassed(FourfoldError, TimeoutError):
    """A wait that reached its bound."""

    code = "DEADLINE_EXCEEDED"


class Internal(FourfoldError):
    """A bug on the other side."""

    code = "INTERNAL"


class PeerFault(Internal):
    """A response that its contract does not allow. It costs the caller one try, as a peer that is away does."""

    def __init__(self, peer: str, kind: str, text: str) -> None:
        """Make a fault.

        Args:
            peer: who answered, for messages, e.g. "reward-0 at 127.0.0.1:5000".
            kind: UPPER_SNAKE_CASE, e.g. MALFORMED_RESPONSE; the error's reason.
            text: call, value and rule, for people; no control characters.
        """
        super().__init__(f"{peer}: {text}", reason=kind)
        self.peer = peer


def _upper_snake(name: str) -> str:
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()
