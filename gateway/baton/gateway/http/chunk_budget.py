"""Bounds what a chunked body carries beside its data, and in how many chunks: both cost time and yield nothing."""

from __future__ import annotations

# What an ordinary chunk's size and line ends take, and what clients that write little at a time are granted beyond.
_BYTES_OF_A_CHUNK = 16
_BYTES_OF_A_BYTE = 2
_FREE_CHUNKS = 65_536
_MIN_MEAN_CHUNK_BYTES = 64  # beyond those


class ChunkBudget:
    """One body's. `max_excess_bytes`: of chunk sizes, extensions and trailers beyond what ordinary chunks take."""

    def __init__(self, max_excess_bytes: int) -> None:
        self._max_excess_bytes = max_excess_bytes
        self._excess_bytes = 0
        self._num_bytes = 0
        self._num_chunks = 0

    def problem_with(self, num_read: int, num_data: int, num_chunks: int) -> str:
        """Counts `num_read` bytes that carried this much data in so many chunks. Empty: within bounds."""
        self._num_bytes += num_data
        self._num_chunks += num_chunks
        expected = num_data + _BYTES_OF_A_CHUNK * num_chunks + _BYTES_OF_A_BYTE * num_data
        self._excess_bytes = max(0, self._excess_bytes + num_read - expected)
        if self._excess_bytes > self._max_excess_bytes:
            return f"The body's chunk sizes, extensions and trailers are larger than {self._max_excess_bytes} bytes."
        if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _MIN_MEAN_CHUNK_BYTES:
            return (
                f"The body has more than {_FREE_CHUNKS} chunks of less than {_MIN_MEAN_CHUNK_BYTES} bytes on average."
            )
        return ""
