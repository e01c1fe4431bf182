"""The state of batches keeps the same promises in memory and in Redis."""

import asyncio

import pytest

from baton.gateway.batches.state.memory import MemoryState
from baton.gateway.batches.state.redis_store import RedisState
from baton.gateway.batches.state.store import AlreadyRecorded, Commit, Entry, LeaseLost, StorageFull, Use
from baton.rpc.errors import Unavailable

BATCH = Entry("batch", "team", "batch_1")


@pytest.fixture(params=["memory", "redis"])
async def state(request):
    one = MemoryState() if request.param == "memory" else RedisState(request.getfixturevalue("redis_server").url)
    yield one
    await one.close()


async def test_records_are_paged_by_time_and_tenant(state):
    for number in range(5):
        await state.create(Entry("file", "team", f"f{number}"), b"%d" % number, 100.0 + number, None)
    await state.create(Entry("file", "other", "f9"), b"9", 50.0, None)
    assert await state.page("file", "team", "", 2, False) == ["f4", "f3"]
    assert await state.page("file", "team", "f3", 2, False) == ["f2", "f1"]
    assert await state.page("file", "team", "", 2, True) == ["f0", "f1"]
    assert await state.page("file", "team", "f9", 2, True) is None
    assert await state.page("file", "nobody", "", 2, True) == []
    assert await state.load("file", ["f1", "none", "f9"]) == [b"1", None, b"9"]
    assert await state.load("file", []) == []
    assert await state.delete(Entry("file", "team", "f4"))
    assert not await state.delete(Entry("file", "team", "f4"))
    assert await state.page("file", "team", "", 9, False) == ["f3", "f2", "f1", "f0"]


async def test_a_tenants_files_have_a_bound_of_bytes(state):
    first, second, other = (
        Entry("file", tenant, name) for tenant, name in (("team", "a"), ("team", "b"), ("else", "c"))
    )
    await state.create_file(first, b"1", 1.0, None, Use(60, 100))
    await state.create_file(first, b"2", 1.0, 5.0, Use(70, 100))  # again
    with pytest.raises(StorageFull) as full:
        await state.create_file(second, b"3", 2.0, None, Use(31, 100))
    assert full.value.stored == 70
    assert await state.load("file", ["a", "b"]) == [b"2", None]
    assert await state.page("file", "team", "", 9, True) == ["a"]
    assert await state.expired(6.0, 9) == [first]
    await state.create_file(second, b"3", 2.0, None, Use(31))  # without a bound
    await state.create_file(other, b"4", 2.0, None, Use(100, 100))
    assert [await state.stored_bytes(tenant) for tenant in ("team", "else", "nobody")] == [101, 100, 0]
    await state.delete(first)
    assert await state.stored_bytes("team") == 31


async def test_one_holds_a_lease_until_it_expires_or_is_given_back(state):
    await state.create(BATCH, b"{}", 1.0, None)
    assert await state.open_batches() == [BATCH]
    first = await state.lease("batch_1", 60)
    assert first == 1
    assert await state.lease("batch_1", 60) is None
    await state.renew("batch_1", first, 0.05)
    await asyncio.sleep(0.1)
    second = await state.lease("batch_1", 60)
    assert second == 2
    with pytest.raises(LeaseLost):
        await state.renew("batch_1", first, 60)
    await state.release("batch_1", first)
    assert await state.lease("batch_1", 60) is None
    await state.release("batch_1", second)
    assert await state.lease("batch_1", 60) == 3


async def test_a_holder_that_is_late_and_was_not_replaced_goes_on(state):
    await state.create(BATCH, b"{}", 1.0, None)
    fence = await state.lease("batch_1", 0.03)
    await asyncio.sleep(0.06)
    await state.commit("batch_1", fence, Commit(b"late"))
    await state.renew("batch_1", fence, 60)
    assert await state.lease("batch_1", 60) is None
    assert await state.load("batch", ["batch_1"]) == [b"late"]


async def test_a_commit_counts_whole_or_not_at_all(state):
    await state.create(BATCH, b"new", 1.0, None)
    old = await state.lease("batch_1", 0.02)
    await state.commit("batch_1", old, Commit(b"one", [0, 9], [b"p1"]))
    await asyncio.sleep(0.05)
    fence = await state.lease("batch_1", 60)
    with pytest.raises(LeaseLost):
        await state.commit("batch_1", old, Commit(b"stale", [1], [b"stale"]))
    with pytest.raises(AlreadyRecorded):
        await state.commit("batch_1", fence, Commit(b"twice", [1, 9], [b"twice"]))
    await state.commit("batch_1", fence, Commit(b"two", [1], [b"p2", b"p3"]))
    progress = await state.progress("batch_1")
    assert list(progress.parts) == [b"p1", b"p2", b"p3"]
    assert [line for line in range(20) if progress.has(line)] == [0, 1, 9]
    assert await state.load("batch", ["batch_1"]) == [b"two"]
    await state.close_batch(BATCH)
    assert await state.open_batches() == []
    assert not (await state.progress("batch_1")).has(0)


async def test_a_cancellation_is_seen_by_all_with_its_first_time(state):
    await state.create(BATCH, b"{}", 1.0, None)
    assert await state.cancelled_at(["batch_1", "none"]) == [None, None]
    await state.cancel("batch_1", 5.0)
    await state.cancel("batch_1", 6.0)
    assert await state.cancelled_at(["batch_1"]) == [5.0]
    assert await state.cancelled_at([]) == []


async def test_what_expires_is_found_until_it_is_deleted(state):
    entry = Entry("file", "a tenant: ä", "f1")
    await state.create(entry, b"x", 1.0, 50.0)
    await state.create(BATCH, b"{}", 1.0, None)
    await state.expire(BATCH, 60.0)
    assert await state.expired(49.0, 10) == []
    assert await state.expired(55.0, 10) == [entry]
    assert set(await state.expired(65.0, 10)) == {entry, BATCH}
    for one in (entry, BATCH):
        await state.delete(one)
    assert await state.expired(65.0, 10) == []
    assert await state.open_batches() == []


async def test_redis_that_is_gone_is_unavailable(redis_server):
    state = RedisState(redis_server.url)
    redis_server.stop()
    with pytest.raises(Unavailable, match="cannot access the state of files and batches"):
        await state.open_batches()
    await state.close()
