"""`baton up`: starts a tandem on this machine, and stops it without leaving anything behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from baton.rpc.address import split_address
from baton.rpc.channel import Dial
from baton.services import extras, settings
from baton.services.certs.command import CA_CERTIFICATE
from baton.services.ports import free_ports
from baton.services.process.signals import watch_signals
from baton.services.up import tandem
from baton.services.up.model_source import resolve_model
from baton.services.up.processes import Child
from baton.services.up.readiness import is_ready
from baton.services.up.status_lines import StatusLines

_STOP_GRACE_SECONDS = 10.0  # beyond the drain
_PROBE_INTERVAL_SECONDS = 0.1


class UpFailed(Exception):
    """The tandem cannot continue. The message is for the user."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a tandem until Ctrl-C or SIGTERM. Returns the process's exit code."""
    try:
        (config,) = settings.load("up", (tandem.UpConfig,), argv, environ, "Runs a whole tandem on this machine.")
        config = tandem.check_listen_addresses(config)
        _check_installed(config)
        tls = tandem.plan_tls(config)
        model = resolve_model(config.model)
        with _log_folder(config.log_dir) as log_dir:
            return _run_tandem(config, model, tls, log_dir, environ)
    except settings.SettingsError as error:
        print(f"baton up: {error}", file=sys.stderr)
        return 2


def _run_tandem(
    config: tandem.UpConfig, model: str, tls: tandem.TlsPlan, log_dir: Path, environ: Mapping[str, str]
) -> int:
    edge = {tandem.port_of(address) for address in (config.rest_listen, config.grpc_listen)}
    plans = tandem.plan(config, model, len(os.sched_getaffinity(0)), partial(free_ports, besides=edge))
    try:
        _write_targets(config.metrics_targets, plans)
    except OSError as error:
        raise settings.SettingsError(f"--metrics-targets {config.metrics_targets}: {error.strerror}") from error
    lines = StatusLines(sys.stdout)
    lines.say(f"starting {len(plans)} services with {model}; their logs are in {log_dir}")
    try:
        clean = asyncio.run(_run(config, plans, tls, log_dir, environ, lines))
    except UpFailed as error:
        lines.say(f"baton up: {error}")
        if not config.log_dir:
            lines.say("--log-dir FOLDER keeps the whole logs")
        return 1
    return 0 if clean else 1


def _check_installed(config: tandem.UpConfig) -> None:
    """Raises SettingsError where a service of the tandem could not start."""
    services = ("gateway", "router", "kvstore", *(("worker",) if config.executor != "sim" else ()))
    missing = sorted({name for service in services for name in extras.missing_packages(service)})
    if missing:
        what = f"the package {missing[0]} is" if len(missing) == 1 else f"the packages {', '.join(missing)} are"
        raise settings.SettingsError(f"{what} not installed; {extras.install_line(extras.ALL)}")


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


def _write_targets(path: str, plans: Sequence[tandem.ServicePlan]) -> None:
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(tandem.scrape_targets(plans), indent=1), encoding="utf-8")


async def _run(
    config: tandem.UpConfig,
    plans: Sequence[tandem.ServicePlan],
    tls: tandem.TlsPlan,
    log_dir: Path,
    environ: Mapping[str, str],
    lines: StatusLines,
) -> bool:
    """Returns True if it was stopped as requested and all processes ended by themselves."""
    stop = asyncio.Event()
    children: list[Child] = []
    watch_signals(stop, lambda _: _kill_all(children))
    try:
        # All at once: every service waits for those it needs.
        for plan in reversed(plans):
            children.append(await Child.start(plan, log_dir, environ))
        await _until(stop, children, _announce_ready(config, children, tls, lines))
    except BaseException:
        await _stop_all(children, config.drain_timeout + _STOP_GRACE_SECONDS)
        raise
    lines.say("stopping")
    stragglers = await _stop_all(children, config.drain_timeout + _STOP_GRACE_SECONDS)
    for child in stragglers:
        lines.say(f"{child.plan.name} had to be killed; {_log_end(child)}")
    return not stragglers


def _kill_all(children: Sequence[Child]) -> None:
    for child in children:
        child.kill()


async def _until(stop: asyncio.Event, children: Sequence[Child], start: Coroutine[Any, Any, None]) -> None:
    """Returns when `stop` is set; raises UpFailed when a service ends or the start fails."""
    starting: asyncio.Task[Any] = asyncio.create_task(start)
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    exits: dict[asyncio.Task[Any], Child] = {asyncio.create_task(child.process.wait()): child for child in children}
    tasks = {starting, stopping, *exits}
    try:
        while not stopping.done():
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                return
            if starting in done:
                starting.result()
            if ended := [exits[task] for task in done if task in exits]:
                raise UpFailed(f"{ended[0].plan.name} {ended[0].ending}; {_log_end(ended[0])}")
    finally:
        for task in (starting, stopping, *exits):
            task.cancel()


def _log_end(child: Child) -> str:
    tail = "\n".join(f"  | {line}" for line in child.log_tail().splitlines()) or "  | (its log is empty)"
    return f"the end of {child.log_path}:\n{tail}"


async def _announce_ready(
    config: tandem.UpConfig, children: Sequence[Child], tls: tandem.TlsPlan, lines: StatusLines
) -> None:
    began = time.monotonic()
    waiting = list(children)
    while waiting:
        seconds = time.monotonic() - began
        if seconds > config.ready_timeout:
            raise UpFailed(
                f"not ready after {seconds:.0f} s: {', '.join(child.plan.name for child in waiting)}; "
                f"{_log_end(waiting[0])}"
            )
        lines.wait([child.plan.name for child in waiting], seconds)
        ready = await asyncio.gather(*(_is_ready(child.plan, tls) for child in waiting))
        for child in [child for child, answer in zip(waiting, ready, strict=True) if answer]:
            plan = child.plan
            encrypted = tls.edge_ca if plan.command == "gateway" else tls.probing
            scheme = "https" if encrypted else "http"
            lines.say(
                f"  {plan.name:<17} ready after {time.monotonic() - began:4.1f} s   "
                f"gRPC {plan.address}   {scheme}://{plan.metrics}/metrics"
            )
            waiting.remove(child)
        await asyncio.sleep(_PROBE_INTERVAL_SECONDS)
    lines.say(_welcome(config, children))


async def _is_ready(plan: tandem.ServicePlan, tls: tandem.TlsPlan) -> bool:
    return await is_ready(plan.probe, plan.probe_address, Dial(tls.probing, plan.command), tls.edge_ca)


def _welcome(config: tandem.UpConfig, children: Sequence[Child]) -> str:
    gateway = next(child.plan for child in children if child.plan.command == "gateway")
    model, *aliases = gateway.flags[gateway.flags.index("--served-model-name") + 1].split(",")
    also = f" (also as {', '.join(aliases)})" if aliases else ""
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": "Tell me a story about a dog and a river."}],
    }
    host, port = split_address(config.rest_listen, "rest_listen")
    url = f"{'https' if config.tls_edge else 'http'}://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    trust = f"--cacert {config.tls_dir}/{CA_CERTIFICATE} " if config.tls_edge else ""
    headers = "-H 'content-type: application/json'"
    if config.api_keys:
        headers += ' -H "authorization: Bearer $BATON_API_KEY"'
    return (
        f"Baton is ready: {url} (REST), {config.grpc_listen} (gRPC), model {model}{also}\n\n"
        f"  curl -N {trust}{url}/v1/chat/completions {headers} -d '{json.dumps(body)}'\n\n"
        "Ctrl-C stops it."
    )


async def _stop_all(children: Sequence[Child], grace_seconds: float) -> list[Child]:
    """Stops stage by stage. Returns those that had to be killed."""
    killed: list[Child] = []
    ordered = sorted(children, key=lambda child: child.plan.stop_stage)
    for _, stage in groupby(ordered, key=lambda child: child.plan.stop_stage):
        members = list(stage)
        ended = await asyncio.gather(*(child.stop(grace_seconds) for child in members))
        killed += [child for child, by_itself in zip(members, ended, strict=True) if not by_itself]
    return killed
