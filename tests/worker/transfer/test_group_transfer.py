"""A cache of two groups passes from one worker to another over real sockets, each group into blocks of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from baton.worker.core import BlockId
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.handover.prefill.push_progress import PushProgress, PushTarget, SourceGroup, TargetGroup
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.transfer.base import Inbound, InboundFailed, Landed, Outbound, Piece, Pushed, TransportEvent
from baton.worker.transfer.conversion.blocks import conversion_to
from baton.worker.transfer.transports import Transports

NUM_TOKENS, NUM_BLOCKS = 50, 16
FULL = KvGroup(KvKind.FULL, (1,), "bfloat16", num_kv_heads=2, head_dim=4)
WINDOW = KvGroup(KvKind.WINDOW, (0, 2), "bfloat16", num_kv_heads=1, head_dim=8, window=20)
SPEC = KvSpec(bytes(16), 4, (FULL, WINDOW))
WIDE = KvSpec(bytes(16), 8, tuple(dataclasses.replace(group, dtype="float32") for group in SPEC.groups))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Worker:
    """What a transport asks of an executor."""

    def __init__(self, spec: KvSpec) -> None:
        self.kv_spec = spec
        self.memory = KvMemory(spec, NUM_BLOCKS, DTYPES[spec.groups[0].dtype])
        self.kv_bytes = self.memory.layers
        self.read_blocks, self.write_blocks = self.memory.read, self.memory.write
        self.transport = Transports(self, "127.0.0.1", 0, "127.0.0.1", lambda: None)  # type: ignore[arg-type]

    def prompt_of(self, group: int, block_ids: Sequence[BlockId], first_token: int) -> torch.Tensor:
        """[layers, 2, heads, tokens, values] out of a group's blocks, as fp32."""
        blocks = self.memory.groups[group].tensor[:, list(block_ids)].float()
        tokens = blocks.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        return tokens[:, :, :, : NUM_TOKENS - first_token]


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.transport.close()


def events_of(worker: Worker, count: int) -> list[TransportEvent]:
    deadline, found = time.monotonic() + 20, []
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} events came: {found}"
        found += worker.transport.poll()
        time.sleep(0.001)
    return found


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


@pytest.mark.parametrize("receiver_spec", [SPEC, WIDE], ids=["equal", "converted"])
def test_each_group_arrives_in_its_own_blocks(workers: list[Worker], receiver_spec: KvSpec):
    sender, receiver = Worker(SPEC), Worker(receiver_spec)
    workers += sender, receiver
    generator = torch.Generator().manual_seed(1)
    for group in sender.memory.groups:
        group.tensor.copy_(torch.randn(group.tensor.shape, generator=generator))
    size = receiver_spec.block_size
    num_blocks, first_window_block = -(-NUM_TOKENS // size), 32 // size  # the receiver needs no more of the window
    from_tables = ids(*range(13)), ids(*reversed(range(2, 15)))
    to_tables = ids(*range(15, 15 - num_blocks, -1)), ids(*range(num_blocks - first_window_block))
    inbound = Inbound(7, 1, 99, tuple(to_tables[0]), True, more_block_ids=(tuple(to_tables[1]),))
    receiver.transport.open(inbound)
    conversion = conversion_to(SPEC, receiver_spec)
    sender.transport.connect(Outbound(1, receiver.transport.addresses, 7, 1, 99, True, conversion))
    groups = [SourceGroup(layers, table) for layers, table in zip(SPEC.spans, from_tables, strict=True)]
    progress = PushProgress(groups, SPEC.block_size, NUM_TOKENS, num_cached_tokens=0)
    targets = [TargetGroup(0, 3), TargetGroup(first_window_block, 2)]
    push, finish = sender.transport.push, sender.transport.finish
    progress.start(PushTarget(size, targets, lambda piece: push(1, piece), lambda: finish(1)))
    for tokens in (20, 40, NUM_TOKENS):
        for layer in range(SPEC.num_layers):
            progress.layer_computed(layer, tokens)
    (landed,) = events_of(receiver, 1)
    assert isinstance(landed, Landed)
    assert isinstance(events_of(sender, 1)[0], Pushed)
    firsts = 0, first_window_block * size
    for group, first in enumerate(firsts):
        sent = sender.prompt_of(group, from_tables[group][first // SPEC.block_size :], first)
        assert torch.equal(receiver.prompt_of(group, to_tables[group], first), sent)


def test_a_piece_that_reaches_into_another_group_fails_the_transfer(workers: list[Worker]):
    sender, receiver = Worker(SPEC), Worker(SPEC)
    workers += sender, receiver
    receiver.transport.open(Inbound(7, 1, 99, tuple(ids(1)), True, more_block_ids=(tuple(ids(2)),)))
    sender.transport.connect(Outbound(1, receiver.transport.addresses, 7, 1, 99, True))
    sender.transport.push(1, Piece(layer=0, first_index=0, num_blocks=1, block_ids=ids(1), num_layers=2))
    (failed,) = events_of(receiver, 1)
    assert isinstance(failed, InboundFailed)
