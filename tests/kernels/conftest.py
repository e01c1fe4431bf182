"""Kernels run twice: small cases in Triton's interpreter, in a process of their own, and the grid on a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Triton is made for Linux: elsewhere there is only the reference to test.
_REFERENCE = "test_reference"
_found = {str(path.relative_to(Path(__file__).parent)) for path in Path(__file__).parent.rglob("test_*.py")}
collect_ignore = (
    [] if find_spec("triton") else sorted(path for path in _found if not Path(path).name.startswith(_REFERENCE))
)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    marked = request.node.get_closest_marker("interpreted") is not None
    if marked and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("interpreted tests need TRITON_INTERPRET=1 in the environment before pytest starts", pytrace=False)
    torch.manual_seed(5)


if os.environ.get("TRITON_INTERPRET") == "1":
    from support.kernels.interpreter import adapt_interpreter

    adapt_interpreter()
