"""Counters in device memory, one for each slot: a sender's stream counts pieces, the receiver's waits for them.

So the receiver queues what follows a copy while the copy is still under way, and no host waits in between. From the
CUDA driver's documentation of stream memory operations: a write is visible after all that the stream did before it, on
other devices too; a wait holds its stream alone.
"""

from __future__ import annotations

from cuda.bindings import driver

from baton.rpc.errors import Unsupported

_STRIDE = 64  # bytes, so that no two share a line of any cache
_MASK = (1 << 32) - 1
_FAR = 1 << 30  # beyond every number that is waited for, in the driver's cyclic comparison
_AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
_WITH_BARRIER = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT


def counter_bytes(count: int) -> int:
    """What they take."""
    return count * _STRIDE


class Counters:
    """One end's view of them: at an address of ours, or of a peer's memory that we have open. Streams are raw handles.

    Both ends count on their own: the sender's n-th piece in a slot is the receiver's n-th.
    """

    def __init__(self, address: int, count: int) -> None:
        self._addresses = [driver.CUdeviceptr(address + index * _STRIDE) for index in range(count)]
        self._numbers = [0] * count  # of the last piece

    def clear(self, stream: int) -> None:
        """Queues it. Raises Unsupported where the driver has no such operations."""
        for address in self._addresses:
            _checked(driver.cuStreamWriteValue32(stream, address, 0, _WITH_BARRIER))

    def count(self, index: int, stream: int) -> None:
        """Queues that one piece more is there, behind all that is on the stream."""
        number = self._next(index)
        _checked(driver.cuStreamWriteValue32(stream, self._addresses[index], number, _WITH_BARRIER))

    def expect(self, index: int) -> None:
        """One piece more will be waited for."""
        self._next(index)

    def wait(self, index: int, stream: int) -> None:
        """What is queued on the stream from now on comes after the last piece that was expected."""
        _checked(driver.cuStreamWaitValue32(stream, self._addresses[index], self._numbers[index], _AT_LEAST))

    def release(self, stream: int) -> None:
        """Queues that whoever waits goes on, now and later."""
        for address, number in zip(self._addresses, self._numbers, strict=True):
            _checked(driver.cuStreamWriteValue32(stream, address, (number + _FAR) & _MASK, _WITH_BARRIER))

    def _next(self, index: int) -> int:
        self._numbers[index] = (self._numbers[index] + 1) & _MASK
        return self._numbers[index]


def _checked(answer: tuple[driver.CUresult]) -> None:
    (status,) = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        raise Unsupported(f"a stream memory operation: {name.decode()}")
