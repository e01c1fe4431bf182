"""Prefill and decode workers whose hand-over the tests of several files disturb."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.transfer.rig import SIM, TRANSPORTS, TransferRig, transfer_rig


@pytest.fixture(scope="module", params=TRANSPORTS)
def sim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransferRig]:
    """Workers with simulated devices. Tests restart the workers that they kill."""
    with transfer_rig(tmp_path_factory.mktemp("sim"), SIM, request.param) as rig:
        yield rig
