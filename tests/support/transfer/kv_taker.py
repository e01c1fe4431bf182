"""A process that takes blocks into a pool of its own, told on its standard input.

KIND is its argument. It says its address, in hex; then TRANSFER_ID -> open, and landed, or why not.
"""

from __future__ import annotations

import sys

from support.transfer.kv_pusher import EPOCH, GENERATION, SOURCE, make_pool, make_transports, next_event

from baton.worker.core import BlockId
from baton.worker.transfer.base import Inbound, Landed

TARGET = tuple(BlockId(block) for block in range(40, 40 + len(SOURCE)))


def main(kind: str) -> None:
    """Until its input ends."""
    transports = make_transports(kind, make_pool(2))
    (address,) = transports.addresses
    print(address.SerializeToString().hex(), flush=True)
    for line in sys.stdin:
        number = int(line)
        transports.open(Inbound(number, EPOCH, GENERATION, TARGET, checksum=False))
        print("open", flush=True)
        event = next_event(transports, number)
        print("landed" if isinstance(event, Landed) else event, flush=True)
    transports.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
