"""vLLM's results of a beam search."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt with one of its continuations."""

    tokens: list[int]  # the prompt's, then the output's
    logprobs: list[float] = field(default_factory=list)  # of each output token
    cum_logprob: float = 0.0
    text: str | None = None  # of the prompt and the output
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
