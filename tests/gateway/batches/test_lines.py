"""Input files in pieces of any size, and the window of lines in flight."""

import asyncio
import random
import time

import pytest

from baton.gateway.batches.running import lines as lines_module
from baton.gateway.batches.running.lines import LineProblem, lines_of
from baton.gateway.batches.running.turns import in_turn
from baton.gateway.batches.running.validation import validate
from baton.gateway.batches.running.window import Window
from baton.gateway.batches.state.store import Entry


def reader(data, piece):
    async def read(offset, length):
        return data[offset : offset + min(piece, length)]

    return read


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n\r\n", b"\n  "])
async def test_lines_are_the_same_for_every_size_of_piece(piece, end):
    data = b'{"a": 1}\n\n  \r\n{"b": "\xc3\xa9"}\r\nlast' + end
    found = [(one.number, one.index, one.data.strip()) async for one in lines_of(reader(data, piece))]
    assert found == [(1, 0, b'{"a": 1}'), (4, 1, b'{"b": "\xc3\xa9"}'), (5, 2, b"last")]


async def test_lines_are_those_of_a_split_file(monkeypatch):
    monkeypatch.setattr(lines_module, "_PIECE_BYTES", 5)
    noise = random.Random(7)
    for _ in range(300):
        data = bytes(noise.choices(b"\n\n\n \r\t\x0b\x0cab", k=noise.randrange(40)))
        wanted = [(number, one) for number, one in enumerate(data.split(b"\n"), 1) if one.strip()]
        found = [one async for one in lines_of(reader(data, noise.randrange(1, 12)))]
        assert [(one.number, one.data) for one in found] == wanted
        assert [one.index for one in found] == list(range(len(wanted)))


@pytest.mark.parametrize("unit", [b"\n", b" \n", b"\r\n", b" "])
async def test_blank_lines_cost_little(unit):
    data = unit * ((8 << 20) // len(unit)) + b"\n{}"
    begin = time.process_time()
    (found,) = [one async for one in lines_of(reader(data, len(data)))]
    assert time.process_time() - begin < 0.4  # measured: 0.02; each line on its own: 0.5 to 0.9
    assert (found.number, found.data) == (data.count(b"\n") + 1, b"{}")


async def test_a_line_without_end_is_refused_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1000)
    with pytest.raises(LineProblem, match="line 2 has more than 1000 bytes"):
        [one async for one in lines_of(reader(b"{}\n" + b"x" * 5000, 100))]
    found = await validate(reader(b"x" * 5000, 100), "/v1/completions")
    assert [one.code for one in found.errors] == ["line_too_long"]


@pytest.mark.parametrize("data", [b"\n" * (1 << 19), b"not a request\n" * (1 << 15)], ids=["blank", "wrong"])
async def test_requests_of_clients_run_while_a_file_is_read(data):
    turns, is_read = 0, asyncio.Event()

    async def count_turns():
        nonlocal turns
        while not is_read.is_set():
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await validate(reader(data, len(data)), "/v1/completions")
    is_read.set()
    await counting
    assert turns >= len(data) // (16 << 10)


async def test_many_errors_are_counted_and_some_are_listed():
    found = await validate(reader(b"no\n" * 500, 100), "/v1/completions")
    assert found.num_errors == 500
    assert len(found.errors) == 100
    assert found.errors[0].line == 1
    assert found.errors[-1].message == "401 further lines have errors, which are not listed"


async def entered(window, batch, count):
    for _ in range(count):
        async with asyncio.timeout(5):
            await window.enter(batch)


async def test_the_window_grows_with_what_is_served_and_shrinks_once_a_moment():
    now = [0.0]
    window = Window(100, lambda: now[0], first=64)
    await entered(window, "a", 64)
    waiting = [asyncio.create_task(window.enter("a")) for _ in range(4)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    window.leave("a", served=True)
    await asyncio.gather(*waiting[:3])
    assert (window.limit, window.in_flight) == (66, 66)
    for _ in range(5):
        window.refused("a")
    assert (window.limit, window.in_flight) == (59, 61)
    now[0] += 1.0
    window.refused("a")
    assert (window.limit, window.in_flight) == (53, 60)
    again = asyncio.create_task(window.enter("a", again=True))
    await asyncio.sleep(0)
    for _ in range(8):
        window.leave("a", served=False)
    await again  # before the line that has had no place yet
    assert not waiting[3].done()
    assert window.in_flight == 53
    for _ in range(4):
        window.leave("a", served=True)
        await asyncio.sleep(0)
    assert (window.limit, window.in_flight) == (54, 50)  # one entered; the window grows by sixteen in one round
    for _ in range(50):
        window.leave("a", served=False)
    assert window.in_flight == 0


async def test_each_line_of_a_full_window_grows_it_also_where_they_end_together():
    window = Window(1000, lambda: 0.0, first=64)
    await entered(window, "a", 64)
    for _ in range(64):
        window.leave("a", served=True)
    assert window.limit == 3 * 64
    await entered(window, "a", 10)
    for _ in range(10):
        window.leave("a", served=True)
    assert window.limit == 3 * 64  # it was not full


async def test_tenants_that_wait_get_places_in_turn():
    window = Window(4, lambda: 0.0)
    await entered(window, "large", 4)
    order = []

    async def wait(tenant):
        await window.enter(tenant)
        order.append(tenant)

    tasks = [asyncio.create_task(wait(name)) for name in ("large", "large", "large", "small", "small")]
    await asyncio.sleep(0)
    for _ in range(2):
        window.leave("large", served=False)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["small", "small"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert window.in_flight == 4


def test_batches_are_taken_from_tenants_in_turn_oldest_first():
    waiting = [Entry("batch", tenant, f"{tenant}{number}") for number, tenant in enumerate("aaaabbc")]
    assert [one.name for one in in_turn(waiting, {})] == ["a0", "b4", "c6", "a1", "b5", "a2", "a3"]
    assert [one.name for one in in_turn(waiting, {"a": 2})] == ["b4", "c6", "b5", "a0", "a1", "a2", "a3"]


async def test_a_place_given_to_a_line_that_is_cancelled_goes_to_the_next():
    window = Window(1, lambda: 0.0)
    await window.enter("a")
    first, second = (asyncio.create_task(window.enter(name)) for name in ("a", "b"))
    await asyncio.sleep(0)
    window.leave("a", served=False)
    first.cancel()
    second_done = asyncio.wait_for(second, 10)
    await asyncio.gather(first, return_exceptions=True)
    await second_done
    assert window.in_flight == 1
