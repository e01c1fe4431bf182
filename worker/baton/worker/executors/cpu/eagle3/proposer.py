"""Drafts by an EAGLE-3 head on the CPU: from the model's hidden states of three layers, and the next token.

A row's keys and values are those of the tokens that this worker computed for it: a prefix from the cache or of a
prefill worker has none, and the head does not attend to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton.worker.core import Int32, RowInit, StepPlan
from baton.worker.executors.cpu.eagle3.layer import Eagle3Layer, Grown, Piece
from baton.worker.executors.host.eagle3 import Eagle3Head
from baton.worker.sampling.candidates import Draws
from baton.worker.sampling.draw import draw_tokens
from baton.worker.speculation.proposer import Ask

CATCH_UP_TOKENS = 512  # of all rows in a step; rows with more get no drafts until they are computed
_LOW_64 = 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True)
class _Row:
    """What the head knows of a request, by position."""

    hidden: Grown  # h of positions before `known`
    kv: Grown  # of positions before `done`, and of earlier drafts behind them
    num_prompt_tokens: int
    temperature: float
    seed: int
    known: int = 0
    done: int = 0


@dataclass(slots=True)
class _Guess:
    """A row whose next tokens are being guessed."""

    ask: Ask
    row: _Row
    last: Tensor  # r of its last token, [hidden_size]
    drafts: list[int] = field(default_factory=list)


class Eagle3Proposer:
    """Implements Proposer, and reads the model's hidden states."""

    costly = True

    def __init__(self, head: Eagle3Head, longest: int, vocab_size: int) -> None:
        """`longest`: tokens of a request; `vocab_size`: of the model."""
        self.hidden_layers = head.config.layers
        self._layer = Eagle3Layer(head, longest)
        self._hidden_size = head.config.hidden_size
        self._longest = longest
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}

    def admit(self, init: RowInit) -> None:
        """Begins a row of which nothing is known."""
        sampling = init.sampling
        hidden = Grown((), self._hidden_size, self._layer.dtype)
        self._rows[int(init.row)] = _Row(
            hidden, self._layer.new_kv(), init.num_prompt_tokens, sampling.temperature, sampling.seed & _LOW_64
        )

    def free(self, row: int, token_ids: Int32) -> None:
        """Forgets what is kept of a row."""
        self._rows.pop(row, None)

    def sleep(self) -> int:
        """Returns 0: rows are dropped with their requests."""
        return 0

    def close(self) -> None:
        """Does nothing."""

    def take_hidden(self, plan: StepPlan, hidden: Tensor) -> None:
        """Stores the hidden states [plan.num_tokens, len(hidden_layers) * hidden_size] of a computed step."""
        combined, start = self._layer.combined(hidden), 0
        columns = (plan.rows.tolist(), plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist())
        for number, first, count in zip(*columns, strict=True):
            row = self._rows.get(number)
            if row is not None:
                self._store(row, first, combined[start : start + count])
            start += count

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        with torch.inference_mode():
            guesses = self._catch_up(asked)
            active = list(guesses.values())
            while active:
                self._draw(active)
                active = [guess for guess in active if len(guess.drafts) < guess.ask.most]
                if active:
                    self._follow(active)
        return [np.array(guesses[ask.row].drafts if ask.row in guesses else (), np.int32) for ask in asked]

    def _store(self, row: _Row, first: int, combined: Tensor) -> None:
        if first > row.known or row.known == 0:  # what is before was computed elsewhere
            row.hidden.start = row.kv.start = row.done = first
        row.hidden.write(first, combined)
        # Those behind a wrong draft are overwritten.
        row.known, row.done = first + len(combined), min(row.done, first)

    def _catch_up(self, asked: Sequence[Ask]) -> dict[int, _Guess]:
        """Computes the known tokens, within a step's limit. Returns the rows that have all of them."""
        spare, taken = CATCH_UP_TOKENS, list[tuple[Ask, _Row, int, int]]()
        for ask in asked:
            row = self._rows.get(ask.row)
            end = len(ask.token_ids) - 1  # of the last one, no hidden state is known
            if row is None or row.known < end or len(ask.token_ids) + ask.most > self._longest:
                continue
            count = min(end - row.done, spare)
            if count > 0:
                taken.append((ask, row, count, end))
                spare -= count
        if not taken:
            return {}
        hidden = torch.cat([row.hidden.read(row.done, row.done + count) for _, row, count, _ in taken])
        behind = [ask.token_ids[row.done + 1 : row.done + count + 1] for ask, row, count, _ in taken]
        pieces = [Piece(row.kv, row.done, count) for _, row, count, _ in taken]
        found = self._layer.forward(hidden, torch.from_numpy(np.concatenate(behind).astype(np.int64)), pieces)
        guesses, start = {}, 0
        for ask, row, count, end in taken:
            row.done += count
            start += count
            if row.done == end:
                guesses[ask.row] = _Guess(ask, row, found[start - 1])
        return guesses

    def _follow(self, active: Sequence[_Guess]) -> None:
        """Computes the last draft of each row."""
        hidden = torch.stack([guess.last for guess in active])
        token_ids = torch.tensor([guess.drafts[-1] for guess in active])
        pieces = [Piece(guess.row.kv, guess.row.done + len(guess.drafts) - 1, 1) for guess in active]
        for guess, last in zip(active, self._layer.forward(hidden, token_ids, pieces), strict=True):
            guess.last = last

    def _draw(self, active: Sequence[_Guess]) -> None:
        """Draws the next draft of each row, with the noise that the verified token will have."""
        logits = self._layer.logits(torch.stack([guess.last for guess in active]), self._vocab_size).numpy()
        count = len(active)
        draws = Draws(
            np.array([guess.row.temperature for guess in active], np.float32),
            np.zeros(count, np.int64),
            np.ones(count, np.float32),
            np.zeros(count, np.float32),
            np.array([guess.row.seed for guess in active], np.uint64),
        )
        known = [len(guess.ask.token_ids) + len(guess.drafts) - guess.row.num_prompt_tokens for guess in active]
        for guess, token_id in zip(active, draw_tokens(logits, draws, np.array(known)).tolist(), strict=True):
            guess.drafts.append(token_id)
