"""Every store of bytes keeps the same promises: a folder, and object storage over S3's protocol."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.gateway.s3_server import S3Server

from baton.gateway.batches.blobs.factory import open_blobs
from baton.gateway.batches.blobs.folder import FolderBlobs
from baton.gateway.batches.blobs.store import BlobMissing, ranges_of
from baton.gateway.batches.blobs.threads import Blobs
from baton.rpc.errors import InvalidRequest, Unavailable


@pytest.fixture
def server():
    with S3Server() as one:
        yield one


@pytest.fixture(params=["folder", "s3"])
def blobs(request, tmp_path, server, monkeypatch):
    if request.param == "folder":
        return open_blobs(str(tmp_path / "store"))
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return open_blobs("s3://bucket/some/prefix")


def test_what_is_put_can_be_read_in_ranges_listed_and_deleted(blobs):
    assert blobs.put("files/a", [b"one", b"", b"two"]) == 6
    assert blobs.read("files/a", 0, 100) == b"onetwo"
    assert blobs.read("files/a", 2, 2) == b"et"
    assert blobs.read("files/a", 6, 5) == b""
    blobs.put("batches/x/1", [b"1"])
    blobs.put("batches/x/2", [b"2"])
    blobs.put("batches/xy/1", [b"1"])
    assert blobs.names("batches/x/") == ["batches/x/1", "batches/x/2"]
    assert blobs.names("batches/none/") == []
    assert blobs.put("files/a", [b"new"]) == 3
    assert blobs.read("files/a", 0, 100) == b"new"
    for _ in range(2):
        blobs.delete("files/a")
    with pytest.raises(BlobMissing):
        blobs.read("files/a", 0, 1)


def test_a_large_blob_is_the_same_after_its_way(blobs):
    pieces = [bytes([number]) * (3 << 20) for number in range(7)]
    assert blobs.put("files/large", iter(pieces)) == 21 << 20
    assert b"".join(ranges_of(blobs, "files/large", 21 << 20)) == b"".join(pieces)


async def test_blobs_of_a_store_are_joined_in_it(blobs):
    parts = {"batches/x/1": b"one" * 1000, "batches/x/2": bytes(9 << 20)}
    for name, data in parts.items():
        blobs.put(name, [data])
    threads = Blobs(blobs)
    assert await threads.join("files/whole", [(name, len(data)) for name, data in parts.items()]) == 3000 + (9 << 20)
    assert await threads.read("files/whole", 2998, 4) == b"ne\0\0"
    with pytest.raises(BlobMissing):
        await threads.join("files/lost", [("batches/none/1", 3)])
    threads.close()


def test_a_put_that_fails_leaves_what_was_there(blobs):
    def pieces():
        yield b"half"
        raise OSError(5, "the disk is gone")

    blobs.put("files/a", [b"whole"])
    with pytest.raises((Unavailable, OSError)):
        blobs.put("files/a", pieces())
    assert blobs.read("files/a", 0, 100) == b"whole"
    assert blobs.names("files/") == ["files/a"]


KILLED = """
import sys
from baton.gateway.batches.blobs.folder import FolderBlobs

def pieces():
    yield b"half"
    print("begun", flush=True)
    sys.stdin.read()

FolderBlobs(sys.argv[1]).put("files/killed", pieces())
"""


def test_what_a_killed_gateway_had_begun_is_removed_at_the_next_start(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as gateway:
        try:
            assert gateway.stdout.readline() == b"begun\n"
            FolderBlobs(str(tmp_path))  # another gateway starts meanwhile
            (begun,) = (tmp_path / "files").iterdir()
        finally:
            gateway.kill()
    FolderBlobs(str(tmp_path)).put("files/whole", [b"x"])
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["whole"]
    assert ".incomplete-" in begun.name


def test_gateways_that_start_lose_no_blob_that_others_begin(tmp_path):
    blobs, ended = FolderBlobs(str(tmp_path)), threading.Event()

    def start_others():
        while not ended.is_set():
            FolderBlobs(str(tmp_path))

    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(start_others)
        try:
            for number in range(100):
                assert blobs.put(f"files/{number}", [b"x", b"y"]) == 2
        finally:
            ended.set()
        starting.result()
    assert len(blobs.names("files/")) == 100


def test_a_large_upload_goes_in_parts(server, monkeypatch):
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    open_blobs("s3://bucket").put("a", [bytes(4 << 20)] * 6)
    assert server.num_uploads == 1
    assert len(server.objects["a"]) == 24 << 20
    assert server.uploads == {}


def test_a_store_that_refuses_is_unavailable(server, monkeypatch):
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    blobs = open_blobs("s3://bucket")
    server.failing = True
    for call in (lambda: blobs.put("a", [b"x"]), lambda: blobs.read("a", 0, 1), lambda: blobs.names("a/")):
        with pytest.raises(Unavailable, match="in batch_store; retry later"):  # names no host
            call()


def test_a_wrong_address_is_an_error_that_names_the_setting():
    for wrong in ("ftp://x", "s3://", "http://host/x"):
        with pytest.raises(InvalidRequest) as caught:
            open_blobs(wrong)
        assert caught.value.field == "batch_store"
