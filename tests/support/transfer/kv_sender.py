"""A sender of pieces over a bulk path, for a separate process."""

from __future__ import annotations

import torch

from baton.worker.core import BlockId
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.base import Piece
from baton.worker.transfer.bulk import BulkPath, BulkSender, SlotCopy, Slots

SHAPE = (6, 64, 2, 4, 16, 32)  # layers, blocks, K and V, heads, tokens, head_dim
SLOT_BYTES = 1 << 20
HOST = b"one host"


def random_pool(seed: int) -> torch.Tensor:
    """Returns random bf16 on the GPU, including NaNs and infinities."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, SHAPE, generator=generator, dtype=torch.int16).view(torch.bfloat16).cuda()


def make_path(kind: str, kv: KvCopies, host: bytes = HOST) -> BulkPath:
    """Returns a path of kind `ipc` or `nccl`."""
    if kind == "ipc":
        from baton.worker.transfer.kinds.ipc.cuda import IpcPath

        return IpcPath(kv, SLOT_BYTES, host)
    from baton.worker.transfer.kinds.nccl.path import NcclPath

    return NcclPath(kv, SLOT_BYTES)


class BulkSource:
    """Sends pieces of `random_pool(1)` over a bulk path."""

    def __init__(self, kind: str) -> None:
        pool = random_pool(1)
        self._path = make_path(kind, KvCopies(lambda: pool))
        self._sender: BulkSender | None = None
        self._copies: list[SlotCopy] = []

    def offer(self) -> bytes:
        return self._path.offer()

    def connect(self, slots: Slots) -> None:
        self._sender = self._path.connect(slots)

    def put(self, layer: int, num_layers: int, first: int, count: int, slot: int) -> None:
        """Queues every seventh block from `first` on."""
        assert self._sender is not None
        block_ids = [BlockId((first + 7 * index) % SHAPE[1]) for index in range(count)]
        self._copies.append(self._sender.put(Piece(layer, 0, count, block_ids, num_layers=num_layers), slot, None))

    def wait(self) -> None:
        """Waits until all queued pieces are sent."""
        assert all(pending.wait(10) for pending in self._copies)
        self._copies.clear()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._path.close()
