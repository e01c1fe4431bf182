"""New models whose biases and norms are random too, so that a test sees where they are lost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel


def with_random_vectors(make: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """Makes a model with random norms around 1 and random biases."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.2)
    return model
