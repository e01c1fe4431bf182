"""Answers and their generations are freed when they end, without a garbage collection."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from baton.gateway.core import Usage
from baton.gateway.serving.answer import Answer
from baton.gateway.serving.running_requests import RunningRequests
from baton.rpc.errors import Unavailable


class Collected(Answer):
    def deliver(self, index, delta):
        pass

    def finish(self, usage):
        pass

    def send_error(self, error):
        pass


class Sent:
    """A generation that delivers to its sink until its end, as real ones do."""

    def __init__(self, sink):
        self.sink = sink
        self.num_aborts = 0

    def abort(self):
        self.num_aborts += 1

    def cancel(self):
        pass


@pytest.fixture
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def begun():
    started = []

    class Generator:
        async def start(self, request, sink):
            started.append(Sent(sink))
            return started[-1]

    ignore = lambda *_: None  # noqa: E731
    meter = SimpleNamespace(on_done=ignore, on_abort=ignore, on_error=ignore)
    answer = Collected(SimpleNamespace(begin_work=ignore, request_id="r"), meter)
    await answer.run(Generator(), [SimpleNamespace(n=1), SimpleNamespace(n=1)])
    return answer, started


@pytest.mark.parametrize("end", ["done", "failed", "left"])
async def test_the_end_of_an_answer_frees_its_generations(uncollected, end):
    answer, generations = await begun()
    refs = [weakref.ref(one) for one in generations]
    if end == "done":
        for one in generations:
            one.sink.on_done(Usage(1, 1, 0))
    elif end == "failed":
        answer.fail(Unavailable("gone"))
    else:
        answer._abort()
    if end != "done":
        assert [one.num_aborts for one in generations] == [1, 1]
    one = None
    generations.clear()
    assert [ref() for ref in refs] == [None, None]
    assert answer is not None


def test_the_end_of_a_running_request_frees_its_generation(uncollected):
    running = Sent(None)
    entry = RunningRequests().add("tenant", "r1")
    entry.started(running)
    running.entry, ref = entry, weakref.ref(running)
    entry.end()
    del running
    assert ref() is None
    assert entry.cancel()
