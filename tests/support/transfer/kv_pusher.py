"""A sender of blocks for a separate process, and the pool that both ends create."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cuda.bindings import driver
from support.kernels.triton_source import never_loaded_kernel

from baton.v1 import kv_pb2
from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.kv_spec import full_spec
from baton.worker.transfer.base import Outbound, Piece, TransportEvent
from baton.worker.transfer.kinds.factory import make_paths
from baton.worker.transfer.transports import Transports

EPOCH = 7
GENERATION = 3
WAIT_SECONDS = 20.0
SHAPE = (2, 128, 2, 8, 64, 128)  # layers, blocks, K and V, heads, tokens, head_dim
SOURCE = [BlockId((5 + 7 * index) % SHAPE[1]) for index in range(64)]
_BLOCK_BYTES = 2 * 8 * 64 * 128 * 2
PIECE_BYTES = 2 * len(SOURCE) * _BLOCK_BYTES  # 32 MiB, more than any library buffers for an absent receiver


def make_pool(seed: int) -> torch.Tensor:
    """Returns random bf16 on the GPU, including NaNs and infinities."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randint(-(2**15), 2**15, SHAPE, generator=generator, dtype=torch.int16, device="cuda")
    return values.view(torch.bfloat16)


def make_transports(kind: str, pool: torch.Tensor) -> Transports:
    """Returns transports of one kind for the pool."""
    kv = KvCopies(lambda: pool)

    def read_blocks(layer: int, block_ids: list[int]) -> memoryview:
        host = pool[layer, torch.tensor(block_ids, device="cuda")].view(torch.uint8).cpu().numpy()
        return memoryview(host).cast("B")

    spec = full_spec(bytes(16), "bfloat16", SHAPE[0], SHAPE[3], SHAPE[5], SHAPE[4])
    executor: Executor = SimpleNamespace(kv_spec=spec, kv=kv, kv_bytes=None, read_blocks=read_blocks)  # type: ignore
    paths = make_paths(kind, executor, PIECE_BYTES, kv)
    return Transports(executor, "127.0.0.1", 0, "127.0.0.1", lambda: None, paths, EPOCH, PIECE_BYTES)


def next_event(transports: Transports, number: int) -> TransportEvent:
    """Waits up to WAIT_SECONDS for the next event of this transfer."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (events := transports.poll()):
        assert time.monotonic() < deadline, f"nothing was told of transfer {number} in {WAIT_SECONDS:g} s"
        time.sleep(0.001)
    (event,) = events
    return event


@contextlib.contextmanager
def loading_code(folder: Path) -> Iterator[None]:
    """Loads kernel code repeatedly within the block. Loading waits for all work on the device, and blocks launches of
    other threads meanwhile."""
    binary, name = _compiled(folder)
    stopped = threading.Event()

    def load() -> None:
        torch.cuda.set_device(0)
        while not stopped.is_set():
            module = _checked(driver.cuModuleLoadData(binary))
            _checked(driver.cuFuncLoad(_checked(driver.cuModuleGetFunction(module, name))))
            _checked(driver.cuModuleUnload(module))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    try:
        yield
        assert thread.is_alive(), "code could not be loaded"
    finally:
        stopped.set()
        thread.join(WAIT_SECONDS)


def _compiled(folder: Path) -> tuple[bytes, bytes]:
    """Returns the code and the name of a kernel."""
    kernel = never_loaded_kernel(folder)
    compiled = kernel.warmup(torch.zeros(128, device="cuda"), grid=(1,))
    return compiled.asm["cubin"], compiled.name.encode()


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if values else None


class KvPusher:
    """Pushes blocks of the pool to one receiver. With a folder, loads kernels meanwhile."""

    def __init__(self, kind: str, address: kv_pb2.TransportAddress, folder: Path | None = None) -> None:
        self._transports = make_transports(kind, make_pool(1))
        self._addresses = [address]
        self._exit = contextlib.ExitStack()
        if folder is not None:
            self._exit.enter_context(loading_code(folder))

    def push(self, number: int, checksum: bool) -> TransportEvent:
        """Pushes all layers of SOURCE as one transfer. Returns its last event."""
        self._transports.connect(Outbound(number, self._addresses, number, EPOCH, GENERATION, checksum))
        self._transports.push(number, Piece(0, 0, len(SOURCE), SOURCE, num_layers=SHAPE[0]))
        self._transports.finish(number)
        return next_event(self._transports, number)

    def close(self) -> None:
        self._exit.close()
        self._transports.close()
