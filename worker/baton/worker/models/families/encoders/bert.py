"""BERT: bidirectional attention, learned positions, types of tokens, norms of sums."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec
from baton.worker.models.reading import Family, read_activation, read_attention, read_model, read_num_layers

ARCHITECTURE = "BertModel"
_DEFAULTS = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12}


def names_under(prefix: str) -> TensorNames:
    """Returns the names of tensors, which begin with `prefix` in models with a head."""
    return TensorNames(
        embed=f"{prefix}.embeddings.word_embeddings",
        positions=f"{prefix}.embeddings.position_embeddings",
        token_types=f"{prefix}.embeddings.token_type_embeddings",
        embed_norm=f"{prefix}.embeddings.LayerNorm",
        layer=f"{prefix}.encoder.layer.{{}}.",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        o="attention.output.dense",
        attention_output_norm="attention.output.LayerNorm",
        gate_up=("intermediate.dense",),
        down="output.dense",
        mlp_output_norm="output.LayerNorm",
        endings=((".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta")),
    )


def read(fields: Fields) -> ModelConfig:
    """Reads layers that are all alike, and a classifier behind the first token's linear."""
    config = read_encoder(fields, ARCHITECTURE, names_under("bert"))
    pooled = DenseSpec("bert.pooler.dense", config.hidden_size, config.hidden_size, squash="tanh")
    classifier = ClassifierSpec("classifier", "classifier", bias=True, before=(pooled,), pick="first", takes_pairs=True)
    return replace(config, classifier=classifier)


def read_encoder(fields: Fields, architecture: str, names: TensorNames) -> ModelConfig:
    """Reads all but the classifier."""
    fields = Fields({**_DEFAULTS, **fields.raw}, fields.source)
    if fields.text("position_embedding_type", default="absolute") != "absolute":
        raise fields.error("position_embedding_type", "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if fields.flag(key, default=False):
            raise fields.error(key, "false: an encoder's tokens see all of their text")
    attention = replace(read_attention(fields, RopeConfig(NO_ROPE, 0.0)), qkv_bias=True, o_bias=True, causal=False)
    activation = read_activation(fields, default="gelu")
    mlp = MlpSpec(fields.positive_int("intermediate_size"), bias=True, activation=activation, gated=False)
    layer = LayerSpec(attention, mlp, input_norms=False, sum_norms=True)
    norm = NormSpec(fields.positive_float("layer_norm_eps"), centered=True, bias=True)
    layers = [layer] * read_num_layers(fields)
    config = read_model(fields, architecture, layers, names=names, norm=norm, default_tied=True)
    return replace(
        config,
        tie_embeddings=True,
        learned_positions=True,
        num_token_types=fields.positive_int("type_vocab_size"),
        embedding_norm=True,
        final_norm=False,
        default_pick="mean",
    )


FAMILY = Family(ARCHITECTURE, "bert", read)
