"""The fleet that is attacked: keys, tenants, and what one request costs all of its processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from attack.cases.case import Case
from attack.client import Answer, send
from attack.usage import cpu_seconds, resident_bytes
from support.network.otlp_collector import Collector
from support.processes.stack import Stack, start_stack

from baton.gateway.access.keys.api_key import digest_of, id_of, new_key

ANSWER_SECONDS = 420.0  # a whole answer may fill the context: 65,536 tokens, of 4.4 ms or more
_WARM_UP_SECONDS = 60.0
REQUESTS_PER_MINUTE = 1_000_000  # of the tenant of the search: counted, and never reached
_QUIET_SHARE = 0.3  # of a core beyond the idle fleet's: the request is still worked on
_QUIET_SECONDS = 0.1
_QUIET_LIMIT = 20.0
_STAYS_SECONDS = 1.0
_SMALL_GROWTH = 5_000_000
STAYS = 20_000_000  # bytes that may stay
_REPEATS = 3  # of a case after which more stays


@dataclass(frozen=True, slots=True)
class Cost:
    """What one case cost."""

    case: Case
    answer: Answer
    cpu: float  # seconds of all services: to the first token and what goes on after its client left
    grown: int  # bytes that stay, of the last time that it was sent
    latest: float  # the slowest answer to the probe, in seconds
    stall: float  # of the event loop, in seconds
    counted: bool  # against its tenant's requests
    parts: Mapping[str, float] = field(default_factory=dict)  # of `cpu`, by service, the idle fleet's included


class Probe:
    """The probing process."""

    def __init__(self, port: int, pid: int) -> None:
        program = Path(__file__).with_name("probe.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(port), str(pid)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def take(self) -> tuple[float, float]:
        """Returns the slowest answer and the longest stall since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        latest, stall = self._process.stdout.readline().split()
        return float(latest), float(stall)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


class Attacked:
    """A running fleet with its keys and its probe. `collector`: of the spans of requests with a trace context."""

    def __init__(self, folder: Path, cleanup: ExitStack, executor: str, collector: Collector | None = None) -> None:
        self.collector = collector
        self.keys = {name: new_key()[0] for name in ("search", "attacker", "neighbour")}
        _write_keys(folder / "keys.json", self.keys)
        self.stack: Stack = start_stack(
            folder, cleanup, executor=executor, decode_workers=1, prefill_workers=0,
            api_keys=str(folder / "keys.json"), trace_sampling=0,
            otlp_endpoint="" if collector is None else collector.address,
        )  # fmt: skip
        self.port = int(self.stack.rest.rpartition(":")[2])
        self._services = {name: one.process.pid for name, one in self.stack.services.items() if one.process is not None}
        self.roots = list(self._services.values())
        gateway = self.stack["gateway"].process
        assert gateway is not None
        self.probe = Probe(self.port, gateway.pid)
        cleanup.callback(self.probe.close)
        self._idle_share = 0.0

    def rest(self, seconds: float = 2.0) -> float:
        """Measures the idle fleet and its probe; returns the part of a core that they use."""
        cpu, began = cpu_seconds(self.roots), time.monotonic()
        time.sleep(seconds)
        self._idle_share = (cpu_seconds(self.roots) - cpu) / (time.monotonic() - began)
        return self._idle_share

    def warm_up(self, cases: list[Case], seconds: float = _WARM_UP_SECONDS) -> None:
        """Sends requests that nothing is measured of: imports, caches and allocators have their size afterwards.

        `seconds`: after which the client of a long answer leaves.
        """
        for case in cases:
            send(self.port, self.keys["search"], case, seconds)
        self._settle(time.monotonic() + _QUIET_LIMIT)
        self.probe.take()

    def cost(self, case: Case) -> Cost:
        """Sends a case and returns what it cost."""
        memory = resident_bytes(self.roots)
        self.probe.take()
        before = self._cpu_of_services()
        began = time.monotonic()
        answer = send(self.port, self.keys["search"], case, ANSWER_SECONDS)
        self._settle(began + ANSWER_SECONDS + _QUIET_LIMIT)
        parts = {name: cpu - before[name] for name, cpu in self._cpu_of_services().items()}
        spent = sum(parts.values()) - self._idle_share * (time.monotonic() - began)
        latest, stall = self.probe.take()
        grown = self._lasting_growth(case, memory)
        counted = int(answer.headers.get("x-ratelimit-remaining-requests", REQUESTS_PER_MINUTE)) < REQUESTS_PER_MINUTE
        return Cost(case, answer, max(0.0, spent), grown, latest, stall, counted, parts)

    def _cpu_of_services(self) -> dict[str, float]:
        return {name: cpu_seconds([pid]) for name, pid in self._services.items()}

    def _settle(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            cpu, began = cpu_seconds(self.roots), time.monotonic()
            time.sleep(_QUIET_SECONDS)
            used = (cpu_seconds(self.roots) - cpu) / (time.monotonic() - began)
            if used <= self._idle_share + _QUIET_SHARE:
                return

    def _lasting_growth(self, case: Case, before: int) -> int:
        """The growth since `before`; where that is too much, by the case sent again."""
        grown = self._growth(before)
        for _ in range(_REPEATS):
            if grown <= STAYS:
                break
            before, began = resident_bytes(self.roots), time.monotonic()
            send(self.port, self.keys["search"], case, ANSWER_SECONDS)
            self._settle(began + ANSWER_SECONDS + _QUIET_LIMIT)
            grown = self._growth(before)
        return grown

    def _growth(self, before: int) -> int:
        grown = resident_bytes(self.roots) - before
        deadline = time.monotonic() + _STAYS_SECONDS
        while grown > _SMALL_GROWTH and time.monotonic() < deadline:
            time.sleep(0.1)
            grown = resident_bytes(self.roots) - before
        return grown


def _write_keys(path: Path, keys: dict[str, str]) -> None:
    entries = [{"id": id_of(key), "tenant": name, "sha256": digest_of(key).hex()} for name, key in keys.items()]
    tenants = {
        "search": {"requests_per_minute": REQUESTS_PER_MINUTE},
        # As in the example of docs/guides/keys-and-limits.md.
        "attacker": {"requests_per_minute": 600, "input_tokens_per_minute": 200_000, "concurrent_requests": 64},
        "neighbour": {},
    }
    path.write_text(json.dumps({"keys": entries, "tenants": tenants}))
