"""The header of a GGUF file: its metadata, and where its tensors lie. Reads no tensor."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # where the metadata states none
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

# Value types of the metadata by their numbers: the format of one value.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The type, shape and place of one tensor."""

    name: str
    shape: tuple[int, ...]  # outermost first, unlike in the file
    type_number: int  # of GGMLQuantizationType
    path: Path
    start: int  # byte offset in the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata, and the tensors of all parts by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Returns whether the path names a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a model that is split like name-00001-of-00003.gguf; else the one file."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    name, count = match[1], int(match[3])
    return [path.with_name(f"{name}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


def read_header(path: Path) -> GgufHeader:
    """Reads the headers of all parts. Raises InvalidRequest that says what is wrong with which file."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for part in parts_of(path):
        part_metadata, part_tensors = _read_part(part)
        metadata = {**part_metadata, **metadata}
        tensors.update((tensor.name, tensor) for tensor in part_tensors)
    return GgufHeader(path, metadata, tensors)


def _read_part(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    with _mapped(path) as data:
        if data[:4] != _MAGIC:
            raise InvalidRequest(f"{path} is not a GGUF file: it does not begin with GGUF", field="model")
        cursor = _Cursor(data, 4)
        try:
            return _read(cursor, path)
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise InvalidRequest(
                f"{path} has a broken GGUF header at byte {cursor.at} of {len(data)}: {error};"
                " download or copy it again",
                field="model",
            ) from error


def _read(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise InvalidRequest(f"{path} has GGUF version {version}; it must be 2 or 3", field="model")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = [_read_tensor(cursor, path) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise InvalidRequest(
            f"{path}: general.alignment is {alignment!r}; it must be a positive integer", field="model"
        )
    data_start = -(-cursor.at // alignment) * alignment
    return metadata, [GgufTensor(one.name, one.shape, one.type_number, path, data_start + one.start) for one in tensors]


def _read_tensor(cursor: _Cursor, path: Path) -> GgufTensor:
    """Reads a tensor's description. Its start is within the data."""
    name = cursor.text()
    num_dims = cursor.scalar("I")
    if num_dims > _MAX_DIMS:
        raise InvalidRequest(
            f"{path}: {name} has {num_dims} dimensions; at most {_MAX_DIMS} are allowed", field="model"
        )
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    return GgufTensor(name, shape, cursor.scalar("I"), path, cursor.scalar("Q"))


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except FileNotFoundError:
        raise InvalidRequest(f"{path} is missing", field="model") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise InvalidRequest(f"{path} cannot be read: {error}", field="model") from error


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at

    def scalar(self, kind: str) -> Any:
        """Reads one number or flag."""
        return self._unpack(kind)[0]

    def text(self) -> str:
        size = self.scalar("Q")
        return self._bytes(size).decode()

    def value(self, type_number: int) -> Any:
        """Reads a value of any type; arrays become lists."""
        if type_number in _SCALARS:
            return self.scalar(_SCALARS[type_number])
        if type_number == _STRING:
            return self.text()
        if type_number != _ARRAY:
            raise IndexError(f"a value has the unknown type {type_number}")
        element, count = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            return list(self._unpack(f"{self._checked(count)}{_SCALARS[element]}"))
        if element == _ARRAY:
            raise IndexError("an array holds arrays")
        return [self.value(element) for _ in range(count)]

    def _unpack(self, kind: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + kind)
        values = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return values

    def _bytes(self, size: int) -> bytes:
        start, self.at = self.at, self.at + self._checked(size)
        return self._data[start : self.at]

    def _checked(self, size: int) -> int:
        """Returns a size that the rest of the file can hold."""
        left = len(self._data) - self.at
        if size > left:
            raise IndexError(f"{size} items are stated and {left} bytes are left")
        return size
