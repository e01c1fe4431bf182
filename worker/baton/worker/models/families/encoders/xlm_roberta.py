"""XLM-RoBERTa: RoBERTa for many languages, as BGE-M3 and multilingual E5 are."""

from __future__ import annotations

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.encoders.roberta import read_roberta
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family

ARCHITECTURE = "XLMRobertaModel"


def read(fields: Fields) -> ModelConfig:
    """Reads what RoBERTa has."""
    return read_roberta(fields, ARCHITECTURE)


FAMILY = Family(ARCHITECTURE, "xlm-roberta", read)
