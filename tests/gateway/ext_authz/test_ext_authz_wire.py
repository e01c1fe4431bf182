"""Baton's part of Envoy's messages is Envoy's: names, numbers, types and bytes, compared with xds-protos, the whole."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.network import envoy

from baton.envoy import external_auth_pb2, header_value_pb2, http_status_pb2
from baton.gateway.access.errors import Unauthenticated
from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.ext_authz.answers import allowed, denied, public
from baton.gateway.ext_authz.rules import RequestHead

ORACLE = Path(__file__).with_name("xds_oracle.py")
FILES = [module.DESCRIPTOR for module in (external_auth_pb2, header_value_pb2, http_status_pb2)]
# Envoy has google.rpc.Status there, which googleapis-common-protos has here too.
OWN_STATUS = "envoy.service.auth.v3.Status"
REST = RequestHead("POST", "/v1/chat/completions", {"x-request-id": "r-1"})
GRPC = RequestHead("POST", "/baton.v1.InferenceService/Generate", {"content-type": "application/grpc"})


def oracle(*words: str, data: bytes = b"") -> bytes:
    ended = subprocess.run([str(envoy.xds_python()), str(ORACLE), *words], input=data, capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


def nested(messages):
    for message in messages:
        yield message
        yield from nested(message.nested_types)


MESSAGES = [message for file in FILES for message in nested(file.message_types_by_name.values())]
ENUMS = [enum for file in FILES for enum in file.enum_types_by_name.values()]
ENUMS += [enum for message in MESSAGES for enum in message.enum_types]


@pytest.fixture(scope="module")
def theirs():
    return json.loads(oracle("describe"))


def test_every_field_is_envoys(theirs):
    fields = [field for message in MESSAGES if message.full_name != OWN_STATUS for field in message.fields]
    assert len(fields) > 15
    for field in fields:
        kind = field.message_type or field.enum_type
        name = kind.full_name if kind else ""
        ours = [field.number, field.type, field.is_repeated, "google.rpc.Status" if name == OWN_STATUS else name]
        assert theirs["fields"][field.full_name] == ours, field.full_name


def test_every_value_of_an_enum_is_envoys(theirs):
    for enum in ENUMS:
        for value in enum.values:
            assert theirs["values"][f"{enum.full_name}.{value.name}"] == value.number


def test_the_method_is_envoys(theirs):
    (service,) = FILES[0].services_by_name.values()
    for method in service.methods:
        assert theirs["methods"][method.full_name] == [method.input_type.full_name, method.output_type.full_name]


def test_envoys_request_is_decoded_and_unknown_fields_are_skipped():
    http = {"method": "POST", "path": "/v1/x?y=1", "headers": {"authorization": "Bearer k"}, "host": "h", "size": "7"}
    request = {"attributes": {"request": {"http": http, "time": "2026-01-01T00:00:00Z"}, "source": {"service": "s"}}}
    data = oracle("build", "CheckRequest", data=json.dumps(request).encode())
    read = external_auth_pb2.CheckRequest.FromString(data).attributes.request.http
    assert (read.method, read.path, dict(read.headers)) == ("POST", "/v1/x?y=1", {"authorization": "Bearer k"})
    # What was skipped is not lost either.
    assert (
        json.loads(
            oracle("parse", "CheckRequest", data=external_auth_pb2.CheckRequest.FromString(data).SerializeToString())
        )
        == request
    )


def option(name, value):
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def parsed(response):
    return json.loads(oracle("parse", "CheckResponse", data=response.SerializeToString()))


def test_allowed_responses_are_decoded_by_envoy():
    answer = parsed(allowed(Identity(Tenant("acme"), key_id="abc")))
    assert answer == {
        "status": {},
        "ok_response": {"headers": [option("x-baton-tenant", "acme"), option("x-baton-key-id", "abc")]},
    }
    assert parsed(public()) == {
        "status": {},
        "ok_response": {"headers_to_remove": ["x-baton-tenant", "x-baton-key-id"]},
    }


def test_denied_responses_are_decoded_by_envoy():
    answer = parsed(denied(REST, Unauthenticated("No.", "missing"), {}))
    refusal = answer["denied_response"]
    assert answer["status"] == {"code": 16}
    assert refusal["status"] == {"code": "Unauthorized"}
    assert json.loads(refusal["body"])["error"]["message"] == "No."
    assert option("www-authenticate", "Bearer") in refusal["headers"]
    grpc_answer = parsed(denied(GRPC, Unauthenticated("No.", "missing"), {}))["denied_response"]
    assert grpc_answer["body"] == "No."
    assert option("grpc-status", "16") in grpc_answer["headers"]
