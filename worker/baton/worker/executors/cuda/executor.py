"""The executor on one CUDA device. Steps are launched before the host has the tokens of earlier ones.

With batch_invariant, a request's tokens are bit-identical for any batch, any cut of its prompt, and with or without a
preemption: prompts use one attention kernel, generated tokens another, each with sums in an order that depends only on
the sequence, and blocks of generated tokens are not shared. Speculation implies it: a draft is one more decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.kernels.table import Case
from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.worker.adapters.head import NoHeadAdapters
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, HeadKind, Int32, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import LayerHook
from baton.worker.executors.cuda.adapters.device_rows import DeviceRows
from baton.worker.executors.cuda.adapters.tensors import CudaAdapters
from baton.worker.executors.cuda.compilation.ahead import collect_and_compile
from baton.worker.executors.cuda.compilation.compilers import Compilers
from baton.worker.executors.cuda.device_executor import DeviceExecutor
from baton.worker.executors.cuda.drafts.room import with_room_for_drafts
from baton.worker.executors.cuda.drafts.verified_steps import VerifiedSteps
from baton.worker.executors.cuda.eagle3 import CudaEagle3
from baton.worker.executors.cuda.failures import refusal_of
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.executors.cuda.kv.host_cache import HostCache
from baton.worker.executors.cuda.kv.host_pieces import HostPieces
from baton.worker.executors.cuda.proposers import Guesser, check_method, load_guesser, make_proposer
from baton.worker.executors.cuda.residency import Residency
from baton.worker.executors.cuda.sampling.generate_head import GenerateHead
from baton.worker.executors.cuda.startup.attention import device_of, make_paged, make_states, state_places
from baton.worker.executors.cuda.startup.facts import device_facts
from baton.worker.executors.cuda.startup.kv_scales import compute_scales
from baton.worker.executors.cuda.startup.memory import (
    allocate_kv,
    graph_bytes,
    num_kv_blocks,
)
from baton.worker.executors.cuda.startup.phases import StartPhases
from baton.worker.executors.cuda.startup.warm_up import largest_step, scoring_step, small_steps
from baton.worker.executors.cuda.startup.warm_up_adapters import with_adapters
from baton.worker.executors.cuda.startup.warm_up_pooled import largest_pooled_steps, small_pooled_steps
from baton.worker.executors.cuda.startup.warm_up_sizes import warm_up_sizes
from baton.worker.executors.cuda.steps.graphs import DecodeGraphs, graph_sizes
from baton.worker.executors.cuda.steps.launched import LaunchedSteps
from baton.worker.executors.cuda.steps.piecewise import Pieces, piece_bytes
from baton.worker.executors.cuda.steps.stepper import Stepper
from baton.worker.executors.host.draft_models import DraftMemory
from baton.worker.executors.kv_dtype import dtype_name, kv_dtype
from baton.worker.executors.kv_scales import (
    NoHead,
    check_same_scales,
    kv_scales_of,
    scale_plans,
    scaled_kv_spec,
    with_start_scales,
)
from baton.worker.executors.model_len import fitting_model_len
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.cuda.latent_device import LatentDevice
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.layers.self_check import check_products
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import Decoder
from baton.worker.models.model import make_model
from baton.worker.sampling.logprobs_mode import LogprobsMode
from baton.worker.speculation.speculator import Speculator
from baton.worker.speculation_settings import SpeculationSettings
from baton.worker.weights.loading import (
    LoadedModel,
)

_NONE = np.empty(0, np.int32)
# Of prompts whose linears use other kernels than decodes and the largest step; the second in batch-invariant mode.
_FEW_TOKENS, _MORE_TOKENS = 128, 256


class CudaExecutor(DeviceExecutor):
    """Implements baton.worker.executors.base.Executor."""

    _ops: CudaDevice | LatentDevice

    def __init__(self, config: WorkerConfig, compilers: Compilers, plugins: Plugins = NO_PLUGINS) -> None:
        super().__init__(config, plugins)
        self._config = config = with_room_for_drafts(self._config)
        check_method(config.speculation)
        device, phases = self._device, StartPhases(self._wait)
        loaded = with_start_scales(self._load(plugins), config)
        draft = load_guesser(config.speculation, config, self._options, loaded, self._dtype, device)
        self._kept = None if draft is None else draft.kept(loaded.config, config.max_num_requests, self._dtype, device)
        phases.end("weights")
        model_config, dtype, max_model_len = self._model_config, self._dtype, self._longest
        self._kv_dtype = kv_dtype(config, dtype)
        self.kv_spec = scaled_kv_spec(model_config, loaded, config.block_size, self._kv_dtype)
        self.kv_bytes: Sequence[NDArray[np.uint8]] | None = None
        self.adapters: CudaAdapters | None = None
        self.host: HostCache | None = None
        self._generates = HeadKind.GENERATE in model_config.heads
        self._captured = config.cuda_graphs and model_config.capturable
        self._graphs: DecodeGraphs | None = None
        self.verified: VerifiedSteps | None = None  # from the end of the start on, with speculation
        self._started = False  # the steps of a start read and write no states
        with torch.inference_mode():
            self._make_batch(loaded, dtype, max_model_len)
            self.kv = KvCopies(lambda: self._paged.cache, self.kv_spec.spans, state_places(self.kv_spec, self._paged))
            if config.calculate_kv_scales:
                self._compute_scales(loaded)
                phases.end("KV scales")
            self._host_pieces = HostPieces(self.kv, self.kv_spec, device)
            self.host = self._make_host_cache(phases)
            self._warm_up(model_config, dtype, compilers, phases)
            check_products(loaded.weights, loaded.config.experts, self._ops)
            phases.end("check of quantized weights")
            slot_bytes = 0 if self.adapters is None else self.adapters.num_bytes
            weights_bytes = loaded.weights.num_bytes + (0 if draft is None else draft.num_bytes)
            step_bytes = torch.cuda.max_memory_reserved(device) - weights_bytes - slot_bytes
            captured, wanted = self._graph_bytes(model_config, dtype), self.kv_spec.num_pages(config.num_blocks)
            page_bytes = self.kv_spec.page_bytes
            if draft is not None:  # has a block of its own for each
                page_bytes += draft.block_bytes
                captured += self._graph_bytes(draft.model, dtype)
            self.num_blocks = num_kv_blocks(replace(config, num_blocks=wanted), page_bytes, captured, device)
            capacity = self.kv_spec.most_tokens(self.num_blocks, config.max_num_batched_tokens)
            fitting = fitting_model_len(config.max_model_len, model_config.max_model_len, capacity)
            self.model = replace(self.model, max_model_len=fitting)
            self._restore(phases)
        if config.speculation is not None and self._generates:
            self.verified = self._verify(config.speculation, plugins, draft)
        self._residency = Residency(self._decoder, self._restore, self._forget, self._wait, device)
        self.facts = device_facts(config, loaded, dtype, self._kv_dtype, self.kv_spec, device, step_bytes, captured)
        phases.log(self.num_blocks, config.block_size)
        self._started = True

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        """Copies one layer of these blocks to the host, on a separate stream."""
        return self._host_pieces.read(layer, block_ids)

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer of these blocks from the host, and waits for that. Accepts only all heads."""
        self._host_pieces.write(layer, block_ids, data, heads)

    # Steps.

    def collect(self) -> StepResult:
        """Waits for the oldest step. Returns its result, with accepted drafts."""
        return super().collect() if self.verified is None else self.verified.collect()

    def ended(self) -> bool:
        """Returns whether `collect` returns at once."""
        return (self.verified is not None and self.verified.ended()) or super().ended()

    def sleep(self, level: int) -> int:
        """Frees the KV pool, the graphs and the weights, and the proposer's memory."""
        return super().sleep(level) + (0 if self.verified is None else self.verified.speculator.sleep())

    def close(self) -> None:
        super().close()
        if self.verified is not None:
            self.verified.close()

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, torch.cuda.Event, Any]:
        return super()._launch(plan if self.verified is None else self.verified.add(plan))

    def _draw(
        self,
        plan: StepPlan,
        started: torch.cuda.Event,
        undrawn: Any,
        masks: TokenMasks | None,
        left_out: Int32,
        waited: tuple[torch.cuda.Event, torch.cuda.Event] | None = None,
    ) -> None:
        if self.verified is None:
            super()._draw(plan, started, undrawn, masks, left_out, waited)
            return
        masks, left_out = self.verified.placed(masks, left_out)
        super()._draw(plan, started, undrawn, masks, left_out, waited)
        self.verified.launched()

    def _apply(self, plan: StepPlan) -> None:
        self._batch.apply(plan)
        if self.verified is not None:
            self._batch.write_tokens(*self.verified.drafts())
        if self.adapters is not None:
            self.adapters.admit(plan.admitted)
        for states in self._states:
            states.apply(plan)
            if self._started:
                states.check(plan)

    def _distrust(self, plan: StepPlan) -> None:
        self._batch.distrust(plan)

    def _check_read(self, loaded: LoadedModel, source: str) -> None:
        if not self._config.calculate_kv_scales:  # else those of the start stay
            check_same_scales(self.kv_spec, loaded, self._kv_dtype, source)

    def _watch_layer(self, hook: LayerHook, plan: StepPlan, layer: int) -> None:
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        written.record()
        self._watch.add(written, partial(hook, plan, self._kv_layers[layer]))

    def _compute(self, plan: StepPlan) -> Any:
        graphs = self._graphs
        if graphs is None or plan.num_decodes < len(plan.rows):
            hook = self._layer_hook if plan.num_decodes < len(plan.rows) else None
            on_written = None if hook is None else partial(self._watch_layer, hook, plan)
            return self._stepper.run(plan, self._heads[plan.head], on_written)
        adapted = self.adapters is not None and self.adapters.upload(plan, graphs.size_for(len(plan.rows)))
        rows = self._batch.rows_of(plan)
        undrawn = graphs.replay(rows, plan.num_computed_tokens, adapted=adapted)
        if self._kept is not None:
            self._kept.give_kept(rows, plan.num_computed_tokens.astype(np.int64))
        return undrawn

    # Start.

    def _verify(self, settings: SpeculationSettings, plugins: Plugins, draft: Guesser | None) -> VerifiedSteps:
        self.max_step_tokens = 1 + settings.num_speculative_tokens
        config, model, steps, num_rows = self._config, self.model, self._steps, self._config.max_num_requests
        memory = DraftMemory(num_rows, model.max_model_len, config.block_size, self.num_blocks)
        proposer = make_proposer(
            settings, draft, self._model_config, self._dtype, memory, config, self._device, plugins
        )
        if self._kept is not None:
            assert isinstance(proposer, CudaEagle3), "others read no hidden states"
            self._kept.reader = proposer
        speculator = Speculator(proposer, settings.method, num_rows, model.vocab_size)
        longest = self._batch.token_ids.shape[1]
        return VerifiedSteps(speculator, num_rows, longest, num_rows, steps.collect, steps.__len__)

    def _make_batch(self, loaded: LoadedModel, dtype: torch.dtype, max_model_len: int) -> None:
        config, model, device = self._config, loaded.config, self._device
        rows = config.max_num_requests
        spec, self._kv_layers = self.kv_spec, self.kv_spec.kv_layers
        self._batch = DeviceBatch(rows, max_model_len, config.block_size, device, len(spec.token_groups))
        if config.enable_lora:
            self.adapters = CudaAdapters(config, model, dtype, device)
        generate = self._make_generate_head(model) if self._generates else None
        self._heads = {} if generate is None else {HeadKind.GENERATE: generate}
        if model.pooler is not None:
            self._heads[HeadKind.POOL] = self._make_pool_head(model, chunked=True)
        self._steps = LaunchedSteps(rows, self.depth, self._watch, self._wait, traced=bool(config.trace_steps))
        self._paged = make_paged(
            config,
            model,
            spec,
            allocate_kv(spec, self._kv_dtype, 1, device),
            self._batch.block_tables,
            dtype,
            kv_scales_of(loaded, device) if config.kv_cache_dtype != "auto" else None,
        )
        cos_sin = cos_sin_tables(model.ropes, model.rope_head_dim, max_model_len)
        self._states = make_states(spec, self._paged, rows)
        self._ops = device_of(config, self._paged, cos_sin, self._states)
        decoding = self._ops if self.adapters is None else self.adapters.device_over(self._ops)
        self._decoder = make_model(model, loaded.weights, decoding)
        self._stepper = Stepper(
            self._batch,
            self._decoder,
            self._paged,
            generate,
            rows,
            config.block_size,
            device,
            self._states,
            batch_invariant=config.invariant,
            adapters=self.adapters,
            kept=self._kept,
        )

    def _compute_scales(self, loaded: LoadedModel) -> None:
        """Sets the scales of the KV from steps of random tokens."""
        model, block_size = loaded.config, self._config.block_size

        def run(plan: StepPlan) -> None:
            self._batch.apply(plan)
            self._stepper.run(plan, NoHead(), None)

        most = self._config.max_num_batched_tokens
        num_groups = len(self.kv_spec.groups)
        plans = scale_plans(model.vocab_size, self._batch.token_ids.shape[1], block_size, most, num_groups)
        assert isinstance(self._paged, PagedAttention), "KV of 8 bits is refused of other attention"
        found = compute_scales(self._paged, model.layers[0].grouped, self.kv_spec, plans, run)
        self._batch.block_tables.zero_()  # before there is a pool, steps write to its first block
        self.kv_spec = scaled_kv_spec(model, replace(loaded, kv_scales=found), block_size, self._kv_dtype)

    def _make_generate_head(self, model: ModelConfig) -> GenerateHead:
        return GenerateHead(
            self._batch,
            self._config.max_num_requests,
            model.vocab_size,
            self._dtype,
            self._device,
            captured=self._captured,
            batch_invariant=self._config.invariant,
            processors=self.processors,
            logprobs_mode=LogprobsMode(self._config.logprobs_mode),
            adapters=self.adapters or NoHeadAdapters(),
        )

    def _make_host_cache(self, phases: StartPhases) -> HostCache | None:
        config = self._config
        num_slots = config.num_host_blocks(self.kv_spec.page_bytes)
        if not num_slots:
            return None
        cache = HostCache(self.kv, self.kv_spec, num_slots, config.max_num_batched_tokens, self._device, self._wait)
        phases.end(f"{num_slots} blocks of host memory")
        return cache

    def _varied_sizes(self, model: ModelConfig, dtype: torch.dtype) -> list[int]:
        """Returns the numbers of tokens of steps whose packed linears or experts take kernels of their own."""
        config, device = self._config, self._device
        capability, _ = torch.cuda.get_device_capability(device)
        case = Case("cuda", capability, dtype, batch_invariant=config.invariant)
        return warm_up_sizes(model, self._decoder.weights, case, config.max_num_batched_tokens, device)

    def _warm_up(self, model: ModelConfig, dtype: torch.dtype, compilers: Compilers, phases: StartPhases) -> None:
        """Runs the largest step, for its peak of memory, and all kinds of small steps."""
        config = self._config
        rows, most = config.max_num_requests, config.max_num_batched_tokens
        if self._generates:
            longest = self.model.max_model_len
            largest = [largest_step(most, longest, rows), scoring_step(most, longest)]
            few = [_FEW_TOKENS, _MORE_TOKENS] if config.invariant else [_FEW_TOKENS]
            small = small_steps(rows, self.model.vocab_size)
            small += [largest_step(min(tokens, most), longest, rows) for tokens in few]
            small += [largest_step(size, longest, rows) for size in self._varied_sizes(model, dtype)]
        else:
            assert model.pooler is not None, "models that do not generate pool"
            largest = largest_pooled_steps(model.pooler, most, self.model.max_model_len, rows)
            small = small_pooled_steps(model.pooler, self.model.max_model_len, rows)
        if self.adapters is not None:
            small += with_adapters([*largest, *small], self.adapters, most, longest=self.model.max_model_len, rows=rows)
        collect_and_compile(partial(self._run_all, [*largest, *small]), self._wait, compilers)
        phases.end("kernels")
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._run_all([*largest, *small])
        except Exception as error:
            raise (refusal_of(error, config, model, dtype_name(dtype)) or error) from error
        phases.end("largest step")

    def _run_all(self, plans: Sequence[StepPlan]) -> None:
        """Runs attention in all its specializations, then these steps."""
        if self.host is not None:
            self.kv.warm_up()
        self._ops.warm_up()
        for plan in plans:
            self._draw(*self._launch(plan), plan.masks, _NONE)
            self.collect()

    def _restore(self, phases: StartPhases) -> None:
        """Allocates the pool, and captures graphs at its address and those of the weights."""
        self._paged.cache = allocate_kv(self.kv_spec, self._kv_dtype, self.num_blocks, self._device)
        phases.end("KV pool")
        self._record_graphs(phases)

    def _forget(self) -> None:
        """Drops the pool, and everything with addresses of it and of the weights."""
        self._graphs = self._stepper.pieces = None
        self.kv.release()
        self._paged.cache = self._paged.cache.new_empty((self._paged.cache.shape[0], 0))

    def _record_graphs(self, phases: StartPhases) -> None:
        """Captures the steps with the current addresses of weights and pool."""
        config = self._config
        if not self._captured:
            return
        if self._generates:
            sizes = graph_sizes(config.max_num_requests)
            progress, adapters = phases.progress("decode graphs"), self._adapter_rows
            self._graphs = DecodeGraphs(sizes, self._device, self._stepper, progress, adapters)
            phases.end("decode graphs")
        if isinstance(self._decoder, Decoder) and not config.invariant and not self._states:
            most, num_groups = config.max_num_batched_tokens, len(self.kv_spec.groups)
            pieces = Pieces(
                self._decoder, self._model_config, most, self._dtype, self._device, num_groups, self._adapter_rows
            )
            pieces.record(phases.progress("layer graphs"))
            self._stepper.pieces = pieces
            phases.end("layer graphs")

    @property
    def _adapter_rows(self) -> DeviceRows | None:
        return None if self.adapters is None else self.adapters.rows

    def _graph_bytes(self, model: ModelConfig, dtype: torch.dtype) -> int:
        """Estimates the memory of the graphs, which are not captured yet."""
        config = self._config
        if not self._captured:
            return 0
        whole = graph_bytes(model, dtype, graph_sizes(config.max_num_requests)) if self._generates else 0
        recorded = model.transformers is None and not model.state_layers
        pieces = piece_bytes(model, dtype, config.max_num_batched_tokens) if recorded else 0
        return (whole + pieces) * (1 if self.adapters is None else 2)
