"""The text of `baton top`: it fits, is sorted, has no control characters, and shows bad states."""

from __future__ import annotations

import curses
from types import SimpleNamespace
from typing import Any

import pytest

from baton.gateway.console.fleet_view import FleetView
from baton.gateway.routers.client import RouterReply
from baton.rpc.errors import InvalidRequest
from baton.services.top import text as top_text
from baton.services.top import words
from baton.services.top.client import Gateway
from baton.services.top.screen import Picture, press
from baton.services.top.table import cut
from baton.v1 import router_pb2, types_pb2, worker_pb2


def snapshot_of(num_workers=3, alive=True, problem="", request_id="r1"):
    workers = [
        router_pb2.WorkerEntry(
            address=f"10.0.0.{at}:1",
            alive=alive,
            state=worker_pb2.WorkerState(
                worker_id=f"w{at}",
                role=types_pb2.WORKER_ROLE_BOTH,
                load=worker_pb2.WorkerLoad(
                    num_blocks=10, num_free_blocks=10 - at % 10, num_running=at, decode_tokens_per_step=1.5 * at
                ),
            ),
        )
        for at in range(num_workers)
    ]
    placed = [router_pb2.PlacementSummary(placement_id=1, request_id=request_id, decode_worker_id="w1")]
    told = None if problem else router_pb2.GetFleetResponse(router_id=1, workers=workers, placed=placed)
    return FleetView().take([RouterReply("router:1", told, problem)], 1.0, 1e9)


def feed_of(snapshot) -> Any:
    return SimpleNamespace(snapshot=snapshot, gateway=None)


def shown(picture, snapshot, width=100, height=24):
    return picture.lines(snapshot, "", width, height)


def test_tokens_of_a_step_have_a_column():
    head, *rows = top_text.render(top_text.WORKERS, snapshot_of().workers, 200)[:4]
    at = head.index("A STEP")
    assert [row[at : at + len("A STEP")].strip() for row in rows] == ["-", "1.50", "3"]


def test_adapters_on_the_device_have_a_column():
    one, two = snapshot_of().workers[:2]
    two.num_adapters, two.num_adapter_slots = 2, 8
    head, *rows = top_text.render(top_text.WORKERS, [one, two], 200)[:3]
    at = head.index("ADAPTERS")
    assert [row[at : at + len("ADAPTERS")].strip() for row in rows] == ["-", "2 of 8"]


NUMBERS = {0: "0", 7: "7", 0.5: "0.50", 12.34: "12.3", 999: "999", 1234: "1.23 k", 9.996e5: "1.00 M", 2.5e15: "2.50 P"}
TIMES = {0.0: "0.00 ms", 0.0123: "12.3 ms", 0.5: "500 ms", 2: "2.00 s", 150: "2 min 30 s"}


@pytest.mark.parametrize(("value", "text"), [(None, "-"), *NUMBERS.items()])
def test_numbers_have_three_figures(value, text):
    assert words.short(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), *TIMES.items()])
def test_durations_are_in_the_unit_that_fits(seconds, text):
    assert words.duration(seconds) == text


def test_a_bar_is_within_its_line_for_any_value():
    for start, length in ((0, 0), (0, 10), (10, 0), (9.99, 0.01), (0, 20)):
        assert len(words.span(start, length, 10, 40)) == 40
        assert "#" in words.span(start, length, 10, 40)
    assert words.span(0, 0, 0, 4) == "    "


def test_names_are_sorted_by_their_numbers():
    assert sorted(["w10", "w2", "w1"], key=words.natural) == ["w1", "w2", "w10"]
    lines = [line.split()[0] for line in top_text.report(snapshot_of(12), 120) if line.startswith("w")]
    assert lines == [f"w{at}" for at in range(12)]


def test_the_end_of_a_long_name_stays():
    assert cut("worker-in-a-far-away-place-17", 10) == "~-place-17"
    assert len(cut("x" * 50, 28)) == 28


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
def test_no_line_is_wider_than_the_screen(width):
    for lines in (top_text.report(snapshot_of(), width), shown(Picture(), snapshot_of(), width)[0]):
        assert all(len(line) <= width for line in lines)
    assert "w0" in "\n".join(top_text.report(snapshot_of(), max(width, 20)))


def test_client_identifiers_cannot_control_the_terminal():
    lines = top_text.report(snapshot_of(request_id="\x1b]0;mine\x07\n\x1b[2J"), 120)
    assert not any(char in line for line in lines for char in "\x1b\x07\n")


def test_bad_states_are_reported():
    assert top_text.problems(snapshot_of()) == []
    assert "No worker is alive" in top_text.problems(snapshot_of(alive=False))[0]
    assert "have no workers yet" in top_text.problems(snapshot_of(0))[0]
    assert "No router has answered yet (router:1: refused)" in top_text.problems(snapshot_of(problem="refused"))[0]


def test_a_hundred_workers_scroll_and_the_marked_one_is_in_sight():
    picture, snapshot = Picture(), snapshot_of(100)
    for _ in range(60):
        press(picture, curses.KEY_DOWN, feed_of(snapshot), 100, 24)
    lines, marked = shown(picture, snapshot)
    assert len(lines) == 24
    assert lines[marked].split()[0] == picture.rows(snapshot)[60].worker_id
    for _ in range(20):
        press(picture, curses.KEY_NPAGE, feed_of(snapshot), 100, 24)
    lines, marked = shown(picture, snapshot)
    assert lines[marked].split()[0] == picture.rows(snapshot)[-1].worker_id


def test_keys_sort_reverse_change_the_view_and_hold_the_picture():
    picture, snapshot = Picture(), snapshot_of(12)
    for _ in range(3):
        press(picture, ord("s"), feed_of(snapshot), 100, 24)
    assert picture.rows(snapshot)[0].worker_id == "w11"  # by what runs, the most first
    press(picture, ord("r"), feed_of(snapshot), 100, 24)
    assert picture.rows(snapshot)[0].worker_id == "w0"
    press(picture, ord("\t"), feed_of(snapshot), 100, 24)
    assert "[Transfers 0]" in "\n".join(shown(picture, snapshot)[0])
    assert "nothing yet" in shown(picture, snapshot)[0]
    press(picture, ord("p"), feed_of(snapshot), 100, 24)
    assert picture.held is snapshot
    assert "PAUSED" in "\n".join(shown(picture, snapshot)[0])
    press(picture, ord("p"), feed_of(snapshot), 100, 24)
    assert picture.held is None


def test_before_the_first_snapshot_it_shows_what_it_waits_for():
    lines, marked = Picture().lines(None, "http://x: cannot be reached", 80, 24)
    assert (lines[0], marked) == ("baton top: http://x: cannot be reached", -1)


@pytest.mark.parametrize("url", ["", "x", "http://", "file:///etc", "http://x:99999", "http://x:0"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(InvalidRequest):
        Gateway(url).check()
