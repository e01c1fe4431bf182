"""How tensors move between a trainer and one engine: gloo between hosts' memories, NCCL between GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from baton.llm.engine.trainer.meeting import Meeting, distributed
from baton.llm.parameters.names import InvalidParameter
from baton.rpc.errors import DeadlineExceeded, ServiceError, Unavailable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from baton.worker.transfer.kinds.nccl.pair import Pair

BACKENDS = ("gloo", "nccl")
_NAP_SECONDS = 1e-3
_CHECK_SECONDS = 1.0  # between two looks at whether the other end is still there
_LEAVE_SECONDS = 30.0


class Channel(Protocol):
    """One end. All tensors of a call are sent or received, or it raises a ServiceError and the channel is lost."""

    device: torch.device  # where received tensors are

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors to the engine."""

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fills contiguous tensors on `device` from the trainer."""

    def close(self) -> None:
        """Frees the connection."""


def open_channel(backend: str, meeting: Meeting, is_trainer: bool) -> Channel:
    """Connects one end, and waits for the other. Raises a ServiceError."""
    if backend == "gloo":
        return GlooChannel(meeting, is_trainer)
    if backend == "nccl":
        return NcclChannel(meeting, is_trainer)
    raise InvalidParameter(f"backend is {backend!r}; give {' or '.join(BACKENDS)}", field="backend")


class GlooChannel:
    """A process group of two over TCP, apart from the default one of torch.distributed."""

    def __init__(self, meeting: Meeting, is_trainer: bool) -> None:
        import torch

        self.device = torch.device("cpu")
        self._meeting = meeting
        self._peer = 1 if is_trainer else 0
        c10d, limit = distributed(), timedelta(seconds=meeting.seconds)
        store = c10d.PrefixStore("gloo", meeting.store)
        with meeting.named("to connect"):
            self._group: Any = c10d.ProcessGroupGloo(store, 1 - self._peer, 2, limit)

    def send(self, tensors: Sequence[Tensor]) -> None:
        assert self._group is not None, "a closed channel sends nothing"
        for tensor in tensors:
            with self._meeting.named("to receive"):
                self._group.send([tensor.detach().to("cpu").contiguous()], self._peer, 0).wait()

    def receive(self, tensors: Sequence[Tensor]) -> None:
        assert self._group is not None, "a closed channel receives nothing"
        for tensor in tensors:
            with self._meeting.named("to send"):
                self._group.recv([tensor], self._peer, 0).wait()

    def close(self) -> None:
        self._group = None


class NcclChannel:
    """A communicator of two, whose set-up and kernels are aborted if the other end is lost."""

    def __init__(self, meeting: Meeting, is_trainer: bool) -> None:
        import torch

        from baton.worker.transfer.kinds.nccl.pair import Pair

        if not torch.cuda.is_available():
            raise InvalidParameter("backend nccl needs a CUDA device; give gloo", field="backend")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._meeting = meeting
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if is_trainer:
            self._pair: Pair = Pair(None, 0)
            meeting.write("nccl", self._pair.unique_id)
        else:
            self._pair = Pair(meeting.read("nccl", "to send NCCL's id"), 1)
        try:
            self._connect()
        except ServiceError:
            self.close()
            raise

    def send(self, tensors: Sequence[Tensor]) -> None:
        self._move([tensor.detach().to(self.device).contiguous() for tensor in tensors])

    def receive(self, tensors: Sequence[Tensor]) -> None:
        self._move(tensors)

    def close(self) -> None:
        self._pair.abort()

    def _connect(self) -> None:
        import torch

        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        self._pair.meet(byte.data_ptr(), int(self._stream.cuda_stream), self._meeting.seconds)
        self._wait()
        self._pair.leave_meeting(_LEAVE_SECONDS)

    def _move(self, tensors: Sequence[Tensor]) -> None:
        import torch

        # The stream must not start before what makes the tensors, or still uses their memory.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            for tensor in tensors:
                if num_bytes := tensor.numel() * tensor.element_size():
                    self._pair.move(tensor.data_ptr(), num_bytes, int(self._stream.cuda_stream))
            self._wait()
        except ServiceError:
            self.close()
            raise

    def _wait(self) -> None:
        """Waits for the stream. Raises DeadlineExceeded, or Unavailable if the trainer is gone."""
        import torch

        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        now = time.monotonic()
        deadline, check_at = now + self._meeting.seconds, now + _CHECK_SECONDS
        while not done.query():
            time.sleep(_NAP_SECONDS)
            now = time.monotonic()
            if now > deadline:
                message = f"waited for {self._meeting.other} to move tensors: nothing in {self._meeting.seconds:g} s"
                raise DeadlineExceeded(message)
            if now > check_at:
                check_at = now + _CHECK_SECONDS
                self._meeting.check()


def close_quietly(channel: Channel) -> None:
    """Closes a channel of which the other end may be lost."""
    with suppress(RuntimeError, Unavailable):
        channel.close()
