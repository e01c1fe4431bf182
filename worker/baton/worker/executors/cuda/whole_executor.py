"""The executor of models without a KV cache on one CUDA device: each step computes whole prompts, and pools them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.rpc.errors import InternalError, InvalidRequest
from baton.worker.adapters.memory import AdapterMemory
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, HeadKind, StepPlan
from baton.worker.executors.base import HostCopies
from baton.worker.executors.cuda.compilation.ahead import collect_and_compile
from baton.worker.executors.cuda.compilation.compilers import Compilers
from baton.worker.executors.cuda.device_executor import DeviceExecutor
from baton.worker.executors.cuda.failures import refusal_of
from baton.worker.executors.cuda.inputs.uploads import PinnedRing
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.executors.cuda.residency import Residency
from baton.worker.executors.cuda.startup.facts import device_facts
from baton.worker.executors.cuda.startup.phases import StartPhases
from baton.worker.executors.cuda.startup.warm_up_pooled import largest_pooled_steps, small_pooled_steps
from baton.worker.executors.cuda.steps.launched import LaunchedSteps
from baton.worker.executors.cuda.steps.whole import WholeStepper
from baton.worker.executors.cuda.steps.whole_graphs import WholeGraphs, whole_graph_bytes
from baton.worker.executors.host.whole_rows import WholeRows
from baton.worker.executors.kv_dtype import dtype_name
from baton.worker.layers.cuda.whole import WholeDevice
from baton.worker.layers.rope import cos_sin_tables
from baton.worker.layers.self_check import check_products
from baton.worker.models.kv_groups import kv_spec_of
from baton.worker.models.model import make_model
from baton.worker.weights.loading import LoadedModel

_NONE = np.empty(0, np.int32)
_USUAL_UPLOAD = 1 << 16  # numbers of a step


class WholeExecutor(DeviceExecutor):
    """Implements baton.worker.executors.base.Executor."""

    num_blocks = 0
    _ops: WholeDevice

    def __init__(self, config: WorkerConfig, compilers: Compilers, plugins: Plugins = NO_PLUGINS) -> None:
        super().__init__(config, plugins)
        _check_settings(self._config)
        config, phases = self._config, StartPhases(self._wait)
        loaded = self._load(plugins)
        phases.end("weights")
        name = dtype_name(self._dtype)
        self.kv_spec = kv_spec_of(loaded.config, loaded.digest, config.block_size, name)
        self.kv_bytes: Sequence[NDArray[np.uint8]] | None = None
        self.adapters: AdapterMemory | None = None
        self.kv: KvCopies | None = None
        self.host: HostCopies | None = None
        with torch.inference_mode():
            self._make_batch(loaded)
            self._warm_up(compilers, phases)
            check_products(loaded.weights, loaded.config.experts, self._ops)
            phases.end("check of quantized weights")
            step_bytes = torch.cuda.max_memory_reserved(self._device) - loaded.weights.num_bytes
            self._record_graphs(phases)
        self._residency = Residency(self._decoder, self._record_graphs, self._forget, self._wait, self._device)
        graph_bytes = 0
        if config.cuda_graphs:
            graph_bytes = whole_graph_bytes(loaded.config.num_layers, config.max_num_batched_tokens)
        self.facts = device_facts(
            config, loaded, self._dtype, self._dtype, self.kv_spec, self._device, step_bytes, graph_bytes
        )
        phases.log(self.num_blocks, config.block_size)

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        """Raises InternalError: there are no blocks."""
        raise InternalError(f"{self._model_config.architecture} keeps no KV, so no blocks can be read")

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Raises InternalError: there are no blocks."""
        raise InternalError(f"{self._model_config.architecture} keeps no KV, so no blocks can be written")

    def _apply(self, plan: StepPlan) -> None:
        self._rows.apply(plan)

    def _compute(self, plan: StepPlan) -> Any:
        return self._stepper.run(plan, self._heads[plan.head])

    def _distrust(self, plan: StepPlan) -> None:
        """Does nothing: no later step reads what this one computed."""

    def _check_read(self, loaded: LoadedModel, source: str) -> None:
        """Accepts all weights: there is no cache."""

    def _make_batch(self, loaded: LoadedModel) -> None:
        config, model, device = self._config, loaded.config, self._device
        self._rows = WholeRows(has_types=model.num_token_types > 1)
        self._heads = {HeadKind.POOL: self._make_pool_head(model, chunked=False)}
        self._steps = LaunchedSteps(0, self.depth, self._watch, self._wait, traced=bool(config.trace_steps))
        cos_sin = cos_sin_tables(model.ropes, model.rope_head_dim, self._longest)
        self._ops = WholeDevice(device, self._dtype, cos_sin, batch_invariant=config.invariant)
        self._decoder = make_model(model, loaded.weights, self._ops)
        self._uploads = PinnedRing(_USUAL_UPLOAD, torch.int32)
        self._stepper = WholeStepper(
            self._rows,
            self._decoder,
            lambda values: self._uploads.to_device(values, device),
            batch_invariant=config.invariant,
        )

    def _warm_up(self, compilers: Compilers, phases: StartPhases) -> None:
        """Runs the largest steps, for their peak of memory, and all kinds of small steps."""
        config, pooler = self._config, self._model_config.pooler
        assert pooler is not None, "models without a cache pool"
        rows = config.max_num_requests
        # A text that is longer than a step is alone in one.
        most = max(config.max_num_batched_tokens, self._longest)
        largest = largest_pooled_steps(pooler, most, self._longest, rows)
        small = small_pooled_steps(pooler, self._longest, rows)
        collect_and_compile(partial(self._run_all, [*largest, *small]), self._wait, compilers)
        phases.end("kernels")
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._run_all([*largest, *small])
        except Exception as error:
            raise (refusal_of(error, config, self._model_config, dtype_name(self._dtype)) or error) from error
        phases.end("largest steps")

    def _run_all(self, plans: Sequence[StepPlan]) -> None:
        for plan in plans:
            self._draw(*self._launch(plan), plan.masks, _NONE)
            self.collect()

    def _forget(self) -> None:
        self._stepper.graphs = None

    def _record_graphs(self, phases: StartPhases) -> None:
        """Captures the forward passes, with the current addresses of the weights."""
        config = self._config
        if not config.cuda_graphs or config.invariant:
            return
        graphs = WholeGraphs(
            self._decoder,
            config.max_num_batched_tokens,
            self._device,
            self._uploads.copy_to,
            has_types=self._model_config.num_token_types > 1,
        )
        graphs.record(phases.progress("graphs"))
        self._stepper.graphs = graphs
        phases.end("graphs")


def _check_settings(config: WorkerConfig) -> None:
    """Raises InvalidRequest for settings of a cache."""
    if config.host_cache_gb:
        raise InvalidRequest(
            f"host_cache_gb={config.host_cache_gb}: the model keeps no KV, so there is nothing to copy; it must be 0",
            field="host_cache_gb",
        )
    if config.enable_lora:
        raise InvalidRequest(
            "enable_lora=true: under executor=cuda, models that compute whole prompts have no adapters yet; use "
            "executor=cpu, or leave it out",
            field="enable_lora",
        )
    if config.kv_cache_dtype != "auto":
        raise InvalidRequest(
            f"kv_cache_dtype={config.kv_cache_dtype}: the model keeps no KV; it must be auto", field="kv_cache_dtype"
        )
