"""Sends the engine process's log records to its front, which writes all of a worker's log in one format."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from typing import Any

from baton.worker.link.ends import EngineEnd
from baton.worker.link.frames import Kind

_STANDARD = frozenset(vars(logging.makeLogRecord({})))
# The engine appends a serial number to request ids; logs show the id that all services share.
_SERIAL = re.compile(r"#[ep]\d+$")
_KEPT = ("name", "levelno", "levelname", "created", "msecs", "pathname", "lineno", "funcName", "threadName")


class LinkLogHandler(logging.Handler):
    """Sends records over the link. Thread-safe. Made on the engine's thread."""

    def __init__(self, link: EngineEnd) -> None:
        super().__init__()
        self._link = link
        self._engine_thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Sends the record at once; what the engine's loop says of a request goes with the loop's next frames."""
        payload = json.dumps(fields_of(record), default=str).encode()
        of_request = hasattr(record, "request_id") and record.levelno <= logging.INFO
        if of_request and record.thread == self._engine_thread:
            self._link.send(Kind.LOG, 0, payload)
        else:
            self._link.post(Kind.LOG, payload=payload)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Returns a record as plain values, with its formatted text."""
    message = record.getMessage()
    if record.exc_info:
        message += "\n" + logging.Formatter().formatException(record.exc_info)
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if "request_id" in extra:
        extra["request_id"] = _SERIAL.sub("", str(extra["request_id"]))
    kept = {key: getattr(record, key) for key in _KEPT}
    return {**extra, **kept, "msg": message, "process": os.getpid()}
