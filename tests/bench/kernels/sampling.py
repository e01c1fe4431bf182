"""Benchmark rows of sampling: greedy, free and filtered draws. The floor is one read of the logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from bench.kernels.case import BYTES, Case, ModelShape, Prepared
from bench.kernels.timing import num_copies
from torch import Tensor

from baton.kernels import reference
from baton.kernels.sampling import SamplingState, sample_special, sample_tokens
from baton.kernels.sampling import columns as words

_ROWS = (1, 256)
_MAX_MODEL_LEN = 1024
_MOST_WRONG = 0.02  # share of rows whose two best scores are closer than the precision of fp32
_SCALE = 4.0  # of the logits, so that a nucleus is small relative to the vocabulary


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling parameters of every row."""

    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0  # frequency penalty too

    @property
    def flags(self) -> int:
        """Bits of columns.FLAGS."""
        penalized = words.PENALIZED.value if self.presence or self.repetition != 1 else 0
        filtered = self.top_k or self.top_p < 1 or self.min_p
        return penalized | (words.SPECIAL.value if filtered or penalized else 0)


_DRAWS = (
    Draw("greedy", 0.0),
    Draw("temperature", 0.8),
    Draw("top_k 50, top_p 0.95", 0.8, top_k=50, top_p=0.95),
    Draw("top_k 20, top_p 0.8, repetition", 0.7, top_k=20, top_p=0.8, repetition=1.05),
    Draw("top_p 0.9", 1.0, top_p=0.9),
    Draw("flat, top_p 0.9", 4.0, top_p=0.9),
    Draw("presence, frequency", 0.7, presence=0.5),
    Draw("min_p 0.05", 1.0, min_p=0.05),
)


def sampling_cases(shape: ModelShape) -> list[Case]:
    """Returns a case for each way to draw and number of rows."""
    return [
        Case(
            f"sampling, {draw.name}",
            f"{count} x {shape.vocab}",
            BYTES,
            2.0 * count * shape.vocab,
            functools.partial(_prepare, draw, count, shape.vocab),
        )
        for draw in _DRAWS
        for count in _ROWS
    ]


def _prepare(draw: Draw, count: int, vocab: int, device: torch.device) -> Prepared:
    inputs = [_logits(count, vocab, device) for _ in range(num_copies(2 * count * vocab))]
    state = SamplingState(count, vocab, _MAX_MODEL_LEN, device)
    columns = state.columns
    for column, value in (
        (words.TEMPERATURE, draw.temperature),
        (words.TOP_P, draw.top_p),
        (words.MIN_P, draw.min_p),
        (words.REPETITION, draw.repetition),
        (words.FREQUENCY, draw.presence),
        (words.PRESENCE, draw.presence),
    ):
        columns.fractions(column).fill_(value)
    columns.numbers(words.TOP_K).fill_(draw.top_k)
    columns.numbers(words.FLAGS).fill_(draw.flags)
    seeds = torch.randint(1 << 62, (count,), device=device)
    for column, half in zip((words.SEED_LOW, words.SEED_HIGH), seeds.view(torch.int32).view(-1, 2).t(), strict=True):
        columns.numbers(column).copy_(half)
    num_prompt = columns.numbers(words.NUM_PROMPT).copy_(torch.randint(1, 100, (count,), device=device))
    lengths = num_prompt + torch.randint(100, (count,), dtype=torch.int32, device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    token_ids = torch.randint(vocab, (count, _MAX_MODEL_LEN), dtype=torch.int32, device=device)
    state.counts.restart(rows, lengths, 200, columns.words, columns.stride, token_ids)
    out = torch.empty(count, dtype=torch.int32, device=device)

    def launch(logits: Tensor) -> None:
        sample_tokens(logits, out, state, rows, lengths, token_ids)
        if draw.flags:
            sample_special(logits, out, state, rows, lengths, token_ids)

    def error() -> float:
        logits = inputs[0]
        counts = state.counts.by_token[:, :vocab].int()
        launch(logits)
        expected = reference.sample(
            _penalized(logits.float(), counts, draw, state.counts.prompt_flag),
            columns.fractions(words.TEMPERATURE),
            columns.numbers(words.TOP_K).long(),
            columns.fractions(words.TOP_P),
            columns.fractions(words.MIN_P),
            seeds,
            (lengths - num_prompt).long(),
        )
        return _share_wrong(logits, out.long(), expected, draw)

    return Prepared([functools.partial(launch, logits) for logits in inputs], error, tolerance=_MOST_WRONG)


def _penalized(logits: Tensor, counts: Tensor, draw: Draw, prompt_flag: int) -> Tensor:
    if not draw.flags & words.PENALIZED.value:
        return logits
    rows, tokens = counts.nonzero().unbind(1)
    drawn = counts[rows, tokens] & (prompt_flag - 1)
    factors = [torch.full_like(drawn, value, dtype=torch.float32) for value in (draw.repetition, *[draw.presence] * 2)]
    reference.apply_penalties(logits, rows, tokens, drawn, *factors)
    return logits


def _share_wrong(logits: Tensor, drawn: Tensor, expected: Tensor, draw: Draw) -> float:
    """Returns the share of wrong rows. Greedy rows may draw any token with the highest logit."""
    wrong = drawn != expected
    if draw.temperature == 0:
        chosen, highest = (logits.gather(1, ids.unsqueeze(1)).squeeze(1) for ids in (drawn, expected))
        wrong &= chosen != highest
    return float(wrong.float().mean())


def _logits(count: int, vocab: int, device: torch.device) -> Tensor:
    return torch.empty(count, vocab, dtype=torch.bfloat16, device=device).normal_(0, _SCALE)
