"""The received but unread bytes of a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Unread:
    """The unread bytes of one connection. Its length is in bytes."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._begin = 0  # offset in the first piece
        self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_bytes

    def append(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_bytes += len(data)

    def take(self, slice_of: Callable[[bytes, int], int]) -> bytes:
        """Takes a slice out of the first piece. `slice_of` returns its end for the piece and the start."""
        piece, begin = self._pieces[0], self._begin
        end = slice_of(piece, begin)
        self._num_bytes -= end - begin
        if end < len(piece):
            self._begin = end
        else:
            self._begin = 0
            self._pieces.popleft()
        return piece if end - begin == len(piece) else piece[begin:end]

    def clear(self) -> None:
        self._pieces.clear()
        self._begin = self._num_bytes = 0
