"""The rows of a step by their adapters, at addresses that captured steps read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.worker.adapters.bank import AdapterBank
from baton.worker.adapters.rows import FEW_TILE_ROWS, NO_SLOT, AdapterRows, most_tiles, rows_of
from baton.worker.executors.cuda.inputs.uploads import PinnedRing

_FEW_ROWS = 128  # of steps whose tiles have few rows
_TILE_ROWS = 64


def tile_rows_of(num_rows: int) -> int:
    """Returns the most rows of a tile in a step of so many."""
    return FEW_TILE_ROWS if num_rows <= _FEW_ROWS else _TILE_ROWS


class DeviceRows:
    """Tiles and order of a step's rows, for steps of up to `most` rows. A step of n rows has all tiles that n allow."""

    def __init__(self, bank: AdapterBank, most: int, device: torch.device) -> None:
        self._bank = bank
        most_words = max(self._num_words(size) for size in {most, min(most, _FEW_ROWS)})
        self._words = torch.zeros(most_words, dtype=torch.int32, device=device)
        self._uploads = PinnedRing(most_words, torch.int32)

    def upload(self, slots: NDArray[np.int32], num_rows: int) -> None:
        """Uploads the slots of a step's tokens, [num_tokens], for a step that is padded to `num_rows`."""
        tile_rows = tile_rows_of(num_rows)
        padded = np.full(num_rows, NO_SLOT, np.int32)
        padded[: len(slots)] = slots
        order, tiles = rows_of(padded, tile_rows)
        num_tiles = most_tiles(num_rows, self._bank.num_slots, tile_rows)

        def fill(words: NDArray[np.int32]) -> None:
            table = words[: 3 * num_tiles].reshape(num_tiles, 3)
            table[: len(tiles)] = tiles
            table[len(tiles) :] = (NO_SLOT, 0, 0)
            words[3 * num_tiles : 3 * num_tiles + num_rows] = order
            words[3 * num_tiles + num_rows :] = padded

        size = self._num_words(num_rows)
        self._uploads.fill_and_copy(size, fill, self._words[:size])

    @contextmanager
    def used(self, num_rows: int) -> Iterator[None]:
        """Has a step of so many rows launched, or recorded, with the updates of the rows that are uploaded."""
        self._bank.rows, self._bank.row_slots = self._rows(num_rows)
        try:
            yield
        finally:
            self._bank.rows = self._bank.row_slots = None

    def try_out(self, num_rows: int) -> AbstractContextManager[None]:
        """Returns `used` of rows without adapters."""
        self.upload(np.empty(0, np.int32), num_rows)
        return self.used(num_rows)

    def _rows(self, num_rows: int) -> tuple[AdapterRows, Tensor]:
        tile_rows = tile_rows_of(num_rows)
        num_tiles = most_tiles(num_rows, self._bank.num_slots, tile_rows)
        own = self._words[: self._num_words(num_rows)]
        tiles, order, slots = own.split([3 * num_tiles, num_rows, num_rows])  # type: ignore[no-untyped-call]
        return AdapterRows(order, tiles.view(num_tiles, 3), tile_rows), slots

    def _num_words(self, num_rows: int) -> int:
        return 3 * most_tiles(num_rows, self._bank.num_slots, tile_rows_of(num_rows)) + 2 * num_rows
