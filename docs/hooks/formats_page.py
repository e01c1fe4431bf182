"""The page of weight formats: which families compute which, found by reading each family's config in each format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from format_cells import cells_section
from markdown_text import GENERATED_NOTE, cell, code, table

from baton.rpc.errors import InvalidRequest
from baton.worker.models.config import ModelConfig
from baton.worker.models.registry import parse_config
from baton.worker.models.supported import catalog
from baton.worker.models.supported.cuda_limits import misfit
from baton.worker.quantization.formats.table import FORMATS

# Settings of which each format is an example. GGUF files have none.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"weight_block_size": [32, 32]},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
        },
    },
    "awq": {"bits": 4, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 32},
    "mxfp4": {},
    "bitsandbytes": {"load_in_8bit": True},
    "modelopt": {"quant_algo": "FP8"},
    "fbgemm_fp8": {},
    "auto-round": {"bits": 4, "group_size": 32},
}
PRODUCTS_TEST = "tests/worker/quantization/test_packed_linears.py"
FAMILIES_TEST = "tests/worker/quantization/test_families_by_format.py"
# What compares tokens or products of each format with those of the dequantized weights.
TESTS: Mapping[str, str] = {
    **dict.fromkeys(SETTINGS, "tests/worker/quantization/test_packed_models.py"),
    "bitsandbytes": "tests/worker/quantization/test_bitsandbytes.py",
    "gguf": "tests/worker/weights/test_gguf_architectures.py",
}
_HEAD = ("`quant_method`", "weights", "packed besides linears", "kernels on a CPU", "kernels on a GPU", "compared by")
_SIZES = 64  # which groups and blocks divide


def formats_page(root: Path) -> str:
    """Returns the formats, and which families run in them."""
    names = list(SETTINGS)
    rows = [
        (code(architecture), *(", ".join(executors) or "none" for executors in by_format.values()))
        for architecture, by_format in matrix(root).items()
    ]
    return (
        f"# Weight formats\n\n{GENERATED_NOTE}\n"
        "[Quantized weights](../guides/models.md#quantized-weights) says what is read of each, and "
        "[Quantizing](../guides/quantize.md) how to write them.\n\n"
        f"## Formats\n{table(_HEAD, _formats())}\n"
        "A product differs from that of the dequantized weights by at most 1e-6 of the sum of its terms' magnitudes in "
        f"float32, and 2^-7 in bfloat16: `{PRODUCTS_TEST}`. Kernels of 8 bits round activations too.\n\n"
        "## Families\nThe executors that compute the models of a family in each format. "
        f"`{FAMILIES_TEST}` loads every family in the ways of packing that its WAYS lists, and compares each linear. "
        "Encoders are compared in none, and are left out.\n\n"
        f"{table(('architecture', *map(code, names)), rows)}\n{cells_section(root)}"
    )


def _formats() -> Iterator[tuple[str, ...]]:
    for name, row in FORMATS.items():
        on_gpu = "reads packed weights" if "cuda" in row.executors else "none"
        yield code(name), cell(row.summary), _besides(name), _on_cpu(name), on_gpu, code(TESTS[name])


def _besides(name: str) -> str:
    """Returns what else than linears a format may pack."""
    format_of = import_module(f"baton.worker.quantization.formats.{FORMATS[name].module}").FORMAT
    with_head = {"lm_head": True, "extra_config": {"lm_head": {"bits": 4}}}
    made = format_of({**SETTINGS.get(name, {"tensors": {}}), **with_head})
    kinds = {"heads": "covers_heads", "embeddings": "covers_tables"}
    return ", ".join(kind for kind, flag in kinds.items() if getattr(made, flag, False))


def _on_cpu(name: str) -> str:
    """Returns what multiplies weights of the format's example."""
    base = import_module("baton.worker.quantization.quantized.method").PackedMethod
    format_of = import_module(f"baton.worker.quantization.formats.{FORMATS[name].module}").FORMAT
    packed = getattr(format_of({**SETTINGS[name]}), "packed", None) if name in SETTINGS else None
    method = None if packed is None else packed("model.layers.0.mlp.down_proj")
    has_kernel = method is not None and type(method).on_bfloat16 is not base.on_bfloat16
    few = "; of few rows in bfloat16, PyTorch's for int4 and int8" if has_kernel or name == "gguf" else ""
    return f"dequantizes some rows at a time{few}"


def matrix(root: Path) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Returns the executors of each format, by architecture."""
    configs = raw_configs(root)
    return {
        family.architecture: {
            name: executors_of(configs[family.architecture], family.executors, name, settings)
            for name, settings in SETTINGS.items()
        }
        for family in catalog.families()
        if family.architecture in configs
    }


def raw_configs(root: Path) -> Mapping[str, Mapping[str, Any]]:
    """Returns a config.json of a small model of each architecture, from the tests."""
    sys.path.insert(0, str(root / "tests"))
    try:
        makers = import_module("support.engine.tiny_models").MODELS.values()
    finally:
        sys.path.remove(str(root / "tests"))
    found: dict[str, Mapping[str, Any]] = {}
    for make in makers:
        architecture, raw = _raw_config(make)
        found.setdefault(architecture, raw)
    return found


def _raw_config(make: Callable[[], Any]) -> tuple[str, Mapping[str, Any]]:
    with import_module("torch").device("meta"):
        model = make()
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    sizes = {key: _SIZES for key, value in raw.items() if key.endswith("intermediate_size") and value}
    return type(model).__name__, {**raw, **sizes}


def executors_of(
    raw: Mapping[str, Any], executors: tuple[str, ...], name: str, settings: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the executors that compute a model in a format; none if the family does not read it."""
    plain = parse_config(raw, "config.json")
    try:
        config = parse_config({**raw, "quantization_config": {"quant_method": name, **settings}}, "config.json")
        packs = _packs(config)
    except InvalidRequest:
        return ()
    if not packs:
        return ()
    in_format = config.weight_format.executors if config.weight_format is not None else ()
    # What the format alone rules out: tests' models are smaller than the GPU's kernels take.
    on_gpu = misfit(config) == misfit(plain)
    return tuple(one for one in executors if one in in_format and (one != "cuda" or on_gpu))


def _packs(config: ModelConfig) -> bool:
    """Returns whether any weights of a layer are packed. Raises InvalidRequest for linears that the format lacks."""
    torch = import_module("torch")
    build = import_module("baton.worker.weights.build").build_weights
    weights = build(config, lambda name, shape, into: None, torch.float32, torch.device("meta"))
    formats: tuple[str, ...] = import_module("baton.worker.executors.choices").weight_formats(weights)
    return any(name != "unquantized" for name in formats)
