"""Server reflection, in both of its versions and with an unchanged client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.network.tls_rig import dial_as, make_certs, tls_of
from support.processes.loop_stalls import loop_stalls

from baton.rpc.identity.identity import OPERATOR, ROUTER, WORKER
from baton.rpc.server.reflection import MAX_REQUEST_BYTES, METHOD, V1, V1ALPHA
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import router_pb2, router_pb2_grpc

BUF = Path(__file__).parents[3] / ".venv" / "bin" / "buf"
ROUTER_SERVICE = "baton.v1.RouterService"
VERSIONS = (V1, V1ALPHA)


class Router(router_pb2_grpc.RouterServiceServicer):
    async def Explain(self, request, context):  # noqa: N802
        return router_pb2.ExplainResponse()


def server(tls=None):
    service = Service(ROUTER_SERVICE, Router(), router_pb2_grpc.add_RouterServiceServicer_to_server)
    return RpcServer("127.0.0.1:0", [service], tls=tls)


async def ask(channel, version, **fields):
    method = channel.stream_stream(
        f"/{version}/{METHOD}",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(timeout=10)
    await call.write(reflection_pb2.ServerReflectionRequest(**fields))
    await call.done_writing()
    return await call.read()


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_service_is_listed(version):
    async with server() as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        answer = await ask(channel, version, list_services="")
    names = {service.name for service in answer.list_services_response.service}
    assert names == {ROUTER_SERVICE, "grpc.health.v1.Health", *VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_listed_service_is_described(version):
    async with server() as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        listed = (await ask(channel, version, list_services="")).list_services_response.service
        for service in listed:
            answer = await ask(channel, version, file_containing_symbol=service.name)
            files = map(
                descriptor_pb2.FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto
            )
            assert service.name in {f"{file.package}.{one.name}" for file in files for one in file.service}
        unknown = await ask(channel, version, file_containing_symbol="baton.v1.Nothing")
        number = grpc.StatusCode.NOT_FOUND.value[0]
        assert unknown.error_response.error_code == number
        extensions = await ask(channel, version, all_extension_numbers_of_type=f"{V1.rpartition('.')[0]}.ErrorResponse")
        assert not extensions.all_extension_numbers_response.extension_number


async def test_v1_describes_itself_in_its_own_package():
    async with server() as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        answer = await ask(channel, V1, file_by_filename="grpc/reflection/v1/reflection.proto")
    (data,) = answer.file_descriptor_response.file_descriptor_proto
    assert b"grpc.reflection.v1.ServerReflectionRequest" in data
    assert b"v1alpha" not in data


@pytest.mark.parametrize("version", VERSIONS)
async def test_services_certificates_do_not_open_it_and_operators_do(tmp_path, version):
    folder = make_certs(tmp_path)
    async with server(tls_of(folder, ROUTER)) as running:
        async with dial_as(folder, OPERATOR, ROUTER)(f"127.0.0.1:{running.port}") as channel:
            assert (await ask(channel, version, list_services="")).list_services_response.service
        async with dial_as(folder, WORKER, ROUTER)(f"127.0.0.1:{running.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await ask(channel, version, list_services="")
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")
@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl_calls_a_method_by_reflection(protocol):
    async with server() as running:
        url = f"http://127.0.0.1:{running.port}/{ROUTER_SERVICE}/Explain"
        flags = ("--protocol", "grpc", "--http2-prior-knowledge", "--reflect", "--reflect-protocol", protocol)
        process = await asyncio.create_subprocess_exec(
            str(BUF), "curl", *flags, "-d", "{}", url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert json.loads(out) == {}


EMPTY_EXTENSION = b"\x2a\x00"  # field 5 of the request: each is a message to parse


@pytest.mark.parametrize(
    "data",
    [EMPTY_EXTENSION * 8_000_000, b"\x1a\x80\x80\x80\x06" + b"a" * (12 << 20), EMPTY_EXTENSION * MAX_REQUEST_BYTES],
    ids=["fields", "name", "just too large"],
)
async def test_a_large_request_is_not_read(data):
    async with server() as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        async with loop_stalls() as stalls:
            call = channel.stream_stream(f"/{V1}/{METHOD}")(timeout=10)
            await call.write(data)
            await call.done_writing()
            answer = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
        assert answer.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert answer.ByteSize() < 1000
        assert stalls.longest < 0.05
