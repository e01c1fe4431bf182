"""ModernBERT: bidirectional attention with windows in most layers, RoPE of two kinds, gated MLPs."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec, Pick, Squash
from baton.worker.models.reading import (
    Family,
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    read_slides,
)
from baton.worker.models.reading_rope import RopeDefaults, read_ropes

ARCHITECTURE = "ModernBertModel"
_NAMES = TensorNames(
    embed="model.embeddings.tok_embeddings",
    embed_norm="model.embeddings.norm",
    norm="model.final_norm",
    layer="model.layers.{}.",
    attention_input_norm="attn_norm",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    mlp_input_norm="mlp_norm",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
)
_SQUASHES: dict[str, Squash] = {"gelu": "gelu", "relu": "relu", "tanh": "tanh"}
_PICKS: dict[str, Pick] = {"cls": "first", "mean": "mean"}


def read(fields: Fields) -> ModelConfig:
    """Reads layers whose windows reach `local_attention` / 2 tokens to each side; the first one norms no input."""
    num_layers = read_num_layers(fields)
    period = fields.positive_int("global_attn_every_n_layers", default=3)
    slides = read_slides(fields, [not full for full in _fulls(period, num_layers)])
    full_rope, sliding_rope = read_ropes(
        fields,
        RopeDefaults(theta=fields.positive_float("global_rope_theta", default=160_000.0)),
        RopeDefaults(theta=fields.positive_float("local_rope_theta", default=10_000.0)),
    )
    bias = fields.flag("attention_bias", default=False)
    full = replace(read_attention(fields, full_rope), qkv_bias=bias, o_bias=bias, causal=False)
    reach = fields.positive_int("local_attention", default=128) // 2
    sliding = replace(full, rope=sliding_rope, window=reach + 1)
    mlp = MlpSpec(
        fields.positive_int("intermediate_size"),
        bias=fields.flag("mlp_bias", default=False),
        activation=read_activation(fields, "hidden_activation", "gelu"),
    )
    layers = [
        LayerSpec(sliding if slid else full, mlp, attention_input_norm=index > 0) for index, slid in enumerate(slides)
    ]
    norm = NormSpec(
        fields.positive_float("norm_eps", default=1e-5), centered=True, bias=fields.flag("norm_bias", default=False)
    )
    config = read_model(fields, ARCHITECTURE, layers, names=_NAMES, norm=norm, default_tied=True)
    return replace(
        config,
        tie_embeddings=True,
        embedding_norm=True,
        default_pick="mean",
        classifier=_classifier(fields, config.hidden_size),
    )


def _fulls(period: int, num_layers: int) -> list[bool]:
    return [index % period == 0 for index in range(num_layers)]


def _classifier(fields: Fields, hidden: int) -> ClassifierSpec:
    squash, pick = (
        fields.text("classifier_activation", default="gelu"),
        fields.text("classifier_pooling", default="cls"),
    )
    if squash not in _SQUASHES:
        raise fields.error("classifier_activation", f"one of {', '.join(_SQUASHES)}")
    if pick not in _PICKS:
        raise fields.error("classifier_pooling", f"one of {', '.join(_PICKS)}")
    bias = fields.flag("classifier_bias", default=False)
    head = DenseSpec("head.dense", hidden, hidden, bias, _SQUASHES[squash], norm="head.norm")
    return ClassifierSpec(
        "classifier", "classifier", bias=True, before=(head,), token_before=(head,), pick=_PICKS[pick], takes_pairs=True
    )


FAMILY = Family(ARCHITECTURE, "modernbert", read)
