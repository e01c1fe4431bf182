"""Installed versions: Python, Baton, and the packages that a service needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from baton.services import extras
from baton.services.doctor.finding import Finding, failed, ok, warning
from baton.services.doctor.targets import Targets

_TOPIC = "versions"
_PYTHONS = ((3, 11), (3, 14))  # from, to before
SERVICES = ("gateway", "router", "kvstore", "worker")


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Versions. `packages` are those that one service needs; the version of a missing package is None."""

    python: tuple[int, int]
    baton: str  # empty: not installed as a distribution
    packages: Mapping[str, str | None]
    missing: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by service, if no service is named


def check_versions(facts: VersionFacts, targets: Targets) -> Iterator[Finding]:
    """Checks whether the service, or each service if none is given, can start with the installed packages."""
    lowest, beyond = _PYTHONS
    python = ".".join(map(str, facts.python))
    if lowest <= facts.python < beyond:
        yield ok(_TOPIC, f"baton {facts.baton or '(not installed as a package)'}, Python {python}")
    else:
        yield failed(_TOPIC, f"Python {python}", "take 3.11, 3.12 or 3.13: make PYTHON=/path/to/python")
    for name, version in sorted(facts.packages.items()):
        fix = extras.install_line(targets.service or extras.ALL)
        if version is None and name in extras.OPTIONAL:
            yield warning(_TOPIC, f"{name} is not installed", f"--redis-url of a Redis, or {fix}")
        elif version is None:
            yield failed(_TOPIC, f"{name} is not installed", fix)
    present = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()) if version)
    if present:
        yield ok(_TOPIC, present)
    yield from _check_every_service(facts.missing)


def _check_every_service(missing: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Reports missing packages. A warning while another service can start, because a machine may run only some."""
    lacking = {service: names for service, names in missing.items() if names}
    if missing and len(lacking) == len(missing):
        yield failed(_TOPIC, "no service can start: its packages are not installed", extras.install_line(extras.ALL))
        return
    for service, names in lacking.items():
        what = f"baton {service} cannot start: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"
        yield warning(_TOPIC, what, extras.install_line(service))


def observe_versions(service: str) -> VersionFacts:
    """Reads the installed packages' metadata without importing them."""
    try:
        own, requirements = metadata.version(extras.DISTRIBUTION), metadata.requires(extras.DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        own, requirements = "", []
    names = extras.required_packages(requirements, (service,) if service else ())
    missing = {} if service else {one: extras.missing_packages(one) for one in SERVICES}
    version = (sys.version_info[0], sys.version_info[1])
    return VersionFacts(version, own, {name: extras.installed(name) for name in names}, missing)
