"""RoBERTa: BERT whose positions begin behind that of padding."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.encoders.bert import names_under, read_encoder
from baton.worker.models.fields import Fields
from baton.worker.models.pooling.spec import ClassifierSpec, DenseSpec
from baton.worker.models.reading import Family

ARCHITECTURE = "RobertaModel"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that are all alike, and a classifier with two linears."""
    return read_roberta(fields, ARCHITECTURE)


def read_roberta(fields: Fields, architecture: str) -> ModelConfig:
    config = read_encoder(fields, architecture, names_under("roberta"))
    padding = fields.raw.get("pad_token_id", 1)
    if not isinstance(padding, int) or not 0 <= padding < config.max_position_embeddings - 1:
        raise fields.error("pad_token_id", f"an integer of 0 to {config.max_position_embeddings - 2}")
    hidden = DenseSpec("classifier.dense", config.hidden_size, config.hidden_size, squash="tanh")
    classifier = ClassifierSpec(
        "classifier.out_proj", "classifier", bias=True, before=(hidden,), pick="first", takes_pairs=True
    )
    return replace(config, position_offset=padding + 1, classifier=classifier)


FAMILY = Family(ARCHITECTURE, "roberta", read)
