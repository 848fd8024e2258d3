"""What came out of scoring one sample: a score, an abstention, or an error. Never a silent zero.

`from_result` reads what a reward function returned. An outcome crosses the pipe between the
worker and the service as a JSON object.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from fourfold.text import MAX_COMPONENTS, MAX_ERROR, clean, is_metric_name
from fourfold_reward.sample import Abstain, Score

NO_SCORE: Final = "NO_SCORE"
MAX_MESSAGE_CHARACTERS: Final = MAX_ERROR

# Error reason -> name of the google.rpc.Code that travels with it. UNAVAILABLE and DEADLINE_EXCEEDED tell the caller
# that a retry may help.
ERROR_CODES: Final[dict[str, str]] = {
    "TIMEOUT": "DEADLINE_EXCEEDED",
    "WORKER_DIED": "UNAVAILABLE",
    "RAISED": "UNKNOWN",
    "NOT_FINITE": "OUT_OF_RANGE",
    "NOT_A_NUMBER": "INVALID_ARGUMENT",
    "NOT_FOUND": "NOT_FOUND",
    "BAD_METADATA": "INVALID_ARGUMENT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Exactly one of score, abstain_reason and error_reason is set."""

    score: float | None = None
    abstain_reason: str = ""
    error_reason: str = ""
    """A key of ERROR_CODES."""
    error_code: str = ""
    """Name of a google.rpc.Code."""
    message: str = ""
    """Of an error, for people; at most MAX_MESSAGE_CHARACTERS."""
    components: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def error(cls, reason: str, message: str, *, code: str = "") -> Self:
        """Return an error; the message is cut to its limit, the code is the reason's own unless given."""
        message = clean(message, MAX_MESSAGE_CHARACTERS)
        return cls(error_reason=reason, error_code=code or ERROR_CODES[reason], message=message)

    def to_json(self) -> dict[str, Any]:
        """Return the form that crosses the pipe."""
        return {
            "score": self.score,
            "abstain_reason": self.abstain_reason,
            "error_reason": self.error_reason,
            "error_code": self.error_code,
            "message": self.message,
            "components": dict(self.components),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned. User code can reach the pipe, so that nothing is taken on trust.

        Raises:
            ValueError: it is no outcome.
        """
        try:
            reason, code, message, abstained = (
                str(data[key]) for key in ("error_reason", "error_code", "message", "abstain_reason")
            )
            result = {"score": data["score"], "components": data["components"]}
        except KeyError as error:
            raise ValueError(f"an outcome without {error}") from None
        if reason:
            if reason not in ERROR_CODES or code not in ERROR_CODES.values():
                raise ValueError(f"an error with reason {reason!r:.100} and code {code!r:.100}")
            return cls.error(reason, message, code=code)
        if abstained:
            return cls(abstain_reason=Abstain(abstained).reason)
        return cls(**asdict(from_result(result)))


def from_result(result: object) -> Outcome:
    """Read what a reward function returned: see `sample.Result`.

    Raises:
        ValueError: too many components, or a name that is no text; the function is wrong.
    """
    match result:
        case None:
            return Outcome(abstain_reason=NO_SCORE)
        case Abstain(reason):
            return Outcome(abstain_reason=reason)
        case Score(score, components):
            return _scored(score, components)
        case Mapping():
            return _from_mapping(result)
        case _:
            return _scored(result, {})


def _from_mapping(result: Mapping[Any, Any]) -> Outcome:
    if unknown := set(result) - {"score", "components"}:
        raise ValueError(
            f"a returned dictionary has the key {sorted(map(str, unknown))[0]!r}; it may have 'score' and 'components'"
        )
    if "score" not in result:
        raise ValueError("a returned dictionary needs the key 'score'; return None to abstain")
    if result["score"] is None:
        return Outcome(abstain_reason=NO_SCORE)
    return _scored(result["score"], result.get("components") or {})


def _scored(value: object, components: object) -> Outcome:
    score = _number(value)
    if score is None:
        return Outcome.error("NOT_A_NUMBER", f"the function returned {_show(value)}; it must return a number")
    if not _fits(score):
        return Outcome.error("NOT_FINITE", f"the score is {score}; it must be finite in 32 bits")
    if not isinstance(components, Mapping) or len(components) > MAX_COMPONENTS:
        raise ValueError(f"components: {_show(components)}; at most {MAX_COMPONENTS} numbers by name")
    parts: dict[str, float] = {}
    for name, raw in components.items():
        part = _number(raw)
        if not isinstance(name, str) or not is_metric_name(name):
            raise ValueError(f"component name {_show(name)}: it must be 1 to 64 letters, digits, spaces and ._:/@+-")
        if part is None:
            return Outcome.error("NOT_A_NUMBER", f"component {name!r} is {_show(raw)}; it must be a number")
        if not _fits(part):
            return Outcome.error("NOT_FINITE", f"component {name!r} is {part}; it must be finite in 32 bits")
        parts[name] = part
    return Outcome(score=score, components=parts)


def _number(value: object) -> float | None:
    # Texts have float(), too, but "1" in place of 1 is a mistake; numpy and torch scalars have __float__.
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None  # an array with more than one element


def _fits(value: float) -> bool:
    if not math.isfinite(value):
        return False
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return True


def _show(value: object) -> str:
    text = repr(value)
    return f"{text[:200]} ({type(value).__name__})"
