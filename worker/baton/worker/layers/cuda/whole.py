"""Runs a model on a GPU over whole prompts, without a KV cache. Never waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.attention.whole import WholeTiles
from baton.kernels.rope.rope_cache import rope_in_place
from baton.kernels.table import Case, find
from baton.rpc.errors import Unsupported
from baton.worker.layers.cuda.base import CudaLinears
from baton.worker.layers.device import StateTensors
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.relative import distance_buckets
from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import AttentionSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.layers.table import Table
from baton.worker.quantization.neighbours import Norm


class WholeInputs(NamedTuple):
    """Whole prompts, one after another. Implements baton.worker.models.decoder.Step. Tensors are int32."""

    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    token_types: Tensor | None  # [num_tokens]
    tiles: WholeTiles

    @property
    def fuse_norms(self) -> bool:
        """False, so that results do not depend on the number of tokens of a step."""
        return False


class CudaWholeAttention:
    """Implements AttentionOps without a cache: `write` returns queries, keys and values."""

    def __init__(
        self,
        spec: AttentionSpec,
        dtype: torch.dtype,
        cos_sin: Tensor,
        q_norm: Norm | None,
        k_norm: Norm | None,
        relative: Tensor | None,
    ) -> None:
        case = Case(
            "cuda",
            dtype=dtype,
            head_dim=spec.head_dim,
            window=spec.window > 0,
            soft_cap=spec.soft_cap > 0,
            sinks=spec.sinks,
        )
        self._attend = find("whole_attention", case).load()
        self._spec = spec
        self._cos_sin = cos_sin  # [max_model_len, head_dim] fp32
        self._relative = relative
        self._buckets = None if relative is None else distance_buckets(spec.relative_buckets, len(cos_sin))
        if self._buckets is not None:
            self._buckets = self._buckets.to(cos_sin.device)
        self._rotates = spec.rope.kind != NO_ROPE or q_norm is not None
        self._q_norm, self._k_norm = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        self._eps = 1e-6 if q_norm is None else q_norm.eps

    def write(self, qkv: Tensor, step: WholeInputs) -> Tensor:
        """Rotates queries and keys of qkv in place, and returns qkv."""
        if self._rotates:
            rope_in_place(
                qkv,
                step.positions,
                self._cos_sin,
                self._spec.num_q_heads,
                q_norm=self._q_norm,
                k_norm=self._k_norm,
                eps=self._eps,
                rotary_dim=self._spec.rope.rotary_dim,
                interleaved=self._spec.rope.interleaved,
            )
        return qkv

    def attend(self, query: Tensor, step: WholeInputs, out: Tensor | None) -> Tensor:
        """Returns the attention of the queries, keys and values that `write` returned."""
        spec = self._spec
        heads = query.view(len(query), spec.num_qkv_heads, spec.head_dim)
        attended: Tensor = self._attend(
            heads,
            step.tiles,
            spec.num_kv_heads,
            spec.scale,
            spec.window,
            relative=self._relative,
            buckets=self._buckets,
            out=out,
        )
        return attended


class WholeDevice(CudaLinears):
    """Implements baton.worker.layers.device.Device."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        cos_sin: Mapping[RopeConfig, Tensor],
        *,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(device, cos_sin, batch_invariant=batch_invariant)
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self._dtype

    def inputs(self, step: WholeInputs) -> tuple[Tensor, Tensor]:
        """Returns the step's token ids and positions."""
        return step.tokens.long(), step.positions.long()

    def embed(self, table: Table, step: WholeInputs) -> Tensor:
        """Returns the tokens' rows of `table`."""
        return self.taken(table, step.tokens)

    def embed_positions(self, table: Tensor, step: WholeInputs) -> Tensor:
        """Returns the positions' rows of `table`."""
        return functional.embedding(step.positions, table)

    def attention(
        self,
        index: int,
        spec: AttentionSpec,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
        relative: Tensor | None = None,
    ) -> CudaWholeAttention:
        """Returns layer `index`'s ops."""
        return CudaWholeAttention(spec, self._dtype, self._cos_sin[spec.rope], q_norm, k_norm, relative)

    def recurrence(self, index: int, spec: StateSpec, tensors: StateTensors) -> NoReturn:
        """Raises Unsupported: a check at start refuses such models by name."""
        raise Unsupported("executor=cuda has no layers with states yet; use executor=cpu", field="model")

    def latent_attention(self, index: int, spec: LatentSpec, kv_norm: Norm, kv_b: Tensor) -> NoReturn:
        """Raises Unsupported: a check at start refuses such models by name."""
        raise Unsupported("latent attention needs a cache, which models of whole prompts do not have", field="model")
