"""What the engine's workers answer, and how an error travels inside an answer. No torch here.

The engine calls its workers through vLLM's `collective_rpc`, which turns an exception into
text and, with several workers, leaves the other workers' answers in their queues. So the
verbs of `vllm_worker.WeightWorker` never raise: an answer is the result, or a dict with the
key "error". `unwrap` is for the caller's side and raises it again as what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fourfold.errors import (
    DeadlinePassed,
    FourfoldError,
    Internal,
    InvalidInput,
    StaleEpoch,
    Unavailable,
    WrongState,
)

_ERROR: Final = "error"
_CLASSES: Final[dict[str, type[FourfoldError]]] = {
    cls.code: cls for cls in (InvalidInput, StaleEpoch, WrongState, Unavailable, DeadlinePassed, Internal)
}


def error_answer(error: FourfoldError) -> dict[str, str]:
    """Return the answer that carries `error`."""
    return {_ERROR: error.code, "message": error.message, "reason": error.reason}


def error_of(answer: Any) -> FourfoldError | None:
    """Return the error that an answer carries; None: it is a result."""
    if not isinstance(answer, dict) or _ERROR not in answer:
        return None
    return _CLASSES.get(answer[_ERROR], Internal)(answer["message"], reason=answer["reason"])


def unwrap(answers: Sequence[Any]) -> list[Any]:
    """Return the answers of all workers of one engine, in worker order.

    Raises:
        FourfoldError: the first error among them, as the class that the worker raised.
    """
    for index, answer in enumerate(answers):
        if (error := error_of(answer)) is not None:
            where = f"engine worker {index}: " if len(answers) > 1 else ""
            raise type(error)(where + error.message, reason=error.reason)
    return list(answers)


def unwrap_same(answers: Sequence[Any]) -> Any:
    """Return the one answer that all workers gave.

    Raises:
        FourfoldError: a worker's error; `Internal` when the workers disagree.
    """
    results = unwrap(answers)
    if not results or any(result != results[0] for result in results[1:]):
        raise Internal(f"the {len(results)} workers of one engine answered different things: abort the update")
    return results[0]
