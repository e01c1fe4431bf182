"""Runs planned services until a signal, and stops them without leaving anything behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from baton.rpc.channel import Dial
from baton.services.process.signals import watch_signals
from baton.services.up.processes import Child
from baton.services.up.readiness import is_ready
from baton.services.up.start_log import StartLog
from baton.services.up.status_lines import StatusLines
from baton.services.up.tandem import ServicePlan, TlsPlan

_STOP_GRACE_SECONDS = 10.0  # beyond the drain
_PROBE_INTERVAL_SECONDS = 0.1


class UpFailed(Exception):
    """The services cannot continue. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Services to run, and how long they may take."""

    plans: Sequence[ServicePlan]
    tls: TlsPlan
    log_dir: Path
    drain_timeout: float
    ready_timeout: float
    welcome: str  # printed once all are ready

    async def run(self, environ: Mapping[str, str], lines: StatusLines) -> bool:
        """Returns True if it was stopped as requested and all processes ended by themselves. Raises UpFailed."""
        stop = asyncio.Event()
        children: list[Child] = []
        watch_signals(stop, lambda _: _kill_all(children))
        grace = self.drain_timeout + _STOP_GRACE_SECONDS
        try:
            # All at once: every service waits for those it needs.
            for plan in reversed(self.plans):
                children.append(await Child.start(plan, self.log_dir, environ))
            await _until(stop, children, self._announce(children, lines))
        except BaseException:
            await _stop_all(children, grace)
            raise
        lines.say("stopping")
        stragglers = await _stop_all(children, grace)
        for child in stragglers:
            lines.say(f"{child.plan.name} had to be killed; {_log_end(child)}")
        return not stragglers

    async def _announce(self, children: Sequence[Child], lines: StatusLines) -> None:
        """Reports what the services do until all are ready, and then how to use them."""
        began = time.monotonic()
        waiting = [(child, StartLog(child.log_path)) for child in children]
        while waiting:
            seconds = time.monotonic() - began
            if seconds > self.ready_timeout:
                names = ", ".join(child.plan.name for child, _ in waiting)
                raise UpFailed(f"not ready after {seconds:.0f} s: {names}; {_log_end(waiting[0][0])}")
            progress = {child.plan.name: log.progress for child, log in waiting if log.progress is not None}
            lines.wait([child.plan.name for child, _ in waiting], seconds, progress)
            ready = await asyncio.gather(*(self._is_ready(child.plan) for child, _ in waiting))
            for (child, log), is_ready_now in zip(list(waiting), ready, strict=True):
                for phase in log.read():
                    lines.say(f"  {child.plan.name:<17} {phase}")
                if is_ready_now:
                    lines.say(self._ready_line(child.plan, time.monotonic() - began))
                    waiting.remove((child, log))
            await asyncio.sleep(_PROBE_INTERVAL_SECONDS)
        lines.say(self.welcome)

    async def _is_ready(self, plan: ServicePlan) -> bool:
        return await is_ready(plan.probe, plan.probe_address, Dial(self.tls.probing, plan.command), self.tls.edge_ca)

    def _ready_line(self, plan: ServicePlan, seconds: float) -> str:
        encrypted = self.tls.edge_ca if plan.command == "gateway" else self.tls.probing
        scheme = "https" if encrypted else "http"
        return (
            f"  {plan.name:<17} ready after {seconds:4.1f} s   gRPC {plan.address}   {scheme}://{plan.metrics}/metrics"
        )


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


async def _stop_all(children: Sequence[Child], grace_seconds: float) -> list[Child]:
    """Stops stage by stage. Returns those that had to be killed."""
    killed: list[Child] = []
    ordered = sorted(children, key=lambda child: child.plan.stop_stage)
    for _, stage in groupby(ordered, key=lambda child: child.plan.stop_stage):
        members = list(stage)
        ended = await asyncio.gather(*(child.stop(grace_seconds) for child in members))
        killed += [child for child, by_itself in zip(members, ended, strict=True) if not by_itself]
    return killed
