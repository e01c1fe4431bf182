"""Work on threads, ordered by owner: bounds on waiting, whatever others queue."""

import asyncio
import threading

import pytest
from support.processes.stack import MODEL

from baton.gateway.bodies.remote_reader import REMOTE_BYTES
from baton.gateway.bodies.thread import INLINE_BYTES, BodyThread
from baton.gateway.fairness.fair_threads import FairThreads
from baton.gateway.models.tokenization.tokenizer import _SHORT, Tokenizer

SECONDS = 30.0


async def order_of(run):
    """The owners of sixteen pieces of one owner, of which the first runs, and of one of another, as they ran."""
    gate, began, ran = threading.Event(), threading.Event(), []

    def work(owner):
        began.set()
        gate.wait(SECONDS)
        ran.append(owner)

    flood = [asyncio.create_task(run(lambda: work("flood"), "flood")) for _ in range(16)]
    await asyncio.to_thread(began.wait, SECONDS)
    newcomer = asyncio.create_task(run(lambda: work("new"), "new"))
    await asyncio.sleep(0.01)
    gate.set()
    await asyncio.gather(newcomer, *flood)
    return ran


async def test_a_newcomer_waits_for_two_pieces_of_a_flood():
    threads = FairThreads(1, "test")
    assert (await order_of(lambda work, owner: threads.run(work, owner, 10))).index("new") <= 2
    threads.close()


@pytest.mark.parametrize("num_bytes", [INLINE_BYTES + 1, REMOTE_BYTES + 1])
async def test_a_tenants_body_waits_for_two_bodies_of_another(num_bytes):
    async with BodyThread() as bodies:
        assert (await order_of(lambda work, owner: bodies.run(work, num_bytes, owner))).index("new") <= 2


async def test_a_body_waits_for_none_that_is_much_larger():
    gate = threading.Event()
    async with BodyThread() as bodies:
        large = asyncio.create_task(bodies.run(lambda: gate.wait(SECONDS), REMOTE_BYTES + 1))
        await asyncio.sleep(0)
        assert await bodies.run(lambda: "read", INLINE_BYTES + 1) == "read"
        assert not large.done()
        gate.set()
        await large


@pytest.mark.parametrize(("size", "before"), [(_SHORT, 2), (_SHORT + 1, 4)])
async def test_a_tenants_text_waits_for_two_texts_of_another_on_each_thread(size, before):
    tokenizer = Tokenizer(MODEL / "tokenizer.json")
    assert (await order_of(lambda work, owner: tokenizer.run_on_thread(work, size, owner))).index("new") <= before
    tokenizer.close()


async def test_cancelled_work_does_not_run():
    threads, gate, ran = FairThreads(1, "test"), threading.Event(), []
    first = asyncio.create_task(threads.run(lambda: gate.wait(SECONDS), "a", 1))
    waiting = asyncio.create_task(threads.run(lambda: ran.append("waiting"), "a", 1))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    await first
    assert await threads.run(lambda: "last", "a", 1) == "last"
    assert waiting.cancelled()
    assert not ran
    threads.close()


async def test_a_thread_continues_after_failed_or_cancelled_work():
    threads, gate = FairThreads(1, "test"), threading.Event()
    left = asyncio.create_task(threads.run(lambda: gate.wait(SECONDS) and 1 / 0, "a", 1))
    await asyncio.sleep(0)
    left.cancel()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0, "a", 1)
    assert await threads.run(lambda: 2, "b", 1) == 2
    threads.close()
