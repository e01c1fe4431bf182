"""The server against real gRPC clients, and against clients that break the protocol."""

import asyncio
import contextlib

import grpc
import hpack
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from kvstore_node import eventually

from baton.router.http2 import connection as connections
from baton.router.http2 import frames
from baton.router.http2.frames import frame
from baton.router.http2.server import Http2Server
from baton.rpc.channel import open_channel
from baton.rpc.errors import NoCapacity, Unavailable
from baton.rpc.server import Service
from baton.v1 import router_pb2, router_pb2_grpc, types_pb2

NAME = "baton.v1.RouterService"


class Servicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(self):
        self.cancelled = asyncio.Event()
        self.running = asyncio.Event()
        self.big = 0

    def place(self, request):
        if request.request_id == "full":
            raise NoCapacity("every queue is full", retry_after_ms=700)
        if request.request_id == "defect":
            raise ZeroDivisionError
        return router_pb2.PlaceResponse(
            placement_id=len(request.block_hashes), decode=types_pb2.Endpoint(worker_id="w" * self.big)
        )

    async def Explain(self, request, context):  # noqa: N802
        self.running.set()
        try:
            if request.request_id == "metadata":
                return router_pb2.ExplainResponse(
                    request=router_pb2.PlaceRequest(request_id=dict(context.invocation_metadata())["x-key"])
                )
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def WatchModels(self, request, context):  # noqa: N802
        for number in range(self.big or 3):
            yield router_pb2.WatchModelsResponse(models=[types_pb2.ModelInfo(name=f"m{number}", digest=b"x" * 1000)])


@pytest.fixture
async def served():
    servicer = Servicer()
    service = Service(NAME, servicer, router_pb2_grpc.add_RouterServiceServicer_to_server)
    async with Http2Server("127.0.0.1:0", [service], 0.5, {f"/{NAME}/Place": servicer.place}) as server:
        channel = open_channel(f"127.0.0.1:{server.port}")
        # A client gives up on a connection after 100 ms, and client and server share this thread.
        async with asyncio.timeout(10):
            await channel.channel_ready()
        server.servicer, server.channel = servicer, channel
        server.stub = router_pb2_grpc.RouterServiceStub(channel)
        yield server
        await channel.close()


# With a real client.


async def test_many_calls_at_once_each_get_their_answer(served):
    calls = [served.stub.Place(router_pb2.PlaceRequest(block_hashes=bytes(size)), timeout=10) for size in range(500)]
    assert [(await call).placement_id for call in calls] == list(range(500))


@pytest.mark.parametrize("size", [16_384, 65_536, 1_000_000, 15_000_000])
async def test_large_requests_are_taken(served, size):
    placed = await served.stub.Place(router_pb2.PlaceRequest(block_hashes=bytes(size)), timeout=20)
    assert placed.placement_id == size


@pytest.mark.parametrize("size", [16_384, 70_000, 5_000_000])
async def test_large_answers_go_as_the_windows_allow(served, size):
    served.servicer.big = size
    answers = [served.stub.Place(router_pb2.PlaceRequest(), timeout=20) for _ in range(3)]
    assert [len((await answer).decode.worker_id) for answer in answers] == [size] * 3


async def test_the_connections_window_is_given_back(served):
    for _ in range(10):
        await served.stub.Place(router_pb2.PlaceRequest(block_hashes=bytes(15_000_000)), timeout=20)


async def test_a_message_that_is_too_large_is_refused_and_the_connection_goes_on(served):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.stub.Place(router_pb2.PlaceRequest(block_hashes=bytes(17 << 20)), timeout=20)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await served.stub.Place(router_pb2.PlaceRequest(), timeout=5)).placement_id == 0


async def test_errors_have_their_details_and_defects_tell_nothing(served, caplog):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.stub.Place(router_pb2.PlaceRequest(request_id="full"))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    detail = types_pb2.ErrorDetail()
    assert rpc_status.from_call(error.value).details[0].Unpack(detail)
    assert detail.retry_after_ms == 700
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.stub.Place(router_pb2.PlaceRequest(request_id="defect"))
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "Traceback" not in error.value.details()
    assert "ZeroDivisionError" in caplog.text


async def test_unknown_methods_and_undecodable_requests_are_statuses(served):
    for path, code in (
        (f"/{NAME}/Nothing", grpc.StatusCode.UNIMPLEMENTED),
        (f"/{NAME}/Place", grpc.StatusCode.INVALID_ARGUMENT),
        (f"/{NAME}/ListWorkers", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await served.channel.unary_unary(path)(b"\xff\xff")
        assert error.value.code() is code
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.stub.ListWorkers(router_pb2.ListWorkersRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_compressed_messages_are_refused_not_misread(served):
    call = served.channel.unary_unary(f"/{NAME}/Place", lambda m: m.SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError):
        await call(router_pb2.PlaceRequest(block_hashes=bytes(10_000)), compression=grpc.Compression.Gzip)


async def test_a_deadline_ends_a_call_at_the_server_too(served):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await served.stub.Explain(router_pb2.ExplainRequest(), timeout=0.2)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        await served.servicer.cancelled.wait()


async def test_a_cancelled_call_is_cancelled_at_the_server(served):
    call = served.stub.Explain(router_pb2.ExplainRequest())
    await served.servicer.running.wait()
    call.cancel()
    async with asyncio.timeout(5):
        await served.servicer.cancelled.wait()


async def test_a_lost_client_ends_its_calls(served):
    channel = open_channel(f"127.0.0.1:{served.port}")
    call = router_pb2_grpc.RouterServiceStub(channel).Explain(router_pb2.ExplainRequest())
    await served.servicer.running.wait()
    await channel.close()
    async with asyncio.timeout(5):
        await served.servicer.cancelled.wait()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call


async def test_metadata_reaches_the_servicer(served):
    call = served.stub.Explain(router_pb2.ExplainRequest(request_id="metadata"), metadata=(("x-key", "value"),))
    assert (await call).request.request_id == "value"


async def test_streams_of_answers_are_sent_to_a_slow_reader(served):
    served.servicer.big = 2000
    call = served.stub.WatchModels(router_pb2.WatchModelsRequest(), timeout=30)
    names = []
    async for response in call:
        if len(names) % 500 == 0:
            await asyncio.sleep(0.05)
        names.append(response.models[0].name)
    assert names == [f"m{number}" for number in range(2000)]


async def test_health_and_reflection_are_offered(served):
    health = health_pb2_grpc.HealthStub(served.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=NAME))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await served.set_ready(True)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health.Check(health_pb2.HealthCheckRequest(service="x"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    watch.cancel()
    call = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    names = [one.name for response in [one async for one in call] for one in response.list_services_response.service]
    assert NAME in names


async def test_a_sync_client_is_served_too(served):
    def ask():
        with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            return router_pb2_grpc.RouterServiceStub(channel).Place(
                router_pb2.PlaceRequest(block_hashes=b"x"), timeout=5
            )

    assert (await asyncio.to_thread(ask)).placement_id == 1


async def test_a_port_in_use_is_named(served):
    with pytest.raises(Unavailable, match=f"listen=127.0.0.1:{served.port}"):
        async with Http2Server(f"127.0.0.1:{served.port}", []):
            pass


# With clients that break the protocol.


class Raw:
    """A connection whose frames the test writes."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self._encoder = hpack.Encoder()

    def headers(self, stream_id=1, flags=frames.END_HEADERS, path=f"/{NAME}/Place"):
        fields = [(":method", "POST"), (":path", path), (":scheme", "http"), ("content-type", "application/grpc")]
        return frame(frames.HEADERS, flags, stream_id, self._encoder.encode(fields))

    def call(self, stream_id=1, message=b""):
        data = b"\x00" + len(message).to_bytes(4, "big") + message
        return self.headers(stream_id) + frame(frames.DATA, frames.END_STREAM, stream_id, data)

    def write(self, *pieces):
        self.writer.write(b"".join(pieces))

    async def read(self):
        async with asyncio.timeout(5):
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        return head[3], head[4], int.from_bytes(head[5:], "big"), payload

    async def until(self, kind):
        while True:
            found = await self.read()
            if found[0] == kind:
                return found

    async def error(self):
        """The code of the GOAWAY that ends the connection."""
        payload = (await self.until(frames.GOAWAY))[3]
        assert await self.reader.read() == b""
        return int.from_bytes(payload[4:8], "big")


@pytest.fixture
async def raw(served):
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    yield Raw(reader, writer)
    writer.close()


START = frames.PREFACE + frames.settings({})


async def test_a_call_in_single_bytes_is_understood(raw):
    for byte in START + raw.call():
        raw.write(bytes((byte,)))
        await asyncio.sleep(0)
    assert (await raw.until(frames.HEADERS))[2] == 1
    assert (await raw.until(frames.DATA))[2] == 1


async def test_padding_priority_and_continuations_are_understood(raw):
    block = raw.headers()[9:]
    raw.write(
        START,
        frame(frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, 1, b"\x03" + bytes(5) + block[:4] + bytes(3)),
        frame(frames.CONTINUATION, 0, 1, block[4:10]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[10:]),
        frame(frames.PRIORITY, 0, 1, bytes(5)),
        frame(0x77, 0, 0, b"unknown kinds are ignored"),
        frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x02" + bytes(5) + bytes(2)),
    )
    assert (await raw.until(frames.DATA))[2] == 1


async def test_pings_and_settings_are_acknowledged(raw):
    raw.write(START, frame(frames.PING, 0, 0, b"12345678"))
    _, flags, _, payload = await raw.until(frames.PING)
    assert (flags, payload) == (frames.ACK, b"12345678")


@pytest.mark.parametrize(
    ("why", "error", "write"),
    [
        ("not HTTP/2", frames.PROTOCOL_ERROR, lambda raw: [b"GET / HTTP/1.1\r\n\r\n" + bytes(24)]),
        ("a frame too long", frames.FRAME_SIZE_ERROR, lambda raw: [START, b"\x01\x00\x00\x00\x00\x00\x00\x00\x01"]),
        ("broken settings", frames.FRAME_SIZE_ERROR, lambda raw: [START, frame(frames.SETTINGS, 0, 0, b"abc")]),
        ("an even stream", frames.PROTOCOL_ERROR, lambda raw: [START, raw.headers(2)]),
        ("a stream again", frames.PROTOCOL_ERROR, lambda raw: [START, raw.call(3), raw.call(1)]),
        ("data out of nothing", frames.PROTOCOL_ERROR, lambda raw: [START, frame(frames.DATA, 0, 5, b"x")]),
        ("a broken block", frames.COMPRESSION_ERROR,
         lambda raw: [START, frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff")]),
        ("an interrupted block", frames.PROTOCOL_ERROR,
         lambda raw: [START, raw.headers(1, flags=0), frame(frames.PING, 0, 0, bytes(8))]),
        ("a continuation of nothing", frames.PROTOCOL_ERROR, lambda raw: [START, frame(frames.CONTINUATION, 4, 1)]),
        ("endless headers", frames.ENHANCE_YOUR_CALM,
         lambda raw: [START, raw.headers(1, flags=0), *(frame(frames.CONTINUATION, 0, 1, bytes(9000)) for _ in "ab")]),
        ("too much padding", frames.PROTOCOL_ERROR,
         lambda raw: [START, raw.headers(), frame(frames.DATA, frames.PADDED, 1, b"\x09abc")]),
        ("a window that overflows", frames.FLOW_CONTROL_ERROR,
         lambda raw: [START, frames.window_update(0, 2**31 - 1)]),
        ("a push", frames.PROTOCOL_ERROR, lambda raw: [START, frame(frames.PUSH_PROMISE, 0, 1, bytes(8))]),
    ],
)  # fmt: skip
async def test_whoever_breaks_the_protocol_is_told_how_and_cut_off(served, raw, why, error, write):
    raw.write(*write(raw))
    assert await raw.error() == error, why
    assert (await served.stub.Place(router_pb2.PlaceRequest(), timeout=5)).placement_id == 0, "others are served"


async def test_more_data_than_the_window_is_cut_off(raw, monkeypatch):
    monkeypatch.setattr(connections, "_STREAM_WINDOW", 30_000)
    piece = b"\x00\x00\xff\xff\xff" + bytes(16_000)
    raw.write(START, raw.headers(), *(frame(frames.DATA, 0, 1, piece) for _ in range(3)))
    assert await raw.error() == frames.FLOW_CONTROL_ERROR


async def test_a_flood_of_resets_is_cut_off(raw, monkeypatch):
    monkeypatch.setattr(connections, "_MAX_RESETS", 50)
    raw.write(START)
    for number in range(60):
        raw.write(raw.headers(2 * number + 1), frames.rst_stream(2 * number + 1, frames.CANCEL))
    assert await raw.error() == frames.ENHANCE_YOUR_CALM


async def test_too_many_streams_are_refused_one_by_one(raw, monkeypatch):
    monkeypatch.setattr(connections, "_MAX_STREAMS", 2)
    raw.write(START, raw.headers(1), raw.headers(3), raw.headers(5))
    _, _, stream_id, payload = await raw.until(frames.RST_STREAM)
    assert (stream_id, int.from_bytes(payload, "big")) == (5, frames.REFUSED_STREAM)


async def test_a_silent_client_is_asked_and_then_dropped(raw, served, monkeypatch):
    monkeypatch.setattr(connections, "_SILENCE_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    silent = Raw(reader, writer)
    silent.write(START)
    assert (await silent.until(frames.PING))[1] == 0
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_nothing_of_a_lost_connection_is_kept(served):
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    one = Raw(reader, writer)
    one.write(START, one.headers(1, path=f"/{NAME}/Explain"), one.headers(3)[:12])
    await one.until(frames.SETTINGS)
    count = len(served._connections)
    writer.transport.abort()
    await eventually(lambda: len(served._connections) == count - 1, "the connection is forgotten")
