"""Graphs between attentions, for steps of few tokens that are not all decodes. Only attention is launched separately.

The launches of such a step take the host longer than the kernels take the device.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch

from baton.worker.executors.cuda.steps.graphs import Progress, capture
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import Buffers, Decoder, Flow

# Tokens. With more, the device is slower than the host. From 512 on in steps that matrix products pad to anyway.
SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)

_BYTES_PER_GRAPH = 1 << 17


def piece_bytes(model: ModelConfig, dtype: torch.dtype, max_tokens: int) -> int:
    """Estimates the memory of all graphs on the device."""
    sizes = [size for size in SIZES if size <= max_tokens]
    width = 3 * model.hidden_size + 2 * model.num_qkv_heads * model.head_dim + 3 * model.intermediate_size
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
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._sizes = [size for size in SIZES if size <= max_tokens]
        most = self._sizes[-1] if self._sizes else 0
        self._inputs = torch.zeros(3, most, dtype=torch.int32, device=device)  # tokens, positions, slot mapping
        self._buffers = Buffers(
            torch.zeros(most, model.hidden_size, dtype=dtype, device=device),
            torch.zeros(most, model.num_qkv_heads * model.head_dim, dtype=dtype, device=device),
            torch.zeros(most, model.num_q_heads * model.head_dim, dtype=dtype, device=device),
        )
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._size = 0  # of the step in replay

    def fit(self, num_tokens: int) -> bool:
        """Returns whether there are graphs for this many tokens."""
        return bool(self._sizes) and num_tokens <= self._sizes[-1]

    def begin(self, step: StepInputs) -> Flow:
        """Copies the inputs. Padding writes nothing to the pool."""
        num_tokens = step.tokens.shape[0]
        size = self._size = self._sizes[bisect_left(self._sizes, num_tokens)]
        for own, given in zip(self._inputs, (step.tokens, step.positions, step.slot_mapping), strict=True):
            own[:num_tokens].copy_(given)
        if num_tokens < size:
            self._inputs[2, num_tokens:size].fill_(-1)
        return self._flow(num_tokens)

    def replay(self, index: int) -> None:
        """Queues segment `index`."""
        self._graphs[self._size, index].replay()

    def launch(self, size: int, index: int) -> None:
        """Launches segment `index` for `size` tokens."""
        tokens, positions, slot_mapping = self._inputs[:, :size]
        nothing = tokens[:0]  # used by attention only
        step = StepInputs(tokens, positions, slot_mapping, nothing, nothing, nothing, 0, None, {})
        self._decoder.segment(index, step, self._flow(size))

    def record(self, progress: Progress) -> None:
        """Captures every segment of every size."""
        self._inputs[2].fill_(-1)
        count = self._decoder.num_segments
        for size in self._sizes:
            for index in range(count):
                self.launch(size, index)  # compiles and loads kernels before the capture
        torch.cuda.synchronize(self._device)
        todo = [(size, index) for size in reversed(self._sizes) for index in range(count)]
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for size, index in todo:
            self._graphs[size, index], _ = capture(partial(self.launch, size, index), pool, stream)
            if index == 0:
                progress(len(self._graphs), len(todo))
        torch.cuda.synchronize(self._device)

    def _flow(self, num_tokens: int) -> Flow:
        residual, qkv, attended = self._buffers
        return Flow.over(Buffers(residual[:num_tokens], qkv[:num_tokens], attended[:num_tokens]))
