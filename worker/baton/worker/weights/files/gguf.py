"""The tensors of a GGUF file, in the names and the order of rows that Hugging Face has. Reading dequantizes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from baton.model_folder.gguf.architectures import GgufArchitecture, architecture_of
from baton.model_folder.gguf.header import GgufHeader, GgufTensor, read_header
from baton.model_folder.gguf.metadata import Metadata
from baton.model_folder.gguf.rope import CONSTANTS
from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.weights.checkpoint import WrongTensor
from baton.worker.weights.files.safetensors_file import TensorEntry
from baton.worker.weights.files.shapes import without_ones
from baton.worker.weights.layouts import pairs_of_halves
from baton.worker.weights.stream.pieces import Coding, Place

_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The weights of one file, or of all parts of a split one, which are open within a `with` statement."""

    def __init__(self, path: Path) -> None:
        self.source = path
        header = read_header(path)
        self._architecture = architecture_of(header)
        self._heads = _head_counts(Metadata(header.metadata, path), self._architecture)
        self._tensors: dict[str, GgufTensor] = {}
        self._entries: dict[str, TensorEntry] = {}
        for name, tensor, entry in _entries(header, self._architecture):
            self._tensors[name] = tensor
            self._entries[name] = entry
        self._open = ExitStack()
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Self:
        for path in sorted({tensor.path for tensor in self._tensors.values()}):
            self._files[path] = self._open.enter_context(path.open("rb"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open.close()

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def name_in_file(self, name: str) -> str:
        """Returns the file's name of a tensor, whether it is there or not."""
        return self._architecture.file_name(name)

    def entry(self, name: str) -> TensorEntry:
        """Returns the type, shape and position of a tensor."""
        return self._entries[name]

    def has_floats(self, name: str) -> bool:
        """Returns True: other types are refused when the header is read."""
        return True

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        """Returns where the named tensor lies. Raises WrongTensor if it is missing or has another shape."""
        entry = self._entries.get(name)
        if entry is None:
            raise WrongTensor(
                f"{self.source} does not hold the tensor {self.name_in_file(name)} {list(shape)}", field="model"
            )
        found = self._tensors[name]
        if without_ones(entry.shape) != without_ones(shape):
            raise WrongTensor(
                f"{found.path}: {found.name} has shape {list(entry.shape)}; by the metadata it must be {list(shape)}",
                field="model",
            )
        return Place(found.path, entry.start, self._coding(name))

    def _coding(self, name: str) -> Coding:
        coding = _coding(self._tensors[name].type_number)
        offset = self._architecture.norm_offset
        return _less(coding, offset) if offset and name.endswith("norm.weight") else coding

    def in_file_order(self, name: str, into: Tensor) -> Tensor:
        """Returns a view with the rows of rotated neighbours next to each other, if the file has them so."""
        heads = self._heads.get(self._tensors[name].name.split(".")[-2])
        return into if heads is None else pairs_of_halves(into, heads)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the named tensor, read now. Raises as `place`."""
        coding = self.place(name, shape).coding
        data = torch.frombuffer(bytearray(self.sample(name, 0, self._entries[name].num_bytes)), dtype=torch.uint8)
        values = data.view(coding.dtype) if coding.decode is None else coding.decode(data)
        into = torch.empty(shape, dtype=coding.dtype)
        ordered = self.in_file_order(name, into)
        ordered.copy_(values.view(ordered.shape))
        return into

    def sample(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns some bytes of a tensor."""
        entry = self._entries[name]
        file = self._files[self._tensors[name].path]
        file.seek(entry.start + offset)
        return file.read(min(num_bytes, entry.num_bytes - offset))


def block_types(path: Path) -> dict[str, str]:
    """Returns the types of a file's matrices by their names in Hugging Face form, without ".weight"."""
    header = read_header(path)
    kinds, architecture = _kinds(), architecture_of(header)
    named = ((architecture.hugging_face_name(one.name), kinds.get(one.type_number)) for one in header.tensors.values())
    return {name.removesuffix(".weight"): kind.name for name, kind in named if name and kind is not None}


def _entries(header: GgufHeader, architecture: GgufArchitecture) -> Iterator[tuple[str, GgufTensor, TensorEntry]]:
    """Yields the name in Hugging Face form, the file's tensor, and the place of each tensor; of experts, each alone."""
    for tensor in header.tensors.values():
        if tensor.name in CONSTANTS:
            continue
        name, entry = architecture.hugging_face_name(tensor.name) or tensor.name, _entry(tensor)
        if "{}" not in name:
            yield name, tensor, entry
            continue
        count, *shape = tensor.shape
        size = entry.num_bytes // count
        for expert in range(count):
            one = TensorEntry(entry.dtype, tuple(shape), entry.start + expert * size, size)
            yield name.format(expert), tensor, one


def _less(coding: Coding, offset: float) -> Coding:
    """Returns the coding of values that the file holds with an offset."""
    plain = coding.decode is None

    def decode(data: Tensor) -> Tensor:
        values = data.view(coding.dtype) if coding.decode is None else coding.decode(data)
        return values.float() - offset

    return Coding(torch.float32, coding.block_values, coding.dtype.itemsize if plain else coding.block_bytes, decode)


def _head_counts(metadata: Metadata, architecture: GgufArchitecture) -> dict[str, int]:
    """Returns the numbers of heads of tensors whose rows are reordered."""
    if not architecture.swaps_pairs:
        return {}
    key = f"{architecture.name}.attention.head_count"
    heads = metadata.count(key)
    return {"attn_q": heads, "attn_k": metadata.count(f"{key}_kv", default=heads)}


def _entry(tensor: GgufTensor) -> TensorEntry:
    kind = _kinds().get(tensor.type_number)
    if kind is None or not _can_be_read(tensor.type_number):
        readable = ", ".join(each.name for number, each in _kinds().items() if _can_be_read(number))
        raise Unsupported(
            f"{tensor.path}: {tensor.name} has the quantization type {kind.name if kind else tensor.type_number};"
            f" it must be one of {readable}",
            field="model",
        )
    entry = TensorEntry(kind.name, tensor.shape, tensor.start, _num_bytes(tensor, kind.name))
    size = tensor.path.stat().st_size
    if entry.start + entry.num_bytes > size:
        raise InvalidRequest(
            f"{tensor.path} is truncated: {size} bytes, its header describes {entry.start + entry.num_bytes};"
            " download or copy it again",
            field="model",
        )
    return entry


def _num_bytes(tensor: GgufTensor, kind: str) -> int:
    coding = _coding(tensor.type_number)
    if not tensor.shape or tensor.shape[-1] % coding.block_values:
        raise InvalidRequest(
            f"{tensor.path}: {tensor.name} has rows of {tensor.shape[-1] if tensor.shape else 0} values;"
            f" {kind} has blocks of {coding.block_values}",
            field="model",
        )
    return coding.num_bytes(math.prod(tensor.shape))


def _kinds() -> Mapping[int, Any]:
    """Returns the library's types by their numbers."""
    try:
        from gguf import GGMLQuantizationType
    except ImportError:
        raise Unsupported(
            "GGUF files need the package gguf: pip install 'baton-inference[gguf]'", field="model"
        ) from None
    return {int(kind): kind for kind in GGMLQuantizationType}


@cache
def _coding(number: int) -> Coding:
    """Returns how a file holds values of this type."""
    from gguf import GGML_QUANT_SIZES

    kind = _kinds()[number]
    if dtype := _PLAIN.get(kind.name):
        return Coding(dtype)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    return Coding(torch.float32, block_values, block_bytes, _decoder(kind, block_bytes))


def _decoder(kind: Any, block_bytes: int) -> Callable[[Tensor], Tensor]:
    return partial(_dequantized, kind=kind, block_bytes=block_bytes)


def _dequantized(data: Tensor, kind: Any, block_bytes: int) -> Tensor:
    from gguf import quants

    blocks = quants.dequantize(data.numpy().reshape(-1, block_bytes), kind)
    return torch.from_numpy(np.ascontiguousarray(blocks)).flatten()


@cache
def _can_be_read(number: int) -> bool:
    """Returns whether the library dequantizes the type: tries it with one block."""
    coding = _coding(number)
    if coding.decode is None:
        return True
    try:
        coding.decode(torch.zeros(coding.block_bytes, dtype=torch.uint8))
    except NotImplementedError:
        return False
    return True
