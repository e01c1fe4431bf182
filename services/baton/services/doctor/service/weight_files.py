"""The files of a model's weights: their values, and what is wrong with them. Reads their headers alone."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from baton.model_folder.gguf.header import GgufTensor, parts_of, read_header
from baton.rpc.errors import ServiceError

_INDICES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")
_MAX_HEADER_BYTES = 100 << 20
_NO_SAFETENSORS = "no safetensors file, perhaps a Git LFS pointer"
_GGUF_PACKAGE = "GGUF files need the package gguf: pip install 'baton-inference[gguf]'"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one model."""

    num_bytes: int = 0
    num_values: int = 0
    missing: tuple[str, ...] = ()  # files that an index or another part names
    broken: tuple[str, ...] = ()  # truncated files, or not of their format
    package: str = ""  # what is to be installed to read them


def safetensors_of(folder: Path) -> WeightFiles:
    """Returns the safetensors files of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return WeightFiles(
        num_bytes=sum(path.stat().st_size for path in files),
        num_values=sum(map(num_values_of, files)),
        missing=tuple(_missing(folder)),
        broken=tuple(f"{path.name} ({why})" for path in files if (why := why_broken(path))),
    )


def gguf_of(path: Path) -> WeightFiles:
    """Returns a GGUF file, and the other parts of a split one."""
    parts = parts_of(path)
    missing = tuple(part.name for part in parts if not part.is_file())
    num_bytes = sum(part.stat().st_size for part in parts if part.is_file())
    if missing:
        return WeightFiles(num_bytes, missing=missing)
    try:
        tensors = read_header(parts[0]).tensors.values()
    except ServiceError as error:
        return WeightFiles(num_bytes, broken=(error.message,))
    num_values = sum(math.prod(one.shape) for one in tensors)
    if find_spec("gguf") is None:
        return WeightFiles(num_bytes, num_values, package=_GGUF_PACKAGE)
    broken = tuple(dict.fromkeys(why for one in tensors if (why := _why_broken_gguf(one))))
    return WeightFiles(num_bytes, num_values, broken=broken)


def _why_broken_gguf(tensor: GgufTensor) -> str:
    """Returns the problem of a tensor: an unknown type, or an end beyond that of the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.type_number not in {int(kind) for kind in GGMLQuantizationType}:
        return f"{tensor.path.name}: {tensor.name} has the unknown quantization type {tensor.type_number}"
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_number)]
    end = tensor.start + math.prod(tensor.shape) // block_values * block_bytes
    return f"{tensor.path.name} is truncated" if end > tensor.path.stat().st_size else ""


def why_broken(path: Path) -> str:
    """Returns the problem of a safetensors file; empty if its size matches its header."""
    problem, header, data_start = _header_of(path)
    if problem:
        return problem
    try:
        end = max((one["data_offsets"][1] for one in header.values()), default=0)
        missing = data_start + end - path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (KeyError, TypeError, IndexError):
        return _NO_SAFETENSORS
    return f"{missing} bytes are missing" if missing > 0 else ""


def num_values_of(path: Path) -> int:
    """Returns the number of values in a safetensors file; 0 if it is broken."""
    _, header, _ = _header_of(path)
    try:
        return sum(math.prod(one["shape"]) for one in header.values())
    except (KeyError, TypeError):
        return 0


def json_of(path: Path) -> tuple[str, object]:
    """Returns the problem of a JSON file, or its content."""
    try:
        return "", json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}", None
    except (ValueError, RecursionError) as error:
        return f"{path} is no JSON: {error}", None


def _header_of(path: Path) -> tuple[str, dict[str, Any], int]:
    """Returns the problem of a file, or its tensors by name and where their bytes begin."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                return _NO_SAFETENSORS, {}, 0
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except OSError as error:
        return f"cannot be read: {error.strerror}", {}, 0
    except (ValueError, AttributeError, TypeError, RecursionError, struct.error):
        return _NO_SAFETENSORS, {}, 0
    return "", header, 8 + length


def _missing(folder: Path, indices: Sequence[str] = _INDICES) -> Iterator[str]:
    for index_name in indices:
        problem, index = json_of(folder / index_name)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if problem or not isinstance(names, dict):
            continue
        for name in sorted({str(name) for name in names.values()}):
            if not (folder / name).is_file():
                yield name
