"""Limits how often a request restarts on another worker, and blames it for deaths it causes. Pure; knows no worker.

A worker that dies, or fails a step, while it computes the request counts once against the request, however many of its
choices ran there. So does a prefill worker that dies while it computes the prompt. A worker where the request was only
queued does not count. The second counted death ends the request, so that no third worker gets it.

After LET_OFF_TOKENS tokens since the last death the count restarts: the death was a coincidence, because a request that
kills workers does so at the same token again. MAX_DEATHS deaths end even such a request.

A worker that was never reached, is silent, or drains does not count. A choice moves at most MAX_MOVES times in a row
without a new token, with growing pauses after FREE_MOVES, and leaves a stalled device MAX_STALLS times. A refusal is
retried MAX_REFUSALS times.
"""

from __future__ import annotations

import enum

from baton.rpc.errors import InternalError, ServiceError, Unavailable

LET_OFF_TOKENS = 16
MAX_BLAMED_DEATHS = 2
MAX_DEATHS = 5
MAX_MOVES = 8
FREE_MOVES = 2
FIRST_PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 1.0
MAX_STALLS = 2
MAX_REFUSALS = 2


class Loss(enum.Enum):
    """How a worker lost a choice."""

    DIED = "died"  # its process or step failed while it ran the choice
    GONE = "gone"  # nothing shows that it ran the choice, or that the choice is the cause
    REFUSED = "refused"  # it is reachable and refused the choice


class PoisonousRequest(InternalError):
    """A request whose workers die. Not retryable, because another attempt would kill another worker."""


class WorkerLost(Unavailable):
    """The stream to a worker ended. `loss` classifies it for a request on the stream."""

    loss = Loss.GONE


def loss_of(error: ServiceError) -> Loss:
    """Returns how a worker lost a choice, judged by the error."""
    if isinstance(error, WorkerLost):
        return error.loss
    if isinstance(error, InternalError):
        return Loss.DIED
    return Loss.GONE if isinstance(error, Unavailable) else Loss.REFUSED


def may_move(error: ServiceError) -> bool:
    """Returns whether another worker may succeed."""
    return error.retryable or loss_of(error) is Loss.DIED


class RetryBudget:
    """The retry budget of one request. Raises the error that ends the request."""

    def __init__(self, num_choices: int) -> None:
        self._refusals = [0] * num_choices
        self._moves = [0] * num_choices
        self._stalls = [0] * num_choices
        self._tokens = [0] * num_choices  # output tokens at the choice's last move
        self._tokens_at_death = [0] * num_choices  # output tokens at the last death counted against the request
        self._stories: list[str] = []  # one text per death counted against the request
        self._last_death: object = None
        self._num_deaths = 0

    def spend(self, choice: int, num_tokens: int, error: ServiceError, worker: object) -> None:
        """Pays for moving a choice that lost its worker. Raises the error for the client if the budget is spent.

        `num_tokens` is the choice's output so far. `worker` is the same for choices that were lost together.
        """
        if not may_move(error):
            raise error
        self._note(choice, num_tokens)
        loss = loss_of(error)
        if loss is Loss.REFUSED:
            self._refusals[choice] += 1
        else:
            self._moves[choice] += 1
        if self._refusals[choice] > MAX_REFUSALS or self._moves[choice] > MAX_MOVES:
            raise error
        if loss is Loss.DIED:
            self._blame(choice, num_tokens, error, worker)

    def pause_seconds(self, choice: int) -> float:
        """Returns how long the current move waits; it grows with consecutive moves without a token."""
        fruitless = self._moves[choice] - FREE_MOVES
        return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (fruitless - 1)) if fruitless > 0 else 0.0

    def blame_prefill(self, choice: int, num_tokens: int, error: ServiceError, worker: object) -> None:
        """Counts the death of a prefill worker that had the request's prompt.

        Raises PoisonousRequest for repeated deaths.
        """
        self._blame(choice, num_tokens, error, worker)

    def may_leave(self, choice: int, num_tokens: int) -> bool:
        """Returns whether a choice may leave a worker whose device is stalled, and counts it as a move."""
        self._note(choice, num_tokens)
        self._stalls[choice] += 1
        return self._stalls[choice] <= MAX_STALLS

    def _note(self, choice: int, num_tokens: int) -> None:
        if num_tokens > self._tokens[choice]:
            self._tokens[choice] = num_tokens
            self._moves[choice] = self._refusals[choice] = self._stalls[choice] = 0

    def _blame(self, choice: int, num_tokens: int, error: ServiceError, worker: object) -> None:
        since, self._tokens_at_death[choice] = num_tokens - self._tokens_at_death[choice], num_tokens
        if worker == self._last_death:
            return
        self._last_death = worker
        self._num_deaths += 1
        if since >= LET_OFF_TOKENS:
            self._stories.clear()
        self._stories.append(f"{error.worker_id or 'a worker'} after {num_tokens} tokens: {error.message}")
        if len(self._stories) >= MAX_BLAMED_DEATHS or self._num_deaths >= MAX_DEATHS:
            raise PoisonousRequest(
                f"{self._num_deaths} workers died or failed while they ran this request; it is not sent to "
                f"another one ({'; '.join(self._stories)})",
                phase=error.phase,
                worker_id=error.worker_id,
            ) from error
