"""Access rights: those of the examining account and those of routers."""

from __future__ import annotations

from collections.abc import Iterator

from baton.services.doctor.cluster.facts import ClusterFacts, Document, name_of
from baton.services.doctor.cluster.promises import ROUTER
from baton.services.doctor.finding import Finding, failed, ok, unknown

_TOPIC = "rights"
_UNAUTHORIZED, _FORBIDDEN = 401, 403
_CLUSTER_WIDE = ("StorageClass",)
_ROUTERS_VERBS = frozenset({"list", "watch"})


def check_unread(facts: ClusterFacts) -> Iterator[Finding]:
    """Reports each kind that could not be read."""
    for one in facts.unread:
        if one.status == _UNAUTHORIZED:
            fix = "another --context or --token-file; `kubectl auth whoami` shows whose rights these are"
            yield failed(_TOPIC, f"{one.kind}: the API server rejects the token (401)", fix)
        elif one.status == _FORBIDDEN:
            kind = "clusterrole" if one.kind in _CLUSTER_WIDE else "role"
            fix = f"kubectl -n {facts.namespace} create {kind} baton-doctor --verb=list --resource={one.resource}"
            yield unknown(_TOPIC, f"{one.kind}: this account may not list {one.resource or one.kind} (403)", fix)
        elif one.status:
            yield failed(_TOPIC, f"{one.kind}: {one.status} {one.problem}", "the API server's log")
        else:
            fix = "--kubernetes-api URL or --kubeconfig FILE; in a pod: a NetworkPolicy that allows the API server"
            yield failed(_TOPIC, f"{one.kind}: {one.problem}", fix)


def check_router_role(facts: ClusterFacts) -> Iterator[Finding]:
    """Checks that routers may list and watch EndpointSlices."""
    if not facts.was_read("Role") or not facts.was_read("RoleBinding") or facts.workload(ROUTER) is None:
        return
    roles = {name_of(role) for role in facts.of_kind("Role") if _allows(role)}
    bound = [one for one in facts.of_kind("RoleBinding") if one.get("roleRef", {}).get("name") in roles]
    if any(_binds_router(one, facts.namespace) for one in bound):
        yield ok(_TOPIC, "routers may list and watch EndpointSlices")
        return
    account = f"--serviceaccount={facts.namespace}:{ROUTER}"
    what = f"no Role lets the ServiceAccount {ROUTER} list and watch EndpointSlices: routers see no worker"
    yield failed(_TOPIC, what, f"kubectl -n {facts.namespace} create rolebinding {ROUTER} --role={ROUTER} {account}")


def _allows(role: Document) -> bool:
    verbs: set[str] = set()
    for rule in role.get("rules") or ():
        groups, resources = rule.get("apiGroups") or (), rule.get("resources") or ()
        if {"discovery.k8s.io", "*"} & set(groups) and {"endpointslices", "*"} & set(resources):
            verbs |= set(rule.get("verbs") or ())
    return verbs >= _ROUTERS_VERBS or "*" in verbs


def _binds_router(binding: Document, namespace: str) -> bool:
    return any(
        subject.get("kind") == "ServiceAccount"
        and subject.get("name") == ROUTER
        and subject.get("namespace", namespace) == namespace
        for subject in binding.get("subjects") or ()
    )
