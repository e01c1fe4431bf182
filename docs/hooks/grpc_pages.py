"""The pages of gRPC services and messages, from the .proto files and their comments."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from markdown_text import GENERATED_NOTE, cell, code, table

_PUBLIC = ("inference", "response", "conversation", "vectors", "types")
_INTERNAL = ("router", "worker", "kv", "index", "control")
_Field = pb.FieldDescriptorProto
# Numbers of descriptor.proto, of which paths of comments are made.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_METHOD, _VALUE, _FIELD, _NESTED_MESSAGE, _NESTED_ENUM = 2, 2, 2, 3, 4

Path_ = tuple[int, ...]


def public_page(root: Path) -> str:
    """Returns the API that clients call."""
    head = (
        "# gRPC API\n\nThe gateway serves `InferenceService`. The other files hold its messages. "
        f"[REST and gRPC](contracts.md#rest-and-grpc) compares the fields. {GENERATED_NOTE}"
    )
    return "\n".join([head, *_files(root, _PUBLIC)])


def internal_page(root: Path) -> str:
    """Returns what services and operators call."""
    head = (
        "# gRPC between services\n\nServices and operators call these. "
        f"[The contracts](contracts.md) has the rules that they follow. {GENERATED_NOTE}"
    )
    return "\n".join([head, *_files(root, _INTERNAL)])


def _files(root: Path, names: Sequence[str]) -> Iterator[str]:
    files = {file.name: file for file in _descriptors(root).file}
    for name in names:
        yield from _File(files[f"baton/v1/{name}.proto"]).lines()


def _descriptors(root: Path) -> pb.FileDescriptorSet:
    """Returns the contracts with their comments, as Buf reads them."""
    program = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if program is None:
        raise FileNotFoundError("buf is not installed; make docs installs it")
    done = subprocess.run(
        [program, "build", "--path", "proto/baton/v1", "-o", "-"], cwd=root, capture_output=True, check=True
    )
    return pb.FileDescriptorSet.FromString(done.stdout)


class _File:
    """One .proto file."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self._file = file
        locations = file.source_code_info.location
        self._comments = {tuple(one.path): one.leading_comments + one.trailing_comments for one in locations}

    def lines(self) -> Iterator[str]:
        yield f"\n## {self._file.name.removeprefix('baton/v1/')}\n"
        for number, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICE, number))
        for number, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGE, number), "")
        for number, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUM, number), "")

    def _comment(self, path: Path_) -> str:
        return cell(re.sub(r"buf:lint:ignore \w+", "", self._comments.get(path, "")))

    def _service(self, service: pb.ServiceDescriptorProto, path: Path_) -> Iterator[str]:
        yield f"### {service.name}\n\n{self._comment(path)}\n"
        rows = []
        for number, method in enumerate(service.method):
            asked = f"{'stream ' if method.client_streaming else ''}{_short(method.input_type)}"
            answered = f"{'stream ' if method.server_streaming else ''}{_short(method.output_type)}"
            rows.append((code(method.name), code(asked), code(answered), self._comment((*path, _METHOD, number))))
        yield table(("method", "request", "response", "what it does"), rows)

    def _message(self, message: pb.DescriptorProto, path: Path_, outer: str) -> Iterator[str]:
        name = f"{outer}{message.name}"
        yield f"### {name}\n\n{self._comment(path)}\n"
        maps = {one.name: one for one in message.nested_type if one.options.map_entry}
        rows = [
            (code(field.name), cell(_type(field, message, maps)), self._comment((*path, _FIELD, number)))
            for number, field in enumerate(message.field)
        ]
        if rows:
            yield table(("field", "type", "meaning"), rows)
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, _NESTED_MESSAGE, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _NESTED_ENUM, number), f"{name}.")

    def _enum(self, enum: pb.EnumDescriptorProto, path: Path_, outer: str) -> Iterator[str]:
        yield f"### {outer}{enum.name}\n\n{self._comment(path)}\n"
        rows = [(code(one.name), self._comment((*path, _VALUE, number))) for number, one in enumerate(enum.value)]
        yield table(("value", "meaning"), rows)


def _type(field: _Field, message: pb.DescriptorProto, maps: dict[str, pb.DescriptorProto]) -> str:
    kind = _short(field.type_name) if field.type_name else _Field.Type.Name(field.type).removeprefix("TYPE_").lower()
    if entry := maps.get(kind.rpartition(".")[2]):
        key, value = (_type(one, entry, {}) for one in entry.field)
        return f"map of {key} to {value}"
    if field.label == _Field.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of {message.oneof_decl[field.oneof_index].name}"
    return kind


def _short(name: str) -> str:
    return name.removeprefix(".baton.v1.").removeprefix(".")
