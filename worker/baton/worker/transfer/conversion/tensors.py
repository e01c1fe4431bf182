"""Conversions that need torch: between dtypes, and all on a device.

The effect of a change of dtype on a value; kv_scale is the layer's, for keys or for values (1 except for float8_e4m3):

    to float32       exact; from float8_e4m3 under a scale: value * scale, rounded once
    to bfloat16      to nearest: off by at most 2^-8 of the value; exact from float8_e4m3 whose scale is a power of 2
    to float16       to nearest: off by at most 2^-11 of the value, or 2^-25; beyond 65504 it becomes 65504
    to float8_e4m3   value / scale to nearest: off by at most 2^-4 of the value, or 2^-10 * scale; beyond
                     448 * scale it becomes that. Bit for bit what the receiver's own kernels store for the value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.kv_spec import KvGroup

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # integer dtypes that every op supports on every device
_LARGEST = {torch.float16: 65504.0, torch.float8_e4m3fn: 448.0}  # larger values become these


def as_words(values: Tensor) -> Tensor:
    """Returns the same bits as integers."""
    return values.view(_WORDS[values.element_size()])


def regroup(blocks: Tensor, skip_tokens: int, num_blocks: int, block_size: int) -> Tensor:
    """Regroups blocks as `blocks.regroup` does, on any device."""
    num_given, num_layers, parts, heads, size, dim = blocks.shape
    unit = math.gcd(size, block_size)
    at_sender, at_receiver = size // unit, block_size // unit
    units = blocks.reshape(num_given, num_layers, parts, heads, at_sender, unit, dim)
    units = units.permute(0, 4, 1, 2, 3, 5, 6).reshape(-1, num_layers, parts, heads, unit, dim)
    first, wanted = skip_tokens // unit, num_blocks * at_receiver
    units = units[first : first + wanted]
    if len(units) < wanted:
        units = torch.cat((units, units.new_zeros(wanted - len(units), *units.shape[1:])))
    grouped = units.reshape(num_blocks, at_receiver, num_layers, parts, heads, unit, dim).permute(0, 2, 3, 4, 1, 5, 6)
    return grouped.reshape(num_blocks, num_layers, parts, heads, block_size, dim).contiguous()


class Cast:
    """Converts the sender's dtype and scales to the receiver's. Layers are numbered within the group. Thread-safe.

    CPUs convert 8-bit floats one by one. On the host, the result of every 8-bit or 16-bit value is therefore computed
    once and looked up.
    """

    def __init__(self, sender: KvGroup, receiver: KvGroup) -> None:
        self._from, self._to = _DTYPES[sender.dtype], _DTYPES[receiver.dtype]
        self._from_scales, self._to_scales = _Scales(sender), _Scales(receiver)
        self._scaled = bool(sender.kv_scales or receiver.kv_scales)
        self._tables: dict[int, NDArray[Any]] = {}  # by layer: [2, every value]

    def on_host(self, words: NDArray[Any], layer: int) -> NDArray[Any]:
        """Converts values given as integers of their width: [blocks, layers, parts, heads, tokens, dim]."""
        if words.itemsize > 2:
            return self._on_host(words, layer)
        made = np.empty(words.shape, self._table(layer).dtype)
        for index in range(words.shape[1]):
            tables = self._table(layer + index)
            for part in range(words.shape[2]):
                made[:, index, part] = tables[part].take(words[:, index, part], mode="clip")
        return made

    def _table(self, layer: int) -> NDArray[Any]:
        layer = layer if self._scaled else 0
        table = self._tables.get(layer)
        if table is None:
            width = self._from.itemsize
            every = np.arange(1 << 8 * width, dtype=f"u{width}")
            both = np.broadcast_to(every, (2, len(every))).reshape(1, 1, 2, 1, 1, -1)
            table = self._tables[layer] = self._on_host(both, layer).reshape(2, -1)
        return table

    def _on_host(self, words: NDArray[Any], layer: int) -> NDArray[Any]:
        given = torch.from_numpy(words if words.flags.writeable else words.copy())
        made = self._cast(given.view(self._from), layer)
        numbers: NDArray[Any] = made.view(_WORDS[made.element_size()]).numpy()
        return numbers

    def on_device(self, words: Tensor, layer: int) -> Tensor:
        """Converts the same on any device. Returns contiguous values."""
        values = words.view(self._from)
        return values if self._from == self._to else self._cast(values, layer)

    def _cast(self, values: Tensor, layer: int) -> Tensor:
        num_layers = values.shape[1]
        wide = values.float()
        if (scales := self._from_scales.of(layer, num_layers, values.device)) is not None:
            wide = wide * scales
        if (scales := self._to_scales.of(layer, num_layers, values.device)) is not None:
            wide = wide / scales
        if (largest := _LARGEST.get(self._to)) is not None:
            wide = wide.clamp(-largest, largest)
        return wide.to(self._to)


class _Scales:
    """The scales of a group, on each device that needs them.

    They stay tensors of that device: torch divides by a host scalar by multiplying with its inverse.
    """

    def __init__(self, group: KvGroup) -> None:
        self._numbers = group.kv_scales
        self._on: dict[torch.device, Tensor] = {}

    def of(self, layer: int, num_layers: int, device: torch.device) -> Tensor | None:
        """Returns [num_layers, 2, 1, 1, 1] fp32. None: all are 1."""
        if not self._numbers:
            return None
        scales = self._on.get(device)
        if scales is None:
            scales = torch.tensor(self._numbers, dtype=torch.float32).view(-1, 2, 1, 1, 1).to(device)
            self._on[device] = scales
        return scales[layer : layer + num_layers]
