"""Steps of few tokens that are not all decodes, as graphs between attentions, which alone are launched one by one.

A step's launches would take the host longer than the device needs for so few tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch

from baton.worker.cuda.decoder import Decoder, StepInputs
from baton.worker.cuda.graphs import Progress, capture
from baton.worker.models.config import ModelConfig

# Tokens; beyond, the device is the slower of the two. From 512 on steps of what matrix products pad to anyway.
SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)

_BYTES_PER_GRAPH = 1 << 17


def piece_bytes(model: ModelConfig, dtype: torch.dtype, max_tokens: int) -> int:
    """About what all of it takes on the device."""
    sizes = [size for size in SIZES if size <= max_tokens]
    width = 3 * model.hidden_size + 2 * model.num_qkv_heads * model.head_dim + 3 * model.intermediate_size
    return len(sizes) * (model.num_layers + 1) * _BYTES_PER_GRAPH + 2 * max(sizes, default=0) * width * dtype.itemsize


class Pieces:
    """Implements baton.worker.cuda.decoder.DecoderPieces. Made when the pool is."""

    def __init__(
        self, decoder: Decoder, model: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._decoder = decoder
        self._num_pieces = model.num_layers + 1
        self._device = device
        self._sizes = [size for size in SIZES if size <= max_tokens]
        most = self._sizes[-1] if self._sizes else 0
        width = model.num_q_heads * model.head_dim
        self.inputs = torch.zeros(3, most, dtype=torch.int32, device=device)
        self.residual = torch.zeros(most, model.hidden_size, dtype=dtype, device=device)
        self.qkv = torch.zeros(most, model.num_qkv_heads * model.head_dim, dtype=dtype, device=device)
        self.mixed = torch.zeros(most, width, dtype=dtype, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def fit(self, num_tokens: int) -> bool:
        """Whether so many tokens have graphs."""
        return bool(self._sizes) and num_tokens <= self._sizes[-1]

    def begin(self, inputs: StepInputs) -> int:
        """Copies the inputs. Padding writes nothing to the pool."""
        num_tokens = inputs.tokens.shape[0]
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        made = (inputs.tokens, inputs.positions, inputs.slot_mapping)
        for own, given in zip(self.inputs, made, strict=True):
            own[:num_tokens].copy_(given)
        if num_tokens < size:
            self.inputs[2, num_tokens:size].fill_(-1)
        return size

    def replay(self, size: int, index: int) -> None:
        """Queues piece `index` for `size` tokens."""
        self._graphs[size, index].replay()

    def record(self, progress: Progress) -> None:
        """Captures every piece of every size."""
        self.inputs[2].fill_(-1)
        for size in self._sizes:
            for index in range(self._num_pieces):
                self._decoder.piece(index, self, size)  # what is compiled or loaded late is so outside of the capture
        torch.cuda.synchronize(self._device)
        todo = [(size, index) for size in reversed(self._sizes) for index in range(self._num_pieces)]
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for size, index in todo:
            launch = partial(self._decoder.piece, index, self, size)
            self._graphs[size, index], _ = capture(launch, pool, stream)
            if index == 0:
                progress(len(self._graphs), len(todo))
        torch.cuda.synchronize(self._device)
