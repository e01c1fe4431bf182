"""A router's copy of the index in a separate process, for bench_index.py: follows a kvstore and reports its position.

python tests/bench/router/index_reader.py HOST:PORT

Prints a line of JSON ten times a second: seconds since the start, whether the index is complete, the number of entries
that count, and the sum of the workers' sequences.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from baton.router.index.client import IndexClient
from baton.router.index.prefix_index import PrefixIndex


async def main(address: str) -> None:
    """Follows the kvstore until the process is killed."""
    index = PrefixIndex()
    client = IndexClient(index, address)
    began = time.perf_counter()
    following = asyncio.create_task(client.run())
    while not following.done():
        positions = [index.position(worker_id) or (0, 0) for worker_id in index.worker_ids]
        status = {
            "seconds": time.perf_counter() - began,
            "whole": client.is_whole,
            "entries": sum(map(index.num_blocks, index.worker_ids)),
            "sequences": sum(sequence for _, sequence in positions),
        }
        print(json.dumps(status), flush=True)
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1]))
