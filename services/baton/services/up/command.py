"""`baton up` and `baton serve`: plan the services of a machine from settings, and run them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from baton.services import extras, settings
from baton.services.machine.devices import Devices, observe_devices
from baton.services.ports import HeldPorts
from baton.services.process.run import ProcessConfig
from baton.services.up import tandem
from baton.services.up.config import ServeConfig, TandemConfig, UpConfig
from baton.services.up.launch import Launch, UpFailed
from baton.services.up.layout import Layout, choose_layout
from baton.services.up.model_source import resolve_model
from baton.services.up.status_lines import StatusLines
from baton.services.up.welcome import welcome

_DEVICE_SECONDS = 10.0  # for nvidia-smi
_BATCH_STORE = "BATON_GATEWAY_BATCH_STORE"  # which --batch-store overrides
_REDIS_URL = "BATON_GATEWAY_REDIS_URL"

# What the plan sets for each service, and what several services of one machine cannot share.
_WITHHELD: Mapping[str, frozenset[str]] = {
    "worker": frozenset(
        {"worker_id", "role", "listen", "advertise", "metrics_listen", "kvstore", "transfer_listen", "engine_process"}
        | {"tls_certificate", "tls_key", "tls_ca", "metrics_plain", "trace_steps", "tensor_parallel_size", "plugins"}
        | {"disk_cache_dir"}
    ),
    "gateway": frozenset(
        {"router", "tls_certificate", "tls_key", "tls_ca", "grpc_tls_certificate", "grpc_tls_key"}
        | {"rest_tls_certificate", "rest_tls_key", "ext_authz_listen", "limit_replicas", "plugins", "processes"}
        | {"metrics_folder"}
    ),
}

Configs = Mapping[str, tuple[str, str]]  # by service: the module and the name of its config class


_COMMANDS = {
    "up": (UpConfig, "Runs a whole tandem on this machine."),
    "serve": (
        ServeConfig,
        "Serves a model with what this machine has: picks the executor and the workers, starts all services, and "
        "prints its choices and the URL.",
    ),
}


def main(name: str, argv: Sequence[str], environ: Mapping[str, str], configs: Configs) -> int:
    """Runs `baton up` or `baton serve` until Ctrl-C or SIGTERM. Returns the process's exit code."""
    try:
        with HeldPorts() as held:
            return _main(name, argv, environ, configs, held)
    except settings.SettingsError as error:
        print(f"baton {name}: {error}", file=sys.stderr)
        return 2


def _main(name: str, argv: Sequence[str], environ: Mapping[str, str], configs: Configs, held: HeldPorts) -> int:
    config_type, about = _COMMANDS[name]
    forwards = [settings.Forward(service, _config_of(service, configs), some) for service, some in _WITHHELD.items()]
    loaded = settings.load_forwarding(name, (config_type,), forwards, argv, environ, about)
    config: UpConfig | ServeConfig = loaded.values[0]
    if isinstance(config, ServeConfig):
        config = config.with_rest_address()
    config = tandem.check_listen_addresses(config, held.choose)
    layout = _layout(config, loaded.forwarded["worker"], environ)
    _check_installed(layout.executor)
    tls = tandem.plan_tls(config)
    model = resolve_model(config.model, config.revision)
    edge = {tandem.port_of(address) for address in (config.rest_listen, config.grpc_listen)}
    ports = partial(held.choose, besides=edge)
    plans = tandem.plan(config, layout, model, len(os.sched_getaffinity(0)), ports, loaded.forwarded)
    _check_plans(plans, environ, configs)
    with _log_folder(config.log_dir) as log_dir, batch_folder(config, environ) as environ:
        _write_targets(config.metrics_targets, plans)
        greeting = welcome(config, tandem.model_names(config, model))
        launch = Launch(plans, tls, log_dir, config.drain_timeout, config.ready_timeout, greeting)
        return _run(launch, name, (f"model {model}", *layout.reasons), environ, bool(config.log_dir))


def _run(launch: Launch, command: str, reasons: Sequence[str], environ: Mapping[str, str], keeps_logs: bool) -> int:
    lines = StatusLines(sys.stdout)
    for reason in reasons:
        lines.say(reason)
    lines.say(f"starting {len(launch.plans)} services; their logs are in {launch.log_dir}")
    try:
        clean = asyncio.run(launch.run(environ, lines))
    except UpFailed as error:
        lines.say(f"baton {command}: {error}")
        if not keeps_logs:
            lines.say("--log-dir FOLDER keeps the whole logs")
        return 1
    return 0 if clean else 1


def _layout(config: UpConfig | ServeConfig, worker_flags: Sequence[str], environ: Mapping[str, str]) -> Layout:
    looks = config.executor in ("auto", "cuda")
    devices = observe_devices(environ, _DEVICE_SECONDS) if looks else Devices()
    sizes = ("kv_cache_memory", "num_blocks")
    flags = tuple(f"--{name.replace('_', '-')}=" for name in sizes)
    may_share = any(flag.startswith(flags) for flag in worker_flags)
    may_share |= any(f"BATON_WORKER_{name.upper()}" in environ for name in sizes)
    return choose_layout(config.executor, config.counts, devices, may_share)


def _config_of(service: str, configs: Configs) -> type:
    module, name = configs[service]
    found: type = getattr(importlib.import_module(module), name)
    return found


def _check_plans(plans: Sequence[tandem.ServicePlan], environ: Mapping[str, str], configs: Configs) -> None:
    """Raises SettingsError for what a service would refuse."""
    for plan in plans:
        kinds = (_config_of(plan.command, configs), ProcessConfig)
        settings.load(plan.command, kinds, plan.flags, {**environ, **plan.secrets})


def _check_installed(executor: str) -> None:
    """Raises SettingsError where a service of the tandem could not start."""
    services = ("gateway", "router", "kvstore", *(("worker",) if executor != "sim" else ()))
    missing = sorted({name for service in services for name in extras.missing_packages(service)})
    if missing:
        what = f"the package {missing[0]} is" if len(missing) == 1 else f"the packages {', '.join(missing)} are"
        raise settings.SettingsError(f"{what} not installed; {extras.install_line(extras.SERVE)}")


@contextmanager
def _log_folder(wanted: str) -> Iterator[Path]:
    """Yields the folder of the services' logs. Removes a temporary one at the end, however that comes."""
    try:
        log_dir = Path(wanted or tempfile.mkdtemp(prefix="baton-up-"))
        log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        place = wanted or "the temporary folder"
        raise settings.SettingsError(
            f"--log-dir: no log can be written in {place}: {error}; give another with --log-dir FOLDER"
        ) from error
    try:
        yield log_dir
    finally:
        if not wanted:
            shutil.rmtree(log_dir, ignore_errors=True)


@contextmanager
def batch_folder(config: TandemConfig, environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yields the services' variables with a folder for files and batches, unless one is set. Removes it at the end.

    Several gateway processes share files and batches only by Redis. Without it they have no folder.
    """
    shares = config.gateway_processes == 1 or config.redis_url or environ.get(_REDIS_URL)
    if _BATCH_STORE in environ or not shares:
        yield environ
        return
    with tempfile.TemporaryDirectory(prefix="baton-up-batches-", ignore_cleanup_errors=True) as folder:
        yield {**environ, _BATCH_STORE: folder}


def _write_targets(path: str, plans: Sequence[tandem.ServicePlan]) -> None:
    if not path:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(tandem.scrape_targets(plans), indent=1), encoding="utf-8")
    except OSError as error:
        raise settings.SettingsError(f"--metrics-targets {path}: {error.strerror}") from error
