"""GTE v1.5 and multilingual GTE: BERT with RoPE and gated MLPs, also under the name of NewModel."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec
from baton.worker.models.reading import Family, read_activation, read_attention, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope
from baton.worker.models.reading_sizes import read_head_dim

ARCHITECTURE = "GteModel"
_NAMES = TensorNames(
    embed="gte.embeddings.word_embeddings",
    token_types="gte.embeddings.token_type_embeddings",
    embed_norm="gte.embeddings.LayerNorm",
    layer="gte.encoder.layer.{}.",
    qkv=("attention.qkv_proj",),
    o="attention.o_proj",
    attention_output_norm="attn_ln",
    gate_up=("mlp.up_gate_proj",),
    up_first=True,
    down="mlp.down_proj",
    mlp_output_norm="mlp_ln",
    aliases=(("gte.", "new."),),
)
_DEFAULTS = {"max_position_embeddings": 8192, "layer_norm_eps": 1e-12}
# What configs of NewModel may vary, and the values that are computed.
_FIXED = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
}


def read(fields: Fields) -> ModelConfig:
    """Reads layers that are all alike, and a classifier behind the first token's linear."""
    fields = Fields({**_DEFAULTS, **fields.raw}, fields.source)
    for key, value in _FIXED.items():
        if fields.raw.get(key, value) != value:
            raise fields.error(key, str(value).lower())
    attention = replace(read_attention(fields, _read_rope(fields)), qkv_bias=True, o_bias=True, causal=False)
    mlp = MlpSpec(
        fields.positive_int("intermediate_size"), activation=read_activation(fields, default="gelu"), down_bias=True
    )
    layer = LayerSpec(attention, mlp, input_norms=False, sum_norms=True)
    norm = NormSpec(fields.positive_float("layer_norm_eps"), centered=True, bias=True)
    config = read_model(
        fields, ARCHITECTURE, [layer] * read_num_layers(fields), names=_NAMES, norm=norm, default_tied=True
    )
    pooled = DenseSpec("gte.pooler.dense", config.hidden_size, config.hidden_size, squash="tanh")
    return replace(
        config,
        tie_embeddings=True,
        num_token_types=_read_num_types(fields),
        embedding_norm=True,
        final_norm=False,
        default_pick="first",
        classifier=ClassifierSpec(
            "classifier", "classifier", bias=True, before=(pooled,), pick="first", takes_pairs=True
        ),
    )


def _read_num_types(fields: Fields) -> int:
    """Reads the types of tokens, which GTE v1.5 has none of."""
    named = fields.raw.get("type_vocab_size", 0 if _is_new(fields) else 1)
    if not isinstance(named, int) or isinstance(named, bool) or named < 0:
        raise fields.error("type_vocab_size", "an integer of 0 or more")
    return named


def _is_new(fields: Fields) -> bool:
    """Returns whether the config is NewModel's, which has other defaults."""
    return "auto_map" in fields.raw


def _read_rope(fields: Fields) -> RopeConfig:
    """Reads RoPE. NewModel's NTK scaling is that of a larger theta, whose frequencies are divided by a factor."""
    scaling = fields.inner("rope_scaling")
    if scaling is None or scaling.raw.get("type") != "ntk":
        return read_rope(fields, RopeDefaults(theta=10_000.0 if _is_new(fields) else 160_000.0))
    if scaling.raw.get("mixed_b") is not None:
        raise scaling.error("mixed_b", "absent")
    factor = scaling.positive_float("factor")
    theta = fields.positive_float("rope_theta", default=10_000.0)
    return RopeConfig("linear", theta * factor, factor ** (2 / read_head_dim(fields)))


FAMILY = Family(ARCHITECTURE, "gte", read, ignores_auto_map=True, former_name="NewModel")
