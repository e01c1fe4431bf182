"""Liveness, models and mismatches, from states as they come."""

import logging

import pytest
from support.fleet.fleet_node import DIGEST, layout, state
from support.fleet.router_views import BOTH, DECODE, PREFILL

from baton.router.fleet.fleet import Fleet
from baton.rpc.errors import NotFound


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Listener:
    def __init__(self, fleet):
        self.fleet = fleet
        self.heard = []

    def on_state(self, view, is_new):
        self.heard.append(("new" if is_new else "state", view.worker_id))

    def on_lost(self, worker_id):
        self.heard.append(("lost", worker_id))

    def on_models(self):
        self.heard.append(("models", *sorted(self.fleet.models)))


@pytest.fixture
def fleet():
    fleet = Fleet(Clock())
    for address in ("one:1", "two:2", "three:3"):
        fleet.add(address)
    fleet.listener = Listener(fleet)
    fleet.listen(fleet.listener)
    return fleet


def entry(fleet, address):
    return next(worker for worker in fleet if worker.address == address)


def test_a_worker_is_alive_from_its_first_state_to_its_loss(fleet):
    assert entry(fleet, "one:1").problem
    fleet.update("one:1", state("a"))
    assert [view.worker_id for view in fleet.alive()] == ["a"]
    assert entry(fleet, "one:1").problem == ""
    fleet.lose("one:1", "it ended the stream")
    assert fleet.alive() == []
    assert entry(fleet, "one:1").problem == "it ended the stream"
    assert fleet.listener.heard == [("models", "m"), ("new", "a"), ("models",), ("lost", "a")]


def test_a_new_epoch_is_new_a_second_state_is_not(fleet):
    for epoch in (1, 1, 2):
        fleet.update("one:1", state("a", epoch=epoch))
    assert [kind for kind, *_ in fleet.listener.heard] == ["models", "new", "state", "new"]


def test_a_loss_is_reported_once(fleet):
    fleet.update("one:1", state("a"))
    fleet.lose("one:1", "x")
    fleet.lose("one:1", "x")
    assert fleet.listener.heard.count(("lost", "a")) == 1


@pytest.mark.parametrize(
    ("told", "complaint"),
    [(state(""), "names no worker_id"), (state(name=""), "names no model"), (state(role=0), "names no role")],
)
def test_a_state_that_makes_no_sense_is_a_problem_not_a_worker(fleet, told, complaint):
    fleet.update("one:1", told)
    assert fleet.alive() == []
    assert complaint in entry(fleet, "one:1").problem


def test_two_workers_with_one_id_do_not_both_count(fleet, caplog):
    fleet.update("one:1", state("a"))
    fleet.update("two:2", state("a"))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert len(fleet.alive()) == 1
    assert "also that of the worker at one:1" in entry(fleet, "two:2").problem
    fleet.lose("one:1", "gone")
    fleet.update("two:2", state("a"))
    assert [view.address for view in fleet.alive()] == ["two:2"]


def test_a_model_is_served_with_a_decode_worker(fleet):
    fleet.update("one:1", state("p", PREFILL))
    assert fleet.models == {}
    fleet.update("two:2", state("d", DECODE))
    assert fleet.models["m"].digest == DIGEST
    fleet.lose("two:2", "gone")
    assert fleet.models == {}


def test_the_context_is_the_least_of_all_decode_workers(fleet):
    short = state("b")
    short.model.max_model_len = 1000
    fleet.update("one:1", state("a"))
    fleet.update("two:2", short)
    assert fleet.models["m"].max_model_len == 1000


def test_a_changed_context_length_is_reported(fleet):
    fleet.update("one:1", state("a"))
    short = state("a", epoch=2)
    short.model.max_model_len = 1000
    fleet.update("one:1", short)
    assert fleet.models["m"].max_model_len == 1000


def test_the_majority_of_decode_workers_defines_the_model_and_others_are_problems(fleet):
    fleet.update("one:1", state("odd", digest=b"x" * 16))
    fleet.update("two:2", state("a"))
    assert fleet.models["m"].digest == b"x" * 16, "at a tie what was served stays"
    fleet.update("three:3", state("b"))
    assert fleet.models["m"].digest == DIGEST
    problem = entry(fleet, "one:1").problem
    assert DIGEST.hex() in problem
    assert (b"x" * 16).hex() in problem
    assert entry(fleet, "two:2").problem == ""


def test_an_incompatible_prefill_worker_is_reported_once_with_both_digests(fleet, caplog):
    fleet.update("one:1", state("d", DECODE))
    for _ in range(3):
        fleet.update("two:2", state("p", PREFILL, digest=b"x" * 16))
    problem = entry(fleet, "two:2").problem
    assert DIGEST.hex() in problem
    assert (b"x" * 16).hex() in problem
    assert entry(fleet, "two:2").alive
    assert caplog.text.count((b"x" * 16).hex()) == 1


def test_a_prefill_worker_with_another_layout_is_named(fleet):
    told = state("p", PREFILL)
    told.layout.CopyFrom(layout(tp_size=2))
    fleet.update("one:1", state("d", DECODE))
    fleet.update("two:2", told)
    assert "tp 2" in entry(fleet, "two:2").problem
    fleet.update("two:2", state("p", PREFILL))
    assert entry(fleet, "two:2").problem == ""


def test_only_decode_workers_need_the_block_size_of_prompt_hashes(fleet):
    fleet.update("one:1", state("a", DECODE))
    told = state("p", PREFILL)
    told.model.block_size = told.layout.block_size = 4 * told.layout.block_size
    fleet.update("two:2", told)
    assert entry(fleet, "two:2").problem == ""
    told.role = BOTH
    fleet.update("two:2", told)
    assert "blocks of" in entry(fleet, "two:2").problem


def test_a_cordon_outlives_the_worker(fleet):
    fleet.update("one:1", state("a"))
    fleet.cordon("a", True)
    assert fleet.alive()[0].cordoned
    fleet.lose("one:1", "gone")
    fleet.update("one:1", state("a", BOTH, epoch=2))
    assert fleet.alive()[0].cordoned
    fleet.cordon("a", False)
    assert not fleet.alive()[0].cordoned


def test_cordoning_an_unknown_worker_names_the_known_ones(fleet):
    fleet.update("one:1", state("a"))
    with pytest.raises(NotFound, match="known are: a"):
        fleet.cordon("b", True)


def test_workers_dropped_by_discovery_count_no_more(fleet, caplog):
    fleet.update("one:1", state("a"))
    fleet.remove("one:1")
    assert fleet.alive() == []
    assert "one:1" not in [worker.address for worker in fleet]
    assert fleet.models == {}
    assert fleet.listener.heard[-1] == ("lost", "a")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_terminating_worker_counts_as_draining_before_it_reports_so(fleet):
    fleet.update("one:1", state("a"))
    fleet.set_terminating("one:1", True)
    assert fleet.alive()[0].draining
    fleet.update("one:1", state("a"))
    assert fleet.alive()[0].draining, "its own state does not say so yet"
    fleet.set_terminating("one:1", False)
    assert not fleet.alive()[0].draining


def test_the_end_of_a_worker_that_terminates_is_no_failure(fleet, caplog):
    fleet.update("one:1", state("a"))
    fleet.update("two:2", state("b"))
    fleet.set_terminating("one:1", True)
    fleet.lose("one:1", "it ended the stream")
    assert [worker.address for worker in fleet] == ["two:2", "three:3"]
    assert ("lost", "a") in fleet.listener.heard
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    fleet.lose("two:2", "it ended the stream")
    assert [record.levelname for record in caplog.records if record.levelname == "WARNING"] == ["WARNING"]
    assert [worker.address for worker in fleet] == ["two:2", "three:3"]


def test_connections_that_an_ended_worker_refuses_are_not_logged(fleet, caplog):
    caplog.set_level(logging.INFO)
    fleet.update("one:1", state("a"))
    fleet.set_terminating("one:1", True)
    caplog.clear()
    fleet.lose("one:1", "it ended the stream")
    fleet.lose("one:1", "UNAVAILABLE failed to connect to all addresses; last error: Connection refused")
    assert [record.message for record in caplog.records] == ["worker a at one:1: it ended the stream"]
    fleet.set_terminating("one:1", False)
    fleet.lose("one:1", "DEADLINE_EXCEEDED")
    assert len(caplog.records) == 2, "a worker that should serve is reported again"


def test_a_worker_that_terminates_and_is_reached_again_counts_again(fleet):
    fleet.set_terminating("one:1", True)
    assert "one:1" not in [worker.address for worker in fleet]
    fleet.update("one:1", state("a"))
    assert entry(fleet, "one:1").view.draining
