"""Batches whose input, storage, state or code fails: what their clients see."""

import asyncio
import json

import msgspec
import pytest
import redis.asyncio as redis
from openai import InternalServerError
from support.gateway.batch_rig import begin, ended, line, results, running
from support.gateway.rest_harness import FakeGenerator, say, until

from baton.gateway.batches.blobs.factory import open_blobs
from baton.gateway.batches.records import StoredPart
from baton.gateway.batches.running import batch_run as batch_run_module
from baton.gateway.batches.running import results as results_module
from baton.gateway.batches.running import runner as runner_module
from baton.gateway.batches.running.batch_run import BatchRun
from baton.gateway.batches.running.line_runner import LineRunner
from baton.gateway.batches.state.memory import MemoryState
from baton.gateway.batches.state.redis_store import RedisState
from baton.gateway.batches.state.store import Commit, Entry
from baton.rpc.errors import Unavailable


async def test_an_input_that_is_deleted_fails_the_batch(tmp_path):
    async with running(tmp_path, say("x")) as (_, client):
        file = await client.files.create(file=("in.jsonl", line("a")), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        (tmp_path / "store" / "files" / file.id).unlink()
        done = await ended(client, await made)
        assert done.status == "failed"
        assert [one.code for one in done.errors.data] == ["not_found"]


async def test_a_gateway_whose_state_cannot_be_reached_stops_all_the_same(tmp_path, monkeypatch):
    async def commit(*ignored):
        raise Unavailable("gone")

    monkeypatch.setattr(runner_module, "_STOP_SECONDS", 0.05)
    async with asyncio.timeout(5):
        async with running(tmp_path, generator=FakeGenerator()) as (rest, client):
            await begin(client, [line(str(number)) for number in range(3)])
            first = await rest.generator.next()
            monkeypatch.setattr(MemoryState, "commit", commit)
            say("not recorded")(first)
            await asyncio.sleep(0.05)
    assert rest.admission.in_use == 0


async def test_results_that_cannot_be_stored_hold_up_further_lines(tmp_path, monkeypatch):
    num_refused, num_lines = 0, 200

    async def commit(self, name, fence, step):
        nonlocal num_refused
        if step.lines:
            num_refused += 1
            raise Unavailable("gone")
        await stored(self, name, fence, step)

    stored = MemoryState.commit
    monkeypatch.setattr(MemoryState, "commit", commit)
    monkeypatch.setattr(results_module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(results_module, "_PART_LINES", 2)
    async with running(tmp_path, say("x"), max_batch_streams=4) as (rest, client):
        batch = await begin(client, [line(str(number)) for number in range(num_lines)])
        await until(lambda: num_refused > 20)
        assert len(rest.generator.started) < 100
        monkeypatch.setattr(MemoryState, "commit", stored)
        done = await ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", num_lines)


async def test_a_batch_waits_for_a_gateway_that_serves_its_endpoint(tmp_path, redis_server, monkeypatch):
    shared = {"redis_url": redis_server.url}
    async with running(tmp_path, say("x"), **shared) as (_, client):
        monkeypatch.setattr(runner_module.BatchRunner, "_take", idle)
        batch = await begin(client, [line("a")])
        monkeypatch.undo()
    async with running(tmp_path, say("x"), tokens_only=True, **shared):
        await asyncio.sleep(0.3)
    async with running(tmp_path, say("x"), **shared) as (_, client):
        assert (await ended(client, batch)).status == "completed"


@pytest.mark.parametrize("stage", ["validate", "_run_lines", "join_parts"])
async def test_a_batch_that_a_defect_stops_every_time_fails_with_the_reason(tmp_path, monkeypatch, stage):
    num_stopped = 0

    async def stop(*ignored):
        nonlocal num_stopped
        num_stopped += 1
        raise KeyError("unexpected")

    monkeypatch.setattr(runner_module, "_LEFT_SECONDS", 0.0)
    monkeypatch.setattr(runner_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(BatchRun if stage == "_run_lines" else batch_run_module, stage, stop)
    async with running(tmp_path, say("x")) as (_, client):
        batch = await begin(client, [line("a")])
        done = await ended(client, batch)
        assert done.status == "failed"
        assert done.failed_at
        assert num_stopped == batch_run_module.MAX_DEFECTS
        assert [(one.code, one.message) for one in done.errors.data] == [
            ("internal_error", "the batch was stopped 3 times by an internal error: KeyError")
        ]
        await until(lambda: not list((tmp_path / "store" / "batches").glob("*/*")))


async def test_a_batch_that_a_defect_ends_keeps_its_results(tmp_path, monkeypatch):
    async def run(self, one):
        if b"poison" in one.data:
            await until(lambda: len(recorded) == 3)
            raise KeyError("unexpected")
        await as_usual(self, one)

    async def commit(self, name, fence, step):
        await stored(self, name, fence, step)
        recorded.extend(step.lines)

    recorded, as_usual, stored = [], LineRunner.run, MemoryState.commit
    monkeypatch.setattr(runner_module, "_LEFT_SECONDS", 0.0)
    monkeypatch.setattr(runner_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(LineRunner, "run", run)
    monkeypatch.setattr(MemoryState, "commit", commit)
    async with running(tmp_path, say("x")) as (_, client):
        batch = await begin(client, [line("a"), line("b"), line("poison"), line("c")])
        done = await ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("failed", 3)
        assert {one["custom_id"] for one in await results(client, done.output_file_id)} == {"a", "b", "c"}
        assert "KeyError" in done.errors.data[0].message


async def idle(*ignored):
    """Does nothing: the runner then takes no batch."""


LEGIBLE = {"endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "24h", "created_at": 7}
UNREADABLE = {
    "no JSON": b"\xff{",
    "no fields": b"{}",
    "a wrong type": json.dumps({"tenant": "", "batch": {**LEGIBLE, "expires_at": "soon", "status": 3}}).encode(),
}


@pytest.mark.parametrize("record", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_batch_whose_record_cannot_be_read_fails_with_the_results_that_it_has(tmp_path, redis_server, record):
    entry, state = Entry("batch", "", "batch_1"), RedisState(redis_server.url)
    part, data = StoredPart(name="batches/batch_1/1", size=10, is_error=False), b'{"id": 1}\n'
    open_blobs(str(tmp_path / "store")).put(part.name, [data])
    await state.create(entry, b"", 1.0, None)
    fence = await state.lease(entry.name, 60)
    await state.commit(entry.name, fence, Commit(record, [0], [msgspec.json.encode(part)]))
    await state.release(entry.name, fence)
    async with redis.from_url(redis_server.url) as client:
        await client.zadd("baton:batches:open", {b"not an entry": 0.0})
    async with running(tmp_path, say("x"), redis_url=redis_server.url) as (rest, client):
        good = await begin(client, [line("a")])
        assert (await ended(client, good)).status == "completed"
        await until_closed(state, entry)
        done = await client.batches.retrieve(entry.name)
        assert (done.status, done.errors.data[0].code) == ("failed", "unreadable_record")
        assert "the stored record of this batch cannot be read" in done.errors.data[0].message
        assert done.failed_at
        assert (await client.files.content(done.output_file_id)).content == data
        assert {one.id async for one in client.batches.list()} == {good.id, entry.name}
        assert rest.metrics.registry.get_sample_value("baton_gateway_batches_unreadable_total") == 1
        if b"endpoint" in record:
            assert (done.endpoint, done.input_file_id, done.created_at) == ("/v1/completions", "file-1", 7)
    assert await state.open_batches() == []
    await state.close()


async def test_lists_leave_out_records_that_cannot_be_read(tmp_path, redis_server):
    state = RedisState(redis_server.url)
    async with running(tmp_path, say("x"), redis_url=redis_server.url) as (_, client):
        batch = await begin(client, [line("a")])
        await ended(client, batch)
        for kind in ("file", "batch"):
            entry = Entry(kind, "", f"{kind}-broken")
            await state.create(entry, b"{", 1.0, None)
            if kind == "batch":
                await state.close_batch(entry)
        assert [one.id async for one in client.batches.list()] == [batch.id]
        assert len([one async for one in client.files.list()]) == 2
        with pytest.raises(InternalServerError, match="cannot be read"):
            await client.files.retrieve("file-broken")
    await state.close()


async def until_closed(state, entry, seconds=10):
    deadline = asyncio.get_running_loop().time() + seconds
    while entry in await state.open_batches():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)
