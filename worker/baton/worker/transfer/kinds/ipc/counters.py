"""Counters in device memory, one for each slot: the sender's stream counts pieces, the receiver's waits for them.

Thus the receiver queues the work that follows a copy before the copy ends, and no host waits in between. From the CUDA
driver's documentation of stream memory operations: a write is visible after all earlier work of its stream, on other
devices too; a wait blocks only its stream.
"""

from __future__ import annotations

from cuda.bindings import driver

from baton.rpc.errors import Unsupported

_STRIDE = 64  # bytes; each counter has a cache line of its own
_MASK = (1 << 32) - 1
_FAR = 1 << 30  # above every awaited number, in the driver's cyclic comparison
_AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
_WITH_BARRIER = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT


def counter_bytes(count: int) -> int:
    """Returns the bytes that the counters need."""
    return count * _STRIDE


class Counters:
    """One end's view of the counters, in memory of this process or a peer's. Streams are raw handles.

    Both ends count by themselves: the sender's n-th piece in a slot is the receiver's n-th.
    """

    def __init__(self, address: int, count: int) -> None:
        self._addresses = [driver.CUdeviceptr(address + index * _STRIDE) for index in range(count)]
        self._numbers = [0] * count  # of the last piece, by slot

    def clear(self, stream: int) -> None:
        """Queues a reset of all counters. Raises Unsupported if the driver lacks these operations."""
        for address in self._addresses:
            _checked(driver.cuStreamWriteValue32(stream, address, 0, _WITH_BARRIER))

    def count(self, index: int, stream: int) -> None:
        """Queues an increment, after all work on the stream."""
        number = self._next(index)
        _checked(driver.cuStreamWriteValue32(stream, self._addresses[index], number, _WITH_BARRIER))

    def expect(self, index: int) -> None:
        """Expects one more piece."""
        self._next(index)

    def wait(self, index: int, stream: int) -> None:
        """Makes later work of the stream wait for the last expected piece."""
        _checked(driver.cuStreamWaitValue32(stream, self._addresses[index], self._numbers[index], _AT_LEAST))

    def release(self, stream: int) -> None:
        """Queues the release of all waits, current and later ones."""
        for address, number in zip(self._addresses, self._numbers, strict=True):
            _checked(driver.cuStreamWriteValue32(stream, address, (number + _FAR) & _MASK, _WITH_BARRIER))

    def _next(self, index: int) -> int:
        self._numbers[index] = (self._numbers[index] + 1) & _MASK
        return self._numbers[index]


def _checked(answer: tuple[driver.CUresult]) -> None:
    (status,) = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        raise Unsupported(f"stream memory operation failed: {name.decode()}")
