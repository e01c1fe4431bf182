"""A worker as placement sees it: its last state as a frozen value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.fleet.kv_parts import KvPart, kv_parts, moved_tokens
from baton.router.learning.step_model import StepTimes
from baton.v1 import kv_pb2, types_pb2, worker_pb2

_PREFILLS = (types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_BOTH)
_DECODES = (types_pb2.WORKER_ROLE_DECODE, types_pb2.WORKER_ROLE_BOTH)


class GroupKey(NamedTuple):
    """A group of the KV cache, without what senders convert."""

    kind: kv_pb2.KvGroupKind.ValueType
    layers: Sequence[int]
    simulated: bool
    num_kv_heads: int
    head_dim: int
    window: int = 0


class LayoutKey(NamedTuple):
    """What must be equal for KV to pass from one worker to another. Senders convert block sizes and dtypes."""

    model_digest: bytes
    tp_size: int
    groups: tuple[GroupKey, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers in all groups."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def window(self) -> int:
        """The longest window of a group; 0: there are none."""
        return max(group.window for group in self.groups)


class Speeds(NamedTuple):
    """A worker's measured speeds. 0 or None: not measured yet."""

    prefill_tokens_per_second: float
    transfer_bytes_per_second: float
    restore_bytes_per_second: float
    step: StepTimes | None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker's last state. Rates are 0 if the worker has not measured them yet."""

    worker_id: str
    epoch: int
    address: str
    role: types_pb2.WorkerRole.ValueType
    model_name: str
    model_digest: bytes
    layout: LayoutKey
    num_layers: int  # of the layout; every placement reads it, as the next one
    window: int  # tokens, the longest of the layout's groups; 0: they keep every token
    block_size: int
    draining: bool
    cordoned: bool
    received: float  # monotonic seconds
    num_running: int
    queue_depth: int
    num_pending_prefill_tokens: int
    num_blocks: int
    num_free_blocks: int
    max_num_requests: int
    prefill_tokens_per_second: float
    transfer_bytes_per_second: float
    kv_bytes_per_token: int
    step: StepTimes | None  # None: not known yet
    num_context_tokens: int = 0  # of all running requests
    restore_bytes_per_second: float = 0.0
    adapter_load_seconds: float = 0.0
    adapters: frozenset[str] = frozenset()  # on the device
    can_decode: bool = True  # requests can be submitted to it
    can_prefill_for_others: bool = True  # decode workers can ask it for a prompt's KV
    mixes_phases: bool = True  # decodes run beside the prefills that others ask of it
    stalled: bool = False  # its device is stalled; it may come back
    max_prompt_tokens: float = math.inf  # that its pool can ever hold, beside one token of output
    kv_parts: tuple[KvPart, ...] = ()  # those of which not every token moves; empty: all tokens of all layers do

    def moved_bytes(self, num_tokens: float) -> float:
        """Returns the bytes of KV that move of so many tokens, to another worker or back from host memory."""
        return moved_tokens(self.kv_parts, num_tokens) * self.kv_bytes_per_token


def view_of(
    state: worker_pb2.WorkerState,
    address: str,
    cordoned: bool,
    received: float,
    speeds: Speeds | None,
    terminating: bool = False,
) -> WorkerView:
    """Returns the view that a state stands for. `speeds` None: those of the state. `terminating`: it drains or will."""
    load, layout = state.load, layout_key(state.layout)
    if speeds is None:
        reported = load.prefill_tokens_per_second, load.transfer_bytes_per_second, load.restore_bytes_per_second
        speeds = Speeds(*reported, step=None)
    return WorkerView(
        worker_id=state.worker_id,
        epoch=state.epoch,
        address=address,
        role=state.role,
        model_name=state.model.name,
        model_digest=state.model.digest,
        layout=layout,
        num_layers=layout.num_layers,
        window=layout.window,
        block_size=state.model.block_size,
        draining=state.draining or terminating,
        cordoned=cordoned,
        received=received,
        num_running=load.num_running,
        queue_depth=load.queue_depth,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        max_num_requests=load.max_num_requests,
        prefill_tokens_per_second=speeds.prefill_tokens_per_second,
        transfer_bytes_per_second=speeds.transfer_bytes_per_second,
        kv_bytes_per_token=load.kv_bytes_per_token,
        step=speeds.step,
        num_context_tokens=load.num_context_tokens,
        restore_bytes_per_second=speeds.restore_bytes_per_second,
        adapter_load_seconds=load.adapter_load_seconds,
        adapters=frozenset(state.adapters),
        can_decode=state.role in _DECODES,
        can_prefill_for_others=state.role in _PREFILLS,
        stalled=state.stalled,
        mixes_phases=state.role == types_pb2.WORKER_ROLE_BOTH,
        max_prompt_tokens=_max_prompt_tokens(state),
        kv_parts=kv_parts(state.layout),
    )


def _max_prompt_tokens(state: worker_pb2.WorkerState) -> float:
    """Returns WorkerView.max_prompt_tokens. Texts of a model that pools are placed together, and computed in turn."""
    if not state.load.num_blocks or state.model.HasField("pooler"):
        return math.inf
    return state.load.num_blocks * state.model.block_size - 1


def layout_key(layout: kv_pb2.KvLayout) -> LayoutKey:
    """Returns a key that is equal for workers between which KV can pass."""
    groups = tuple(_group_key(group) for group in layout.groups) or (_full_group_key(layout),)
    return LayoutKey(layout.model_digest, layout.tp_size or 1, groups)


def _group_key(group: kv_pb2.KvGroup) -> GroupKey:
    simulated = group.dtype == kv_pb2.KV_DTYPE_SIMULATED
    return GroupKey(group.kind, tuple(group.layers), simulated, group.num_kv_heads, group.head_dim, group.window)


def _full_group_key(layout: kv_pb2.KvLayout) -> GroupKey:
    simulated = layout.dtype == kv_pb2.KV_DTYPE_SIMULATED
    layers = range(layout.num_layers)
    return GroupKey(kv_pb2.KV_GROUP_KIND_FULL, layers, simulated, layout.num_kv_heads, layout.head_dim)
