"""Computes a layer with states between its linears: convolution, recurrence and gated norm, by a device's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from baton.kernels.recurrent_states import DeltaGates, States, StepSizes
from baton.kernels.table import Case, find
from baton.worker.layers.device import StateTensors
from baton.worker.layers.state_spec import DeltaNetSpec, KimiDeltaSpec, ShortConvSpec, StateSpaceSpec, StateSpec


class Mixer(Protocol):
    """One kind of layer."""

    def __call__(
        self,
        projected: Tensor,
        states: Sequence[States],
        cu_seqlens: Tensor,
        *,
        by_token: bool,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Returns what the last linear takes, of sequences at cu_seqlens [num_seqs + 1] int32. Replaces their states.

        `by_token`: a token's result does not depend on how its sequence is cut. With `keep` [num_seqs] int32, which
        needs `by_token`, the states are those after so many tokens.
        """


def make_mixer(spec: StateSpec, tensors: StateTensors, case: Case) -> Mixer:
    """Returns the mixer of a layer, with the kernels of a case."""
    match spec:
        case DeltaNetSpec():
            return _DeltaNet(spec, tensors, case)
        case KimiDeltaSpec():
            return _KimiDelta(spec, tensors, case)
        case StateSpaceSpec():
            return _StateSpace(spec, tensors, case)
        case ShortConvSpec():
            return _ShortConv(tensors, case)


def _load(case: Case, *names: str) -> list[Callable[..., Tensor]]:
    return [find(name, case).load() for name in names]


class _DeltaRule:
    """Implements Mixer: the gated delta rule behind a convolution, a gated norm behind it."""

    _opening: ClassVar[Literal["silu", "sigmoid"]]  # of the norm's gates

    def __init__(self, spec: DeltaNetSpec | KimiDeltaSpec, tensors: StateTensors, case: Case) -> None:
        self._spec = spec
        self._tensors = tensors
        self._conv, self._norm = _load(case, "causal_conv", "gated_rms_norm")
        self._step, self._chunks = _load(case, "gated_delta_step", "gated_delta_chunks")

    def __call__(
        self,
        projected: Tensor,
        states: Sequence[States],
        cu_seqlens: Tensor,
        *,
        by_token: bool,
        keep: Tensor | None = None,
    ) -> Tensor:
        spec, tensors = self._spec, self._tensors
        assert tensors.norm is not None
        qkv, gate, gates = self._parts(projected)
        mixed = self._conv(qkv, tensors.conv, states[0], cu_seqlens, bias=tensors.conv_bias, keep=keep)
        query, key, value = torch.split(mixed, [spec.q_size, spec.q_size, spec.attended_size], -1)
        rule = partial(self._step, keep=keep) if by_token else self._chunks
        out = rule(
            _by_head(query, spec.num_key_heads),
            _by_head(key, spec.num_key_heads),
            _by_head(value, spec.num_heads),
            gates,
            states[1],
            cu_seqlens,
        )
        size = spec.value_dim
        rows = out.reshape(-1, size), gate.reshape(-1, size)
        normed = self._norm(
            *rows, tensors.norm, spec.norm_eps, group_size=size, norm_first=True, activation=self._opening
        )
        return normed.view(projected.shape[0], -1)

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, DeltaGates]:
        """Returns queries, keys and values; the norm's gates; the rule's gates."""
        raise NotImplementedError


class _KimiDelta(_DeltaRule):
    """Implements Mixer for Kimi Delta Attention."""

    _opening = "sigmoid"

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, DeltaGates]:
        spec, tensors = self._spec, self._tensors
        assert tensors.log_rate is not None
        assert tensors.bias is not None
        qkv, beta, decay, gate = torch.split(projected, list(spec.projected_sizes), -1)
        by_channel = decay.unflatten(-1, (spec.num_heads, -1))  # type: ignore[no-untyped-call]
        return qkv, gate, DeltaGates(by_channel, beta, tensors.log_rate, tensors.bias.view(spec.num_heads, -1))


class _DeltaNet(_DeltaRule):
    """Implements Mixer for Gated DeltaNet."""

    _opening = "silu"

    def __init__(self, spec: DeltaNetSpec, tensors: StateTensors, case: Case) -> None:
        super().__init__(spec, tensors, case)
        self._delta_net = spec

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, DeltaGates]:
        assert self._tensors.log_rate is not None
        assert self._tensors.bias is not None
        qkv, gate, beta, decay = self._split(projected)
        return qkv, gate, DeltaGates(decay, beta, self._tensors.log_rate, self._tensors.bias)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, keys and values; the norm's gates; betas; decays."""
        spec = self._delta_net
        if not spec.by_key_head:
            qkv, gate, beta, decay = torch.split(projected, list(spec.projected_sizes), -1)
            return qkv, gate, beta, decay
        each = spec.num_heads // spec.num_key_heads
        wide, narrow = torch.split(projected, list(spec.projected_sizes), -1)
        heads = _by_head(wide, spec.num_key_heads)
        gates = _by_head(narrow, spec.num_key_heads)
        query, key, value, gate = torch.split(
            heads, [spec.key_dim, spec.key_dim, each * spec.value_dim, each * spec.value_dim], -1
        )
        beta, decay = torch.split(gates, [each, each], -1)
        return (
            torch.cat([part.flatten(1) for part in (query, key, value)], -1),
            gate.flatten(1),
            beta.flatten(1),
            decay.flatten(1),
        )


class _StateSpace:
    """Implements Mixer: Mamba-2."""

    def __init__(self, spec: StateSpaceSpec, tensors: StateTensors, case: Case) -> None:
        self._spec = spec
        self._tensors = tensors
        self._conv, self._norm = _load(case, "causal_conv", "gated_rms_norm")
        self._step, self._chunks = _load(case, "state_space_step", "state_space_chunks")

    def __call__(
        self,
        projected: Tensor,
        states: Sequence[States],
        cu_seqlens: Tensor,
        *,
        by_token: bool,
        keep: Tensor | None = None,
    ) -> Tensor:
        spec, tensors = self._spec, self._tensors
        assert tensors.log_rate is not None
        assert tensors.bias is not None
        assert tensors.norm is not None
        gate, xbc, step = torch.split(projected, [spec.attended_size, spec.num_channels, spec.num_heads], -1)
        mixed = self._conv(xbc, tensors.conv, states[0], cu_seqlens, bias=tensors.conv_bias, keep=keep)
        width = spec.num_groups * spec.state_size
        x, b, c = torch.split(mixed, [spec.attended_size, width, width], -1)
        rule = partial(self._step, keep=keep) if by_token else self._chunks
        out = rule(
            _by_head(x, spec.num_heads),
            _by_head(b, spec.num_groups),
            _by_head(c, spec.num_groups),
            StepSizes(step, tensors.log_rate, tensors.bias, spec.step_limits),
            tensors.skip,
            states[1],
            cu_seqlens,
        )
        group_size = spec.attended_size // spec.num_groups
        return self._norm(out.flatten(1), gate, tensors.norm, spec.norm_eps, group_size=group_size, norm_first=False)


class _ShortConv:
    """Implements Mixer: a convolution between two gates."""

    def __init__(self, tensors: StateTensors, case: Case) -> None:
        self._tensors = tensors
        (self._conv,) = _load(case, "causal_conv")

    def __call__(
        self,
        projected: Tensor,
        states: Sequence[States],
        cu_seqlens: Tensor,
        *,
        by_token: bool,
        keep: Tensor | None = None,
    ) -> Tensor:
        b, c, x = projected.chunk(3, -1)
        tensors = self._tensors
        return c * self._conv(b * x, tensors.conv, states[0], cu_seqlens, bias=tensors.conv_bias, silu=False, keep=keep)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """Returns x [num_tokens, num_heads * size] as [num_tokens, num_heads, size]."""
    return x.reshape(x.shape[0], num_heads, -1)
