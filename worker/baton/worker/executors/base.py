"""The interface of a device. Executors own weights, KV memory and the persistent batch; they decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InternalError
from baton.worker.adapters.memory import AdapterMemory
from baton.worker.core import BlockId, HostSlot, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.facts import DeviceFacts
from baton.worker.executors.memory_part import ALL_PARTS, MemoryPart
from baton.worker.kv_spec import KvSpec
from baton.worker.sampling.processors.processor_set import ProcessorSet

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies
    from baton.worker.weights.tensor_update import TensorUpdate


class DeviceLost(InternalError):
    """The device can compute nothing any more, so the engine must end. Raised by launch and collect."""


@dataclass(frozen=True, slots=True)
class RestoreCopy:
    """Blocks that are restored from host memory together."""

    restore_id: int
    copies: tuple[tuple[HostSlot, BlockId], ...]
    fenced: bool  # steps in flight may still write these blocks, so the copy follows them


@dataclass(slots=True)
class LandedCopies:
    """The copies that completed since the last call."""

    slots: list[HostSlot] = field(default_factory=list)
    restores: list[tuple[int, float]] = field(default_factory=list)  # restore_id, seconds; 0: in `timed`, later
    timed: list[tuple[int, float]] = field(default_factory=list)  # blocks and seconds of restores after `hurry`
    offload_seconds: float = 0.0  # spent copying blocks to the host


class HostCopies(Protocol):
    """Copies of blocks between the device and host memory. Only `wait` waits for the device.

    Copies to the host read their blocks after all steps launched earlier, and before later ones. Copies from the host
    are unordered, except that they follow steps launched earlier if `fenced`. A call that raises starts nothing.
    """

    num_slots: int

    def capacity(self) -> int:
        """Returns the number of blocks that `offload` accepts now."""

    def offload(self, copies: Sequence[tuple[BlockId, HostSlot]]) -> None:
        """Starts copying blocks to the host."""

    def restore(self, restore: RestoreCopy) -> None:
        """Starts copying blocks from the host. They are not read or written until the copy has landed."""

    def hurry(self) -> None:
        """Makes steps launched from now on wait, on the device, for copies from the host, so that poll returns those at
        once.

        For restores while no other request runs. Does nothing if an executor launches one step at a time.
        """

    def slot_bytes(self, slot: HostSlot) -> memoryview:
        """Returns the memory of a slot itself, bytes [num_bytes]. Other threads may read and fill it."""

    def poll(self) -> LandedCopies:
        """Returns the copies that have landed since the last call."""

    def wait(self, seconds: float) -> None:
        """Returns when a restore has landed, or after `seconds`."""


# Called with (plan, layer) when a layer's KV of a step is written.
LayerHook = Callable[[StepPlan, int], None]


class Executor(Protocol):
    """Computes steps in the order they are launched.

    Several steps may be in flight (`depth`). A launched row's input token may be sampled by an earlier step that is
    not collected yet, so executors keep sampled tokens themselves. With max_step_tokens above 1 they also keep the
    number of computed tokens of each row, because plans have only an upper bound.
    """

    num_blocks: int  # 0 of a model that is not cached
    depth: int  # most steps in flight: launched and not collected
    max_step_tokens: int  # most tokens that a decoding row gets in one step
    max_masked_tokens: int  # the same of a row that samples under a mask

    @property
    def processors(self) -> ProcessorSet:
        """The logits processors, which requests may use."""

    @property
    def model(self) -> ModelSpec:
        """The model of the weights in use."""

    @property
    def kv_spec(self) -> KvSpec:
        """The KV spec of the blocks, for the weights in use."""

    @property
    def adapters(self) -> AdapterMemory | None:
        """The LoRA adapters of the model. None: it is started without them."""

    @property
    def kv_bytes(self) -> Sequence[NDArray[np.uint8]] | None:
        """The blocks of each KV layer, [num_blocks, bytes], if they are in host memory."""

    @property
    def kv(self) -> KvCopies | None:
        """The blocks, if they are on a CUDA device."""

    @property
    def host(self) -> HostCopies | None:
        """Host memory for evicted blocks; None if there is none."""

    def launch(self, plan: StepPlan) -> None:
        """Applies the plan's differences and starts the step."""

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Completes the launch of a plan with masks_follow, before the next launch: applies its masks and samples.

        `undrawn` are indices into the plan's rows with `samples`, as in masks. These rows get no token; their KV is
        kept, and a later plan computes their last token again.
        """

    def collect(self) -> StepResult:
        """Waits for the oldest launched step. Call once for each launch."""

    def ended(self) -> bool:
        """Returns whether collect returns at once. Always True if collect itself computes the step."""

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Calls `wake`, on any thread, when a launched step has ended. None stops that."""

    def watch_layers(self, hook: LayerHook | None) -> None:
        """Calls `hook`, on the executor's thread, for each layer of steps launched from now on. None stops that."""

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray | memoryview:
        """Copies one KV layer of these blocks to the host: len(block_ids) x layer_bytes bytes. Thread-safe."""

    def write_blocks(
        self,
        layer: int,
        block_ids: Sequence[BlockId],
        data: memoryview,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Copies one KV layer to these blocks. Thread-safe for blocks that no running row holds.

        `heads`: first and number of the rank's KV heads in the data, [blocks, 2, heads, ...]; None: all. Raises
        InvalidRequest for a layer, block, head or size that does not fit.
        """

    def close(self) -> None:
        """Frees the device. Idempotent."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that fit the executor and are not in use yet."""

    model: str  # the folder or hub id
    digest: bytes  # 16 bytes
    weights: object  # the executor's own


class Resident(Protocol):
    """The memory of an executor, which can be freed and replaced.

    Call without steps in flight and without held or leased blocks; read_weights may be called at any time.
    """

    @property
    def model(self) -> ModelSpec:
        """The model of the weights in use."""

    @property
    def kv_spec(self) -> KvSpec:
        """The KV spec of the blocks, for the weights in use."""

    def read_weights(self, model: str) -> NewWeights:
        """Reads a folder or hub id; empty: the last loaded model. Changes nothing, and may run on any thread.

        Raises InvalidRequest for a model that cannot be loaded, Mismatch for another architecture.
        """

    def new_update(self) -> TensorUpdate:
        """Returns an update that collects the model's tensors. Raises Unsupported if there are none."""

    def read_update(self, update: TensorUpdate) -> NewWeights:
        """Copies an update's tensors. Changes nothing, and may run on any thread.

        Raises Mismatch if some are missing.
        """

    def use_weights(self, new: NewWeights) -> None:
        """Uses these weights from the next step on; `model` and `kv_spec` then have their digest."""

    def sleep(self, level: int) -> int:
        """Frees the blocks' memory and, from level 2 on, the weights. Returns the bytes. Idempotent."""

    def wake(self, new: NewWeights | None, parts: frozenset[MemoryPart] = ALL_PARTS) -> None:
        """Allocates the memory of these parts again, weights as `new` after level 2. Blocks are zeros.

        Raises a ServiceError without enough memory, Unsupported for parts that only wake together, and stays asleep.
        """


class ServingExecutor(Executor, Resident, Protocol):
    """An executor for a worker: it computes, its memory can be freed, and it says what it is."""

    @property
    def facts(self) -> DeviceFacts:
        """The model and the device, as they were started."""
