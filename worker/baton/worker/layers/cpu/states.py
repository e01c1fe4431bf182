"""Some sequences of a step on a CPU, and where their states lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRun:
    """Some sequences of a step, whose tokens follow one another, and their states."""

    start: int  # of the step's tokens
    stop: int
    cu_seqlens: Tensor  # [num_seqs + 1] int32, from 0
    read: Tensor  # [num_seqs, pages] int64: states before the step; -1: zeros
    write: Tensor  # [num_seqs, pages] int64: states after it
    decodes: bool  # each sequence has one known token, and drafts
    deferred: list[DeferredStates] | None = None  # gets what writes the states once drafts are accepted; None: none are


class DeferredStates(NamedTuple):
    """The states of one layer that a step has not written."""

    write: Callable[[Tensor], None]  # of the first so many tokens of each sequence, [num_seqs] int32
