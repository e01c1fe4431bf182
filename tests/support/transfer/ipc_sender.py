"""A sender in a process of its own, for tests that stop and kill it: `ipc_sender.py PORT KEY`, with words on stdin.

It pushes one layer of the source blocks as transfer 1, and says `pushed`. Then it obeys: `spoil` sends bytes that are
no header; `stop` stops the process, and when it goes on writes over all of its slots and says `wrote`; `close` closes
the transport.
"""

from __future__ import annotations

import os
import signal
import sys

from support.transfer.transport_ends import SOURCE, End, HostKv, filled, paths_of, piece_of, wait_until

from baton.worker.transfer.base import Outbound
from baton.worker.transfer.routes import address_of


def main() -> None:
    executor = filled(HostKv(), seed=5)
    end = End(executor, paths_of("ipc", executor))
    identity = end.transport.addresses[0].address.partition("/")[2]
    address = address_of("ipc", 0, "127.0.0.1", int(sys.argv[1]), identity, bytes.fromhex(sys.argv[2]))
    end.transport.connect(Outbound(1, [address], 1, 7, 0xFEED, True))
    end.transport.push(1, piece_of(0, 0, SOURCE))
    wait_until(lambda: end.transport.totals_by_kind()["ipc"].num_sent_pieces == 1, 30)
    ((_, link),) = end.transport._pushes.values()
    connection = link._connection
    print("pushed", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "spoil":
                connection._sock.sendall(b"x" * 200)
                print("spoilt", flush=True)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                memory = connection._sender._memory
                if memory is not None:  # closed meanwhile: it can write nothing any more
                    memory[:] = 0xEE
                print("wrote", flush=True)
            case "close":
                end.transport.close()
                print("closed", flush=True)


if __name__ == "__main__":
    main()
