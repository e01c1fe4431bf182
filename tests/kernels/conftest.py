"""Kernels run twice: small cases in Triton's interpreter, in a process of their own, and the grid on a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Triton is made for Linux: elsewhere there is only the reference to test.
_REFERENCE = "test_reference.py"
_found = {str(path.relative_to(Path(__file__).parent)) for path in Path(__file__).parent.rglob("test_*.py")}
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
    from dataclasses import replace
    from typing import Any

    import numpy as np
    from triton.runtime import interpreter

    def _matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.einsum("...ij,...jk->...ik", a.astype(dtype), b.astype(dtype), optimize=False)

    numpy_in_one_order = types.ModuleType("numpy_in_one_order")
    numpy_in_one_order.__dict__.update({**vars(np), "matmul": _matmul})
    interpreter.np = numpy_in_one_order

    # The interpreter calls the function of a reduction once for each element, for seconds a kernel. A GPU combines
    # halves, so that a function which depends on the order is wrong anyway.
    _one_by_one = interpreter.ReduceOps.generic_reduce

    def _in_halves(self: Any, values: Any) -> Any:
        if self.axis is None:
            return _one_by_one(self, values)
        kinds = [value.dtype for value in values]
        data = [value.handle.data for value in values]
        while data[0].shape[self.axis] > 1:
            halves = zip(*(np.split(one, 2, self.axis) for one in data), strict=True)
            left, right = ([self.to_tensor(*pair) for pair in zip(half, kinds, strict=True)] for half in halves)
            found = self.combine_fn.fn(*left, *right)
            data = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
        if not self.keep_dims:
            data = [one.squeeze(self.axis) for one in data]
        return [self.to_tensor(*pair) for pair in zip(data, kinds, strict=True)]

    interpreter.ReduceOps.generic_reduce = _in_halves

    # The interpreter computes each sum and product of integers again, in 64 bits, and looks at it only if it debugs.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    # Every call from one function to another would look for what to replace in the whole language.
    _replace = interpreter._patch_lang
    _replaced: set[frozenset[int]] = set()

    def _replace_once(function: Any) -> Any:
        languages = [
            value for value in function.__globals__.values() if value is interpreter.tl or value is interpreter.tl.core
        ]
        names = frozenset(map(id, languages))
        if names not in _replaced:
            _replaced.add(names)
            _replace(function)  # for as long as this process lives
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _replace_once
