"""The executor on the CPU, with PyTorch's ops."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.table import Case, find
from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.rpc.errors import ServiceError
from baton.worker.adapters.bank import AdapterBank
from baton.worker.adapters.base_model import base_model_of
from baton.worker.adapters.device import AdapterDevice
from baton.worker.adapters.head import NoHeadAdapters
from baton.worker.adapters.ops import PlainUpdates, SiteUpdates
from baton.worker.adapters.tensors import HostAdapters
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, HeadKind, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import LayerHook, NewWeights
from baton.worker.executors.choices import choices_of, experts_kind, weight_formats
from baton.worker.executors.cpu.begun_blocks import BegunBlocks
from baton.worker.executors.cpu.damaged_states import damaged_rows, without_tokens
from baton.worker.executors.cpu.drafts import HiddenReader, StepDrafts
from baton.worker.executors.cpu.generate_head import GenerateHead
from baton.worker.executors.cpu.invariance import check_invariant
from baton.worker.executors.cpu.kv_scales import compute_scales
from baton.worker.executors.cpu.lanes import Lanes
from baton.worker.executors.cpu.pool_size import pool_size
from baton.worker.executors.cpu.proposers import Verifier, make_proposer
from baton.worker.executors.cpu.rows import Rows
from baton.worker.executors.cpu.steps import PagedSteps, Steps, WholeSteps, write_deferred
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.facts import DeviceFacts
from baton.worker.executors.heads import Head
from baton.worker.executors.host.cache import HostMemory
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.executors.host.resources import usable_cores
from baton.worker.executors.kv_dtype import kv_dtype
from baton.worker.executors.kv_scales import (
    check_same_scales,
    kv_scales_of,
    scale_plans,
    scaled_kv_spec,
    with_start_scales,
)
from baton.worker.executors.memory_part import ALL_PARTS, MemoryPart
from baton.worker.executors.model_len import fitting_model_len, wanted_model_len
from baton.worker.executors.pool_head import PoolHead
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.cpu.step import StepInputs, WholeInputs
from baton.worker.layers.device import Device
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.layers.self_check import check_products
from baton.worker.models.config import ModelConfig
from baton.worker.models.costs import model_costs
from baton.worker.models.model import Model, Weights, make_model
from baton.worker.models.supported.dtypes import compute_dtype_name
from baton.worker.sampling.logprobs_mode import LogprobsMode
from baton.worker.sampling.processors.interface import ProcessorContext
from baton.worker.sampling.processors.processor_set import start_processors
from baton.worker.speculation.speculator import Speculator
from baton.worker.weights.build import is_redundant
from baton.worker.weights.loading import (
    LoadedModel,
    check_same,
    load_model,
    model_options,
    other_options,
    read_config,
)
from baton.worker.weights.tensor_update import TensorUpdate


class _Computed(NamedTuple):
    """What a step has computed."""

    inputs: StepInputs | WholeInputs
    hidden: Tensor
    undrawn: Any  # of the head


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that is computed but not sampled."""

    plan: StepPlan  # of what the step computes, with drafts
    computed: _Computed | None  # None: the step has no rows
    started: float
    idle_seconds: float | None


class CpuExecutor:
    """Implements Executor. Computes in `launch`, on the caller's thread, with a depth of 1."""

    depth = 1
    kv = None

    def __init__(self, config: WorkerConfig, plugins: Plugins = NO_PLUGINS) -> None:
        config = with_device_limits(config)
        torch.set_num_threads(config.threads or usable_cores())
        dtype: torch.dtype = getattr(torch, compute_dtype_name("cpu", config.dtype))
        self._options = model_options(config, plugins)
        self._logprobs_mode = LogprobsMode(config.logprobs_mode)
        loaded = load_model(config.model, config.load_format, dtype, options=self._options)
        loaded = with_start_scales(loaded, config)
        self._config = loaded.config
        self._source = config.model
        self._load_format = config.load_format
        self._dtype = dtype
        self._asleep = False
        self._kv_dtype = kv_dtype(config, dtype)
        self.kv_spec = scaled_kv_spec(loaded.config, loaded, config.block_size, self._kv_dtype)
        self.num_blocks = pool_size(config, loaded.config, self.kv_spec)
        self._kv_layers = self.kv_spec.kv_layers
        self._longest = wanted_model_len(config.max_model_len, loaded.config.max_model_len)  # RoPE may depend on it
        max_model_len = self._longest
        if loaded.config.cached:
            capacity = self.kv_spec.most_tokens(self.num_blocks, config.max_num_batched_tokens)
            max_model_len = fitting_model_len(config.max_model_len, loaded.config.max_model_len, capacity)
        self.model = _model_spec(loaded, max_model_len)
        self._layer_hook: LayerHook | None = None
        self._memory = KvMemory(self.kv_spec, self.num_blocks, self._kv_dtype)
        self.kv_bytes: Sequence[NDArray[np.uint8]] | None = self._memory.layers
        num_slots = config.num_host_blocks(self.kv_spec.page_bytes)
        self.host = HostMemory(self._memory, num_slots) if num_slots else None
        longest = min(max_model_len, self.num_blocks * config.block_size) if loaded.config.cached else max_model_len
        self._num_rows = config.max_num_requests
        self.processors = start_processors(plugins, ProcessorContext(loaded.config.vocab_size, torch.device("cpu")))
        num_groups = len(self.kv_spec.token_groups)
        self._rows = Rows(self._num_rows, longest, config.block_size, self._memory.null_block, num_groups)
        self._steps = self._new_steps(aligned=config.invariant)
        # Fewer threads may sum in another order.
        self._lanes = Lanes(1 if config.invariant else torch.get_num_threads())
        self._drafts = self._make_drafts(config, loaded, longest, plugins)
        self.max_step_tokens = self.max_masked_tokens = self._drafts.max_step_tokens
        self.adapters = _adapters(config, loaded.config, dtype)
        self._heads = {kind: self._make_head(kind, loaded.config) for kind in self.model.heads}
        cache = [self._memory.tensor(number) for number in self._kv_layers]
        scales = kv_scales_of(loaded, torch.device("cpu")) if self._kv_dtype is not dtype else None
        self._kv = PagedKv(cache, dtype, self.kv_spec.layer_groups, scales)
        device = self._new_device(longest, batch_invariant=config.invariant)
        self._device: Device[Any] = device if self.adapters is None else _with_adapters(device, self.adapters)
        check_products(loaded.weights, loaded.config.experts, self._device)
        if config.invariant:
            check_invariant(loaded.config, loaded.weights, device)
        self._decoder: Model[Any] | None = make_model(loaded.config, loaded.weights, self._device)
        self._computes_scales = config.calculate_kv_scales
        if self._computes_scales:
            self._compute_scales(loaded, longest, config)
        self.facts = _facts(config, loaded, dtype, self.kv_spec)
        self._results: list[StepResult] = []
        self._undrawn: _Launched | None = None
        self._ended: float | None = None  # when the last step was computed

    def launch(self, plan: StepPlan) -> None:
        """Applies the plan's differences and computes the step."""
        started = time.perf_counter()
        idle_seconds = None if self._ended is None else started - self._ended
        self._apply(plan)
        made, computed = None, self._drafts.add(plan)
        if len(plan.rows):
            with torch.inference_mode():
                made = self._compute(plan, computed)
        self._undrawn = _Launched(computed, made, started, idle_seconds)
        if not plan.masks_follow:
            self.draw(plan.masks, np.empty(0, np.int32))

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Samples the launched step's tokens, except those of some rows."""
        step, self._undrawn = self._undrawn, None
        assert step is not None, "a step was launched, and not drawn"
        plan = step.plan
        if step.computed is None:
            result = StepResult(plan.step, np.empty(0, np.int32), np.empty(0, np.int32))
        else:
            with torch.inference_mode():
                result = self._heads[plan.head].finish(plan, step.computed.undrawn, masks, undrawn)
                write_deferred(step.computed.inputs, result.counts)
                damaged = self._damaged(step.computed.hidden, plan)
            without_tokens(result, damaged)
        result.idle_seconds = step.idle_seconds
        self._ended = time.perf_counter()
        result.seconds = self._ended - step.started
        self._drafts.observe(plan, result)
        self._results.append(result)

    def collect(self) -> StepResult:
        """Returns the tokens of the launched step."""
        return self._results.pop(0)

    def ended(self) -> bool:
        """Returns True, because `collect` never waits for another thread."""
        return True

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Does nothing, because no step ends asynchronously."""

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._layer_hook = hook

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray:
        """Copies one layer out of these blocks."""
        return self._memory.read(layer, block_ids)

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer into these blocks, of all heads or of some."""
        self._memory.write(layer, block_ids, data, heads)

    def close(self) -> None:
        """Drops the launched step. Memory is freed with the executor."""
        self._results.clear()
        self._lanes.close()
        self._drafts.close()

    def read_weights(self, model: str) -> NewWeights:
        """Reads weights of the same architecture, while the others stay in use."""
        source = model or self._source
        options = other_options(self._options, self._longest, is_same=source == self._source)
        check_same(self._config, read_config(source, self._load_format, options), source)
        loaded = load_model(source, self._load_format, self._dtype, options=options)
        if not self._computes_scales:  # else those of the start stay
            check_same_scales(self.kv_spec, loaded, self._kv_dtype, source)
        check_products(loaded.weights, loaded.config.experts, self._device)
        return NewWeights(source, loaded.digest, loaded.weights)

    def new_update(self) -> TensorUpdate:
        """Returns an update that collects the model's tensors."""
        return TensorUpdate(self._config, partial(is_redundant, config=self._config))

    def read_update(self, update: TensorUpdate) -> NewWeights:
        """Copies an update's tensors."""
        weights = update.build(self._dtype, torch.device("cpu"))
        return NewWeights(self._source, update.digest(self.model.digest), weights)

    def use_weights(self, new: NewWeights) -> None:
        """Uses these weights from the next step on."""
        self._decoder = make_model(self._config, cast(Weights, new.weights), self._device)
        self._source = new.model
        self.model = dataclasses.replace(self.model, digest=new.digest)
        self.kv_spec = dataclasses.replace(self.kv_spec, model_digest=new.digest)

    def sleep(self, level: int) -> int:
        """Frees the pages of blocks and of host memory; from level 2 on, also the weights."""
        freed = 0
        if not self._asleep:
            freed = self._memory.free() + (self.host.free() if self.host is not None else 0) + self._drafts.sleep()
        self._asleep = True
        if level > 1 and self._decoder is not None:
            freed += self._decoder.weights.num_bytes
            self._decoder = None
        return freed

    def wake(self, new: NewWeights | None, parts: frozenset[MemoryPart] = ALL_PARTS) -> None:
        """Sets the new weights. Pages of blocks are allocated again when they are written."""
        self._asleep = self._asleep and MemoryPart.KV_CACHE not in parts
        if new is not None:
            self.use_weights(new)

    def _compute_scales(self, loaded: LoadedModel, longest: int, config: WorkerConfig) -> None:
        """Sets the scales of the KV from steps of random tokens."""
        decoder, spec = self._decoder, self.kv_spec
        assert decoder is not None, "the model is loaded"

        def run(plan: StepPlan) -> None:
            self._apply(plan)
            decoder.forward(self._steps.make(plan))

        most, num_groups = config.max_num_batched_tokens, len(spec.groups)
        plans = scale_plans(loaded.config.vocab_size, longest, config.block_size, most, num_groups)
        with torch.inference_mode():
            found = compute_scales(self._kv, spec, plans, run)
        scaled = dataclasses.replace(loaded, kv_scales=found)
        self.kv_spec = scaled_kv_spec(loaded.config, scaled, config.block_size, self._kv_dtype)

    def _make_drafts(self, config: WorkerConfig, loaded: LoadedModel, longest: int, plugins: Plugins) -> StepDrafts:
        settings = config.speculation
        if settings is None:
            return StepDrafts(self._rows, None)
        verifier = Verifier(config, loaded, self._options, self._dtype, longest, self.num_blocks)
        proposer = make_proposer(settings, verifier, plugins)
        speculator = Speculator(proposer, settings.method, self._num_rows, loaded.config.vocab_size)
        reader = proposer if isinstance(proposer, HiddenReader) else None
        return StepDrafts(self._rows, speculator, settings.num_speculative_tokens, reader)

    def _make_head(self, kind: HeadKind, config: ModelConfig) -> Head[Any, Any, StepResult]:
        num_rows = self._num_rows
        if kind is HeadKind.GENERATE:
            return GenerateHead(
                self._rows, num_rows, config, self.processors, self._logprobs_mode, self.adapters or NoHeadAdapters()
            )
        assert config.pooler is not None, "configs with this head have one"
        return PoolHead(config.pooler, config.hidden_size, num_rows, torch.device("cpu"))

    def _new_steps(self, *, aligned: bool) -> Steps:
        if not self._config.cached:
            return WholeSteps(self._config)
        cache = self._memory.tensors[0]
        begun = BegunBlocks(self._rows, self._memory.values, self._num_rows) if self._memory.states else None
        return PagedSteps(self._rows, self._config, self.kv_spec, cache, self._dtype, begun=begun, aligned=aligned)

    def _new_device(self, longest: int, *, batch_invariant: bool) -> CpuDevice:
        """Returns a device over the KV memory, for requests of up to `longest` tokens."""
        return CpuDevice(
            self._kv,
            cos_sin_tables(self._config.ropes, self._config.rope_head_dim, longest),
            packs=not self._config.cached,
            places=self.kv_spec.layer_places,
            states=self._memory.states,
            batch_invariant=batch_invariant,
        )

    def _apply(self, plan: StepPlan) -> None:
        self._drafts.take_rows(plan)
        for init in plan.admitted:
            self._rows.admit(init)
        self._steps.apply(plan)
        if self.adapters is not None:
            self.adapters.admit(plan.admitted)
        for head in self._heads.values():
            head.take_rows(plan)
        for row, block_ids in plan.new_blocks:
            self._rows.add_blocks(row, block_ids)

    def _damaged(self, hidden: Tensor, plan: StepPlan) -> dict[int, ServiceError]:
        return damaged_rows(hidden, plan, self.kv_spec, self._steps.states, self._memory.states)

    def _compute(self, plan: StepPlan, computed: StepPlan) -> _Computed:
        decoder = self._decoder
        assert decoder is not None, "no step runs while the weights are dropped"
        inputs = self._steps.make(computed)
        with nullcontext() if self.adapters is None else self.adapters.used(computed):
            has_adapters = self.adapters is not None and self.adapters.bank.rows is not None  # of the whole step's rows
            if isinstance(inputs, WholeInputs) and not has_adapters:  # which writes no keys and values
                hidden = self._lanes.forward(decoder.forward, inputs)
            else:
                hook = self._layer_hook
                on_written = None if hook is None else partial(self._report_layer, hook, plan)
                states = self._drafts.hidden_states()
                hidden = decoder.forward(inputs, on_written=on_written, hidden_states=states)
                self._drafts.take_hidden(computed, states)
        return _Computed(inputs, hidden, self._heads[plan.head].run(computed, inputs, decoder, hidden))

    def _report_layer(self, hook: LayerHook, plan: StepPlan, layer: int) -> None:
        hook(plan, self._kv_layers[layer])


def _adapters(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype) -> HostAdapters | None:
    if not config.enable_lora:
        return None
    base = base_model_of(model, dtype)
    bank = AdapterBank(
        base,
        config.max_loras,
        config.max_lora_rank,
        dtype,
        torch.device("cpu"),
        expert_rank=config.max_lora_expert_rank,
    )
    return HostAdapters(base, bank, config.max_num_requests, dtype)


def _with_adapters(device: CpuDevice, adapters: HostAdapters) -> AdapterDevice[Any]:
    add, embed = (find(op, Case("cpu")).load() for op in ("add_adapters", "embed_adapters"))
    bank = adapters.bank

    def updates(name: str) -> SiteUpdates:
        return PlainUpdates(bank.sites[name], bank.ends(name), add, device.kernels)

    return AdapterDevice(device, bank, adapters.base, updates, add, embed)


def _model_spec(loaded: LoadedModel, max_model_len: int) -> ModelSpec:
    config = loaded.config
    return ModelSpec(
        loaded.digest,
        config.vocab_size,
        max_model_len,
        config.eos_token_ids,
        config.heads,
        config.pooler,
        cached=config.cached,
    )


def _facts(config: WorkerConfig, loaded: LoadedModel, dtype: torch.dtype, spec: KvSpec) -> DeviceFacts:
    formats = weight_formats(loaded.weights)
    weights = experts_kind(loaded.weights, has_e4m3=False)
    case = Case("cpu", dtype=dtype, block_size=config.block_size, weights=weights)
    choices = choices_of(loaded.config, case, config.max_num_requests, config.max_num_batched_tokens, formats)
    return DeviceFacts(
        architecture=loaded.config.architecture,
        implementation=loaded.config.implementation,
        num_layers=loaded.config.num_layers,
        device=f"CPU, {torch.get_num_threads()} threads",
        dtype=str(dtype).removeprefix("torch."),
        weight_format=" and ".join(formats),
        weight_bytes=loaded.weights.num_bytes,
        kernels=choices.kernels,
        off=choices.off,
        costs=model_costs(loaded.config, loaded.weights.num_bytes, spec),
    )
