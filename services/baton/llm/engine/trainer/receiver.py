"""The engine's end of transfers from a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.llm.engine.trainer.channels import close_quietly, open_channel
from baton.llm.engine.trainer.meeting import Place, join
from baton.llm.engine.trainer.tensors import decoded, difference, facts_of
from baton.llm.parameters.names import InvalidParameter
from baton.rpc.errors import ServiceError, Unavailable

if TYPE_CHECKING:
    from torch import Tensor


class Receiver:
    """Blocking: call it on a thread that may wait. After an error during a transfer it is lost."""

    def __init__(self, place: Place, backend: str) -> None:
        """Meets the trainer. Raises a ServiceError."""
        self._place = place
        self._meeting = join(place)
        self._meeting.write("backend", backend)
        self._channel = open_channel(backend, self._meeting, is_trainer=False)
        self._number = 0
        self._loss: ServiceError | None = None

    def receive(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the tensors of the trainer's next transfer, by name.

        `info`: vLLM's update_info, which must agree with what the trainer sends; without lists it is not compared.
        Raises InvalidParameter if it does not agree, of which the trainer learns, and both may go on.
        """
        if self._loss is not None:
            message = f"{self._place} was lost before: {self._loss.message}; call init_weight_transfer_engine again"
            raise Unavailable(message)
        expected = facts_of(info)
        try:
            return self._receive(expected)
        except InvalidParameter:
            raise
        except ServiceError as error:
            self._loss = error
            close_quietly(self._channel)
            raise

    def close(self) -> None:
        """Leaves the trainer."""
        close_quietly(self._channel)

    def _receive(self, expected: list[Any] | None) -> dict[str, Tensor]:
        self._number += 1
        sent = decoded(self._meeting.read(f"tensors/{self._number}", "to name its tensors"))
        problem = "" if expected is None else difference(sent, expected)
        try:
            tensors = {one.name: one.empty(self._channel.device) for one in sent}
        except InvalidParameter as error:
            problem = error.message
        self._meeting.write(f"answer/{self._number}", problem or "ok")
        if problem:
            raise InvalidParameter(problem, field="update_info")
        self._channel.receive(list(tensors.values()))
        return tensors
