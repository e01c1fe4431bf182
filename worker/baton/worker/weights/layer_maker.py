"""Makes the linears and norms of one layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.spec import AttentionSpec, NormSpec
from baton.worker.models.names import Layout, TensorNames
from baton.worker.quantization.base import LinearKind, LinearShape, Part
from baton.worker.weights.layouts import by_head
from baton.worker.weights.makers import Allocator


def make_norm(maker: Allocator, name: str, shape: tuple[int, ...], norm: NormSpec) -> Tensor:
    """Makes what `norm_of` takes."""
    if not norm.weighted:
        return torch.ones(shape, dtype=maker.dtype, device=maker.device)
    if norm.offset:
        # Half precision would round the sum, which is closer to 1 than the weight to 0.
        return maker.fill(f"{name}.weight", shape, maker.empty(shape, torch.float32), norm.offset)
    if not norm.bias:
        return maker.tensor(f"{name}.weight", shape)
    both = maker.empty((2, *shape))
    maker.fill(f"{name}.weight", shape, both[0])
    maker.fill(f"{name}.bias", shape, both[1])
    return both


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Makes the linears and norms of one layer."""

    maker: Allocator
    names: TensorNames
    prefix: str
    hidden: int
    norms: NormSpec

    def linear(
        self,
        suffixes: tuple[str, ...],
        sizes: tuple[int, ...],
        in_features: int,
        bias: bool = False,
        kind: LinearKind = "layer",
    ) -> LinearWeights:
        sizes = sizes if len(suffixes) > 1 else (sum(sizes),)
        parts = [Part(self.prefix + suffix, size) for suffix, size in zip(suffixes, sizes, strict=True)]
        return self.maker.linear(LinearShape(parts, in_features, bias, kind))

    def in_fp32(self) -> LayerMaker:
        """Returns a maker of tensors in fp32."""
        return replace(self, maker=replace(self.maker, dtype=torch.float32))

    def qkv(self, attention: AttentionSpec) -> LinearWeights:
        layer = self
        if self.names.layout is Layout.QKV_BY_HEAD:
            layer = replace(self, maker=self.maker.reading(partial(by_head, head_dim=attention.head_dim)))
        return layer.linear(self.names.qkv, attention.qkv_sizes, self.hidden, attention.qkv_bias)

    def needed_norm(self, suffix: str, shape: tuple[int, ...]) -> Tensor:
        """Makes a norm of `shape`."""
        return make_norm(self.maker, self.prefix + suffix, shape, self.norms)

    def norm(self, suffix: str, wanted: bool, shape: tuple[int, ...] = ()) -> Tensor | None:
        """Makes a norm of hidden_size elements, or of `shape`."""
        return make_norm(self.maker, self.prefix + suffix, shape or (self.hidden,), self.norms) if wanted else None
