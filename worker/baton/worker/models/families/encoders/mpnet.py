"""MPNet: BERT without types of tokens, whose attention adds learned scores for distances."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.encoders.bert import names_under, read_encoder
from baton.worker.models.fields import Fields
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec
from baton.worker.models.reading import Family

ARCHITECTURE = "MPNetModel"
_FIRST_POSITION = 2  # those before are of padding
_BUCKETS = 32  # whatever the config says of the table's size, as in Transformers


def read(fields: Fields) -> ModelConfig:
    """Reads BERT's layers, and a classifier with two linears."""
    buckets = fields.positive_int("relative_attention_num_buckets", default=_BUCKETS)
    if buckets != _BUCKETS:
        raise fields.error("relative_attention_num_buckets", str(_BUCKETS))
    names = replace(
        names_under("mpnet"),
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        o="attention.attn.o",
        attention_output_norm="attention.LayerNorm",
        relative="mpnet.encoder.relative_attention_bias",
    )
    config = read_encoder(fields, ARCHITECTURE, names)
    if config.max_position_embeddings <= _FIRST_POSITION:
        raise fields.error("max_position_embeddings", f"more than {_FIRST_POSITION}")
    layers = tuple(
        replace(layer, attention=replace(layer.grouped, relative_buckets=buckets)) for layer in config.layers
    )
    hidden = DenseSpec("classifier.dense", config.hidden_size, config.hidden_size, squash="tanh")
    classifier = ClassifierSpec(
        "classifier.out_proj", "classifier", bias=True, before=(hidden,), pick="first", takes_pairs=True
    )
    return replace(config, layers=layers, num_token_types=0, position_offset=_FIRST_POSITION, classifier=classifier)


FAMILY = Family(ARCHITECTURE, "mpnet", read)
