"""`baton doctor kubernetes` against the small API server: namespaces as overlays promise them, and others."""

from __future__ import annotations

import json

import pytest
import yaml
from support.kubernetes.api_server import api_server_thread
from support.kubernetes.deploy_tools import ROOT
from support.kubernetes.manifests import OVERLAYS
from support.kubernetes.namespace import Namespace

from baton.services import cli
from baton.services.doctor.cluster.promises import MINIMUM_VERSION


@pytest.fixture(scope="module")
def server():
    with api_server_thread(token="secret") as (api, call):
        yield api, call


@pytest.fixture
def doctor(server, tmp_path, capsys):
    """Examines a namespace; returns (exit code, findings that are not well as {(topic, level): [text]})."""
    api, call = server
    (tmp_path / "token").write_text("secret\n")

    def examine(namespace, *flags, token="token"):
        call(namespace.serve, api)
        api.requests.clear()
        words = ["--kubernetes-api", f"http://127.0.0.1:{api.port}", "--token-file", str(tmp_path / token)]
        code = cli.main(["doctor", "kubernetes", "--json", "--quiet", *words, *flags], {})
        report = json.loads(capsys.readouterr().out)
        found = {}
        for one in report["findings"]:
            found.setdefault((one["topic"], one["level"]), []).append(one["what"])
            assert one["fix"], one
        return code, found

    examine.api = api
    return examine


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_namespace_as_its_overlay_promises_has_no_finding(doctor, overlay):
    code, found = doctor(Namespace(overlay))
    assert (code, found) == (0, {})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_and_so_it_is_with_the_overlay_named(doctor, overlay):
    code, found = doctor(Namespace(overlay), "--overlay", overlay)
    assert (code, found) == (0, {})


def _old(one):
    one.version = "v1.29.4"


def _no_router(one):
    one.delete("StatefulSet", "baton-router")


def _no_decoder(one):
    one.delete("Deployment", "baton-worker-decode")


def _no_secret(one):
    one.delete("Secret", "baton-api-keys")


def _no_claim(one):
    one.delete("PersistentVolumeClaim", "baton-models")


def _no_class(one):
    one.objects["StorageClass"].clear()


def _class_of_another_name(one):
    template = one.workload("baton-redis")["spec"]["volumeClaimTemplates"][0]
    template["spec"]["storageClassName"] = "fast"


def _no_account(one):
    one.delete("ServiceAccount", "baton-worker")


def _scaled_by_hand(one):
    one.workload("baton-worker-decode")["spec"]["replicas"] = 40
    one.workload("baton-worker-decode")["status"]["readyReplicas"] = 40


def _count_of_none(one):
    one.find("ConfigMap", "baton-fleet")["data"]["decodeWorkers"] = "0"


def _crash_loop(one):
    one.workload("baton-worker-decode")["status"] = {}


def _one_not_ready(one):
    workload = one.workload("baton-router")
    workload["status"] = {"readyReplicas": workload["spec"]["replicas"] - 1}


def _no_shedding(one):
    one.container("baton-router")["args"].remove("--shed")


def _drain_beyond_grace(one):
    one.container("baton-worker-decode")["args"].append("--drain-timeout=600")


def _plain_gateway(one):
    container = one.container("baton-gateway")
    container["args"] = [word for word in container["args"] if not word.startswith("--tls-")]


def _kv_in_the_clear(one):
    one.container("baton-worker-decode")["args"].remove("--kv-plain")


def _other_image(one):
    one.container("baton-router")["image"] = "baton-control:of-last-year"


def _other_model(one):
    variables = one.container("baton-worker-decode")["env"]
    next(value for value in variables if value["name"] == "MODEL")["value"] = "/models/another"


def _other_port(one):
    one.find("Service", "baton-router")["spec"]["ports"][0]["port"] = 8201


def _port_of_nothing(one):
    one.find("Service", "baton-router")["spec"]["ports"][0]["targetPort"] = "grpcs"


def _with_an_address(one):
    one.find("Service", "baton-worker")["spec"]["clusterIP"] = "10.96.0.9"


def _selects_nothing(one):
    one.find("Service", "baton-kvstore")["spec"]["selector"] = {"app": "kvstore"}


def _no_service(one):
    one.delete("Service", "baton-gateway")


def _nothing_ready(one):
    found = next(item for item in one.objects["EndpointSlice"] if item["metadata"]["name"] == "baton-worker-x")
    found["endpoints"][0]["conditions"] = {"ready": False}


def _no_binding(one):
    one.objects["RoleBinding"].clear()


def _role_without_watch(one):
    one.find("Role", "baton-router")["rules"][0]["verbs"] = ["list"]


def _no_metrics_api(one):
    one.groups.discard("custom.metrics.k8s.io")


@pytest.mark.parametrize(
    ("change", "topic", "level", "text"),
    [
        (_old, "cluster", "failed", "v1.29.4 is older than 1.30"),
        (_no_metrics_api, "cluster", "warning", "custom.metrics.k8s.io"),
        (_no_router, "counts", "failed", "there is no baton-router"),
        (_no_decoder, "counts", "failed", "nothing decodes"),
        (_scaled_by_hand, "counts", "failed", "40 replicas"),
        (_count_of_none, "counts", "failed", "decodeWorkers=0"),
        (_crash_loop, "counts", "failed", "baton-worker-decode: 0 of"),
        (_one_not_ready, "counts", "warning", "baton-router: 1 of 2 pods"),
        (_no_shedding, "arguments", "failed", "baton-router lacks --shed"),
        (_drain_beyond_grace, "arguments", "failed", "--drain-timeout=600"),
        (_plain_gateway, "arguments", "failed", "baton-gateway has no --tls-certificate"),
        (_kv_in_the_clear, "arguments", "failed", "without --kv-plain"),
        (_other_image, "arguments", "failed", "of-last-year"),
        (_other_model, "arguments", "failed", "/models/another"),
        (_no_secret, "references", "failed", "Secret baton-api-keys is missing; baton-gateway"),
        (_no_claim, "references", "failed", "PersistentVolumeClaim baton-models is missing"),
        (_no_class, "references", "failed", "no default one"),
        (_class_of_another_name, "references", "failed", "StorageClass fast is missing"),
        (_no_account, "references", "failed", "ServiceAccount baton-worker is missing"),
        (_other_port, "services", "failed", "grpc 8201, and grpc 8200 is promised"),
        (_port_of_nothing, "services", "failed", "'grpcs'"),
        (_with_an_address, "services", "failed", "clusterIP '10.96.0.9'"),
        (_selects_nothing, "services", "failed", "no workload has such pods"),
        (_no_service, "services", "failed", "Service baton-gateway is missing"),
        (_nothing_ready, "services", "warning", "none of them ready"),
        (_no_binding, "rights", "failed", "no Role lets the ServiceAccount baton-router"),
        (_role_without_watch, "rights", "failed", "no Role lets the ServiceAccount baton-router"),
    ],
)
def test_differences_from_the_promises_are_named(doctor, change, topic, level, text):
    namespace = Namespace("production")
    change(namespace)
    code, found = doctor(namespace)
    assert any(text in what for what in found.get((topic, level), ())), found
    assert code == (1 if level == "failed" else 0)
    assert {topic for topic, _ in found} == {topic}, "and nothing else is"


@pytest.mark.parametrize("kind", ["Secret", "StorageClass", "Deployment", "EndpointSlice", "Role"])
def test_a_forbidden_read_is_named_as_such_and_nothing_is_judged_by_it(doctor, kind):
    namespace = Namespace("production")
    namespace.refusals[kind] = 403
    code, found = doctor(namespace)
    assert list(found) == [("rights", "unknown")]
    (what,) = found["rights", "unknown"]
    assert kind in what
    assert "403" in what
    assert code == 0


def test_a_crd_that_a_named_component_needs_is_missing(doctor):
    namespace = Namespace("production")
    code, found = doctor(namespace, "--components", "keda,gateway-api")
    assert code == 1
    assert len(found["cluster", "failed"]) == 2
    assert "ScaledObject of keda.sh, a CRD" in found["cluster", "failed"][0]
    namespace.groups |= {"gateway.networking.k8s.io", "keda.sh"}
    assert doctor(namespace, "--components", "keda,gateway-api") == (0, {})


def test_an_overlay_that_is_named_is_the_one_that_counts(doctor):
    code, found = doctor(Namespace("gpu"), "--overlay", "production")
    assert code == 1
    assert any("--shed" in what for what in found["arguments", "failed"])


def test_an_empty_namespace_is_no_fleet(doctor):
    code, found = doctor(Namespace("cpu-demo"), "--namespace", "elsewhere")
    assert code == 1
    assert any("there is no baton-gateway in the namespace elsewhere" in what for what in found["counts", "failed"])


def test_an_odd_object_is_a_finding_not_a_traceback(doctor):
    namespace = Namespace("gpu")
    namespace.find("Service", "baton-router")["spec"]["ports"] = 7
    _, found = doctor(namespace)
    assert found["services", "unknown"]


def test_it_only_reads_and_asks_for_no_secret_s_data(doctor, monkeypatch):
    heads = []
    original = type(doctor.api)._answer_one

    async def keep(self, head, writer):
        heads.append(head)
        await original(self, head, writer)

    monkeypatch.setattr(type(doctor.api), "_answer_one", keep)
    doctor(Namespace("production"))
    assert len(heads) > 10
    assert {head.split()[0] for head in heads} == {"GET"}
    for head in heads:
        assert "/secrets" not in head or "as=partialobjectmetadatalist" in head.lower()


def test_a_token_that_is_not_taken(doctor, tmp_path):
    (tmp_path / "old").write_text("old")
    code, found = doctor(Namespace("gpu"), token="old")
    assert code == 1
    assert "(401)" in found["rights", "failed"][0]


def test_a_server_that_is_not_there(capsys):
    flags = ["--kubernetes-api", "http://127.0.0.1:9", "--look-timeout", "2"]
    assert cli.main(["doctor", "kubernetes", *flags], {}) == 1
    assert "--kubeconfig FILE" in capsys.readouterr().out


def test_a_kubeconfig_names_server_and_token(doctor, tmp_path, capsys):
    doctor(Namespace("gpu"))
    users = [{"name": "u", "user": {"token": "secret"}}, {"name": "v", "user": {"token": "wrong"}}]
    file = tmp_path / "config"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "good",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{doctor.api.port}"}}],
                "users": users,
                "contexts": [
                    {"name": "good", "context": {"cluster": "c", "user": "u"}},
                    {"name": "bad", "context": {"cluster": "c", "user": "v"}},
                ],
            }
        )
    )
    assert cli.main(["doctor", "kubernetes", "--kubeconfig", str(file)], {}) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert cli.main(["doctor", "kubernetes", "--context", "bad"], {"KUBECONFIG": str(file)}) == 1
    assert "(401)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--kubeconfig", "/no/such/file"], "/no/such/file"),
        (["--kubernetes-api", "ftp://x"], "http://host or https://host"),
        (["--kubernetes-api", "http://x", "--token-file", "/no/token"], "--token-file=/no/token"),
        (["--kubernetes-api", "http://x", "--kubeconfig", "y"], "both given"),
        (["--overlay", "staging"], "cpu-demo, gpu, aggregated, production"),
        (["--components", "istio"], "keda, pod-monitors, gateway-api"),
        (["--namespace", ""], "empty"),
        ([], "no cluster is named"),
    ],
)
def test_settings_that_cannot_be_are_named(flags, text, capsys):
    assert cli.main(["doctor", "kubernetes", *flags], {"HOME": "/nonexistent"}) == 2
    assert text in capsys.readouterr().err


def test_the_page_names_the_oldest_cluster():
    page = (ROOT / "deploy" / "README.md").read_text()
    assert f"Kubernetes {MINIMUM_VERSION[0]}.{MINIMUM_VERSION[1]} or newer" in page
