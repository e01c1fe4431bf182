"""Fixtures that every area shares: ports, Redis, and real services as processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from slow_files import in_turns, read_slow_files
from support.processes import ports, stack
from support.processes.stack import RedisServer, Stack
from support.transfer.rig import TransferRig

StackFactory = Callable[..., Stack]

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as workers do
gc.disable()  # until all is collected: next to nothing of it is garbage, and looking took a quarter of the time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first. Every process of pytest-xdist comes to the same order."""
    items[:] = [items[place] for place in in_turns([item.path for item in items], read_slow_files())]


def pytest_collection_finish() -> None:
    """Excludes all that was imported and collected from garbage collection, which takes half a second otherwise."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Adds the end of each service's log, and the stacks of a transfer's workers, to the report of a failure."""
    report = yield
    if report.failed:
        for rig in item.funcargs.values() if report.when == "call" else ():
            if isinstance(rig, TransferRig):
                report.sections += [(f"worker {name}", text) for name, text in rig.autopsies()]
        for one in stack.running():
            for name, service in one.services.items():
                report.sections.append((f"log of {name}", service.log_tail()))
    return report


@pytest.fixture
def abort_seconds() -> float:
    """How long clients come and go again; BATON_TEST_ABORT_SECONDS=600 is the long form."""
    return float(os.environ.get("BATON_TEST_ABORT_SECONDS", "10"))


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
        yield partial(stack.start_stack, tmp_path, cleanup)


@pytest.fixture(scope="session")
def tandem_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker with the sample model, shared by tests that leave it as it was."""
    with ExitStack() as cleanup:
        yield stack.start_stack(tmp_path_factory.mktemp("tandem"), cleanup)
