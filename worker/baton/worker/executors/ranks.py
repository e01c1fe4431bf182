"""An executor over several ranks: the leader in this process, and followers that run every step with it.

Each rank has one device. The engine uses the group, which sends the plan of a step to every follower before the leader
launches it, so that all compute it together, and returns the leader's result. A group of one rank has no followers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import Unsupported
from baton.worker.adapters.memory import AdapterMemory
from baton.worker.core import BlockId, Int32, ModelSpec, StepPlan, StepResult, TokenMasks
from baton.worker.executors.base import DeviceLost, HostCopies, LayerHook, NewWeights, ServingExecutor
from baton.worker.executors.facts import DeviceFacts
from baton.worker.executors.memory_part import ALL_PARTS, MemoryPart
from baton.worker.kv_spec import KvSpec
from baton.worker.sampling.processors.processor_set import ProcessorSet

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies
    from baton.worker.weights.tensor_update import TensorUpdate


class Follower(Protocol):
    """A rank other than the leader, in a process of its own. It applies all plans in the order of their launch.

    It samples the same tokens as the leader, because the noise of a token depends only on its request.
    """

    def wait_ready(self) -> None:
        """Waits until the rank has loaded its part of the model. Raises a ServiceError if it cannot."""

    def launch(self, plan: StepPlan) -> None:
        """Sends the plan. Does not wait for the rank."""

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Sends the arguments of Executor.draw. Does not wait for the rank."""

    def check(self) -> None:
        """Raises DeviceLost if the rank's process has ended or one of its steps failed. Does not wait."""

    def close(self) -> None:
        """Ends the rank's process. Idempotent."""


class RankGroup:
    """Implements ServingExecutor. Blocks, layers and host memory are those of the leader."""

    def __init__(self, leader: ServingExecutor, followers: Sequence[Follower] = ()) -> None:
        self._leader = leader
        self._followers = tuple(followers)
        self.num_blocks = leader.num_blocks
        self.depth = leader.depth
        self.max_step_tokens = leader.max_step_tokens
        self.max_masked_tokens = leader.max_masked_tokens

    @property
    def leader(self) -> ServingExecutor:
        """The executor of rank 0."""
        return self._leader

    @property
    def size(self) -> int:
        """Number of ranks, including the leader."""
        return 1 + len(self._followers)

    @property
    def processors(self) -> ProcessorSet:
        return self._leader.processors

    @property
    def model(self) -> ModelSpec:
        return self._leader.model

    @property
    def facts(self) -> DeviceFacts:
        return self._leader.facts

    @property
    def kv_spec(self) -> KvSpec:
        return self._leader.kv_spec

    @property
    def adapters(self) -> AdapterMemory | None:
        return self._leader.adapters

    @property
    def kv_bytes(self) -> Sequence[NDArray[np.uint8]] | None:
        return self._leader.kv_bytes

    @property
    def kv(self) -> KvCopies | None:
        return self._leader.kv

    @property
    def host(self) -> HostCopies | None:
        return self._leader.host

    # Steps.

    def launch(self, plan: StepPlan) -> None:
        """Starts the step on every rank. Raises DeviceLost if a rank is lost."""
        for follower in self._followers:
            follower.check()
            follower.launch(plan)
        try:
            self._leader.launch(plan)
        except Exception as error:
            self._raise_if_parted(error)
            raise

    def draw(self, masks: TokenMasks | None, undrawn: Int32) -> None:
        """Samples the last step's tokens on every rank. Raises DeviceLost if a rank is lost."""
        for follower in self._followers:
            follower.draw(masks, undrawn)
        try:
            self._leader.draw(masks, undrawn)
        except Exception as error:
            self._raise_if_parted(error)
            raise

    def collect(self) -> StepResult:
        """Waits for the leader's result of the oldest step. Raises DeviceLost if a rank is lost."""
        try:
            result = self._leader.collect()
        except Exception as error:
            self._raise_if_parted(error)
            raise
        for follower in self._followers:
            follower.check()
        return result

    def ended(self) -> bool:
        return self._leader.ended()

    def watch(self, wake: Callable[[], None] | None) -> None:
        self._leader.watch(wake)

    def watch_layers(self, hook: LayerHook | None) -> None:
        self._leader.watch_layers(hook)

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray | memoryview:
        return self._leader.read_blocks(layer, block_ids)

    def write_blocks(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        self._leader.write_blocks(layer, block_ids, data, heads)

    def close(self) -> None:
        """Ends every rank, the leader last. Idempotent."""
        for follower in self._followers:
            follower.close()
        self._leader.close()

    # Sleep, wake-up and new weights.

    def read_weights(self, model: str) -> NewWeights:
        self._check_alone("model", "other weights cannot be loaded")
        return self._leader.read_weights(model)

    def new_update(self) -> TensorUpdate:
        self._check_alone("names", "weights cannot be updated from tensors")
        return self._leader.new_update()

    def read_update(self, update: TensorUpdate) -> NewWeights:
        return self._leader.read_update(update)

    def use_weights(self, new: NewWeights) -> None:
        self._leader.use_weights(new)

    def sleep(self, level: int) -> int:
        self._check_alone("level", "memory cannot be freed")
        return self._leader.sleep(level)

    def wake(self, new: NewWeights | None, parts: frozenset[MemoryPart] = ALL_PARTS) -> None:
        self._leader.wake(new, parts)

    def _raise_if_parted(self, error: Exception) -> None:
        """Raises DeviceLost if followers compute a step that the leader could not launch."""
        if self._followers and not isinstance(error, DeviceLost):
            raise DeviceLost(f"a step failed on rank 0 of {self.size}, and not on the others: {error}") from error

    def _check_alone(self, field: str, what: str) -> None:
        if self._followers:
            raise Unsupported(f"{what} while {self.size} ranks run; it takes 1 rank", field=field)


def start_ranks(
    make_leader: Callable[[], ServingExecutor], followers: Sequence[Callable[[], Follower]] = ()
) -> RankGroup:
    """Starts the followers' processes, then the leader, and waits for all. They load their parts concurrently.

    If one fails to start, ends the others and raises its error.
    """
    with contextlib.ExitStack() as started:
        others: list[Follower] = []
        for start in followers:
            other = start()
            started.callback(other.close)
            others.append(other)
        leader = make_leader()
        started.callback(leader.close)
        for other in others:
            other.wait_ready()
        if others and leader.host is not None:
            raise Unsupported(
                f"host memory for blocks works with 1 rank, not with {1 + len(others)}", field="host_cache_gb"
            )
        started.pop_all()
    return RankGroup(leader, others)
