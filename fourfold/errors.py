"""Every error that a user or a caller can meet, with the gRPC status code that each one becomes.

A message states the value, the rule and the fix. Servicers raise these errors, `fourfold.rpc.interceptors` sends each
as a status with one `ErrorInfo`, and `fourfold.rpc.status.from_rpc` raises the same class on the caller's side. The
command line imports this module too, so it must not import anything slow.
"""

from __future__ import annotations

from typing import ClassVar, Final

# Reasons for which an engine can never take the trainer's weights; a retry is useless.
ARCHITECTURE_NOT_VERIFIED: Final = "ARCHITECTURE_NOT_VERIFIED"
CANNOT_SLEEP: Final = "CANNOT_SLEEP"
MODEL_MISMATCH: Final = "MODEL_MISMATCH"
NO_ADDRESS: Final = "NO_ADDRESS"
NO_BACKEND: Final = "NO_BACKEND"
WEIGHTS_REFUSED: Final = frozenset({ARCHITECTURE_NOT_VERIFIED, MODEL_MISMATCH, NO_BACKEND})

# Reasons of the errors with which members of a weight transfer end that are well: another member is to blame.
PEER_LOST: Final = "PEER_LOST"
PEER_SLOW: Final = "PEER_SLOW"
TRANSFER_ABORTED: Final = "TRANSFER_ABORTED"
CONSEQUENCES: Final = frozenset({PEER_LOST, PEER_SLOW, TRANSFER_ABORTED})


class FourfoldError(Exception):
    """Base class of all errors whose message users and callers may read."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""

    def __init__(self, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        """Make an error.

        Args:
            message: value, rule and fix; must not contain secrets.
            reason: UPPER_SNAKE_CASE for programs; default: the class name.
            retry_after: seconds after which a retry may succeed, or None.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason or _upper_snake(type(self).__name__)
        self.retry_after = retry_after


class ConfigError(FourfoldError, ValueError):
    """A recipe, a command-line argument or a user's file is wrong. Never crosses the wire."""

    code = "INVALID_ARGUMENT"


class InvalidInput(FourfoldError, ValueError):
    """The request can never succeed."""

    code = "INVALID_ARGUMENT"


class Unauthenticated(FourfoldError):
    """The caller's token or certificate is missing or unknown."""

    code = "UNAUTHENTICATED"


class PermissionDenied(FourfoldError):
    """The caller is known but may not make this call."""

    code = "PERMISSION_DENIED"


class NotFound(FourfoldError):
    """The lease, incarnation or checkpoint does not exist."""

    code = "NOT_FOUND"


class StaleEpoch(FourfoldError):
    """The weight group of this epoch was replaced; join the new one."""

    code = "ABORTED"


class AlreadyExists(FourfoldError):
    """The id is in use, or was used with other content."""

    code = "ALREADY_EXISTS"


class WrongState(FourfoldError):
    """The request is only possible in another state of the service."""

    code = "FAILED_PRECONDITION"


class Overloaded(FourfoldError):
    """Too much work is in flight; retry after `retry_after` seconds."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(FourfoldError):
    """The service is starting, draining, updating its weights, or dead; retry later or elsewhere."""

    code = "UNAVAILABLE"


class DeadlinePassed(FourfoldError, TimeoutError):
    """An operation took longer than its deadline."""

    code = "DEADLINE_EXCEEDED"


class Internal(FourfoldError):
    """A bug of the service; its details are only in the service's log."""

    code = "INTERNAL"


class PeerFault(Internal):
    """A response that breaks its contract. It costs the caller one attempt, like an unreachable peer."""

    def __init__(self, peer: str, kind: str, text: str) -> None:
        """Make a fault.

        Args:
            peer: the service that responded, for messages, e.g. "reward-0 at 127.0.0.1:5000".
            kind: the error's reason in UPPER_SNAKE_CASE, e.g. MALFORMED_RESPONSE.
            text: call, value and rule; no control characters.
        """
        super().__init__(f"{peer}: {text}", reason=kind)
        self.peer = peer


BY_CODE: Final = {cls.code: cls for cls in FourfoldError.__subclasses__() if cls is not ConfigError}
"""The class that a caller raises for each status code."""


def _upper_snake(name: str) -> str:
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()
