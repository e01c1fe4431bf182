"""A client of a trivial route, in a process of its own: how long a gateway's event loop stands still.

python tests/attack/probe.py PORT PID

Asks GET /health every few milliseconds on one connection. Each line of standard input is answered with two numbers:
the longest answer since the last line, and the longest stall. A stall is an answer's time, or the CPU that the
gateway's threads used meanwhile where that is less: a loop that stands still computes, or waits for the interpreter
lock of a thread that computes, while an answer that is late because other processes had the cores is no stall.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attack.usage import scheduled_seconds

_INTERVAL = 0.005
_REQUEST = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def main() -> None:
    """Probes until standard input ends."""
    port, pid = int(sys.argv[1]), int(sys.argv[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    latest = stalled = 0.0
    while True:
        cpu, began = scheduled_seconds(pid), time.monotonic()
        connection.sendall(_REQUEST)
        if not connection.recv(65536):
            raise ConnectionError("the gateway closed the probe's connection")
        took = time.monotonic() - began
        latest = max(latest, took)
        if took > stalled:
            stalled = max(stalled, min(took, scheduled_seconds(pid) - cpu))
        if select.select([sys.stdin], [], [], _INTERVAL)[0]:
            if not sys.stdin.readline():
                return
            print(f"{latest} {stalled}", flush=True)
            latest = stalled = 0.0


if __name__ == "__main__":
    main()
