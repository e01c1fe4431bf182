"""The weight formats by the quant_method of config.json. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FormatRow:
    """A format, and the module of its WeightFormat."""

    quant_method: str
    module: str  # in this package
    summary: str
    executors: tuple[str, ...] = ("cpu",)


_ALL = ("cpu", "cuda")
_ROWS = (
    FormatRow("fp8", "fp8", "FP8 e4m3, a scale a tensor or a block (DeepSeek, Qwen, Mistral, AutoFP8)", _ALL),
    FormatRow(
        "compressed-tensors",
        "compressed_tensors",
        "FP8 and INT8 with a scale a tensor, row, group or block; packed integers of 2, 4 and 8 bits; NVFP4; MXFP4",
        _ALL,
    ),
    FormatRow("awq", "awq", "4 bits, packed along output features (gemm)", _ALL),
    FormatRow("gptq", "gptq", "2, 4 or 8 bits, also in the order of activations; both versions of zeros", _ALL),
    FormatRow("mxfp4", "mxfp4", "experts of gpt-oss", _ALL),
    FormatRow("bitsandbytes", "bitsandbytes", "NF4 and FP4, also with nested scales; int8", _ALL),
    FormatRow("gguf", "gguf", "GGUF files: Q4_0 to Q8_0 and k-quants; other types are dequantized at load", _ALL),
    FormatRow("modelopt", "modelopt", "FP8 with a scale a tensor; NVFP4", _ALL),
    FormatRow("fbgemm_fp8", "fbgemm_fp8", "FP8 e4m3, a scale a row (Meta)", _ALL),
    FormatRow("auto-round", "auto_round", "AutoRound in the layout of GPTQ or AWQ", _ALL),
)
FORMATS: Mapping[str, FormatRow] = {row.quant_method: row for row in _ROWS}
# Formats that are made of unquantized weights while they load, by the value of --quantization.
ONLINE: Mapping[str, FormatRow] = {
    "fp8": FormatRow("fp8", "online_fp8", "FP8 e4m3, a scale a row", _ALL),
}
# Files beside config.json that older checkpoints have instead of a quantization_config.
SIDE_FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
