"""Checks the Host header of requests. Knows no routes."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from baton.gateway.errors.http import HttpError
from baton.rpc.address import is_loopback
from baton.rpc.server.hosts import HostRule

_SHOWN_BYTES = 256


class HostCheck:
    """Refuses requests to other host names. Accepts all without a rule."""

    def __init__(self, rule: HostRule | None = None) -> None:
        self._rule = rule

    def check(self, headers: Mapping[bytes, bytes], authority: bytes = b"") -> None:
        """Raises HttpError 403. `authority` is the host of the request target, which overrides the Host header.

        HTTP/1.0 clients may send no host; browsers always do.
        """
        if self._rule is None:
            return
        host = authority or headers.get(b"host")
        if host is None or self._rule.accepts(host):
            return
        raise HttpError(
            403,
            f"the host {host[:_SHOWN_BYTES].decode('latin-1')!r} is not allowed; use an IP address or localhost, "
            "or start the gateway with --allowed-hosts NAME",
            param="host",
            kind="permission_error",
            code="host_not_allowed",
        )


def host_check_of(allowed_hosts: tuple[str, ...], has_keys: bool, listens: Iterable[str]) -> HostCheck:
    """Returns the check of one gateway. It is active without API keys, or if allowed_hosts is set.

    `listens` are its listen addresses, whose names are accepted; also this machine's name if they are not loopback.
    """
    if has_keys and not allowed_hosts:
        return HostCheck()
    names = [address.rpartition(":")[0].lower() for address in listens]
    if not all(is_loopback(name) for name in names):
        names.append(socket.gethostname().lower())
    return HostCheck(HostRule([*allowed_hosts, *(name for name in names if "*" not in name)]))
