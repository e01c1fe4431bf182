"""The formats that an unquantized checkpoint is rounded to, by the value of --format. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """A format, and the module of its scheme."""

    name: str
    module: str  # in this package
    quant_method: str
    summary: str
    group_size: int = 0  # columns that share a scale; 0: the format has no choice of them


_ROWS = (
    SchemeRow("fp8", "eight_bits", "compressed-tensors", "FP8 e4m3, a scale a row; activations by token (FP8_DYNAMIC)"),
    SchemeRow("fp8-block", "fp8_block", "fp8", "FP8 e4m3 in blocks of 128x128, as DeepSeek and Qwen ship it"),
    SchemeRow("int8", "eight_bits", "compressed-tensors", "int8, a scale a row; activations by token (W8A8)"),
    SchemeRow("w8a16", "packed_integers", "compressed-tensors", "8-bit integers in groups", 128),
    SchemeRow("w4a16", "packed_integers", "compressed-tensors", "4-bit integers in groups", 128),
    SchemeRow("w4a16-asym", "packed_integers", "compressed-tensors", "4-bit integers in groups, with zeros", 128),
    SchemeRow("gptq", "gptq", "gptq", "4-bit integers in groups, in GPTQ's layout", 128),
    SchemeRow("awq", "awq", "awq", "4-bit integers in groups, with zeros, in AWQ's layout", 128),
    SchemeRow("mxfp4", "four_bit_floats", "compressed-tensors", "e2m1 with a power of two for each group of 32"),
    SchemeRow("mxfp4-experts", "stacked_experts", "mxfp4", "mxfp4 of stacked experts alone, in gpt-oss's layout"),
    SchemeRow("nvfp4", "four_bit_floats", "compressed-tensors", "e2m1 with an e4m3 scale for each group of 16"),
)
SCHEMES: Mapping[str, SchemeRow] = {row.name: row for row in _ROWS}
