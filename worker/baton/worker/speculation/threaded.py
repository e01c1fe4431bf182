"""A proposer of a plugin on a thread of its own, so that one that hangs costs its requests' drafts and no step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from baton.worker.core import Int32, RowInit
from baton.worker.speculation.interface import TokenProposer
from baton.worker.speculation.proposer import Ask

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.2  # that a step waits
_NOTHING = np.empty(0, np.int32)
_NO_TOKEN = np.iinfo(np.int32).max
_Work = Callable[[TokenProposer], None]


class ThreadedProposer:
    """Implements Proposer. Rows that are asked for while it hangs get an error; while it hangs on, others get nothing.

    `make` runs in the thread too. A plugin that holds Python's lock for good cannot be caught.
    """

    costly = False

    def __init__(self, make: Callable[[], TokenProposer], name: str, patience: float = PATIENCE_SECONDS) -> None:
        """Raises what `make` raises."""
        self._name = name
        self._patience = patience
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._hung: threading.Event | None = None  # set when what hangs has returned
        self._failed: dict[int, Exception] = {}  # rows whose `admit` raised
        made = _Made()
        threading.Thread(target=self._run, args=(make, made), name=f"proposer-{name}", daemon=True).start()
        made.done.wait()
        if made.error is not None:
            raise made.error

    def admit(self, init: RowInit) -> None:
        row, prompt = int(init.row), init.token_ids[: init.num_prompt_tokens].copy()

        def work(proposer: TokenProposer) -> None:
            self._failed.pop(row, None)
            try:
                proposer.admit(row, prompt, init.namespace)
            except Exception as error:
                self._failed[row] = error

        self._work.put(work)

    def free(self, row: int, token_ids: Int32) -> None:
        output = token_ids.copy()
        self._work.put(lambda proposer: proposer.free(row, output))

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        if self._hung is not None and not self._hung.is_set():
            return [_NOTHING] * len(asked)
        self._hung = None
        answers: list[Int32 | Exception] = []
        copies = [Ask(ask.row, ask.token_ids.copy(), ask.most) for ask in asked]
        done = threading.Event()

        def work(proposer: TokenProposer) -> None:
            for ask in copies:
                answers.append(self._answer(proposer, ask))
            done.set()

        began = time.monotonic()
        self._work.put(work)
        if done.wait(self._patience):
            return answers
        self._hung = done
        waited = time.monotonic() - began
        late = TimeoutError(f"the proposer {self._name} has not returned after {waited:.2f} s")
        known = list(answers)
        # Of the rows behind the one that hangs nothing is known, and they may be asked for again.
        return [*known, late, *[_NOTHING] * (len(asked) - len(known) - 1)][: len(asked)]

    def sleep(self) -> int:
        """Returns 0: a plugin's memory is its own."""
        return 0

    def close(self) -> None:
        """Ends the thread once it has nothing left to do. Does not wait for it."""
        self._work.put(None)

    def _answer(self, proposer: TokenProposer, ask: Ask) -> Int32 | Exception:
        if (known := self._failed.get(ask.row)) is not None:
            return known
        try:
            found = np.asarray(proposer.propose(*ask), np.int64).clip(-1, _NO_TOKEN)
        except Exception as error:
            return error
        return np.asarray(found, np.int32)

    def _run(self, make: Callable[[], TokenProposer], made: _Made) -> None:
        try:
            proposer = make()
        except Exception as error:
            made.error = error
            return
        finally:
            made.done.set()
        while (work := self._work.get()) is not None:
            try:
                work(proposer)
            except Exception:
                # `free` alone gets here; the row's request has ended.
                _log.exception("the proposer %s failed at the end of a request", self._name)


class _Made:
    """The end of a plugin's start."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
