"""What a model that pools makes of its hidden states: embeddings, or scores of classes. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.worker.core import PoolingTask

# The vector of a text: of its first token, of its last one, the mean of all, the largest of each value.
Pick = Literal["first", "last", "mean", "max"]
Squash = Literal["none", "tanh", "gelu", "relu"]
ScoreActivation = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear, and an activation of its output."""

    name: str  # of its tensors, without ".weight"
    in_features: int
    out_features: int
    bias: bool = True
    squash: Squash = "none"


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    """pick -> linears -> normalize, or pick -> linears -> activation of scores.

    By token, the same without `pick`.
    """

    tasks: tuple[PoolingTask, ...]
    width: int  # values of a vector
    pick: Pick
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False  # embeddings have length 1
    cuttable: bool = False  # the model was trained so that the first values of an embedding are one too
    dimensions: tuple[int, ...] = ()  # that they may be cut to; empty: any
    labels: tuple[str, ...] = ()  # of the classes
    score_activation: ScoreActivation = "none"
    max_tokens: int = 0  # of a text; 0: as many as the model takes
    takes_pairs: bool = False  # the model was trained on pairs of texts, and tells the second one apart

    def reads_all(self, task: PoolingTask) -> bool:
        """Whether a request needs the hidden states of all tokens, so that none are taken from a cache."""
        return task.by_token or self.pick != "last"
