"""Gemma 3 with a vision tower, which is not used: requests are text."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.gemma import gemma3
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_text_part

ARCHITECTURE = "Gemma3ForConditionalGeneration"
_ABSENT = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def read(fields: Fields) -> ModelConfig:
    """Reads the text model."""
    config = gemma3.read(read_text_part(fields, _ABSENT))
    return replace(config, architecture=ARCHITECTURE, names=config.names.of_text(), text_part=True)


FAMILY = Family(ARCHITECTURE, "gemma3", read)
