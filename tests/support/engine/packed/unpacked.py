"""Reads quantized matrices back by the definition of their formats, and bounds what rounding may have changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from support.engine.packed.weights import AWQ_ORDER, E2M1

Tensors = Mapping[str, torch.Tensor]  # of one linear, by the endings of their names


class Unpacked(NamedTuple):
    """A matrix, and how far each value may be from the one that was rounded."""

    weight: np.ndarray  # fp32
    bound: np.ndarray


def _integers(words: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """The integers of words along the last axis, by shifts of the unsigned words."""
    places = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    each = words.contiguous().numpy().view(np.uint32)[..., None] >> places & np.uint32((1 << bits) - 1)
    if order:
        each = each[..., np.argsort(order)]
    return each.reshape(*words.shape[:-1], -1).astype(np.int64)


def _spread(values: np.ndarray, columns: int) -> np.ndarray:
    return np.repeat(values, columns // values.shape[1], axis=1)


def _in_groups(stored: np.ndarray, zero: np.ndarray | int, scale: torch.Tensor, bits: int) -> Unpacked:
    columns = stored.shape[1]
    spread = _spread(scale.float().numpy(), columns)
    zeros = zero if isinstance(zero, int) else _spread(zero, columns)
    steps = 0.5 + 2**bits * torch.finfo(scale.dtype).eps / 2  # the scale was rounded too
    return Unpacked((stored - zeros) * spread, steps * spread)


def _packed_integers(tensors: Tensors, bits: int) -> Unpacked:
    zero: np.ndarray | int = 1 << (bits - 1)
    if ".weight_zero_point" in tensors:
        zero = _integers(tensors[".weight_zero_point"].t(), bits).T
    stored = _integers(tensors[".weight_packed"], bits)
    assert tensors[".weight_shape"].tolist() == list(stored.shape)
    return _in_groups(stored, zero, tensors[".weight_scale"], bits)


def _gptq(tensors: Tensors) -> Unpacked:
    scale, stored = tensors[".scales"].t(), _integers(tensors[".qweight"].t(), 4)
    group = stored.shape[1] // scale.shape[1]
    assert tensors[".g_idx"].tolist() == [column // group for column in range(stored.shape[1])]
    return _in_groups(stored, _integers(tensors[".qzeros"], 4).T + 1, scale, 4)


def _awq(tensors: Tensors) -> Unpacked:
    stored, zero = (_integers(tensors[name], 4, AWQ_ORDER).T for name in (".qweight", ".qzeros"))
    return _in_groups(stored, zero, tensors[".scales"].t(), 4)


def _fp8(stored: torch.Tensor, scale: np.ndarray) -> Unpacked:
    weight = stored.float().numpy() * scale
    # Half a step: 2^-4 of the value, or 2^-10 of the scale among subnormals.
    return Unpacked(weight, np.abs(weight) / 15 + scale * 2**-10)


def _fp8_rows(tensors: Tensors) -> Unpacked:
    return _fp8(tensors[".weight"], tensors[".weight_scale"].float().numpy())


def _fp8_blocks(tensors: Tensors) -> Unpacked:
    stored, scale = tensors[".weight"], tensors[".weight_scale_inv"].numpy()
    spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: stored.shape[0], : stored.shape[1]]
    return _fp8(stored, spread)


def _int8(tensors: Tensors) -> Unpacked:
    return _in_groups(tensors[".weight"].numpy().astype(np.int64), 0, tensors[".weight_scale"], 8)


def _e2m1(packed: torch.Tensor) -> np.ndarray:
    codes = packed.numpy()
    return E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)]


def _mxfp4(tensors: Tensors) -> Unpacked:
    values = _e2m1(tensors[".weight_packed"])
    power = _spread(np.exp2(tensors[".weight_scale"].numpy().astype(np.float32) - 127), values.shape[1])
    # Half the largest step is 1; a value that saturates may lack 2.
    return Unpacked(values * power, np.where(np.abs(values) == 6, 2 * power, power))


def _nvfp4(tensors: Tensors) -> Unpacked:
    values = _e2m1(tensors[".weight_packed"])
    scale = tensors[".weight_scale"].float().numpy() / tensors[".weight_global_scale"].numpy()
    spread = _spread(scale, values.shape[1])
    return Unpacked(values * spread, spread)


UNPACK: Mapping[str, Callable[[Tensors], Unpacked]] = {
    "fp8": _fp8_rows,
    "fp8-block": _fp8_blocks,
    "int8": _int8,
    "w8a16": lambda tensors: _packed_integers(tensors, 8),
    "w4a16": lambda tensors: _packed_integers(tensors, 4),
    "w4a16-asym": lambda tensors: _packed_integers(tensors, 4),
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}
