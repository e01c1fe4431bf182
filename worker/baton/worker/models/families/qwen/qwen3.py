"""Qwen3: QK norms of each head; windows if use_sliding_window is set."""

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

ARCHITECTURE = "Qwen3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that may differ in their windows."""
    bias = fields.flag("attention_bias", default=False)
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias, qk_norm="head")
    windows = read_optional_windows(fields, read_num_layers(fields))
    layers = [LayerSpec(replace(attention, window=window), read_mlp(fields)) for window in windows]
    return read_model(fields, ARCHITECTURE, layers)


FAMILY = Family(ARCHITECTURE, "qwen3", read)
