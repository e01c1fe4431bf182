"""Injects and repairs faults in a running fleet, with one function for each kind of fault."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
from collections.abc import Callable

import hiredis
import psutil
from chaos.fleet.faults import Fault, Planned, target_of
from chaos.fleet.fleet import Fleet, engine_of_service, processes_of
from chaos.fleet.proxies import Proxies
from support.processes.stack import Service

Mend = Callable[[], None]

_SLOW_BYTES_PER_SECOND = 20_000.0
_CLOCK_JUMPS = (3600.0, -3600.0, 90.0, -90.0)
_STOP_SECONDS = 30.0


def hurt(fleet: Fleet, planned: Planned) -> Mend:
    """Injects a fault. Returns a function that repairs it, which may take seconds. POOLS_FULL is left to the load."""
    fault = planned.fault
    if fault is Fault.CLOCK_JUMPS:
        fleet.set_clock(_CLOCK_JUMPS[planned.target % len(_CLOCK_JUMPS)])
        return lambda: fleet.set_clock(0.0)
    if fault is Fault.DISK_FULL:
        return _fill_disk(fleet)
    if fault in _REDIS:
        return _REDIS[fault](fleet)
    kind = target_of(fault)
    if not kind:
        return lambda: None
    services = fleet.of(kind)
    service = services[planned.target % len(services)]
    if fault in _LINKS:
        return _LINKS[fault](fleet.proxies, service.plan.name) if fleet.proxies is not None else (lambda: None)
    if fault in _RESTARTS:
        return _restart_beside(fleet, service)
    return _SERVICES[fault](service)


def start_anew(service: Service) -> None:
    """Ends remaining processes of a service and restarts it."""
    if service.process is not None:
        with contextlib.suppress(psutil.Error):
            for process in processes_of(service):
                process.kill()
        service.process.kill()
        service.process.wait(_STOP_SECONDS)
    service.start()


def restart(service: Service) -> None:
    """As an upgrade does: SIGTERM, its exit awaited, and a new one. Raises AssertionError for a wrong exit code."""
    assert service.process is not None
    service.process.terminate()
    code = service.process.wait(_STOP_SECONDS)
    assert code == 0, f"{service.plan.name} ended with {code}:\n{service.log_tail()}"
    service.start()


def _kill(service: Service) -> Mend:
    assert service.process is not None
    service.process.send_signal(signal.SIGKILL)
    return lambda: start_anew(service)


def _stop_front(service: Service) -> Mend:
    assert service.process is not None
    service.process.send_signal(signal.SIGSTOP)
    return lambda: start_anew(service)


def _stop_for_a_while(service: Service) -> Mend:
    assert service.process is not None
    service.process.send_signal(signal.SIGSTOP)
    return lambda: service.process.send_signal(signal.SIGCONT) if service.process is not None else None


def _signal_engine(service: Service, number: int) -> Mend:
    engine = engine_of_service(service)
    if engine is not None:
        engine.send_signal(number)
    return lambda: start_anew(service)


def _restart_beside(fleet: Fleet, service: Service) -> Mend:
    """The streams that it has are to move or end meanwhile."""
    restarting = fleet.threads.submit(restart, service)
    return lambda: restarting.result()


def _fill_disk(fleet: Fleet) -> Mend:
    """No process may make any file longer: as on a full disk, every such write fails."""
    changed = []
    for service in fleet.services:
        for process in processes_of(service):
            with contextlib.suppress(psutil.Error):
                soft, hard = process.rlimit(resource.RLIMIT_FSIZE)
                process.rlimit(resource.RLIMIT_FSIZE, (0, hard))
                changed.append((process, (soft, hard)))

    def mend() -> None:
        for process, limits in changed:
            with contextlib.suppress(psutil.Error):
                process.rlimit(resource.RLIMIT_FSIZE, limits)

    return mend


def ask_redis(fleet: Fleet, *words: str) -> object:
    """One command's answer. Raises OSError where Redis is not there."""
    reader = hiredis.Reader()
    with socket.create_connection(("127.0.0.1", fleet.redis.port), timeout=10) as sock:
        sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
        answer = reader.gets()
        while answer is False:
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("Redis ended the connection")
            reader.feed(data)
            answer = reader.gets()
    return answer


def _kill_redis(fleet: Fleet) -> Mend:
    process = fleet.redis.process
    assert process is not None
    process.kill()
    process.wait(_STOP_SECONDS)
    return fleet.redis.start


def _stop_redis(fleet: Fleet) -> Mend:
    process = fleet.redis.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


def _wipe_redis(fleet: Fleet) -> Mend:
    ask_redis(fleet, "FLUSHALL")
    return lambda: None


def _starve_redis(fleet: Fleet) -> Mend:
    ask_redis(fleet, "CONFIG", "SET", "maxmemory", "1")

    def mend() -> None:
        ask_redis(fleet, "CONFIG", "SET", "maxmemory", "0")

    return mend


def _cut(proxies: Proxies, name: str) -> Mend:
    proxies.cut(name)
    return lambda: None


def _stall(proxies: Proxies, name: str) -> Mend:
    proxies.stall(name)
    return lambda: proxies.heal(name)


def _slow(proxies: Proxies, name: str) -> Mend:
    proxies.slow(name, _SLOW_BYTES_PER_SECOND)
    return lambda: proxies.heal(name)


_REDIS: dict[Fault, Callable[[Fleet], Mend]] = {
    Fault.REDIS_KILLED: _kill_redis,
    Fault.REDIS_STOPPED: _stop_redis,
    Fault.REDIS_WIPED: _wipe_redis,
    Fault.REDIS_FULL: _starve_redis,
}
_LINKS: dict[Fault, Callable[[Proxies, str], Mend]] = {
    Fault.LINK_CUT: _cut,
    Fault.LINK_STALLED: _stall,
    Fault.LINK_SLOW: _slow,
}
_RESTARTS = (Fault.WORKER_RESTARTED, Fault.GATEWAY_RESTARTED)
_SERVICES: dict[Fault, Callable[[Service], Mend]] = {
    Fault.FRONT_KILLED: _kill,
    Fault.ENGINE_KILLED: lambda service: _signal_engine(service, signal.SIGKILL),
    Fault.FRONT_STOPPED: _stop_front,
    Fault.ENGINE_STOPPED: lambda service: _signal_engine(service, signal.SIGSTOP),
    Fault.PREFILL_KILLED: _kill,
    Fault.GATEWAY_KILLED: _kill,
    Fault.ROUTER_KILLED: _kill,
    Fault.ROUTER_STOPPED: _stop_for_a_while,
    Fault.KVSTORE_KILLED: _kill,
}
