"""Both ends of an NCCL pair, as processes. One aborts while its launches are blocked."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
from support.kernels.triton_source import never_loaded_kernel
from support.transfer.gpu_pairs import environ_of

WAIT_SECONDS = 60.0
_SPIN_SECONDS = 2.5
_NUM_BYTES = 1 << 25  # more than NCCL buffers before the other end receives


def abort_while_a_launch_waits(folder: Path) -> list[int | None]:
    """Returns the exit codes of the aborting end and of the other: 0 if the pair could reconnect."""
    context = multiprocessing.get_context("spawn")
    ids, done = context.Queue(), context.Queue()
    ends = [context.Process(target=end, args=(folder, ids, done)) for end in (_aborting, _other)]
    with pytest.MonkeyPatch.context() as patch:
        for number, process in enumerate(ends):
            for name, value in environ_of(number).items():
                patch.setenv(name, value)
            process.start()
    for process in ends:
        process.join(WAIT_SECONDS)
        process.kill()
    return [process.exitcode for process in ends]


def _aborting(folder: Path, ids: Queue[bytes], done: Queue[bool]) -> None:
    """Loads code while a kernel runs. That and every launch wait for the kernel, including that of a transfer."""
    import torch

    from baton.worker.transfer.kinds.nccl.pair import Pair

    memory = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device="cuda")
    moving, loading, spinning = (torch.cuda.Stream() for _ in range(3))
    kernel = never_loaded_kernel(folder)
    kernel.warmup(memory, grid=(1,))  # only compiles it
    ended = threading.Event()

    def meet() -> Pair:
        pair = Pair(None, 0, ended.set)
        ids.put(pair.unique_id)
        pair.meet(memory.data_ptr(), int(moving.cuda_stream), 10.0)
        torch.cuda.synchronize()
        pair.leave_meeting(WAIT_SECONDS)
        return pair

    def load() -> None:
        with torch.cuda.stream(loading):
            kernel[(1,)](memory)

    pair = meet()
    with torch.cuda.stream(spinning):
        torch.cuda._sleep(int(_SPIN_SECONDS * 1.7e9))
    threads = [
        threading.Thread(target=load),
        threading.Thread(target=pair.move, args=(memory.data_ptr(), _NUM_BYTES, int(moving.cuda_stream))),
        threading.Thread(target=pair.abort),
    ]
    for thread in threads:
        thread.start()
        thread.join(0.3)
    assert threads[0].is_alive(), "the kernel was loaded beside the one that runs"
    assert not threads[2].is_alive(), "whoever aborts waits for nothing"
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert ended.wait(WAIT_SECONDS)
    torch.cuda.synchronize()
    done.put(True)
    ended.clear()
    meet().abort()
    assert ended.wait(WAIT_SECONDS)


def _other(folder: Path, ids: Queue[bytes], done: Queue[bool]) -> None:
    import torch

    from baton.worker.transfer.kinds.nccl.pair import Pair

    memory = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    for turn in range(2):
        ended = threading.Event()
        pair = Pair(ids.get(timeout=WAIT_SECONDS), 1, ended.set)
        pair.meet(memory.data_ptr(), int(stream.cuda_stream), 10.0)
        torch.cuda.synchronize()
        pair.leave_meeting(WAIT_SECONDS)
        if not turn:
            assert done.get(timeout=WAIT_SECONDS)
        pair.abort()
        assert ended.wait(WAIT_SECONDS)
