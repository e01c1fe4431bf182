"""Copies by address between a pool and slots: which pool they mean. What they copy is tested on a GPU."""

from __future__ import annotations

import weakref
from typing import cast

import pytest
import torch

from baton.rpc.errors import Unsupported
from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.executors.cuda.kv import copies as kv_copies
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.layers.state_places import StatePlaces
from baton.worker.state_pieces import StateMatrix, place_state
from baton.worker.transfer.kinds.registry import OWN_KINDS


class Copier:
    """Stands for the kernels' launches: keeps its pool, as the real one does."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copies, "BlockCopier", Copier)


def test_copies_mean_one_pool_until_it_is_released():
    pools = [torch.zeros(2, 3)]
    kv = KvCopies(lambda: pools[-1])
    first = kv.copier()
    assert kv.copier() is first
    assert first.pool is pools[0]
    pools.append(torch.zeros(2, 3))
    kv.release()
    assert kv.copier().pool is pools[1]


def test_a_released_pool_has_no_references():
    pools = [torch.zeros(2, 3)]
    kv = KvCopies(lambda: pools[-1])
    kv.copier()
    gone = weakref.ref(pools.pop())
    assert gone() is not None
    kv.release()
    assert gone() is None


def test_groups_share_the_layers_of_the_pool():
    """KV layers are numbered group by group; each group begins at the pool's first layer."""
    kv = KvCopies(lambda: torch.zeros(2, 3), (range(1), range(1, 3), range(3, 5)))
    assert [kv.places(range(layer, layer + 1)).start for layer in range(5)] == [0, 0, 1, 0, 1]
    assert kv.places(range(3, 5)) == range(2)
    assert KvCopies(lambda: torch.zeros(5, 3)).places(range(3, 5)) == range(3, 5)


def test_rdma_refuses_states_of_gpus_by_name() -> None:
    pool = torch.zeros(1, 4, 64)
    places = StatePlaces(lambda: pool, place_state([StateMatrix(1, 4, 8)], 1, 64))
    with pytest.raises(Unsupported, match="rdma moves no states of GPUs yet; ipc, nccl and tcp do"):
        OWN_KINDS["rdma"].make(cast(Executor, None), 1 << 16, KvCopies(lambda: pool, (), {range(1): places}))


def test_states_are_copied_in_the_order_of_their_matrices() -> None:
    """Between pages that hold the pieces in two ways, as a sender and a receiver with blocks of two sizes have them."""
    matrix, made = StateMatrix(2, 4, 8), []
    for part_values in (32, 64):
        pool = torch.randn(1, 6, part_values, generator=torch.Generator().manual_seed(part_values))
        places = StatePlaces(lambda pool=pool: pool, place_state([matrix], 1, part_values))
        made.append(KvCopies(lambda pool=pool: pool, (range(1), range(1, 2)), {range(1, 2): places}))
    source, target = made
    assert source.holds_states(1)
    assert not source.holds_states(0)
    moved = source.read_states(range(1, 2), [BlockId(5), BlockId(2)])
    assert not bool(target.write_states(range(1, 2), [BlockId(3)], moved))
    assert torch.equal(target.read_states(range(1, 2), [BlockId(3)]), moved)
    moved.view(torch.float32)[7] = torch.nan
    assert bool(target.write_states(range(1, 2), [BlockId(3)], moved))
