"""Fixtures that every area shares: ports, Redis, and real services as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
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


@pytest.fixture
def start_stack(tmp_path: Path) -> Iterator[StackFactory]:
    """Starts tandems with `start_stack(executor="sim", prefill_workers=1, ..., extra={"worker": (flags)})`."""
    with ExitStack() as cleanup:
        yield partial(_start, tmp_path, cleanup)


@pytest.fixture(scope="session")
def tandem_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker with the sample model, shared by tests that leave it as it was."""
    with ExitStack() as cleanup:
        yield _start(tmp_path_factory.mktemp("tandem"), cleanup)


def _start(
    folder: Path,
    cleanup: ExitStack,
    extra: Mapping[str, tuple[str, ...]] | None = None,
    environ: Mapping[str, str] | None = None,
    **config: Any,
) -> Stack:
    defaults = {"model": str(MODEL), "served_model_name": MODEL_NAME}
    listen = {"rest_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    settings = tandem.UpConfig(**{**defaults, **listen, **config})
    stack = Stack.planned(Path(mkdtemp(dir=folder)), settings, environ or {}, extra or {})
    cleanup.callback(stack.stop)
    stack.start()
    return stack
