"""The sampler on the device against the reference: the same noise, and so the same tokens."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from kernel_harness import NAMES, cases
from torch import Tensor

from baton.kernels import reference
from baton.kernels.reference.noise import gumbel_noise, noise_words
from baton.kernels.sampling import SamplingColumns, sample_tokens

POISON = -7
CLOSE = 1e-3  # of two tokens' noisy scores: what other roundings of exp and log can turn


class Case(NamedTuple):
    num_rows: int
    vocab_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.vocab_size}-{NAMES[self.dtype]}"


SMALL = [Case(12, 5000, torch.float32), Case(12, 4096, torch.float16), Case(1, 37, torch.float32)]
GRID = [
    Case(num_rows, vocab_size, dtype)
    for dtype in (torch.bfloat16, torch.float32, torch.float16)
    for num_rows, vocab_size in ((1, 151_936), (200, 151_936), (1000, 32_000), (64, 1000))
]


def random_columns(num_rows: int, vocab_size: int, device: str) -> SamplingColumns:
    """Every mix of the parameters."""
    columns = SamplingColumns(num_rows, vocab_size, torch.device(device))

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,))].to(device)

    columns.temperature.copy_(pick(0.0, 0.7, 1.0, 1.3))
    columns.top_k.copy_(pick(0, 1, 5, 50, vocab_size))
    columns.top_p.copy_(pick(1.0, 1.0, 0.9, 0.5, 0.01))
    columns.min_p.copy_(pick(0.0, 0.0, 0.05, 0.3))
    columns.seed.copy_(torch.randint(-(2**62), 2**62, (num_rows,)))
    columns.num_prompt_tokens.copy_(torch.randint(50, (num_rows,)))
    return columns


def scores(logits: Tensor, columns: SamplingColumns, rows: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """logit / temperature + noise of one token a row; the logit alone at temperature 0."""
    temperature = columns.temperature[rows].double()
    logit = logits.double().gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    noise = gumbel_noise(noise_words(columns.seed[rows], positions, tokens.long().unsqueeze(1))).squeeze(1)
    return torch.where(temperature > 0, logit / temperature.clamp(min=1e-9) + noise, logit)


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_tokens_equal_the_references_but_for_ties(case: Case, device: str) -> None:
    num_rows, vocab_size, dtype = case
    columns = random_columns(num_rows + 3, vocab_size, device)
    batch_rows = torch.randperm(num_rows + 3)[:num_rows].to(device)
    logits = (3 * torch.randn(num_rows, vocab_size, device=device)).to(dtype)
    positions = torch.randint(1000, (num_rows,), device=device)
    seq_lens = (columns.num_prompt_tokens[batch_rows] + positions).int()
    known = torch.full((num_rows + 3, 1100), POISON, dtype=torch.int32, device=device)
    out = torch.full((num_rows,), POISON, dtype=torch.int32, device=device)
    columns.best.fill_(float("nan"))
    columns.value_bound.fill_(float("nan"))
    sample_tokens(logits, out, columns, batch_rows.int(), seq_lens, known)
    expected = reference.sample(
        logits,
        columns.temperature[batch_rows],
        columns.top_k[batch_rows].long(),
        columns.top_p[batch_rows],
        columns.min_p[batch_rows],
        columns.seed[batch_rows],
        positions,
    )
    assert torch.equal(known[batch_rows, seq_lens.long()], out)
    assert int((known != POISON).sum()) == num_rows
    differ = out != expected
    ours, theirs = (scores(logits, columns, batch_rows, positions, tokens) for tokens in (out, expected))
    # A cut of the nucleus at a rounding error passes a token more or less; nothing else differs by more than a tie.
    unexplained = differ & ((ours - theirs).abs() > CLOSE) & (columns.top_p[batch_rows] >= 1)
    assert not unexplained.any()
    assert int(differ.sum()) <= num_rows // 100 + (device == "cuda")


@pytest.mark.parametrize(("case", "device"), cases([SMALL[0]], [GRID[1]]))
def test_a_row_draws_the_same_token_whatever_shares_the_batch(case: Case, device: str) -> None:
    num_rows, vocab_size, dtype = case
    columns = random_columns(num_rows, vocab_size, device)
    logits = (3 * torch.randn(num_rows, vocab_size, device=device)).to(dtype)
    known = torch.zeros(num_rows, 100, dtype=torch.int32, device=device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    seq_lens = columns.num_prompt_tokens + 1
    together, alone = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    sample_tokens(logits, together, columns, rows, seq_lens, known)
    for row in range(num_rows):
        own = slice(row, row + 1)
        sample_tokens(logits[own], alone[own], columns, rows[own], seq_lens[own], known)
    assert torch.equal(together, alone)


@pytest.mark.parametrize(("dtype", "device"), cases([torch.float32], [torch.bfloat16]))
def test_padding_gives_token_0_and_is_written_nowhere(dtype: torch.dtype, device: str) -> None:
    columns = random_columns(2, 100, device)
    logits = torch.randn(3, 100, device=device).to(dtype)
    batch_rows = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([60, 0, 61], dtype=torch.int32, device=device)
    known = torch.full((2, 70), POISON, dtype=torch.int32, device=device)
    out = torch.full((3,), POISON, dtype=torch.int32, device=device)
    sample_tokens(logits, out, columns, batch_rows, seq_lens, known)
    assert out[1] == 0
    assert int((known != POISON).sum()) == 2


def test_a_rows_parameters_are_where_they_are_said_to_be() -> None:
    num_rows = 70
    columns = random_columns(num_rows, 5000, "cpu")
    assert columns.words.numel() >= 7 * num_rows
    fields = list(zip(columns.first_words, columns.word_steps, strict=True))
    places = [[first + step * row for first, step in fields] for row in range(num_rows)]
    assert len({place for row in places for place in row}) == 7 * num_rows
    for row, (temperature, top_p, min_p, top_k, num_prompt_tokens, *seed) in enumerate(places):
        fractions = columns.words.view(torch.float32)
        assert fractions[temperature] == columns.temperature[row]
        assert fractions[top_p] == columns.top_p[row]
        assert fractions[min_p] == columns.min_p[row]
        assert columns.words[top_k] == columns.top_k[row]
        assert columns.words[num_prompt_tokens] == columns.num_prompt_tokens[row]
        low, high = columns.words[seed].tolist()
        assert (high << 32) + (low & 0xFFFFFFFF) == columns.seed[row]


def test_rows_that_nobody_wrote_keep_every_token() -> None:
    assert torch.equal(SamplingColumns(3, 100, torch.device("cpu")).top_p, torch.ones(3))
