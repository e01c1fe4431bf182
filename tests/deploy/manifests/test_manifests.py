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
from support.kubernetes.deploy_promises import COMPONENTS, components_of
from support.kubernetes.deploy_tools import kustomize
from support.kubernetes.fleet_variants import KUBERNETES, VARIANTS, wrapped
from support.kubernetes.manifests import (
    CRD_COMPONENTS,
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
from baton.services.process.run import ProcessConfig
from baton.services.tools.probe import ProbeConfig

_ALL = (*OVERLAYS, *VARIANTS)
_CRD_KINDS = {"HTTPRoute", "GRPCRoute", "BackendTLSPolicy", "PodMonitor", "ScaledObject"}
_OLDEST = "1.30"  # as deploy/README.md has it
_VERSIONS = tuple(sorted({kubernetes_validate.utils.major_minor(v) for v in kubernetes_validate.utils.all_versions()},
                         key=lambda v: tuple(map(int, v.split(".")))))  # fmt: skip
_PATH = re.compile(r"/etc/baton/\S+")


_read_schema = functools.cache(kubernetes_validate.utils.schema_contents)


@pytest.fixture(autouse=True)
def schemas_read_once(monkeypatch):
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", _read_schema)


@pytest.mark.parametrize("version", [_OLDEST, *_VERSIONS[-3:]])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid_in_the_oldest_and_the_three_newest_kubernetes(overlay, version):
    for manifest in rendered(overlay):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_an_older_kubernetes_does_not_have_all_fields():
    """`preStop.sleep` sets the oldest version."""
    before = _VERSIONS[_VERSIONS.index(_OLDEST) - 2]  # 1.29 has the field behind a feature gate
    with pytest.raises(kubernetes_validate.ValidationError, match="sleep"):
        kubernetes_validate.validate(named("gpu", "Deployment", "baton-gateway"), before, strict=True)
    text = (KUBERNETES.parent / "README.md").read_text()
    assert set(re.findall(r"Kubernetes (1\.\d+) or newer", text)) == {_OLDEST}


def test_a_field_that_does_not_exist_is_found():
    manifest = dict(named("production", "Deployment", "baton-gateway"))
    manifest["spec"] = {**manifest["spec"], "replica": 3}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(manifest, _VERSIONS[-1], strict=True)


def test_every_component_is_in_an_overlay_or_a_variant():
    assert set().union(*map(components_of, _ALL)) == set(COMPONENTS)


@pytest.mark.parametrize("overlay", _ALL)
def test_only_the_listed_components_need_crds(overlay):
    unknown = {one["kind"] for one in rendered(overlay) if not _is_known(one)}
    assert unknown <= _CRD_KINDS
    assert bool(unknown) == bool(components_of(overlay) & set(CRD_COMPONENTS))
    assert not (unknown and overlay in OVERLAYS)


@pytest.mark.parametrize("overlay", _ALL)
def test_flags_are_the_services_own(overlay):
    for workload in services(overlay):
        config = _config_of(workload)
        assert config.log_format == "json"


def test_a_flag_that_does_not_exist_is_found():
    workload = named("gpu", "Deployment", "baton-gateway")
    with pytest.raises(settings.SettingsError, match="--rest-listne"):
        _parse("gateway", ["--rest-listne=0.0.0.0:8000", *arguments(workload)[1:]], {})


@pytest.mark.parametrize("overlay", _ALL)
def test_settings_of_the_fleet_arrive(overlay):
    """Counts are in test_autoscaling.py."""
    fleet = named(overlay, "ConfigMap", "baton-fleet")["data"]
    assert len(fleet) <= 15
    assert all(isinstance(value, str) for value in fleet.values())
    workers = [one for one in of_kind(overlay, "Deployment") if arguments(one)[0] == "worker"]
    assert workers
    for worker in workers:
        role = worker["metadata"]["name"].removeprefix("baton-worker-")
        assert f"--role={role}" in arguments(worker)
        assert f"--model={fleet['model']}" in arguments(worker)
        assert f"--transports={fleet['transports']}" in arguments(worker)
        assert container_of(worker)["image"] == fleet["workerImage"]
        if "gpuType" in fleet:
            assert pod_of(worker)["nodeSelector"] == {"nvidia.com/gpu.product": fleet["gpuType"]}
            assert container_of(worker)["resources"]["limits"]["nvidia.com/gpu"] == fleet["tensorParallelSize"]
            assert f"--tensor-parallel-size={fleet['tensorParallelSize']}" in arguments(worker)
            assert container_of(worker)["resources"]["limits"]["memory"] == fleet["workerMemory"]
            assert f"--host-cache-gb={fleet['hostCacheGb']}" in arguments(worker)
    gateway = named(overlay, "Deployment", "baton-gateway")
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
        assert pod["serviceAccountName"] == re.sub("-(prefill|decode|both)$", "", workload["metadata"]["name"])
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_fleet_moves_to_another_namespace_whole(overlay):
    moved = list(yaml.safe_load_all(kustomize(wrapped(overlay, "elsewhere"))))
    for one in moved:
        place = one["metadata"]["name"] if one["kind"] == "Namespace" else one["metadata"]["namespace"]
        assert place == "elsewhere"
        assert all(subject["namespace"] == "elsewhere" for subject in one.get("subjects", ()))
    # No argument or address contains a fixed namespace.
    assert not re.search(r"[.=/]baton(?![\w-])(?!/)", yaml.safe_dump([one.get("spec") for one in moved]))


def test_production_requires_tls_and_client_certificates():
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
