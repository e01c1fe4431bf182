"""A model's own sampling defaults as SamplingParams."""

from __future__ import annotations

from baton.gateway.models.served import ServedModel
from baton.llm.parameters.sampling_params import SamplingParams


def default_params(model: ServedModel) -> SamplingParams:
    """Returns the defaults of the model's generation_config.json, and neutral values."""
    values = dict(model.defaults.values)
    return SamplingParams(top_k=int(values.pop("top_k")), **values)  # type: ignore[arg-type]
