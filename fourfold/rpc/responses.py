"""Checks and cleans responses of other processes before any code uses them.

`clean_response` removes control characters from strings; `fourfold.rpc.channel` applies it to each response. Problems
and conversations are data, which must come back as they were sent: they stay unchanged.
`ResponseCheck` holds the rules that several clients share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from fourfold.arrays import Float32Array
from fourfold.bounds import MAX_NUMBER
from fourfold.contract import contract_problem
from fourfold.errors import PeerFault
from fourfold.rpc.codec import read_floats
from fourfold.text import clean
from fourfold.types.v1 import experience_pb2 as pb

Response = TypeVar("Response", bound=Message)

# A run publishes its weights under a higher version than any engine reports. The bound leaves room for that.
MAX_ENGINE_VERSION: Final = 1 << 40
MAX_DEVICES: Final = 4096  # devices, workers or ranks of one service
MAX_OFFER_BYTES: Final = 4096
# Messages whose strings are data, with line ends and of any length. If an agent got a reply of the policy with another
# character, and sent it back, the gateway would not find it in the session, and the turn would open a segment.
_VERBATIM: Final = frozenset(
    {
        "fourfold.agent.v1.ApplyChatTemplateResponse",
        "fourfold.agent.v1.DetokenizeResponse",
        "fourfold.agent.v1.Message",
        "fourfold.agent.v1.Task",
        "fourfold.agent.v1.TurnChunk",
        "fourfold.coordinator.v1.LeasedTask",
        "fourfold.rollout.v1.ParseCompletionResponse",
    }
)
_UUID_BYTES: Final = 16
_SUM_BYTES: Final = 16
# In nats. No softmax gives a larger magnitude, and sums of larger float32 values over a batch lose their meaning.
_MAX_LOGPROB_MAGNITUDE: Final = 1e6


def clean_response(response: Response | None, *, peer: str, name: str) -> Response:
    """Return `response` with clean strings; raise PeerFault when it is None."""
    # grpc.aio returns None for bytes that it cannot parse, in unary calls and in streams, and only logs the error.
    if response is None:
        raise PeerFault(peer, "MALFORMED_RESPONSE", f"{name}: the response is not the message of this method")
    clean_strings(response)
    return response


def clean_strings(message: Message) -> None:
    """Replace every string in `message` and in its submessages with `text.clean` of it. Map keys stay unchanged.

    Messages in `_VERBATIM` stay unchanged.
    """
    if not _has_strings(message.DESCRIPTOR) or message.DESCRIPTOR.full_name in _VERBATIM:
        return
    for field, value in message.ListFields():
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        value_field = inner.fields_by_name["value"] if inner is not None and is_map else field
        if value_field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                if (cleaned := clean(value)) is not value:
                    setattr(message, field.name, cleaned)
                continue
            for key in list(value) if is_map else range(len(value)):
                if (cleaned := clean(value[key])) is not value[key]:
                    value[key] = cleaned
        elif value_field.type == FieldDescriptor.TYPE_MESSAGE:
            submessages = [value] if isinstance(value, Message) else value.values() if is_map else value
            for submessage in submessages:
                clean_strings(submessage)


# Responses with only tokens are frequent and large; the cache lets `clean_strings` skip them without a search.
@cache
def _has_strings(descriptor: Descriptor) -> bool:
    """Return whether messages of a type can hold strings at any depth."""
    seen, pending = {descriptor.full_name}, [descriptor]
    while pending:
        for field in pending.pop().fields:
            if field.type == FieldDescriptor.TYPE_STRING:
                return True
            inner = field.message_type
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                pending.append(inner)
    return False


class ModelInfo(Protocol):
    """Fields in which rollout, reference and trainer describe their model."""

    tokenizer_sha256: bytes
    max_context_tokens: int
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class ResponseCheck:
    """The rules for responses of one method. All methods but `fault` raise PeerFault with the value and the rule."""

    peer: str  # the called service, for messages, e.g. "rollout-0 at 127.0.0.1:5000"
    name: str  # the called method

    def require(self, holds: bool, rule: str, kind: str = "BAD_RESPONSE") -> None:
        """Raise PeerFault with the reason `kind` unless the response keeps a rule."""
        if not holds:
            raise self.fault(rule, kind)

    def fault(self, rule: str, kind: str = "BAD_RESPONSE") -> PeerFault:
        """Return the error of a response that breaks a rule, with the reason `kind`."""
        return PeerFault(self.peer, kind, f"{self.name}: {rule}")

    def not_negative(self, message: object, field: str) -> None:
        """Check that a field is at least 0."""
        value = getattr(message, field)
        self.require(value >= 0, f"{field} is {value}; it must be at least 0")

    def model(self, info: ModelInfo) -> None:
        """Check the tokenizer's digest and the sizes of a model."""
        self.tokenizer(info.tokenizer_sha256)
        self.not_negative(info, "max_context_tokens")
        self.not_negative(info, "vocabulary_size")

    def contract(self, version: str) -> None:
        """Check that the service has our major version of the contract. An empty version is that of an old service."""
        problem = contract_problem(version)
        self.require(not problem, problem, "OTHER_CONTRACT")

    def tokenizer(self, digest: bytes) -> None:
        """Check the SHA-256 of a tokenizer. An empty digest means that the service has no tokenizer."""
        self.require(len(digest) in (0, 32), f"tokenizer_sha256 has {len(digest)} bytes; a SHA-256 has 32")

    def version(self, version: int, largest: int = MAX_NUMBER) -> None:
        """Check that a policy version is in [0, largest]."""
        rule = f"policy_version is {version}; it must be in [0, {largest}]"
        self.require(0 <= version <= largest, rule, "BAD_VERSION")

    def devices(self, uuids: Sequence[bytes]) -> None:
        """Check the number and the length of GPU UUIDs."""
        self.require(len(uuids) <= MAX_DEVICES, f"{len(uuids)} devices; at most {MAX_DEVICES}")
        wrong_sizes = {len(uuid) for uuid in uuids} - {_UUID_BYTES}
        rule = f"a device UUID has {min(wrong_sizes, default=0)} bytes; it must have {_UUID_BYTES}"
        self.require(not wrong_sizes, rule)

    def digest(self, digest: bytes) -> None:
        """Check the length of a SHA-256."""
        self.require(len(digest) == 32, f"a digest has {len(digest)} bytes; it must have 32")

    def sums(self, sums: bytes) -> None:
        """Check the length of packed tensor sums; an empty value is allowed."""
        self.require(len(sums) % _SUM_BYTES == 0, f"sums have {len(sums)} bytes; each tensor needs {_SUM_BYTES}")

    def offers(self, offers: Sequence[bytes]) -> None:
        """Check the number and the size of the trainer ranks' offers. They are secrets, so no message contains one."""
        rule = f"{len(offers)} offers; there must be 1 to {MAX_DEVICES}, one per rank"
        self.require(1 <= len(offers) <= MAX_DEVICES, rule)
        largest = max(map(len, offers))
        self.require(largest <= MAX_OFFER_BYTES, f"an offer has {largest} bytes; it may have {MAX_OFFER_BYTES}")

    def rows(
        self, rows: Sequence[bytes], requested: Sequence[pb.Experience], what: str = "logprobs"
    ) -> list[Float32Array]:
        """Unpack one float32 [n] per requested sample of n tokens; check their number and lengths."""
        rule = f"answered {len(rows)} rows of {what} for {len(requested)} samples"
        self.require(len(rows) == len(requested), rule, "WRONG_COUNT")
        for row, sample in zip(rows, requested, strict=True):
            expected = len(sample.token_ids)  # int32 tokens, float32 values
            rule = f"{what} of sample {sample.sample_id} have {len(row)} bytes; they need {expected}"
            self.require(len(row) == expected, rule, "WRONG_LENGTH")
        return [read_floats(row) for row in rows]

    def logprobs(self, rows: Sequence[Float32Array], requested: Sequence[pb.Experience]) -> None:
        """Check that log-probabilities after the first token are finite and of a possible magnitude."""
        limit = _MAX_LOGPROB_MAGNITUDE
        for row, sample in zip(rows, requested, strict=True):
            possible = bool((np.abs(row[1:]) <= limit).all())  # False for NaN
            rule = f"logprobs of sample {sample.sample_id} are not finite after the first token, or above {limit:g}"
            self.require(possible, rule, "NOT_FINITE")
