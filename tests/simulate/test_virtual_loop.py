import asyncio
import time

import pytest

from baton.services.simulate.virtual.loop import LoopTimeline
from baton.services.simulate.virtual.timeline import Timeline


def test_events_come_in_the_order_of_their_time_and_then_of_their_making():
    timeline, seen = Timeline(), []
    timeline.at(2.0, lambda: seen.append("late"))
    timeline.at(1.0, lambda: seen.append("first"))
    timeline.at(1.0, lambda: timeline.after(0.0, lambda: seen.append("third")))
    timeline.at(1.0, lambda: seen.append("second"))
    timeline.run(10.0, lambda: False)
    assert seen == ["first", "second", "third", "late"]
    assert timeline.clock() == 2.0


def test_a_run_ends_at_its_time_or_when_it_is_done():
    timeline, seen = Timeline(), []
    for second in range(10):
        timeline.at(second, lambda second=second: seen.append(second))
    timeline.run(100.0, lambda: len(seen) == 3)
    timeline.run(5.0, lambda: False)
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.fixture
def timeline():
    timeline = LoopTimeline()
    yield timeline
    timeline.close()


def test_an_hour_of_sleep_takes_no_time(timeline):
    began = time.monotonic()
    timeline.loop.run_until_complete(asyncio.sleep(3600))
    assert timeline.clock() == pytest.approx(3600)
    assert time.monotonic() - began < 60


def test_coroutines_and_events_share_one_clock(timeline):
    seen = []

    async def sleeper():
        await asyncio.sleep(1.5)
        seen.append(("slept", round(timeline.clock(), 6)))

    timeline.spawn(sleeper())
    timeline.at(1.0, lambda: seen.append(("event", timeline.clock())))
    timeline.run(3.0, lambda: False)
    assert seen == [("event", pytest.approx(1.0)), ("slept", 1.5)]


def test_an_endless_wait_is_an_error(timeline):
    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        timeline.loop.run_until_complete(timeline.loop.create_future())
