"""Every selection of the manifests matches something: targets of patches, selectors of pods, ports, references."""

from __future__ import annotations

import re

import pytest
import yaml
from support.kubernetes.fleet_variants import KUBERNETES, VARIANTS, folder_of
from support.kubernetes.kustomization_walk import Walk
from support.kubernetes.manifests import OVERLAYS, container_of, named, of_kind, rendered, workloads

_ALL = (*OVERLAYS, *VARIANTS)
_HASH = re.compile(r"-[0-9a-z]{10}$")  # suffix of generated names


@pytest.mark.parametrize("overlay", _ALL)
def test_every_patch_replacement_and_image_matches(overlay):
    walk = Walk(folder_of(overlay))
    assert not walk.unmatched, "\n".join(map(str, walk.unmatched))


@pytest.mark.parametrize("overlay", _ALL)
def test_the_walk_finds_the_objects_that_kustomize_prints(overlay):
    printed = {
        (one["kind"], _HASH.sub("", one["metadata"]["name"]) if one["kind"] == "Secret" else one["metadata"]["name"])
        for one in rendered(overlay)
    }
    assert Walk(folder_of(overlay)).names() == printed


@pytest.mark.parametrize(
    ("field", "entry", "found"),
    [
        (
            "patches",
            {"target": {"kind": "Deployment", "name": "baton-router"}, "patch": "[{op: remove, path: /spec}]"},
            "patch",
        ),
        # A strategic merge patch with a target: kustomize uses the target, and ignores the name in the patch.
        (
            "patches",
            {
                "target": {"kind": "Deployment", "name": "baton-gatewy"},
                "patch": "{apiVersion: apps/v1, kind: Deployment, metadata: {name: baton-gateway}}",
            },
            "patch",
        ),
        (
            "patches",
            {"patch": "{apiVersion: apps/v1, kind: Deployment, metadata: {name: baton-routers}, spec: {replicas: 3}}"},
            "patch",
        ),
        # Names in replacements are not regular expressions.
        (
            "replacements",
            {
                "source": {"kind": "Service", "name": "baton-worker", "fieldPath": "metadata.name"},
                "targets": [{"select": {"kind": "Deployment", "name": "baton-worker-.*"}, "fieldPaths": ["spec.x"]}],
            },
            "replacement",
        ),
        ("images", {"name": "baton-contrl", "newTag": "1"}, "image"),
    ],
)
def test_a_selection_without_a_match_is_found(tmp_path, field, entry, found):
    folder = tmp_path / "overlay"
    folder.mkdir()
    gpu = KUBERNETES / "overlays" / "gpu"
    text = yaml.safe_load((gpu / "kustomization.yaml").read_text())
    text = {**text, "resources": [str(KUBERNETES / "base"), str(gpu / "fleet.yaml")], field: [entry]}
    text["components"] = [str((gpu / one).resolve()) for one in text["components"]]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    assert [one.what for one in Walk(folder).unmatched] == [found]


@pytest.mark.parametrize("overlay", _ALL)
def test_selectors_find_pods(overlay):
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in workloads(overlay)]
    for kind, selector in _pod_selectors(overlay):
        assert any(_selects(selector, labels) for labels in pods), f"{kind}: {selector} finds no pod"


@pytest.mark.parametrize("overlay", _ALL)
def test_every_service_has_a_budget_of_its_own_but_redis(overlay):
    budgets = [one["spec"]["selector"]["matchLabels"] for one in of_kind(overlay, "PodDisruptionBudget")]
    for workload in workloads(overlay):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        found = sum(_selects({"matchLabels": budget}, labels) for budget in budgets)
        # A pod with two budgets cannot be evicted.
        assert found == (workload["metadata"]["name"] != "baton-redis"), workload["metadata"]["name"]


@pytest.mark.parametrize("overlay", _ALL)
def test_named_ports_exist(overlay):
    for service in of_kind(overlay, "Service"):
        (workload,) = _workloads_of(overlay, {"matchLabels": service["spec"]["selector"]})[:1]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in {one["name"] for one in container_of(workload)["ports"]}
    for monitor in of_kind(overlay, "PodMonitor"):
        for workload in _workloads_of(overlay, monitor["spec"]["selector"]):
            ports = {one["name"] for one in container_of(workload)["ports"]}
            assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= ports
    for route in of_kind(overlay, "HTTPRoute", "GRPCRoute"):
        for backend in (one for rule in route["spec"]["rules"] for one in rule["backendRefs"]):
            ports = {one["port"] for one in named(overlay, "Service", backend["name"])["spec"]["ports"]}
            assert backend["port"] in ports, f"{route['metadata']['name']} goes to port {backend['port']}"
    for policy in of_kind(overlay, "NetworkPolicy"):
        for selector, ports in _ends(policy["spec"]):
            assert ports <= _container_ports(overlay, selector), f"{policy['metadata']['name']}: {ports}"


@pytest.mark.parametrize("overlay", _ALL)
def test_targets_of_autoscalers_and_policies_exist(overlay):
    scaled = []
    for one in of_kind(overlay, "HorizontalPodAutoscaler", "ScaledObject"):
        target = one["spec"]["scaleTargetRef"]
        scaled.append(target["name"])
        assert named(overlay, target.get("kind", "Deployment"), target["name"])
    # Each Deployment has exactly one.
    assert sorted(scaled) == sorted(one["metadata"]["name"] for one in of_kind(overlay, "Deployment"))
    for policy in of_kind(overlay, "BackendTLSPolicy"):
        assert all(named(overlay, one["kind"], one["name"]) for one in policy["spec"]["targetRefs"])


def _pod_selectors(overlay):
    """Yields each selector of pods with its owner, without the empty ones, which select all pods."""
    for one in rendered(overlay):
        kind, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec", {})
        if one["kind"] == "Service":
            yield kind, {"matchLabels": spec["selector"]}
        elif one["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            yield kind, spec["selector"]
        elif one["kind"] == "NetworkPolicy":
            rules = [*spec.get("ingress", ()), *spec.get("egress", ())]
            peers = [peer for rule in rules for peer in (*rule.get("from", ()), *rule.get("to", ()))]
            selectors = [spec["podSelector"], *(peer.get("podSelector") for peer in peers)]
            yield from ((kind, selector) for selector in selectors if selector)


def _ends(policy):
    """Yields selectors of pods that a policy opens, with the ports."""
    for rule in policy.get("ingress", ()):
        yield policy["podSelector"], {one["port"] for one in rule.get("ports", ())}
    for rule in policy.get("egress", ()):
        for peer in rule.get("to", ()):
            if "podSelector" in peer:
                yield peer["podSelector"], {one["port"] for one in rule.get("ports", ())}


def _container_ports(overlay, selector):
    return {one["containerPort"] for each in _workloads_of(overlay, selector) for one in container_of(each)["ports"]}


def _workloads_of(overlay, selector):
    return [one for one in workloads(overlay) if _selects(selector, one["spec"]["template"]["metadata"]["labels"])]


def _selects(selector, labels) -> bool:
    wanted = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return wanted <= labels.items() and all(labels.get(one["key"]) in one["values"] for one in expressions)
