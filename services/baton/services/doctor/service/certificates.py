"""The TLS files of a service: whether they are complete, match the service, and are valid for long enough."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from baton.rpc.errors import InvalidRequest
from baton.rpc.tls.files import TlsFiles, read_material
from baton.services.doctor.finding import Finding, failed, ok, warning
from baton.services.doctor.targets import Targets

_TOPIC = "certificates"
_SOON_DAYS = 7.0
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """One set of files. `problem` is empty if it can be used."""

    prefix: str  # of the settings
    path: str
    expires_at: float = 0.0  # Unix seconds
    problem: str = ""


def check_certificates(facts: tuple[CertificateFacts, ...], targets: Targets, now: float) -> Iterator[Finding]:
    """Checks each set of files. Reports the consequence of a missing one."""
    if not facts and targets.service:
        yield ok(_TOPIC, "none are given: plain text")
    for one in facts:
        days = (one.expires_at - now) / _DAY
        if one.problem:
            yield failed(_TOPIC, one.problem, _fix(one.prefix))
        elif days < _SOON_DAYS:
            yield warning(_TOPIC, f"{one.path} ends in {max(0.0, days):.1f} days", "renew it; no restart is needed")
        else:
            yield ok(_TOPIC, f"{one.path} fits its key and CA, and is good for {days:.0f} days")


def observe_certificates(targets: Targets) -> tuple[CertificateFacts, ...]:
    """Reads the files as the service does."""
    found = [_read(one, "") for one in targets.edges]
    return tuple([_read(targets.tls, targets.service), *found] if targets.tls is not None else found)


def _read(files: TlsFiles, service: str) -> CertificateFacts:
    try:
        material = read_material(files, service)
    except InvalidRequest as error:
        return CertificateFacts(files.prefix, files.certificate, problem=error.message)
    return CertificateFacts(files.prefix, files.certificate, material.expires_at)


def _fix(prefix: str) -> str:
    flag = prefix.replace("_", "-")
    return f"baton certs --dir FOLDER makes a set to try; give it with --{flag}-certificate and --{flag}-key"


def now() -> float:
    return time.time()
