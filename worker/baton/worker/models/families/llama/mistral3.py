"""Mistral Small 3 and Ministral 3 with a vision tower, which is not used: requests are text."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.llama import ministral3, mistral
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_text_part

ARCHITECTURE = "Mistral3ForConditionalGeneration"
_TEXT = {"mistral": mistral.read, "ministral3": ministral3.read}


def read(fields: Fields) -> ModelConfig:
    """Reads the text model."""
    text = read_text_part(fields, {})
    kind = text.text("model_type", default="mistral")
    if kind not in _TEXT:
        raise text.error("model_type", f"one of {', '.join(_TEXT)}")
    config = _TEXT[kind](text)
    return replace(config, architecture=ARCHITECTURE, names=config.names.of_text(), text_part=True)


FAMILY = Family(ARCHITECTURE, "mistral3", read)
