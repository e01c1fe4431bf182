"""Baton's attention under Transformers' attention interface: a layer's calls go to its device's paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from baton.worker.layers.device import AttentionOps

ATTENTION = "baton"  # its name in Transformers; there are no masks of this name, so that models make none
_LAYER = "baton_layer"  # attribute of attention modules

S = TypeVar("S")


class RunningStep(Generic[S]):
    """The step that a model computes, for its layers."""

    __slots__ = ("on_written", "step")

    def __init__(self) -> None:
        self.step: S | None = None
        self.on_written: Callable[[int], None] | None = None


class PagedLayer(Generic[S]):
    """Attention of layer `index`. The model has rotated queries and keys."""

    def __init__(self, index: int, ops: AttentionOps[S], running: RunningStep[S], dtype: torch.dtype) -> None:
        self._index = index
        self._ops = ops
        self._running = running
        self._dtype = dtype  # of the KV cache's writer

    def attach(self, module: nn.Module) -> None:
        """Makes the calls of an attention module come here."""
        module.__dict__[_LAYER] = self

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores keys and values [1, kv heads, tokens, head_dim]. Returns [1, tokens, q heads, head_dim]."""
        running, num_heads = self._running, query.shape[1]
        assert running.step is not None, "attention runs within a step"
        qkv = torch.cat([part[0].transpose(0, 1) for part in (query, key, value)], dim=1)
        queries = self._ops.write(qkv.flatten(1).to(self._dtype), running.step)
        if running.on_written is not None:
            running.on_written(self._index)
        attended = self._ops.attend(queries, running.step, None)
        return attended.view(1, len(attended), num_heads, -1).to(query.dtype)


def register() -> None:
    """Gives Transformers the attention. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_more: Any
) -> tuple[Tensor, None]:
    layer: PagedLayer[Any] = getattr(module, _LAYER)
    return layer.attend(query, key, value), None
