"""Device memory of the sampling kernels: parameters and counts of the persistent batch, and scratch of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from baton.kernels.sampling.columns import SamplingColumns
from baton.kernels.sampling.counts import TokenCounts

MOST_LIKELY = 64  # most likely tokens with log-probabilities per row
MOST_NAMED = 128  # ... requested by id

_CHUNK = 128  # tokens per chunk; the filters' search begins with the chunks' largest logits


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the parts of rows. Powers of two."""

    part: int = 4096  # tokens per program
    capacity: int = 8192  # tokens that the filters' search can list
    few: int = 1024  # ... with a cheaper kernel
    sample: int = 16384  # tokens sampled if there is no other guess
    scan: int = 8192  # tokens per iteration in a search of a whole row


class SamplingState:
    """The memory for steps of at most num_rows rows."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        sizes: Sizes = Sizes(),
        keeps_processed: bool = False,
    ) -> None:
        self.sizes = sizes
        self.vocab_size = vocab_size
        self.chunk = _CHUNK
        self.num_parts = triton.cdiv(vocab_size, sizes.part)
        self.parts_pad = triton.next_power_of_2(self.num_parts)
        self.num_words = triton.cdiv(vocab_size, 32)
        self.columns = SamplingColumns(num_rows, device)
        self.counts = TokenCounts(num_rows, vocab_size, max_model_len, device)
        num_parts = num_rows * self.num_parts

        def floats(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.float32, device=device)

        def integers(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.int32, device=device)

        self.best, self.index = floats(num_parts), integers(num_parts)
        self.needs = integers(num_rows)
        # For filters.
        self.part_tops, self.part_sums = floats(num_parts), floats(num_parts)
        self.chunk_tops = floats(num_parts * (sizes.part // _CHUNK))
        self.above_sums, self.above_counts = floats(num_parts), integers(num_parts)
        self.cuts = floats(num_rows * 4)
        self.list_counts = integers(num_rows)
        self.list_logits, self.list_tokens = floats(num_rows * sizes.capacity), integers(num_rows * sizes.capacity)
        self.bounds, self.trial_sums = floats(num_rows), floats(2 * num_parts)
        self.chunk_counts, self.chunks = integers(num_rows), integers(num_parts * (sizes.part // _CHUNK))
        # For restrictions: the index of each row's mask (-1: none), followed by the masks.
        self.bits = integers(num_rows * self.num_words)
        self.mask_words = integers(num_rows * (1 + self.num_words))
        self.mask_of = self.mask_words[:num_rows].fill_(-1)
        self.masks = self.mask_words[num_rows:]
        # For log-probabilities.
        self.score_tops, self.score_sums, self.ranks = floats(num_parts), floats(num_parts), integers(num_parts)
        self.likely_logits, self.likely_tokens = floats(num_parts * MOST_LIKELY), integers(num_parts * MOST_LIKELY)
        self.found = integers(num_rows * FOUND_WIDTH).view(num_rows, FOUND_WIDTH)
        # The logits that tokens are drawn from, of rows that ask for log-probabilities. None: the model's are scored.
        self.processed = floats(num_rows * vocab_size).view(num_rows, vocab_size) if keeps_processed else None

    def scored(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits that log-probabilities are of, for the step's logits [num_rows, vocab_size]."""
        return logits if self.processed is None else self.processed[: len(logits)]


# Words per row: log-probability of the sampled token, its rank, likely tokens, theirs, those of named tokens.
FOUND_WIDTH = 2 + 2 * MOST_LIKELY + MOST_NAMED
