"""Files through the official client, against the gateway's REST server."""

import asyncio
import contextlib
import json
import tempfile
import threading

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError
from support.gateway.rest_harness import RawClient, rest_side, until

from baton.gateway.batches import upload as upload_module
from baton.gateway.batches.files import Files
from baton.gateway.batches.state.memory import MemoryState
from baton.gateway.batches.upload import read_form
from baton.gateway.http.spool import Spool

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'


@pytest.fixture
async def rest(tmp_path):
    async with rest_side(batch_store=str(tmp_path / "store"), max_file_bytes=8 << 20) as side:
        yield side


@contextlib.asynccontextmanager
async def client_of(rest):
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{rest.port}/v1", api_key="x", max_retries=0) as client:
        yield client


async def upload(rest, parts, headers=None, boundary=b"XX"):
    body = b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"
    kind = {"content-type": "multipart/form-data; boundary=" + boundary.decode()}
    return await rest.post("/v1/files", body, {**kind, **(headers or {})})


def part(name, value, filename=None):
    named = f'; filename="{filename}"' if filename else ""
    return f'Content-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value


async def test_a_file_is_stored_listed_read_and_deleted(rest):
    async with client_of(rest) as client:
        made = await client.files.create(file=("in.jsonl", LINE * 3), purpose="batch")
        assert (made.object, made.filename, made.bytes, made.purpose) == ("file", "in.jsonl", 3 * len(LINE), "batch")
        assert made.status == "processed"
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).read() == LINE * 3
        headers = (await rest.request("HEAD", f"/v1/files/{made.id}/content")).headers
        assert (headers["content-length"], headers["content-type"]) == (str(3 * len(LINE)), "application/octet-stream")
        assert [one.id async for one in client.files.list()] == [made.id]
        deleted = await client.files.delete(made.id)
        assert (deleted.id, deleted.deleted) == (made.id, True)
        with pytest.raises(NotFoundError, match="No such File object"):
            await client.files.retrieve(made.id)
        with pytest.raises(NotFoundError):
            await client.files.content(made.id)
        assert [one.id async for one in client.files.list()] == []


async def test_pages_go_by_time_and_purpose(rest):
    async with client_of(rest) as client:
        made = [(await client.files.create(file=(f"{n}", LINE), purpose="batch")).id for n in range(3)]
        other = await client.files.create(file=("other", LINE), purpose="user_data")
        page = await client.files.list(limit=2, order="asc", purpose="batch")
        found = {one.id for one in page.data}
        assert len(found) == 2
        assert page.has_more
        rest_of = await client.files.list(limit=2, order="asc", purpose="batch", after=page.data[-1].id)
        assert found | {one.id for one in rest_of.data} == set(made)
        assert not rest_of.has_more
        assert [one.id async for one in client.files.list(purpose="user_data")] == [other.id]
        for wrong in ({"limit": 0}, {"order": "up"}, {"after": "file-none"}):
            with pytest.raises(BadRequestError, match=next(iter(wrong))):
                await client.files.list(**wrong)


async def test_a_large_file_is_received_into_a_file_and_read_at_the_clients_speed(rest):
    content = bytes(range(256)) * (7 << 12)  # 7 MiB, with every byte, line breaks and dashes among them
    async with client_of(rest) as client:
        made = await client.files.create(file=("large.bin", content), purpose="batch")
        assert made.bytes == len(content)
        assert (await client.files.content(made.id)).read() == content


async def test_a_file_beyond_the_limit_is_refused_before_it_is_received(rest):
    async with RawClient.connect(rest.port) as client:
        head = "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n"
        await client.send(head.encode() + b"content-type: multipart/form-data; boundary=X\r\n\r\n")
        answer = await client.answer()
    assert answer.status == 413
    assert "exceeds the limit of 8454144 bytes" in answer.error["message"]


async def test_a_tenants_files_have_a_bound(tmp_path):
    folder = tmp_path / "store"
    async with rest_side(batch_store=str(folder), max_tenant_file_bytes=1000) as rest, client_of(rest) as client:
        made = await client.files.create(file=("a", b"x" * 600), purpose="batch")
        with pytest.raises(BadRequestError, match="file has 401 bytes, and your other files have 600") as no:
            await client.files.create(file=("b", b"x" * 401), purpose="batch")
        assert no.value.param == "file"
        await client.files.delete(made.id)
        sent = [client.files.create(file=(name, b"x" * 600), purpose="batch") for name in "cde"]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        assert sorted(type(one).__name__ for one in answers) == ["BadRequestError", "BadRequestError", "FileObject"]
        await until(lambda: len(list((folder / "files").iterdir())) == 1)  # refused ones are deleted afterwards
        read = rest.metrics.registry.get_sample_value
        assert read("baton_gateway_file_bytes_total", {"source": "upload"}) == 1200


async def test_an_expiry_is_kept(rest):
    async with client_of(rest) as client:
        after = {"anchor": "created_at", "seconds": 3600}
        made = await client.files.create(file=("a", LINE), purpose="batch", expires_after=after)
        assert made.expires_at == made.created_at + 3600
        with pytest.raises(BadRequestError, match="must be from 3600 to 2592000"):
            await client.files.create(file=("a", LINE), purpose="batch", expires_after={**after, "seconds": 5})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part("purpose", b"batch")], "file is required"),
        ([part("file", b"x", "a")], "purpose is required"),
        ([part("file", b"x", "a"), part("purpose", b"nothing")], "purpose is 'nothing'; give one of assistants, batch"),
        ([part("file", b"", "a"), part("purpose", b"batch")], "file is empty"),
        ([part("file", b"x", "a"), part("file", b"y", "b")], "several parts named file"),
        ([part("file", b"x", "a"), part("purpose", b"\xff")], "purpose is not UTF-8"),
        ([part("file", b"x", "a"), part("purpose", b"x" * 5000)], "purpose has 5000 bytes"),
        ([b"Content-Type: text/plain\r\n\r\nx"], "a part has no name"),
        ([b"no head"], "the headers of a part do not end"),
        ([part("file", b"x", "a")] + [part(f"p{n}", b"x") for n in range(40)], "more than 32 parts"),
    ],
)
async def test_a_wrong_upload_is_an_error_that_names_the_part(rest, parts, message):
    answer = await upload(rest, parts)
    assert answer.status == 400
    assert message in answer.error["message"]


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{}", "application/json", "the content type is 'application/json'; give multipart/form-data"),
        (b"{}", "multipart/form-data", "needs a boundary"),
        (b"", "multipart/form-data; boundary=X", "it is empty"),
        (b"abc", "multipart/form-data; boundary=X", "its boundary is missing"),
        (b"--X\r\n" + part("file", b"x", "a"), "multipart/form-data; boundary=X", "ends before its last boundary"),
    ],
)
async def test_a_body_that_is_no_form_is_an_error(rest, body, kind, message):
    answer = await rest.post("/v1/files", body, {"content-type": kind})
    assert answer.status == 400
    assert message in answer.error["message"]


async def test_content_may_hold_what_looks_like_a_boundary(rest):
    content = b"-\r\n\r\n--X\n--XX\r\n--"
    answer = await upload(rest, [part("purpose", b"batch"), part("file", content, "a b.jsonl")])
    assert answer.status == 200, answer.body
    body = await rest.request("GET", f"/v1/files/{answer.json['id']}/content")
    assert body.body == content


async def test_a_client_that_leaves_during_an_upload_leaves_nothing(rest, tmp_path):
    async with RawClient.connect(rest.port) as client:
        await client.send(b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n--X")
    await asyncio.sleep(0)
    assert (await rest.request("GET", "/v1/files")).json["data"] == []
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


@pytest.fixture
def spooled(monkeypatch):
    """The files into which uploads were received."""
    files, make = [], tempfile.TemporaryFile

    def seen(*arguments, **options):
        files.append(make(*arguments, **options))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", seen)
    return files


def chunked(path, body, kind):
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-type: {kind}\r\n\r\n"
    return head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


FORM = b"--XX\r\n" + part("purpose", b"batch") + b"\r\n--XX\r\n" + part("file", LINE, "a") + b"\r\n--XX--"


@pytest.mark.parametrize("ending", ["answered", "refused", "cut off", "waiting"])
async def test_the_file_of_an_upload_is_closed_however_it_ends(rest, spooled, ending):
    kind = "multipart/form-data; boundary=XX"
    sent = chunked("/v1/files", FORM if ending != "refused" else b"no form", kind)
    async with RawClient.connect(rest.port) as client:
        if ending == "waiting":  # behind a request that is not answered
            sent = chunked("/v1/completions", b'{"prompt": "Hi"}', "application/json") + sent
        await client.send(sent[:-20] if ending == "cut off" else sent)
        if ending == "waiting":
            await rest.generator.next()
        if ending in ("answered", "refused"):
            assert (await client.answer()).status == (200 if ending == "answered" else 400)
        await until(lambda: spooled)
    await until(lambda: all(one.closed for one in spooled))
    assert len(spooled) == 1


def test_a_file_that_is_written_is_closed_afterwards(spooled, monkeypatch):
    """The loop may have ended by then."""
    begun, go_on = threading.Event(), threading.Event()
    append = Spool._append

    def slow(self, pieces):
        append(self, pieces)
        begun.set()
        go_on.wait(10)

    monkeypatch.setattr(Spool, "_append", slow)

    async def leave():
        spool = Spool(100, lambda: None)
        spool.write(b"data")
        await asyncio.to_thread(begun.wait, 10)
        spool.close()

    asyncio.run(leave())
    assert not spooled[0].closed
    go_on.set()
    asyncio.run(until(lambda: spooled[0].closed))


async def test_a_client_that_leaves_while_its_file_is_stored_leaves_nothing(rest, tmp_path, monkeypatch):
    begun, go_on, deleted = asyncio.Event(), asyncio.Event(), []
    create, delete, undo = MemoryState.create_file, MemoryState.delete, Files._undo

    async def slow_create(self, *record):
        begun.set()
        await go_on.wait()
        await create(self, *record)

    async def seen_delete(self, entry):
        deleted.append(await delete(self, entry))

    async def seen_undo(self, *file):
        go_on.set()
        await undo(self, *file)

    monkeypatch.setattr(MemoryState, "create_file", slow_create)
    monkeypatch.setattr(MemoryState, "delete", seen_delete)
    monkeypatch.setattr(Files, "_undo", seen_undo)
    body = b"--XX\r\n" + part("purpose", b"batch") + b"\r\n--XX\r\n" + part("file", LINE, "a") + b"\r\n--XX--"
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=XX\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    files = tmp_path / "store" / "files"
    async with RawClient.connect(rest.port) as client:
        await client.send(head.encode() + body)
        await begun.wait()
        assert len(list(files.iterdir())) == 1
    await until(lambda: not list(files.iterdir()))
    assert deleted == [True]


async def test_a_filename_that_no_json_can_hold_is_replaced(rest):
    named = b"Content-Disposition: form-data; name=\"file\"; filename*=unicode_escape''%5cud800\r\n\r\nx"
    answer = await upload(rest, [part("purpose", b"batch"), named])
    assert (answer.status, answer.json["filename"]) == (200, "?")


async def test_bytes_that_are_missing_end_the_response_before_its_end(rest, tmp_path):
    answer = await upload(rest, [part("purpose", b"batch"), part("file", LINE, "a")])
    (tmp_path / "store" / "files" / answer.json["id"]).write_bytes(b"")
    body = await rest.request("GET", f"/v1/files/{answer.json['id']}/content")
    assert body.status == 404
    assert "end at 0 of" in body.error["message"]


def test_a_boundary_is_found_across_pieces(monkeypatch, tmp_path):
    monkeypatch.setattr(upload_module, "_PIECE_BYTES", 7)
    content = b"".join(b"\r\n--X%d" % number for number in range(20))
    head = part("file", content, "a").partition(b"\r\n\r\n")[0]
    for prefix in (b"", b"preamble\r\n"):
        with (tmp_path / "body").open("w+b", buffering=0) as file:
            file.write(prefix + b"--XX\r\n" + head + b"\r\n\r\n" + content + b"\r\n--XX--")
            form = read_form(file, b"XX")
            assert b"".join(form.file.pieces()) == content


async def test_without_a_store_every_route_names_the_flag():
    async with rest_side() as rest, client_of(rest) as client:
        for call in (
            client.files.list(),
            client.files.create(file=("a", LINE), purpose="batch"),
            client.files.retrieve("file-1"),
            client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h"),
            client.batches.cancel("batch_1"),
        ):
            with pytest.raises(APIStatusError, match="start it with --batch-store FOLDER") as caught:
                await call
            assert caught.value.status_code == 501


async def test_a_store_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for store, message in (
        (str(tmp_path / "file" / "store"), "cannot use the folder"),
        ("ftp://host/x", "give a folder, or s3://BUCKET/PREFIX"),
    ):
        with pytest.raises(Exception, match=message):
            async with rest_side(batch_store=store):
                pass


async def test_without_a_place_for_uploads_they_fail_and_the_gateway_goes_on(rest, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    answer = await upload(rest, [part("purpose", b"batch"), part("file", LINE * 1000, "a")])
    assert answer.status == 503
    assert "cannot store the upload: No such file or directory" in answer.error["message"]
    monkeypatch.undo()
    assert (await upload(rest, [part("purpose", b"batch"), part("file", LINE, "a")])).status == 200


async def test_a_disk_that_fails_is_an_error_that_may_pass(rest, tmp_path):
    (tmp_path / "store" / "files").write_text("in the way of the folder")
    answer = await upload(rest, [part("purpose", b"batch"), part("file", LINE, "a")])
    assert answer.status == 503
    assert json.loads(answer.body)["error"]["message"].startswith("cannot write in the folder of batch_store")
