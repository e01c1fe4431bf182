"""GPT-2: learned positions, LayerNorm, biases, matrices kept by columns."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import Layout, TensorNames
from baton.worker.models.reading import Family, read_activation, read_attention, read_model, read_num_layers

ARCHITECTURE = "GPT2LMHeadModel"
_NAMES = TensorNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_input_norm="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    mlp_input_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    layout=Layout.COLUMNS,
    aliases=(("transformer.", ""),),
)
_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}


def read(fields: Fields) -> ModelConfig:
    """Reads layers that may differ in the scale of their scores."""
    renamed = {_FIELDS.get(key, key): value for key, value in fields.raw.items()}
    fields = Fields({"max_position_embeddings": 1024, **renamed}, fields.source)
    if fields.flag("add_cross_attention", default=False):
        raise fields.error("add_cross_attention", "false")
    attention = replace(read_attention(fields, RopeConfig(NO_ROPE, 0.0)), qkv_bias=True, o_bias=True)
    if not fields.flag("scale_attn_weights", default=True):
        attention = replace(attention, scale=1.0)
    width = fields.positive_int("n_inner", default=4 * fields.positive_int("hidden_size"))
    activation = read_activation(fields, "activation_function", "gelu_new")
    mlp = MlpSpec(width, bias=True, activation=activation, gated=False)
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", default=False)
    layers = [
        LayerSpec(replace(attention, scale=attention.scale / (index + 1 if by_layer else 1)), mlp)
        for index in range(read_num_layers(fields))
    ]
    norm = NormSpec(fields.positive_float("layer_norm_epsilon", default=1e-5), centered=True, bias=True)
    config = read_model(fields, ARCHITECTURE, layers, names=_NAMES, norm=norm, default_tied=True)
    return replace(config, learned_positions=True)


FAMILY = Family(ARCHITECTURE, "gpt2", read)
