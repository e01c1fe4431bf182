"""The executor on one CUDA device: steps are launched ahead of the host's knowledge of their tokens."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from baton.kernels.prefill_attention import PrefillTiles, make_tiles
from baton.kernels.step_inputs import step_inputs
from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, RowInit, SamplingParams, StepPlan, StepResult
from baton.worker.cuda.batch import DeviceBatch
from baton.worker.cuda.decoder import Decoder, StepInputs
from baton.worker.cuda.graphs import DecodeGraphs, graph_sizes
from baton.worker.cuda.memory import check_weights_fit, num_blocks_that_fit, open_device
from baton.worker.cuda.sampler import DeviceSampler, PendingLogprobs
from baton.worker.executor.base import KvLayout, LayerHook, ModelSpec
from baton.worker.model.config import ModelConfig
from baton.worker.model.loading import load_model, read_config
from baton.worker.model.rope import cos_sin_table

_log = logging.getLogger(__name__)

_TILE_ROWS = 128
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class _Launched:
    step: int
    plan: StepPlan
    token_ids: Tensor  # pinned
    logprobs: PendingLogprobs | None
    started: torch.cuda.Event
    done: torch.cuda.Event


class CudaExecutor:
    """Implements baton.worker.executor.base.Executor."""

    depth = 2

    def __init__(self, config: WorkerConfig) -> None:
        phases = _Phases()
        device = open_device()
        model_config = read_config(config.model, config.load_format)
        dtype = _DTYPES[config.dtype] if config.dtype != "auto" else _auto_dtype(model_config)
        check_weights_fit(model_config, dtype, device)
        loaded = load_model(config.model, config.load_format, dtype, device)
        phases.end("weights")
        max_model_len = _max_model_len(config.max_model_len, model_config)
        self.model = ModelSpec(loaded.digest, model_config.vocab_size, max_model_len, model_config.eos_token_ids)
        self.layout = _layout(model_config, loaded.digest, config.block_size, dtype)
        self.layer_hook: LayerHook | None = None
        self._device = device
        rows = config.max_num_requests
        self._batch = DeviceBatch(rows, max_model_len, config.block_size, device)
        self._sampler = DeviceSampler(rows, model_config.vocab_size, self._batch, device)
        cos_sin = cos_sin_table(model_config.rope, model_config.head_dim, max_model_len).to(device)
        self._decoder = Decoder(model_config, loaded.weights, cos_sin, self._cache(1), self._batch.block_table, rows)
        self._ordinals = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._launched: deque[_Launched] = deque()
        self._pinned = [torch.empty(rows, dtype=torch.int32, pin_memory=True) for _ in range(self.depth + 2)]
        self._turn = 0
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: DecodeGraphs | None = None
        self._warm_up(min(config.max_num_batched_tokens, max_model_len))
        phases.end("largest step")
        self.num_blocks = self._num_blocks(config)
        # Zeros: kernels read beyond a sequence's end, and weigh what they find there with 0.
        self._decoder.cache = self._cache(self.num_blocks)
        phases.end("KV pool")
        if config.cuda_graphs:
            with torch.inference_mode():
                self._graphs = DecodeGraphs(graph_sizes(rows), device, self._record_decode, self._record_logits)
            phases.end("decode graphs")
        phases.log(self.num_blocks, config.block_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queues the step on the device. Returns before it runs."""
        started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        started.record()
        self._batch.apply(plan)
        self._sampler.admit(plan.admitted)
        logprobs: PendingLogprobs | None = None
        plain = self._sampler.is_plain(plan.rows)
        if self._graphs is None or plan.num_decodes < len(plan.rows):
            sampled, logprobs = self._run(plan, plain)
        else:
            graph = self._graphs.get(len(plan.rows), plain)
            out = graph.replay(plan.rows, plan.num_computed_tokens)
            if plain:
                sampled = out
            else:
                count = len(plan.rows)
                lengths = graph.numbers[graph.size : graph.size + count] + 1
                sampled, logprobs = self._sampler.draw_special(out, graph.numbers[:count], lengths, plan)
        self._turn = (self._turn + 1) % len(self._pinned)
        token_ids = self._pinned[self._turn][: len(sampled)]
        token_ids.copy_(sampled, non_blocking=True)
        done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        done.record()
        self._launched.append(_Launched(plan.step, plan, token_ids, logprobs, started, done))

    def collect(self) -> StepResult:
        """Waits for the oldest step."""
        launched = self._launched.popleft()
        launched.done.synchronize()
        plan = launched.plan
        if self.layer_hook is not None and plan.num_decodes < len(plan.rows):
            for layer in range(self.layout.num_layers):
                self.layer_hook(plan, layer)
        return StepResult(
            step=launched.step,
            token_ids=launched.token_ids.numpy().copy(),
            logprobs={} if launched.logprobs is None else launched.logprobs.read(),
            seconds=launched.started.elapsed_time(launched.done) / 1000,
        )

    def append_token(self, row: int, token_id: int) -> None:
        """Adds a token that another worker sampled."""
        raise AssertionError(f"row {row}: a request is admitted with every token that is known ({token_id} is not)")

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        """Copies one layer of these blocks to the host, on a stream of its own."""
        with torch.cuda.stream(self._copies), torch.inference_mode():
            index = torch.tensor(block_ids, dtype=torch.int64).to(self._device)
            blocks = self._decoder.cache[layer].index_select(0, index).cpu()
        return memoryview(cast(bytearray, blocks.view(torch.uint8).numpy())).cast("B")

    def write_blocks(self, layer: int, block_ids: Sequence[BlockId], data: memoryview) -> None:
        """Copies one layer of these blocks from the host. Returns when they are in."""
        expected = len(block_ids) * self.layout.bytes_per_block_layer
        if data.nbytes != expected:
            raise InvalidRequest(
                f"{data.nbytes} bytes for {len(block_ids)} blocks; it must be {expected}", field="data"
            )
        with torch.cuda.stream(self._copies), torch.inference_mode():
            target = self._decoder.cache[layer]
            values = torch.frombuffer(bytearray(data), dtype=target.dtype).view(len(block_ids), *target.shape[1:])
            index = torch.tensor(block_ids, dtype=torch.int64).to(self._device)
            target.index_copy_(0, index, values.to(self._device))
            self._copies.synchronize()

    def close(self) -> None:
        """Waits for what runs; the process's end frees the rest."""
        if self._launched:
            self._launched[-1].done.synchronize()
        self._launched.clear()

    # Steps.

    def _record_decode(self, numbers: Tensor, size: int) -> Tensor:
        """One decode step of `size` rows, from numbers to sampled tokens."""
        inputs = self._decode_inputs(numbers, size)
        return self._sampler.draw(self._decoder.logits(self._decoder.forward(inputs)), numbers[:size], inputs.seq_lens)

    def _record_logits(self, numbers: Tensor, size: int) -> Tensor:
        """The same, as far as the logits."""
        return self._decoder.logits(self._decoder.forward(self._decode_inputs(numbers, size)))

    def _decode_inputs(self, numbers: Tensor, size: int) -> StepInputs:
        starts = self._ordinals[: size + 1]
        return self._inputs(numbers[:size], numbers[size:], starts, size, 1, size, None)

    def _run(self, plan: StepPlan, plain: bool) -> tuple[Tensor, PendingLogprobs | None]:
        """A step with prefill chunks, launched kernel by kernel."""
        num_seqs, decodes = len(plan.rows), plan.num_decodes
        counts = plan.num_scheduled_tokens.astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        chosen = np.flatnonzero(plan.samples)
        up = self._batch.upload(
            np.concatenate(
                (plan.rows, plan.num_computed_tokens, starts, plan.rows[chosen], chosen, starts[chosen + 1] - 1)
            )
        )
        sizes = [num_seqs, num_seqs, num_seqs + 1, len(chosen), len(chosen), len(chosen)]
        rows, computed, query_starts, chosen_rows, _, _ = up.int().split(sizes)  # type: ignore[no-untyped-call]
        tiles = None
        if decodes < num_seqs:
            prefixes = plan.num_computed_tokens[decodes:]
            tiles = make_tiles(counts[decodes:].tolist(), prefixes.tolist(), _TILE_ROWS, self._device)
        inputs = self._inputs(rows, computed, query_starts, int(starts[-1]), int(counts.max()), decodes, tiles)
        hidden = self._decoder.forward(inputs)
        if not len(chosen):
            return torch.empty(0, dtype=torch.int32, device=self._device), None
        picked, last = up[-2 * len(chosen) :].view(2, -1)
        logits = self._decoder.logits(hidden[last])
        seq_lens = inputs.seq_lens[picked]
        if plain:
            return self._sampler.draw(logits, chosen_rows, seq_lens), None
        return self._sampler.draw_special(logits, chosen_rows, seq_lens, plan)

    def _inputs(
        self,
        rows: Tensor,
        computed: Tensor,
        query_starts: Tensor,
        num_tokens: int,
        max_chunk: int,
        num_decodes: int,
        tiles: PrefillTiles | None,
    ) -> StepInputs:
        made = torch.empty(3 * num_tokens + len(rows), dtype=torch.int32, device=self._device)
        tokens, positions, slots = made[: 3 * num_tokens].view(3, num_tokens)
        seq_lens = made[3 * num_tokens :]
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
        return StepInputs(tokens, positions, slots, rows, seq_lens, query_starts, num_decodes, tiles)

    # Start.

    def _cache(self, num_blocks: int) -> Tensor:
        layout = self.layout
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        return torch.zeros(shape, dtype=_DTYPES[layout.dtype], device=self._device)

    def _warm_up(self, num_tokens: int) -> None:
        """Runs the largest prefill, for its memory, and a step beside decodes; all of it into one block."""
        torch.cuda.reset_peak_memory_stats(self._device)
        init = RowInit(self._batch.first_row, [0] * num_tokens, num_tokens, SamplingParams(temperature=1.0, top_p=0.5))
        rows = np.zeros(1, np.int32)
        plan = StepPlan(
            step=0,
            admitted=[init],
            rows=rows,
            num_scheduled_tokens=rows + num_tokens,
            num_computed_tokens=rows,
            samples=np.ones(1, np.bool_),
        )
        self.launch(plan)
        self.collect()

    def _num_blocks(self, config: WorkerConfig) -> int:
        per_block = self.layout.bytes_per_block
        if config.num_blocks:
            return config.num_blocks
        if config.kv_cache_memory:
            if config.kv_cache_memory < per_block:
                raise InvalidRequest(
                    f"kv_cache_memory={config.kv_cache_memory} holds no block: it must be at least {per_block} bytes",
                    field="kv_cache_memory",
                )
            return config.kv_cache_memory // per_block
        peak = torch.cuda.max_memory_reserved(self._device)
        return num_blocks_that_fit(per_block, config.gpu_memory_utilization, peak, self._device)


class _Phases:
    """How long each part of the start took."""

    def __init__(self) -> None:
        self._seconds: list[tuple[str, float]] = []
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self._seconds.append((name, now - self._last))
        self._last = now
        _log.info("start: %s in %.1f s", *self._seconds[-1])

    def log(self, num_blocks: int, block_size: int) -> None:
        total = sum(seconds for _, seconds in self._seconds)
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds)
        _log.info("executor ready in %.1f s (%s) with %d blocks of %d tokens", total, parts, num_blocks, block_size)


def _auto_dtype(config: ModelConfig) -> torch.dtype:
    return _DTYPES.get(config.dtype, torch.bfloat16)


def _layout(config: ModelConfig, digest: bytes, block_size: int, dtype: torch.dtype) -> KvLayout:
    return KvLayout(
        model_digest=digest,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        bytes_per_block_layer=2 * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize,
    )


def _max_model_len(wanted: int, config: ModelConfig) -> int:
    if wanted > config.max_model_len:
        raise InvalidRequest(
            f"max_model_len={wanted} is beyond the model's own limit: at most {config.max_model_len}",
            field="max_model_len",
        )
    return wanted or config.max_model_len
