"""Copies by address between a pool and slots: which pool they mean. What they copy is tested on a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from baton.worker.executors.cuda.kv import copies as kv_copies
from baton.worker.executors.cuda.kv.copies import KvCopies


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
