"""NCCL communicators that are aborted at bad moments, on GPUs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from support.transfer.nccl_ends import WAIT_SECONDS, abort_while_a_launch_waits

from baton.rpc.errors import DeadlineExceeded

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(180)
def test_an_abort_waits_for_a_move_whose_launch_waits(tmp_path: Path) -> None:
    assert abort_while_a_launch_waits(tmp_path) == [0, 0]


def test_a_pair_without_a_peer_ends() -> None:
    from baton.worker.transfer.kinds.nccl.pair import Pair

    memory = torch.zeros(1, dtype=torch.uint8, device="cuda")
    ended = threading.Event()
    pair = Pair(None, 1, ended.set)
    with pytest.raises(DeadlineExceeded, match="did not join"):
        pair.meet(memory.data_ptr(), int(torch.cuda.current_stream().cuda_stream), 0.5)
    assert ended.wait(WAIT_SECONDS)
