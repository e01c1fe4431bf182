"""Mistral 7B and its descendants: Llama's layers, with a window that the config sets."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers, read_windows

ARCHITECTURE = "MistralForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers without biases."""
    attention, mlp = read_attention(fields), read_mlp(fields)
    windows = read_windows(fields, read_num_layers(fields))
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows]
    return read_model(fields, ARCHITECTURE, layers)


FAMILY = Family(ARCHITECTURE, "mistral", read)
