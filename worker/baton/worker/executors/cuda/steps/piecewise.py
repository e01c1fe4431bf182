"""Graphs between attentions, for steps that are not all decodes. Only attention is launched separately.

They are for steps whose launches could take the host longer than the kernels take the device: those of few tokens, and
in a small model those that fill the budget.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch

from baton.worker.executors.cuda.adapters.device_rows import DeviceRows
from baton.worker.executors.cuda.steps.graphs import Progress, capture
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.models.config import ModelConfig
from baton.worker.models.costs import active_values
from baton.worker.models.decoder import Buffers, Decoder, Flow

# Tokens. From 512 on in steps that matrix products pad to anyway.
SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)

_BYTES_PER_GRAPH = 1 << 17
# Of a layer: what a device computes while a host, at its slowest, launches the kernels of the layer (0.9 ms).
_FLOPS_PER_LAUNCH = 6e11
_MOST_PADDING = 1 / 16  # of a step that fills the budget


def piece_sizes(model: ModelConfig, max_tokens: int) -> tuple[int, ...]:
    """Returns the numbers of tokens that there are graphs for. `max_tokens`: the budget of a step."""
    sizes = tuple(size for size in SIZES if size <= max_tokens)
    flops = 2 * active_values(model) * max_tokens
    return sizes if max_tokens <= SIZES[-1] or flops > _FLOPS_PER_LAUNCH * model.num_layers else (*sizes, max_tokens)


def piece_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """Returns the one of `sizes` that a step of so many tokens is padded to; None if it is launched as it is."""
    place = bisect_left(sizes, num_tokens)
    if place == len(sizes):
        return None
    size = sizes[place]
    return size if size <= SIZES[-1] or num_tokens >= size * (1 - _MOST_PADDING) else None


def piece_bytes(model: ModelConfig, dtype: torch.dtype, max_tokens: int) -> int:
    """Estimates the memory of all graphs on the device."""
    sizes = piece_sizes(model, max_tokens)
    width = 3 * model.hidden_size + 2 * model.projected_size + 3 * model.intermediate_size
    return len(sizes) * (model.num_layers + 1) * _BYTES_PER_GRAPH + 2 * max(sizes, default=0) * width * dtype.itemsize


class Pieces:
    """Implements baton.worker.models.decoder.SegmentGraphs. Created together with the pool."""

    def __init__(
        self,
        decoder: Decoder[StepInputs],
        model: ModelConfig,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        num_groups: int = 1,
        adapters: DeviceRows | None = None,  # a second set of graphs adds their updates
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._sizes = piece_sizes(model, max_tokens)
        most = max(self._sizes, default=0)
        # Tokens, positions, and the slots of each KV group.
        self._inputs = torch.zeros(2 + num_groups, most, dtype=torch.int32, device=device)
        self._buffers = Buffers(
            torch.zeros(most, model.hidden_size, dtype=dtype, device=device),
            torch.zeros(most, model.projected_size, dtype=dtype, device=device),
            torch.zeros(most, model.attended_size, dtype=dtype, device=device),
        )
        self._adapters = adapters
        self._kinds = (False,) if adapters is None else (True, False)  # with adapters, and without
        self._graphs: dict[tuple[int, bool, int], torch.cuda.CUDAGraph] = {}
        self._size = 0  # of the step in replay
        self.adapted = False  # some rows of the next step have adapters

    def fit(self, num_tokens: int) -> bool:
        """Returns whether a step of this many tokens is replayed."""
        return piece_size(self._sizes, num_tokens) is not None

    def padded(self, num_tokens: int) -> int:
        """Returns the tokens that a step of this many is computed with."""
        return piece_size(self._sizes, num_tokens) or num_tokens

    def begin(self, step: StepInputs) -> Flow:
        """Copies the inputs. Padding writes nothing to the pool."""
        num_tokens = step.tokens.shape[0]
        size = piece_size(self._sizes, num_tokens)
        assert size is not None, "fit was asked"
        self._size = size
        given_ones = (step.tokens, step.positions, step.slot_mapping, *step.more_slots)
        for own, given in zip(self._inputs, given_ones, strict=True):
            own[:num_tokens].copy_(given)
        if num_tokens < size:
            for slots in self._inputs[2:]:
                slots[num_tokens:size].fill_(-1)
        return self._flow(num_tokens)

    def replay(self, index: int) -> None:
        """Queues segment `index`."""
        self._graphs[self._size, self.adapted, index].replay()

    def launch(self, size: int, index: int) -> None:
        """Launches segment `index` for `size` tokens."""
        tokens, positions, slot_mapping, *more = self._inputs[:, :size]
        nothing = tokens[:0]  # used by attention only
        step = StepInputs(tokens, positions, slot_mapping, nothing, nothing, nothing, 0, None, {}, tuple(more))
        self._decoder.segment(index, step, self._flow(size))

    def record(self, progress: Progress) -> None:
        """Captures every segment of every size."""
        for slots in self._inputs[2:]:
            slots.fill_(-1)
        count = self._decoder.num_segments
        for size in self._sizes:
            for adapted in self._kinds:
                with self._adapters.try_out(size) if adapted and self._adapters else nullcontext():
                    for index in range(count):
                        self.launch(size, index)  # compiles and loads kernels before the capture
        torch.cuda.synchronize(self._device)
        todo = [*itertools.product(reversed(self._sizes), self._kinds, range(count))]
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for size, adapted, index in todo:
            with self._adapters.used(size) if adapted and self._adapters else nullcontext():
                graph, _ = capture(partial(self.launch, size, index), pool, stream)
            self._graphs[size, adapted, index] = graph
            if index == 0:
                progress(len(self._graphs), len(todo))
        torch.cuda.synchronize(self._device)

    def _flow(self, num_tokens: int) -> Flow:
        residual, qkv, attended = self._buffers
        return Flow.over(Buffers(residual[:num_tokens], qkv[:num_tokens], attended[:num_tokens]))
