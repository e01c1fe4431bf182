"""A tandem of real processes over mTLS: it serves, and refuses other clients."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from support.network.tls_rig import (
    EXPIRED,
    NOT_YET,
    contents_of,
    der_of,
    dial_as,
    files_of,
    make_certs,
    metrics_over_tls,
    replace_files,
    shown_by,
)
from support.processes.stack import metric, start_stack, wait_until
from support.processes.worker_harness import Stream, submit

from baton.rpc.channel import open_channel
from baton.rpc.errors import problem_of
from baton.rpc.identity.identity import GATEWAY, KVSTORE, OPERATOR, ROUTER, SERVICES, WORKER
from baton.rpc.identity.table import ACCEPTED
from baton.rpc.server.reflection import V1, V1ALPHA
from baton.rpc.server.server import RpcServer
from baton.rpc.tls.files import TlsFiles
from baton.services.certs.command import tls_flags
from baton.v1 import control_pb2, control_pb2_grpc, index_pb2, index_pb2_grpc, router_pb2, types_pb2, worker_pb2

CONNECT_SECONDS = 10.0
KV_BY_TCP = {"worker": ("--transports", "tcp")}  # by TLS, then
PROCESS_OF = {
    "baton.v1.RouterService": ROUTER,
    "baton.v1.RouterPeerService": ROUTER,
    "baton.v1.WorkerService": WORKER,
    "baton.v1.ControlService": WORKER,
    "baton.v1.IndexService": KVSTORE,
    "grpc.health.v1.Health": KVSTORE,
    V1: KVSTORE,
    V1ALPHA: KVSTORE,
}
DESCRIPTORS = {
    service.full_name: service
    for module in (control_pb2, index_pb2, router_pb2, worker_pb2, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}
DESCRIPTORS[V1] = DESCRIPTORS[V1ALPHA]  # but for the name
METHODS = [method for method in ACCEPTED if method.rpartition("/")[0] in PROCESS_OF]
# Of those that would change the stack for the other tests.
CONTROL, HARMLESS = "baton.v1.ControlService", ("GetStats", "StopProfile")
STORY = "Tell me a long story about a dog that lived by the river. " * 12


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def in_use(tmp_path_factory, certificates):
    """The folder that the stack reads: tests replace its files."""
    folder = tmp_path_factory.mktemp("in-use")
    for path in certificates.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def tandem(tmp_path_factory, in_use):
    with ExitStack() as cleanup:
        yield start_stack(tmp_path_factory.mktemp("stack"), cleanup, KV_BY_TCP, executor="sim", tls_dir=str(in_use))


def process(tandem, service):
    return tandem["worker-prefill-0" if service == WORKER else service]


def metrics_of(tandem, service):
    return metrics_over_tls(process(tandem, service).plan.metrics, Path(tandem.config.tls_dir), service)


async def stats_of(worker, certificates):
    async with dial_as(certificates, OPERATOR, WORKER)(worker.plan.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return await stub.GetStats(control_pb2.GetStatsRequest(), timeout=CONNECT_SECONDS, wait_for_ready=True)


async def outcome(channel, method, seconds=CONNECT_SECONDS):
    """The status of a call that sends one empty request. OK also where it goes on after the seconds."""
    service, _, name = method.rpartition("/")
    what = DESCRIPTORS[service].methods_by_name[name]
    ways = ("stream" if what.client_streaming else "unary", "stream" if what.server_streaming else "unary")
    call_method = getattr(channel, "_".join(ways))(f"/{method}")
    call = call_method() if what.client_streaming else call_method(b"")
    try:
        async with asyncio.timeout(seconds):
            if what.client_streaming:
                await call.write(b"")
            await (call.read() if what.server_streaming else call)
            return (await call.code(), await call.details()) if call.done() else (grpc.StatusCode.OK, "")
    except TimeoutError:
        assert seconds < CONNECT_SECONDS, f"no answer to {method}"
        return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    finally:
        call.cancel()


async def test_it_answers_and_hands_kv_over(tandem, certificates):
    answer = await asyncio.to_thread(tandem.chat, STORY, max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 8
    # Whether that went over the prefill worker was the router's to say: here it is said.
    decode, prefill = tandem["worker-decode-0"], tandem["worker-prefill-0"]
    before = (await stats_of(decode, certificates)).counters
    epoch = (await stats_of(prefill, certificates)).state.epoch
    peer = types_pb2.Endpoint(worker_id="prefill-0", epoch=epoch, address=prefill.plan.address)
    async with dial_as(certificates, GATEWAY, WORKER)(decode.plan.address) as channel:
        stream = Stream(channel)
        (slot,) = await stream.generate(submit(1, list(range(2, 202)), 4, prefill=peer))
        stream.call.cancel()
    assert (len(slot.tokens), slot.failure) == (4, None)
    after = (await stats_of(decode, certificates)).counters
    assert after.num_transfers == before.num_transfers + 1
    assert after.transfers.num_strangers == after.num_failed_transfers == 0


@pytest.mark.parametrize("service", SERVICES)
async def test_every_method_accepts_only_the_tables_clients(tandem, certificates, service):
    channels = {
        target: dial_as(certificates, service, target)(process(tandem, target).plan.address)
        for target in set(PROCESS_OF.values())
    }
    try:
        for method in METHODS:
            accepted = service in ACCEPTED[method]
            of_service, _, name = method.rpartition("/")
            if accepted and of_service == CONTROL and name not in HARMLESS:
                continue
            channel = channels[PROCESS_OF[of_service]]
            code, details = await outcome(channel, method, 0.5 if accepted else CONNECT_SECONDS)
            assert (code is not grpc.StatusCode.PERMISSION_DENIED) is accepted, (method, code, details)
            assert code is not grpc.StatusCode.UNAVAILABLE or accepted, (method, details)
            if not accepted:
                assert f"of spiffe://baton/dev/{service}/default; accepted: spiffe://baton/dev/" in details
    finally:
        for channel in channels.values():
            await channel.close()


async def test_a_refusal_is_counted_by_method(tandem, certificates):
    name, labels = "baton_rpc_refused_peers_total", {"method": "/baton.v1.IndexService/Publish"}
    before = metric(metrics_of(tandem, KVSTORE), name, **labels)
    async with dial_as(certificates, ROUTER, KVSTORE)(tandem[KVSTORE].plan.address) as channel:
        code, _ = await outcome(channel, "baton.v1.IndexService/Publish")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert metric(metrics_of(tandem, KVSTORE), name, **labels) == before + 1
    assert metric(metrics_of(tandem, KVSTORE), "baton_tls_certificate_expires_seconds", set="tls") > 1e9


# Handshakes.


async def why_not(channel):
    """Why a call on a channel fails, in words."""
    stub = index_pb2_grpc.IndexServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Watch(index_pb2.WatchRequest(), timeout=CONNECT_SECONDS).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return problem_of(caught.value)


def shows(files, towards=KVSTORE, fleet="dev"):
    """Opens channels that show files without a look at them, as a client that is not ours would."""

    def dial(address):
        found = contents_of(files)
        credentials = grpc.ssl_channel_credentials(found["tls_ca"], found.get("tls_key"), found.get("tls_certificate"))
        name = (("grpc.ssl_target_name_override", f"{towards}.{fleet}.baton.internal"),)
        return grpc.aio.secure_channel(address, credentials, options=name)

    return dial


@pytest.mark.parametrize(
    ("wrong", "logged"),
    [
        ("of another CA", "CERTIFICATE_VERIFY_FAILED"),
        ("expired", "certificate has expired"),
        ("not yet valid", "certificate is not yet valid"),
        ("none", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("plain text", "WRONG_VERSION_NUMBER"),
    ],
)
async def test_a_client_with_a_wrong_certificate_is_turned_away(tandem, certificates, tmp_path, wrong, logged):
    kvstore = tandem[KVSTORE]
    made = {
        "of another CA": lambda: files_of(make_certs(tmp_path / "x"), ROUTER, certificates),
        "expired": lambda: files_of(make_certs(tmp_path / "x", certificates, **EXPIRED), ROUTER),
        "not yet valid": lambda: files_of(make_certs(tmp_path / "x", certificates, **NOT_YET), ROUTER),
        "none": lambda: TlsFiles("", "", str(certificates / "ca.crt")),
    }
    dial = open_channel if wrong == "plain text" else shows(made[wrong]())
    seen = len(kvstore.log())
    async with dial(kvstore.plan.address) as channel:
        problem = await why_not(channel)
    assert "it wants TLS and got plain text, or does not accept the certificate shown; its log says which" in problem
    await asyncio.to_thread(wait_until, lambda: logged in kvstore.log()[seen:], f"the kvstore logs {logged}")


async def test_a_client_that_trusts_another_ca_reports_it(tandem, tmp_path):
    async with dial_as(make_certs(tmp_path), ROUTER, KVSTORE)(tandem[KVSTORE].plan.address) as channel:
        problem = await why_not(channel)
    assert "CERTIFICATE_VERIFY_FAILED" in problem
    assert "its certificate is not accepted here" in problem


async def test_a_server_of_another_service_or_fleet_is_not_talked_to(tandem, certificates, tmp_path):
    async with dial_as(certificates, ROUTER, KVSTORE)(tandem["worker-decode-0"].plan.address) as channel:
        assert "its certificate is of another service or another fleet than expected" in await why_not(channel)
    south = make_certs(tmp_path / "south", certificates, fleet="south")
    async with dial_as(south, ROUTER, KVSTORE)(tandem[KVSTORE].plan.address) as channel:
        assert "its certificate is of another service or another fleet than expected" in await why_not(channel)


@pytest.mark.parametrize(
    ("when", "told"), [(EXPIRED, "certificate has expired"), (NOT_YET, "certificate is not yet valid")]
)
async def test_a_server_out_of_its_time_is_not_talked_to(certificates, tmp_path, when, told):
    certificate, key, ca = contents_of(files_of(make_certs(tmp_path, certificates, **when), KVSTORE)).values()
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], ca, True))
    await server.start()
    async with dial_as(certificates, ROUTER, KVSTORE)(f"127.0.0.1:{port}") as channel:
        assert told in await why_not(channel)
    await server.stop(None)


async def test_a_server_of_plain_text_is_not_talked_to(certificates):
    dial = dial_as(certificates, ROUTER, KVSTORE)
    async with RpcServer("127.0.0.1:0", []) as server, dial(f"127.0.0.1:{server.port}") as channel:
        assert "it serves plain text, but TLS is required here" in await why_not(channel)


@pytest.mark.parametrize("wrong", ["expired", "another service's"])
async def test_a_service_does_not_start_with_a_wrong_certificate(certificates, tmp_path, wrong):
    folder = make_certs(tmp_path / "x", certificates, **(EXPIRED if wrong == "expired" else {}))
    flags = tls_flags(str(folder), KVSTORE if wrong == "expired" else ROUTER)
    words = ("-m", "baton.services.cli", "kvstore", "--listen", "127.0.0.1:0", "--store", "memory", *flags)
    started = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        _, errors = await started.communicate()
    assert started.returncode == 2
    told = "certificate has expired" if wrong == "expired" else "router/default; here it must be that of a kvstore"
    assert told in errors.decode()
    assert "--tls-certificate=" in errors.decode()


# Reloads. Last: they change what the stack shows.


async def test_new_files_are_used_by_new_connections_and_a_stream_continues(tandem, certificates, in_use, tmp_path):
    worker = tandem["worker-decode-0"]
    dial = dial_as(certificates, ROUTER, WORKER)
    async with dial(worker.plan.address) as channel:
        call = channel.unary_stream("/baton.v1.WorkerService/WatchState")(b"")
        async with asyncio.timeout(CONNECT_SECONDS):
            await call.read()
        chat = asyncio.create_task(asyncio.to_thread(tandem.chat, STORY, max_tokens=200, ignore_eos=True))
        new = make_certs(tmp_path / "new", certificates)
        replace_files(in_use, new, *SERVICES)
        shown = await asyncio.to_thread(shown_by, worker.plan.address, certificates)
        assert shown == der_of(new, WORKER) != der_of(certificates, WORKER)
        assert (await chat)["usage"]["completion_tokens"] == 200
        async with asyncio.timeout(CONNECT_SECONDS):
            assert await call.read()
        call.cancel()
    assert metric(metrics_of(tandem, WORKER), "baton_tls_reloads_total", result="used") >= 1
    # The gateway, the router and the workers still find each other when every connection is a new one.
    tandem[ROUTER].kill()
    tandem[ROUTER].start()
    answer = await asyncio.to_thread(tandem.chat, "Again.", max_tokens=4)
    assert answer["usage"]["completion_tokens"] > 0


async def test_torn_files_are_passed_over_logged_and_counted(tandem, certificates, in_use):
    kvstore = tandem[KVSTORE]
    address = kvstore.plan.address
    before = await asyncio.to_thread(shown_by, address, certificates)
    good = (in_use / "kvstore.crt").read_bytes()
    (in_use / "kvstore.crt").write_bytes(good[:100])
    try:
        assert await asyncio.to_thread(shown_by, address, certificates) == before
        logged = "cannot use the new TLS files, keeping the old ones"
        await asyncio.to_thread(wait_until, lambda: logged in kvstore.log(), f"the kvstore logs {logged}")
        assert metric(metrics_of(tandem, KVSTORE), "baton_tls_reloads_total", result="refused") >= 1
    finally:
        (in_use / "kvstore.crt").write_bytes(good)
    assert await asyncio.to_thread(shown_by, address, certificates) == before
