"""Weights as trees of dataclasses, tuples and mappings, with tensors as leaves. Two leaves may share a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns each tensor once, in an order that is the same for all trees of one structure."""
    return list({id(tensor): tensor for tensor in _leaves(tree)}.values())


def mapped(tree: T, change: Callable[[Tensor], Tensor]) -> T:
    """Returns the tree with `change` applied to each tensor, once to a shared one."""
    changed = {id(tensor): change(tensor) for tensor in tensors_of(tree)}
    return _rebuilt(tree, changed)  # type: ignore[no-any-return]


def _leaves(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    for child in _children(node).values():
        yield from _leaves(child)


def _children(node: Any) -> Mapping[Any, Any]:
    if isinstance(node, Mapping):
        return node
    if isinstance(node, tuple):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return {}


def _rebuilt(node: Any, changed: Mapping[int, Tensor]) -> Any:
    if isinstance(node, Tensor):
        return changed[id(node)]
    children = {key: _rebuilt(child, changed) for key, child in _children(node).items()}
    if not children or all(children[key] is child for key, child in _children(node).items()):
        return node
    if isinstance(node, Mapping):
        return children
    return tuple(children.values()) if isinstance(node, tuple) else dataclasses.replace(node, **children)
