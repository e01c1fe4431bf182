"""Ministral 8B: Mistral's layers, some of which have windows."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.models.config import ModelConfig
from baton.worker.models.families.llama import mistral
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family

ARCHITECTURE = "MinistralForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in their windows."""
    return replace(
        mistral.read(Fields({"sliding_window": 4096, **fields.raw}, fields.source)), architecture=ARCHITECTURE
    )


FAMILY = Family(ARCHITECTURE, "ministral", read)
