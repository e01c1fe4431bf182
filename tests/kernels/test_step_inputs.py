"""The inputs of a step, made on the device, against a loop over sequences."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import cases

from baton.kernels.step_inputs import group_slots, step_inputs

POISON = -7
SMALL = [(16, [1, 1, 1]), (16, [1, 40, 16]), (64, [1025, 3])]
GRID = [(16, [1] * 1000), (16, [1]), (32, [1, 1, 4000, 31, 33]), (64, [131_000, 1, 64])]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_tokens_positions_slots_and_lengths_equal_the_loop(case: tuple[int, list[int]], device: str) -> None:
    block_size, chunks = case
    num_seqs, num_rows = len(chunks), len(chunks) + 2
    max_len = max(chunks) + 70
    token_ids = torch.randint(1000, (num_rows, max_len), dtype=torch.int32)
    table = torch.randint(10_000, (num_rows, -(-max_len // block_size)), dtype=torch.int32)
    rows = torch.randperm(num_rows)[:num_seqs].int()
    computed = torch.randint(70, (num_seqs,), dtype=torch.int32)
    if num_seqs > 1:
        rows[1], computed[1] = -1, 0
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    num_tokens = sum(chunks)
    outputs = [torch.full((count,), POISON, dtype=torch.int32, device=device) for count in (num_tokens,) * 3]
    lengths = torch.full((num_seqs,), POISON, dtype=torch.int32, device=device)
    on_device = (tensor.to(device) for tensor in (token_ids, table, rows, computed, starts))
    step_inputs(*outputs, lengths, *on_device, block_size, max(chunks))

    tokens, positions, slots, seq_lens = [], [], [], []
    for row, chunk, first in zip(rows.tolist(), chunks, computed.tolist(), strict=True):
        place = torch.arange(first, first + chunk)
        padding = row < 0
        seq_lens.append(0 if padding else first + chunk)
        tokens.append(torch.zeros(chunk) if padding else token_ids[row, place])
        positions.append(torch.zeros(chunk) if padding else place)
        slot = table[row, place // block_size] * block_size + place % block_size
        slots.append(torch.full((chunk,), -1) if padding else slot)
    tables = torch.stack((table.flip(0), table)).to(device)
    more = torch.full((2, num_tokens), POISON, dtype=torch.int32, device=device)
    group_slots(more, tables, outputs[1], rows.to(device), starts.to(device), block_size, max(chunks))
    assert torch.equal(more[1], outputs[2])
    mirrored = torch.where(rows < 0, rows, num_rows - 1 - rows)
    group_slots(more[:1], tables[1:], outputs[1], mirrored.to(device), starts.to(device), block_size, max(chunks))
    again = torch.full((1, num_tokens), POISON, dtype=torch.int32, device=device)
    group_slots(again, tables[:1], outputs[1], rows.to(device), starts.to(device), block_size, max(chunks))
    assert torch.equal(again, more[:1])
    for out, expected in zip(outputs, (tokens, positions, slots), strict=True):
        assert torch.equal(out.cpu(), torch.cat(expected).int())
    assert lengths.tolist() == seq_lens
