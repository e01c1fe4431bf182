"""Device memory of the sampling kernels: parameters and counts of the persistent batch, scratch of a step's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from baton.kernels.sampling.columns import SamplingColumns
from baton.kernels.sampling.counts import TokenCounts

MOST_LIKELY = 64  # tokens whose log-probabilities one row may ask for
MOST_NAMED = 128  # ... by name

_CHUNK = 128  # tokens whose largest logit the filters' search begins with


@dataclass(frozen=True, slots=True)
class Sizes:
    """The cuts of rows. Powers of two."""

    part: int = 4096  # tokens a program looks at
    capacity: int = 8192  # tokens that the filters' search can list
    few: int = 1024  # ... at less cost
    sample: int = 16384  # tokens that a search without a guess begins with
    scan: int = 8192  # tokens of one turn, where a row is searched whole


class SamplingState:
    """All of it, for at most num_rows rows a step."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        sizes: Sizes = Sizes(),
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
        # Of filters.
        self.part_tops, self.part_sums = floats(num_parts), floats(num_parts)
        self.chunk_tops = floats(num_parts * (sizes.part // _CHUNK))
        self.above_sums, self.above_counts = floats(num_parts), integers(num_parts)
        self.cuts = floats(num_rows * 4)
        self.list_counts = integers(num_rows)
        self.list_logits, self.list_tokens = floats(num_rows * sizes.capacity), integers(num_rows * sizes.capacity)
        self.bounds, self.trial_sums = floats(num_rows), floats(2 * num_parts)
        self.chunk_counts, self.chunks = integers(num_rows), integers(num_parts * (sizes.part // _CHUNK))
        # Of what may be drawn: which mask each of a step's rows has (-1: none), then the masks, in one stretch.
        self.bits = integers(num_rows * self.num_words)
        self.mask_words = integers(num_rows * (1 + self.num_words))
        self.mask_of = self.mask_words[:num_rows].fill_(-1)
        self.masks = self.mask_words[num_rows:]
        # Of log-probabilities.
        self.score_tops, self.score_sums, self.ranks = floats(num_parts), floats(num_parts), integers(num_parts)
        self.likely_logits, self.likely_tokens = floats(num_parts * MOST_LIKELY), integers(num_parts * MOST_LIKELY)
        self.found = integers(num_rows * FOUND_WIDTH).view(num_rows, FOUND_WIDTH)


# Of one row's log-probabilities: the drawn token's, its rank, the likely tokens, theirs, those of named tokens.
FOUND_WIDTH = 2 + 2 * MOST_LIKELY + MOST_NAMED
