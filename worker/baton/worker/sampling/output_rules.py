"""What one request's output says of its next token: sequences that may not come, an end of reasoning that must.

A function of the output alone, so it is the same after a preemption, a hand-over and a failover.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.worker.core import ReasoningLimit, SamplingParams


class OutputRules:
    """One request's, kept up as its output grows."""

    def __init__(self, sampling: SamplingParams, output_token_ids: Iterable[int]) -> None:
        self._limit = sampling.reasoning_limit
        self._output = list(output_token_ids)
        self._last: dict[tuple[int, ...], list[int]] = {}  # the last tokens of sequences, by the others
        for sequence in sampling.forbidden_sequences:
            self._last.setdefault(sequence[:-1], []).append(sequence[-1])
        self._lengths = sorted({len(prefix) for prefix in self._last})

    def add(self, token_id: int) -> None:
        """One more output token."""
        self._output.append(token_id)

    def forbidden(self) -> list[int]:
        """Tokens that may not come next."""
        found: list[int] = []
        size = len(self._output)
        for length in self._lengths:
            if length > size:
                break
            found += self._last.get(tuple(self._output[size - length :]), ())
        return found

    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        limit = self._limit
        if limit is None:
            return None
        first = first_forced(limit)
        index = len(self._output) - first
        if not 0 <= index < len(limit.end_token_ids) or not _reasons(limit, self._output[:first]):
            return None
        return limit.end_token_ids[index]


def has_rules(sampling: SamplingParams) -> bool:
    """Whether a request has any."""
    return bool(sampling.forbidden_sequences) or sampling.reasoning_limit is not None


def first_forced(limit: ReasoningLimit) -> int:
    """How many output tokens go before the end that is put in."""
    return limit.max_tokens + (limit.start_token_id is not None)


def _reasons(limit: ReasoningLimit, output: Sequence[int]) -> bool:
    """Whether these tokens begin a reasoning, and do not end it."""
    begin = 0
    if limit.start_token_id is not None:
        if not output or output[0] != limit.start_token_id:
            return False
        begin = 1
    end = list(limit.end_token_ids)
    return all(output[at : at + len(end)] != end for at in range(begin, len(output) - len(end) + 1))
