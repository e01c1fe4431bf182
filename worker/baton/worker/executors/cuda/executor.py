"""The executor on one CUDA device. Steps are launched before the host has the tokens of earlier ones.

With batch_invariant, a request's tokens are bit-identical for any batch, any cut of its prompt, and with or without a
preemption: prompts use one attention kernel, generated tokens another, each with sums in an order that depends only on
the sequence, and blocks of generated tokens are not shared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, HeadKind, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import LayerHook, NewWeights
from baton.worker.executors.cuda.compilation.ahead import collect_and_compile
from baton.worker.executors.cuda.completions import DeviceWatch
from baton.worker.executors.cuda.failures import raise_if_lost, refusal_of
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.executors.cuda.kv.host_cache import HostCache
from baton.worker.executors.cuda.kv.host_pieces import HostPieces
from baton.worker.executors.cuda.residency import Residency
from baton.worker.executors.cuda.sampling.generate_head import GenerateHead
from baton.worker.executors.cuda.sampling.undrawn import Undrawn
from baton.worker.executors.cuda.startup.facts import device_facts
from baton.worker.executors.cuda.startup.kv_scales import check_same_scales, kv_scales_of, scaled_kv_spec
from baton.worker.executors.cuda.startup.memory import (
    allocate_kv,
    check_weights_fit,
    graph_bytes,
    num_kv_blocks,
    open_device,
)
from baton.worker.executors.cuda.startup.phases import StartPhases
from baton.worker.executors.cuda.startup.support import (
    check_supported,
    compute_dtype,
    dtype_name,
    kv_dtype,
)
from baton.worker.executors.cuda.startup.warm_up import largest_step, scoring_step, small_steps
from baton.worker.executors.cuda.steps.graphs import DecodeGraphs, graph_sizes
from baton.worker.executors.cuda.steps.launched import LaunchedSteps, record_event
from baton.worker.executors.cuda.steps.piecewise import Pieces, piece_bytes
from baton.worker.executors.cuda.steps.stepper import Stepper
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.memory_part import ALL_PARTS, MemoryPart, require_all
from baton.worker.executors.model_len import fitting_model_len, wanted_model_len
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import Decoder
from baton.worker.models.model import Weights, make_model
from baton.worker.sampling.processors.interface import ProcessorContext
from baton.worker.sampling.processors.processor_set import start_processors
from baton.worker.weights.build import is_redundant, weight_bytes
from baton.worker.weights.loading import (
    LoadedModel,
    check_same,
    load_model,
    model_options,
    other_options,
    read_config,
)
from baton.worker.weights.tensor_update import TensorUpdate

_log = logging.getLogger(__name__)
_NONE = np.empty(0, np.int32)
_ROOM = 1.1  # of free memory, as a multiple of new weights


class CudaExecutor:
    """Implements baton.worker.executors.base.Executor."""

    depth = 2
    max_step_tokens = 1

    def __init__(self, config: WorkerConfig, plugins: Plugins = NO_PLUGINS) -> None:
        device = open_device()
        config = with_device_limits(config)
        self._wait = partial(torch.cuda.synchronize, device)
        phases = StartPhases(self._wait)
        self._options = model_options(config, plugins)
        model_config = read_config(config.model, config.load_format, self._options)
        dtype = compute_dtype(config, model_config)
        check_supported(config, model_config, dtype, device)
        check_weights_fit(model_config, dtype, device)
        loaded = load_model(config.model, config.load_format, dtype, device, self._options)
        phases.end("weights")
        self._longest = max_model_len = wanted_model_len(config.max_model_len, model_config.max_model_len)
        self._kv_dtype = kv_dtype(config, dtype)
        self.model = ModelSpec(
            loaded.digest, model_config.vocab_size, max_model_len, model_config.eos_token_ids, model_config.heads
        )
        self.processors = start_processors(plugins, ProcessorContext(model_config.vocab_size, device))
        self.kv_spec = scaled_kv_spec(model_config, loaded, config.block_size, self._kv_dtype)
        self._layer_hook: LayerHook | None = None
        self.kv_bytes: Sequence[NDArray[np.uint8]] | None = None
        self.host: HostCache | None = None
        self._config = config
        self._model_config = model_config
        self._captured = config.cuda_graphs and model_config.capturable
        self._dtype = dtype
        self._source = config.model
        self._device = device
        self._graphs: DecodeGraphs | None = None
        self._undrawn: tuple[StepPlan, torch.cuda.Event, Undrawn] | None = None  # a step whose masks follow
        self._computed: torch.cuda.Event | None = None  # the end of its forward pass
        self._watch = DeviceWatch()
        self.kv = KvCopies(lambda: self._paged.cache)
        self._host_pieces = HostPieces(self.kv, self.kv_spec, device)
        with torch.inference_mode():
            self._make_batch(loaded, dtype, max_model_len)
            self.host = self._make_host_cache(phases)
            self._warm_up(model_config, dtype)
            phases.end("largest step, kernels")
            step_bytes = torch.cuda.max_memory_reserved(device) - loaded.weights.num_bytes
            per_block, captured = self.kv_spec.bytes_per_block, self._graph_bytes(model_config, dtype)
            self.num_blocks = num_kv_blocks(config, per_block, captured, device)
            fitting = fitting_model_len(
                config.max_model_len, model_config.max_model_len, self.num_blocks * config.block_size
            )
            self.model = replace(self.model, max_model_len=fitting)
            self._paged.cache = self._allocate()
            phases.end("KV pool")
            self._record_graphs(phases)
        self._residency = Residency(
            self._decoder,
            self._paged,
            self._allocate,
            self._record_graphs,
            self._forget_addresses,
            self._wait,
            device,
        )
        self.facts = device_facts(config, loaded, dtype, self._kv_dtype, self.kv_spec, device, step_bytes, captured)
        phases.log(self.num_blocks, config.block_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queues the step on the device. Returns before it runs.

        Raises DeviceLost if the device is lost. After any other error the next launch works.
        """
        try:
            undrawn = self._launch(plan)
            if plan.masks_follow:
                self._undrawn, self._computed = undrawn, record_event()
            else:
                self._draw(*undrawn, plan.masks, _NONE)
        except Exception as error:
            self._recover(plan, error)
            raise

    @torch.inference_mode()
    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Queues the sampling of the last launch, with its masks. Raises as launch."""
        step, self._undrawn = self._undrawn, None
        assert step is not None, "a step was launched whose masks follow"
        assert self._computed is not None, "its forward pass has an end"
        try:
            self._draw(*step, masks, undrawn, (self._computed, record_event()))
        except Exception as error:
            self._recover(step[0], error)
            raise

    def collect(self) -> StepResult:
        """Waits for the oldest step. Returns its result."""
        return self._steps.collect()

    def ended(self) -> bool:
        """Returns whether `collect` would return at once."""
        return self._steps.ended()

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Calls `wake`, on another thread, when a step has ended, including those in flight. None stops that."""
        self._steps.watch(wake)

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._layer_hook = hook

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        """Copies one layer of these blocks to the host, on a separate stream."""
        return self._host_pieces.read(layer, block_ids)

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer of these blocks from the host, and waits for that. Accepts only all heads."""
        self._host_pieces.write(layer, block_ids, data, heads)

    def close(self) -> None:
        """Waits for running work. Memory is freed at the end of the process."""
        if self._steps.drop() or self._undrawn is not None:
            try:
                torch.cuda.current_stream(self._device).synchronize()
            except Exception as error:  # already reported; closing must continue
                _log.debug("the device failed before it was closed: %s", error)
        self._watch.close()

    # Sleep, wake-up and new weights.

    def read_weights(self, model: str) -> NewWeights:
        """Reads weights of the same architecture into host memory."""
        source = model or self._source
        options = other_options(self._options, self._longest, is_same=source == self._source)
        check_same(self._model_config, read_config(source, self._config.load_format, options), source)
        loaded = load_model(source, self._config.load_format, self._dtype, options=options)
        check_same_scales(self.kv_spec, loaded, self._kv_dtype, source)
        return NewWeights(source, loaded.digest, loaded.weights)

    def new_update(self) -> TensorUpdate:
        """Returns an update that collects the model's tensors."""
        return TensorUpdate(self._model_config, partial(is_redundant, config=self._model_config))

    @torch.inference_mode()
    def read_update(self, update: TensorUpdate) -> NewWeights:
        """Copies an update's tensors: on the device if it has room for them, otherwise to host memory."""
        self._wait()  # for the trainer's work on these tensors
        free, _ = torch.cuda.mem_get_info(self._device)
        fits = weight_bytes(self._model_config, self._dtype) * _ROOM < free
        weights = update.build(self._dtype, self._device if fits else torch.device("cpu"))
        digest = update.digest(self.model.digest)
        self._wait()  # the engine's thread has a stream of its own
        return NewWeights(self._source, digest, weights)

    def use_weights(self, new: NewWeights) -> None:
        """Overwrites the weights in use."""
        self._residency.overwrite(cast(Weights, new.weights))
        self._adopt(new)

    def sleep(self, level: int) -> int:
        """Frees the KV pool, the graphs and the weights; on level 1, copies the weights to pinned host memory."""
        return self._residency.sleep(level)

    def wake(self, new: NewWeights | None, parts: frozenset[MemoryPart] = ALL_PARTS) -> None:
        """Restores the weights, allocates the pool, and captures the graphs again."""
        require_all(parts, "cuda")
        self._residency.wake(None if new is None else cast(Weights, new.weights))
        if new is not None:
            self._adopt(new)

    def _adopt(self, new: NewWeights) -> None:
        self._source = new.model
        self.model = replace(self.model, digest=new.digest)
        self.kv_spec = replace(self.kv_spec, model_digest=new.digest)

    # Steps.

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, torch.cuda.Event, Undrawn]:
        started = record_event()
        self._batch.apply(plan)
        for head in self._heads.values():
            head.take_rows(plan)
        return plan, started, self._compute(plan)

    def _draw(
        self,
        plan: StepPlan,
        started: torch.cuda.Event,
        undrawn: Undrawn,
        masks: TokenMasks | None,
        left_out: Int32,
        waited: tuple[torch.cuda.Event, torch.cuda.Event] | None = None,
    ) -> None:
        computed = self._heads[plan.head].finish(plan, undrawn, masks, left_out)
        self._steps.add(plan, computed, started, waited)

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Prepares the next launch after one that failed. Raises DeviceLost if there can be none."""
        self._batch.distrust(plan)
        raise_if_lost(error, self._wait)
        self._ops.reset()

    def _watch_layer(self, hook: LayerHook, plan: StepPlan, layer: int) -> None:
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        written.record()
        self._watch.add(written, partial(hook, plan, layer))

    def _compute(self, plan: StepPlan) -> Undrawn:
        graphs = self._graphs
        if graphs is None or plan.num_decodes < len(plan.rows):
            hook = self._layer_hook if plan.num_decodes < len(plan.rows) else None
            on_written = None if hook is None else partial(self._watch_layer, hook, plan)
            return self._stepper.run(plan, self._heads[plan.head], on_written)
        return graphs.replay(self._batch.rows_of(plan), plan.num_computed_tokens)

    # Start.

    def _make_batch(self, loaded: LoadedModel, dtype: torch.dtype, max_model_len: int) -> None:
        config, model, device = self._config, loaded.config, self._device
        rows = config.max_num_requests
        self._batch = DeviceBatch(rows, max_model_len, config.block_size, device)
        generate = GenerateHead(
            self._batch,
            rows,
            model.vocab_size,
            dtype,
            device,
            captured=self._captured,
            batch_invariant=config.batch_invariant,
            processors=self.processors,
        )
        self._heads = {HeadKind.GENERATE: generate}
        self._steps = LaunchedSteps(rows, self.depth, self._watch, self._wait, traced=bool(config.trace_steps))
        self._paged = PagedAttention(
            model.layers[0].attention,
            model.windows,
            allocate_kv(self.kv_spec, self._kv_dtype, 1, device),
            self._batch.block_table,
            rows,
            dtype,
            kv_scale=kv_scales_of(loaded, device) if config.kv_cache_dtype != "auto" else None,
            batch_invariant=config.batch_invariant,
        )
        cos_sin = cos_sin_tables(model.ropes, model.head_dim, max_model_len)
        self._ops = CudaDevice(self._paged, cos_sin, batch_invariant=config.batch_invariant)
        self._decoder = make_model(model, loaded.weights, self._ops)
        self._stepper = Stepper(
            self._batch,
            self._decoder,
            self._paged,
            generate,
            rows,
            config.block_size,
            device,
            batch_invariant=config.batch_invariant,
        )

    def _make_host_cache(self, phases: StartPhases) -> HostCache | None:
        config = self._config
        num_slots = config.num_host_blocks(self.kv_spec.bytes_per_block)
        if not num_slots:
            return None
        cache = HostCache(self.kv, self.kv_spec, num_slots, config.max_num_batched_tokens, self._device, self._wait)
        self.kv.warm_up()
        phases.end(f"{num_slots} blocks of host memory")
        return cache

    def _warm_up(self, model: ModelConfig, dtype: torch.dtype) -> None:
        """Runs the largest step, for its peak of memory, and all kinds of small steps."""
        config = self._config
        rows = config.max_num_requests
        largest = largest_step(config.max_num_batched_tokens, self.model.max_model_len, rows)
        scoring = scoring_step(config.max_num_batched_tokens, self.model.max_model_len)
        small = small_steps(rows, self.model.vocab_size)
        collect_and_compile(partial(self._run_all, [*small, scoring, largest]), self._wait)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._run_all([largest, scoring, *small])
        except Exception as error:
            raise (refusal_of(error, config, model, dtype_name(dtype)) or error) from error

    def _run_all(self, plans: Sequence[StepPlan]) -> None:
        """Runs decode attention in all its specializations, then these steps."""
        self._ops.warm_up()
        for plan in plans:
            self._draw(*self._launch(plan), plan.masks, _NONE)
            self.collect()

    def _allocate(self) -> Tensor:
        return allocate_kv(self.kv_spec, self._kv_dtype, self.num_blocks, self._device)

    def _forget_addresses(self) -> None:  # of weights and pool
        self._graphs = self._stepper.pieces = None
        self.kv.release()

    def _record_graphs(self, phases: StartPhases) -> None:
        """Captures the steps with the current addresses of weights and pool."""
        config = self._config
        if not self._captured:
            return
        sizes = graph_sizes(config.max_num_requests)
        self._graphs = DecodeGraphs(sizes, self._device, self._stepper, phases.progress("decode graphs"))
        phases.end("decode graphs")
        if isinstance(self._decoder, Decoder) and not config.batch_invariant:
            pieces = Pieces(self._decoder, self._model_config, config.max_num_batched_tokens, self._dtype, self._device)
            pieces.record(phases.progress("layer graphs"))
            self._stepper.pieces = pieces
            phases.end("layer graphs")

    def _graph_bytes(self, model: ModelConfig, dtype: torch.dtype) -> int:
        """Estimates the memory of the graphs, which are not captured yet."""
        config = self._config
        if not self._captured:
            return 0
        whole = graph_bytes(model, dtype, graph_sizes(config.max_num_requests))
        pieces = 0 if model.transformers else piece_bytes(model, dtype, config.max_num_batched_tokens)
        return whole + pieces
