"""The executor on one CUDA device: steps are launched ahead of the host's knowledge of their tokens.

Under batch_invariant a request's tokens are bit-identical whatever shares its batch, however its prompt was cut, and
whether it was preempted: prompts go through one attention kernel, generated tokens through another, each with sums
whose order depends on the sequence alone, and blocks of generated tokens are not shared.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, HeadKind, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import LayerHook, NewWeights
from baton.worker.executors.cuda.compilation.ahead import collect_and_compile
from baton.worker.executors.cuda.completions import DeviceWatch
from baton.worker.executors.cuda.failures import raise_if_lost, refusal_of
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.executors.cuda.kv.host_cache import HostCache
from baton.worker.executors.cuda.residency import Residency
from baton.worker.executors.cuda.sampling.generate_head import Computed, GenerateHead
from baton.worker.executors.cuda.sampling.undrawn import Undrawn, leave_out
from baton.worker.executors.cuda.startup.memory import (
    allocate_kv,
    check_weights_fit,
    graph_bytes,
    num_blocks_that_fit,
    open_device,
)
from baton.worker.executors.cuda.startup.phases import StartPhases
from baton.worker.executors.cuda.startup.support import check_supported, compute_dtype, dtype_name, kv_dtype
from baton.worker.executors.cuda.startup.warm_up import largest_step, scoring_step, small_steps
from baton.worker.executors.cuda.steps.graphs import DecodeGraphs, Progress, graph_sizes
from baton.worker.executors.cuda.steps.piecewise import Pieces, piece_bytes
from baton.worker.executors.cuda.steps.stepper import Stepper
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.device import CudaDevice
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.models.config import ModelConfig
from baton.worker.models.decoder import Decoder
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.models.weights import ModelWeights
from baton.worker.weights.loading import LoadedModel, check_same, load_model, read_config

_log = logging.getLogger(__name__)
_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class _Launched:
    step: int
    plan: StepPlan
    token_ids: Tensor  # pinned
    computed: Computed
    started: torch.cuda.Event
    done: torch.cuda.Event
    waited: tuple[torch.cuda.Event, torch.cuda.Event] | None  # from when to when the device had no masks to go on with

    @property
    def seconds(self) -> float:
        """What the device computed, once it is done."""
        waited = 0.0 if self.waited is None else self.waited[0].elapsed_time(self.waited[1])
        return float(self.started.elapsed_time(self.done) - waited) / 1000


class CudaExecutor:
    """Implements baton.worker.executors.base.Executor."""

    depth = 2
    max_step_tokens = 1

    def __init__(self, config: WorkerConfig) -> None:
        device = open_device()
        self._wait = partial(torch.cuda.synchronize, device)
        phases = StartPhases(self._wait)
        model_config = read_config(config.model, config.load_format)
        dtype = compute_dtype(config, model_config)
        check_supported(config, model_config, dtype, device)
        check_weights_fit(model_config, dtype, device)
        loaded = load_model(config.model, config.load_format, dtype, device)
        phases.end("weights")
        max_model_len = _max_model_len(config.max_model_len, model_config)
        self._kv_dtype = kv_dtype(config, dtype)
        self.model = ModelSpec(
            loaded.digest, model_config.vocab_size, max_model_len, model_config.eos_token_ids, model_config.heads
        )
        self.kv_spec = _kv_spec(model_config, loaded, config.block_size, self._kv_dtype)
        self._layer_hook: LayerHook | None = None
        self.kv_bytes: Sequence[NDArray[np.uint8]] | None = None
        self.host: HostCache | None = None
        self._config = config
        self._model_config = model_config
        self._dtype = dtype
        self._source = config.model
        self._device = device
        self._graphs: DecodeGraphs | None = None
        self._launched: deque[_Launched] = deque()
        self._undrawn: tuple[StepPlan, torch.cuda.Event, Undrawn] | None = None  # its masks follow
        self._computed: torch.cuda.Event | None = None  # when its forward pass ends
        self._last_done: torch.cuda.Event | None = None
        self._turn = 0
        self._watch = DeviceWatch()
        self._wake: Callable[[], None] | None = None
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.kv = KvCopies(lambda: self._paged.cache)
        with torch.inference_mode():
            self._make_batch(loaded, dtype, max_model_len)
            self.host = self._make_host_cache(phases)
            self._warm_up(model_config, dtype)
            phases.end("largest step, kernels")
            self.num_blocks = self._num_blocks(model_config, dtype)
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
        phases.log(self.num_blocks, config.block_size)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queues the step on the device. Returns before it runs.

        Raises DeviceLost where nothing can run any more; after any other error the next launch works.
        """
        with self._guarded(plan):
            undrawn = self._launch(plan)
            if plan.masks_follow:
                self._undrawn, self._computed = undrawn, _record_event()
            else:
                self._draw(*undrawn, plan.masks, _NONE)

    @torch.inference_mode()
    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Queues what the last launch left out. Raises as launch."""
        step, self._undrawn = self._undrawn, None
        assert step is not None, "a step was launched whose masks follow"
        assert self._computed is not None, "its forward pass has an end"
        with self._guarded(step[0]):
            self._draw(*step, masks, undrawn, (self._computed, _record_event()))

    @contextmanager
    def _guarded(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._batch.distrust(plan)
            raise_if_lost(error, self._wait)
            self._ops.reset()
            raise

    def collect(self) -> StepResult:
        """Waits for the oldest step."""
        launched = self._launched.popleft()
        try:
            launched.done.synchronize()
        except Exception as error:
            raise_if_lost(error, self._wait)
            raise
        logprobs, prompt_logprobs = launched.computed.logprobs, launched.computed.prompt_logprobs
        result = StepResult(
            step=launched.step,
            token_ids=launched.token_ids.numpy().copy(),
            counts=launched.plan.samples.astype(np.int32),
            logprobs={} if logprobs is None else logprobs.read(),
            prompt_logprobs={} if prompt_logprobs is None else prompt_logprobs.read(),
            seconds=launched.seconds,
        )
        leave_out(result, launched.plan, launched.computed.left_out)
        if self._config.trace_steps:
            if self._last_done is not None:
                result.idle_seconds = self._last_done.elapsed_time(launched.started) / 1000
            self._last_done = launched.done
        return result

    def ended(self) -> bool:
        """Whether collect would return at once."""
        return not self._launched or self._launched[0].done.query()  # type: ignore[no-untyped-call]

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Calls `wake`, from a thread, when a launched step has ended, those in flight included. None: no more."""
        if wake is not None and self._wake is None:
            for launched in self._launched:
                self._watch.add(launched.done, wake)
        self._wake = wake

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._layer_hook = hook

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        """Copies one layer of these blocks to the host, on a stream of its own."""
        num_bytes = len(block_ids) * self.kv_spec.layer_bytes(layer)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._copies), torch.inference_mode():
            staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.kv.gather(range(layer, layer + 1), block_ids, staged)
            host.copy_(staged, non_blocking=True)
            self._copies.record_event().synchronize()
        return memoryview(cast(bytearray, host.numpy()))

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer of these blocks from the host. Returns when they are in. Takes no part of the heads."""
        if heads is not None:
            raise InvalidRequest("a piece has a part of the heads; this worker holds all of them", field="heads")
        expected = len(block_ids) * self.kv_spec.layer_bytes(layer)
        if data.nbytes != expected:
            raise InvalidRequest(
                f"{data.nbytes} bytes for {len(block_ids)} blocks; it must be {expected}", field="data"
            )
        host = torch.empty(expected, dtype=torch.uint8, pin_memory=True)
        host.numpy()[:] = np.frombuffer(data, np.uint8)
        with torch.cuda.stream(self._copies), torch.inference_mode():
            self.kv.scatter(range(layer, layer + 1), block_ids, host.to(self._device, non_blocking=True))
            self._copies.record_event().synchronize()

    def close(self) -> None:
        """Waits for what runs; the process's end frees the rest."""
        launched, self._launched = self._launched, deque()
        if launched or self._undrawn is not None:
            try:
                torch.cuda.current_stream(self._device).synchronize()
            except Exception as error:  # said when it was found; closing must go on
                _log.debug("the device failed before it was closed: %s", error)
        self._watch.close()

    # Memory that leaves and comes back.

    def read_weights(self, model: str) -> NewWeights:
        """Reads weights of the same architecture into host memory."""
        source = model or self._source
        load_format = self._config.load_format
        check_same(self._model_config, read_config(source, load_format), source)
        loaded = load_model(source, load_format, self._dtype)
        kv_spec = _kv_spec(self._model_config, loaded, self.kv_spec.block_size, self._kv_dtype)
        if kv_spec.groups != self.kv_spec.groups:
            raise Mismatch(
                f"model={source!r} scales its quantized KV in another way: such weights need a restart", field="model"
            )
        return NewWeights(source, loaded.digest, loaded.weights)

    def use_weights(self, new: NewWeights) -> None:
        """Writes them over those in use."""
        assert isinstance(new.weights, ModelWeights), "weights that read_weights returned"
        self._residency.overwrite(new.weights)
        self._adopt(new)

    def sleep(self, level: int) -> int:
        """Frees the KV pool and the graphs; weights go to pinned host memory or, from level 2 on, nowhere."""
        return self._residency.sleep(level)

    def wake(self, new: NewWeights | None) -> None:
        """Brings the weights back, allocates the pool, and captures the graphs again."""
        if new is None:
            self._residency.wake(None)
            return
        assert isinstance(new.weights, ModelWeights), "weights that read_weights returned"
        self._residency.wake(new.weights)
        self._adopt(new)

    def _adopt(self, new: NewWeights) -> None:
        self._source = new.model
        self.model = replace(self.model, digest=new.digest)
        self.kv_spec = replace(self.kv_spec, model_digest=new.digest)

    # Steps.

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, torch.cuda.Event, Undrawn]:
        started = _record_event()
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
        self._turn = (self._turn + 1) % len(self._pinned)
        token_ids = self._pinned[self._turn][: len(computed.token_ids)]
        token_ids.copy_(computed.token_ids, non_blocking=True)
        done = _record_event()
        self._launched.append(_Launched(plan.step, plan, token_ids, computed, started, done, waited))
        if self._wake is not None:
            self._watch.add(done, self._wake)

    def _tell_of_layer(self, hook: LayerHook, plan: StepPlan, layer: int) -> None:
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        written.record()
        self._watch.add(written, partial(hook, plan, layer))

    def _compute(self, plan: StepPlan) -> Undrawn:
        graphs = self._graphs
        if graphs is None or plan.num_decodes < len(plan.rows):
            hook = self._layer_hook if plan.num_decodes < len(plan.rows) else None
            on_written = None if hook is None else partial(self._tell_of_layer, hook, plan)
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
            captured=config.cuda_graphs,
            batch_invariant=config.batch_invariant,
        )
        self._heads = {HeadKind.GENERATE: generate}
        self._pinned = [torch.empty(rows, dtype=torch.int32, pin_memory=True) for _ in range(self.depth + 2)]
        self._paged = PagedAttention(
            model.layers[0].attention,
            model.windows,
            allocate_kv(self.kv_spec, self._kv_dtype, 1, device),
            self._batch.block_table,
            rows,
            dtype,
            kv_scale=_kv_scale(loaded, device) if config.kv_cache_dtype != "auto" else None,
            batch_invariant=config.batch_invariant,
        )
        cos_sin = cos_sin_tables(model.ropes, model.head_dim, max_model_len)
        self._ops = CudaDevice(self._paged, cos_sin, batch_invariant=config.batch_invariant)
        self._decoder = Decoder(model, loaded.weights, self._ops)
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
        """Runs the largest step, for its memory, and every form of small one."""
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
        """Decode attention in all its forms, and these steps, one after the other."""
        self._ops.warm_up()
        for plan in plans:
            self._draw(*self._launch(plan), plan.masks, _NONE)
            self.collect()

    def _allocate(self) -> Tensor:
        return allocate_kv(self.kv_spec, self._kv_dtype, self.num_blocks, self._device)

    def _forget_addresses(self) -> None:
        """Drops whatever was made for weights and pool as they lie now."""
        self._graphs = self._stepper.pieces = None
        self.kv.release()

    def _record_graphs(self, phases: StartPhases) -> None:
        """Captures the steps over the weights and the pool as they lie now."""
        config = self._config
        if not config.cuda_graphs:
            return
        sizes = graph_sizes(config.max_num_requests)
        self._graphs = DecodeGraphs(sizes, self._device, self._stepper, phases.progress("decode graphs"))
        phases.end("decode graphs")
        if not config.batch_invariant:
            self._stepper.pieces = self._make_pieces(phases.progress("layer graphs"))
            phases.end("layer graphs")

    def _make_pieces(self, progress: Progress) -> Pieces:
        most = self._config.max_num_batched_tokens
        pieces = Pieces(self._decoder, self._model_config, most, self._dtype, self._device)
        pieces.record(progress)
        return pieces

    def _num_blocks(self, model: ModelConfig, dtype: torch.dtype) -> int:
        config = self._config
        per_block = self.kv_spec.bytes_per_block
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
        if config.cuda_graphs:
            sizes = graph_sizes(config.max_num_requests)
            peak += graph_bytes(model, dtype, sizes) + piece_bytes(model, dtype, config.max_num_batched_tokens)
        return num_blocks_that_fit(per_block, config.gpu_memory_utilization, peak, self._device)


def _kv_scale(loaded: LoadedModel, device: torch.device) -> Tensor:
    """[num_layers, 2, num_kv_heads]: the checkpoint has one a tensor."""
    scales = loaded.kv_scales.to(device)
    return scales[:, :, None].repeat(1, 1, loaded.config.num_kv_heads)


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _kv_spec(config: ModelConfig, loaded: LoadedModel, block_size: int, dtype: torch.dtype) -> KvSpec:
    scaled = dtype == torch.float8_e4m3fn and bool((loaded.kv_scales != 1).any())
    kv_scales = tuple(loaded.kv_scales.flatten().tolist()) if scaled else ()
    return kv_spec_of(config, loaded.digest, block_size, dtype_name(dtype), kv_scales)


def _max_model_len(wanted: int, config: ModelConfig) -> int:
    if wanted > config.max_model_len:
        raise InvalidRequest(
            f"max_model_len={wanted} is beyond the model's own limit: at most {config.max_model_len}",
            field="max_model_len",
        )
    return wanted or config.max_model_len
