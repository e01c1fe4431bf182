"""An Executor that computes nothing: takes the device model's time and samples each request's own token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.cluster.device import DeviceModel
from baton.services.simulate.virtual.timeline import Clock
from baton.worker.adapters.memory import AdapterMemory
from baton.worker.core import BlockId, Int32, Int64, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import HostCopies, LayerHook
from baton.worker.executors.sim.kv import mix
from baton.worker.kv_spec import KvGroup, KvKind, full_spec
from baton.worker.sampling.processors.processor_set import NO_PROCESSORS
from baton.worker.speculation.simulated import SimulatedDrafts
from baton.worker.state_pieces import StateMatrix

VOCAB_SIZE = 1 << 31
_DIGEST = bytes(range(16))
_NUM_LAYERS = 8  # as many pieces a prompt's hand-over has at least


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    starts: float
    ends: float
    drafted: Int64 | None = None  # drafts of each decode; None: without speculation
    num_reported: int = 0  # layers


class VirtualExecutor:
    """Steps on a worker's own clock. A request's sampling seed is the token that it generates, again and again."""

    def __init__(
        self,
        device: DeviceModel,
        clock: Clock,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_rows: int,
        state_blocks: int = 0,  # that a state takes; 0: the model has no layers with states
        drafts: int = 0,  # of a request in a step, at most
        acceptance: float = 0.0,
    ) -> None:
        per_layer, rest = divmod(device.kv_bytes_per_token, _NUM_LAYERS * 4)
        if rest:
            raise InvalidRequest(
                f"kv_bytes_per_token is {device.kv_bytes_per_token}; it must be a multiple of {_NUM_LAYERS * 4}",
                field="kv_bytes_per_token",
            )
        self.processors = NO_PROCESSORS
        self.model = ModelSpec(_DIGEST, VOCAB_SIZE, max_model_len, ())
        # bfloat16 K and V of heads of one value: kv_bytes_per_token in all layers together.
        self.kv_spec = full_spec(
            _DIGEST, "bfloat16", _NUM_LAYERS, num_kv_heads=per_layer, head_dim=1, block_size=block_size
        )
        if state_blocks:
            values = per_layer * block_size  # of a block's layer in fp32
            state = StateMatrix(1, values, state_blocks * _NUM_LAYERS)
            group = KvGroup(KvKind.STATE, (_NUM_LAYERS,), "float32", 1, state.num_values, matrices=(state,))
            self.kv_spec = replace(self.kv_spec, groups=(*self.kv_spec.groups, group))
        self.num_blocks = num_blocks
        self.depth = 1
        self.max_step_tokens = 1 + drafts
        self.max_masked_tokens = 1
        self._drafts = SimulatedDrafts(num_rows, acceptance) if drafts else None
        self.kv = None
        self._layer_hook: LayerHook | None = None
        self.host: HostCopies | None = None
        self.kv_bytes: Sequence[NDArray[np.uint8]] | None = None
        self.adapters: AdapterMemory | None = None
        self._device = device
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._tokens = np.zeros(num_rows, np.int32)

    @property
    def ends(self) -> float:
        """Returns when the launched step ends."""
        return self._launched[0].ends

    def launch(self, plan: StepPlan) -> None:
        """Notes new rows, and how long the step takes."""
        for init in plan.admitted:
            self._tokens[init.row] = init.sampling.seed
        starts = self._clock.now
        drafted = None if self._drafts is None else self._drafts.choose(plan)
        num_drafts = 0 if drafted is None else int(drafted.sum())
        self._launched.append(_Launched(plan, starts, starts + self._device.step_seconds(plan, num_drafts), drafted))

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Raises NotImplementedError. With one step in flight, masks never follow a launch."""
        raise NotImplementedError("the virtual executor takes no masks")

    def collect(self) -> StepResult:
        """Lets what is left of the step's time pass, telling the layer hook of each layer in its time."""
        step = self._launched[0]
        self.call_layer_hook(step.ends)
        self._launched.popleft()
        self._clock.now = max(self._clock.now, step.ends)
        plan = step.plan
        if self._drafts is not None and step.drafted is not None:
            return self._verified(self._drafts, step, step.drafted)
        sampled = plan.rows if plan.num_decodes == len(plan.rows) else plan.rows[plan.samples]
        counts = plan.samples.astype(np.int32)
        return StepResult(plan.step, self._tokens[sampled], counts, seconds=step.ends - step.starts)

    def _verified(self, drafts: SimulatedDrafts, step: _Launched, drafted: Int64) -> StepResult:
        """Returns the tokens of a step with drafts. Which are right depends on the request and the position alone."""
        plan, count = step.plan, step.plan.num_decodes
        rows, seconds = plan.rows[:count], step.ends - step.starts
        seeds = self._tokens[rows].astype(np.uint64) << np.uint64(32)
        accepted = drafts.accepted(drafted, mix(seeds + plan.num_computed_tokens[:count].astype(np.uint64)))
        drafts.observe(plan, drafted, accepted, seconds)
        counts = plan.samples.astype(np.int32)
        counts[:count] += accepted.astype(np.int32)
        result = StepResult(plan.step, np.repeat(self._tokens[plan.rows], counts), counts, seconds=seconds)
        result.drafted = drafted.astype(np.int32) if drafted.any() else None
        return result

    def call_layer_hook(self, until: float) -> None:
        """Calls the layer hook for the layers written by `time`, at their times."""
        step, hook, clock = self._launched[0], self._layer_hook, self._clock
        if hook is None or step.plan.num_decodes == len(step.plan.rows):
            return
        seconds = step.ends - step.starts
        now = clock.now
        while step.num_reported < _NUM_LAYERS:
            written = step.starts + seconds * (step.num_reported + 1) / _NUM_LAYERS
            if written > until:
                break
            clock.now = max(now, written)
            step.num_reported += 1
            hook(step.plan, step.num_reported - 1)
        clock.now = now

    def next_layer(self) -> float | None:
        """Returns when the next layer of the launched step is written, if there is a layer hook."""
        step = self._launched[0]
        if self._layer_hook is None or step.num_reported == _NUM_LAYERS or step.plan.num_decodes == len(step.plan.rows):
            return None
        return step.starts + (step.ends - step.starts) * (step.num_reported + 1) / _NUM_LAYERS

    def ended(self) -> bool:
        """Returns whether the launched step is over."""
        return self._clock.now >= self._launched[0].ends

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Does nothing: the simulated loop computes when a step ends."""

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._layer_hook = hook

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray | memoryview:
        """Returns no bytes: transfers are timed, not made."""
        raise NotImplementedError("the virtual executor holds no KV")

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Does nothing, like read_blocks."""
        raise NotImplementedError("the virtual executor holds no KV")

    def close(self) -> None:
        """Does nothing."""
        self._launched.clear()
