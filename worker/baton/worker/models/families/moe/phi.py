"""Phi-3.5 with experts: LayerNorm, two experts chosen one after the other, and a head with a bias."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import ExpertsSpec, LayerSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers, read_windows
from baton.worker.models.reading_experts import W_NAMES, read_router
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "PhimoeForCausalLM"
_NAMES = TensorNames(router="block_sparse_moe.gate", experts=W_NAMES)


def read(fields: Fields) -> ModelConfig:
    """Reads layers that may have windows."""
    bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, _read_rope(fields))
    attention = replace(attention, qkv_bias=bias, o_bias=bias)
    router = replace(
        read_router(fields, ("num_local_experts",)),
        score="sparsemixer",
        jitter=fields.positive_float("router_jitter_noise", default=0.01),
    )
    experts = ExpertsSpec(router, read_mlp(fields).intermediate_size)
    windows = read_windows(fields, read_num_layers(fields))
    layers = [LayerSpec(replace(attention, window=window), experts) for window in windows]
    norm = NormSpec(fields.positive_float("rms_norm_eps", default=1e-5), centered=True, bias=True)
    config = read_model(fields, ARCHITECTURE, layers, names=_NAMES, norm=norm)
    return replace(config, lm_head_bias=fields.flag("lm_head_bias", default=False))


def _read_rope(fields: Fields) -> RopeConfig:
    """Reads RoPE. Longrope scales cosines and sines by factors of its own here, which must not depend on the length."""
    rope = read_rope(fields, RopeDefaults(theta=1e6))
    scaling = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    if rope.kind != "longrope" or scaling is None:
        return rope
    factor = scaling.positive_float("short_mscale")
    if scaling.positive_float("long_mscale") != factor:
        raise scaling.error("long_mscale", f"short_mscale ({factor:g})")
    return replace(rope, attention_factor=factor)


FAMILY = Family(ARCHITECTURE, "phimoe", read, ignores_auto_map=True, former_name="PhiMoEForCausalLM")
