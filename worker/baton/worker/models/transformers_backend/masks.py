"""Which keys a mask of Transformers allows: all before a token, or those in a window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Positions of queries. The last one is beyond any window; the others show whether all queries have the same.
_POSITIONS = (0, 1, 6, 4097, 70_003, 262_147)
_ROOM = 3  # keys behind the query, which it must not attend to


def window_of(allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> int | None:
    """Returns the window of a mask function of batch, head, query and key; 0: causal without one, None: neither."""
    counts = [_keys_before(allows, position) for position in _POSITIONS]
    longest = counts[-1]
    if any(count is None for count in counts) or not longest:
        return None
    if any(count != min(position + 1, longest) for position, count in zip(_POSITIONS, counts, strict=True)):
        return None
    return 0 if longest == _POSITIONS[-1] + 1 else longest


def _keys_before(allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], position: int) -> int | None:
    """Returns how many keys up to the query's own it attends to; None if these are not the last ones."""
    nothing, keys = torch.tensor(0), torch.arange(position + 1 + _ROOM)
    allowed = allows(nothing, nothing, torch.tensor(position), keys).expand(len(keys))
    count = int(allowed.sum())
    return count if bool(allowed[position + 1 - count : position + 1].all()) and count <= position + 1 else None
