"""Whole workers, and the transport of their KV."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.processes import ports
from support.processes.worker_harness import NAMESPACE, Worker, running_worker, submit

from baton.v1 import kv_pb2, types_pb2

NUM_REQUESTS = 4


def submits(prefill: Worker) -> list[Any]:
    endpoint = types_pb2.Endpoint(worker_id="p", epoch=1, address=prefill.address)
    prompts = [[10 + (slot * 7919 + i * 104729) % 3000 for i in range(200)] for slot in range(NUM_REQUESTS)]
    return [submit(slot, prompt, 6, cache_namespace=NAMESPACE, prefill=endpoint) for slot, prompt in enumerate(prompts)]


@contextlib.asynccontextmanager
async def pair(prefill: str, decode: str) -> AsyncIterator[tuple[Worker, Worker]]:
    first, second = ports.free_ports(2)
    async with (
        running_worker(first, role="prefill", verify_transfers=True, transports=prefill) as sender,
        running_worker(second, role="decode", verify_transfers=True, transports=decode) as receiver,
    ):
        yield sender, receiver


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ("auto", "auto", kv_pb2.TRANSPORT_KIND_IPC),
        ("tcp,ipc", "auto", kv_pb2.TRANSPORT_KIND_TCP),  # the sender's order
        ("auto", "tcp", kv_pb2.TRANSPORT_KIND_TCP),
    ],
)
async def test_kv_uses_the_first_common_transport_in_the_senders_order(
    prefill: str, decode: str, expected: int
) -> None:
    async with pair(prefill, decode) as (sender, receiver):
        slots = await receiver.stream().generate(*submits(sender))
        assert all(slot.finish.num_transferred_tokens for slot in slots)
        stats = await receiver.until_idle()
        assert stats.counters.num_transfers == NUM_REQUESTS
        moved = {rate.kind for rate in stats.counters.transfers.rates if rate.received_bytes_per_second}
        assert moved == {expected}


async def test_workers_with_nothing_in_common_compute_for_themselves() -> None:
    async with pair("ipc", "tcp") as (sender, receiver):
        slots = await receiver.stream().generate(*submits(sender))
        assert all(slot.finish and not slot.finish.num_transferred_tokens for slot in slots)
        assert (await receiver.until_idle()).counters.num_transfers == 0


def test_a_wrong_name_is_an_error_at_the_start() -> None:
    command = [sys.executable, "-m", "baton.services.cli", "worker", "--transports", "tcp,udp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "transports=tcp,udp: 'udp' is unknown; it must be auto, none, or some of ipc, nccl, rdma, tcp" in done.stderr
