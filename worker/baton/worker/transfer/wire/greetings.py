"""Reads the first frames of a connection from its socket."""

from __future__ import annotations

from baton.rpc.errors import DataLoss, ServiceError
from baton.worker.transfer.bulk import Slots
from baton.worker.transfer.wire.frames import (
    GREETING_BYTES,
    Greeting,
    Open,
    check_greeting_body,
    decode_greeting,
    decode_open,
    decode_refused,
    decode_welcome,
)
from baton.worker.transfer.wire.sockets import Connection, receive_exactly


def receive_open(sock: Connection) -> Open:
    """Reads a sender's first frame. Raises DataLoss if it is another one, or not received within the socket's limit."""
    try:
        what, body = _receive(sock)
    except BlockingIOError:
        raise DataLoss("the OPEN frame was not received in time") from None
    if what is not Greeting.OPEN:
        raise DataLoss(f"the connection begins with {what.name}, expected OPEN")
    return decode_open(body)


def receive_welcome(sock: Connection) -> Slots:
    """Reads the receiver's slots. Raises the ServiceError that it refused with, or DataLoss for another answer."""
    what, body = _receive(sock)
    if what is Greeting.WELCOME:
        return decode_welcome(body)
    if what is Greeting.REFUSED:
        refusal: ServiceError = decode_refused(body)
        raise refusal
    raise DataLoss(f"the receiver answered {what.name}, expected WELCOME or REFUSED")


def _receive(sock: Connection) -> tuple[Greeting, bytes]:
    what, num_bytes, crc = decode_greeting(receive_exactly(sock, GREETING_BYTES))
    body = bytes(receive_exactly(sock, num_bytes))
    check_greeting_body(body, crc)
    return what, body
