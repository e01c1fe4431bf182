"""Batches through the official client, with a scripted generator."""

import asyncio
import json

import pytest
from openai import BadRequestError, NotFoundError
from support.gateway.batch_rig import begin, ended, line, results, running, seen
from support.gateway.rest_harness import FakeGenerator, say, until
from support.gateway.s3_server import S3Server

from baton.gateway.batches.running.line_runner import LineRunner
from baton.gateway.batches.running.turns import MAX_OF_TENANT
from baton.rpc.errors import NoCapacity


async def test_every_line_is_answered_once_in_the_output_file(tmp_path):
    async with running(tmp_path, say("Once", " upon")) as (_, client):
        lines = [line(f"id-{number}", f"Prompt {number}") for number in range(50)]
        batch = await begin(client, [lines[0], b"", *lines[1:], b"  "], metadata={"name": "nightly"})
        done = await ended(client, batch)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (50, 50, 0)
        assert done.metadata == {"name": "nightly"}
        assert done.error_file_id is None
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at <= done.expires_at
        assert done.expires_at == done.created_at + 86400
        found = await results(client, done.output_file_id)
        assert sorted(one["custom_id"] for one in found) == sorted(f"id-{number}" for number in range(50))
        assert {one["response"]["status_code"] for one in found} == {200}
        body = found[0]["response"]["body"]
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == "Once upon"
        assert found[0]["error"] is None
        assert found[0]["id"].startswith("batch_req_")
        output = await client.files.retrieve(done.output_file_id)
        assert output.purpose == "batch_output"
        assert output.filename == f"{batch.id}_output.jsonl"
        assert not list((tmp_path / "store" / "batches").glob("*/*"))


async def test_a_batch_ends_in_object_storage_too(tmp_path, monkeypatch):
    with S3Server() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        async with running(tmp_path, say("x"), batch_store="s3://bucket/store") as (_, client):
            done = await ended(client, await begin(client, [line("a"), line("b"), line("bad", max_tokens=-1)]))
            assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 1)
            assert {one["custom_id"] for one in await results(client, done.output_file_id)} == {"a", "b"}
            await until(lambda: not [name for name in server.objects if "batches/" in name])
            assert len(server.objects) == 3  # the input, and two files of results


async def test_a_request_that_fails_goes_to_the_error_file_and_the_rest_goes_on(tmp_path):
    async with running(tmp_path, say("Yes")) as (_, client):
        lines = [line("good"), line("bad", max_tokens=-1), line("worse", temperature="warm"), line("fine")]
        done = await ended(client, await begin(client, lines))
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 2, 2)
        assert {one["custom_id"] for one in await results(client, done.output_file_id)} == {"good", "fine"}
        errors = {one["custom_id"]: one["response"] for one in await results(client, done.error_file_id)}
        assert {name: one["status_code"] for name, one in errors.items()} == {"bad": 400, "worse": 400}
        assert errors["bad"]["body"]["error"]["param"] == "max_tokens"


async def test_metrics_count_lines_and_show_what_waits(tmp_path):
    async with running(tmp_path) as (rest, client):
        lines = [line("a"), line("b"), line("bad", max_tokens=-1)]
        batch = await begin(client, lines)
        await rest.generator.next(1)

        def read(name, **labels):
            return rest.metrics.registry.get_sample_value(f"baton_gateway_{name}", labels)

        shown = [read(name) for name in ("batches_open", "batches_running", "batch_lines_running")]
        assert shown[:2] == [1, 1]
        assert shown[2] >= 2
        assert read("batch_lines_limit") >= 3
        assert read("batch_lines_unrecorded") in (2, 3)
        for generation in rest.generator.started:
            say("Yes")(generation)
        done = await ended(client, batch)
        assert read("batch_lines_total", outcome="completed") == 2
        assert read("batch_lines_total", outcome="failed") == 1
        files = [await client.files.retrieve(name) for name in (done.output_file_id, done.error_file_id)]
        assert read("file_bytes_total", source="results") == sum(one.bytes for one in files)
        assert read("file_bytes_total", source="upload") == len(b"\n".join(lines))
        await until(lambda: (read("batches_open"), read("batches_running")) == (0, 0))


async def test_chats_and_responses_are_targets_too(tmp_path):
    async with running(tmp_path, say("Hello")) as (_, client):
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        for url, body, kind in (
            ("/v1/chat/completions", chat, "chat.completion"),
            ("/v1/responses", {"input": "Hi", "store": False}, "response"),
        ):
            request = {"custom_id": "a", "method": "POST", "url": url, "body": body}
            done = await ended(client, await begin(client, [json.dumps(request).encode()], url))
            (found,) = await results(client, done.output_file_id)
            assert found["response"]["body"]["object"] == kind


async def test_a_wrong_file_fails_with_the_numbers_of_its_lines(tmp_path):
    async with running(tmp_path) as (rest, client):
        wrong = [
            line("a"),
            b"{not json",
            b"[]",
            line("a"),
            line("b", url="/v1/chat/completions"),
            line("c").replace(b"POST", b"GET"),
            b'{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}}',
            b'{"custom_id": "d", "method": "POST", "url": "/v1/completions"}',
            b'{"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": []}',
            line("f", stream=True),
            b'{"method": "POST", "url": "/v1/completions", "body": {}}',
            line("g", background=True),
            line("h-").replace(b"h-", b"\xff"),
            line("i").replace(b"POST", b"\xff"),
            line("j", x=1).replace(b'"x"', b'"\xff"'),
            line("k-").replace(b'"k-"', b"1e999"),
        ]
        done = await ended(client, await begin(client, wrong))
        assert done.status == "failed"
        assert done.failed_at
        assert done.output_file_id is None
        found = [(one.line, one.code, one.param) for one in done.errors.data]
        assert found == [
            (2, "invalid_json_line", None),
            (3, "invalid_json_line", None),
            (4, "duplicate_custom_id", "custom_id"),
            (5, "url_mismatch", "url"),
            (6, "invalid_method", "method"),
            (7, "invalid_request", "custom_id"),
            (8, "missing_required_parameter", "body"),
            (9, "invalid_request", "body"),
            (10, "invalid_request", "body.stream"),
            (11, "missing_required_parameter", "custom_id"),
            (12, "invalid_request", "body.background"),
            (13, "invalid_json_line", "custom_id"),
            (14, "invalid_json_line", "method"),
            (15, "invalid_json_line", None),
            (16, "invalid_request", "custom_id"),
        ]
        assert "line 1" in done.errors.data[2].message
        assert rest.generator.started == []


async def test_a_file_with_too_many_or_no_requests_fails(tmp_path):
    async with running(tmp_path, max_batch_requests=3) as (_, client):
        for lines, code in (([line(str(n)) for n in range(4)], "too_many_tasks"), ([b"\n \n"], "empty_batch")):
            done = await ended(client, await begin(client, lines))
            assert done.status == "failed"
            assert [one.code for one in done.errors.data] == [code]


async def test_wrong_creations_are_refused(tmp_path):
    async with running(tmp_path) as (_, client):
        file = await client.files.create(file=("in.jsonl", line("a")), purpose="batch")
        other = await client.files.create(file=("in.jsonl", line("a")), purpose="user_data")
        good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        for wrong, message in (
            ({"endpoint": "/v1/moderations"}, "'/v1/moderations' is not served by this gateway; give one of /v1/chat"),
            ({"endpoint": "/v1/files"}, "'/v1/files' cannot be the target of a batch"),
            ({"completion_window": "soon"}, "completion_window is 'soon'; give 24h"),
            ({"completion_window": "31d"}, "up to 30d"),
            ({"metadata": {"a": "x" * 600}}, "metadata"),
            ({"input_file_id": other.id}, "has the purpose 'user_data'"),
        ):
            with pytest.raises(BadRequestError, match=message):
                await client.batches.create(**{**good, **wrong})
        with pytest.raises(NotFoundError, match="No such File object: file-none"):
            await client.batches.create(**{**good, "input_file_id": "file-none"})
        with pytest.raises(NotFoundError, match="No batch found with id 'batch_none'"):
            await client.batches.retrieve("batch_none")


async def test_batches_are_listed_newest_first_in_pages(tmp_path):
    async with running(tmp_path, say("x")) as (_, client):
        made = [(await begin(client, [line("a")])).id for _ in range(3)]
        page = await client.batches.list(limit=2)
        assert [one.id for one in page.data] == [made[2], made[1]]
        assert page.has_more
        assert [one.id async for one in client.batches.list(limit=1)] == made[::-1]
        with pytest.raises(BadRequestError, match="after is 'batch_none'"):
            await client.batches.list(after="batch_none")


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path):
    async with running(tmp_path, generator=FakeGenerator()) as (rest, client):
        batch = await begin(client, [line(str(number)) for number in range(20)])
        first = await rest.generator.next()
        say("done")(first)
        await until(lambda: len(rest.generator.started) > 8)
        shown = await client.batches.cancel(batch.id)
        assert shown.status == "cancelling"
        assert shown.cancelling_at
        done = await ended(client, batch)
        assert done.status == "cancelled"
        assert done.cancelled_at
        (kept,) = await results(client, done.output_file_id)
        assert kept["response"]["body"]["choices"][0]["text"] == "done"
        assert done.request_counts.completed == 1
        assert all(one.aborted.is_set() for one in rest.generator.started[1:])
        assert rest.admission.in_use == 0
        with pytest.raises(BadRequestError, match="Cannot cancel a batch with status 'cancelled'"):
            await client.batches.cancel(batch.id)


async def test_lines_that_are_not_run_in_time_expire(tmp_path):
    async with running(tmp_path, generator=FakeGenerator()) as (rest, client):
        batch = await begin(client, [line(str(number)) for number in range(12)], window="1s")
        say("in time")(await rest.generator.next())
        done = await ended(client, batch)
        assert done.status == "expired"
        assert done.expired_at
        assert len(await results(client, done.output_file_id)) == 1
        errors = await results(client, done.error_file_id)
        assert len(errors) == 11
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert {one["response"] for one in errors} == {None}
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)


async def test_counts_move_while_it_runs(tmp_path):
    async with running(tmp_path, generator=FakeGenerator()) as (rest, client):
        batch = await begin(client, [line(str(number)) for number in range(8)])
        await until(lambda: len(rest.generator.started) == 8)
        for one in rest.generator.started[:3]:
            say("x")(one)
        found = await seen(client, batch, lambda one: one.request_counts.completed == 3)
        assert found.status == "in_progress"
        assert found.request_counts.total == 8


async def test_a_refused_line_waits_until_there_is_room(tmp_path):
    generator = FakeGenerator(say("later"))
    generator.refusal = NoCapacity("the queue is full", retry_after_ms=50)
    async with running(tmp_path, generator=generator) as (_, client):
        batch = await begin(client, [line(str(number)) for number in range(10)])
        await asyncio.sleep(0.3)
        assert (await client.batches.retrieve(batch.id)).request_counts.failed == 0
        generator.refusal = None
        done = await ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 10)


async def test_lines_run_at_low_priority(tmp_path):
    async with running(tmp_path, say("x")) as (rest, client):
        await ended(client, await begin(client, [line("a", priority=-5)]))
        assert rest.generator.started[0].request.priority >= 1000 - 5
        text = (await rest.request("GET", "/metrics")).body.decode()
        counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        # Nobody waits for them: their times are not those of clients.
        assert float(counts["baton_gateway_ttft_seconds_count"]) == 0
        assert float(counts["baton_gateway_output_tokens_total"]) == 1


async def test_one_line_begins_in_a_turn_of_the_event_loop(tmp_path, monkeypatch):
    turn, begun, run = 0, [], LineRunner.run

    async def noted(self, one):
        begun.append(turn)
        await run(self, one)

    async def take_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(LineRunner, "run", noted)
    async with running(tmp_path, say("x")) as (_, client):
        counting = asyncio.create_task(take_turns())
        await ended(client, await begin(client, [line(f"id-{number}") for number in range(50)]))
        counting.cancel()
    assert len(set(begun)) == len(begun) == 50


async def test_batches_of_one_tenant_leave_places_to_others(tmp_path):
    async with running(tmp_path, generator=FakeGenerator()) as (rest, client):
        for _ in range(MAX_OF_TENANT + 1):
            await begin(client, [line("a")])
        await until(lambda: len(rest.generator.started) == MAX_OF_TENANT)
        listed = [one async for one in client.batches.list()]
        assert sorted(one.status for one in listed) == ["in_progress"] * MAX_OF_TENANT + ["validating"]
        say("x")(rest.generator.started[0])
        await until(lambda: len(rest.generator.started) == MAX_OF_TENANT + 1)
        for one in rest.generator.started[1:]:
            say("x")(one)
        for one in listed:
            assert (await ended(client, one)).status == "completed"
