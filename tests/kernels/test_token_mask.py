"""Masked logits against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from kernel_harness import cases

from baton.kernels import reference
from baton.kernels.token_mask import apply_token_masks

SMALL = [(1, 33, torch.float32), (3, 200, torch.float16)]
GRID = [
    (num_rows, vocab_size, dtype)
    for num_rows, vocab_size in ((1, 128_256), (64, 151_936), (17, 4096))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_the_kernel_takes_out_what_the_oracle_does(case: tuple[int, int, torch.dtype], device: str) -> None:
    num_rows, vocab_size, dtype = case
    logits = torch.randn(2 * num_rows, vocab_size, device=device).to(dtype)
    rows = torch.randperm(2 * num_rows, device=device)[:num_rows].to(torch.int32)
    pitch = -(-vocab_size // 32) + 1
    bits = torch.randint(-(2**31), 2**31, (num_rows, pitch), device=device, dtype=torch.int64).to(torch.int32)
    expected = logits.clone()
    reference.apply_token_masks(expected, rows, bits[:, 1:])
    apply_token_masks(logits, rows, bits[:, 1:])
    assert torch.equal(logits, expected)


def test_the_oracle_keeps_what_its_bits_say() -> None:
    logits = torch.zeros(2, 70)
    bits = torch.tensor([[1 << 5, 0, -(2**31) + 1]], dtype=torch.int64).to(torch.int32)
    reference.apply_token_masks(logits, torch.tensor([1], dtype=torch.int32), bits)
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [5, 64]
