"""Certificate, key and CA files: read as one set, and checked before use. Knows no gRPC."""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest
from baton.rpc.identity.identity import Identity, identity_of

Signature = tuple[tuple[int, int, int], ...]
_MAX_HANDSHAKE_TURNS = 8


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a set for connections between services or, without `ca`, an edge's."""

    certificate: str  # and what leads from it to the CA, in that order
    key: str
    ca: str = ""  # whose certificates are accepted; several one after another
    prefix: str = "tls"  # of the settings that name them, for messages
    client_ca: str = ""  # of an edge: whose certificates its clients must present; empty: they present none

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """The setting and path of each file."""
        rows = (("certificate", self.certificate), ("key", self.key), ("ca", self.ca), ("client_ca", self.client_ca))
        return tuple((f"{self.prefix}_{name}", path) for name, path in rows if path)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The content of the files when they were read."""

    certificate: bytes
    key: bytes
    ca: bytes  # empty at an edge
    identity: Identity | None  # None: an edge's
    expires_at: float  # Unix seconds
    client_ca: bytes = b""  # empty: clients present no certificates


def tls_files(certificate: str, key: str, ca: str) -> TlsFiles | None:
    """Returns the set for use between services, or None for plain text. Raises InvalidRequest for half a set."""
    return _complete({"tls_certificate": certificate, "tls_key": key, "tls_ca": ca}, TlsFiles(certificate, key, ca))


def edge_files(certificate: str, key: str, prefix: str, client_ca: str = "") -> TlsFiles | None:
    """Returns an edge's set, or None for plain text. Raises InvalidRequest for half a set."""
    settings = {f"{prefix}_certificate": certificate, f"{prefix}_key": key}
    files = _complete(settings, TlsFiles(certificate, key, prefix=prefix, client_ca=client_ca))
    if files is None and client_ca:
        raise InvalidRequest(
            f"{prefix}_client_ca given without {prefix}_certificate: clients present certificates over TLS only",
            field=f"{prefix}_client_ca",
        )
    return files


def _complete(settings: dict[str, str], files: TlsFiles) -> TlsFiles | None:
    missing = [name for name, path in settings.items() if not path]
    if len(missing) == len(settings):
        return None
    if missing:
        given = ", ".join(name for name in settings if name not in missing)
        raise InvalidRequest(
            f"{given} given without {' and '.join(missing)}; TLS needs {', '.join(settings)}, plain text none of them",
            field=missing[0],
        )
    return files


def signature_of(files: TlsFiles) -> Signature:
    """Returns a value that changes when a file is replaced or written."""
    rows = []
    for _, path in files.named:
        try:
            found = os.stat(path)
        except OSError as error:
            rows.append((-1, error.errno or 0, 0))
        else:
            rows.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(rows)


def read_material(files: TlsFiles, service: str = "") -> TlsMaterial:
    """Returns the files' content, which fits together, is valid now and is of `service`, if that is given.

    Raises InvalidRequest naming the setting, the file and the problem.
    """
    contents = [_read(name, path) for name, path in files.named]
    shown = _own_certificate(files)
    if [_read(name, path) for name, path in files.named] != contents:
        raise InvalidRequest(f"{_both(files)} changed while they were read", field=files.named[0][0])
    identity = identity_of(_names(shown, "URI")) if files.ca else None
    if service:
        _check_service(files, shown, identity, service)
    return TlsMaterial(
        certificate=contents[0],
        key=contents[1],
        ca=contents[2] if files.ca else b"",
        identity=identity,
        expires_at=float(ssl.cert_time_to_seconds(shown["notAfter"])),
        client_ca=contents[-1] if files.client_ca else b"",
    )


def _check_service(files: TlsFiles, shown: dict[str, Any], identity: Identity | None, service: str) -> None:
    if identity is None:
        uris = ", ".join(_names(shown, "URI")) or "none"
        raise _wrong(files, f"it needs one URI spiffe://baton/FLEET/{service}/NAME; its URIs are {uris}")
    if identity.service != service:
        raise _wrong(files, f"it is {identity.uri}; here it must be that of a {service}")
    if identity.host_name not in _names(shown, "DNS"):
        raise _wrong(files, f"it lacks the DNS name {identity.host_name}, by which clients know a {service}")


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{name}={path} cannot be read: {error.strerror}", field=name) from error


def _own_certificate(files: TlsFiles) -> dict[str, Any]:
    """Returns the certificate as a peer would see it, by a handshake of the files with themselves."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    _load_chain(server, files)
    if files.ca:
        server.verify_mode = ssl.CERT_REQUIRED
        _load_chain(client, files)
        _load_ca(server, files, files.ca)
    else:
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if files.client_ca:
        _load_ca(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files, files.client_ca, "client_ca")
    _load_ca(client, files, files.ca or files.certificate)
    return _shake_hands(files, server, client)


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    def no_passphrase() -> str:
        raise ValueError("the key is encrypted; give one without a passphrase")

    try:
        context.load_cert_chain(files.certificate, files.key, no_passphrase)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise InvalidRequest(f"{_both(files)} cannot be used: {_reason(error)}", field=files.named[0][0]) from error


def _load_ca(context: ssl.SSLContext, files: TlsFiles, path: str, name: str = "ca") -> None:
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        field = f"{files.prefix}_{name}"
        raise InvalidRequest(f"{field}={path} cannot be used: {_reason(error)}", field=field) from error


def _shake_hands(files: TlsFiles, server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    try:
        for _ in range(_MAX_HANDSHAKE_TURNS):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        against = f"against {files.prefix}_ca={files.ca}" if files.ca else "by its dates"
        raise _wrong(files, f"checked {against} at {clock}: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise _wrong(files, _reason(error)) from error
    shown = ends[0].getpeercert()
    if not shown:
        raise _wrong(files, "a handshake of the files with themselves did not come to an end")
    return shown


def _names(certificate: dict[str, Any], kind: str) -> list[str]:
    return [value for what, value in certificate.get("subjectAltName", ()) if what == kind]


def _wrong(files: TlsFiles, problem: str) -> InvalidRequest:
    name, path = files.named[0]
    return InvalidRequest(f"{name}={path}: {problem}", field=name)


def _both(files: TlsFiles) -> str:
    return " and ".join(f"{name}={path}" for name, path in files.named[:2])


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).lower().replace("_", " ") if isinstance(error, ssl.SSLError) else str(reason)
