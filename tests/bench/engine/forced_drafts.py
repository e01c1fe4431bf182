"""Drafts of a given acceptance: the tokens of an earlier run, each replaced by a wrong one with the rest's chance."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from baton.worker.core import Int32, RowInit
from baton.worker.executors.base import ServingExecutor
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.speculation.proposer import EachRow
from baton.worker.speculation.speculator import Speculator

_MOST_ROWS = 4096

Answers = Mapping[bytes, list[int]]  # the output of each prompt, by the bytes of its int32 tokens


class ForcedProposer:
    """Implements RowProposer: guesses the known next tokens, each right with a given chance."""

    def __init__(self, answers: Answers, acceptance: float, vocab_size: int) -> None:
        self._answers = answers
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._rows: dict[int, tuple[int, list[int]]] = {}  # prompt tokens, and the output that follows

    def admit(self, init: RowInit) -> None:
        prompt = init.token_ids[: init.num_prompt_tokens]
        self._rows[init.row] = (len(prompt), self._answers[prompt.tobytes()])

    def free(self, row: int, token_ids: Int32) -> None:
        self._rows.pop(row, None)

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        num_prompt, answer = self._rows[row]
        begun = len(token_ids) - num_prompt
        guessed = np.array(answer[begun : begun + most], np.int32)
        wrong = np.array([self._random.random() >= self._acceptance for _ in guessed], np.bool_)
        return np.where(wrong, (guessed + 1) % self._vocab_size, guessed).astype(np.int32)


def force(executor: ServingExecutor, answers: Answers, acceptance: float) -> None:
    """Replaces an idle executor's proposer, and what it has learned of the last one."""
    vocab_size = executor.model.vocab_size
    proposer = EachRow(ForcedProposer(answers, acceptance, vocab_size))
    speculator = Speculator(proposer, "forced", _MOST_ROWS, vocab_size)
    if isinstance(executor, CpuExecutor):
        executor._drafts._speculator = speculator
        return
    from baton.worker.executors.cuda.executor import CudaExecutor  # needs Triton

    assert isinstance(executor, CudaExecutor)
    assert executor.verified is not None, "it is started with speculation"
    executor.verified.speculator = speculator
