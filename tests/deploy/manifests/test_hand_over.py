"""Applying any overlay over any other: no workload dips below the smaller of its counts before and after."""

from __future__ import annotations

import copy
import itertools
import re

import pytest
from support.cluster.model import Cluster, Conflict, Rejected
from support.kubernetes.deploy_tools import ROOT
from support.kubernetes.manifests import OVERLAYS, rendered

_KEDA = ("production-keda", "production-aggregated-keda")
_ALL = (*OVERLAYS, "production-aggregated", *_KEDA)
_PAIRS = tuple(itertools.product(_ALL, repeat=2))
_README = (ROOT / "deploy" / "README.md").read_text()


def _client_side(cluster, overlay):
    cluster.apply(rendered(overlay))


def _server_side(cluster, overlay):
    cluster.apply_server_side(rendered(overlay))


_WAYS = {
    "client": (_client_side, _client_side),
    "server": (_server_side, _server_side),
    "client-then-server": (_client_side, _server_side),
}


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(("before", "after"), _PAIRS)
def test_no_count_dips_below_the_smaller_of_both(before, after, way):
    first, then = _WAYS[way]
    for load in (0, 3):
        cluster = _fleet(before, first, load)
        counts = cluster.counts()
        cluster.watch()
        if before in _KEDA and after not in _KEDA:
            cluster.delete("ScaledObject")
        then(cluster, after)
        _assert_no_dip(cluster, counts)
        # The count stays where the new bounds allow it.
        for (kind, name), count in cluster.counts().items():
            if kind == "Deployment" and (kind, name) in counts and name in _bounds(after):
                least, most = _bounds(after)[name]
                assert count == min(max(counts[kind, name], least), most)


@pytest.mark.parametrize("overlay", _ALL)
def test_applying_again_changes_no_count(overlay):
    for first, then in _WAYS.values():
        cluster = _fleet(overlay, first, 2)
        counts = cluster.counts()
        for _ in range(2):
            then(cluster, overlay)
        assert cluster.counts() == counts


@pytest.mark.parametrize("way", _WAYS)
def test_a_count_that_leaves_the_manifest_falls_to_one(way):
    """Shows that the model finds the dip of manifests where gpu has `replicas` and production has not."""
    first, then = _WAYS[way]
    cluster = _fleet_with_replicas(first)
    counts = cluster.counts()
    cluster.watch()
    then(cluster, "production")
    with pytest.raises(AssertionError, match="baton-gateway"):
        _assert_no_dip(cluster, counts)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("after", OVERLAYS)
def test_a_fleet_with_replicas_in_its_manifests_hands_its_counts_over_once(after, way):
    command = r"annotate \$one kubectl.kubernetes.io/last-applied-configuration-\n.*\n.*\n.*--field-manager=counts"
    assert re.search(command, _README)
    first, then = _WAYS[way]
    cluster = _fleet_with_replicas(first)
    counts = cluster.counts()
    cluster.watch()
    cluster.hand_counts_over()
    if then is _server_side:
        cluster.apply_server_side(rendered(after), force=True)
    then(cluster, after)
    # Later applies of both kinds keep the counts.
    _client_side(cluster, after)
    _server_side(cluster, after)
    _assert_no_dip(cluster, counts)


def test_a_count_in_the_manifest_would_undo_the_autoscaler():
    """Shows why manifests leave `replicas` out: an apply resets the count, or conflicts."""
    manifests = _with_replicas(rendered("production"), 3)
    cluster = Cluster()
    cluster.apply(manifests)
    cluster.scale("baton-gateway", 9)
    cluster.watch()
    cluster.apply(manifests)
    assert cluster.lowest["Deployment", "baton-gateway"] == 3
    cluster.scale("baton-gateway", 9)
    with pytest.raises(Conflict, match="replicas"):
        cluster.apply_server_side(manifests)


@pytest.mark.parametrize(("least", "most"), [(0, 4), (5, 4), ("three", 4)])
def test_the_api_server_rejects_a_wrong_count(least, most):
    manifests = copy.deepcopy(rendered("production"))
    for one in manifests:
        if one["kind"] == "HorizontalPodAutoscaler":
            one["spec"].update(minReplicas=least, maxReplicas=most)
    with pytest.raises(Rejected, match="HorizontalPodAutoscaler baton-gateway"):
        Cluster().apply(manifests)


def _fleet(overlay, apply, load) -> Cluster:
    """Returns a running fleet. Each autoscaled Deployment has `load` pods more than its minimum."""
    cluster = Cluster()
    apply(cluster, overlay)
    for name, (least, most) in _bounds(overlay).items():
        if least < most:
            cluster.scale(name, least + load)
    return cluster


def _fleet_with_replicas(apply) -> Cluster:
    cluster = Cluster()
    manifests = [one for one in _with_replicas(rendered("gpu"), 4) if one["kind"] != "HorizontalPodAutoscaler"]
    (cluster.apply if apply is _client_side else cluster.apply_server_side)(manifests)
    return cluster


def _with_replicas(manifests, count):
    changed = copy.deepcopy(manifests)
    for one in changed:
        if one["kind"] == "Deployment":
            one["spec"]["replicas"] = count
    return changed


def _bounds(overlay):
    found = {}
    for one in rendered(overlay):
        spec = one.get("spec", {})
        if one["kind"] == "HorizontalPodAutoscaler":
            found[spec["scaleTargetRef"]["name"]] = (spec["minReplicas"], spec["maxReplicas"])
        if one["kind"] == "ScaledObject":
            found[spec["scaleTargetRef"]["name"]] = (spec["minReplicaCount"], spec["maxReplicaCount"])
    return found


def _assert_no_dip(cluster, before) -> None:
    after = cluster.counts()
    for key, count in before.items():
        smaller = min(count, after[key])
        assert cluster.lowest[key] >= smaller, f"{key}: {cluster.lowest[key]} pods, from {count} to {after[key]}"
