"""Autoscalers get the counts of fleet.yaml, query metrics of their own fleet, and scale down slowly."""

from __future__ import annotations

import re

import pytest
import yaml
from support.kubernetes.deploy_tools import kustomize
from support.kubernetes.fleet_variants import KUBERNETES, VARIANTS, commented_replacements, wrapped
from support.kubernetes.manifests import OVERLAYS, named, of_kind, rendered

from baton.services.tools.metrics_table import all_metrics

_ALL = (*OVERLAYS, *VARIANTS)
_SETTINGS = {
    "baton-gateway": ("gateways", "maxGateways"),
    "baton-worker-prefill": ("prefillWorkers", "maxPrefillWorkers"),
    "baton-worker-decode": ("decodeWorkers", "maxDecodeWorkers"),
    "baton-worker-both": ("workers", "maxWorkers"),
}
_KNOWN = {row.name for row in all_metrics()}


@pytest.mark.parametrize("overlay", _ALL)
def test_the_counts_of_the_fleet_arrive(overlay):
    fleet = named(overlay, "ConfigMap", "baton-fleet")["data"]
    for one in of_kind(overlay, "HorizontalPodAutoscaler", "ScaledObject"):
        least, most = _SETTINGS[one["metadata"]["name"]]
        # Without a maximum setting the count is fixed.
        assert _bounds(one) == (int(fleet[least]), int(fleet.get(most, fleet[least])))
        assert _bounds(one)[0] <= _bounds(one)[1]
    assert {name for names in _SETTINGS.values() for name in names} >= {
        key for key in fleet if "gateways" in key.lower() or "workers" in key.lower()
    }


@pytest.mark.parametrize("overlay", _ALL)
def test_no_deployment_has_a_count_of_its_own(overlay):
    assert not [one["metadata"]["name"] for one in of_kind(overlay, "Deployment") if "replicas" in one["spec"]]


@pytest.mark.parametrize("overlay", _ALL)
def test_autoscalers_ask_for_metrics_that_exist_and_take_pods_one_by_one(overlay):
    for one in of_kind(overlay, "HorizontalPodAutoscaler", "ScaledObject"):
        least, most = _bounds(one)
        if least == most:
            continue
        assert _metrics(one)
        assert _metrics(one) <= _KNOWN
        down = _behavior(one)["scaleDown"]
        # Removing a worker loses its cache and moves its streams.
        assert down["stabilizationWindowSeconds"] >= 300
        assert [(policy["type"], policy["value"]) for policy in down["policies"]] == [("Pods", 1)]
        assert down["policies"][0]["periodSeconds"] >= 300


@pytest.mark.parametrize("overlay", [name for name in _ALL if "keda" in name])
def test_queries_count_one_fleet_and_one_kind_of_pod(overlay):
    namespace = VARIANTS[overlay].namespace
    for one in of_kind(overlay, "ScaledObject"):
        assert one["metadata"]["namespace"] == namespace
        for query in _queries(one):
            assert f'{{namespace="{namespace}",pod=~"{one["metadata"]["name"]}-.*"}}' in query
        # An empty result is an error, which keeps the count; as 0 it would scale down.
        assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in one["spec"]["triggers"])


def test_a_kustomization_around_a_fleet_moves_the_queries():
    fields = {"replacements": commented_replacements(KUBERNETES / "overlays" / "production")}
    moved = list(yaml.safe_load_all(kustomize(wrapped("production-keda", "other", **fields))))
    queries = [query for one in moved if one["kind"] == "ScaledObject" for query in _queries(one)]
    assert queries
    assert all('namespace="other"' in query for query in queries)


def test_keda_without_its_replacement_counts_no_fleet():
    """Without the replacement queries name an impossible namespace, so they fail and count no other fleet."""
    files = (KUBERNETES / "parts" / "keda").glob("*/scaled-object.yaml")
    queries = [query for file in files for query in _queries(yaml.safe_load(file.read_text()))]
    assert queries
    # Names of namespaces are lower case.
    assert all('namespace="NAMESPACE"' in query for query in queries)


@pytest.mark.parametrize("overlay", [name for name in _ALL if "keda" in name])
def test_keda_takes_over_the_autoscaler_that_is_there(overlay):
    for one in of_kind(overlay, "ScaledObject"):
        assert one["metadata"]["annotations"] == {"scaledobject.keda.sh/transfer-hpa-ownership": "true"}
        config = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
        # Overlays without KEDA use the same name.
        assert config["name"] == one["spec"]["scaleTargetRef"]["name"] == one["metadata"]["name"]
        assert not one["spec"]["advanced"].get("restoreToOriginalReplicaCount")
    assert not [one for one in rendered(overlay) if one["kind"] == "HorizontalPodAutoscaler"]


def test_the_adapters_rule_on_the_page_offers_each_metric_by_namespace():
    """For prometheus-adapter: without the label matchers a query counts every fleet."""
    block = (KUBERNETES.parent / "README.md").read_text().partition("```yaml\nrules:")[2].partition("```")[0]
    (rule,) = yaml.safe_load("rules:" + block)["rules"]
    assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}
    assert "<<.LabelMatchers>>" in rule["metricsQuery"]
    assert "<<.GroupBy>>" in rule["metricsQuery"]
    (series,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    asked = {
        name
        for overlay in ("production", "production-aggregated")
        for one in of_kind(overlay, "HorizontalPodAutoscaler")
        for name in _metrics(one)
    }
    assert len(asked) == 4
    assert all(re.fullmatch(series, name) for name in asked)


def _bounds(one):
    spec = one["spec"]
    if one["kind"] == "ScaledObject":
        return spec["minReplicaCount"], spec["maxReplicaCount"]
    return spec["minReplicas"], spec["maxReplicas"]


def _behavior(one):
    if one["kind"] == "ScaledObject":
        return one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    return one["spec"]["behavior"]


def _metrics(one) -> set[str]:
    if one["kind"] == "ScaledObject":
        return {name for query in _queries(one) for name in re.findall(r"\bbaton_\w+", query)}
    return {metric["pods"]["metric"]["name"] for metric in one["spec"]["metrics"] if "pods" in metric}


def _queries(one) -> list[str]:
    return [trigger["metadata"]["query"] for trigger in one["spec"]["triggers"]]
