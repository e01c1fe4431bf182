"""The gateway's ports over TLS for clients without certificates, in one process without other services."""

from __future__ import annotations

import http.client
import socket
import ssl
from contextlib import closing

import grpc
import pytest
from support.network.tls_rig import EXPIRED, der_of, make_certs, replace_files
from support.processes import ports
from support.processes.stack import MODEL, Service, metric, planned_services, wait_until

from baton.services.settings import SettingsError
from baton.services.up import tandem
from baton.services.up.config import UpConfig
from baton.v1 import inference_pb2, inference_pb2_grpc


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, certificates):
    config = UpConfig(tls_dir=str(certificates), tls_edge=True, rest_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0")
    config = tandem.check_listen_addresses(config, ports.free_ports)
    (plan, *_) = planned_services(config, str(MODEL))
    service = Service(plan, tmp_path_factory.mktemp("log") / "gateway.log")
    service.spawn()
    try:
        wait_until(lambda: "listening" in service.log() or service.process.poll() is not None, "listening", 60)
        assert service.process.poll() is None, service.log_tail()
        yield service
    finally:
        service.stop_by_force()


def trusting(folder):
    return ssl.create_default_context(cafile=str(folder / "ca.crt"))


def connected(gateway, context):
    host, _, port = gateway.plan.probe_address.rpartition(":")
    return http.client.HTTPSConnection(host, int(port), timeout=10, context=context)


def get(connection, path):
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_rest_is_served_without_a_client_certificate(gateway, certificates):
    with closing(connected(gateway, trusting(certificates))) as connection:
        status, body = get(connection, "/metrics")
        assert connection.sock.version() in ("TLSv1.2", "TLSv1.3")
    assert status == 200
    assert {
        metric(body, "baton_tls_certificate_expires_seconds", set=one) > 1e9 for one in ("rest_tls", "grpc_tls")
    } == {True}


def test_clients_can_verify_the_gateway(gateway, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError):
        get(connected(gateway, trusting(make_certs(tmp_path))), "/metrics")


def test_plain_text_is_not_served_and_fails_at_once(gateway):
    host, _, port = gateway.plan.probe_address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    with closing(connection), pytest.raises((http.client.BadStatusLine, ConnectionError)):
        get(connection, "/metrics")


def test_old_versions_of_tls_are_not_spoken(gateway, certificates):
    context = trusting(certificates)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        get(connected(gateway, context), "/metrics")


def test_a_silent_client_affects_no_other(gateway, certificates):
    host, _, port = gateway.plan.probe_address.rpartition(":")
    other = connected(gateway, trusting(certificates))
    with socket.create_connection((host, int(port))), closing(other):
        assert get(other, "/metrics")[0] == 200


def test_grpc_is_served_without_a_client_certificate(gateway, certificates):
    credentials = grpc.ssl_channel_credentials((certificates / "ca.crt").read_bytes())
    with grpc.secure_channel(gateway.plan.address, credentials) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10) is not None


def test_new_files_are_shown_to_new_connections_on_both_ports(gateway, certificates, tmp_path):
    def shown(address, protocol):
        context = trusting(certificates)
        context.set_alpn_protocols([protocol])
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=10)
        with plain, context.wrap_socket(plain, server_hostname=host) as connection:
            return connection.getpeercert(binary_form=True)

    def shown_by_both():
        return {shown(gateway.plan.probe_address, "http/1.1"), shown(gateway.plan.address, "h2")}

    with closing(connected(gateway, trusting(certificates))) as old:
        assert get(old, "/metrics")[0] == 200
        assert shown_by_both() == {der_of(certificates, "edge")}
        new = make_certs(tmp_path / "new", certificates, services=("edge",))
        replace_files(certificates, new, "edge")
        assert shown_by_both() == {der_of(new, "edge")}
        replace_files(
            certificates, make_certs(tmp_path / "expired", certificates, services=("edge",), **EXPIRED), "edge"
        )
        assert shown_by_both() == {der_of(new, "edge")}
        status, body = get(old, "/metrics")
    assert status == 200
    assert metric(body, "baton_tls_reloads_total", set="rest_tls", result="used") == 1
    assert metric(body, "baton_tls_reloads_total", set="rest_tls", result="refused") >= 1


def test_up_reports_missing_files_of_a_folder(tmp_path):
    with pytest.raises(SettingsError, match="--tls-edge needs --tls-dir"):
        tandem.plan_tls(UpConfig(tls_edge=True))
    with pytest.raises(SettingsError, match=r"operator\.crt cannot be read: No such file"):
        tandem.plan_tls(UpConfig(tls_dir=str(tmp_path)))
