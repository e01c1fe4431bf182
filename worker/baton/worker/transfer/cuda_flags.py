"""Flags in device memory, one for each slot: a sender's stream raises them, a stream of the receiver waits for them.

So the receiver queues what follows a copy while the copy is still under way, and no host waits in between. From the
CUDA driver's documentation of stream memory operations: a write is visible after all that the stream did before it, on
other devices too; a wait holds its stream alone.
"""

from __future__ import annotations

from cuda.bindings import driver

from baton.rpc.errors import Unsupported

_STRIDE = 64  # bytes, so that no two share a line of any cache
_RAISED, _LOWERED = 1, 0
_EQUAL = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
_WITH_BARRIER = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT


def flag_bytes(num_flags: int) -> int:
    """What they take."""
    return num_flags * _STRIDE


class Flags:
    """At an address of ours or of a peer's memory that we have open. Streams are raw handles."""

    def __init__(self, address: int, count: int) -> None:
        self._addresses = [driver.CUdeviceptr(address + index * _STRIDE) for index in range(count)]

    def lower_all(self, stream: int) -> None:
        """Queues it. Raises Unsupported where the driver has no such operations."""
        for address in self._addresses:
            _checked(driver.cuStreamWriteValue32(stream, address, _LOWERED, _WITH_BARRIER))

    def raise_all(self, stream: int) -> None:
        """Queues it: whoever waits goes on."""
        for address in self._addresses:
            _checked(driver.cuStreamWriteValue32(stream, address, _RAISED, _WITH_BARRIER))

    def raise_one(self, index: int, stream: int) -> None:
        """Queues it, behind all that is on the stream."""
        _checked(driver.cuStreamWriteValue32(stream, self._addresses[index], _RAISED, _WITH_BARRIER))

    def await_one(self, index: int, stream: int) -> None:
        """What is queued on the stream from now on comes after the flag is raised; it is lowered again."""
        address = self._addresses[index]
        _checked(driver.cuStreamWaitValue32(stream, address, _RAISED, _EQUAL))
        _checked(driver.cuStreamWriteValue32(stream, address, _LOWERED, _WITH_BARRIER))


def _checked(answer: tuple[driver.CUresult]) -> None:
    (status,) = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        raise Unsupported(f"a stream memory operation: {name.decode()}")
