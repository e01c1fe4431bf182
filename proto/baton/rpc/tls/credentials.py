"""TLS as services use it: credentials for servers and channels that follow their files.

A connection that stands keeps what it was made with. A new one, in either direction, is made with what the files hold
by then; files that are wrong or torn are passed over, and the last good ones serve on.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpc

from baton.rpc.errors import InvalidRequest
from baton.rpc.identity.check import refusal
from baton.rpc.identity.identity import Identity, service_host_name
from baton.rpc.tls.files import Signature, TlsFiles, TlsMaterial, read_material, signature_of

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0  # files that were wrong may be right without a change: a clock was set, a certificate's time came


class LiveFiles:
    """The last good content of some files. Thread-safe. Raises InvalidRequest where they are wrong from the start."""

    def __init__(self, files: TlsFiles, service: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.files = files
        self.num_reloads = 0
        self.num_failed_reloads = 0
        self._service = service
        self._clock = clock
        self._lock = threading.Lock()
        self._signature: Signature = signature_of(files)
        self._material = read_material(files, service)
        self._retry_at = float("inf")
        self._problem = ""

    @property
    def material(self) -> TlsMaterial:
        """Returns the material for a new connection. Costs three calls of stat if no file changed."""
        with self._lock:
            signature = signature_of(self.files)
            if signature != self._signature or self._clock() >= self._retry_at:
                self._signature = signature
                self._reload()
            return self._material

    def _reload(self) -> None:
        try:
            material = read_material(self.files, self._service)
            self._check_fleet(material)
        except InvalidRequest as error:
            self._retry_at = self._clock() + _RETRY_SECONDS
            self.num_failed_reloads += 1
            if error.message != self._problem:
                _log.error("cannot use the new TLS files, keeping the old ones: %s", error.message)
            self._problem = error.message
            return
        self._retry_at, self._problem = float("inf"), ""
        if material != self._material:
            self._material = material
            self.num_reloads += 1
            _log.info("TLS files reloaded: %s", self.files.certificate)

    def _check_fleet(self, material: TlsMaterial) -> None:
        ours, theirs = self._material.identity, material.identity
        if ours and theirs and ours.fleet != theirs.fleet:
            raise InvalidRequest(f"{self.files.certificate} is of the fleet {theirs.fleet}, this one is {ours.fleet}")


class Tls:
    """The certificate of one service and the peers that it accepts. Raises InvalidRequest for unusable files."""

    def __init__(self, files: TlsFiles, service: str) -> None:
        self.live = LiveFiles(files, service)
        self.refusals: Counter[str] = Counter()  # calls of peers that may not, by method
        self._made: tuple[TlsMaterial, grpc.ChannelCredentials] | None = None
        # By whether they are a server's. Made now: the files may be torn when the first connection comes.
        self._contexts = {side: (self.live.material, mutual_context(files, side)) for side in (False, True)}

    @property
    def identity(self) -> Identity:
        """The service of the certificate."""
        identity = self.live.material.identity
        assert identity is not None, "the files were checked for it"
        return identity

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a server whose clients must present a certificate of the CA."""
        return _server_credentials(self.live, mutual=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the present credentials. Channels keep theirs when they reconnect, so a lost peer needs a new one."""
        material = self.live.material
        made = self._made
        if made is None or made[0] is not material:
            credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
            made = self._made = (material, credentials)
        return made[1]

    def host_name_of(self, service: str) -> str:
        """Returns the DNS name that the certificate of a peer of this fleet must have."""
        return service_host_name(self.identity.fleet, service)

    def ssl_context(self, server_side: bool) -> ssl.SSLContext:
        """Returns the present context for a socket whose peer must present a certificate of the CA.

        The caller checks its identity.
        """
        material = self.live.material
        if self._contexts[server_side][0] is not material:
            with contextlib.suppress(ssl.SSLError, OSError):  # replaced again meanwhile: the next connection sees it
                self._contexts[server_side] = material, mutual_context(self.live.files, server_side)
        return self._contexts[server_side][1]

    def refusal(self, certificate: Mapping[str, Any] | None, accepted: frozenset[str]) -> str:
        """Returns why the peer with this certificate (`getpeercert`) is refused. Empty: its service is accepted."""
        names = (certificate or {}).get("subjectAltName", ())
        uris = [value.encode() for kind, value in names if kind == "URI"]
        return refusal({"peer_uri": uris}, self.identity.fleet, accepted)


class EdgeTls:
    """The certificate of an edge. Clients present one only if the files have a client_ca.

    Raises InvalidRequest for unusable files.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.live = LiveFiles(files)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for a gRPC server."""
        return _server_credentials(self.live, mutual=bool(self.live.files.client_ca))

    def ssl_context(self) -> ssl.SSLContext:
        """Returns a context for an asyncio server."""
        return _FollowingContext.of(self.live)


class _FollowingContext(ssl.SSLContext):
    """A server's context that hands each connection to the context of the present files.

    Each of these has its own ticket keys and sessions: what was begun with other files, such as another client_ca,
    cannot be resumed.
    """

    _live: LiveFiles
    _made: tuple[TlsMaterial, ssl.SSLContext]

    @classmethod
    def of(cls, live: LiveFiles) -> _FollowingContext:
        """Returns a context for these files."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._live, context._made = live, (live.material, _edge_context(live.files))
        return context

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self._present().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def _present(self) -> ssl.SSLContext:
        material = self._live.material
        if material is not self._made[0]:
            with contextlib.suppress(ssl.SSLError, OSError):  # replaced again meanwhile: the next one sees it
                self._made = material, _edge_context(self._live.files)
        return self._made[1]


def mutual_context(files: TlsFiles, server_side: bool) -> ssl.SSLContext:
    """Returns a context for one end of a connection with certificates on both ends. Raises SSLError, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.certificate, files.key)
    if server_side:
        context.num_tickets = 0  # no session resumption, so that every connection presents its certificate
    return context


def _edge_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.client_ca)
        # No resumption by TLS 1.3, so that its connections present their certificates. Those of TLS 1.2 resume what
        # this context has begun.
        context.num_tickets = 0
    return context


def _server_credentials(live: LiveFiles, mutual: bool) -> grpc.ServerCredentials:
    given = live.material

    def configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
        pairs = [(material.key, material.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, material.ca or material.client_ca or None)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at every handshake."""
        nonlocal given
        material = live.material
        if material is given:
            return None
        given = material
        return configuration(material)

    return grpc.dynamic_ssl_server_credentials(configuration(given), cast(Any, changed), mutual)
