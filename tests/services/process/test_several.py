"""A gateway of several processes: one address, one scrape, one end."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.processes.ports import free_ports
from support.processes.stack import ROOT, metric, wait_until

MODEL = ROOT / "models" / "storyteller-7m"


def get(address: str, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def listeners(address: str) -> set[int]:
    """Returns the inodes of sockets that listen at a port."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(words[9]) for words in lines if words[1].endswith(port) and words[3] == "0A"}


@contextlib.contextmanager
def gateway(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    rest, grpc = (f"127.0.0.1:{port}" for port in free_ports(2))
    words = ("gateway", "--rest-listen", rest, "--grpc-listen", grpc, "--router", "127.0.0.1:1", "--model", str(MODEL))
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton.services.cli", *words, *flags], stdout=file, stderr=file
        )
    try:
        yield process, rest, log
    finally:
        process.terminate()
        process.wait(30)


def test_processes_share_addresses_and_scrapes_and_end_together(tmp_path):
    with gateway(tmp_path, "--processes", "2") as (process, rest, log):
        wait_until(lambda: len(listeners(rest)) == 2, "two processes listen", 60)
        for _ in range(20):
            assert get(rest, "/version")[0] == 200
        labels = {"route": "/version", "status": "200"}
        wait_until(
            lambda: metric(get(rest, "/metrics")[1], "baton_gateway_requests_total", **labels) == 20,
            "both processes' requests are counted",
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        victims = [int(pid) for pid in children if "--metrics-folder" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(victims) == 2
        os.kill(victims[1], signal.SIGKILL)
        assert process.wait(30) == 1
        ended = log.read_text()
        assert f"(pid {victims[1]}) was ended by SIGKILL; all end with it" in ended
        assert not listeners(rest)


def test_an_address_in_use_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        with gateway(tmp_path, "--processes", "2", "--rest-listen", listen) as (process, _, log):
            assert process.wait(30) == 1
            assert f"cannot listen on rest_listen={listen}" in log.read_text()


def test_a_signal_ends_all_with_0(tmp_path):
    with gateway(tmp_path, "--processes", "2") as (process, rest, log):
        wait_until(lambda: len(listeners(rest)) == 2, "two processes listen", 60)
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
