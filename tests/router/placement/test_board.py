"""Standings that are kept from one placement to the next."""

from dataclasses import replace

import pytest
from support.fleet.router_views import RATES, standing, view

from baton.router.placement.board import Board


class Maker:
    """Makes standings, and remembers of whom."""

    def __init__(self):
        self.asked = []
        self.backlogs = {}

    def __call__(self, worker, fallback, now):
        self.asked.append(worker.worker_id)
        made = standing(worker.worker_id)
        return made._replace(view=worker, backlog_seconds=self.backlogs.get(worker.worker_id, 0.0))

    def taken(self):
        asked, self.asked = sorted(self.asked), []
        return asked


@pytest.fixture
def maker():
    return Maker()


@pytest.fixture
def board(maker):
    return Board(maker, set())


def test_each_worker_is_looked_at_once(board, maker):
    views = [view(name) for name in "abc"]
    for number in range(5):
        board.bring_up(views, RATES, number / 1000)
    assert maker.taken() == ["a", "b", "c"]
    assert [one.view.worker_id for one in board.standings] == ["a", "b", "c"]
    assert board.places == {"a": 0, "b": 1, "c": 2}


def test_one_whose_load_changed_is_looked_at_again(board, maker):
    views = [view(name) for name in "abc"]
    board.bring_up(views, RATES, 0.0)
    maker.taken()
    board.changed.update(("b", "unknown"))
    board.bring_up(views, RATES, 0.0)
    assert maker.taken() == ["b"]
    board.bring_up(views, RATES, 0.0)
    assert not maker.taken()
    assert not board.changed


def test_one_that_told_a_new_state_is_looked_at_again(board, maker):
    views = [view(name) for name in "abc"]
    board.bring_up(views, RATES, 0.0)
    maker.taken()
    news = [views[0], view("b", num_running=7), views[2]]
    board.bring_up(news, RATES, 0.0)
    assert maker.taken() == ["b"]
    assert board.standings[1].view is news[1]


@pytest.mark.parametrize("names", ["ab", "abcd", "acb", "abd"])
def test_with_other_workers_all_are_looked_at(board, maker, names):
    views = {name: view(name) for name in "abcd"}
    board.bring_up([views[name] for name in "abc"], RATES, 0.0)
    maker.taken()
    board.bring_up([views[name] for name in names], RATES, 0.0)
    assert maker.taken() == sorted(names)
    assert [one.view.worker_id for one in board.standings] == list(names)
    assert [board.places[name] for name in names] == list(range(len(names)))


def test_with_another_fallback_all_are_looked_at(board, maker):
    views = [view(name) for name in "abc"]
    board.bring_up(views, RATES, 0.0)
    maker.taken()
    board.bring_up(views, replace(RATES, prefill_tokens_per_second=1.0), 0.0)
    assert maker.taken() == ["a", "b", "c"]


def test_a_backlog_is_looked_at_again_soon_until_it_is_gone(board, maker):
    views = [view(name) for name in "abc"]
    maker.backlogs["b"] = 0.5
    board.bring_up(views, RATES, 1.0)
    board.bring_up(views, RATES, 1.005)
    assert maker.taken() == ["a", "b", "c"]
    board.bring_up(views, RATES, 1.011)
    assert maker.taken() == ["b"]
    del maker.backlogs["b"]
    board.bring_up(views, RATES, 1.022)
    board.bring_up(views, RATES, 1.033)
    assert maker.taken() == ["b"]
