"""The host names that a server answers to. Prevents pages of other names from reaching it by DNS rebinding.

A page can make its own name resolve to this machine, and then read what a server answers without authentication. It
cannot do so with an IP address, or with a name that always means this machine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

from baton.rpc.errors import InvalidRequest

ANY_HOST = "*"

_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::[0-9]{0,5})?")
_MAX_BYTES = 260  # of a name and a port


def check_allowed_hosts(hosts: Collection[str]) -> None:
    """Raises InvalidRequest for an entry that is no host name, *.name or *."""
    for host in hosts:
        if host != ANY_HOST and not _NAME.fullmatch(host.removeprefix("*.")):
            raise InvalidRequest(
                f"allowed_hosts: {host!r} is not allowed; give a host name in lower case without scheme and port, "
                "*.name for its subdomains, or * for every name",
                field="allowed_hosts",
            )


class HostRule:
    """Decides by a Host header. IP addresses, localhost and its subdomains are always accepted, with any port."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        names = frozenset(allowed)
        self._any = ANY_HOST in names
        self._names = frozenset({"localhost", *(name for name in names if not name.startswith("*"))})
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def accepts(self, host: bytes) -> bool:
        """Returns whether a Host header names this server."""
        if self._any:
            return True
        match = _HOST.fullmatch(host.decode("latin-1")) if len(host) <= _MAX_BYTES else None
        if match is None:
            return False
        name = match[1].strip("[]").lower().removesuffix(".")
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
