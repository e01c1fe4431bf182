"""The oracle finds what differs, and measures the gap of a fault."""

import copy

import pytest
from chaos.streams.oracle import Heard, Seen, difference, gap_at, gaps_of, percentile


def seen():
    heard = Heard("once upon", {0: "add{}"}, [("once", -0.5), (" upon", -1.0)], "stop")
    return Seen(3, {0: heard}, (10, 2), [1.0, 1.1])


def test_the_same_is_no_difference():
    assert difference(seen(), seen()) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: setattr(one, "problem", "HTTP 500"), "HTTP 500"),
        (lambda one: setattr(one.choices[0], "text", "once upom"), "text"),
        (lambda one: setattr(one.choices[0], "text", "once upon a"), "text"),
        (lambda one: one.choices[0].calls.update({1: "x"}), "calls"),
        (lambda one: setattr(one.choices[0], "finish", ""), "finish"),
        (lambda one: one.choices[0].logprobs.pop(), "other tokens"),
        (lambda one: one.choices[0].logprobs.__setitem__(1, (" upon", -1.1)), "log-probability"),
        (lambda one: one.choices.update({1: Heard()}), "choices"),
        (lambda one: setattr(one, "usage", (10, 3)), "usage"),
    ],
)
def test_differences_are_named(change, said):
    other = copy.deepcopy(seen())
    change(other)
    assert said in difference(other, seen())


def test_chunks_add_up():
    one = Seen(0)
    one.take({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    call = {"index": 0, "function": {"name": "add", "arguments": "{"}}
    one.take({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})
    rest = {"index": 0, "function": {"arguments": "}"}}
    one.take({"choices": [{"index": 0, "delta": {"tool_calls": [rest]}, "finish_reason": "tool_calls"}]})
    one.take({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}})
    assert one.choices == {0: Heard("a", {0: "add{}"}, [], "tool_calls")}
    assert one.usage == (4, 2)
    one.take({"error": {"message": "lost"}})
    assert one.problem == "lost"


def test_a_gap_is_the_longest_wait_around_its_fault():
    times = [0.0, 1.0, 1.1, 3.1, 3.2, 9.2]
    assert gap_at(times, 0.5) == 2.0, "it began within a second of the fault"
    assert gap_at(times, 3.15) == pytest.approx(6.0)
    assert gap_at(times, 9.5) is None
    assert gap_at([], 1.0) is None
    assert gaps_of([Seen(0, times=times), Seen(1, times=[0.0, 4.0])], 0.5) == [4.0, 2.0]


def test_percentiles_are_values_that_were_seen():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([5.0], 0.01) == 5.0
