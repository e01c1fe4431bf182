"""The engine as a process, or as a thread of its front's process: from its configuration to the end of its loop."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from baton.plugins.kinds import WORKER as WORKER_PLUGINS
from baton.plugins.plugins import Plugins
from baton.rpc.address import split_address
from baton.rpc.errors import InternalError, ServiceError, status_of
from baton.rpc.identity.identity import WORKER
from baton.rpc.tls.credentials import Tls
from baton.v1 import types_pb2, worker_pb2
from baton.worker.adapters.resolvers.interface import ResolverContext
from baton.worker.adapters.resolvers.resolvers import make_resolvers
from baton.worker.config import WorkerConfig
from baton.worker.engine.adapters.directory import AdapterDirectory, DirectorySettings
from baton.worker.engine.adapters.loads import ThreadLoads
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor, ServingExecutor
from baton.worker.executors.cuda.compilation.cache import use_compile_cache
from baton.worker.executors.device_limits import with_device_limits
from baton.worker.executors.factory import make_executor
from baton.worker.executors.host.resources import usable_cores
from baton.worker.handover.handover import Handover
from baton.worker.handover.settings import DEVICE_PIECE_BYTES, HandoverSettings
from baton.worker.link.ends import EngineEnd
from baton.worker.link.frames import EngineLink, Kind, LinkClosed
from baton.worker.link.inbox import Inbox
from baton.worker.link.liveness import answer_probes
from baton.worker.link.step_status import StepStatus
from baton.worker.process.disk_cache import open_disk_cache
from baton.worker.process.kv_events.messages import EventForm
from baton.worker.process.kv_events.published_cache import PublishedCache
from baton.worker.process.kv_events.publisher import ZmqPublisher
from baton.worker.process.logs import LinkLogHandler
from baton.worker.process.loop import EngineLoop
from baton.worker.process.profiler import StepProfiler
from baton.worker.process.spans import SpanSender
from baton.worker.process.start_report import start_report
from baton.worker.process.state_reporter import model_message
from baton.worker.process.step_trace import StepTrace, TracedExecutor
from baton.worker.process.steps.nvtx import NvtxExecutor, nvtx_ranges
from baton.worker.process.steps.step_costs import MeteredExecutor, StepCosts
from baton.worker.requests.state import RequestState
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.transfer.kinds.factory import Paths, choose_paths
from baton.worker.transfer.layout import layout_message
from baton.worker.transfer.no_transports import NoTransports
from baton.worker.transfer.transports import Transports
from baton.worker.transfer.wire.tls import KvTls
from baton.worker.weights.resolve import resolve_model

_log = logging.getLogger("baton.worker.process.main")  # also as a process of its own

_MAX_MASK_THREADS = 8
EXIT_OK = 0
EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1

_ROLES = {
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
    "both": types_pb2.WORKER_ROLE_BOTH,
}


def main(argv: list[str]) -> int:
    """Runs the process: `main FD LIVENESS_FD STATUS_FD PARENT_PID`. The front stops it and handles signals."""
    descriptor, liveness, status_file, parent_pid = map(int, argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent_pid)
    answer_probes(socket.socket(fileno=liveness))
    link = EngineLink(socket.socket(fileno=descriptor))
    return run_engine(link, StepStatus.at(status_file), own_process=True)


def run_engine(link: EngineEnd, step_status: StepStatus, own_process: bool = False, inbox: Inbox | None = None) -> int:
    """Runs an engine at the end of a link until STOP. Returns an exit code; sends the reason of a failure.

    `step_status`: where the front reads which step the device computes. `inbox`: tensors of a front in this process.
    """
    try:
        start = _receive_start(link)
        if own_process:
            logging.basicConfig(level=start["log_level"], handlers=[LinkLogHandler(link)], force=True)
        _serve(link, start, step_status, own_process, inbox)
    except LinkClosed:
        _log.warning("the front is gone; the engine ends")
        return EXIT_FAILED
    except ServiceError as error:
        link.send(Kind.FAILED, 0, status_of(error).SerializeToString())
        return EXIT_FAILED
    except Exception as error:
        _log.exception("the engine failed")
        failure = InternalError(f"the engine failed: {type(error).__name__}: {error}")
        link.send(Kind.FAILED, 0, status_of(failure).SerializeToString())
        return EXIT_FAILED
    finally:
        link.close()
    return EXIT_OK


def _serve(
    link: EngineEnd, start: dict[str, Any], step_status: StepStatus, own_process: bool, inbox: Inbox | None
) -> None:
    config = with_device_limits(WorkerConfig(**start["config"]))
    with contextlib.ExitStack() as cleanup:
        if config.executor == "cuda":
            use_compile_cache(config.compile_cache_dir)
        plugins = Plugins.named(config.plugins, WORKER_PLUGINS)
        executor = make_executor(config, plugins)
        cleanup.callback(executor.close)
        trace = StepTrace(config.trace_steps) if config.trace_steps else None
        if trace is not None:
            cleanup.callback(trace.close)
        costs = StepCosts() if config.mfu_metrics and executor.facts.costs is not None else None
        stepped = _around_steps(config, executor, trace, costs)
        grammars = _make_grammars(config, executor, link.wake)
        cleanup.callback(grammars.close)
        adapters = _make_adapters(config, executor, link.wake, cleanup, plugins)
        disk = open_disk_cache(config, executor)
        if disk is not None:
            cleanup.callback(disk.close)
        engine = Engine(
            stepped,
            _engine_settings(config),
            epoch=time.time_ns(),
            grammars=grammars,
            step_status=step_status,
            adapters=adapters.pool,
            disk=disk,
        )
        settings = _handover_settings(config, executor)
        paths = _choose_paths(config, executor, settings, plugins)
        handover = _make_handover(link, config, start, engine, executor, settings, paths, adapters.directory)
        cleanup.callback(handover.close)
        profiler = StepProfiler(config.profile_dir, config.executor, lambda: engine.counters().num_steps)
        cleanup.callback(profiler.close)
        identity = _identity(config, start["worker_id"], engine, executor)
        spans = SpanSender(link.send) if config.otlp_endpoint else None
        cache = _published_cache(config, engine, cleanup)
        loop = EngineLoop(
            link,
            engine,
            executor,
            handover,
            identity,
            profiler,
            trace,
            spans,
            inbox=inbox,
            costs=costs,
            cache=cache,
            adapters=adapters.directory,
            disk=disk,
        )
        if own_process:
            _report_start(config, executor, engine, paths)
            gc.collect()
            gc.freeze()
        # Simulated fleets have many workers on a machine, and few constraints.
        loop.run(grammars.warm_up if own_process and config.executor != "sim" else None)


class _Adapters(NamedTuple):
    """The adapters of an engine, if it has any."""

    pool: AdapterPool[RequestState] | None = None
    directory: AdapterDirectory | None = None


def _make_adapters(
    config: WorkerConfig,
    executor: Executor,
    wake: Callable[[], None],
    cleanup: contextlib.ExitStack,
    plugins: Plugins,
) -> _Adapters:
    memory = executor.adapters
    if memory is None:
        return _Adapters()
    loads, searches = ThreadLoads(wake), ThreadLoads(wake, num_threads=1)
    cleanup.callback(loads.close)
    cleanup.callback(searches.close)
    pool: AdapterPool[RequestState] = AdapterPool(memory, config.num_host_loras, loads, time.monotonic)
    context = ResolverContext(config.model_name, config.lora_folders, config.lora_hub_cache)
    settings = DirectorySettings(
        config.static_loras,
        config.lora_folders,
        config.lora_resolver_folder,
        (config.model_name,),
        config.lora_pinned,
        make_resolvers(config.lora_resolvers, config.lora_resolver_names, context, plugins),
    )
    directory = AdapterDirectory(memory, pool, settings, wake, searches=searches)
    cleanup.callback(directory.close)
    return _Adapters(pool, directory)


def _published_cache(config: WorkerConfig, engine: Engine, cleanup: contextlib.ExitStack) -> PublishedCache | None:
    """Returns the engine's cache with its changes published as --kv-events-config says. None: they are not."""
    settings = config.kv_events
    if settings is None or not settings.enabled:
        return None
    publisher = ZmqPublisher(settings)
    cleanup.callback(publisher.close)
    return PublishedCache(engine, EventForm(settings, config.block_size), publisher.publish)


def _around_steps(
    config: WorkerConfig, executor: ServingExecutor, trace: StepTrace | None, costs: StepCosts | None
) -> Executor:
    """Returns the executor with all that is recorded of its steps."""
    stepped: Executor = executor
    if costs is not None and executor.facts.costs is not None:
        stepped = MeteredExecutor(stepped, executor.facts.costs, costs)
    if config.nvtx:
        stepped = NvtxExecutor(stepped, nvtx_ranges())
    return stepped if trace is None else TracedExecutor(stepped, trace)


def _engine_settings(config: WorkerConfig) -> EngineSettings:
    return EngineSettings(
        max_num_requests=config.max_num_requests,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_background_prefill_tokens=config.max_background_prefill_tokens,
        max_shared_prefill_tokens=config.max_shared_prefill_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        max_queue_depth=config.max_queue,
        min_remote_prefill_tokens=config.min_remote_prefill_tokens,
        min_host_uses=config.host_cache_min_uses,
        host_eviction_policy=config.host_cache_eviction_policy,
        state_snapshot_blocks=config.state_snapshot_blocks,
        state_cache_share=config.state_cache_share,
        prefix_caching=config.prefix_caching,
        block_origins=config.kv_events is not None and config.kv_events.enabled,
        residency_sample=config.kv_cache_metrics_sample,
        dummy_kv=config.dummy_kv,
        cache_outputs=not config.invariant,
        stall_seconds=config.step_stall_ms / 1000,
    )


def _make_grammars(config: WorkerConfig, executor: Executor, wake: Callable[[], None]) -> Grammars:
    num_threads = max(1, min(_MAX_MASK_THREADS, (config.threads or usable_cores()) // 2))
    return Grammars(lambda: resolve_model(config.model, config.revision), executor.model, num_threads, wake=wake)


def _handover_settings(config: WorkerConfig, executor: Executor) -> HandoverSettings:
    settings = HandoverSettings(
        lease_seconds=config.lease_ms / 1000,
        verify=config.verify_transfers,
        recompute=config.kv_load_failure_policy == "recompute",
    )
    return settings if executor.kv is None else dataclasses.replace(settings, piece_bytes=DEVICE_PIECE_BYTES)


def _choose_paths(config: WorkerConfig, executor: Executor, settings: HandoverSettings, plugins: Plugins) -> Paths:
    slot_bytes = max(settings.piece_bytes, executor.kv_spec.largest_layer_bytes)
    encrypted = config.tls is not None and not config.kv_plain
    return choose_paths(config.transports, executor, slot_bytes, executor.kv, encrypted, plugins)


def _make_handover(
    link: EngineEnd,
    config: WorkerConfig,
    start: dict[str, Any],
    engine: Engine,
    executor: Executor,
    settings: HandoverSettings,
    paths: Paths,
    adapters: AdapterDirectory | None,
) -> Handover:
    if not paths.used:
        no_transports = NoTransports(link.wake)
        return Handover(engine, executor, no_transports, link, start["worker_id"], settings, adapters=adapters)
    listen_host, _ = split_address(config.listen, "listen")
    host, port = split_address(config.transfer_listen or f"{listen_host}:0", "transfer_listen")
    transport = Transports(
        executor,
        host.strip("[]"),
        port,
        start["advertised_host"],
        link.wake,
        paths.used,
        epoch=engine.epoch,
        max_piece_bytes=settings.piece_bytes,
        tls=KvTls(Tls(config.tls, WORKER)) if config.tls else None,
    )
    return Handover(engine, executor, transport, link, start["worker_id"], settings, adapters=adapters)


def _report_start(config: WorkerConfig, executor: ServingExecutor, engine: Engine, paths: Paths) -> None:
    report = start_report(
        config,
        executor.facts,
        executor.kv_spec,
        executor.num_blocks,
        engine.max_model_len,
        tuple(paths.used),
        paths.left_out,
    )
    _log.info("%s", "\n".join(("this worker:", *report.lines())), extra={"report": report.fields()})


def _identity(config: WorkerConfig, worker_id: str, engine: Engine, executor: Executor) -> worker_pb2.WorkerState:
    """Returns the part of the worker's state that never changes."""
    model, spec = executor.model, executor.kv_spec
    return worker_pb2.WorkerState(
        worker_id=worker_id,
        role=_ROLES[config.role],
        model=model_message(config.model_name, model, engine.max_model_len, spec.block_size),
        layout=layout_message(spec),
        without_prefix_cache=not config.prefix_caching,
    )


def _receive_start(link: EngineEnd) -> dict[str, Any]:
    while True:
        for frame in link.receive(None):
            if frame.kind == Kind.START:
                start: dict[str, Any] = json.loads(frame.payload)
                return start


def _die_with(parent_pid: int) -> None:
    """Ends the engine with its front, even if it hangs (Linux; elsewhere the end of the link does)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            raise SystemExit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
