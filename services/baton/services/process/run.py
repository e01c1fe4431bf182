"""Runs one service as a process: settings, logs, signals, exit codes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.services import extras, settings
from baton.services.process import logs
from baton.services.process.signals import watch_signals

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)

Serve = Callable[[Any, asyncio.Event], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """The settings that every service has."""

    log_format: str = field(default="text", metadata={"help": "How log lines look.", "choices": ("text", "json")})
    log_level: str = field(
        default="info", metadata={"help": "The least level logged.", "choices": ("debug", "info", "warning", "error")}
    )
    log_config: str = field(
        default="",
        metadata={
            "help": "A JSON file for Python's logging.config.dictConfig, which goes before log_format and log_level.",
            "metavar": "PATH",
        },
    )
    parent_pid: int = field(
        default=0,
        metadata={"help": "Stop when this process, the parent, ends. 0: never.", "minimum": 0, "metavar": "PID"},
    )


def run_service(
    name: str,
    config_type: type,
    load_serve: Callable[[], Serve],
    argv: Sequence[str],
    environ: Mapping[str, str],
    description: str,
) -> int:
    """Runs a service until SIGTERM or SIGINT. Returns the process's exit code."""
    try:
        config, process = settings.load(name, (config_type, ProcessConfig), argv, environ, description)
    except settings.SettingsError as error:
        print(f"baton {name}: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    try:
        logs.configure(name, process.log_format, process.log_level, config_file=process.log_config)
    except logs.LogConfigError as error:
        print(f"baton {name}: {error}", file=sys.stderr)
        return EXIT_MISCONFIGURED
    if process.parent_pid:
        _stop_with(process.parent_pid)
    if getattr(config, "processes", 1) > 1:
        from baton.services.process.several import several

        return _run(name, config, several(name, argv, environ))
    return _run(name, config, load_serve())


def _run(name: str, config: Any, serve: Serve) -> int:
    import uvloop

    from baton.rpc.errors import InvalidRequest, ServiceError

    # A full garbage collection would pass over all that was imported, while all streams wait for tens of milliseconds.
    gc.freeze()
    try:
        uvloop.run(_until_signalled(serve, config))
    except InvalidRequest as error:
        options = settings.options_of(name, type(config))
        _log.error("%s cannot start: %s", name, settings.with_flags(error.message, options))
        return EXIT_MISCONFIGURED
    except ModuleNotFoundError as error:
        _log.error("%s cannot start: %s", name, extras.advice(name, (error.name or str(error)).partition(".")[0]))
        return EXIT_FAILED
    except ServiceError as error:
        _log.error("%s stopped: %s", name, error.message)
        return EXIT_FAILED
    except Exception:
        _log.exception("%s failed", name)
        return EXIT_FAILED
    return EXIT_OK


async def _until_signalled(serve: Serve, config: Any) -> None:
    stop = asyncio.Event()
    watch_signals(stop, _leave)
    await serve(config, stop)


def _leave(number: signal.Signals) -> None:
    _log.warning("%s again: leaving without a drain", number.name)
    os._exit(128 + number)


def _stop_with(parent_pid: int) -> None:
    """Asks the kernel for a SIGTERM when the parent ends (Linux); the parent may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)
