"""The gateway process: composes the REST server, the public gRPC server and the parts that both share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.gateway.access.counters import AccessCollector, AccessCounters
from baton.gateway.access.credential import keys_in_headers
from baton.gateway.access.factory import open_gate
from baton.gateway.access.gate import Gate
from baton.gateway.access.rpc_guard import KeyGuard
from baton.gateway.access_log import switch_access_log
from baton.gateway.batches.batching import Batching, open_batching
from baton.gateway.bodies.remote_reader import RemoteReader
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.config import GatewayConfig
from baton.gateway.core import Generator
from baton.gateway.ext_authz.rules import Rules
from baton.gateway.ext_authz.server import ext_authz_server
from baton.gateway.ext_authz.service import ExtAuthzCollector, ExtAuthzServicer
from baton.gateway.generation.generator import WorkerGenerator
from baton.gateway.generation.request_log import LoggedGenerator, RequestLogSettings
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.grpc.admission import AdmissionInterceptor, edge_options
from baton.gateway.grpc.responses.calls import ResponseCalls
from baton.gateway.grpc.server_methods import ServerFacts
from baton.gateway.grpc.servicer import InferenceServicer
from baton.gateway.grpc.vectors.calls import VectorCalls
from baton.gateway.http.connections import Connections
from baton.gateway.http.cors import Cors
from baton.gateway.http.exchange import Exchange
from baton.gateway.http.host_check import host_check_of
from baton.gateway.http.intake import Intake
from baton.gateway.http.limits import HttpLimits
from baton.gateway.http.server import HttpServer
from baton.gateway.mcp.sessions import load_client
from baton.gateway.memory import return_large_blocks
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.metrics.phase_times import PhaseTimes
from baton.gateway.metrics.siblings import Siblings
from baton.gateway.models.sampling import RequestLimits
from baton.gateway.models.served import ModelCatalog, ServedModel, TemplateFlags, load_served_model
from baton.gateway.parsing.format_choice import FormatFlags
from baton.gateway.pooling.vectors import VectorService
from baton.gateway.responses.service import ResponseService
from baton.gateway.responses.store import ResponseStore
from baton.gateway.rest.app import App
from baton.gateway.rest.endpoint_load import EndpointLoad
from baton.gateway.rest_routes import rest_routes
from baton.gateway.routers.client import RouterClient
from baton.gateway.routers.fleet_control import FleetControl
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.name_resolver import NameResolver
from baton.gateway.storage.factory import make_record_store
from baton.gateway.system.adapters import AdapterService
from baton.gateway.tls import GatewayTls
from baton.gateway.tracing.request import GatewayTracing
from baton.plugins.kinds import GATEWAY as GATEWAY_PLUGINS
from baton.plugins.metric_sinks import metric_sinks
from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.rpc.channel import Dial
from baton.rpc.identity.identity import GATEWAY, ROUTER, WORKER
from baton.rpc.server.server import RpcServer, Service
from baton.rpc.tls.credentials import EdgeTls
from baton.rpc.tls.metrics import TlsCollector
from baton.rpc.tracing.tracer import Tracer, TracingCollector, tracing
from baton.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from baton.gateway.resume.store import StreamStore

_log = logging.getLogger(__name__)

_READY_POLL_SECONDS = 0.1
_LAST_WORDS_SECONDS = 0.5  # time for clients to read why their stream ends
_SERVICE = "baton.v1.InferenceService"

# Allocations before a young collection, young ones before one of what survived them, and those before a full one.
# Requests leave few cycles: with Python's default of 700 collections took 6 % of the CPU of small chats. The lines of a
# batch survive young collections: one of the survivors took 15 ms after every tenth, and full ones 130 ms.
_GC_THRESHOLDS = (5_000, 200, 10)
# How long a worker thread (parsing, rendering, encoding) may hold the interpreter. With Python's default of 5 ms the
# event loop woke 50 ms late beside three such threads, and 300 ms at p99; now 3 and 20 ms, at the same throughput.
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts that REST and gRPC share."""

    catalog: ModelCatalog
    counters: GenerationCounters
    phases: PhaseTimes
    generator: WorkerGenerator
    logged: Generator  # the same, with the log of requests if it is on
    admission: ConcurrencyLimiter
    limits: RequestLimits
    gate: Gate
    access_counters: AccessCounters
    streams: StreamStore | None
    fleet: FleetControl
    tracer: Tracer | None
    tracing: GatewayTracing | None


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Runs the gateway until `stop` is set and the running requests have ended."""
    config.validate()
    load_client(config.mcp)
    switch_access_log(not config.no_access_log)
    counters = GenerationCounters()
    limits = RequestLimits(max_n=config.max_choices, max_logprobs=config.most_logprobs)
    tls = GatewayTls.of(config)
    access_counters = AccessCounters()
    phases = PhaseTimes()
    plugins = Plugins.named(config.plugins, GATEWAY_PLUGINS)
    dial = Dial(tls.services, ROUTER)
    async with (
        _open_catalog(config, plugins) as catalog,
        open_gate(config.access, access_counters) as gate,
        tracing(config.otlp_endpoint, GATEWAY, config.rest_listen, config.trace_sampling) as tracer,
        RouterClient(config.router, catalog.update, counters, dial=dial, on_outcome=phases.observe) as router,
        _stream_store(config) as stored_streams,
        WorkerStreams(
            counters, silence_seconds=config.worker_silence_ms / 1000, dial=Dial(tls.services, WORKER)
        ) as streams,
        BodyThread(RemoteReader()) as bodies,
    ):
        traced = GatewayTracing(tracer) if tracer is not None else None
        generator = WorkerGenerator(catalog, router, streams, counters, limits, traced, config.stream_interval)
        core = _Core(
            catalog,
            counters,
            phases,
            generator,
            _logged(config, catalog, generator),
            ConcurrencyLimiter(config.max_streams),
            limits,
            gate,
            access_counters,
            stored_streams,
            FleetControl(router, lambda: [model.name for model in catalog.models()], Dial(tls.services, WORKER)),
            tracer,
            traced,
        )
        await _run_servers(config, core, tls, plugins, bodies, stop)
    _log.info("drained")


async def _run_servers(
    config: GatewayConfig, core: _Core, tls: GatewayTls, plugins: Plugins, bodies: BodyThread, stop: asyncio.Event
) -> None:
    """Listens until `stop` is set, then drains all servers at the same time."""
    store = ResponseStore(make_record_store(config.redis_url, config.response_ttl, config.max_stored_response_bytes))
    connections = Connections()
    serving = _serving_context(config, core, connections, tls, bodies)
    batching = open_batching(config, core.gate)
    http_server, authorization = _http_server(config, core, serving, store, connections, tls, batching, plugins)
    async with metric_sinks(plugins, serving.metrics.registry, GATEWAY_PLUGINS), http_server as http:
        async with (
            _rpc_server(config, core, serving, store, tls.grpc) as rpc,
            ext_authz_server(
                config.ext_authz_listen, authorization, core.gate, tls.services, bool(config.metrics_folder)
            ),
            _answering_siblings(config, serving.metrics),
        ):
            _log.info("listening", extra={"rest": http.address, "grpc": _with_port(config.grpc_listen, rpc.port)})
            async with batching.running() if batching is not None else contextlib.nullcontext():
                await _until_stopped(core, rpc, stop)
            core.admission.drain()
            seconds = config.drain_timeout
            cut_short = asyncio.get_running_loop().call_later(seconds, core.generator.shut_down)
            draining = asyncio.gather(http.drain(seconds + _LAST_WORDS_SECONDS), store.close(seconds))
        # Leaving the gRPC server's context drains it at the same time.
        await draining
        cut_short.cancel()


def _logged(config: GatewayConfig, catalog: ModelCatalog, generator: Generator) -> Generator:
    if not (config.log_requests or config.log_outputs):
        return generator
    settings = RequestLogSettings(config.log_requests, config.log_outputs, config.max_log_len)
    return LoggedGenerator(generator, catalog, settings)


@contextlib.asynccontextmanager
async def _open_catalog(config: GatewayConfig, plugins: Plugins) -> AsyncIterator[ModelCatalog]:
    catalog = ModelCatalog([served_model(config, plugins)])
    _tune_process()
    try:
        yield catalog
    finally:
        catalog.close()


def served_model(config: GatewayConfig, plugins: Plugins = NO_PLUGINS) -> ServedModel:
    """Loads the model named by the settings. Raises ServiceError that names the missing or wrong file or flag."""
    templates = TemplateFlags(config.chat_template, config.template_variables, config.trust_control_tokens)
    model = load_served_model(
        config.model,
        config.served_model_name,
        format_flags(config, plugins),
        templates,
        config.sampling_defaults,
        revision=config.revision,
        with_processes=True,
    )
    chosen = model.output_format
    _log.info(
        "model %s: tool calls are parsed as %s (%s), reasoning as %s (%s)",
        model.name,
        *chosen.tools_choice,
        *chosen.reasoning_choice,
    )
    return model


@contextlib.asynccontextmanager
async def _stream_store(config: GatewayConfig) -> AsyncIterator[StreamStore | None]:
    """Opens the store of resumable streams, or yields None if they are disabled."""
    if not config.resumable_streams:
        yield None
        return
    from baton.gateway.resume.store import StreamStore

    async with StreamStore(config.redis_url) as store:
        yield store


def _tune_process() -> None:
    """Sets garbage collection, memory and thread switching for many streams.

    The objects made at startup are excluded from full collections, each of which would delay all streams by 30 ms.
    """
    return_large_blocks()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def format_flags(config: GatewayConfig, plugins: Plugins) -> FormatFlags:
    """Returns the settings of the output parsers."""
    return FormatFlags(config.tool_call_parser, config.reasoning_parser, config.tool_parser_plugin, plugins)


def missing_parts(core: _Core) -> list[str]:
    """Describes what the gateway still needs before it can serve; empty when it is ready."""
    if core.admission.draining:
        return ["the gateway is shutting down"]
    if not core.gate.ready:
        return ["no API keys could be read yet"]
    if core.catalog.ready:
        return []
    unheard = [model.name for model in core.catalog.models() if model.info is None]
    if unheard:
        return [f"the router has no worker for the model {name}" for name in unheard]
    return ["the router has no live worker any more"]


def _serving_context(
    config: GatewayConfig, core: _Core, connections: Connections, tls: GatewayTls, bodies: BodyThread
) -> ServingContext:
    metrics = GatewayMetrics(core.counters, lambda: core.admission.in_use, lambda: len(connections), core.phases)
    metrics.offer_vllm_names(core.catalog.models()[0].name)
    metrics.register(AccessCollector(core.access_counters))
    metrics.register(TracingCollector(core.tracer))
    metrics.register(TlsCollector(tls.services, tls.rest, tls.grpc))
    return ServingContext(
        config,
        core.catalog,
        core.logged,
        core.admission,
        metrics,
        core.gate,
        core.streams,
        bodies,
        pooler=core.generator.pooler,
        names=NameResolver(
            core.catalog,
            AdapterService(core.catalog, core.fleet).resolve,
            config.adapter_miss_seconds,
            metrics.adapter_resolved,
        ),
    )


def _http_server(
    config: GatewayConfig,
    core: _Core,
    serving: ServingContext,
    store: ResponseStore,
    connections: Connections,
    tls: GatewayTls,
    batching: Batching | None,
    plugins: Plugins,
) -> tuple[HttpServer, ExtAuthzServicer]:
    """Returns the REST server, and the servicer that answers Envoy from the same routes."""
    cors = Cors(config.cors_origins, refuses_strangers=not config.api_keys and not config.allow_anonymous)
    hosts = host_check_of(config.allowed_hosts, bool(config.api_keys), (config.rest_listen,))
    routes = rest_routes(serving, store, lambda: missing_parts(core), core.fleet, batching, plugins)
    load = EndpointLoad(core.fleet.routers, lambda: [model.name for model in core.catalog.models()])
    app = App(routes, serving.metrics, core.gate, cors, core.tracing, hosts, load)
    authorization = ExtAuthzServicer(core.gate, Rules(app.table), cors)
    serving.metrics.register(ExtAuthzCollector(authorization))
    if batching is not None:
        serving.metrics.register(batching.collector)
    limits = HttpLimits(
        max_body_bytes=config.max_body_bytes,
        max_header_bytes=config.max_header_bytes,
        max_connections=config.max_connections,
        header_timeout=config.header_timeout,
        body_timeout=config.body_timeout,
        idle_timeout=config.idle_timeout,
        stall_timeout=config.stall_timeout,
    )
    context = tls.rest.ssl_context() if tls.rest else None

    def tenant_of(exchange: Exchange) -> str:
        return core.gate.tenant_of(keys_in_headers(exchange.headers))

    def spooled_bytes(exchange: Exchange) -> int:
        if batching is None:
            return 0
        return batching.spooled_bytes(exchange, lambda one: not config.api_keys or bool(tenant_of(one)))

    intake = Intake(tenant_of, spooled_bytes)
    shares_port = bool(config.metrics_folder)
    return HttpServer(config.rest_listen, app, limits, connections, context, intake, shares_port), authorization


@contextlib.asynccontextmanager
async def _answering_siblings(config: GatewayConfig, metrics: GatewayMetrics) -> AsyncIterator[None]:
    """Answers scrapes for all processes of this gateway, where there are several."""
    if not config.metrics_folder:
        yield
        return
    metrics.siblings = Siblings(config.metrics_folder, metrics.exposition)
    async with metrics.siblings.answering():
        yield


def _rpc_server(
    config: GatewayConfig, core: _Core, serving: ServingContext, store: ResponseStore, tls: EdgeTls | None
) -> RpcServer:
    responses = ResponseService(serving, store)
    register = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    servicer = InferenceServicer(
        core.logged,
        core.catalog,
        core.limits,
        core.gate,
        core.streams,
        ResponseCalls(responses),
        config.trust_request_chat_template,
        core.tracing,
        config.grpc_listen,
        serving.running,
        ServerFacts(
            gives_tokenizer=config.enable_tokenizer_info_endpoint,
            num_running=lambda: core.admission.in_use,
            is_ready=lambda: not missing_parts(core),
        ),
        None if serving.pooler is None else VectorCalls(VectorService(serving, serving.pooler), core.tracing),
        AdapterService(core.catalog, core.fleet),
        serving.names,
    )
    service = Service(_SERVICE, servicer, register)
    return RpcServer(
        config.grpc_listen,
        [service],
        grace_seconds=config.drain_timeout + _LAST_WORDS_SECONDS,
        field="grpc_listen",
        tls=tls,
        interceptors=[KeyGuard(core.gate), AdmissionInterceptor(core.admission)],
        options=edge_options(config),
    )


async def _until_stopped(core: _Core, rpc: RpcServer, stop: asyncio.Event) -> None:
    """Keeps the gRPC health status equal to /ready until `stop` is set."""
    was_ready = False
    while not stop.is_set():
        missing = missing_parts(core)
        if was_ready == bool(missing):
            was_ready = not missing
            _log.info("ready" if was_ready else "not ready: %s", *missing)
            await rpc.set_ready(was_ready)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _READY_POLL_SECONDS)


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
