"""The process that renders and encodes long prompts, because both block an interpreter for milliseconds.

`python -m baton.gateway.models.encoding.encoding_process FD` serves one prompt after another on the socket FD, until
the gateway closes its end. The first frame is the Setup. While a prompt is encoded, the gateway may send an empty
frame: the client has disconnected.
"""

from __future__ import annotations

import socket
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

from msgspec import msgpack

from baton.gateway.helpers.frames import receive_frame, send_value
from baton.gateway.helpers.helper_process import serving_gateway
from baton.gateway.memory import LARGE_BYTES, trim_memory
from baton.gateway.models.encoding.messages import Encoded, Setup, Task, stamp_of
from baton.gateway.models.encoding.prompt_encoder import PromptEncoder
from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, EncodingStopped, TooManyTokens
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest


def main(argv: list[str]) -> int:
    """Encodes prompts until the gateway ends. Returns an exit code."""
    with serving_gateway(argv) as (sock, ready):
        try:
            encoder = encoder_of(msgpack.decode(receive_frame(sock), type=Setup))
        except (OSError, InvalidRequest) as error:
            print(f"the process that encodes long prompts cannot start: {error}", file=sys.stderr)
            return 1
        ready()
        while True:
            frame = receive_frame(sock)
            if not frame:
                continue  # a stop that came after its prompt's end
            num_bytes = len(frame)
            task = msgpack.decode(frame, type=Task)
            del frame
            send_value(sock, encode(encoder, task, _Stop(sock)))
            del task
            if num_bytes > LARGE_BYTES:
                trim_memory()
    return 0


def encoder_of(setup: Setup) -> PromptEncoder:
    """Loads the model's tokenizer and templates. Raises InvalidRequest if the tokenizer's file has changed."""
    path = Path(setup.tokenizer_path)
    if stamp_of(path) != tuple(setup.tokenizer_stamp):
        raise InvalidRequest(f"model file {path} has changed since the gateway started; restart it", field="model")
    template = ChatTemplate(setup.templates, setup.special_tokens, setup.origin)
    return PromptEncoder(Tokenizer(path), template, setup.variables, setup.trust_control_tokens)


def encode(encoder: PromptEncoder, task: Task, stopped: _Stop) -> Encoded:
    """Returns a prompt's token ids, or its problem."""
    try:
        token_ids = encoder.encode(task.prompt, task.owner, EncodingLimit(task.most, stopped))
    except TooManyTokens as error:
        return Encoded(at_least=error.at_least)
    except EncodingStopped:
        return Encoded(stopped=True)
    except InvalidRequest as error:
        return Encoded(problem=error.message, field=error.field)
    return Encoded(array("i", token_ids).tobytes())


@dataclass(frozen=True, slots=True)
class _Stop:
    """Returns whether the gateway has sent the empty frame that stops the current prompt."""

    sock: socket.socket

    def __call__(self) -> bool:
        try:
            return bool(self.sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
