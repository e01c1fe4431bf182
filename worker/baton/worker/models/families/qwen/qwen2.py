"""Qwen2 and Qwen2.5: biases of queries, keys and values; windows if use_sliding_window is set."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import (
    Family,
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_optional_windows,
)

ARCHITECTURE = "Qwen2ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that may differ in their windows."""
    attention, mlp = replace(read_attention(fields), qkv_bias=True), read_mlp(fields)
    windows = read_optional_windows(fields, read_num_layers(fields))
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows]
    return read_model(fields, ARCHITECTURE, layers)


FAMILY = Family(ARCHITECTURE, "qwen2", read)
