"""The first start on a machine: processes compile all kernels, and the engine's process none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.engine.gpu_engines import make_model

pytestmark = pytest.mark.gpu

_UTILITIES = "cuda_utils"  # Triton's own, needed before any kernel


def test_the_engines_process_compiles_nothing(tmp_path: Path) -> None:
    make_model("llama-128", tmp_path / "model", torch.bfloat16)
    environ = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "support.engine.first_start", str(tmp_path / "model")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True)
    said = json.loads(ended.stdout.splitlines()[-1])
    assert len(said["found"]) > 20
    assert said["compiled"] == []
    assert set(said["built"]) <= {_UTILITIES}
