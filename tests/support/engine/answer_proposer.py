"""A proposer that guesses the tokens of an earlier run, with mistakes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from baton.worker.core import Int32, Request, RowInit
from baton.worker.executors.cuda.drafts.look_pace import LookPace
from baton.worker.executors.cuda.drafts.verified_steps import VerifiedSteps
from baton.worker.speculation.proposer import EachRow
from baton.worker.speculation.speculator import Speculator

Answers = dict[bytes, list[int]]  # by the bytes of the prompt's int32 tokens


class AnswerProposer:
    """Implements RowProposer. Each token is another one with the chance `mistakes`."""

    def __init__(self, answers: Answers, mistakes: float, seed: int, vocab_size: int) -> None:
        self._answers = answers
        self._mistakes = mistakes
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[int, list[int]]] = {}

    def admit(self, init: RowInit) -> None:
        prompt = init.token_ids[: init.num_prompt_tokens]
        self._rows[init.row] = (len(prompt), self._answers.get(prompt.tobytes(), []))

    def free(self, row: int, token_ids: Int32) -> None:
        self._rows.pop(row)

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        num_prompt, answer = self._rows[row]
        begun = len(token_ids) - num_prompt
        known = answer[begun : begun + self._random.randint(0, most)]
        return np.array([self._mistaken(token_id) for token_id in known], np.int32)

    def _mistaken(self, token_id: int) -> int:
        return self._random.randrange(self._vocab_size) if self._random.random() < self._mistakes else token_id


def answers_of(requests: Iterable[Request]) -> Answers:
    """Returns the output of each finished request."""
    return {request.token_ids.given.tobytes(): list(request.token_ids.generated) for request in requests}


class EveryStep(LookPace):
    """Looks for drafts at every step."""

    def due(self) -> bool:
        return True


def draft_from(speculator: Speculator, answers: Answers, mistakes: float, vocab_size: int) -> None:
    """Makes the drafts mostly right, and all of them verified."""
    speculator._proposer = EachRow(AnswerProposer(answers, mistakes, 3, vocab_size))
    speculator.lengths.choose = lambda rows, available, least_gain=0.0: available  # type: ignore[method-assign]


def draft_always(verified: VerifiedSteps, answers: Answers, mistakes: float, vocab_size: int) -> None:
    """Makes a device's drafts mostly right, and all of them verified, at every step, whether that is faster or not."""
    draft_from(verified.speculator, answers, mistakes, vocab_size)
    verify_always(verified)


def verify_always(verified: VerifiedSteps) -> None:
    """Has a device verify all of the drafts that its proposer finds, at every step, whether that is faster or not."""
    lengths = verified.speculator.lengths
    lengths.choose = lambda rows, available, least_gain=0.0: available  # type: ignore[method-assign]
    lengths.worth = lambda rows: np.ones(len(rows), np.bool_)  # type: ignore[method-assign]
    verified._pace = EveryStep()
