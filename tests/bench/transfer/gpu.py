"""Kinds of transports between two GPUs of one host, of which each worker sees one, and their raw copies."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench.transfer.words import Words, WordsSender

from baton.worker.executors.base import Executor
from baton.worker.handover.settings import DEVICE_PIECE_BYTES
from baton.worker.kv_spec import full_spec
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.kinds.factory import make_paths

if TYPE_CHECKING:
    from bench.transfer.kinds import RawReceiver, RawSender

_NUM_LAYERS = 32
_WAIT_SECONDS = 30.0


class CudaIpcKind:
    """CUDA IPC, compared with one copy to memory of the peer."""

    name = "cuda-ipc"
    transport = "ipc"
    piece_bytes = DEVICE_PIECE_BYTES

    def prepare(self, role: str) -> None:
        """Makes the first GPU visible to the receiver's process, and the second, if there is one, to the sender's."""
        devices = os.environ.get("BATON_BENCH_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0 if role == "receiver" else -1]

    def make_executor(self, num_blocks: int) -> Executor:
        """Returns random blocks of an 8B model."""
        import torch

        from baton.worker.executors.cuda.kv.copies import KvCopies

        shape = (_NUM_LAYERS, num_blocks, 2, 8, 16, 128)
        pool = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda").view(torch.bfloat16)
        kv = KvCopies(lambda: pool)

        def read_blocks(layer: int, block_ids: list[int]) -> memoryview:
            host = pool[layer, torch.tensor(block_ids, device="cuda")].view(torch.uint8).cpu().numpy()
            return memoryview(host).cast("B")

        spec = full_spec(bytes(16), "bfloat16", _NUM_LAYERS, 8, 128, 16)
        return SimpleNamespace(kv_spec=spec, kv=kv, kv_bytes=None, read_blocks=read_blocks)  # type: ignore[return-value]

    def make_paths(self, executor: Executor) -> Mapping[str, BulkPath | None]:
        """Returns the path of this kind only."""
        return make_paths(self.transport, executor, self.piece_bytes, executor.kv)  # type: ignore[attr-defined]

    def raw_receiver(self, num_bytes: int) -> RawReceiver:
        return _IpcReceiver(num_bytes)

    def raw_sender(self, told: Any, num_bytes: int) -> RawSender:
        return _IpcSender(told, num_bytes)


class NcclKind(CudaIpcKind):
    """NCCL, compared with one send and receive."""

    name = "nccl"
    transport = "nccl"

    def raw_receiver(self, num_bytes: int) -> RawReceiver:
        return _NcclReceiver(num_bytes)

    def raw_sender(self, told: Any, num_bytes: int) -> RawSender:
        return _NcclSender(told, num_bytes)


class _IpcReceiver:
    def __init__(self, num_bytes: int) -> None:
        from baton.worker.transfer.kinds.cuda_memory import DeviceMemory

        self._words = Words()
        self._memory = DeviceMemory(num_bytes)
        self.told = (self._words.told, self._memory.handle())

    def receive(self, num_bytes: int) -> None:
        self._words.receive()

    def close(self) -> None:
        self._words.close()


class _IpcSender:
    def __init__(self, told: tuple[Any, bytes], num_bytes: int) -> None:
        import torch

        from baton.worker.transfer.kinds.cuda_memory import PeerMemory

        self._words = WordsSender(told[0])
        self._peer = PeerMemory(told[1])
        self._source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, num_bytes: int) -> None:
        self._peer.copy_in(0, self._source.data_ptr(), num_bytes, int(self._stream.cuda_stream))
        self._stream.synchronize()
        self._words.send()

    def close(self) -> None:
        self._peer.close()
        self._words.close()


class _NcclReceiver:
    def __init__(self, num_bytes: int) -> None:
        import torch

        from baton.worker.transfer.kinds.nccl.pair import Pair

        self._ended = threading.Event()
        self._pair = Pair(None, 1, self._ended.set)
        self.told = self._pair.unique_id
        self._met = False
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def receive(self, num_bytes: int) -> None:
        if not self._met:
            self._pair.meet(self._target.data_ptr(), int(self._stream.cuda_stream), _WAIT_SECONDS)
            self._met = True
        self._pair.move(self._target.data_ptr(), num_bytes, int(self._stream.cuda_stream))
        self._stream.synchronize()

    def close(self) -> None:
        self._pair.abort()
        self._ended.wait(_WAIT_SECONDS)


class _NcclSender:
    def __init__(self, told: bytes, num_bytes: int) -> None:
        import torch

        from baton.worker.transfer.kinds.nccl.pair import Pair

        self._ended = threading.Event()
        self._pair = Pair(told, 0, self._ended.set)
        self._met = False
        self._source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, num_bytes: int) -> None:
        if not self._met:
            self._pair.meet(self._source.data_ptr(), int(self._stream.cuda_stream), _WAIT_SECONDS)
            self._met = True
        self._pair.move(self._source.data_ptr(), num_bytes, int(self._stream.cuda_stream))
        self._stream.synchronize()

    def close(self) -> None:
        self._pair.abort()
        self._ended.wait(_WAIT_SECONDS)
