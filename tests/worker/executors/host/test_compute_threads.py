"""How compute threads wait: awake within a step, asleep between steps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton.worker.executors.host.compute_threads import thread_waits

# A parallel op, and the CPU that the process takes while it has nothing to compute.
_IDLE = """
import time, torch
torch.set_num_threads(2)
x = torch.randn(512, 512)
taken = []
for _ in range(5):
    torch.relu(x)
    started = time.process_time()
    time.sleep(0.1)
    taken.append(time.process_time() - started)
print(min(taken))
"""


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_what_the_user_chose_is_kept(chosen: dict[str, str]) -> None:
    assert thread_waits(chosen) == {}


def test_threads_stop_waiting_awake_soon_after_an_op() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environ |= thread_waits(environ)
    assert environ["GOMP_SPINCOUNT"] != "0"
    found = subprocess.run([sys.executable, "-c", _IDLE], env=environ, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 0.002, "compute threads take CPU between steps"
