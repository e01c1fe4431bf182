"""Nomic's BERT: RoPE in place of learned positions, gated MLPs without biases."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec
from baton.worker.models.reading import Family, read_attention, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "NomicBertModel"
_NAMES = TensorNames(
    embed="nomic_bert.embeddings.word_embeddings",
    token_types="nomic_bert.embeddings.token_type_embeddings",
    embed_norm="nomic_bert.emb_ln",
    layer="nomic_bert.encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    attention_output_norm="norm1",
    gate_up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_output_norm="norm2",
)
# Nomic's own names in config.json, and those that Transformers gives them.
_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
    "layer_norm_epsilon": "layer_norm_eps",
}
_DEFAULTS = {"max_position_embeddings": 2048, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
# What checkpoints of this architecture may vary, and the values that are computed.
_FIXED = {
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
}


def read(fields: Fields) -> ModelConfig:
    """Reads layers that are all alike, under Nomic's names or those of Transformers."""
    renamed = {_FIELDS.get(key, key): value for key, value in fields.raw.items() if value is not None}
    fields = Fields({**_DEFAULTS, **renamed}, fields.source)
    for key, value in _FIXED.items():
        if fields.raw.get(key, value) != value:
            raise fields.error(key, str(value).lower())
    for key, allowed in {"activation_function": ("swiglu",), "hidden_act": ("silu",)}.items():
        if fields.text(key, default=allowed[0]) not in allowed:
            raise fields.error(key, " or ".join(allowed))
    attention = replace(read_attention(fields, read_rope(fields, RopeDefaults(theta=1000.0))), causal=False)
    layer = LayerSpec(attention, MlpSpec(fields.positive_int("intermediate_size")), input_norms=False, sum_norms=True)
    norm = NormSpec(fields.positive_float("layer_norm_eps"), centered=True, bias=True)
    layers = [layer] * read_num_layers(fields)
    config = read_model(fields, ARCHITECTURE, layers, names=_NAMES, norm=norm, default_tied=True)
    hidden = config.hidden_size
    pooled = DenseSpec("nomic_bert.pooler.dense", hidden, hidden, squash="tanh")
    return replace(
        config,
        tie_embeddings=True,
        num_token_types=fields.positive_int("type_vocab_size"),
        embedding_norm=True,
        final_norm=False,
        default_pick="mean",
        classifier=ClassifierSpec(
            "classifier", "classifier", bias=True, before=(pooled,), pick="first", takes_pairs=True
        ),
    )


FAMILY = Family(ARCHITECTURE, "nomic_bert", read, ignores_auto_map=True)
