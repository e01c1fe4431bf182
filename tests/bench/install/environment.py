"""A new virtual environment: what is installed there, and its `baton serve`, each with its time."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import threading
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

_START_SECONDS = 120.0
_READY = re.compile(r"Baton is ready: (http://\S+)")


@dataclass(frozen=True)
class Spent:
    """The time of one command, and of all processes that it started."""

    seconds: float
    cpu_seconds: float

    def texts(self) -> tuple[str, str]:
        """Returns the two cells of a table."""
        return f"{self.seconds:.1f}", f"{self.cpu_seconds:.1f}"


class Environment:
    """The environment, which is removed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"

    def __enter__(self) -> Environment:
        venv.create(self._folder, with_pip=True, symlinks=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self._folder)

    def install(self, tool: str, packages: Path, *words: str) -> Spent:
        """Installs from a folder of wheels with pip or uv. Raises CalledProcessError, RuntimeError without uv."""
        start = [str(self._bin / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
        if tool == "uv":
            program = shutil.which("uv")
            if program is None:
                raise RuntimeError("uv is not installed; pip install uv, or leave it out of --ways")
            start = [program, "pip", "install", "--python", str(self._bin / "python")]
        options = ["--quiet", "--no-index", "--find-links", str(packages)]
        began, cpu = time.monotonic(), _cpu_seconds()
        done = [*start, *options, *words]
        subprocess.run(done, env=_variables(), cwd=self._folder, check=True, capture_output=True, text=True)
        return Spent(time.monotonic() - began, _cpu_seconds() - cpu)

    def serve(self) -> Spent:
        """Starts `baton serve`, and ends it after the first streamed token. Raises RuntimeError."""
        began, cpu = time.monotonic(), _cpu_seconds()
        with self._server() as url:
            first_token(url)
            seconds = time.monotonic() - began
        return Spent(seconds, _cpu_seconds() - cpu)

    @contextmanager
    def _server(self) -> Iterator[str]:
        """Yields the URL of a ready server."""
        words = [str(self._bin / "baton"), "serve", "--port", "0", "--grpc-listen", "127.0.0.1:0"]
        process = subprocess.Popen(
            words, cwd=self._folder, env=_variables(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        limit = threading.Timer(_START_SECONDS, process.kill)
        limit.start()
        lines: list[str] = []
        try:
            assert process.stdout is not None, "its output is a pipe"
            for line in process.stdout:
                lines.append(line)
                if found := _READY.search(line):
                    limit.cancel()
                    yield found[1]
                    return
            raise RuntimeError(f"baton serve did not become ready: {''.join(lines[-5:])}")
        finally:
            limit.cancel()
            process.terminate()
            process.communicate(timeout=_START_SECONDS)


def first_token(url: str) -> str:
    """Returns the first text that the model streams. Raises RuntimeError if there is none."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_START_SECONDS)
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8, "stream": True}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        for line in answer:
            data = line.removeprefix(b"data: ").strip()
            if answer.status == http.client.OK and data.startswith(b"{"):
                for choice in json.loads(data)["choices"]:
                    if text := choice["delta"].get("content"):
                        return str(text)
    finally:
        connection.close()
    raise RuntimeError(f"{url} streamed no token: HTTP status {answer.status}")


def size_of(wheel: Path) -> tuple[int, int]:
    """Returns the number of files of a wheel and their bytes."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.infolist()
    return len(files), sum(one.file_size for one in files)


def _cpu_seconds() -> float:
    """Returns the CPU time of ended child processes and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def _variables() -> dict[str, str]:
    """Returns this process's variables without what would replace the installed package, or keep bytecode unwritten."""
    left_out = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in left_out}
