"""Whether a client may operate the fleet.

With keys, the key needs the scope admin. A gateway without keys allows it only if it listens on loopback, and never to
web pages (requests with an Origin).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.gateway.access.gate import Gate, OpenGate
from baton.gateway.access.identity import Identity, Scope
from baton.rpc.address import is_loopback, split_address
from baton.rpc.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class AdminCheck:
    """Checks access to what only operators may do. `listen` is the address of the API."""

    gate: Gate
    listen: str

    def check(self, identity: Identity, headers: Mapping[bytes, bytes], what: str = "this") -> None:
        """Raises PermissionDenied that names `what`."""
        self.check_place(headers, what)
        if Scope.ADMIN not in identity.scopes:
            raise PermissionDenied(f"{what} needs an API key with the scope {Scope.ADMIN.value}.")

    def check_place(self, headers: Mapping[bytes, bytes], what: str = "this") -> None:
        """Raises PermissionDenied if a gateway without keys cannot trust the client. Scopes are checked elsewhere."""
        if not isinstance(self.gate, OpenGate):
            return
        if not is_loopback(split_address(self.listen, "listen")[0]):
            raise PermissionDenied(
                f"this gateway has no API keys and listens beyond loopback; start it with --api-keys to use {what}"
            )
        if b"origin" in headers:
            raise PermissionDenied(f"web pages may not use {what} on a gateway without API keys")
