"""The quantization_config of compressed-tensors, as llm-compressor writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ARGUMENTS: Mapping[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "observer": "minmax",
    "observer_kwargs": {},
    "symmetric": True,
}
BY_TOKEN: Mapping[str, Any] = {"strategy": "token", "dynamic": True, "observer": None}


def settings(
    form: str, left_out: Sequence[str], weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the config of one group with all linears. `activations`: None if they are not rounded."""
    group = {
        "input_activations": None if activations is None else {**_ARGUMENTS, **activations},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**_ARGUMENTS, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "global_compression_ratio": None,
        "ignore": list(left_out),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
