"""Generates valid and invalid calls to every method of the contract, from the protobuf descriptors.

The same seed generates the same calls. Their results vary, because several calls run at a time.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

# Bounds of the types, bounds of the services, and small values that are sometimes valid.
_INTEGERS: Final = (0, 1, 2, 3, -1, 127, 4096, 4097, 2**31 - 1, -(2**31), 2**52, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
_FLOATS: Final = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = (
    "", "a", "rollout-0", "x" * 128, "x" * 129, "../../etc/passwd", "a/b", "\x1b[31mred\x07", "a\nb\r\x00c",
    "\u202e\ufeff", "{}", '{"source_dataset": "products"}', "[" * 2000, "0.0.0.0:1", "127.0.0.1:99999", "unix:/tmp/x",
    "nowhere.invalid:1", "y" * 20_000,
)  # fmt: skip
_METADATA: Final = (
    ("authorization", "Bearer x"), ("authorization", ""), ("x-request-id", "~"), ("x-trace-bin", b"\x00\xff"),
    ("grpc-previous-rpc-attempts", "5"), ("user-agent", "x" * 900), ("content-type", "text/plain"), ("te", "trailers"),
)  # fmt: skip
_MOST_REPEATED: Final = 5
_DEEPEST: Final = 4
_LARGE_BYTES: Final = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A generated call."""

    path: str
    """/package.Service/Method."""
    streams_requests: bool
    streams_responses: bool
    messages: Sequence[bytes]
    timeout: float | None
    """None: without a deadline."""
    metadata: Sequence[tuple[str, str | bytes]]
    ends: bool
    """True if the caller ends its request stream."""
    cancels: bool
    """The caller goes away while it waits."""


class Fuzz:
    """Generates calls."""

    def __init__(
        self, services: Sequence[str], *, seed: int, hints: Mapping[str, Sequence[Any]], good: Mapping[str, Good]
    ) -> None:
        """Prepare.

        Args:
            services: full names; the default pool has their descriptors.
            seed: seed of the generator.
            hints: values that a service may accept, by field name.
            good: functions that return the messages of an acceptable call, by "Service.Method".
        """
        pool = descriptor_pool.Default()
        self._methods = [method for name in services for method in pool.FindServiceByName(name).methods]
        self._random, self._hints, self._good = random.Random(seed), hints, good

    def calls(self, count: int) -> Iterator[Call]:
        """Yield `count` calls."""
        for _ in range(count):
            yield self._call()

    def _call(self) -> Call:
        pick = self._random
        method: MethodDescriptor = pick.choice(self._methods)
        path = f"/{method.containing_service.full_name}/{method.name}"
        if pick.random() < 0.01:
            path = pick.choice((f"{path}x", "/a.B/C", f"/{method.containing_service.full_name}/", "/"))
        streams = method.client_streaming
        count = pick.choice((0, 1, 1, 1, 1, 1, 2, 4)) if streams else 1
        messages = [data for _ in range(count) for data in self._messages(method)]
        metadata = [pick.choice(_METADATA) for _ in range(pick.randrange(4))] if pick.random() < 0.2 else []
        return Call(
            path=path,
            streams_requests=streams,
            streams_responses=method.server_streaming,
            messages=messages if streams else messages[:1],
            timeout=None if pick.random() < 0.03 else pick.choice((0.002, 0.1, 0.3, 0.5, 1.0, 1e6)),
            metadata=metadata,
            ends=pick.random() < 0.97,
            cancels=pick.random() < 0.03,
        )

    def _messages(self, method: MethodDescriptor) -> list[bytes]:
        pick, kind = self._random, self._random.random()
        if kind < 0.08:
            return [pick.randbytes(pick.choice((0, 1, 7, 60, 3000)))]
        made: Sequence[Message] = ()
        good = self._good.get(f"{method.containing_service.name}.{method.name}")
        if good is not None and kind < 0.65:
            made = good(pick)
            if kind < 0.45:
                for message in made:
                    self._spoil(message)
        else:
            made = [self._message(method.input_type)]
        found = [message.SerializeToString() for message in made]
        return [self._damage(data) for data in found] if pick.random() < 0.15 else found

    def _message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        message: Message = message_factory.GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if self._random.random() < 0.7:
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        message.ClearField(field.name)
        count = self._random.choice((0, 1, 1, 2, _MOST_REPEATED)) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return  # only responses contain it
        if field.message_type is not None:
            if depth >= _DEEPEST:
                return
            for _ in range(count):
                part = self._message(field.message_type, depth + 1)
                (getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)).CopyFrom(
                    part
                )
            return
        values = [self._value(field) for _ in range(count)]
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, values[0])

    def _value(self, field: FieldDescriptor) -> Any:
        pick = self._random
        # Fields of one name may have different types, such as `token_ids`: packed bytes, or repeated numbers.
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        hints = [hint for hint in self._hints.get(field.name, ()) if isinstance(hint, bytes) == is_bytes]
        if hints and pick.random() < 0.6:
            return pick.choice(hints)
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return pick.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT:
                return struct.unpack("<f", struct.pack("<f", pick.choice((*_FLOATS, pick.uniform(-3, 3)))))[0]
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return pick.choice((*_FLOATS, pick.uniform(-3, 3)))
            case FieldDescriptor.CPPTYPE_ENUM:
                return pick.choice((0, 1, 2, 3, 99, -1))
            case FieldDescriptor.CPPTYPE_STRING:
                return self._bytes() if field.type == FieldDescriptor.TYPE_BYTES else pick.choice(_TEXTS)
        low, high = _RANGES[field.cpp_type]
        return min(max(pick.choice((*_INTEGERS, pick.getrandbits(40))), low), high)

    def _bytes(self) -> bytes:
        pick = self._random
        count = pick.choice((0, 1, 4, 16, 32, 33, 64, 4096) if pick.random() < 0.99 else (_LARGE_BYTES,))
        return pick.choice((bytes(count), b"\xff" * count, pick.randbytes(count)))

    def _spoil(self, message: Message) -> None:
        """Replace some fields of a message or of a submessage."""
        for _ in range(self._random.randrange(1, 3)):
            owner = message
            while self._random.random() < 0.6:
                inner = [part for field, value in owner.ListFields() for part in _parts(field, value)]
                if not inner:
                    break
                owner = self._random.choice(inner)
            if owner.DESCRIPTOR.fields:
                fields: Sequence[Any] = owner.DESCRIPTOR.fields
                self._fill(owner, self._random.choice(fields), 0)

    def _damage(self, data: bytes) -> bytes:
        """Truncate, change or extend bytes; one way appends a length prefix without data."""
        pick = self._random
        match pick.randrange(4):
            case 0:
                return data[: pick.randrange(len(data) + 1)]
            case 1 if data:
                at = pick.randrange(len(data))
                return data[:at] + bytes([data[at] ^ (1 << pick.randrange(8))]) + data[at + 1 :]
            case 2:
                huge = (
                    bytes([pick.randrange(1, 16) << 3 | 2])
                    + b"\xff\xff\xff\xff"
                    + pick.choice((b"\x07", b"\x0f", b"\x01"))
                )
                return data + huge
            case _:
                return data + pick.randbytes(pick.randrange(1, 9))


Good = Callable[[random.Random], Sequence[Message]]
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _parts(field: FieldDescriptor, value: Any) -> list[Message]:
    """Return the submessages in a field's value."""
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return []
    return list(value) if field.is_repeated else [value]
