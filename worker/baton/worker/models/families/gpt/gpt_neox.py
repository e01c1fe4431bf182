"""GPT-NeoX and Pythia: attention and MLP read the same residual; LayerNorm, biases, RoPE of a part of each head."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import Layout, TensorNames
from baton.worker.models.reading import Family, read_activation, read_attention, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "GPTNeoXForCausalLM"
_NAMES = TensorNames(
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    layout=Layout.QKV_BY_HEAD,
    aliases=(("embed_out", "lm_head"),),
)


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    theta = fields.positive_float("rotary_emb_base", default=10000.0)
    partial = fields.positive_float("rotary_pct", default=0.25)
    bias = fields.flag("attention_bias", default=True)
    attention = read_attention(fields, read_rope(fields, RopeDefaults(theta, partial)))
    if attention.num_kv_heads != attention.num_q_heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads ({attention.num_q_heads})")
    activation = read_activation(fields, default="gelu")
    mlp = MlpSpec(fields.positive_int("intermediate_size"), bias=True, activation=activation, gated=False)
    parallel = fields.flag("use_parallel_residual", default=True)
    layer = LayerSpec(replace(attention, qkv_bias=bias, o_bias=bias), mlp, parallel=parallel)
    return read_model(
        fields,
        ARCHITECTURE,
        [layer] * read_num_layers(fields),
        names=_NAMES,
        norm=NormSpec(fields.positive_float("layer_norm_eps", default=1e-5), centered=True, bias=True),
    )


FAMILY = Family(ARCHITECTURE, "gpt_neox", read)
