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
    norm: str = ""  # the name of a norm behind it, of the model's kind


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """What a family puts behind the layers of a classifier."""

    linear: str = "score"  # the name of the last linear
    token_linear: str = "score"  # the same, of classifiers of tokens
    bias: bool = False
    before: tuple[DenseSpec, ...] = ()  # linears before it, of classifiers of texts
    token_before: tuple[DenseSpec, ...] = ()  # the same, of classifiers of tokens
    pick: Pick = "last"
    takes_pairs: bool = False  # as PoolerSpec


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
    takes_pairs: bool = False  # a text may be a pair of two, as cross-encoders take them

    @property
    def modules(self) -> tuple[str, ...]:
        """The folders that hold weights of these linears, beside the model's own file."""
        return tuple(dict.fromkeys(spec.name.rpartition("/")[0] for spec in self.dense if "/" in spec.name))

    def reads_all(self, task: PoolingTask) -> bool:
        """Whether a request needs the hidden states of all tokens, so that none are taken from a cache."""
        return task.by_token or self.pick != "last"
