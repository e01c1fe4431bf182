"""The executor on one CUDA device: steps are launched ahead of the host's knowledge of their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.kernels.prefill_attention import make_tiles
from baton.kernels.sampled_tokens import ArgmaxWorkspace, append_tokens, greedy_tokens
from baton.kernels.step_inputs import step_inputs
from baton.worker.core import BlockId, StepPlan, StepResult
from baton.worker.cuda.batch import DeviceBatch
from baton.worker.cuda.decoder import Decoder, DecoderShape, StepInputs
from baton.worker.cuda.graphs import DecodeGraphs, graph_sizes
from baton.worker.cuda.weights import DecoderWeights
from baton.worker.executor.base import KvLayout, LayerHook, ModelSpec

_TILE_ROWS = 128


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    token_ids: Tensor  # pinned
    started: torch.cuda.Event
    done: torch.cuda.Event


class CudaExecutor:
    """Implements baton.worker.executor.base.Executor."""

    depth = 2

    def __init__(
        self,
        model: ModelSpec,
        layout: KvLayout,
        shape: DecoderShape,
        weights: DecoderWeights,
        num_blocks: int,
        max_num_requests: int,
        use_graphs: bool = True,
    ) -> None:
        device = weights.embedding.device
        self.model = model
        self.layout = layout
        self.num_blocks = num_blocks
        self.layer_hook: LayerHook | None = None
        self._device = device
        self._batch = DeviceBatch(max_num_requests, model.max_model_len, layout.block_size, device)
        # Zeros: kernels read beyond a sequence's end, and weigh what they find there with 0.
        cache = torch.zeros(
            (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim),
            dtype=weights.embedding.dtype,
            device=device,
        )
        self._decoder = Decoder(weights, shape, cache, self._batch.block_table, max_num_requests)
        self._argmax = ArgmaxWorkspace(max_num_requests, model.vocab_size, device)
        self._ordinals = torch.arange(max_num_requests + 1, dtype=torch.int32, device=device)
        self._launched: deque[_Launched] = deque()
        self._pinned = [torch.empty(max_num_requests, dtype=torch.int32, pin_memory=True) for _ in range(4)]
        self._staging = [torch.empty(2 * max_num_requests, dtype=torch.int32, pin_memory=True) for _ in range(4)]
        self._staged = [torch.cuda.Event() for _ in range(4)]
        self._turn = 0
        self._copies = torch.cuda.Stream(device)
        self._graphs: DecodeGraphs | None = None
        with torch.inference_mode():
            if use_graphs:
                self._graphs = DecodeGraphs(graph_sizes(max_num_requests), device, self._record_decode)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queues the step on the device. Returns before it runs."""
        started = torch.cuda.Event(enable_timing=True)
        started.record()
        self._batch.apply(plan)
        turn = self._turn
        self._turn = (turn + 1) % len(self._pinned)
        if self._graphs is not None and plan.num_decodes == len(plan.rows):
            sampled = self._replay(plan, turn)
        else:
            sampled = self._run(plan)
        token_ids = self._pinned[turn][: len(sampled)]
        token_ids.copy_(sampled, non_blocking=True)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        self._launched.append(_Launched(plan, token_ids, started, done))

    def collect(self) -> StepResult:
        """Waits for the oldest step."""
        launched = self._launched.popleft()
        launched.done.synchronize()
        plan = launched.plan
        if self.layer_hook is not None and plan.num_decodes < len(plan.rows):
            for layer in range(self.layout.num_layers):
                self.layer_hook(plan, layer)
        seconds = launched.started.elapsed_time(launched.done) / 1000
        return StepResult(plan.step, launched.token_ids.numpy().copy(), seconds=seconds)

    def _replay(self, plan: StepPlan, turn: int) -> Tensor:
        assert self._graphs is not None
        graph = self._graphs.get(len(plan.rows))
        self._staged[turn].synchronize()
        staging = self._staging[turn][: 2 * graph.size]
        graph.fill(staging.numpy(), plan.rows, plan.num_computed_tokens)
        graph.numbers.copy_(staging, non_blocking=True)
        self._staged[turn].record()
        graph.graph.replay()
        return graph.sampled[: len(plan.rows)]

    def _record_decode(self, numbers: Tensor, size: int) -> Tensor:
        """One decode step of `size` rows, from numbers to sampled tokens."""
        rows, computed = numbers[:size], numbers[size:]
        starts = self._ordinals[: size + 1]
        inputs = self._inputs(rows, computed, starts, size, 1, size, None)
        return self._sample(self._decoder.forward(inputs), self._ordinals[:size], rows, inputs.seq_lens)

    def _run(self, plan: StepPlan) -> Tensor:
        """A step with prefill chunks, launched kernel by kernel."""
        num_seqs = len(plan.rows)
        counts = plan.num_scheduled_tokens.astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        chosen = np.flatnonzero(plan.samples)
        up = self._batch.upload(
            np.concatenate((plan.rows, plan.num_computed_tokens, starts, chosen, starts[chosen + 1] - 1))
        )
        numbers = up.int()
        rows, computed, query_starts, sampled_seqs, _ = numbers.split(
            [num_seqs, num_seqs, num_seqs + 1, len(chosen), len(chosen)]
        )
        chunks, prefixes = counts[plan.num_decodes :], plan.num_computed_tokens[plan.num_decodes :]
        tiles = make_tiles(chunks.tolist(), prefixes.tolist(), _TILE_ROWS, self._device) if len(chunks) else None
        inputs = self._inputs(rows, computed, query_starts, int(starts[-1]), int(counts.max()), plan.num_decodes, tiles)
        hidden = self._decoder.forward(inputs)
        if not len(chosen):
            return torch.empty(0, dtype=torch.int32, device=self._device)
        return self._sample(hidden[up[-len(chosen) :]], sampled_seqs, rows, inputs.seq_lens)

    def _inputs(
        self,
        rows: Tensor,
        computed: Tensor,
        query_starts: Tensor,
        num_tokens: int,
        max_chunk: int,
        num_decodes: int,
        tiles: object,
    ) -> StepInputs:
        made = torch.empty(3 * num_tokens + len(rows), dtype=torch.int32, device=self._device)
        tokens, positions, slots, seq_lens = made.split([num_tokens, num_tokens, num_tokens, len(rows)])
        batch = self._batch
        step_inputs(
            tokens,
            positions,
            slots,
            seq_lens,
            batch.token_ids,
            batch.block_table,
            rows,
            computed,
            query_starts,
            self.layout.block_size,
            max_chunk,
        )
        return StepInputs(tokens, positions, slots, rows, seq_lens, query_starts, num_decodes, tiles)  # type: ignore[arg-type]

    def _sample(self, hidden: Tensor, seqs: Tensor, rows: Tensor, seq_lens: Tensor) -> Tensor:
        logits = self._decoder.logits(hidden)
        sampled = torch.empty(len(seqs), dtype=torch.int32, device=self._device)
        greedy_tokens(logits, sampled, self._argmax)
        append_tokens(self._batch.token_ids, sampled, seqs, rows, seq_lens)
        return sampled

    def append_token(self, row: int, token_id: int) -> None:
        """Rows are admitted with every token known, the prefill worker's first included: nothing is left to do."""

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        """Copies one layer of these blocks to the host, on a stream of its own."""
        with torch.cuda.stream(self._copies), torch.inference_mode():
            index = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
            blocks = self._decoder.cache[layer].index_select(0, index).cpu()
        return memoryview(blocks.view(torch.uint8).numpy()).cast("B")

    def write_blocks(self, layer: int, block_ids: Sequence[BlockId], data: memoryview) -> None:
        """Copies one layer of these blocks from the host."""
        with torch.cuda.stream(self._copies), torch.inference_mode():
            index = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
            target = self._decoder.cache[layer]
            values = torch.frombuffer(data, dtype=target.dtype).view(len(block_ids), *target.shape[1:])
            target.index_copy_(0, index, values.to(self._device))
            self._copies.synchronize()

    def close(self) -> None:
        """Waits for what runs; the process's end frees the rest."""
        if self._launched:
            self._launched[-1].done.synchronize()
        self._launched.clear()
