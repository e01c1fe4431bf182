"""What a real Redis holds of streams that can be resumed: once and whole, whatever Redis forgot or refused."""

import asyncio
import contextlib

import pytest
import redis
from support.fleet.kvstore_node import eventually

from baton.gateway.resume.journal import StreamHead
from baton.gateway.resume.store import StreamStore
from baton.rpc.errors import NotFound, Unavailable

PATH = "/v1/chat/completions"


def head(request_id="r1", num_choices=2):
    return StreamHead("acme", request_id, PATH, b'{"body": 1}', num_choices, seed=7, created=1)


@pytest.fixture
async def stores(redis_server):
    """Starts stores of gateways that share a Redis."""
    opened = []

    async def start():
        opened.append(await StreamStore(redis_server.url, write_seconds=0.01).__aenter__())
        return opened[-1]

    yield start
    for store in opened:
        await store.__aexit__(None, None, None)


@pytest.fixture
def client(redis_server):
    with redis.Redis.from_url(redis_server.url) as connected:
        yield connected


async def known(store, request_id="r1"):
    """Each choice's tokens as another gateway finds them; None: it finds no stream."""
    try:
        return (await store.resume("acme", request_id, PATH, None, "last-event-id")).known
    except (NotFound, Unavailable):
        return None


async def until_known(store, *tokens, request_id="r1"):
    async def agrees():
        return await known(store, request_id) == tokens

    await eventually(agrees, f"{tokens} written down")


async def test_another_gateway_finds_the_events_so_far(stores):
    one, other = await stores(), await stores()
    journal = one.begin(head())
    journal.append(0, [1, 2])
    journal.append(1, [9])
    journal.append(0, [3])
    await until_known(other, (1, 2, 3), (9,))
    again = await other.resume("acme", "r1", PATH, None, "last-event-id")
    again.append(0, [1, 2, 3, 4])  # what was written down is computed again
    await until_known(one, (1, 2, 3, 4), (9,))


async def test_after_a_wipe_of_redis_the_next_token_rewrites_the_whole_state(stores, client):
    one, other = await stores(), await stores()
    journal = one.begin(head())
    journal.append(0, [1, 2, 3])
    await until_known(other, (1, 2, 3), ())
    client.flushall()
    assert await known(other) is None
    journal.append(1, [8])
    await until_known(other, (1, 2, 3), (8,))


async def test_a_resumed_stream_that_redis_forgot_is_written_whole_too(stores, client):
    one, other = await stores(), await stores()
    one.begin(head()).append(0, [1, 2, 3])
    await until_known(other, (1, 2, 3), ())
    journal = await other.resume("acme", "r1", PATH, None, "last-event-id")
    client.flushall()
    journal.append(0, [1, 2, 3, 4])
    await until_known(one, (1, 2, 3, 4), ())


async def test_a_redis_that_died_and_forgot_has_everything_soon_after_it_is_back(stores, redis_server):
    one, other = await stores(), await stores()
    journals = [one.begin(head(f"r{number}")) for number in range(20)]
    for journal in journals:
        journal.append(0, [1])
    await until_known(other, (1,), (), request_id="r19")
    redis_server.stop()
    for token in range(2, 9):
        for journal in journals:
            journal.append(0, [token])
        await asyncio.sleep(0.02)
    late = one.begin(head("late"))
    late.append(1, [5])
    redis_server.start()
    for number in range(20):
        await until_known(other, tuple(range(1, 9)), (), request_id=f"r{number}")
    await until_known(other, (), (5,), request_id="late")


async def test_writes_refused_by_a_full_redis_are_repeated_once(stores, client):
    one, other = await stores(), await stores()
    journals = [one.begin(head(f"r{number}")) for number in range(50)]
    for journal in journals:
        journal.append(0, [1])
    await until_known(other, (1,), (), request_id="r49")
    for token in range(2, 30):
        client.config_set("maxmemory", 1 if token % 3 else 0)  # in the middle of what is sent
        for journal in journals:
            journal.append(0, [token])
        await asyncio.sleep(0.01)
    client.config_set("maxmemory", 0)
    for number in range(50):
        await until_known(other, tuple(range(1, 30)), (), request_id=f"r{number}")


async def test_a_connection_that_breaks_amid_a_write_writes_nothing_twice(stores, client):
    one, other = await stores(), await stores()
    journals = [one.begin(head(f"r{number}")) for number in range(30)]
    for token in range(1, 60):
        for journal in journals:
            journal.append(0, [token])
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(0.005)
    for number in range(30):
        await until_known(other, tuple(range(1, 60)), (), request_id=f"r{number}")


async def test_a_stream_that_ends_when_redis_forgot_it_is_no_longer_kept_track_of(stores, client):
    one, other = await stores(), await stores()
    journal = one.begin(head())
    journal.append(0, [1, 2])
    await until_known(other, (1, 2), ())
    client.flushall()
    journal.end()
    await eventually(lambda: not one._open, "it is forgotten")
    assert await known(other) is None


async def test_a_store_closes_though_its_client_loses_the_cancellation(redis_server, monkeypatch):
    writing = asyncio.Event()

    async def write():
        writing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    async with asyncio.timeout(5), StreamStore(redis_server.url, write_seconds=0.01) as store:
        monkeypatch.setattr(store, "_write", write)
        store._wake.set()
        await writing.wait()
        monkeypatch.undo()
