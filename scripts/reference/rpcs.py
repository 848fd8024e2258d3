"""The page of the RPCs: every service, message and enum of proto/, with the comments of the .proto files."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from fourfold.contract import CONTRACT_VERSION
from scripts.reference.page import cell, escape, page, table

_PROTO: Final = Path(__file__).resolve().parents[2] / "proto"
_PACKAGE: Final = "fourfold."
# Numbers of fields in descriptor.proto, of which the paths of comments consist.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _ONEOFS = 2, 3, 4, 8
_METHODS = _VALUES = 2
_INTRODUCTION: Final = f"""\
The contract of the services, version {CONTRACT_VERSION}: from `proto/`, with the comments of the `.proto` files.
`fourfold proto FOLDER` writes these files. [Contract](../contract.md) has what all RPCs share: who may call what,
deadlines, which calls may be repeated, errors as statuses, limits, arrays of tokens, and the names of the [Python
methods](../clients/index.md).

Within a major version fields, RPCs and values of enums are only added. A field that a peer does not send has its
default, and one that a peer does not know is ignored; the comment of every field says what its default means."""

Path_ = tuple[int, ...]


class _File:
    """A .proto file with its comments."""

    def __init__(self, descriptor: FileDescriptorProto) -> None:
        self.descriptor = descriptor
        self.short = descriptor.package.removeprefix(_PACKAGE).rpartition(".")[0]  # "rollout"
        self._comments: Mapping[Path_, str] = {
            tuple(location.path): location.leading_comments or location.trailing_comments
            for location in descriptor.source_code_info.location
        }

    def comment(self, *path: int) -> str:
        """Return the comment of an element, in paragraphs of one line."""
        text = self._comments.get(path, "")
        return "\n\n".join(" ".join(part.split()) for part in text.split("\n \n"))


def rpcs_page() -> str:
    """Return docs/reference/rpcs.md."""
    blocks = []
    # Files without services, whose messages the others share, come last.
    found = sorted(map(_File, files()), key=lambda file: not file.descriptor.service)
    for file in found:
        if not file.descriptor.service:
            blocks.append(f"## {file.descriptor.name}")
        blocks += [_service(file, index, service) for index, service in enumerate(file.descriptor.service)]
        for index, message in enumerate(file.descriptor.message_type):
            blocks += _message(file, message, message.name, (_MESSAGES, index))
        blocks += [
            _enum(file, enum, enum.name, (_ENUMS, index)) for index, enum in enumerate(file.descriptor.enum_type)
        ]
    names = [f"{file.short}.{service.name}" for file in found for service in file.descriptor.service]
    links = "Services: " + ", ".join(f"[{name}](#{_anchor(name)})" for name in names) + "."
    return page("RPCs", "proto", _INTRODUCTION, links, *blocks)


def files() -> Sequence[FileDescriptorProto]:
    """Return Fourfold's .proto files with their comments, which the committed descriptor set does not have."""
    names = sorted(str(path.relative_to(_PROTO)) for path in _PROTO.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{_PROTO}", f"--descriptor_set_out={out}"]
        subprocess.run([*command, "--include_source_info", *names], check=True, timeout=60)
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def _service(file: _File, index: int, service: ServiceDescriptorProto) -> str:
    rows = [
        [
            f"`{method.name}`",
            f"{_stream(method.client_streaming)}{_link(method.input_type)}",
            f"{_stream(method.server_streaming)}{_link(method.output_type)}",
            cell(file.comment(_SERVICES, index, _METHODS, number)),
        ]
        for number, method in enumerate(service.method)
    ]
    head = f"## {file.short}.{service.name}"
    comment = escape(file.comment(_SERVICES, index))
    source = f"`proto/{file.descriptor.name}`"
    return f"{head}\n\n{comment}\n\n{source}\n\n{table(['RPC', 'request', 'response', 'meaning and errors'], rows)}"


def _message(file: _File, message: DescriptorProto, name: str, path: Path_) -> Iterator[str]:
    rows = [
        [
            str(entry.number),
            f"`{entry.name}`",
            _type(entry, message),
            cell(_field_comment(file, entry, message, path, number)),
        ]
        for number, entry in enumerate(message.field)
    ]
    gone = ", ".join(str(part.start) for part in message.reserved_range)
    blocks = [
        f"### {file.short}.{name}",
        escape(file.comment(*path)),
        table(["number", "field", "type", "meaning"], rows),
        f"Reserved numbers: {gone}." if gone else "",
    ]
    yield "\n\n".join(block for block in blocks if block)
    for index, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from _message(file, inner, f"{name}.{inner.name}", (*path, _NESTED, index))
    for index, enum in enumerate(message.enum_type):
        yield _enum(file, enum, f"{name}.{enum.name}", (*path, _NESTED_ENUMS, index))


def _enum(file: _File, enum: EnumDescriptorProto, name: str, path: Path_) -> str:
    rows = [
        [str(value.number), f"`{value.name}`", cell(file.comment(*path, _VALUES, index))]
        for index, value in enumerate(enum.value)
    ]
    comment = escape(file.comment(*path))
    return f"### {file.short}.{name}\n\n{comment}\n\n{table(['number', 'value', 'meaning'], rows)}"


def _field_comment(file: _File, entry: FieldDescriptorProto, message: DescriptorProto, path: Path_, number: int) -> str:
    """Return the comment of a field; the first field of a oneof has that of the oneof before it."""
    own = file.comment(*path, _FIELDS, number)
    if not entry.HasField("oneof_index") or entry.proto3_optional:
        return own
    first = next(index for index, other in enumerate(message.field) if _same_oneof(other, entry))
    if number != first:
        return own
    return f"Of `{message.oneof_decl[entry.oneof_index].name}`: {file.comment(*path, _ONEOFS, entry.oneof_index)} {own}"


def _same_oneof(other: FieldDescriptorProto, entry: FieldDescriptorProto) -> bool:
    return other.HasField("oneof_index") and other.oneof_index == entry.oneof_index


def _type(entry: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Return the type of a field: optional, repeated, map<>, one of a oneof; messages and enums are links."""
    if entry.type_name:
        pairs = {f".{inner.name}": inner for inner in message.nested_type if inner.options.map_entry}
        inner = next((inner for end, inner in pairs.items() if entry.type_name.endswith(end)), None)
        if inner is not None:
            return f"map of {_type(inner.field[0], message)} to {_type(inner.field[1], message)}"
        text = _link(entry.type_name)
    else:
        text = FieldDescriptorProto.Type.Name(entry.type).removeprefix("TYPE_").lower()
    if entry.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    if entry.proto3_optional:
        return f"optional {text}"
    return f"oneof `{message.oneof_decl[entry.oneof_index].name}`: {text}" if entry.HasField("oneof_index") else text


def _stream(streams: bool) -> str:
    return "stream of " if streams else ""


def _link(type_name: str) -> str:
    """Return the name of a message or enum, as a link if it is Fourfold's."""
    name = type_name.lstrip(".")
    if not name.startswith(_PACKAGE):
        return f"`{name}`"
    package, _, rest = name.removeprefix(_PACKAGE).partition(".v1.")
    short = f"{package}.{rest}"
    return f"[{short}](#{_anchor(short)})"


def _anchor(heading: str) -> str:
    return heading.replace(".", "").lower()
