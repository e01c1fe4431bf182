"""How often a request may start anew on another worker, and when it is taken for the cause. Pure; knows no worker.

A worker that died, or failed a step, while it computed the request counts against the request, once, however many of
its choices ran there. A prefill worker that died while it computed the prompt counts too. A worker where the request
only waited does not. The second death that counts ends the request: no third worker gets it.

A request that has run on for LET_OFF_TOKENS since the last death starts from zero: it was only near that one, while a
request that ends workers does so at the same place again. MAX_DEATHS workers end even such a request.

A worker that was never reached, is silent, or hands its requests back to drain does not count. A choice moves
MAX_MOVES times in a row without a token in between, from the FREE_MOVES-th on after a growing pause, and leaves a stuck
device MAX_STALLS times. A refusal is passed on MAX_REFUSALS times.
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

    DIED = "died"  # it ran the choice when its process or its step failed
    GONE = "gone"  # nothing says that it ran the choice, or that the choice is the cause
    REFUSED = "refused"  # it is there, and said no


class PoisonousRequest(InternalError):
    """A request whose workers die. Not retryable: another try would end another worker."""


class WorkerLost(Unavailable):
    """The stream to a worker ended. `loss`: what it means for a request that was on it."""

    loss = Loss.GONE


def loss_of(error: ServiceError) -> Loss:
    """What a failure says of the worker."""
    if isinstance(error, WorkerLost):
        return error.loss
    if isinstance(error, InternalError):
        return Loss.DIED
    return Loss.GONE if isinstance(error, Unavailable) else Loss.REFUSED


def may_move(error: ServiceError) -> bool:
    """Whether another worker may do better."""
    return error.retryable or loss_of(error) is Loss.DIED


class RetryBudget:
    """One request's. Raises what ends it."""

    def __init__(self, num_choices: int) -> None:
        self._refusals = [0] * num_choices
        self._moves = [0] * num_choices
        self._stalls = [0] * num_choices
        self._tokens = [0] * num_choices  # of the output, at the choice's last move
        self._tokens_at_death = [0] * num_choices  # at the last one that is held against the request
        self._stories: list[str] = []  # of the workers held against it
        self._last_death: object = None
        self._num_deaths = 0

    def spend(self, choice: int, num_tokens: int, error: ServiceError, worker: object) -> None:
        """A choice lost its worker, after so many tokens of output. Raises the error that the client is to be told.

        `worker`: the same for choices that were lost together.
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
        """How long the move that was just paid for waits: where several in a row brought nothing, time may."""
        fruitless = self._moves[choice] - FREE_MOVES
        return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (fruitless - 1)) if fruitless > 0 else 0.0

    def blame_prefill(self, choice: int, num_tokens: int, error: ServiceError, worker: object) -> None:
        """A prefill worker died with the request's prompt. Raises PoisonousRequest where it is not the first."""
        self._blame(choice, num_tokens, error, worker)

    def may_leave(self, choice: int, num_tokens: int) -> bool:
        """Whether a choice is taken from a worker whose device is stuck; if so, it counts as taken."""
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
                f"{self._num_deaths} workers died or failed while they ran this request, and it is not given to "
                f"another one ({'; '.join(self._stories)})",
                phase=error.phase,
                worker_id=error.worker_id,
            ) from error
