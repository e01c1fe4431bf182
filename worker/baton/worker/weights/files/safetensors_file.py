"""A safetensors file. The header is checked before any tensor is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.rpc.errors import InvalidRequest

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What only weight formats read.
QUANTIZED_DTYPES: Mapping[str, torch.dtype] = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The type, shape and position of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    num_bytes: int


class SafetensorsFile:
    """A file that stays open until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise InvalidRequest(f"{path} is missing", field="model") from None
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="model") from error
        try:
            size = os.fstat(self._file.fileno()).st_size
            self.entries = _read_entries(path, self._file.read(_LENGTH_BYTES), self._file, size)
        except OSError as error:
            self._file.close()
            raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="model") from error
        except BaseException:
            self._file.close()
            raise

    def read(self, start: int, num_bytes: int) -> bytes:
        """Returns some bytes of the file. Raises InvalidRequest if it ends before."""
        data = bytearray()
        while len(data) < num_bytes:
            more = os.pread(self._file.fileno(), num_bytes - len(data), start + len(data))
            if not more:
                raise InvalidRequest(f"{self.path} ends at byte {start + len(data)}: it was changed", field="model")
            data += more
        return bytes(data)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()


def _read_entries(path: Path, length: bytes, file: Any, size: int) -> dict[str, TensorEntry]:
    num_header_bytes = int.from_bytes(length, "little")
    data_start = _LENGTH_BYTES + num_header_bytes
    if len(length) < _LENGTH_BYTES or num_header_bytes > _MAX_HEADER_BYTES or data_start > size:
        raise InvalidRequest(
            f"{path} is not a complete safetensors file: {size} bytes, header of {num_header_bytes} bytes",
            field="model",
        )
    try:
        header = json.loads(file.read(num_header_bytes))
        entries = {name: _entry(value, data_start) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path} has a broken safetensors header: {error!r}", field="model") from error
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=data_start)
    if end > size:
        raise InvalidRequest(
            f"{path} is truncated: {size} bytes, its header describes {end}; download or copy it again", field="model"
        )
    for name, entry in entries.items():
        dtype = DTYPES.get(entry.dtype) or QUANTIZED_DTYPES.get(entry.dtype)
        if dtype is not None and entry.num_bytes != math.prod(entry.shape) * dtype.itemsize:
            raise InvalidRequest(
                f"{path}: {name} has {entry.num_bytes} bytes; {entry.dtype} {list(entry.shape)} has"
                f" {math.prod(entry.shape) * dtype.itemsize}",
                field="model",
            )
    return entries


def _entry(value: Mapping[str, Any], data_start: int) -> TensorEntry:
    start, end = value["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"data_offsets {[start, end]}")
    shape = tuple(int(size) for size in value["shape"])
    return TensorEntry(str(value["dtype"]), shape, data_start + start, end - start)
