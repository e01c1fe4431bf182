"""NetworkPolicies allow the calls of the table of identities, and no others."""

from __future__ import annotations

import pytest
from support.kubernetes.manifests import OVERLAYS, of_kind

from baton.rpc.identity.identity import GATEWAY, KVSTORE, ROUTER, WORKER
from baton.rpc.identity.table import ACCEPTED

_OWNERS = {
    "baton.v1.RouterService": ROUTER,
    "baton.v1.RouterPeerService": ROUTER,
    "baton.v1.WorkerService": WORKER,
    "baton.v1.ControlService": WORKER,
    "baton.v1.IndexService": KVSTORE,
}
_PODS = (GATEWAY, ROUTER, KVSTORE, WORKER)
_PORTS = {ROUTER: 8200, KVSTORE: 8300, WORKER: 8100, "redis": 6379}
# Beside gRPC: KV between workers, and what Redis keeps.
_BESIDE = {(GATEWAY, "redis"), (KVSTORE, "redis")}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_arrows_are_those_of_the_design_at_both_ends(overlay):
    calls = {
        (caller, _OWNERS[service])
        for service, callers in ((method.partition("/")[0], callers) for method, callers in ACCEPTED.items())
        if service in _OWNERS
        for caller in callers
        if caller in _PODS
    }
    assert _arrows(overlay, "ingress", "from") == calls | _BESIDE
    assert _arrows(overlay, "egress", "to") == calls | _BESIDE


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_traffic_without_a_policy_is_refused(overlay):
    (default,) = (one for one in of_kind(overlay, "NetworkPolicy") if one["spec"]["podSelector"] == {})
    assert set(default["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in default["spec"]
    assert {port["port"] for rule in default["spec"]["egress"] for port in rule["ports"]} == {53}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_gateways_are_open_to_all_and_only_routers_call_the_api_server(overlay):
    policies = [one for one in of_kind(overlay, "NetworkPolicy") if _pod(one["spec"]["podSelector"])]
    open_to_all = {
        _pod(one["spec"]["podSelector"]) for one in policies for rule in one["spec"]["ingress"] if "from" not in rule
    }
    calling_all = {
        _pod(one["spec"]["podSelector"])
        for one in policies
        for rule in one["spec"].get("egress", ())
        if "to" not in rule
    }
    assert open_to_all == {GATEWAY}
    assert calling_all == {ROUTER}


def _arrows(overlay, direction, end):
    found = set()
    for policy in of_kind(overlay, "NetworkPolicy"):
        own = _pod(policy["spec"]["podSelector"])
        for rule in policy["spec"].get(direction, ()) if own else ():
            for other in rule.get(end, ()):
                peer = _pod(other["podSelector"])
                source, target = (peer, own) if direction == "ingress" else (own, peer)
                ports = {port["port"] for port in rule.get("ports", ())}
                assert ports == {_PORTS[target]} or (source, target, ports) == (WORKER, WORKER, set())
                found.add((source, target))
    return found


def _pod(selector) -> str:
    """Whom a selector names; empty for one that names no single service."""
    return selector.get("matchLabels", {}).get("app.kubernetes.io/name", "").removeprefix("baton-")
