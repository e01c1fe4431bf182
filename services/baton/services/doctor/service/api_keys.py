"""The gateway's file of API keys: whether it can be read and has a key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.rpc.errors import InvalidRequest
from baton.services.doctor.finding import Finding, failed, ok, warning
from baton.services.doctor.targets import Targets

_TOPIC = "keys"
_FIX = "baton keys create --api-keys FILE makes one; in Kubernetes: the Secret `baton-api-keys`, entry keys.toml"


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A file of API keys. `problem` is empty if it can be used."""

    path: str
    problem: str = ""
    num_keys: int = 0


def check_keys(facts: KeyFacts | None, targets: Targets) -> Iterator[Finding]:
    """Checks the file. Warns if a gateway has no keys, because it serves any client that can connect."""
    if facts is None:
        if targets.service == "gateway" and not targets.api_keys:
            yield ok(_TOPIC, "--api-keys is empty: anyone that can reach the gateway may use it")
    elif facts.problem:
        yield failed(_TOPIC, facts.problem, _FIX)
    elif not facts.num_keys:
        yield warning(_TOPIC, f"{facts.path} has no key, so no client can use the gateway", _FIX)
    else:
        yield ok(_TOPIC, f"{facts.path} holds {facts.num_keys} keys")


def observe_keys(targets: Targets) -> KeyFacts | None:
    """Reads the file as the gateway does. Returns None without a file, or if keys are in Redis."""
    if not targets.api_keys or targets.api_keys == "redis":
        return None
    from baton.gateway.access.keys.file import read_key_file

    try:
        return KeyFacts(targets.api_keys, num_keys=len(read_key_file(Path(targets.api_keys)).keys))
    except InvalidRequest as error:
        return KeyFacts(targets.api_keys, error.message)
