"""Rules for a request's next token by its output: forbidden sequences, and the forced end of reasoning.

They depend only on the output, so they are the same after a preemption, a hand-over and a failover.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.worker.core import ReasoningLimit, SamplingParams


class OutputRules:
    """The rules of one request, updated as its output grows."""

    def __init__(self, sampling: SamplingParams, output_token_ids: Iterable[int]) -> None:
        self._limit = sampling.reasoning_limit
        self._output = list(output_token_ids)
        self._last: dict[tuple[int, ...], list[int]] = {}  # last tokens of sequences, by their other tokens
        for sequence in sampling.forbidden_sequences:
            self._last.setdefault(sequence[:-1], []).append(sequence[-1])
        self._lengths = sorted({len(prefix) for prefix in self._last})

    def add(self, token_id: int) -> None:
        """Appends an output token."""
        self._output.append(token_id)

    def forbidden(self) -> list[int]:
        """Returns the tokens that cannot be sampled next."""
        found: list[int] = []
        size = len(self._output)
        for length in self._lengths:
            if length > size:
                break
            found += self._last.get(tuple(self._output[size - length :]), ())
        return found

    def forced(self) -> int | None:
        """Returns the token that must be sampled next; None: any."""
        limit = self._limit
        if limit is None:
            return None
        first = first_forced(limit)
        index = len(self._output) - first
        if not 0 <= index < len(limit.end_token_ids) or not _reasons(limit, self._output[:first]):
            return None
        return limit.end_token_ids[index]


def has_rules(sampling: SamplingParams) -> bool:
    """Returns whether a request has rules."""
    return bool(sampling.forbidden_sequences) or sampling.reasoning_limit is not None


def first_forced(limit: ReasoningLimit) -> int:
    """Returns the number of output tokens before the forced end."""
    return limit.max_tokens + (limit.start_token_id is not None)


def _reasons(limit: ReasoningLimit, output: Sequence[int]) -> bool:
    """Returns whether these tokens begin reasoning and do not end it."""
    begin = 0
    if limit.start_token_id is not None:
        if not output or output[0] != limit.start_token_id:
            return False
        begin = 1
    end = list(limit.end_token_ids)
    return all(output[at : at + len(end)] != end for at in range(begin, len(output) - len(end) + 1))
