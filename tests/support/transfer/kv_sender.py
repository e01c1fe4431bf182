"""A process that sends pieces of a known pool over a bulk path, told what to do line by line on its standard input.

offer -> offer and what it offers; connect NUM_SLOTS SLOT_BYTES BLOB -> ok;
put LAYER NUM_LAYERS FIRST COUNT SLOT -> queued; wait -> done. Bytes are in hex. Its pool is that of `random_pool`.
"""

from __future__ import annotations

import sys

import torch

from baton.worker.core import BlockId
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.base import Piece
from baton.worker.transfer.bulk import BulkPath, BulkSender, SlotCopy, Slots

SHAPE = (6, 64, 2, 4, 16, 32)  # layers, blocks, K and V, heads, tokens, head_dim
SLOT_BYTES = 1 << 20
HOST = b"one host"


def random_pool(seed: int) -> torch.Tensor:
    """bf16 on the GPU; NaNs and infinities among it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, SHAPE, generator=generator, dtype=torch.int16).view(torch.bfloat16).cuda()


def make_path(kind: str, kv: KvCopies, host: bytes = HOST) -> BulkPath:
    """`ipc` or `nccl`."""
    if kind == "ipc":
        from baton.worker.transfer.kinds.ipc.cuda import IpcPath

        return IpcPath(kv, SLOT_BYTES, host)
    from baton.worker.transfer.kinds.nccl.path import NcclPath

    return NcclPath(kv, SLOT_BYTES)


def main(kind: str) -> None:
    pool = random_pool(1)
    path = make_path(kind, KvCopies(lambda: pool))
    sender: BulkSender | None = None
    copies: list[SlotCopy] = []
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "offer":
            answer = f"offer {path.offer().hex()}"
        elif word == "connect":
            sender = path.connect(Slots(int(rest[0]), int(rest[1]), bytes.fromhex(rest[2])))
            answer = "ok"
        elif word == "put":
            layer, num_layers, first, count, slot = map(int, rest)
            block_ids = [BlockId((first + 7 * index) % SHAPE[1]) for index in range(count)]
            assert sender is not None
            copies.append(sender.put(Piece(layer, 0, count, block_ids, num_layers=num_layers), slot, None))
            answer = "queued"
        else:
            assert all(pending.wait(10) for pending in copies)
            copies.clear()
            answer = "done"
        print(answer, flush=True)
    if sender is not None:
        sender.close()
    path.close()


if __name__ == "__main__":
    main(sys.argv[1])
