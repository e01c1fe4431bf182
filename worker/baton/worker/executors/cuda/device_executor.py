"""What the CUDA executors share: the launch of steps, their results, and new weights. Knows no cache and no inputs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from baton.plugins.plugins import Plugins
from baton.worker.config import WorkerConfig
from baton.worker.core import HeadKind, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import LayerHook, NewWeights
from baton.worker.executors.cuda.completions import DeviceWatch
from baton.worker.executors.cuda.failures import raise_if_lost
from baton.worker.executors.cuda.inputs.uploads import PinnedRing
from baton.worker.executors.cuda.pooling.pool_head import CudaPoolHead
from baton.worker.executors.cuda.pooling.vector_copies import VectorCopies
from baton.worker.executors.cuda.residency import Residency
from baton.worker.executors.cuda.startup.memory import check_weights_fit, open_device
from baton.worker.executors.cuda.startup.support import check_supported, compute_dtype
from baton.worker.executors.cuda.steps.launched import LaunchedSteps, record_event
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.heads import Head
from baton.worker.executors.memory_part import ALL_PARTS, MemoryPart, require_all
from baton.worker.executors.model_len import wanted_model_len
from baton.worker.kv_spec import KvSpec
from baton.worker.layers.cuda.base import CudaLinears
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Weights
from baton.worker.sampling.processors.interface import ProcessorContext
from baton.worker.sampling.processors.processor_set import ProcessorSet, start_processors
from baton.worker.weights.build import is_redundant, weight_bytes
from baton.worker.weights.loading import LoadedModel, check_same, load_model, model_options, other_options, read_config
from baton.worker.weights.tensor_update import TensorUpdate

_log = logging.getLogger(__name__)
_NONE = np.empty(0, np.int32)
_USUAL_UPLOAD = 1 << 12  # numbers of a step's vectors
_ROOM = 1.1  # of free memory, as a multiple of new weights


class DeviceExecutor(ABC):
    """Implements parts of baton.worker.executors.base.Executor and Resident. Subclasses set the attributes."""

    depth = 2
    max_step_tokens = 1
    max_masked_tokens = 1
    model: ModelSpec
    kv_spec: KvSpec
    processors: ProcessorSet
    _model_config: ModelConfig
    _heads: dict[HeadKind, Head[Any, Any, Any]]
    _steps: LaunchedSteps
    _ops: CudaLinears
    _residency: Residency
    _dtype: torch.dtype
    _longest: int  # tokens of a request, which RoPE may depend on

    def __init__(self, config: WorkerConfig, plugins: Plugins) -> None:
        self._device = open_device()
        self._config = config = with_device_limits(config)
        self._wait = partial(torch.cuda.synchronize, self._device)
        self._options = model_options(config, plugins)
        self._source = config.model
        self._layer_hook: LayerHook | None = None
        self._undrawn: tuple[StepPlan, torch.cuda.Event, Any] | None = None  # a step whose masks follow
        self._computed: torch.cuda.Event | None = None  # the end of its forward pass
        self._watch = DeviceWatch()

    def _load(self, plugins: Plugins) -> LoadedModel:
        """Loads the model. Raises InvalidRequest if it does not run or fit here."""
        config, device = self._config, self._device
        self._model_config = model = read_config(config.model, config.load_format, self._options)
        self._dtype = compute_dtype(config, model)
        check_supported(config, model, self._dtype, device)
        check_weights_fit(model, self._dtype, device)
        loaded = load_model(config.model, config.load_format, self._dtype, device, self._options)
        self._longest = wanted_model_len(config.max_model_len, model.max_model_len)
        self.model = ModelSpec(
            loaded.digest,
            model.vocab_size,
            self._longest,
            model.eos_token_ids,
            model.heads,
            model.pooler,
            cached=model.cached,
        )
        self.processors = start_processors(plugins, ProcessorContext(model.vocab_size, device))
        return loaded

    def _make_pool_head(self, model: ModelConfig, *, chunked: bool) -> CudaPoolHead:
        assert model.pooler is not None, "configs with this head have one"
        uploads = PinnedRing(_USUAL_UPLOAD, torch.int64)
        return CudaPoolHead(
            model.pooler,
            model.hidden_size,
            self._config.max_num_requests,
            self._device,
            lambda values: uploads.to_device(values, self._device),
            VectorCopies(self.depth + 2),
            chunked=chunked,
        )

    @abstractmethod
    def _apply(self, plan: StepPlan) -> None:
        """Applies the plan's differences to the batch."""

    @abstractmethod
    def _compute(self, plan: StepPlan) -> Any:
        """Launches the step, up to what the head needs masks for."""

    @abstractmethod
    def _distrust(self, plan: StepPlan) -> None:
        """Excludes the rows of a plan whose launch failed, until they are admitted again."""

    @abstractmethod
    def _check_read(self, loaded: LoadedModel, source: str) -> None:
        """Raises Mismatch for weights that need another cache."""

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
        self._check_read(loaded, source)
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

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, torch.cuda.Event, Any]:
        started = record_event()
        self._apply(plan)
        for head in self._heads.values():
            head.take_rows(plan)
        return plan, started, self._compute(plan)

    def _draw(
        self,
        plan: StepPlan,
        started: torch.cuda.Event,
        undrawn: Any,
        masks: TokenMasks | None,
        left_out: Int32,
        waited: tuple[torch.cuda.Event, torch.cuda.Event] | None = None,
    ) -> None:
        computed = self._heads[plan.head].finish(plan, undrawn, masks, left_out)
        self._steps.add(plan, computed, started, waited)

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Prepares the next launch after one that failed. Raises DeviceLost if there can be none."""
        self._distrust(plan)
        raise_if_lost(error, self._wait)
        self._ops.reset()
