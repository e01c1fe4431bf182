"""What models say of a text, token by token, and how two of them differ. Runs no model."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LEAST = 1e-12  # of a probability that float32 rounds to 0


@dataclass(frozen=True, slots=True)
class Position:
    """What a model says of one token."""

    token: int  # of the text
    logprobs: Mapping[int, float]  # of the likeliest tokens and of the text's

    @property
    def likeliest(self) -> int:
        return max(self.logprobs, key=lambda token: (self.logprobs[token], -token))


class TextRecord:
    """The log-probabilities of a text's tokens and of the likeliest ones, in 12 bytes each."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._ids = array("i")
        self._logprobs = array("d")
        self._ends = array("q")
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Position]:
        start = 0
        for token, end in zip(self._tokens, self._ends, strict=True):
            yield Position(token, dict(zip(self._ids[start:end], self._logprobs[start:end], strict=True)))
            start = end

    def add(self, position: Position) -> None:
        """Adds the next token."""
        self._tokens.append(position.token)
        self._ids.extend(position.logprobs)
        self._logprobs.extend(position.logprobs.values())
        self._ends.append(len(self._ids))
        self._sum += position.logprobs[position.token]

    @property
    def perplexity(self) -> float:
        """e to the mean of the tokens' negative log-probabilities."""
        return math.exp(-self._sum / len(self))


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a model differs from its reference."""

    agreement: float  # the part of tokens at which both have the same likeliest one
    mean_kl: float  # nats a token
    max_kl: float
    mean_difference: float  # of the log-probabilities of the text's tokens, their magnitude


def compare(reference: TextRecord, model: TextRecord) -> Comparison:
    """Compares the records of one text. Both must have its tokens."""
    agreed, divergences, differences = 0, [], []
    for theirs, ours in zip(reference, model, strict=True):
        assert theirs.token == ours.token, "records are of one text"
        agreed += theirs.likeliest == ours.likeliest
        divergences.append(divergence(theirs.logprobs, ours.logprobs))
        differences.append(abs(theirs.logprobs[theirs.token] - ours.logprobs[ours.token]))
    count = len(divergences)
    return Comparison(agreed / count, sum(divergences) / count, max(divergences), sum(differences) / count)


def divergence(reference: Mapping[int, float], model: Mapping[int, float]) -> float:
    """Returns sum p log(p / q) over the tokens that both list, and all others as one, at most the divergence itself."""
    both = reference.keys() & model.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - model[token]) for token in both)
    rest, other_rest = (max(0.0, 1 - sum(math.exp(one[token]) for token in both)) for one in (reference, model))
    if rest > _LEAST:
        total += rest * math.log(rest / max(other_rest, _LEAST))
    return max(0.0, total)
