"""Qwen1.5 and Qwen2 with experts: Qwen2's attention, and a shared expert with a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import (
    Family,
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_optional_windows,
)
from baton.worker.models.reading_experts import read_router, read_sparse_layers

ARCHITECTURE = "Qwen2MoeForCausalLM"
_SHARED = "mlp.shared_expert."
_NAMES = TensorNames(shared_gate_up=(_SHARED + "gate_proj", _SHARED + "up_proj"), shared_down=_SHARED + "down_proj")


def read(fields: Fields) -> ModelConfig:
    """Reads layers that may differ in MLP and window."""
    num_layers = read_num_layers(fields)
    attention = replace(read_attention(fields), qkv_bias=fields.flag("qkv_bias", default=True))
    experts = ExpertsSpec(
        replace(read_router(fields), renormalized=fields.flag("norm_topk_prob", default=False)),
        fields.positive_int("moe_intermediate_size"),
        shared=MlpSpec(fields.positive_int("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    last = fields.number("max_window_layers", default=28)
    slides = [layer % 2 == 0 and layer < last for layer in range(num_layers)]
    windows = read_optional_windows(fields, num_layers, slides)
    layers = [
        LayerSpec(replace(attention, window=window), experts if sparse else read_mlp(fields))
        for window, sparse in zip(windows, read_sparse_layers(fields, num_layers), strict=True)
    ]
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES)


FAMILY = Family(ARCHITECTURE, "qwen2_moe", read)
