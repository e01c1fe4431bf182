"""The KV heads of each rank, and those that one rank sends another. Pure.

With at least as many heads as ranks, rank r of n holds the heads [r * heads / n, (r + 1) * heads / n). With fewer,
each head is on n / heads neighbouring ranks, and one of them is chosen to send it to a receiver: every receiving rank
gets each of its heads exactly once.

    4 heads      2 ranks -> 4 ranks          4 ranks -> 1 rank           2 heads on 4 ranks -> 2 ranks
                 0: 0 1   -> 0: 0            0: 0  -> 0: 0 1 2 3         0: 0 -> 0: 0
                             1: 1            1: 1  -> 0                  1: 0    (its twin sends)
                 1: 2 3   -> 2: 2            2: 2  -> 0                  2: 1    (its twin sends)
                             3: 3            3: 3  -> 0                  3: 1 -> 1: 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from baton.worker.kv_spec import KvSpec


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """Heads that one rank sends another, as indices within each rank's own heads."""

    at_sender: int  # index of the first one
    at_receiver: int
    count: int


def heads_of(spec: KvSpec, index: int = 0) -> range:
    """Returns the model's KV heads of a group that this rank holds."""
    group = spec.groups[index]
    first = spec.tp_rank * group.num_kv_heads // spec.tp_size
    return range(first, first + spec.num_rank_heads(group))


def shared_heads(sender: KvSpec, receiver: KvSpec, index: int = 0) -> SharedHeads | None:
    """Returns the heads of a group that this sender rank sends this receiver rank. None: none."""
    ours, theirs = heads_of(sender, index), heads_of(receiver, index)
    first, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    if first >= stop or not _is_chosen(sender, receiver, index):
        return None
    return SharedHeads(first - ours.start, first - theirs.start, stop - first)


def targets_of(sender: KvSpec, receivers: Sequence[KvSpec]) -> dict[int, SharedHeads]:
    """Returns the receivers that this sender rank pushes to, by rank. Empty if its twins send its heads."""
    shared = {receiver.tp_rank: shared_heads(sender, receiver) for receiver in receivers}
    return {rank: heads for rank, heads in shared.items() if heads is not None}


def ranks_of(spec: KvSpec) -> list[KvSpec]:
    """Returns the specs of all ranks of this rank's worker."""
    return [dataclasses.replace(spec, tp_rank=rank) for rank in range(spec.tp_size)]


def _is_chosen(sender: KvSpec, receiver: KvSpec, index: int) -> bool:
    """Returns whether this sender rank, among those with the same heads, serves this receiver rank."""
    num_twins = max(1, sender.tp_size // sender.groups[index].num_kv_heads)
    return sender.tp_rank % num_twins == receiver.tp_rank % num_twins
