"""Repeats what the executor logs of its start: its phases, and the kernels that it compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOGGER = "baton.worker.executors"


@contextmanager
def start_said(say: Callable[[str], None]) -> Iterator[None]:
    """Passes the executor's log lines from INFO on to `say`."""
    logger, handler = logging.getLogger(_LOGGER), _Saying(say)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class _Saying(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())
