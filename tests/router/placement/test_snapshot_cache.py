"""Snapshots that are kept from one placement to the next."""

from dataclasses import replace

import pytest
from support.fleet.router_views import RATES, snapshot, view

from baton.router.placement.snapshot_cache import SnapshotCache


class Maker:
    """Makes snapshots, and records their workers."""

    def __init__(self):
        self.asked = []
        self.backlogs = {}

    def __call__(self, worker, fallback, now):
        self.asked.append(worker.worker_id)
        made = snapshot(worker.worker_id)
        return made._replace(view=worker, backlog_seconds=self.backlogs.get(worker.worker_id, 0.0))

    def taken(self):
        asked, self.asked = sorted(self.asked), []
        return asked


@pytest.fixture
def maker():
    return Maker()


@pytest.fixture
def cache(maker):
    return SnapshotCache(maker, set())


def test_each_worker_is_looked_at_once(cache, maker):
    views = [view(name) for name in "abc"]
    for number in range(5):
        cache.update(views, RATES, number / 1000)
    assert maker.taken() == ["a", "b", "c"]
    assert [one.view.worker_id for one in cache.snapshots] == ["a", "b", "c"]
    assert cache.indices == {"a": 0, "b": 1, "c": 2}


def test_a_worker_whose_load_changed_gets_a_new_snapshot(cache, maker):
    views = [view(name) for name in "abc"]
    cache.update(views, RATES, 0.0)
    maker.taken()
    cache.changed.update(("b", "unknown"))
    cache.update(views, RATES, 0.0)
    assert maker.taken() == ["b"]
    cache.update(views, RATES, 0.0)
    assert not maker.taken()
    assert not cache.changed


def test_a_worker_with_a_new_state_gets_a_new_snapshot(cache, maker):
    views = [view(name) for name in "abc"]
    cache.update(views, RATES, 0.0)
    maker.taken()
    news = [views[0], view("b", num_running=7), views[2]]
    cache.update(news, RATES, 0.0)
    assert maker.taken() == ["b"]
    assert cache.snapshots[1].view is news[1]


@pytest.mark.parametrize("names", ["ab", "abcd", "acb", "abd"])
def test_with_other_workers_all_are_looked_at(cache, maker, names):
    views = {name: view(name) for name in "abcd"}
    cache.update([views[name] for name in "abc"], RATES, 0.0)
    maker.taken()
    cache.update([views[name] for name in names], RATES, 0.0)
    assert maker.taken() == sorted(names)
    assert [one.view.worker_id for one in cache.snapshots] == list(names)
    assert [cache.indices[name] for name in names] == list(range(len(names)))


def test_with_another_fallback_all_are_looked_at(cache, maker):
    views = [view(name) for name in "abc"]
    cache.update(views, RATES, 0.0)
    maker.taken()
    cache.update(views, replace(RATES, prefill_tokens_per_second=1.0), 0.0)
    assert maker.taken() == ["a", "b", "c"]


def test_a_backlog_is_looked_at_again_soon_until_it_is_gone(cache, maker):
    views = [view(name) for name in "abc"]
    maker.backlogs["b"] = 0.5
    cache.update(views, RATES, 1.0)
    cache.update(views, RATES, 1.005)
    assert maker.taken() == ["a", "b", "c"]
    cache.update(views, RATES, 1.011)
    assert maker.taken() == ["b"]
    del maker.backlogs["b"]
    cache.update(views, RATES, 1.022)
    cache.update(views, RATES, 1.033)
    assert maker.taken() == ["b"]
