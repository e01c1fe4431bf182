"""Cuts packed sequences into chunks of equal length, padded at their ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of all sequences, each sequence's in order."""

    tokens: Tensor  # [num_chunks, size] of packed tokens; anything at padding
    real: Tensor  # [num_chunks, size] bool
    first: Tensor  # [num_seqs], each sequence's first chunk
    counts: Tensor  # [num_seqs], chunks of each

    @classmethod
    def of(cls, cu_seqlens: Tensor, size: int) -> Chunks:
        bounds = cu_seqlens.long()
        lengths = bounds.diff()
        counts = (lengths + size - 1) // size
        first = counts.cumsum(0) - counts
        owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        within = (torch.arange(len(owner), device=counts.device) - first[owner])[:, None] * size
        within = within + torch.arange(size, device=counts.device)
        real = within < lengths[owner, None]
        tokens = torch.where(real, bounds[owner, None] + within, 0)
        return cls(tokens, real, first, counts)

    def split(self, x: Tensor) -> Tensor:
        """Returns x [num_tokens, num_heads, ...] as [num_chunks, num_heads, size, ...] in fp32, zero at padding."""
        picked = x[self.tokens].float()
        mask = self.real.view(*self.real.shape, *(1,) * (picked.dim() - 2))
        return picked.masked_fill(~mask, 0.0).transpose(1, 2).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """Returns x [num_chunks, num_heads, size, ...] as [num_tokens, num_heads, ...]."""
        return x.transpose(1, 2)[self.real]

    def waves(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs (sequences, their chunks), the first chunks of all sequences first."""
        most = int(self.counts.max()) if len(self.counts) else 0
        alive = [(self.counts > index).nonzero().flatten() for index in range(most)]
        return [(seqs, self.first[seqs] + index) for index, seqs in enumerate(alive)]
