"""KV between processes that load code all the time: that waits for whatever a device does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.transfer.gpu_pairs import other_end
from support.transfer.kv_pusher import (
    EPOCH,
    GENERATION,
    SOURCE,
    KvPusher,
    loading_code,
    make_pool,
    make_transports,
    next_event,
)
from support.transfer.kv_taker import TARGET

from baton.worker.transfer.base import Inbound, Landed, Pushed

NUM_TRANSFERS = 50

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("checksum", [True, False], ids=["verified", "plain"])
@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_code_that_is_loaded_holds_no_transfer_up(kind: str, checksum: bool, tmp_path: Path) -> None:
    pool, source = make_pool(2), make_pool(1).view(torch.int16)
    transports = make_transports(kind, pool)
    (address,) = transports.addresses
    of_sender = tmp_path / "sender"
    of_sender.mkdir()
    sender = other_end(KvPusher, kind, address, of_sender)
    try:
        sender.wait_ready()
        with loading_code(tmp_path):
            for number in range(1, NUM_TRANSFERS + 1):
                pool[:, list(TARGET)] = 0
                torch.cuda.synchronize()
                transports.open(Inbound(number, EPOCH, GENERATION, TARGET, checksum))
                sender.begin("push", number, checksum)
                event = next_event(transports, number)
                assert isinstance(event, Landed), event
                assert torch.equal(pool.view(torch.int16)[:, list(TARGET)], source[:, list(SOURCE)])
                assert isinstance(sender.result(), Pushed)
        sender.close()
    finally:
        sender.kill()
        transports.close()
