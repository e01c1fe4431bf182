"""Shapes that hold the same elements in the same order."""

from __future__ import annotations


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape without dimensions of one element, which files may have or lack."""
    return tuple(size for size in shape if size != 1)
