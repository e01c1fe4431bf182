"""A stopped process is distinguished from one that is slow to answer."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from baton.worker.link.liveness import LivenessProbe, answer_probes, is_stopped


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 5
    while not is_stopped(pid):
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def test_a_silent_process_that_runs_is_left_alone(sleeper) -> None:
    ours, theirs = socket.socketpair()
    told = asyncio.Event()
    probe = LivenessProbe(ours, sleeper.pid, 0.02, told.set)
    probe.probe()
    await asyncio.sleep(0.1)
    assert not told.is_set()
    sleeper.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(5):
        await told.wait()
    theirs.close()


async def test_a_stopped_process_that_answers_is_not_blamed(sleeper) -> None:
    ours, theirs = socket.socketpair()
    told = asyncio.Event()
    probe = LivenessProbe(ours, sleeper.pid, 1.0, told.set)
    sleeper.send_signal(signal.SIGSTOP)
    _wait_until_stopped(sleeper.pid)
    thread = answer_probes(theirs)
    probe.probe()
    await asyncio.sleep(1.1)
    assert not told.is_set()
    probe.close()
    probe.probe()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()


def test_a_process_that_is_gone_is_not_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert not is_stopped(process.pid)
