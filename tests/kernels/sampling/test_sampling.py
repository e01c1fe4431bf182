"""The sampler on the device against the reference: the same noise and edits, and so the same tokens."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.kernels.harness import NAMES, cases
from support.sampling.sampling_rig import CLOSE, TINY, DeviceRows, Oracle, random_inits, random_masks
from torch import Tensor

from baton.kernels import reference
from baton.kernels.reference.sampling.noise import gumbel_noise, noise_words
from baton.kernels.sampling import MOST_LIKELY, SamplingState, Sizes, sample_special, sample_tokens, score_tokens
from baton.kernels.sampling.columns import (
    FLAGS,
    MIN_P,
    NUM_COLUMNS,
    NUM_LOGPROBS,
    NUM_PROMPT,
    SEED_HIGH,
    SEED_LOW,
    SPECIAL,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingColumns,
)
from baton.kernels.sampling.needs import NEEDS_FILTERS, NEEDS_ROW
from baton.worker.core import ReasoningLimit, Row, RowInit, SamplingParams
from baton.worker.sampling.output_rules import OutputRules

POISON = -7


class Case(NamedTuple):
    num_rows: int
    vocab_size: int
    dtype: torch.dtype
    spread: float = 3.0  # of the logits
    sizes: Sizes = Sizes()

    def __str__(self) -> str:
        kind = "tiny-" if self.sizes == TINY else ""
        return f"{kind}{self.num_rows}x{self.vocab_size}-{NAMES[self.dtype]}-{self.spread:g}"


SMALL = [
    Case(8, 5000, torch.float32),
    Case(6, 4096, torch.float16),
    Case(1, 37, torch.float32),
    Case(6, 5000, torch.float32, 3.0, TINY),
    Case(6, 5000, torch.float32, 1.0, TINY),
]
GRID = [
    Case(num_rows, vocab_size, dtype, spread)
    for dtype in (torch.bfloat16, torch.float32, torch.float16)
    for num_rows, vocab_size, spread in (
        (1, 151_936, 3.0),
        (200, 151_936, 3.0),
        (256, 128_256, 1.0),
        (200, 151_936, 0.2),
        (1000, 32_000, 3.0),
        (64, 1000, 3.0),
    )
]


class Rows(NamedTuple):
    """Columns with every mix of filters, and the reference's parameters."""

    state: SamplingState
    seeds: Tensor  # [num_rows] int64

    def expected(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        columns, rows = self.state.columns, rows.long()
        return reference.sample(
            logits,
            columns.fractions(TEMPERATURE)[rows],
            columns.numbers(TOP_K)[rows].long(),
            columns.fractions(TOP_P)[rows],
            columns.fractions(MIN_P)[rows],
            self.seeds[rows],
            positions,
        )

    def scores(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """logit / temperature + noise of one token a row; the logit alone at temperature 0."""
        rows, tokens = rows.long(), tokens.long().unsqueeze(1)
        temperature = self.state.columns.fractions(TEMPERATURE)[rows].double()
        logit = logits.double().gather(1, tokens).squeeze(1)
        noise = gumbel_noise(noise_words(self.seeds[rows], positions, tokens)).squeeze(1)
        return torch.where(temperature > 0, logit / temperature.clamp(min=1e-9) + noise, logit)


def random_rows(num_rows: int, vocab_size: int, device: str, sizes: Sizes) -> Rows:
    state = SamplingState(num_rows, vocab_size, 1100, torch.device(device), sizes)
    columns = state.columns

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,))].to(device)

    columns.fractions(TEMPERATURE).copy_(pick(0.0, 0.7, 1.0, 1.3))
    columns.numbers(TOP_K).copy_(pick(0, 0, 1, 5, 50, 400, vocab_size - 1))
    columns.fractions(TOP_P).copy_(pick(1.0, 1.0, 0.9, 0.5, 0.01))
    columns.fractions(MIN_P).copy_(pick(0.0, 0.0, 0.05, 0.3))
    columns.numbers(NUM_PROMPT).copy_(torch.randint(50, (num_rows,)))
    seeds = torch.randint(-(2**62), 2**62, (num_rows,))
    for column, half in zip((SEED_LOW, SEED_HIGH), seeds.view(torch.int32).view(-1, 2).unbind(1), strict=True):
        columns.numbers(column).copy_(half)
    warm = columns.fractions(TEMPERATURE) > 0
    filters = (columns.numbers(TOP_K) > 0) | (columns.fractions(TOP_P) < 1) | (columns.fractions(MIN_P) > 0)
    columns.numbers(FLAGS).copy_((warm & filters).int() * SPECIAL.value)
    return Rows(state, seeds.to(device))


def draw(logits: Tensor, rows: Rows, batch_rows: Tensor, seq_lens: Tensor, known: Tensor) -> Tensor:
    out = torch.full((len(logits),), POISON, dtype=torch.int32, device=logits.device)
    sample_tokens(logits, out, rows.state, batch_rows, seq_lens, known)
    sample_special(logits, out, rows.state, batch_rows, seq_lens, known)
    return out


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_tokens_equal_the_references_but_for_ties(case: Case, device: str) -> None:
    num_rows, vocab_size, dtype, spread, sizes = case
    rows = random_rows(num_rows + 3, vocab_size, device, sizes)
    batch_rows = torch.randperm(num_rows + 3)[:num_rows].to(device)
    logits = (spread * torch.randn(num_rows, vocab_size, device=device)).to(dtype)
    positions = torch.randint(1000, (num_rows,), device=device)
    columns = rows.state.columns
    seq_lens = (columns.numbers(NUM_PROMPT)[batch_rows] + positions).int()
    known = torch.full((num_rows + 3, 1100), POISON, dtype=torch.int32, device=device)
    rows.state.best.fill_(float("nan"))
    rows.state.bounds.fill_(float("nan"))
    out = draw(logits, rows, batch_rows.int(), seq_lens, known)
    assert torch.equal(known[batch_rows, seq_lens.long()], out)
    assert int((known != POISON).sum()) == num_rows
    expected = rows.expected(logits, batch_rows, positions)
    differ = out != expected
    ours, theirs = (rows.scores(logits, batch_rows, positions, tokens) for tokens in (out, expected))
    # A cut of the nucleus at a rounding error passes a token more or less; nothing else differs by more than a tie.
    unexplained = differ & ((ours - theirs).abs() > CLOSE) & (columns.fractions(TOP_P)[batch_rows] >= 1)
    assert not unexplained.any()
    assert int(differ.sum()) <= num_rows // 100 + (device == "cuda")


@pytest.mark.parametrize(("case", "device"), cases([Case(3, 5000, torch.float32, 1.5, TINY)], [GRID[1], GRID[2]]))
def test_a_row_draws_the_same_token_whatever_shares_the_batch(case: Case, device: str) -> None:
    num_rows, vocab_size, dtype, spread, sizes = case
    rows = random_rows(num_rows, vocab_size, device, sizes)
    logits = (spread * torch.randn(num_rows, vocab_size, device=device)).to(dtype)
    known = torch.zeros(num_rows, 100, dtype=torch.int32, device=device)
    batch_rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    seq_lens = rows.state.columns.numbers(NUM_PROMPT) + 1
    together = draw(logits, rows, batch_rows, seq_lens, known)
    bounds = rows.state.bounds[:num_rows].clone()
    alone, alone_bounds = torch.empty_like(together), torch.empty_like(bounds)
    for row in range(num_rows):
        own = slice(row, row + 1)
        alone[own] = draw(logits[own], rows, batch_rows[own], seq_lens[own], known)
        alone_bounds[own] = rows.state.bounds[:1]
    assert torch.equal(together, alone)
    special = rows.state.columns.numbers(FLAGS) != 0
    assert torch.equal(bounds[special], alone_bounds[special])


@pytest.mark.parametrize(("dtype", "device"), cases([torch.float32], [torch.bfloat16]))
def test_padding_gives_token_0_and_is_written_nowhere(dtype: torch.dtype, device: str) -> None:
    rows = random_rows(3, 100, device, Sizes())
    logits = torch.randn(3, 100, device=device).to(dtype)
    batch_rows = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([60, 0, 61], dtype=torch.int32, device=device)
    known = torch.full((3, 70), POISON, dtype=torch.int32, device=device)
    out = draw(logits, rows, batch_rows, seq_lens, known)
    assert out[1] == 0
    assert int((known != POISON).sum()) == 2


@pytest.mark.parametrize(
    ("vocab_size", "spread", "device"),
    [
        pytest.param(5000, 1.0, "cpu", marks=pytest.mark.interpreted),
        *(pytest.param(128_256, spread, "cuda", marks=pytest.mark.gpu) for spread in (0.2, 1.0, 4.0)),
    ],
)
def test_no_row_is_searched_whole_where_its_logits_are_independent(vocab_size: int, spread: float, device: str) -> None:
    """Cuts are right: rows that a search of the whole row leaves to the draw have their nucleus between them."""
    num_rows = 2 if device == "cpu" else 200
    sizes = Sizes(part=1024, capacity=1024, few=128, sample=2048, scan=2048) if device == "cpu" else Sizes()
    rows = random_rows(num_rows, vocab_size, device, sizes)
    columns, state = rows.state.columns, rows.state
    columns.fractions(TEMPERATURE).fill_(1.0)
    columns.numbers(TOP_K).zero_()
    columns.fractions(TOP_P).uniform_(0.3, 0.97)
    columns.fractions(MIN_P).zero_()
    columns.numbers(FLAGS).fill_(SPECIAL.value)
    known = torch.zeros(num_rows, 100, dtype=torch.int32, device=device)
    batch_rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    logits = spread * torch.randn(num_rows, vocab_size, device=device)
    draw(logits, rows, batch_rows, columns.numbers(NUM_PROMPT) + 1, known)
    low, high, *_ = state.cuts.view(-1, 4)[:num_rows].unbind(1)
    bounds, needs = state.bounds[:num_rows], state.needs[:num_rows]
    assert not (needs & NEEDS_ROW.value).any()
    searched = (needs & NEEDS_FILTERS.value) != 0
    assert (state.list_counts[:num_rows][searched] <= sizes.capacity).all()
    assert ((low <= bounds) & (bounds <= high))[searched].all()
    # Few trials end between the cuts.
    assert int((searched & (high < float("inf"))).sum()) <= num_rows // 8 + 1


class RequestCase(NamedTuple):
    num_rows: int
    vocab_size: int
    dtype: torch.dtype
    num_steps: int
    sizes: Sizes = Sizes()

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.vocab_size}-{NAMES[self.dtype]}"


@pytest.mark.parametrize(
    ("case", "device"),
    cases(
        [RequestCase(8, 1500, torch.float32, 2, TINY), RequestCase(6, 700, torch.float16, 2, TINY)],
        [
            RequestCase(1000, 5000, torch.bfloat16, 8),
            RequestCase(64, 151_936, torch.float32, 3),
            RequestCase(200, 1000, torch.float16, 8),
        ],
    ),
)
def test_requests_with_any_wishes_get_the_tokens_of_the_cpu_executor(case: RequestCase, device: str) -> None:
    num_rows, vocab_size, dtype, num_steps, sizes = case
    inits = random_inits(num_rows, vocab_size, seed=num_rows)
    ours, theirs = DeviceRows(num_rows, vocab_size, device, sizes), Oracle(inits, vocab_size)
    ours.admit(inits)
    generator = np.random.default_rng(num_rows)
    num_drawn = num_scored = 0
    unequal: list[tuple[int, int]] = []
    for step in range(num_steps):
        rows = np.sort(generator.permutation(num_rows)[: -(-num_rows * 3 // 4)])
        logits = (3 * torch.randn(len(rows), vocab_size, device=device)).to(dtype)
        masks = random_masks(len(rows), vocab_size, generator) if step % 2 else None
        expected, logprobs = theirs.draw(logits.float().cpu().clone(), rows, masks)
        device_rows = torch.from_numpy(rows).int().to(device)
        found = ours.draw(logits, device_rows, masks)
        unequal += [(step, int(rows[index])) for index in np.flatnonzero(found.cpu().numpy() != expected).tolist()]
        # The rows go on from the same tokens.
        rows_on_device = device_rows.long()
        ours.settle(rows_on_device, found, torch.from_numpy(expected).int().to(device))
        num_drawn += len(rows)
        scores = ours.score(logits, device_rows, torch.from_numpy(expected).int().to(device)).cpu()
        for index, wanted in logprobs.items():
            num_scored += 1
            check_score(scores[index], wanted, bool(inits[rows[index]].sampling.logprob_token_ids))
    assert num_scored > num_drawn // 5
    # A nucleus cut at a rounding error, two scores closer than other roundings of exp and log can tell.
    assert len(unequal) <= num_drawn // 1000 + (device == "cuda"), unequal


@pytest.mark.parametrize(("num_rows", "device"), cases([60], [500]))
def test_rules_of_the_output_restrict_a_row_as_on_the_host(num_rows: int, device: str) -> None:
    vocab_size = 6
    generator = random.Random(num_rows)

    def some(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(generator.randrange(vocab_size) for _ in range(generator.randint(least, most)))

    inits, rules = [], []
    for row in range(num_rows):
        limit = ReasoningLimit(generator.randrange(6), some(3, 1), generator.choice((None, generator.randrange(6))))
        sampling = SamplingParams(
            temperature=0.0,
            forbidden_sequences=tuple(some(4, 1) for _ in range(generator.randint(1, 6))),
            reasoning_limit=generator.choice((None, limit)),
        )
        prompt, output = some(4, 1), some(10)
        inits.append(RowInit(Row(row), np.array(prompt + output, np.int32), len(prompt), sampling))
        rules.append(OutputRules(sampling, output))
    rows = DeviceRows(num_rows, vocab_size, device)
    rows.admit(inits)
    rows.draw(
        torch.randn(num_rows, vocab_size, device=device), torch.arange(num_rows, dtype=torch.int32, device=device)
    )
    found = rows.state.bits.cpu()[:num_rows].tolist()
    num_forced = 0
    for bits, rule in zip(found, rules, strict=True):
        forced = rule.forced()
        num_forced += forced is not None
        allowed = {forced} if forced is not None else set(range(vocab_size)) - set(rule.forbidden())
        assert {token for token in range(vocab_size) if bits >> token & 1} == allowed
    assert num_forced > 0


def check_score(found: Tensor, wanted: object, named: bool) -> None:
    count = len(wanted.top_token_ids)  # type: ignore[attr-defined]
    assert found[:1].view(torch.float32).item() == pytest.approx(wanted.logprob, abs=1e-3)  # type: ignore[attr-defined]
    assert found[1] == wanted.rank  # type: ignore[attr-defined]
    first = 2 + 2 * MOST_LIKELY if named else 2 + MOST_LIKELY
    top = found[first : first + count].contiguous().view(torch.float32).tolist()
    assert top == pytest.approx(wanted.top_logprobs, abs=1e-3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("vocab_size", "device"), cases([3000], [151_936]))
def test_most_likely_tokens_come_in_order_and_ties_by_token(vocab_size: int, device: str) -> None:
    rows = random_rows(3, vocab_size, device, TINY if device == "cpu" else Sizes())
    rows.state.columns.numbers(NUM_LOGPROBS).copy_(torch.tensor([MOST_LIKELY, -1, 7]))
    logits = torch.randint(0, 400, (3, vocab_size), device=device).float()  # many are equal
    drawn = torch.tensor([5, 6, 7], dtype=torch.int32, device=device)
    rows.state.found.fill_(POISON)
    found = score_tokens(logits, drawn, rows.state, torch.arange(3, dtype=torch.int32, device=device)).cpu()
    assert (found[1] == POISON).all()
    for row, count in ((0, MOST_LIKELY), (2, 7)):
        order = sorted(range(vocab_size), key=lambda token, row=row: (-float(logits[row, token]), token))[:count]  # type: ignore[misc]
        assert found[row, 2 : 2 + count].tolist() == order
        assert (found[row, 2 + count : 2 + MOST_LIKELY] == POISON).all()
        assert found[row, 1] == 1 + int((logits[row] > logits[row, drawn[row]]).sum())


def test_every_column_has_a_place_of_its_own() -> None:
    columns = SamplingColumns(70, torch.device("cpu"))
    assert columns.stride >= 70
    assert columns.words.numel() == NUM_COLUMNS * columns.stride


def test_unwritten_rows_allow_every_token() -> None:
    columns = SamplingColumns(3, torch.device("cpu"))
    assert torch.equal(columns.fractions(TOP_P), torch.ones(3))
    assert torch.equal(columns.numbers(FLAGS), torch.zeros(3, dtype=torch.int32))
    assert torch.equal(columns.numbers(NUM_LOGPROBS), torch.full((3,), -1, dtype=torch.int32))
