"""Ranks of one worker push to ranks of another, each its own heads, over real sockets; the pools become one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.worker.core import BlockId
from baton.worker.executors.host.kv_memory import KvMemory
from baton.worker.handover.prefill.push_progress import PushProgress, PushTarget, SourceGroup, TargetGroup
from baton.worker.kv_spec import KvSpec, full_spec
from baton.worker.transfer.base import Inbound, Landed, Outbound, Pushed, TransportEvent
from baton.worker.transfer.conversion.blocks import conversion_to
from baton.worker.transfer.conversion.heads import heads_of, ranks_of, targets_of
from baton.worker.transfer.transports import Transports

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8_e4m3": torch.float8_e4m3fn}
NUM_LAYERS, HEAD_DIM, NUM_BLOCKS = 3, 8, 40
NUM_TOKENS = 150
SIZES = list(itertools.product((1, 2, 4), repeat=2))


def spec_of(dtype: str, block_size: int, num_heads: int, tp_size: int) -> KvSpec:
    return full_spec(bytes(16), dtype, NUM_LAYERS, num_heads, HEAD_DIM, block_size, tp_size=tp_size)


class Rank:
    """What a transport needs of an executor: one rank's memory, filled with another prompt's KV."""

    def __init__(self, spec: KvSpec) -> None:
        self.kv_spec = spec
        memory = KvMemory(spec, NUM_BLOCKS, DTYPES[spec.groups[0].dtype])
        (self.memory,) = memory.groups
        self.memory.bytes[:] = 0x55
        self.kv_bytes = self.memory.bytes[:, :NUM_BLOCKS]
        self.num_blocks = NUM_BLOCKS
        self.read_blocks = memory.read
        self.write_blocks = memory.write
        self.transport = Transports(self, "127.0.0.1", 0, "127.0.0.1", lambda: None)  # type: ignore[arg-type]

    def fill(self, kv: torch.Tensor, block_ids: Sequence[BlockId]) -> None:
        """This rank's heads of [layers, 2, heads, tokens, head_dim]."""
        size = self.kv_spec.block_size
        heads = heads_of(self.kv_spec)
        for index, block in enumerate(block_ids):
            part = kv[:, :, heads.start : heads.stop, index * size : (index + 1) * size]
            self.memory.tensor[:, block, :, :, : part.shape[3]] = part

    def tokens(self, block_ids: Sequence[BlockId]) -> torch.Tensor:
        """This rank's heads of the prompt, out of these blocks."""
        return torch.cat([self.memory.tensor[:, block] for block in block_ids], dim=3)[:, :, :, :NUM_TOKENS]


def events_of(rank: Rank, count: int) -> list[TransportEvent]:
    deadline = time.monotonic() + 20
    found: list[TransportEvent] = []
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} events came: {found}"
        found += rank.transport.poll()
        time.sleep(0.001)
    return found


def shuffled(block_size: int, seed: int) -> list[BlockId]:
    count = -(-NUM_TOKENS // block_size)
    return [BlockId(int(block)) for block in np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count]]


def push_all(sender: Rank, block_ids: list[BlockId], receivers: list[Rank], num_receiver_blocks: int) -> int:
    """Pushes to every rank that this one has heads for, layer by layer. Returns how many there are."""
    specs = [receiver.kv_spec for receiver in receivers]
    targets = targets_of(sender.kv_spec, specs)
    for push_id, rank in enumerate(targets, start=1):
        receiver = receivers[rank]
        outbound = Outbound(
            push_id=push_id,
            addresses=receiver.transport.addresses,
            transfer_id=7,
            receiver_epoch=1,
            generation=99,
            checksum=True,
            conversion=conversion_to(sender.kv_spec, receiver.kv_spec),
        )
        sender.transport.connect(outbound)
        progress = PushProgress(
            [SourceGroup(range(NUM_LAYERS), block_ids)], sender.kv_spec.block_size, NUM_TOKENS, num_cached_tokens=0
        )
        progress.start(
            PushTarget(
                block_size=receiver.kv_spec.block_size,
                groups=[TargetGroup(first_block=0, max_block_layers=5)],
                push=lambda piece, push_id=push_id: sender.transport.push(push_id, piece),
                finish=lambda push_id=push_id: sender.transport.finish(push_id),
            )
        )
        for tokens in (64, 100, NUM_TOKENS):
            for layer in range(NUM_LAYERS):
                progress.layer_computed(layer, tokens)
    return len(targets)


@pytest.mark.parametrize(("num_senders", "num_receivers"), SIZES)
@pytest.mark.parametrize(
    ("num_heads", "from_dtype", "from_size", "to_dtype", "to_size"),
    [
        (4, "bfloat16", 16, "bfloat16", 16),
        (4, "bfloat16", 16, "bfloat16", 64),
        (8, "float32", 64, "bfloat16", 16),
        (2, "bfloat16", 16, "float8_e4m3", 32),  # fewer heads than ranks
    ],
)
def test_the_pools_hold_the_prompt(num_senders, num_receivers, num_heads, from_dtype, from_size, to_dtype, to_size):
    senders = [Rank(one) for one in ranks_of(spec_of(from_dtype, from_size, num_heads, num_senders))]
    receivers = [Rank(one) for one in ranks_of(spec_of(to_dtype, to_size, num_heads, num_receivers))]
    try:
        generator = torch.Generator().manual_seed(num_heads)
        kv = torch.randn(NUM_LAYERS, 2, num_heads, NUM_TOKENS, HEAD_DIM, generator=generator).to(DTYPES[from_dtype])
        from_ids, to_ids = shuffled(from_size, 1), shuffled(to_size, 2)
        for receiver in receivers:
            receiver.transport.open(Inbound(7, 1, 99, tuple(to_ids), checksum=True))
        num_pushes = 0
        for sender in senders:
            sender.fill(kv, from_ids)
            count = push_all(sender, from_ids, receivers, len(to_ids))
            assert all(isinstance(event, Pushed) for event in events_of(sender, count))
            num_pushes += count
        assert num_pushes >= num_receivers
        for receiver in receivers:
            (landed,) = events_of(receiver, 1)
            assert isinstance(landed, Landed), landed
            heads = heads_of(receiver.kv_spec)
            wanted = kv[:, :, heads.start : heads.stop].to(DTYPES[to_dtype])
            assert torch.equal(receiver.tokens(to_ids).view(torch.uint8), wanted.contiguous().view(torch.uint8))
            untouched = sorted(set(range(NUM_BLOCKS)) - set(to_ids))
            assert (receiver.memory.bytes[:, untouched] == 0x55).all()
    finally:
        for rank in (*senders, *receivers):
            rank.transport.close()
