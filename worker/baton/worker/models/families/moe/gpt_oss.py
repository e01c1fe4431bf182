"""gpt-oss: experts with biases and clamped gates; attention has sinks, and every second layer a window."""

from __future__ import annotations

from dataclasses import replace

from baton.kernels.routing import Gate
from baton.worker.layers.spec import ExpertsSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_model, read_num_layers, read_windows
from baton.worker.models.reading_experts import check_silu, read_router
from baton.worker.models.reading_rope import RopeDefaults, read_rope
from baton.worker.quantization.expert_names import ExpertNames

ARCHITECTURE = "GptOssForCausalLM"
_NAMES = TensorNames(
    router="mlp.router",
    experts=ExpertNames(
        gate_up=("mlp.experts.gate_up_proj",),
        down="mlp.experts.down_proj",
        gate_up_bias=("mlp.experts.gate_up_proj_bias",),
        down_bias="mlp.experts.down_proj_bias",
        transposed=True,
        interleaved=True,
    ),
)


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in their windows."""
    check_silu(fields)
    bias = fields.flag("attention_bias", default=True)
    attention = read_attention(fields, read_rope(fields, RopeDefaults(theta=150000.0)))
    attention = replace(attention, qkv_bias=bias, o_bias=bias, sinks=True)
    experts = ExpertsSpec(
        replace(read_router(fields, ("num_local_experts", "num_experts")), scores_chosen=True),
        fields.positive_int("intermediate_size"),
        Gate(fields.positive_float("swiglu_limit", default=7.0), fields.positive_float("swiglu_alpha", default=1.702)),
        bias=True,
        router_bias=True,
    )
    num_layers = read_num_layers(fields)
    windows = read_windows(fields, num_layers, [layer % 2 == 0 for layer in range(num_layers)])
    layers = [LayerSpec(replace(attention, window=window), experts) for window in windows]
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "gpt_oss", read)
