"""Parts of results: recorded once, also when an answer of the state store is lost or a lease was."""

import json

import pytest

from baton.gateway.batches.blobs.folder import FolderBlobs
from baton.gateway.batches.blobs.threads import Blobs
from baton.gateway.batches.running import results as results_module
from baton.gateway.batches.running.line_call import LineAnswer
from baton.gateway.batches.running.lines import LineProblem
from baton.gateway.batches.running.results import PartWriter, answered, join_parts, not_run
from baton.gateway.batches.state.memory import MemoryState
from baton.gateway.batches.state.store import AlreadyRecorded, Commit, Entry, LeaseLost
from baton.rpc.errors import Unavailable

BATCH = "batch_1"


class Losing(MemoryState):
    """Loses answers: what it stored, or not, is reported as a failure."""

    def __init__(self):
        super().__init__()
        self.before = self.after = 0

    async def commit(self, name, fence, commit):
        if self.before:
            self.before -= 1
            raise Unavailable("the request was lost")
        await super().commit(name, fence, commit)
        if self.after:
            self.after -= 1
            raise Unavailable("the answer was lost")


@pytest.fixture
async def rig(tmp_path, monkeypatch):
    monkeypatch.setattr(results_module, "_RETRY_SECONDS", 0.001)
    state, blobs = Losing(), Blobs(FolderBlobs(str(tmp_path)))
    await state.create(Entry("batch", "", BATCH), b"{}", 1.0, None)
    yield state, blobs
    blobs.close()


async def writer_of(rig, clock=lambda: 0.0):
    state, blobs = rig
    fence = await state.lease(BATCH, 0.0)
    return PartWriter(state, blobs, BATCH, fence, lambda results: b"%d" % len(results), clock)


def result(index, status=200):
    return answered(index, f"id-{index}", LineAnswer(status, f"r{index}", b'{"a": "\xc3\xa9"}'))


async def joined(rig, is_error=False):
    state, blobs = rig
    size = await join_parts(blobs, await state.progress(BATCH), is_error, "file-1")
    data = await blobs.read("files/file-1", 0, size) if size else b""
    return [json.loads(line)["custom_id"] for line in data.splitlines()]


def test_a_line_has_openais_form():
    assert json.loads(result(3).data) == {
        "id": "batch_req_r3",
        "custom_id": "id-3",
        "response": {"status_code": 200, "request_id": "r3", "body": {"a": "é"}},
        "error": None,
    }
    assert json.loads(not_run(3, "id-3", LineProblem("batch_expired", "late")).data) == {
        "id": "batch_req_3",
        "custom_id": "id-3",
        "response": None,
        "error": {"code": "batch_expired", "message": "late"},
    }


@pytest.mark.parametrize("name", ['","response":null,"error":null}', '\\"body":null}'])
def test_an_id_that_looks_like_json_stays_an_id(name):
    line = json.loads(answered(0, name, LineAnswer(200, "r", b'{"a":null}')).data)
    assert line["custom_id"] == name
    assert line["response"]["body"] == {"a": None}


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 1), (1, 1), (0, 0)])
async def test_lost_messages_lose_and_double_nothing(rig, before, after):
    state, _ = rig
    writer = await writer_of(rig)
    for index in (0, 2, 5):
        writer.add(result(index, 400 if index == 2 else 200))
    state.before, state.after = before, after
    await writer.flush()
    writer.add(result(1))
    await writer.flush()
    assert await joined(rig) == ["id-0", "id-5", "id-1"]
    assert await joined(rig, is_error=True) == ["id-2"]


async def test_a_holder_that_was_replaced_records_nothing(rig, tmp_path):
    late, current = await writer_of(rig), await writer_of(rig)
    late.add(result(0))
    current.add(result(0))
    await current.flush()
    with pytest.raises(LeaseLost):
        await late.flush()
    assert await joined(rig) == ["id-0"]
    assert len(list((tmp_path / "batches" / BATCH).iterdir())) == 2  # the late one is never read


async def test_a_line_that_is_recorded_already_is_a_defect_that_is_reported(rig):
    state, _ = rig
    writer = await writer_of(rig)
    await state.commit(BATCH, 1, Commit(b"{}", [0], [b"{}"]))
    writer.add(result(0))
    with pytest.raises(AlreadyRecorded):
        await writer.flush()


async def test_parts_are_written_more_rarely_the_longer_a_batch_runs(rig):
    now = [0.0]
    writer = await writer_of(rig, lambda: now[0])
    assert not writer.due
    writer.add(result(0))
    now[0] = 0.6
    assert writer.due
    await writer.flush()
    now[0] = 1000.0
    await writer.flush()
    writer.add(result(1))
    now[0] = 1005.0
    assert not writer.due
    now[0] = 1011.0
    assert writer.due
    await writer.flush()
    now[0] = 10**6
    await writer.flush()
    writer.add(result(2))
    now[0] += 31.0
    assert writer.due
