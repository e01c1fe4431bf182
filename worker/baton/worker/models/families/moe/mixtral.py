"""Mixtral: Mistral's layers, with experts for MLPs."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import ExpertsSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_model, read_num_layers, read_windows
from baton.worker.models.reading_experts import W_NAMES, check_silu, read_router

ARCHITECTURE = "MixtralForCausalLM"
_NAMES = TensorNames(router="block_sparse_moe.gate", experts=W_NAMES)


def read(fields: Fields) -> ModelConfig:
    """Reads layers without biases."""
    check_silu(fields)
    router = replace(read_router(fields, ("num_local_experts",)), renormalized=True)
    experts = ExpertsSpec(router, fields.positive_int("intermediate_size"))
    attention = read_attention(fields)
    windows = read_windows(fields, read_num_layers(fields))
    layers = [LayerSpec(replace(attention, window=window), experts) for window in windows]
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "mixtral", read)
