"""A model on a device, for executors: a decoder of ours, or a model of Transformers over the same KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import Decoder, SegmentGraphs, Step
from baton.worker.models.hidden_states import HiddenStates
from baton.worker.models.weights import ModelWeights


class Weights(Protocol):
    """The tensors of a model."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""

    def tensors(self) -> list[Tensor]:
        """Returns each tensor once, in an order that is the same for all models of one architecture."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns weights with `change` applied to each tensor, once to a shared one."""


S = TypeVar("S", bound=Step)


class Model(Protocol[S]):
    """A model's weights on a device, and the order of its ops."""

    weights: Any  # Weights; graphs that were recorded before they are replaced still read the old ones

    def forward(
        self,
        step: S,
        graphs: SegmentGraphs[S] | None = None,
        on_written: Callable[[int], None] | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> Tensor:
        """Writes the step's keys and values. Returns what `logits` takes, [num_tokens, hidden_size]. Calls `on_written`
        with each layer once its keys and values are written or the write is queued. Fills `hidden_states`, which models
        of Transformers do not have."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the logits [num_rows, vocab_size] of rows that `forward` returned."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the last hidden states of rows that `forward` returned, as the model's own code has them."""

    def pooled(self, vectors: Tensor) -> Tensor:
        """Returns the pooler's linears of vectors [num_vectors, hidden_size]."""


def make_model(config: ModelConfig, weights: Weights, device: Device[S]) -> Model[S]:
    """Returns the model that computes a config."""
    if config.transformers is None:
        assert isinstance(weights, ModelWeights), "weights are built by the config"
        return Decoder(config, weights, device)
    from baton.worker.models.transformers_backend.model import TransformersModel
    from baton.worker.models.transformers_backend.weights import TransformersWeights

    assert isinstance(weights, TransformersWeights), "weights are loaded by the config"
    return TransformersModel(config, weights, device)
