"""The hidden states of steps that a proposer reads, kept in memory that graphs write to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.worker.core import Int64
from baton.worker.models.hidden_states import HiddenStates


class HiddenReader(Protocol):
    """A proposer that reads hidden states."""

    def take_hidden(self, rows: Int64, num_computed: Int64, counts: Int64, hidden: Tensor) -> None:
        """Takes hidden states [sum of counts, num_layers * hidden_size] of a step's sequences, of which row -1 is
        padding. Queues work behind that of the step."""


class KeptHidden:
    """What `layers` of a model read in decodes of up to `num_rows` tokens, and who reads that."""

    def __init__(
        self, layers: Sequence[int], num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.reader: HiddenReader | None = None  # from the end of the start on
        self._layers = layers
        self._values = torch.zeros(num_rows, len(layers) * hidden_size, dtype=dtype, device=device)

    def states(self) -> HiddenStates:
        """Returns what collects the hidden states of one step."""
        return HiddenStates(self._layers)

    def keep(self, states: HiddenStates) -> None:
        """Copies those of a decode to memory that the next one overwrites. Can be captured."""
        joined = states.joined()
        self._values[: len(joined)].copy_(joined)

    def give_kept(self, rows: Int64, num_computed: Int64) -> None:
        """Gives the reader those of the last decode, one token for each row."""
        if self.reader is not None:
            self.reader.take_hidden(rows, num_computed, np.ones(len(rows), np.int64), self._values[: len(rows)])

    def give(self, rows: Int64, num_computed: Int64, counts: Int64, states: HiddenStates) -> None:
        """Gives the reader those of any other step."""
        if self.reader is not None:
            self.reader.take_hidden(rows, num_computed, counts, states.joined())
