"""The end of NCCL communicators, and the waits for it. NCCL needs GPUs, so its calls are replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from baton.rpc.errors import DeadlineExceeded, NoCapacity, Unavailable, Unsupported
from baton.worker.transfer.kinds.nccl import pair as nccl_pair
from baton.worker.transfer.kinds.nccl import path as nccl_path
from baton.worker.transfer.kinds.nccl.pair import ID_BYTES, Pair

WAIT_SECONDS = 10.0
IN_PROGRESS = nccl_pair._IN_PROGRESS


class Nccl:
    """Records NCCL's calls, and the end of each communicator."""

    NCCLError = nccl_pair.nccl.NCCLError
    Result = nccl_pair.nccl.Result

    def __init__(self) -> None:
        self.status = {"first": 0, "split": 0}
        self.aborted: list[str] = []
        self.ending = threading.Event()  # lets aborts go on
        self.ending.set()
        self.moving = threading.Event()  # lets moves go on
        self.moving.set()
        self.num_moves = 0
        self.num_begun = 0
        self.destroyed: list[str] = []
        self.fails = False

    def comm_init_rank_scalable(self, *_: object) -> str:
        if self.fails:
            raise RuntimeError("no device")
        return "first"

    def comm_destroy(self, comm: str) -> None:
        self.destroyed.append(comm)

    def comm_split(self, *_: object) -> str:
        if self.status["split"]:
            self.status["first"] = self.status["split"]
        return "split"

    def comm_get_async_error(self, comm: str) -> int:
        return self.status[comm] if not self.aborted else 0

    def comm_abort(self, comm: str) -> None:
        self.num_begun += 1
        assert self.ending.wait(WAIT_SECONDS)
        self.aborted.append(comm)

    def send(self, *_: object) -> None:
        assert self.moving.wait(WAIT_SECONDS)
        self.num_moves += 1

    recv = send


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    made = Nccl()
    monkeypatch.setattr(nccl_pair, "nccl", made)
    monkeypatch.setattr(nccl_pair, "new_id", lambda: bytes(ID_BYTES))
    return made


def eventually(condition: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def met(library: Nccl, ended: Callable[[], None] = lambda: None) -> Pair:
    """Its first communicator has been left."""
    pair = Pair(None, 0, ended)
    pair.meet(0, 0, WAIT_SECONDS)
    pair.leave_meeting(WAIT_SECONDS)
    assert library.aborted == ["first"]
    return pair


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_an_abort_does_not_wait_and_its_end_is_reported(library: Nccl) -> None:
    ended = threading.Event()
    pair = met(library, ended.set)
    library.ending.clear()
    pair.abort()
    pair.abort()
    with pytest.raises(Unavailable, match="aborted"):
        pair.move(0, 1, 0)
    assert not ended.is_set()
    library.ending.set()
    assert ended.wait(WAIT_SECONDS)
    assert library.aborted == ["first", "split"]


def test_an_abort_does_not_overtake_a_move_in_its_launch(library: Nccl) -> None:
    ended = threading.Event()
    pair = met(library, ended.set)
    library.moving.clear()
    moving = in_thread(lambda: pair.move(0, 1, 0))
    eventually(pair._lock.locked)
    pair.abort()
    time.sleep(0.1)
    assert library.num_begun == 1  # the first one's
    library.moving.set()
    assert ended.wait(WAIT_SECONDS)
    moving.join(WAIT_SECONDS)
    assert library.num_moves == 2
    assert library.aborted == ["first", "split"]


def test_a_move_that_hangs_is_overtaken_in_the_end(library: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_pair, "_CALL_SECONDS", 0.05)
    pair = met(library)
    library.moving.clear()
    moving = in_thread(lambda: pair.move(0, 1, 0))
    eventually(pair._lock.locked)
    pair.abort()
    eventually(lambda: library.aborted == ["first", "split"])
    library.moving.set()
    moving.join(WAIT_SECONDS)


def test_a_pair_without_a_second_rank_times_out(library: Nccl) -> None:
    library.status["first"] = IN_PROGRESS
    ended = threading.Event()
    pair = Pair(None, 1, ended.set)
    with pytest.raises(DeadlineExceeded, match="did not join"):
        pair.meet(0, 0, 0.05)
    assert ended.wait(WAIT_SECONDS)
    assert library.aborted == ["first"]


def test_the_other_end_is_gone_before_the_split(library: Nccl) -> None:
    library.status["split"] = IN_PROGRESS
    pair = Pair(None, 1)
    with pytest.raises(DeadlineExceeded):
        pair.meet(0, 0, 0.05)
    eventually(lambda: library.aborted == ["first", "split"])


def test_the_other_end_is_gone_before_the_first_byte(library: Nccl) -> None:
    """Its communicator's kernel waits, and whatever else frees memory would wait for that."""
    library.moving.clear()
    pair = Pair(None, 1)
    threading.Thread(target=lambda: (eventually(lambda: len(library.aborted) == 2), library.moving.set())).start()
    with pytest.raises(DeadlineExceeded):
        pair.meet(0, 0, 0.05)
    assert library.aborted == ["split", "first"]


def test_an_end_comes_after_the_first_communicators(library: Nccl) -> None:
    library.ending.clear()
    ended = threading.Event()
    pair = Pair(None, 0, ended.set)
    pair.meet(0, 0, WAIT_SECONDS)
    with pytest.raises(DeadlineExceeded, match="did not end"):
        pair.leave_meeting(0.05)
    assert library.num_begun == 1
    pair.abort()
    eventually(lambda: library.num_begun == 2)
    assert not ended.is_set()
    library.ending.set()
    assert ended.wait(WAIT_SECONDS)
    assert sorted(library.aborted) == ["first", "split"]


@pytest.mark.parametrize("moved", [True, False])
def test_the_first_communicator_ends_after_the_first_byte(moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end during a kernel that waits for a lost peer would block the process."""
    calls: list[str] = []
    pair = SimpleNamespace(meet=lambda *_: calls.append("meet"), leave_meeting=lambda _: calls.append("leave"))
    pending = SimpleNamespace(wait=lambda _: calls.append("wait") or moved)
    monkeypatch.setattr(nccl_path, "CudaCopy", lambda _: pending)
    meeting = nullcontext() if moved else pytest.raises(DeadlineExceeded, match="its first byte did not arrive")
    with meeting:
        nccl_path._meet(pair, 0, SimpleNamespace(cuda_stream=0))
    assert calls == (["meet", "wait", "leave"] if moved else ["meet", "wait"])


def test_a_machine_without_nccl_is_found_at_the_start(library: Nccl) -> None:
    nccl_pair.load_kernels()
    assert library.destroyed == ["first"]
    library.fails = True
    with pytest.raises(Unsupported, match="no device"):
        nccl_pair.load_kernels()


def test_communicators_are_bounded_and_freed(library: Nccl) -> None:
    seats = nccl_path._Seats(2)
    pairs = [seats.pair(None, 1) for _ in range(2)]
    with pytest.raises(NoCapacity, match="open"):
        seats.pair(None, 1)
    assert not seats.wait_until_free(0.01)
    pairs[0].abort()
    eventually(lambda: seats._free == 1)
    library.fails = True
    with pytest.raises(RuntimeError, match="no device"):
        seats.pair(None, 1)
    library.fails = False
    pairs[0] = seats.pair(None, 1)
    for pair in pairs:
        pair.abort()
    assert seats.wait_until_free(WAIT_SECONDS)
