"""Triton's interpreter for tests: sums in one order, and without work whose results are known or dropped."""

from __future__ import annotations

import math
import types
from dataclasses import replace
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def adapt_interpreter() -> None:
    """Changes the interpreter for as long as this process lives."""
    _multiply_in_one_order()
    _reduce_in_halves()
    # The interpreter computes each sum and product of integers again, in 64 bits, and looks at it only if it debugs.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _patch_language_once()
    _keep_types()


def _multiply_in_one_order() -> None:
    # The interpreter multiplies with NumPy, whose BLAS sums a row in an order that depends on the row's place on some
    # processors. The kernels' own promise, that it does not, is looked at here with sums in one order.
    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.einsum("...ij,...jk->...ik", a.astype(dtype), b.astype(dtype), optimize=False)

    numpy_in_one_order = types.ModuleType("numpy_in_one_order")
    numpy_in_one_order.__dict__.update({**vars(np), "matmul": matmul})
    interpreter.np = numpy_in_one_order


def _reduce_in_halves() -> None:
    # The interpreter calls the function of a reduction once for each element, for seconds a kernel. A GPU combines
    # halves, so that a function which depends on the order is wrong anyway.
    one_by_one = interpreter.ReduceOps.generic_reduce

    def in_halves(self: Any, values: Any) -> Any:
        if self.axis is None:
            return one_by_one(self, values)
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

    interpreter.ReduceOps.generic_reduce = in_halves


def _patch_language_once() -> None:
    # Every call from one function to another would look for what to replace in the whole language.
    patch = interpreter._patch_lang
    patched: set[frozenset[int]] = set()

    def patch_once(function: Any) -> Any:
        languages = [
            value for value in function.__globals__.values() if value is interpreter.tl or value is interpreter.tl.core
        ]
        names = frozenset(map(id, languages))
        if names not in patched:
            patched.add(names)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _keep_types() -> None:
    # Each value has a type of its own, whose shape and name are put together anew: a third of the time of a kernel.
    np_dtype, init_block = interpreter._get_np_dtype, core.block_type.__init__
    np_dtypes: dict[str, np.dtype] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def kept_np_dtype(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    def init_kept_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(one.value if isinstance(one, core.constexpr) else one for one in shape)
        key = (type(element_ty), element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.tuple([core.constexpr(one) for one in sizes]), core.constexpr(math.prod(sizes))
        self.shape, self.numel = shapes[sizes]

    interpreter._get_np_dtype = kept_np_dtype
    core.block_type.__init__ = init_kept_block
    core.tensor.__init__ = init_tensor
