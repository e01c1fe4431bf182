"""The kvstore as a process: its cost, and its cleanup."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from support.processes import ports
from support.processes.stack import wait_until

from baton.kvstore.store import embedded_redis
from baton.services.up.readiness import is_ready
from baton.services.up.tandem import Probe


@pytest.fixture
def folder():
    """A short path: the embedded server's socket must fit into it."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def process(folder):
    """A kvstore with its embedded server, with a temporary folder of its own."""
    (port,) = ports.free_ports(1)
    words = [sys.executable, "-m", "baton.services.cli", "kvstore", "--listen", f"127.0.0.1:{port}"]
    environ = {**os.environ, "TMPDIR": str(folder)}
    process = psutil.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: asyncio.run(is_ready(Probe.GRPC_HEALTH, f"127.0.0.1:{port}")), "ready", 20)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(5)
        process.stdout.close()


def redis_of(process):
    (server,) = [child for child in process.children(recursive=True) if "redis" in child.name()]
    return server


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_nothing_stays(process, number, folder):
    server = redis_of(process)
    assert list(folder.iterdir())
    process.send_signal(number)
    assert process.wait(20) == 0
    wait_until(lambda: is_gone(server), "its server is gone")
    assert list(folder.iterdir()) == []


def test_a_killed_one_takes_its_server_with_it(process):
    server = redis_of(process)
    process.kill()
    process.wait(20)
    wait_until(lambda: is_gone(server), "its server is gone")


def test_it_is_small(process):
    assert process.memory_info().rss < 150e6
    loaded = {os.path.basename(one.path) for one in process.memory_maps()}
    assert not [name for name in loaded if name.startswith("libtorch")]


def test_leftovers_of_a_killed_process_are_removed_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young, used = (tmp_path / f"baton-kvstore-{name}" for name in ("left", "young", "used"))
    for folder in (left, young, used):
        folder.mkdir()
    for folder in (left, used):
        os.utime(folder, (1, 1))
    holder = os.open(used, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    embedded_redis._sweep()
    os.close(holder)
    assert sorted(tmp_path.iterdir()) == [used, young]


def test_a_temporary_folder_that_cannot_be_written_is_one_line():
    environ = {**os.environ, "TMPDIR": "/proc"}
    words = [sys.executable, "-c", _ONLY_IN_PROC]
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert "cannot create a folder for its socket" in ended.stderr
    assert "Traceback" not in ended.stderr


_ONLY_IN_PROC = """
import sys, tempfile
from baton.services.cli import main
tempfile.tempdir = "/proc"  # where /tmp can be written, the module would choose that
sys.exit(main(["kvstore", "--listen", "127.0.0.1:0"]))
"""
