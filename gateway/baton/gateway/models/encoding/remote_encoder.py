"""Encodes long prompts in a separate process."""

from __future__ import annotations

import select
import socket
import time
from array import array

from msgspec import msgpack

from baton.gateway.helpers.frames import receive_frame, send_frame
from baton.gateway.helpers.helper_process import HelperProcess
from baton.gateway.models.encoding.messages import Encoded, Setup, Task
from baton.gateway.models.encoding.prompt_encoder import ChatPrompt, TextPrompt
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, EncodingStopped, TooManyTokens
from baton.rpc.errors import InvalidRequest

_MODULE = "baton.gateway.models.encoding.encoding_process"
_ANSWER_SECONDS = 30
_LOOK_MS = 50  # between two looks at whether the client has disconnected


class RemoteEncoder:
    """Encodes in a helper process. `encode` is for one thread."""

    def __init__(self, setup: Setup) -> None:
        self.process = HelperProcess(_MODULE, "encodes long prompts", _ANSWER_SECONDS, msgpack.encode(setup))

    def encode(self, prompt: TextPrompt | ChatPrompt, owner: str, limit: EncodingLimit) -> list[int] | None:
        """Returns the token ids, or None if the caller must encode the prompt. Never waits for the process's start.

        Raises as PromptEncoder.encode.
        """
        sock = self.process.connection()
        if sock is None:
            return None
        try:
            task = msgpack.encode(Task(prompt, owner, limit.most))
        except (OverflowError, RecursionError, TypeError, UnicodeEncodeError):
            return None  # it has values that MessagePack cannot represent
        try:
            send_frame(sock, task)
            del task
            _await_answer(sock, limit)
            encoded = msgpack.decode(receive_frame(sock), type=Encoded)
        except (OSError, EOFError) as error:
            self.process.failed(error)
            return None
        return _token_ids(encoded)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self.process.close()


def _await_answer(sock: socket.socket, limit: EncodingLimit) -> None:
    """Waits for the answer's beginning; not much longer once the client has disconnected. Raises TimeoutError."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    until = time.monotonic() + _ANSWER_SECONDS
    while not poll.poll(_LOOK_MS):
        if limit.stopped():
            send_frame(sock)
            return
        if time.monotonic() > until:
            raise TimeoutError(f"no answer within {_ANSWER_SECONDS} s")


def _token_ids(encoded: Encoded) -> list[int]:
    if encoded.stopped:
        raise EncodingStopped
    if encoded.at_least:
        raise TooManyTokens(encoded.at_least)
    if encoded.problem:
        raise InvalidRequest(encoded.problem, field=encoded.field)
    token_ids = array("i")
    token_ids.frombytes(encoded.token_ids)
    return token_ids.tolist()
