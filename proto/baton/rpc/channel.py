"""Opens channels between services, with keepalive and bounded reconnect delays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import grpc

from baton.rpc.tls.credentials import Tls

# Streams carry long prompts; a step's frame stays far below.
MAX_MESSAGE_BYTES = 64 << 20

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without closing its connection is noticed within 3 s even when idle.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # How long one attempt to connect may take, by gRPC's name for it: a peer that is busy answers late.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    # Two servers on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
)


class OpenChannel(Protocol):
    """Opens channels to services."""

    def __call__(self, address: str, window_bytes: int = 0) -> grpc.aio.Channel:
        """Opens a channel. Peers may send about `window_bytes` of a stream before they are read; 0: no preference."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Opens channels to one kind of service: over TLS, taking no peer that is another, or in plain text."""

    tls: Tls | None = None
    service: str = ""  # of baton.rpc.identity.identity; unused in plain text

    def __call__(self, address: str, window_bytes: int = 0) -> grpc.aio.Channel:
        """Opens a channel to `host:port` with the present TLS files, which it keeps when it reconnects."""
        return open_channel(address, window_bytes, self.tls, self.service)

    @property
    def version(self) -> int:
        """Grows when the TLS files change: channels opened before use the old ones."""
        if self.tls is None:
            return 0
        _ = self.tls.live.material
        return self.tls.live.num_reloads


def open_channel(address: str, window_bytes: int = 0, tls: Tls | None = None, service: str = "") -> grpc.aio.Channel:
    """Opens a channel to `host:port`. It connects at the first call, and reconnects when needed.

    Peers may send about `window_bytes` of a stream before they are read, and larger messages whole. 0: gRPC's own
    window, which grows to megabytes. With `tls` the peer's certificate must be that of a `service` of the same fleet.
    """
    window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)) if window_bytes else ()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=(*_OPTIONS, *window))
    name = ("grpc.ssl_target_name_override", tls.host_name_of(service))
    options = (*_OPTIONS, *window, name)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)
