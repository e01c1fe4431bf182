"""The passes of prefill attention over latents: which keys are made at once. Planned on the host from lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KEYS = 64  # keys that one program gathers
TILE_ROWS = 128  # queries of a tile


class LatentPass(NamedTuple):
    """Keys that are made at once: of each sequence a run of tokens, one sequence after another."""

    num_keys: int
    starts: Tensor  # [num_seqs + 1] int32, of the sequences' runs
    firsts: Tensor  # [num_seqs] int32, position of each run's first key
    parts: Tensor  # [num_parts, 2] int32: sequence, and first key within its run; of KEYS keys each


class LatentTiles(NamedTuple):
    """The rows of each program, and the passes over the keys."""

    seq: Tensor  # [num_tiles] int32
    start: Tensor  # [num_tiles] int32, within the chunk
    passes: tuple[LatentPass, ...]


def plan_latent_tiles(
    chunk_lens: list[int], prefix_lens: list[int], most_keys: int, device: torch.device
) -> LatentTiles:
    """Cuts chunks after cached prefixes into tiles, and all their keys into passes of at most `most_keys`."""
    lengths = [chunk + prefix if chunk else 0 for chunk, prefix in zip(chunk_lens, prefix_lens, strict=True)]
    tiles = [
        (prefix + start, seq, start)
        for seq, (chunk, prefix) in enumerate(zip(chunk_lens, prefix_lens, strict=True))
        for start in range(0, chunk, TILE_ROWS)
    ]
    tiles.sort(reverse=True)  # those with most keys first, so that no long tile starts last
    flat = [seq for _, seq, _ in tiles] + [start for _, _, start in tiles]
    sizes = [len(tiles), len(tiles)]
    counts = []
    for runs in _runs(lengths, most_keys):
        numbers = _columns(runs, len(lengths))
        counts.append(numbers[0][-1])
        flat += [number for column in numbers for number in column]
        sizes += map(len, numbers)
    columns = torch.tensor(flat, dtype=torch.int32).to(device, non_blocking=True).split(sizes)
    passes = []
    for index, count in enumerate(counts):
        starts, firsts, parts = columns[2 + 3 * index : 5 + 3 * index]
        passes.append(LatentPass(count, starts, firsts, parts.view(-1, 2)))
    return LatentTiles(columns[0], columns[1], tuple(passes))


def _runs(lengths: list[int], most_keys: int) -> list[list[tuple[int, int, int]]]:
    """Returns the runs of each pass: sequence, first key, number of keys."""
    passes: list[list[tuple[int, int, int]]] = []
    room = 0
    for seq, length in enumerate(lengths):
        first = 0
        while first < length:
            if not room:
                passes.append([])
                room = most_keys
            count = min(room, length - first)
            passes[-1].append((seq, first, count))
            first, room = first + count, room - count
    return passes


def _columns(runs: list[tuple[int, int, int]], num_seqs: int) -> tuple[list[int], list[int], list[int]]:
    counts, firsts, parts = [0] * num_seqs, [0] * num_seqs, []
    for seq, first, count in runs:
        counts[seq], firsts[seq] = count, first
        for key in range(0, count, KEYS):
            parts += [seq, key]
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts, firsts, parts
