"""A receiver that stands still while another pair ends, whose end waits for all that the device does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from support.transfer.gpu_pairs import other_end
from support.transfer.kv_pusher import EPOCH, GENERATION, SOURCE, WAIT_SECONDS, make_pool, make_transports, next_event
from support.transfer.kv_taker import KvTaker

from baton.worker.transfer.base import Landed, Outbound, Piece, Pushed, PushFailed
from baton.worker.transfer.transports import Transports

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


class Receiver:
    """Another process, and the way to it."""

    def __init__(self) -> None:
        self.end = other_end(KvTaker, "nccl")
        self.addresses = [self.end.call("address")]

    def begin(self, transports: Transports, number: int) -> None:
        """A transfer, of which nothing is pushed yet."""
        self.end.call("open", number)
        self.end.begin("next_event", number)
        transports.connect(Outbound(number, self.addresses, number, EPOCH, GENERATION, checksum=False))

    def take(self, transports: Transports, number: int) -> None:
        """A whole one."""
        self.begin(transports, number)
        push(transports, number)
        transports.finish(number)
        event = next_event(transports, number)
        assert isinstance(event, Pushed), event
        assert isinstance(self.end.result(), Landed)


def push(transports: Transports, number: int, layers: range = range(2)) -> None:
    transports.push(number, Piece(layers.start, 0, len(SOURCE), SOURCE, num_layers=len(layers)))


class Computing:
    """A thread that always computes something. `computed_at`: when it last had."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._stream = torch.cuda.Stream()
        self._values = torch.ones(1 << 20, device="cuda")
        self._compute()  # its code is loaded
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def still_for(self) -> float:
        return time.monotonic() - self.computed_at

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(WAIT_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            self._compute()

    def _compute(self) -> None:
        with torch.cuda.stream(self._stream):
            self._values.mul_(1.0)
            self._stream.synchronize()
        self.computed_at = time.monotonic()


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:g} s: {what}"
        time.sleep(0.01)


def test_a_stopped_receiver_blocks_a_sender_for_seconds_at_most() -> None:
    transports = make_transports("nccl", make_pool(1))
    still, lost = Receiver(), Receiver()
    computing = Computing()
    try:
        for number, receiver in enumerate((still, lost), 1):
            receiver.take(transports, number)
        still.begin(transports, 3)
        os.kill(still.end.process.pid, signal.SIGSTOP)
        push(transports, 3, range(1))
        os.kill(lost.end.process.pid, signal.SIGKILL)
        until(lambda: computing.still_for() > 0.5, "the end of a pair waits for all that the device does")
        pushing = threading.Thread(target=push, args=(transports, 3, range(1, 2)), daemon=True)
        pushing.start()
        time.sleep(0.2)
        assert pushing.is_alive(), "a launch waits for that end"
        until(lambda: computing.still_for() < 0.5, "the device goes on")
        event = next_event(transports, 3)
        assert isinstance(event, PushFailed), event
        os.kill(still.end.process.pid, signal.SIGCONT)
        assert not isinstance(still.end.result(), Landed)
        still.take(transports, 4)
    finally:
        for receiver in (still, lost):
            receiver.end.kill()
        computing.stop()
        transports.close()
