"""Logs of a process: JSON lines for collectors, or a readable form for people. Owns the root logger's set-up.

A record with the field `report` has one text for people, of several lines, and an object for programs. JSON has the
first line and the object.
"""

from __future__ import annotations

import json
import logging
import logging.config
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

_REPORT = "report"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogConfigError(Exception):
    """The logging configuration file is wrong."""


def configure(service: str, log_format: str, level: str, stream: TextIO | None = None, config_file: str = "") -> None:
    """Sends every logger's records to `stream` (standard error), in the given form; or as `config_file` says.

    Raises LogConfigError that names the file and what is wrong.
    """
    if config_file:
        _configure_from(config_file)
        return
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # It logs every touch of the event loop at debug level.
    logging.getLogger("grpc").setLevel(max(logging.INFO, logging.getLogger().level))


def _configure_from(path: str) -> None:
    try:
        settings = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LogConfigError(f"log_config: cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise LogConfigError(f"log_config: {path} must hold a JSON object, not {type(settings).__name__}")
    try:
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **settings})
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        raise LogConfigError(f"log_config: {path}: {error}{cause}") from error
    logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, logger, message, and every `extra` field."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if _REPORT in entry:
            entry["message"] = entry["message"].partition("\n")[0].rstrip(":")
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`time LEVEL service logger: message key=value ...`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items() if key != _REPORT)
        name = record.name.removeprefix("baton.")
        line = f"{_utc(record.created)} {record.levelname:<7} {self._service} {name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extra(record: logging.LogRecord) -> Mapping[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _utc(seconds: float) -> str:
    return f"{_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
