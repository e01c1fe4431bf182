"""Placements between their making and their appearance in a worker's state."""

from support.fleet.kvstore_node import blocks

from baton.router.requests.in_flight import InFlight, Placed, Share
from baton.router.requests.prompt_sketch import sketch_of


def begin(flight, placement_id, now, *shares, prompt=(), **fields):
    flight.begin(Placed(placement_id, shares, sketch_of(blocks(*prompt)), **fields), now)


def load(flight, worker_id):
    pending = flight.load(worker_id)
    return pending.num_requests, pending.num_prefill_tokens, pending.num_blocks, pending.num_placements


def test_a_placement_counts_on_both_its_workers():
    flight = InFlight()
    begin(flight, 1, 0.0, Share("d", 1, 0, 10), Share("p", 0, 160, 10))
    assert load(flight, "d") == (1, 0, 10, 1)
    assert load(flight, "p") == (0, 160, 10, 1)
    assert load(flight, "x") == (0, 0, 0, 0)


def test_a_state_that_comes_at_once_does_not_show_it_a_later_one_does():
    flight = InFlight()
    begin(flight, 1, 10.0, Share("d", 1, 160, 10))
    flight.on_state("d", 10.05)
    assert load(flight, "d")[0] == 1
    flight.on_state("other", 20.0)
    assert load(flight, "d")[0] == 1
    flight.on_state("d", 10.3)
    assert load(flight, "d") == (0, 0, 0, 0)
    assert len(flight) == 1, "it has not been reported on"


def test_placements_after_a_state_are_added_to_it():
    flight = InFlight()
    begin(flight, 1, 10.0, Share("w", 1, 160, 10))
    assert flight.load("w").num_unseen_tokens == 160
    flight.on_state("w", 10.05)
    assert flight.load("w").num_unseen_tokens == 0
    begin(flight, 2, 10.06, Share("w", 1, 320, 20))
    begin(flight, 3, 10.07, Share("w", 1, 80, 5))
    assert (flight.load("w").num_unseen_tokens, flight.load("w").num_prefill_tokens) == (400, 560)
    flight.end(1)
    flight.end(2)
    assert flight.load("w").num_unseen_tokens == flight.load("w").num_prefill_tokens == 80
    flight.on_state("w", 11.0)
    assert flight.load("w").num_unseen_tokens == 0


def test_ends_since_a_state_are_counted_until_the_next():
    flight = InFlight()
    begin(flight, 1, 10.0, Share("w", 2, 160, 10))
    begin(flight, 2, 10.0, Share("w", 1, 160, 10))
    flight.on_state("w", 11.0)
    begin(flight, 3, 11.1, Share("w", 1, 160, 10))

    def counts():
        pending = flight.load("w")
        return pending.num_unseen_requests, pending.num_ended_requests, pending.num_open_requests

    assert counts() == (1, 0, 4)
    flight.end(1)
    assert counts() == (1, 2, 2)
    flight.end(3)
    assert counts() == (0, 2, 1)
    flight.on_state("w", 11.2)
    assert counts() == (0, 0, 1)


def test_each_worker_settles_on_its_own():
    flight = InFlight()
    begin(flight, 1, 0.0, Share("d", 1, 0, 10), Share("p", 0, 160, 10))
    flight.on_state("p", 1.0)
    assert load(flight, "d")[0] == 1
    assert load(flight, "p")[1] == 0


def test_a_report_ends_it_once():
    flight = InFlight()
    begin(flight, 1, 0.0, Share("d", 1, 160, 10), prompt=[1, 2])
    assert flight.end(1)
    assert not flight.end(1)
    assert load(flight, "d") == (0, 0, 0, 0)
    assert flight.expected_prefixes(blocks(1, 2)) == {}


def test_a_placement_that_ended_before_it_was_known_does_not_begin():
    flight = InFlight()
    assert flight.end(1) is None
    begin(flight, 1, 0.0, Share("d", 1, 160, 10))
    assert load(flight, "d") == (0, 0, 0, 0)
    begin(flight, 2, 0.0, Share("d", 1, 160, 10))
    assert load(flight, "d")[0] == 1
    flight.end(2)
    begin(flight, 2, 0.0, Share("d", 1, 160, 10))
    assert load(flight, "d") == (0, 0, 0, 0), "it is told again by a router that has not heard of the end"


def test_the_last_ends_are_remembered_and_no_more():
    flight = InFlight()
    for number in range(30_000):
        flight.end(number)
    assert list(flight.ended()) == list(range(10_000, 30_000))


def test_a_dropped_placement_may_begin_again():
    flight = InFlight()
    begin(flight, 1, 0.0, Share("d", 1, 160, 10), origin=5)
    assert flight.end_all_of(5) == 1
    begin(flight, 1, 0.0, Share("d", 1, 160, 10), origin=5)
    assert load(flight, "d")[0] == 1, "its router was cut off, and is heard again"
    assert list(flight.ended()) == []


def test_a_dead_worker_has_nothing_coming():
    flight = InFlight()
    begin(flight, 1, 0.0, Share("d", 1, 0, 10), Share("p", 0, 160, 10), prompt=[1])
    flight.lose("d")
    assert load(flight, "d") == (0, 0, 0, 0)
    assert flight.expected_prefixes(blocks(1)) == {"p": 1}
    assert flight.end(1)
    assert load(flight, "p") == (0, 0, 0, 0)


def test_unreported_placements_are_dropped():
    flight = InFlight()
    begin(flight, 1, 0.0, Share("d", 1, 160, 10), prompt=[1])
    begin(flight, 2, 200.0, Share("d", 1, 160, 10), prompt=[1])
    flight.expire(200.0)
    assert len(flight) == 1
    assert load(flight, "d")[0] == 1


def test_a_prompt_that_is_about_to_be_computed_is_expected_where_it_goes():
    flight = InFlight()
    begin(flight, 1, 0.0, Share("a", 1, 160, 10), prompt=[1, 2, 3, 4])
    begin(flight, 2, 0.0, Share("b", 1, 160, 10), prompt=[1, 2, 30])
    assert flight.expected_prefixes(blocks(1, 2, 3, 9)) == {"a": 3, "b": 2}
    assert flight.expected_prefixes(blocks(7)) == {}
    assert flight.expected_prefixes(b"") == {}


def test_the_prompts_remembered_for_one_worker_are_bounded():
    flight = InFlight()
    for number in range(100):
        begin(flight, number, 0.0, Share("a", 1, 16, 1), prompt=[1, 1000 + number])
    assert flight.expected_prefixes(blocks(1, 1099)) == {"a": 2}
    assert flight.expected_prefixes(blocks(1, 1000)) == {"a": 1}
    for number in range(100):
        flight.end(number)
    assert flight.expected_prefixes(blocks(1)) == {}
    assert flight._prefixes == {}


def test_watchers_are_notified_of_each_worker_whose_load_changes():
    flight = InFlight()
    watched, other = flight.watch(), flight.watch()
    begin(flight, 1, 0.0, Share("d", 1, 0, 10), Share("p", 0, 160, 10))
    assert watched == other == {"d", "p"}
    watched.clear()
    flight.on_state("d", 1.0)
    assert watched == {"d"}
    watched.clear()
    flight.unwatch(other)
    flight.end(1)
    assert watched == {"d", "p"}, "the state of one shows a request that has ended, the other's may not show it yet"
    assert other == {"d", "p"}
