"""Sampling rows: greedy, free and filtered draws; the floor is one read of the logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from bench.kernel_case import BYTES, Case, ModelShape, Prepared
from bench.kernel_timing import num_copies
from torch import Tensor

from baton.kernels import reference
from baton.kernels.sampling import SamplingColumns, sample_tokens

_ROWS = (1, 64, 256)
_MAX_MODEL_LEN = 1024
_MOST_WRONG = 0.02  # of the rows: where two tokens' scores are closer than fp32 tells
_SCALE = 4.0  # of the logits, so that a nucleus is small beside the vocabulary


@dataclass(frozen=True, slots=True)
class Draw:
    """How every row is drawn."""

    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


_DRAWS = (
    Draw("greedy", 0.0),
    Draw("temperature", 0.8),
    Draw("top_k 50, top_p 0.95", 0.8, top_k=50, top_p=0.95),
    Draw("top_p 0.9", 1.0, top_p=0.9),
    Draw("min_p 0.05", 1.0, min_p=0.05),
)


def sampling_cases(shape: ModelShape) -> list[Case]:
    """Each way to draw at each number of rows."""
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
    columns = SamplingColumns(count, vocab, device)
    columns.temperature.fill_(draw.temperature)
    columns.top_k.fill_(draw.top_k)
    columns.top_p.fill_(draw.top_p)
    columns.min_p.fill_(draw.min_p)
    columns.seed.copy_(torch.randint(1 << 62, (count,), device=device))
    columns.num_prompt_tokens.copy_(torch.randint(1, 100, (count,), device=device))
    lengths = columns.num_prompt_tokens + torch.randint(100, (count,), dtype=torch.int32, device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    token_ids = torch.zeros(count, _MAX_MODEL_LEN, dtype=torch.int32, device=device)
    out = torch.empty(count, dtype=torch.int32, device=device)

    def launch(logits: Tensor) -> None:
        sample_tokens(logits, out, columns, rows, lengths, token_ids)

    def error() -> float:
        logits = inputs[0]
        launch(logits)
        expected = reference.sample(
            logits.float(),
            columns.temperature,
            columns.top_k.long(),
            columns.top_p,
            columns.min_p,
            columns.seed,
            (lengths - columns.num_prompt_tokens).long(),
        )
        return _share_wrong(logits, out.long(), expected, draw)

    return Prepared([functools.partial(launch, logits) for logits in inputs], error, tolerance=_MOST_WRONG)


def _share_wrong(logits: Tensor, drawn: Tensor, expected: Tensor, draw: Draw) -> float:
    """Of the rows; greedy rows may take any of the tokens that share the highest logit."""
    wrong = drawn != expected
    if draw.temperature == 0:
        chosen, highest = (logits.gather(1, ids.unsqueeze(1)).squeeze(1) for ids in (drawn, expected))
        wrong &= chosen != highest
    return float(wrong.float().mean())


def _logits(count: int, vocab: int, device: torch.device) -> Tensor:
    return torch.empty(count, vocab, dtype=torch.bfloat16, device=device).normal_(0, _SCALE)
