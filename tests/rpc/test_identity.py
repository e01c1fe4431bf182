"""Authorization by identity: the table is complete, and a peer's identity is its certificate's URI."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.envoy import external_auth_pb2
from baton.rpc.errors import InvalidRequest
from baton.rpc.identity.check import refusal
from baton.rpc.identity.identity import SERVICES, Identity, identity_of
from baton.rpc.identity.table import ACCEPTED, ANYBODY, accepted_by
from baton.rpc.server.reflection import METHOD, V1
from baton.v1 import (
    control_pb2,
    conversation_pb2,
    index_pb2,
    inference_pb2,
    kv_pb2,
    response_pb2,
    router_pb2,
    types_pb2,
    vectors_pb2,
    worker_pb2,
)

CONTRACT = (
    control_pb2,
    conversation_pb2,
    index_pb2,
    inference_pb2,
    kv_pb2,
    response_pb2,
    router_pb2,
    types_pb2,
    vectors_pb2,
    worker_pb2,
)


def methods_of(*modules):
    return {
        f"{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_the_table_names_every_method_of_the_contract_and_no_other():
    contract = methods_of(*CONTRACT, external_auth_pb2, health_pb2, reflection_pb2)
    assert set(ACCEPTED) == contract | {f"{V1}/{METHOD}"}  # v1 has no module of its own


def test_every_file_of_the_contract_is_looked_at():
    found = {path.stem for path in Path(worker_pb2.__file__).parent.glob("*_pb2.py")}
    assert found == {module.__name__.rpartition(".")[2] for module in CONTRACT}


def test_every_method_accepts_some_service_and_only_services():
    for method, accepted in ACCEPTED.items():
        assert accepted, method
        assert accepted is ANYBODY or accepted <= set(SERVICES), method


def test_only_clients_methods_are_for_anybody():
    assert {method for method, accepted in ACCEPTED.items() if accepted is ANYBODY} == methods_of(inference_pb2)


def test_an_unknown_method_accepts_no_client():
    assert accepted_by("/baton.v1.WorkerService/Whatever") == frozenset()
    context = {"peer_uri": [b"spiffe://baton/dev/operator/me"]}
    assert refusal(context, "dev", accepted_by("/x.Y/Z")).endswith("accepted: no service")


@pytest.mark.parametrize("service", SERVICES)
def test_an_identity_is_that_of_its_uri(service):
    identity = Identity("north-1", service, "Pod_7.a")
    assert identity_of(["https://elsewhere", identity.uri]) == identity
    assert identity.host_name == f"{service}.north-1.baton.internal"


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["spiffe://other/dev/worker/0"],
        ["spiffe://baton/dev/worker"],
        ["spiffe://baton/dev/worker/0/1"],
        ["spiffe://baton/dev/postman/0"],
        ["spiffe://baton/DEV/worker/0"],
        ["spiffe://baton/dev/worker/"],
        ["spiffe://baton//worker/0"],
        ["SPIFFE://BATON/dev/worker/0"],
        ["spiffe://baton/dev/worker/0", "spiffe://baton/dev/router/0"],
        ["spiffe://baton/dev/worker/0\n"],
    ],
)
def test_invalid_identities_are_refused(uris):
    assert identity_of(uris) is None
    assert refusal({"peer_uri": [uri.encode() for uri in uris]}, "dev", frozenset(SERVICES))


@pytest.mark.parametrize(
    "parts", [("", "worker", "a"), ("a b", "worker", "a"), ("a", "x", "a"), ("a", "worker", "a/b")]
)
def test_an_identity_with_a_wrong_part_is_an_error(parts):
    with pytest.raises(InvalidRequest):
        Identity(*parts)


def test_a_refusal_names_the_peer_and_the_accepted_services():
    context = {"peer_uri": [b"spiffe://baton/dev/worker/w-3"]}
    assert refusal(context, "dev", frozenset({"router", "kvstore"})) == (
        "the certificate shown is of spiffe://baton/dev/worker/w-3; "
        "accepted: spiffe://baton/dev/kvstore/*, spiffe://baton/dev/router/*"
    )
    assert refusal(context, "dev", frozenset({"worker"})) == ""


def test_another_fleets_worker_is_no_worker_here():
    assert "spiffe://baton/south/worker/0; accepted: spiffe://baton/north/worker/*" in refusal(
        {"peer_uri": [b"spiffe://baton/south/worker/0"]}, "north", frozenset({"worker"})
    )


def test_a_name_in_other_places_of_the_certificate_counts_for_nothing():
    context = {"x509_common_name": [b"spiffe://baton/dev/worker/0"], "peer_dns": [b"spiffe://baton/dev/worker/0"]}
    assert "a peer without a URI" in refusal(context, "dev", frozenset({"worker"}))
