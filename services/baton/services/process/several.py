"""One gateway as several processes that share its addresses: starts them, and ends all if one ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from baton.rpc.address import split_address
from baton.rpc.errors import Unavailable
from baton.services.ports import HeldPorts, why_unusable

_log = logging.getLogger(__name__)

_ADDRESSES = ("rest_listen", "grpc_listen", "ext_authz_listen")
_STOP_SECONDS = 10.0  # beyond the drain's timeout

Serve = Callable[[Any, asyncio.Event], Coroutine[Any, Any, None]]


def several(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> Serve:
    """Returns a function that runs config.processes processes of a service until it is stopped."""

    async def serve(config: Any, stop: asyncio.Event) -> None:
        config.validate()
        limits = ("--limit-replicas", str(config.limit_replicas * config.processes))
        with HeldPorts() as held, tempfile.TemporaryDirectory(prefix=f"baton-{name}-") as folder:
            flags = (*_listen_flags(config, held), *limits)
            own = ("--processes", "1", "--metrics-folder", folder, "--parent-pid", str(os.getpid()))
            words = (sys.executable, "-m", "baton.services.cli", name, *argv, *flags, *own)
            children = [
                await asyncio.create_subprocess_exec(*words, env=dict(environ)) for _ in range(config.processes)
            ]
            _log.info("%d processes share the addresses", len(children), extra={"pids": [one.pid for one in children]})
            try:
                failure = await _first_end(children, stop)
            finally:
                await _end(children, config.drain_timeout + _STOP_SECONDS)
        if failure:
            raise Unavailable(failure)

    return serve


def _listen_flags(config: Any, held: HeldPorts) -> list[str]:
    """Returns flags with the ports that all processes share. Raises Unavailable for an address in use."""
    flags: list[str] = []
    for field in _ADDRESSES:
        address = getattr(config, field)
        if not address:
            continue
        if problem := why_unusable(address):
            raise Unavailable(f"cannot listen on {field}={address}: {problem}", field=field)
        host, port = split_address(address, field)
        if not port:
            port = held.choose(1, host.strip("[]"))[0]
        flags += ("--" + field.replace("_", "-"), f"{host}:{port}")
    return flags


async def _first_end(children: Sequence[asyncio.subprocess.Process], stop: asyncio.Event) -> str:
    """Returns how a child ended by itself; empty once `stop` is set."""
    tasks = [asyncio.ensure_future(stop.wait()), *(asyncio.ensure_future(one.wait()) for one in children)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    ended = [number for number, one in enumerate(children) if one.returncode is not None]
    if stop.is_set() or not ended:
        return ""
    number = ended[0]
    code = children[number].returncode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"stopped with exit code {code}"
    return f"process {number + 1} of {len(children)} (pid {children[number].pid}) {how}; all end with it"


async def _end(children: Sequence[asyncio.subprocess.Process], seconds: float) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(child.wait() for child in children))
    except TimeoutError:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await asyncio.gather(*(child.wait() for child in children))
