"""What the engine asks of a device. Executors own weights, KV memory and the persistent batch; they decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InternalError
from baton.worker.core import BlockId, HostSlot, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.kv_spec import KvSpec

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies


class DeviceLost(InternalError):
    """Nothing can be computed on the device any more: the engine must end. Raised by launch and collect."""


@dataclass(frozen=True, slots=True)
class RestoreCopy:
    """Blocks that come back from host memory together."""

    restore_id: int
    copies: tuple[tuple[HostSlot, BlockId], ...]
    fenced: bool  # steps in flight may still write these blocks: the copy is behind them


@dataclass(slots=True)
class LandedCopies:
    """What was completed since the last time."""

    slots: list[HostSlot] = field(default_factory=list)
    restores: list[tuple[int, float]] = field(default_factory=list)  # restore_id, seconds; 0: `timed` says later
    timed: list[tuple[int, float]] = field(default_factory=list)  # blocks and seconds of restores that were hurried
    offload_seconds: float = 0.0  # while blocks were copied out


class HostCopies(Protocol):
    """Blocks between the device and host memory. Nothing here waits for the device but `wait`.

    Copies out read their blocks after all steps launched before and before any launched later. Copies in are ordered
    with nothing but, where fenced, the steps launched before. A call that raises has started nothing.
    """

    num_slots: int

    def room(self) -> int:
        """Blocks that offload would take now."""

    def offload(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> None:
        """Starts copying blocks out."""

    def restore(self, restore: RestoreCopy) -> None:
        """Starts copying blocks in. Nobody reads or writes them until it has landed."""

    def hurry(self) -> None:
        """Steps launched from now on wait, on the device, for the copies in that are under way, so that poll tells of
        them at once: for when nobody else would wait with them. Nothing to do where steps are not launched ahead."""

    def poll(self) -> LandedCopies:
        """What has landed since the last call."""

    def wait(self, seconds: float) -> None:
        """Returns when a restore has landed, or after so many seconds."""


# Called when a layer's KV of a step is written: (plan, layer).
LayerHook = Callable[[StepPlan, int], None]


class Executor(Protocol):
    """Computes steps in the order they are launched.

    Several steps may be in flight (`depth`): a launched row's input token may be one that an
    earlier, uncollected step samples, so executors keep sampled tokens themselves. Where max_step_tokens is above 1
    they also keep how many tokens of each row are computed: plans know only the most that it may be.
    """

    num_blocks: int
    depth: int  # steps that may be launched and not collected
    max_step_tokens: int  # tokens that a decoding row may get in one step

    @property
    def model(self) -> ModelSpec:
        """Of the weights in use."""

    @property
    def kv_spec(self) -> KvSpec:
        """Of the blocks, for the weights in use."""

    @property
    def kv_bytes(self) -> Sequence[NDArray[np.uint8]] | None:
        """The blocks, for each KV layer [num_blocks, bytes], where they lie in host memory."""

    @property
    def kv(self) -> KvCopies | None:
        """The blocks, where they lie on a CUDA device."""

    @property
    def host(self) -> HostCopies | None:
        """None: no host memory is set apart for blocks."""

    def launch(self, plan: StepPlan) -> None:
        """Applies the plan's differences and starts the step."""

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Ends the launch of a plan whose masks_follow, before the next launch: takes its masks, and draws its tokens.

        `undrawn`: indices into the plan's rows with `samples`, as in masks. They get no token; what is computed of such
        a row stays, and a later plan computes its last token again.
        """

    def collect(self) -> StepResult:
        """Waits for the oldest launched step. Call once for each launch."""

    def ended(self) -> bool:
        """Whether collect returns at once. True where steps are computed by collect itself."""

    def watch(self, wake: Callable[[], None] | None) -> None:
        """`wake` is called, from any thread, when a launched step has ended on its own. None: no more."""

    def watch_layers(self, hook: LayerHook | None) -> None:
        """Calls `hook`, on the executor's thread, for each layer of the steps launched from now on. None: no more."""

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray | memoryview:
        """Copies one KV layer of these blocks of its group out: len(block_ids) x layer_bytes bytes. Thread-safe."""

    def write_blocks(
        self,
        layer: int,
        block_ids: Sequence[BlockId],
        data: memoryview,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Copies one KV layer of these blocks of its group in. Thread-safe for blocks that no running row holds.

        `heads`: first and number of the rank's KV heads that the data has, [blocks, 2, heads, ...]; None: all.
        Raises InvalidRequest for a layer, block, head or size that does not fit.
        """

    def close(self) -> None:
        """Frees the device. Idempotent."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that were read and fit the executor, and are not in use yet."""

    model: str  # the folder or hub id
    digest: bytes  # 16 bytes
    weights: object  # the executor's own


class Resident(Protocol):
    """What of an executor lies in memory, and can leave it. Called with no step in flight and no block held or leased,
    but read_weights."""

    @property
    def model(self) -> ModelSpec:
        """Of the weights in use."""

    @property
    def kv_spec(self) -> KvSpec:
        """Of the blocks, for the weights in use."""

    def read_weights(self, model: str) -> NewWeights:
        """Reads a folder or hub id; empty: the model loaded last. Changes nothing, and may run on any thread.

        Raises InvalidRequest for what cannot be loaded, Mismatch for another architecture.
        """

    def use_weights(self, new: NewWeights) -> None:
        """The next step computes with these; `model` and `kv_spec` have their digest."""

    def sleep(self, level: int) -> int:
        """Frees the blocks' memory and, from level 2 on, the weights. Returns the bytes. Idempotent."""

    def wake(self, new: NewWeights | None) -> None:
        """Takes it back; `new`: the weights, after level 2. Blocks are zeros. Raises a ServiceError where there is no
        room, and sleeps on."""


class ServingExecutor(Executor, Resident, Protocol):
    """What a worker has: it computes, and its memory can be taken back."""
