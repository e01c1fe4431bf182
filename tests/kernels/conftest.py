"""Kernels run twice: small cases in Triton's interpreter, in a process of their own, and the grid on a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Triton is made for Linux: elsewhere there is only the reference to test.
_REFERENCE = "test_reference.py"
_found = {path.name for path in Path(__file__).parent.glob("test_*.py")}
collect_ignore = [] if find_spec("triton") else sorted(_found - {_REFERENCE})


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    marked = request.node.get_closest_marker("interpreted") is not None
    if marked and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("interpreted tests need TRITON_INTERPRET=1 in the environment before pytest starts", pytrace=False)
    torch.manual_seed(5)


if os.environ.get("TRITON_INTERPRET") == "1":
    # The interpreter multiplies with NumPy, whose BLAS sums a row in an order that depends on the row's place on some
    # processors. The kernels' own promise, that it does not, is looked at here with sums in one order.
    import types

    import numpy as np
    from triton.runtime import interpreter

    def _matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.einsum("...ij,...jk->...ik", a.astype(dtype), b.astype(dtype), optimize=False)

    numpy_in_one_order = types.ModuleType("numpy_in_one_order")
    numpy_in_one_order.__dict__.update({**vars(np), "matmul": _matmul})
    interpreter.np = numpy_in_one_order
