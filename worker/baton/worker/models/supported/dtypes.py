"""The dtypes of weights and activations by name. Knows no tensors."""

from __future__ import annotations

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


def compute_dtype_name(executor: str, wanted: str, checkpoint: str = "") -> str:
    """Returns the dtype of weights and activations. auto: float32 on a CPU; on a GPU the checkpoint's, or bfloat16."""
    if wanted != "auto":
        return wanted
    if executor != "cuda":
        return "float32"
    return checkpoint if checkpoint in COMPUTE_DTYPES else "bfloat16"


def kv_dtype_name(wanted: str, compute: str) -> str:
    """Returns the dtype of KV, a name of KvSpec. auto: that of activations."""
    return compute if wanted == "auto" else "float8_e4m3"
