"""What the overlays render to: valid, complete, with flags that exist, and as little right as will do."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from deploy_tools import kustomize
from manifests import (
    CRD_COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    arguments,
    container_of,
    environment,
    named,
    of_kind,
    pod_of,
    rendered,
    services,
    workloads,
)

from baton.services import settings
from baton.services.cli import SERVICES
from baton.services.metrics_table import all_metrics
from baton.services.probe import ProbeConfig
from baton.services.run import ProcessConfig

_CRD_KINDS = {"HTTPRoute", "GRPCRoute", "PodMonitor", "ScaledObject"}
_VERSIONS = tuple(sorted({kubernetes_validate.utils.major_minor(v) for v in kubernetes_validate.utils.all_versions()},
                         key=lambda v: tuple(map(int, v.split("."))))[-3:])  # fmt: skip
_PATH = re.compile(r"/etc/baton/\S+")


_read_schema = functools.cache(kubernetes_validate.utils.schema_contents)


@pytest.fixture(autouse=True)
def schemas_read_once(monkeypatch):
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", _read_schema)


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid_in_the_three_newest_kubernetes(overlay, version):
    for manifest in rendered(overlay):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_field_that_does_not_exist_is_found():
    manifest = dict(named("production", "Deployment", "baton-gateway"))
    manifest["spec"] = {**manifest["spec"], "replica": 3}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(manifest, _VERSIONS[-1], strict=True)


@pytest.mark.parametrize("component", sorted(path.name for path in (KUBERNETES / "components").iterdir()))
def test_every_component_renders_and_only_the_listed_ones_need_crds(component, tmp_path):
    manifests = list(yaml.safe_load_all(kustomize(_with_component(component))))
    unknown = {one["kind"] for one in manifests if not _is_known(one)}
    assert unknown <= _CRD_KINDS
    assert bool(unknown) == (component in CRD_COMPONENTS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_overlay_needs_a_crd(overlay):
    assert all(_is_known(one) for one in rendered(overlay))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_flags_are_the_services_own(overlay):
    for workload in services(overlay):
        config = _config_of(workload)
        assert config.log_format == "json"


def test_a_flag_that_does_not_exist_is_found():
    workload = named("gpu", "Deployment", "baton-gateway")
    with pytest.raises(settings.SettingsError, match="--rest-listne"):
        _parse("gateway", ["--rest-listne=0.0.0.0:8000", *arguments(workload)[1:]], {})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_of_the_fleet_arrive(overlay):
    fleet = named(overlay, "ConfigMap", "baton-fleet")["data"]
    assert len(fleet) <= 12
    assert all(isinstance(value, str) for value in fleet.values())
    gateway = named(overlay, "Deployment", "baton-gateway")
    prefill, decode = (named(overlay, "Deployment", f"baton-worker-{role}") for role in ("prefill", "decode"))
    if overlay == "production":
        least = {
            one["metadata"]["name"]: one["spec"]["minReplicas"] for one in of_kind(overlay, "HorizontalPodAutoscaler")
        }
        assert not any("replicas" in one["spec"] for one in (gateway, prefill, decode))
    else:
        least = {one["metadata"]["name"]: one["spec"]["replicas"] for one in (gateway, prefill, decode)}
    assert least == {
        "baton-gateway": int(fleet["gateways"]),
        "baton-worker-prefill": int(fleet["prefillWorkers"]),
        "baton-worker-decode": int(fleet["decodeWorkers"]),
    }
    for worker in (prefill, decode):
        assert f"--model={fleet['model']}" in arguments(worker)
        assert f"--transports={fleet['transports']}" in arguments(worker)
        assert container_of(worker)["image"] == fleet["workerImage"]
        if "gpuType" in fleet:
            assert pod_of(worker)["nodeSelector"] == {"nvidia.com/gpu.product": fleet["gpuType"]}
            assert container_of(worker)["resources"]["limits"]["nvidia.com/gpu"] == fleet["tensorParallelSize"]
            assert f"--tensor-parallel-size={fleet['tensorParallelSize']}" in arguments(worker)
            assert container_of(worker)["resources"]["limits"]["memory"] == fleet["workerMemory"]
            assert f"--host-cache-gb={fleet['hostCacheGb']}" in arguments(worker)
    assert f"--model={fleet['model']}" in arguments(gateway)
    assert environment(gateway)["BATON_GATEWAY_LIMIT_REPLICAS"] == fleet["gateways"]
    control = [named(overlay, "StatefulSet", f"baton-{name}") for name in ("router", "kvstore")]
    assert {container_of(one)["image"] for one in (gateway, *control)} == {fleet["controlImage"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_rights_that_they_do_not_need(overlay):
    for workload in workloads(overlay):
        pod, container = pod_of(workload), container_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert pod["enableServiceLinks"] is False
        assert pod["serviceAccountName"] == workload["metadata"]["name"].removesuffix("-prefill").removesuffix(
            "-decode"
        )
    accounts = {one["metadata"]["name"]: one for one in of_kind(overlay, "ServiceAccount")}
    assert {name for name, one in accounts.items() if one["automountServiceAccountToken"]} == {"baton-router"}
    (role,) = of_kind(overlay, "Role")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert not of_kind(overlay, "ClusterRole", "ClusterRoleBinding")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_readiness_is_not_liveness(overlay):
    for workload in services(overlay):
        container = container_of(workload)
        ready, alive = container["readinessProbe"], container["livenessProbe"]
        asked = [_asked(probe) for probe in (ready, alive)]
        assert asked in (["", "liveness"], ["/ready", "/health"])
        assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 60
        port = next(one["containerPort"] for one in container["ports"] if one["name"] == "grpc")
        assert all(probe.get("grpc", {}).get("port", port) == port for probe in (ready, alive))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_grace_period_holds_the_drain(overlay):
    for workload in services(overlay):
        config = _config_of(workload).service
        before = container_of(workload)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = pod_of(workload)["terminationGracePeriodSeconds"]
        assert grace >= before + getattr(config, "drain_timeout", 0) + 10


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_replicas_are_spread_and_disrupted_one_by_one(overlay):
    budgets = {str(one["spec"]["selector"]["matchLabels"]) for one in of_kind(overlay, "PodDisruptionBudget")}
    for workload in services(overlay):
        pod = pod_of(workload)
        labels = workload["spec"]["selector"]["matchLabels"]
        assert str(labels) in budgets
        (spread,) = pod["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels
        (anti,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert anti["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_that_flags_mention_exist(overlay):
    hosts = {one["metadata"]["name"] for one in of_kind(overlay, "Service")}
    for workload in services(overlay):
        text = " ".join((*arguments(workload), *environment(workload).values()))
        assert set(re.findall(r"(?<![\w-])(?:baton-\w+-\d\.)?(baton-[a-z]+)(?=:)", text)) <= hosts
        for name, number in re.findall(r"(baton-\w+)-(\d)\.", text):
            assert int(number) < named(overlay, "StatefulSet", name)["spec"]["replicas"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_files_that_flags_mention_are_mounted(overlay):
    for workload in services(overlay):
        container = container_of(workload)
        words = [*arguments(workload), *container["readinessProbe"].get("exec", {}).get("command", ())]
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"] for one in pod_of(workload)["volumes"]}
        claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        assert set(mounts.values()) <= volumes | claims
        for word in words:
            assert all(str(Path(path).parent) in mounts for path in _PATH.findall(word)), word


def test_autoscaling_has_room_and_asks_for_metrics_that_exist():
    known = {row.name for row in all_metrics()}
    autoscalers = of_kind("production", "HorizontalPodAutoscaler")
    assert len(autoscalers) == 3
    for one in autoscalers:
        assert one["spec"]["minReplicas"] <= one["spec"]["maxReplicas"]
        assert {metric["pods"]["metric"]["name"] for metric in one["spec"]["metrics"] if "pods" in metric} <= known
        assert named("production", "Deployment", one["spec"]["scaleTargetRef"]["name"])


def test_keda_asks_for_metrics_that_exist():
    known = {row.name for row in all_metrics()}
    manifests = yaml.safe_load_all(kustomize(_with_component("keda")))
    queries = [
        trigger["metadata"]["query"]
        for one in manifests
        if one["kind"] == "ScaledObject"
        for trigger in one["spec"]["triggers"]
    ]
    assert queries
    assert all(set(re.findall(r"\bbaton_\w+", query)) <= known for query in queries)


def test_a_fleet_moves_to_another_namespace_whole():
    folder = KUBERNETES.parents[1] / "build" / "deploy" / "elsewhere"
    folder.mkdir(parents=True, exist_ok=True)
    text = {"namespace": "elsewhere", "resources": ["../../../deploy/kubernetes/overlays/production"]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    for one in yaml.safe_load_all(kustomize(folder)):
        place = one["metadata"]["name"] if one["kind"] == "Namespace" else one["metadata"]["namespace"]
        assert place == "elsewhere"
        assert all(subject["namespace"] == "elsewhere" for subject in one.get("subjects", ()))


def test_production_speaks_tls_only_and_knows_its_clients():
    for workload in services("production"):
        config = _config_of(workload).service
        assert config.tls is not None
        if workload["metadata"]["name"] == "baton-gateway":
            assert config.rest_tls is not None
            assert config.grpc_tls is not None
            assert config.api_keys
            assert not config.allow_anonymous
            continue
        command = container_of(workload)["livenessProbe"]["exec"]["command"]
        assert command[:2] == ["baton", "probe"]
        (probe,) = settings.load("probe", (ProbeConfig,), command[2:], {})
        assert probe.of == arguments(workload)[0]
        assert probe.timeout <= container_of(workload)["livenessProbe"]["timeoutSeconds"]
        assert probe.address.endswith(config.listen.rpartition(":")[2])


def _with_component(component: str) -> Path:
    """A kustomization of the gpu overlay and one component more. It lies in build: paths in it must be relative."""
    folder = KUBERNETES.parents[1] / "build" / "deploy" / component
    folder.mkdir(parents=True, exist_ok=True)
    up = "../../../deploy/kubernetes"
    text = {"resources": [f"{up}/overlays/cpu-demo"], "components": [f"{up}/components/{component}"]}
    if component == "gpu":
        text = {"resources": [f"{up}/base", "fleet.yaml"], "components": [f"{up}/components/gpu"]}
        (folder / "fleet.yaml").write_text((KUBERNETES / "overlays" / "gpu" / "fleet.yaml").read_text())
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder


def _is_known(manifest) -> bool:
    try:
        kubernetes_validate.validate(manifest, _VERSIONS[-1], strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return False
    return True


class _Configs:
    """What a container's command line means."""

    def __init__(self, service, process) -> None:
        self.service = service
        self.log_format = process.log_format


def _config_of(workload) -> _Configs:
    name, *flags = arguments(workload)
    return _parse(name, flags, environment(workload))


def _parse(name, flags, variables) -> _Configs:
    command = SERVICES[name]
    config_type = getattr(importlib.import_module(f"{command.package}.config"), command.config)
    service, process = settings.load(name, (config_type, ProcessConfig), flags, variables)
    assert replace(service) == service
    return _Configs(service, process)


def _asked(probe) -> str:
    if "grpc" in probe:
        return probe["grpc"].get("service") or ""
    if "httpGet" in probe:
        return probe["httpGet"]["path"]
    words = [word for word in probe["exec"]["command"] if word.startswith("--service=")]
    return words[0].removeprefix("--service=") if words else ""
