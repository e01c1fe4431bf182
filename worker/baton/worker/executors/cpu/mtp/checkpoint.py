"""Reads the MTP layer of a model's checkpoint, checked against the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.linear import LinearWeights
from baton.worker.models.config import ModelConfig
from baton.worker.models.mtp import read_mtp
from baton.worker.models.supported.families import read_folder
from baton.worker.models.weights import ModelWeights
from baton.worker.weights.files.formats import open_tensors
from baton.worker.weights.filling import load_weights

_FIELD = "speculative_config"


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """An MTP layer as a model of its own."""

    config: ModelConfig
    weights: ModelWeights
    reads_normed: bool  # for further tokens, the layer reads its normed output


def load_mtp(folder: Path, model: ModelConfig, weights: ModelWeights, dtype: torch.dtype) -> MtpLayer:
    """Reads the layer of a model with these weights, whose embedding and head it shares where they are equal.

    Raises InvalidRequest with the first tensors that are missing or misshapen.
    """
    try:
        found = read_mtp(read_folder(folder), model)
        with open_tensors(folder) as tensors:
            filled = load_weights(found.model, tensors, dtype, prefix=found.prefix)
    except InvalidRequest as error:
        if error.field == _FIELD:
            raise
        raise InvalidRequest(f"{_FIELD}: {error.message}", field=_FIELD) from error
    own = filled.weights
    assert isinstance(own, ModelWeights), "families of Baton's have such weights"
    return MtpLayer(filled.config, _shared(own, weights), found.reads_normed)


def _shared(own: ModelWeights, model: ModelWeights) -> ModelWeights:
    """Returns the layer's weights with the model's tensors in place of equal copies."""
    if isinstance(own.embed, Tensor) and isinstance(model.embed, Tensor) and torch.equal(own.embed, model.embed):
        own = replace(own, embed=model.embed)
    return replace(own, lm_head=model.lm_head) if _are_equal(own.lm_head, model.lm_head) else own


def _are_equal(one: LinearWeights, other: LinearWeights) -> bool:
    if one.method is not other.method or one.params.keys() != other.params.keys():
        return False
    return all(torch.equal(tensor, other.params[name]) for name, tensor in one.params.items())
