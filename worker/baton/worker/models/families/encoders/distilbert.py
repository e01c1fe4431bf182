"""DistilBERT: BERT without types of tokens."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.encoders.bert import read_encoder
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec
from baton.worker.models.reading import Family

ARCHITECTURE = "DistilBertModel"
_NAMES = TensorNames(
    embed="distilbert.embeddings.word_embeddings",
    positions="distilbert.embeddings.position_embeddings",
    embed_norm="distilbert.embeddings.LayerNorm",
    layer="distilbert.transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    o="attention.out_lin",
    attention_output_norm="sa_layer_norm",
    gate_up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_output_norm="output_layer_norm",
)
_FIELDS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
}


def read(fields: Fields) -> ModelConfig:
    """Reads BERT's layers under other names."""
    renamed = {_FIELDS.get(key, key): value for key, value in fields.raw.items()}
    config = read_encoder(Fields(renamed, fields.source), ARCHITECTURE, _NAMES)
    hidden = DenseSpec("pre_classifier", config.hidden_size, config.hidden_size, squash="relu")
    classifier = ClassifierSpec("classifier", "classifier", bias=True, before=(hidden,), pick="first", takes_pairs=True)
    return replace(config, num_token_types=0, classifier=classifier)


FAMILY = Family(ARCHITECTURE, "distilbert", read)
