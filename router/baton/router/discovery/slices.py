"""The endpoints of a Kubernetes EndpointSlice. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.router.discovery.addresses import join_address
from baton.router.discovery.endpoints import Endpoints, EndpointState, merged
from baton.router.discovery.kubernetes_api import UnexpectedAnswer

if TYPE_CHECKING:
    from kubernetes.aio.client import V1EndpointConditions, V1EndpointSlice


def name_of(item: V1EndpointSlice) -> str:
    """Returns the slice's name. UnexpectedAnswer: it has none."""
    if item.metadata is None or not item.metadata.name:
        raise UnexpectedAnswer("an EndpointSlice without a name")
    return item.metadata.name


def endpoints_of(item: V1EndpointSlice, port: str) -> Endpoints:
    """Returns the slice's endpoints. `port`: the port's name or number in the slice."""
    number = _port_of(item, port)
    if number is None or item.address_type == "FQDN":
        return {}
    return merged(
        dict.fromkeys((join_address(address, number) for address in one.addresses), _state_of(one.conditions))
        for one in item.endpoints or ()
    )


def _port_of(item: V1EndpointSlice, wanted: str) -> int | None:
    for port in item.ports or ():
        if port.port and wanted in (port.name or "", str(port.port)):
            return port.port
    return None


def _state_of(conditions: V1EndpointConditions | None) -> EndpointState:
    """Returns the state; an unset `ready` counts as true, as the API requires."""
    if conditions is None:
        return EndpointState.SERVING
    if conditions.terminating:
        return EndpointState.TERMINATING
    # A Service that publishes addresses before they are ready has them ready and not serving.
    is_ready = conditions.ready if conditions.ready is not None else conditions.serving is not False
    return EndpointState.SERVING if is_ready or conditions.serving else EndpointState.NOT_READY
