"""Packs matrices as quantized checkpoints do, number by number, by the definition of each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output features that a word holds, from its lowest bits


class Packed(NamedTuple):
    """The tensors of a linear by the ending of their names, and the weight that they mean."""

    tensors: dict[str, Tensor]
    weight: Tensor  # [out, in] fp32


class Format(NamedTuple):
    """A packing, and the quantization_config of checkpoints that have it."""

    pack: Callable[[Tensor], Packed]
    settings: Mapping[str, Any]


def scaled(weight: Tensor, block: tuple[int, int], dtype: torch.dtype, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight's values of 8 bits, the scale of each block, and the weight that they mean."""
    rows, columns = weight.shape
    height, width = min(block[0], rows), min(block[1], columns)
    padded = functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(len(padded) // height, height, padded.shape[1] // width, width)
    scales = blocks.abs().amax((1, 3)) / most
    spread = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    values = weight / spread
    stored = (values if dtype.is_floating_point else values.round()).to(dtype)
    meant = stored.float() * spread
    return stored, scales, meant


def fp8(block: tuple[int, int], scale: str, shape: tuple[int, ...] | None = None) -> Callable[[Tensor], Packed]:
    """Packs as e4m3 with a scale a block, which may be a row or, with 10000 x 10000, the whole matrix."""

    def pack(weight: Tensor) -> Packed:
        stored, scales, meant = scaled(weight, block, torch.float8_e4m3fn, 448)
        return Packed({".weight": stored, scale: scales if shape is None else scales.view(shape)}, meant)

    return pack


def int8(block: tuple[int, int]) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        stored, scales, meant = scaled(weight, block, torch.int8, 127)
        return Packed({".weight": stored, ".weight_scale": scales}, meant)

    return pack


def int8_with_zeros(weight: Tensor) -> Packed:
    low, high = weight.min(1, keepdim=True).values, weight.max(1, keepdim=True).values
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().clamp(-128, 127)
    stored = (weight / scale + zero).round().clamp(-128, 127)
    tensors = {".weight": stored.to(torch.int8), ".weight_scale": scale, ".weight_zero_point": zero.to(torch.int8)}
    return Packed(tensors, (stored - zero) * scale)


def integers(weight: Tensor, bits: int, groups: Sequence[int], *, zeros: bool) -> tuple[Any, Any, Tensor, Tensor]:
    """Returns a weight's integers and, for each group of columns, zeros and scales; and the weight that they mean."""
    most = (1 << bits) - 1
    values, count = weight.double().numpy(), max(groups) + 1
    stored = np.zeros(values.shape, np.int64)
    all_zeros, scales = np.full((len(values), count), 1 << (bits - 1)), np.zeros((len(values), count), np.float16)
    for group in range(count):
        mine = np.asarray(groups) == group
        part = values[:, mine]
        if zeros:
            scales[:, group] = (part.max(1) - part.min(1)) / most
            # Stored less 1 in the first version of GPTQ, so that 0 becomes the largest value.
            all_zeros[:, group] = np.clip(np.round(-part.min(1) / scales[:, group]), 0, most)
        else:
            scales[:, group] = 2 * abs(part).max(1) / most
        scaled_part = np.round(part / scales[:, group, None]) + all_zeros[:, group, None]
        stored[:, mine] = np.clip(scaled_part, 0, most)
    spread = scales.astype(np.float32)[:, groups]
    meant = (stored - all_zeros[:, groups]).astype(np.float32) * spread
    return stored, all_zeros, torch.from_numpy(scales), torch.from_numpy(meant)


def words(values: Any, bits: int, axis: int, order: Sequence[int] | None = None) -> Tensor:
    """Packs integers along an axis into int32, the first one in the lowest bits."""
    per_word = 32 // bits
    values = np.moveaxis(np.asarray(values), axis, -1).astype(np.uint32)
    count = values.shape[-1] // per_word
    fields = values[..., : count * per_word].reshape(*values.shape[:-1], count, per_word)
    places = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    packed = np.bitwise_or.reduce(fields[..., list(order or range(per_word))] << places, axis=-1)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def gptq(bits: int, group: int, *, zeros: bool, ordered: bool, version: int) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        columns = weight.shape[1]
        size = group if group > 0 else columns
        groups = np.arange(columns) // size
        if ordered:
            groups = groups[np.random.default_rng(columns + len(weight)).permutation(columns)]
        stored, all_zeros, scales, meant = integers(weight, bits, groups.tolist(), zeros=zeros)
        less = all_zeros if version == 2 else (all_zeros - 1) % (1 << bits)
        tensors = {
            ".qweight": words(stored.T, bits, 0),
            ".qzeros": words(less.T, bits, 1),
            ".scales": scales.T.contiguous(),
            ".g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return Packed(tensors, meant)

    return pack


def awq(group: int) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        groups = (np.arange(weight.shape[1]) // group).tolist()
        stored, all_zeros, scales, meant = integers(weight, 4, groups, zeros=True)
        tensors = {
            ".qweight": words(stored.T, 4, 1, AWQ_ORDER),
            ".qzeros": words(all_zeros.T, 4, 1, AWQ_ORDER),
            ".scales": scales.T.contiguous(),
        }
        return Packed(tensors, meant)

    return pack


def packed_integers(bits: int, group: int, *, zeros: bool, ordered: bool = False) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        columns = weight.shape[1]
        groups = np.arange(columns) // (group or columns)
        if ordered:
            groups = groups[np.random.default_rng(len(weight)).permutation(columns)]
        stored, all_zeros, scales, meant = integers(weight, bits, groups.tolist(), zeros=zeros)
        tensors = {
            ".weight_packed": words(stored, bits, 1),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            tensors[".weight_zero_point"] = words(all_zeros, bits, 0)
        if ordered:
            tensors[".weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return Packed(tensors, meant)

    return pack


def halves(values: Any) -> tuple[Tensor, Any]:
    """Returns the nearest e2m1 numbers, two a byte and the first one in the low half, and their values."""
    codes = np.abs(np.asarray(values)[..., None] - E2M1).argmin(-1)
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)), E2M1[codes]


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the bytes, the exponents, and the weight that they mean."""
    grouped = weight.numpy().reshape(*weight.shape[:-1], -1, 32)
    exponents = np.ceil(np.log2(np.abs(grouped).max(-1) / 6)).astype(np.int64)
    powers = np.exp2(exponents.astype(np.float32))[..., None]
    packed, values = halves(grouped / powers)
    meant = torch.from_numpy((values * powers).astype(np.float32)).view(weight.shape)
    return packed, torch.from_numpy((exponents + 127).astype(np.uint8)), meant


def packed_mxfp4(weight: Tensor) -> Packed:
    packed, exponents, meant = mxfp4(weight)
    return Packed({".weight_packed": packed.flatten(1), ".weight_scale": exponents}, meant)


def nvfp4(weight_ending: str, global_ending: str, *, divides: bool) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        grouped = weight.numpy().reshape(len(weight), -1, 16)
        most = np.abs(grouped).max(-1)
        whole = np.float32(most.max() / (6 * 448))
        scales = torch.from_numpy(most / 6 / whole).to(torch.float8_e4m3fn)
        # As a reader computes it: a group's scale in fp32 first.
        each = scales.float().numpy() / (np.float32(1) / whole) if divides else scales.float().numpy() * whole
        packed, values = halves(grouped / each[..., None])
        meant = torch.from_numpy((values * each[..., None]).astype(np.float32)).view(weight.shape)
        stored = np.float32(1) / whole if divides else whole
        tensors = {weight_ending: packed.flatten(1), ".weight_scale": scales, global_ending: torch.tensor([stored])}
        return Packed(tensors, meant)

    return pack
