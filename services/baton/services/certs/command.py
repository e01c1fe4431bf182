"""`baton certs`: a development CA and a certificate for each service. Never for production: its CA key lies beside."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from baton.rpc.errors import InvalidRequest
from baton.rpc.identity.identity import ENVOY, OPERATOR, SERVICES, Identity
from baton.services import settings

if TYPE_CHECKING:
    from baton.services.certs.certificates import Authority, Validity

CA_CERTIFICATE = "ca.crt"
CA_KEY = "ca.key"
EDGE = "edge"
_WHAT = (*SERVICES, EDGE)


@dataclass(frozen=True, slots=True)
class CertsConfig:
    """The settings of `baton certs`."""

    dir: str = field(
        default="certs", metadata={"help": "Folder to write to; a CA that is in it is used.", "metavar": "FOLDER"}
    )
    fleet: str = field(
        default="dev", metadata={"help": "The fleet's name in every identity: a DNS label.", "metavar": "NAME"}
    )
    services: tuple[str, ...] = field(
        default=_WHAT,
        metadata={
            "help": "Whom to make certificates for: some of gateway, router, worker, kvstore, operator, envoy, and "
            "edge, which is what clients are shown.",
            "metavar": "NAMES",
        },
    )
    name: str = field(
        default="default", metadata={"help": "The last part of the identities; has no effect.", "metavar": "NAME"}
    )
    hosts: tuple[str, ...] = field(
        default=("localhost", "127.0.0.1"),
        metadata={"help": "Names and addresses that clients use for the edge.", "metavar": "HOST,.."},
    )
    days: float = field(default=90.0, metadata={"help": "Days that certificates are good for.", "minimum": 0.0})
    ca_days: float = field(default=3650.0, metadata={"help": "Days that a new CA is good for.", "minimum": 0.0})
    backdate_minutes: float = field(
        default=60.0,
        metadata={
            "help": "Minutes before now from which they are good, for clocks that are behind. Below 0: not yet.",
            "maximum": 525600.0,
        },
    )

    def validate(self) -> None:
        """Raises InvalidRequest for a name that is none."""
        unknown = [service for service in self.services if service not in _WHAT]
        if unknown or not self.services:
            problem = f"{unknown[0]!r} is none" if unknown else "it is empty"
            raise InvalidRequest(f"--services: {problem}; give some of {', '.join(_WHAT)}", field="services")
        Identity(self.fleet, SERVICES[0], self.name)
        if EDGE in self.services and not self.hosts:
            raise InvalidRequest("--hosts is empty; the edge's certificate needs one at least", field="hosts")


class CertsFailed(Exception):
    """Some or all files were not written. The message is for the user."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Makes what is asked for. Returns the process's exit code."""
    try:
        (config,) = settings.load("certs", (CertsConfig,), argv, environ, "Makes a development CA and certificates.")
    except settings.SettingsError as error:
        print(f"baton certs: {error}", file=sys.stderr)
        return 2
    try:
        make(config)
    except (CertsFailed, InvalidRequest) as error:
        print(f"baton certs: {error}", file=sys.stderr)
        return 1
    print(instructions(config))
    return 0


def make(config: CertsConfig) -> None:
    """Writes the CA if there is none, and the certificates. Raises CertsFailed if one exists or cannot be written."""
    from baton.services.certs.certificates import Validity, load_authority, new_authority

    folder = Path(config.dir)
    present = [name for service in config.services for name in file_names(service) if (folder / name).exists()]
    if present:
        raise CertsFailed(f"{folder / present[0]} exists and is not overwritten; remove it, or give another --dir")
    now = time.time()
    begin = now - 60 * config.backdate_minutes
    validity = Validity(begin, now + 86400 * config.days)
    has_ca, has_key = (folder / CA_CERTIFICATE).exists(), (folder / CA_KEY).exists()
    if has_ca != has_key:
        raise CertsFailed(f"{folder} has only one of {CA_CERTIFICATE} and {CA_KEY}; both are needed, or none")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if has_ca:
            authority = load_authority((folder / CA_CERTIFICATE).read_bytes(), (folder / CA_KEY).read_bytes())
        else:
            authority = new_authority(config.fleet, Validity(min(begin, now), now + 86400 * config.ca_days))
            _write(folder, CA_CERTIFICATE, CA_KEY, authority.certificate_pem, authority.key_pem)
        for service in config.services:
            _write(folder, *file_names(service), *_issue(config, service, authority, validity))
    except (OSError, ValueError) as error:
        raise CertsFailed(f"{folder}: {error}") from error


def tls_flags(folder: str, service: str) -> tuple[str, ...]:
    """Returns the flags for a service to use the files that this command wrote."""
    certificate, key = file_names(service)
    paths = (f"{folder}/{certificate}", f"{folder}/{key}", f"{folder}/{CA_CERTIFICATE}")
    return ("--tls-certificate", paths[0], "--tls-key", paths[1], "--tls-ca", paths[2])


def edge_flags(folder: str) -> tuple[str, ...]:
    """Returns the flags for a gateway to serve its clients over TLS."""
    certificate, key = (f"{folder}/{name}" for name in file_names(EDGE))
    return (
        "--rest-tls-certificate", certificate, "--rest-tls-key", key,
        "--grpc-tls-certificate", certificate, "--grpc-tls-key", key,
    )  # fmt: skip


def instructions(config: CertsConfig) -> str:
    """Returns a summary of the files, and where to pass them."""
    rows = [f"Wrote to {config.dir}, for the fleet {config.fleet}. Keep {CA_KEY} away from the services."]
    for service in config.services:
        if service == EDGE:
            rows.append(f"  baton gateway   {' '.join(edge_flags(config.dir))}")
        elif service in (OPERATOR, ENVOY):
            certificate, key = file_names(service)
            whose = "your own tools" if service == OPERATOR else "Envoy's"
            rows.append(f"  {whose:<14}  {config.dir}/{certificate}, {config.dir}/{key}, {config.dir}/{CA_CERTIFICATE}")
        else:
            rows.append(f"  baton {service:<9} {' '.join(tls_flags(config.dir, service))}")
    return "\n".join((*rows, f"All services of one machine: baton up --tls-dir {config.dir}"))


def file_names(service: str) -> tuple[str, str]:
    """Returns the paths of the certificate and the key, within the folder."""
    return f"{service}.crt", f"{service}.key"


def _issue(config: CertsConfig, service: str, authority: Authority, validity: Validity) -> tuple[bytes, bytes]:
    if service == EDGE:
        return authority.issue_edge(config.hosts, validity)
    return authority.issue(Identity(config.fleet, service, config.name), validity)


def _write(folder: Path, certificate_name: str, key_name: str, certificate: bytes, key: bytes) -> None:
    """Writes the key first, with permissions for the owner only from the start. Raises FileExistsError."""
    for name, content, mode in ((key_name, key, 0o600), (certificate_name, certificate, 0o644)):
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
