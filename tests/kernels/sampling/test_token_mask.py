"""Masked logits."""

from __future__ import annotations

import torch

from baton.kernels import reference


def test_the_oracle_keeps_the_tokens_of_its_bits() -> None:
    logits = torch.zeros(2, 70)
    bits = torch.tensor([[1 << 5, 0, -(2**31) + 1]], dtype=torch.int64).to(torch.int32)
    reference.apply_token_masks(logits, torch.tensor([1], dtype=torch.int32), bits)
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [5, 64]
