"""The trainer's end: sends tensors to engines in other processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from baton.llm.engine.trainer.channels import Channel, close_quietly, open_channel
from baton.llm.engine.trainer.meeting import Meeting, host
from baton.llm.engine.trainer.tensors import TensorFacts, encoded
from baton.llm.parameters.names import InvalidParameter

if TYPE_CHECKING:
    from torch import Tensor

Named = Mapping[str, "Tensor"] | Iterable[tuple[str, "Tensor"]]


class WeightSender:
    """Sends the tensors of a trainer to `world_size` - 1 engines, whose ranks start with 1.

    Create it while the engines call `init_weight_transfer_engine`: each end waits for the other `timeout` seconds.
    The engines choose the backend. Raises DeadlineExceeded or Unavailable.
    """

    def __init__(self, master_address: str, master_port: int, world_size: int, timeout: float = 300.0) -> None:
        if world_size < 2:
            raise InvalidParameter(f"world_size is {world_size}; give the engines and 1 more", field="world_size")
        self._meetings = host(master_address, master_port, world_size, timeout)
        self._threads = ThreadPoolExecutor(len(self._meetings), "weights")
        self._channels: list[Channel] = list(self._threads.map(_open, self._meetings))
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.close()

    def send(self, tensors: Named) -> None:
        """Sends tensors to every engine, each of which calls `update_weights` once.

        Raises InvalidParameter if an engine expects others; then nothing is sent to it.
        """
        named = dict(tensors)
        self._number += 1
        facts = encoded(TensorFacts.of(name, tensor) for name, tensor in named.items())
        done = [
            self._threads.submit(_send, meeting, channel, f"{self._number}", facts, named)
            for meeting, channel in zip(self._meetings, self._channels, strict=True)
        ]
        errors = [error for error in (one.exception() for one in done) if error is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Leaves the engines."""
        for channel in self._channels:
            close_quietly(channel)
        self._threads.shutdown()


def _open(meeting: Meeting) -> Channel:
    backend = meeting.read("backend", "to join").decode()
    return open_channel(backend, meeting, is_trainer=True)


def _send(meeting: Meeting, channel: Channel, number: str, facts: str, named: Mapping[str, Tensor]) -> None:
    meeting.write(f"tensors/{number}", facts)
    answer = meeting.read(f"answer/{number}", "to call update_weights").decode()
    if answer != "ok":
        raise InvalidParameter(f"{meeting.other} refused the tensors: {answer}", field="update_info")
    channel.send(list(named.values()))
