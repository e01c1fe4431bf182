"""Records what a proposer is asked for, and what it guesses."""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.core import Int32
from baton.worker.speculation.proposer import Ask, Proposer


def watched(proposer: Proposer) -> list[tuple[list[int], list[int]]]:
    """Returns a list that gets each text that the proposer is asked for, and its guess."""
    seen: list[tuple[list[int], list[int]]] = []
    own = proposer.propose

    def propose(asked: Sequence[Ask]) -> list[Int32 | Exception]:
        texts = [ask.token_ids.tolist() for ask in asked]
        answers = own(asked)
        for text, answer in zip(texts, answers, strict=True):
            assert not isinstance(answer, Exception)
            seen.append((text, answer.tolist()))
        return answers

    proposer.propose = propose  # type: ignore[method-assign]
    return seen
