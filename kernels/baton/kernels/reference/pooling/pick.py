"""One vector for each segment of a step's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.pooling_spec import Pick


def pick_vectors(hidden: Tensor, segments: Tensor, pick: Pick, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the vectors [num_segments, size] of segments of hidden [num_tokens, size].

    segments [4, num_segments] int64: first token, number of tokens, row of `kept` (-1: the segment is a whole text),
    and the text's tokens in earlier steps. kept [num_rows, size] fp32 is updated; it may be empty without such rows.
    """
    found = []
    for first, count, row, before in segments.t().tolist():
        states = hidden[first : first + count]
        states = states.double() if hidden.dtype == torch.float64 else states.float()
        earlier = kept[row].to(states.dtype) if row >= 0 and before else None
        vector = _picked(states, pick, earlier)
        if row >= 0:
            kept[row] = vector
        found.append(vector / (before + count) if pick == "mean" else vector)
    return torch.stack(found).to(dtype)


def _picked(states: Tensor, pick: Pick, earlier: Tensor | None) -> Tensor:
    match pick:
        case "first":
            return states[0] if earlier is None else earlier
        case "last":
            return states[-1]
        case "mean":
            return states.sum(0) if earlier is None else earlier + states.sum(0)
        case "max":
            return states.amax(0) if earlier is None else torch.maximum(earlier, states.amax(0))
