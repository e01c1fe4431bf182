"""Spread over nodes, disruption budgets, rollout deadlines, limits of volumes, and the devices that RDMA needs."""

from __future__ import annotations

import pytest
from support.kubernetes.fleet_variants import VARIANTS
from support.kubernetes.manifests import OVERLAYS, container_of, of_kind, pod_of, services, workloads

_ALL = (*OVERLAYS, *VARIANTS)
_ONE_NODE = ("cpu-demo",)  # overlays that run on one node
_PAIRS = ("baton-router", "baton-kvstore")


@pytest.mark.parametrize("overlay", _ALL)
def test_routers_and_kvstores_never_share_a_node(overlay):
    for workload in services(overlay):
        name, labels = workload["metadata"]["name"], workload["spec"]["selector"]["matchLabels"]
        (spread,) = pod_of(workload)["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels
        rules = pod_of(workload).get("affinity", {}).get("podAntiAffinity", {})
        required = rules.get("requiredDuringSchedulingIgnoredDuringExecution", ())
        if name in _PAIRS and overlay in _ONE_NODE:
            assert not rules
        elif name in _PAIRS:
            (rule,) = required
            assert rule["labelSelector"]["matchLabels"] == labels
            assert rule["topologyKey"] == "kubernetes.io/hostname"
        else:
            # A node with several GPUs may run several workers; a rollout adds a gateway before it removes one.
            (rule,) = rules["preferredDuringSchedulingIgnoredDuringExecution"]
            assert rule["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels
            assert not required


@pytest.mark.parametrize("overlay", _ALL)
def test_unready_pods_do_not_block_a_drain(overlay):
    budgets = of_kind(overlay, "PodDisruptionBudget")
    assert len(budgets) == len(list(services(overlay)))
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize("overlay", _ALL)
def test_rollout_deadlines_exceed_the_time_of_a_start(overlay):
    for deployment in of_kind(overlay, "Deployment"):
        probe = container_of(deployment)["startupProbe"]
        start = probe["periodSeconds"] * probe["failureThreshold"] + probe.get("timeoutSeconds", 1)
        # Without surge the old pod stops first.
        stop = pod_of(deployment)["terminationGracePeriodSeconds"]
        assert deployment["spec"].get("progressDeadlineSeconds", 600) > start + stop, deployment["metadata"]["name"]


@pytest.mark.parametrize("overlay", _ALL)
def test_every_emptydir_has_a_size_limit(overlay):
    for workload in workloads(overlay):
        for volume in pod_of(workload)["volumes"]:
            if "emptyDir" in volume:
                assert volume["emptyDir"].get("sizeLimit"), f"{workload['metadata']['name']}: {volume['name']}"


@pytest.mark.parametrize("overlay", _ALL)
def test_rdma_has_its_device_and_its_network(overlay):
    for workload in (one for one in services(overlay) if one["metadata"]["name"].startswith("baton-worker")):
        transports = next(one["value"] for one in container_of(workload)["env"] if one["name"] == "TRANSPORTS")
        limits = container_of(workload)["resources"]["limits"]
        networks = workload["spec"]["template"]["metadata"].get("annotations", {}).get("k8s.v1.cni.cncf.io/networks")
        assert ("rdma" in transports) == any(name.startswith("rdma/") for name in limits) == bool(networks)
