"""Cleans the strings of a message from another process; `fourfold.rpc.channel` passes every response through here."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fourfold.text import clean


def scrub(message: Message) -> None:
    """Replace every string in `message` by its clean form, in messages inside of it, too. Keys of maps stay."""
    if not _holds_text(message.DESCRIPTOR):
        return
    for field, value in message.ListFields():
        inner = field.message_type
        if field.type == FieldDescriptor.TYPE_STRING:
            _scrub_strings(message, field.name, value)
        elif isinstance(value, Message):
            scrub(value)
        elif inner is not None and inner.GetOptions().map_entry:
            _scrub_values(value, inner.fields_by_name["value"])
        elif inner is not None:
            for part in value:
                scrub(part)


def _scrub_strings(message: Message, name: str, value: Any) -> None:
    if isinstance(value, str):
        if (fresh := clean(value)) is not value:
            setattr(message, name, fresh)
        return
    for index, text in enumerate(value):
        if (fresh := clean(text)) is not text:
            value[index] = fresh


def _scrub_values(entries: Any, field: FieldDescriptor) -> None:
    if field.type == FieldDescriptor.TYPE_STRING:
        for key in list(entries):
            entries[key] = clean(entries[key])
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        for key in list(entries):
            scrub(entries[key])


_known: dict[str, bool] = {}


def _holds_text(descriptor: Any) -> bool:
    """Whether messages of a type can hold strings: those with tokens alone are many, and need no search."""
    name = descriptor.full_name
    if name not in _known:
        _known[name] = False  # for a type that holds itself
        _known[name] = any(
            field.type == FieldDescriptor.TYPE_STRING
            or (field.type == FieldDescriptor.TYPE_MESSAGE and _holds_text(field.message_type))
            for field in descriptor.fields
        )
    return _known[name]
