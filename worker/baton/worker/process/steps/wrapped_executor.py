"""An executor that passes every call to another. Subclasses add work around steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.worker.adapters.memory import AdapterMemory
from baton.worker.core import BlockId, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import Executor, HostCopies, LayerHook
from baton.worker.kv_spec import KvSpec
from baton.worker.sampling.processors.processor_set import ProcessorSet

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies


class WrappedExecutor:
    """Implements Executor by another one."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_blocks = executor.num_blocks
        self.depth = executor.depth
        self.max_step_tokens = executor.max_step_tokens
        self.max_masked_tokens = executor.max_masked_tokens

    @property
    def processors(self) -> ProcessorSet:
        return self._executor.processors

    @property
    def model(self) -> ModelSpec:
        return self._executor.model

    @property
    def kv_spec(self) -> KvSpec:
        return self._executor.kv_spec

    @property
    def adapters(self) -> AdapterMemory | None:
        return self._executor.adapters

    @property
    def kv_bytes(self) -> Sequence[NDArray[np.uint8]] | None:
        return self._executor.kv_bytes

    @property
    def kv(self) -> KvCopies | None:
        return self._executor.kv

    @property
    def host(self) -> HostCopies | None:
        return self._executor.host

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        self._executor.draw(masks, undrawn)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def ended(self) -> bool:
        return self._executor.ended()

    def watch(self, wake: Callable[[], None] | None) -> None:
        self._executor.watch(wake)

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._executor.watch_layers(hook)

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray | memoryview:
        return self._executor.read_blocks(layer, block_ids)

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        self._executor.write_blocks(layer, block_ids, data, heads)

    def close(self) -> None:
        self._executor.close()
