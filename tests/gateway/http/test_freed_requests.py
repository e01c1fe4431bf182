"""A request's body and texts are freed when it ends, not by a later garbage collection."""

import asyncio
import contextlib
import gc
import itertools
import os
import weakref

import pytest
from attack.usage import resident_bytes
from support.gateway.rest_harness import FakeGenerator, RawClient, request_bytes, rest_side, until

from baton.gateway.fairness.fair_threads import FairThreads
from baton.gateway.http.exchange import Exchange
from baton.gateway.memory import trim_memory
from baton.rpc.errors import InvalidRequest

WORD = "0" * 4_000_000
REQUESTS = 8
ROUNDS = 4  # the heap grows in the first; a leak grows it in each
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
}


class Refusing(FakeGenerator):
    """Refuses each request with a new error, because an error's traceback refers to the request."""

    async def start(self, request, sink):
        raise InvalidRequest("refused behind the gate", field="bad_words")


class Holding(FakeGenerator):
    """Starts nothing until the client leaves."""

    waiting = False

    async def start(self, request, sink):
        self.waiting = True
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting = False


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_bytes():
    trim_memory()  # what the C library keeps is not held by requests
    return resident_bytes([os.getpid()])


def assert_freed(held):
    """Tolerates rounds in which something else in this process grew."""
    assert min(after - before for before, after in itertools.pairwise(held[1:])) < REQUESTS * len(WORD) / 2, held


def bodies_alive():
    return [len(one.body) for one in gc.get_objects() if isinstance(one, Exchange) and one.body]


@pytest.mark.parametrize("path", PATHS)
async def test_refused_requests_leave_nothing_large(no_collector, path):
    async with rest_side(generator=Refusing()) as rest:
        held = []
        for _ in range(ROUNDS):
            for _ in range(REQUESTS):
                answer = await rest.post(path, {**PATHS[path], "bad_words": [WORD]})
                assert answer.status == 400, answer.body
            assert bodies_alive() == []
            held.append(held_bytes())
        assert_freed(held)


TOO_LONG = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORD}]},
    "/v1/completions": {"prompt": WORD},
    "/v1/responses": {"input": WORD},
    "/v1/messages": {"messages": [{"role": "user", "content": WORD}], "max_tokens": 1},
    "/tokenize": {"prompt": WORD},
}


@pytest.mark.parametrize("path", TOO_LONG)
async def test_prompts_that_are_too_long_leave_nothing(no_collector, path):
    async with rest_side() as rest:
        held = []
        for _ in range(ROUNDS):
            for _ in range(REQUESTS):
                assert (await rest.post(path, TOO_LONG[path])).status == 400
            held.append(held_bytes())
        assert_freed(held)


async def test_work_that_fails_on_a_thread_is_freed(no_collector):
    texts = []

    class Text:
        pass

    def work():
        text = Text()
        texts.append(weakref.ref(text))
        raise ValueError(text)

    threads = FairThreads(1, "work")
    for _ in range(3):
        with contextlib.suppress(ValueError):
            await threads.run(work, "owner", 1.0)
    await until(lambda: [text() for text in texts] == [None] * 3)  # the thread's frame goes after its result came
    threads.close()


async def test_a_client_that_leaves_has_its_request_freed(no_collector):
    generator = Holding()
    async with rest_side(generator=generator) as rest:
        held = []
        for _ in range(ROUNDS):
            for _ in range(REQUESTS):
                async with RawClient.connect(rest.port) as client:
                    await client.send(request_bytes("POST", "/v1/completions", {"prompt": "x", "bad_words": [WORD]}))
                    await until(lambda: generator.waiting)
                await until(lambda: not generator.waiting)
            assert bodies_alive() == []
            held.append(held_bytes())
        assert_freed(held)
