"""Limits the overhead of chunked bodies and their number of chunks, which cost time without carrying data."""

from __future__ import annotations

# The overhead of ordinary chunks, and the number of small chunks that any client may send.
_BYTES_OF_A_CHUNK = 16
_BYTES_OF_A_BYTE = 2
_FREE_CHUNKS = 65_536
_MIN_MEAN_CHUNK_BYTES = 64  # for the chunks beyond _FREE_CHUNKS


class ChunkBudget:
    """The budget of one body.

    `max_excess_bytes` limits chunk sizes, extensions and trailers beyond those of ordinary chunks.
    """

    def __init__(self, max_excess_bytes: int) -> None:
        self._max_excess_bytes = max_excess_bytes
        self._excess_bytes = 0
        self._num_bytes = 0
        self._num_chunks = 0

    def problem_with(self, num_read: int, num_data: int, num_chunks: int) -> str:
        """Counts `num_read` bytes with `num_data` bytes of data in `num_chunks`.

        Returns a problem, or an empty text.
        """
        self._num_bytes += num_data
        self._num_chunks += num_chunks
        expected = num_data + _BYTES_OF_A_CHUNK * num_chunks + _BYTES_OF_A_BYTE * num_data
        self._excess_bytes = max(0, self._excess_bytes + num_read - expected)
        if self._excess_bytes > self._max_excess_bytes:
            return f"the chunk sizes, extensions and trailers of the body exceed {self._max_excess_bytes} bytes"
        if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _MIN_MEAN_CHUNK_BYTES:
            return (
                f"the body has more than {_FREE_CHUNKS} chunks with less than {_MIN_MEAN_CHUNK_BYTES} bytes on average"
            )
        return ""
