"""Fixtures that every area shares: ports, Redis, and real services as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import MODEL, MODEL_NAME, RedisServer, Stack

from baton.services import ports, tandem

StackFactory = Callable[..., Stack]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Adds the end of every service's log to a failure's report."""
    report = yield
    if report.failed:
        for stack in item.funcargs.values() if hasattr(item, "funcargs") else ():
            if isinstance(stack, Stack):
                for name, service in stack.services.items():
                    report.sections.append((f"log of {name}", service.log_tail()))
    return report


@pytest.fixture
def free_port() -> int:
    return ports.free_ports(1)[0]


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, ports.free_ports(1)[0])
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackFactory]:
    """Starts tandems with `start_stack(executor="sim", prefill_workers=1, ..., extra={"worker": (flags)})`.

    All that still run are stopped at the session's end; a test that wants it earlier calls stop().
    """
    stacks: list[Stack] = []

    def start(extra: dict[str, tuple[str, ...]] | None = None, environ: dict[str, str] | None = None, **config: Any) -> Stack:
        defaults = {"model": str(MODEL), "served_model_name": MODEL_NAME}
        listen = {"rest_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
        settings = tandem.UpConfig(**{**defaults, **listen, **config})
        stack = Stack.planned(tmp_path_factory.mktemp("stack"), settings, environ or {}, extra or {})
        stacks.append(stack)
        stack.start()
        return stack

    yield start
    for stack in stacks:
        stack.stop()


@pytest.fixture(scope="session")
def tandem_stack(start_stack: StackFactory) -> Stack:
    """One prefill and one decode worker with the sample model, shared by tests that leave it as it was."""
    return start_stack()
