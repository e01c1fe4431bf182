"""Certificates for tests, created by `baton certs`, and helpers that use them."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
from pathlib import Path

from baton.rpc.channel import Dial
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.files import TlsFiles
from baton.services.certs import command as certs

EXPIRED = {"days": 0.0}
NOT_YET = {"backdate_minutes": -10.0}  # not yet valid, like a new certificate for a clock that is ten minutes behind


def make_certs(folder: Path, ca: Path | None = None, **values) -> Path:
    """Returns a folder of certificates, signed by the CA in folder `ca`, or by a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    if ca is not None:
        for name in (certs.CA_CERTIFICATE, certs.CA_KEY):
            shutil.copy(ca / name, folder / name)
    certs.make(certs.CertsConfig(dir=str(folder), **values))
    return folder


def files_of(folder: Path, service: str, ca: Path | None = None) -> TlsFiles:
    certificate, key = (str(folder / name) for name in certs.file_names(service))
    return TlsFiles(certificate, key, str((ca or folder) / certs.CA_CERTIFICATE))


def contents_of(files: TlsFiles) -> dict[str, bytes]:
    """Returns the contents of files by setting."""
    return {name: Path(path).read_bytes() for name, path in files.named}


def tls_of(folder: Path, service: str) -> Tls:
    return Tls(files_of(folder, service), service)


def dial_as(folder: Path, service: str, towards: str) -> Dial:
    return Dial(tls_of(folder, service), towards)


def replace_files(folder: Path, new: Path, *services: str) -> None:
    """Replaces the files of these services by those of another folder, each atomically."""
    for service in services:
        for name in certs.file_names(service):
            os.replace(shutil.copy(new / name, folder / f"{name}.new"), folder / name)


def shown_by(address: str, folder: Path, service: str = "operator") -> bytes:
    """Returns the certificate, DER, that a server presents now."""
    context = ssl.create_default_context(cafile=str(folder / certs.CA_CERTIFICATE))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(*(str(folder / name) for name in certs.file_names(service)))
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def der_of(folder: Path, service: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((folder / certs.file_names(service)[0]).read_text())


def metrics_over_tls(address: str, folder: Path, service: str, reader: str = "operator") -> str:
    """Returns a service's /metrics for a client with this certificate. Raises OSError if it is refused."""
    tls = tls_of(folder, reader)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        tls.ssl_context(server_side=False).wrap_socket(plain, server_hostname=tls.host_name_of(service)) as connection,
    ):
        request = http.client.HTTPConnection(host, int(port))
        request.sock = connection
        request.request("GET", "/metrics")
        answer = request.getresponse()
        assert answer.status == 200
        return answer.read().decode()
