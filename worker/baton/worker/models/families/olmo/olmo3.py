"""OLMo 3: OLMo 2's layers with windows; layers with full attention have a RoPE of their own."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import (
    Family,
    all_but_every,
    read_attention,
    read_mlp,
    read_model,
    read_num_layers,
    read_slides,
    read_windows,
)
from baton.worker.models.reading_rope import RopeDefaults, read_ropes

ARCHITECTURE = "Olmo3ForCausalLM"
_NAMES = TensorNames(attention_output_norm="post_attention_layernorm", mlp_output_norm="post_feedforward_layernorm")


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in window and RoPE."""
    fields = Fields({"sliding_window": 4096, **fields.raw}, fields.source)
    theta = fields.positive_float("rope_theta", default=5e5)
    full, sliding = read_ropes(fields, full=RopeDefaults(theta), sliding=RopeDefaults(theta))
    bias = fields.flag("attention_bias", default=False)
    attention = replace(read_attention(fields, full), qkv_bias=bias, o_bias=bias, qk_norm="projection")
    layer = LayerSpec(attention, read_mlp(fields), input_norms=False, output_norms=True)
    usual = all_but_every(4, read_num_layers(fields))
    layers = [
        replace(layer, attention=replace(attention, rope=sliding if slides else full, window=window))
        for slides, window in zip(read_slides(fields, usual), read_windows(fields, len(usual), usual), strict=True)
    ]
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "olmo3", read)
