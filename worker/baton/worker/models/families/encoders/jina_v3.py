"""Jina embeddings v3: XLM-RoBERTa with RoPE in place of learned positions. Adapters are separate."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec
from baton.worker.models.reading import Family, read_activation, read_attention, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "JinaEmbeddingsV3Model"
_NAMES = TensorNames(
    embed="roberta.embeddings.word_embeddings",
    token_types="roberta.embeddings.token_type_embeddings",
    embed_norm="roberta.emb_ln",
    layer="roberta.encoder.layers.{}.",
    qkv=("mixer.Wqkv",),
    o="mixer.out_proj",
    attention_output_norm="norm1",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_output_norm="norm2",
)
_DEFAULTS = {"max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def read(fields: Fields) -> ModelConfig:
    """Reads layers that are all alike, and a classifier with two linears."""
    fields = Fields({**_DEFAULTS, **fields.raw}, fields.source)
    rope = read_rope(fields, RopeDefaults(theta=20_000.0))
    attention = replace(read_attention(fields, rope), qkv_bias=True, o_bias=True, causal=False)
    activation = read_activation(fields, default="gelu")
    mlp = MlpSpec(fields.positive_int("intermediate_size"), bias=True, activation=activation, gated=False)
    layer = LayerSpec(attention, mlp, input_norms=False, sum_norms=True)
    norm = NormSpec(fields.positive_float("layer_norm_eps"), centered=True, bias=True)
    config = read_model(
        fields, ARCHITECTURE, [layer] * read_num_layers(fields), names=_NAMES, norm=norm, default_tied=True
    )
    hidden = DenseSpec("classifier.dense", config.hidden_size, config.hidden_size, squash="tanh")
    return replace(
        config,
        tie_embeddings=True,
        num_token_types=fields.positive_int("type_vocab_size"),
        embedding_norm=True,
        final_norm=False,
        default_pick="mean",
        classifier=ClassifierSpec(
            "classifier.out_proj", "classifier", bias=True, before=(hidden,), pick="first", takes_pairs=True
        ),
    )


FAMILY = Family(ARCHITECTURE, "jina_embeddings_v3", read, former_name="XLMRobertaLoRA")
