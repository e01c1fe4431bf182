"""Computes one layer with states on a CPU: convolution, recurrence and gated norm, by the reference ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from baton.kernels.recurrent_states import DeltaGates, States, StepSizes
from baton.kernels.table import Case, find
from baton.worker.layers.cpu.states import StatePlaces, StateRun
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.layers.device import StateTensors
from baton.worker.layers.state_spec import DeltaNetSpec, ShortConvSpec, StateSpaceSpec, StateSpec

_CASE = Case("cpu")


class _Mixer(Protocol):
    """One kind of layer."""

    def __call__(self, projected: Tensor, run: StateRun, states: Sequence[States], *, by_token: bool) -> Tensor:
        """Returns what the last linear takes, of one run of sequences. Replaces their states."""


class CpuRecurrence:
    """Implements StateOps over the states of one group."""

    def __init__(
        self,
        spec: StateSpec,
        tensors: StateTensors,
        places: StatePlaces,
        group: int,  # of the KV
        layer: int,  # of the group
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._mixer = _mixer(spec, tensors)
        self._places = places
        self._group = group
        self._layer = layer
        self._by_token = batch_invariant  # a prompt's tokens do not depend on its chunks
        self._attended_size = spec.attended_size

    def mix(self, projected: Tensor, step: StepInputs) -> Tensor:
        """Returns [num_tokens, attended_size] of projected [num_tokens, projected_size]. Replaces the states."""
        runs = step.states[self._group]
        if len(runs) == 1:
            return self._run(projected, runs[0])
        mixed = projected.new_empty(projected.shape[0], self._attended_size)
        for run in runs:
            mixed[run.start : run.stop] = self._run(projected[run.start : run.stop], run)
        return mixed

    def _run(self, projected: Tensor, run: StateRun) -> Tensor:
        states = self._places.states(self._layer, run)
        return self._mixer(projected, run, states, by_token=run.decodes or self._by_token)


def _mixer(spec: StateSpec, tensors: StateTensors) -> _Mixer:
    match spec:
        case DeltaNetSpec():
            return _DeltaNet(spec, tensors)
        case StateSpaceSpec():
            return _StateSpace(spec, tensors)
        case ShortConvSpec():
            return _ShortConv(tensors)


def _load(name: str) -> Callable[..., Tensor]:
    kernel: Callable[..., Tensor] = find(name, _CASE).load()
    return kernel


class _DeltaNet:
    """Implements _Mixer: Gated DeltaNet."""

    def __init__(self, spec: DeltaNetSpec, tensors: StateTensors) -> None:
        self._spec = spec
        self._tensors = tensors
        self._conv, self._norm = _load("causal_conv"), _load("gated_rms_norm")
        self._step, self._chunks = _load("gated_delta_step"), _load("gated_delta_chunks")

    def __call__(self, projected: Tensor, run: StateRun, states: Sequence[States], *, by_token: bool) -> Tensor:
        spec, tensors = self._spec, self._tensors
        assert tensors.log_rate is not None
        assert tensors.bias is not None
        assert tensors.norm is not None
        qkv, gate, beta, decay = self._parts(projected)
        mixed = self._conv(qkv, tensors.conv, states[0], run.cu_seqlens, bias=tensors.conv_bias)
        query, key, value = torch.split(mixed, [spec.q_size, spec.q_size, spec.attended_size], -1)
        rule = self._step if by_token else self._chunks
        out = rule(
            _by_head(query, spec.num_key_heads),
            _by_head(key, spec.num_key_heads),
            _by_head(value, spec.num_heads),
            DeltaGates(decay, beta, tensors.log_rate, tensors.bias),
            states[1],
            run.cu_seqlens,
        )
        size = spec.value_dim
        rows = out.reshape(-1, size), gate.reshape(-1, size)
        normed = self._norm(*rows, tensors.norm, spec.norm_eps, group_size=size, norm_first=True)
        return normed.view(projected.shape[0], -1)

    def _parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns queries, keys and values; gates; betas; decays."""
        spec = self._spec
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
    """Implements _Mixer: Mamba-2."""

    def __init__(self, spec: StateSpaceSpec, tensors: StateTensors) -> None:
        self._spec = spec
        self._tensors = tensors
        self._conv, self._norm = _load("causal_conv"), _load("gated_rms_norm")
        self._step, self._chunks = _load("state_space_step"), _load("state_space_chunks")

    def __call__(self, projected: Tensor, run: StateRun, states: Sequence[States], *, by_token: bool) -> Tensor:
        spec, tensors = self._spec, self._tensors
        assert tensors.log_rate is not None
        assert tensors.bias is not None
        assert tensors.norm is not None
        gate, xbc, step = torch.split(projected, [spec.attended_size, spec.num_channels, spec.num_heads], -1)
        mixed = self._conv(xbc, tensors.conv, states[0], run.cu_seqlens, bias=tensors.conv_bias)
        width = spec.num_groups * spec.state_size
        x, b, c = torch.split(mixed, [spec.attended_size, width, width], -1)
        rule = self._step if by_token else self._chunks
        out = rule(
            _by_head(x, spec.num_heads),
            _by_head(b, spec.num_groups),
            _by_head(c, spec.num_groups),
            StepSizes(step, tensors.log_rate, tensors.bias, spec.step_limits),
            tensors.skip,
            states[1],
            run.cu_seqlens,
        )
        group_size = spec.attended_size // spec.num_groups
        return self._norm(out.flatten(1), gate, tensors.norm, spec.norm_eps, group_size=group_size, norm_first=False)


class _ShortConv:
    """Implements _Mixer: a convolution between two gates."""

    def __init__(self, tensors: StateTensors) -> None:
        self._tensors = tensors
        self._conv = _load("causal_conv")

    def __call__(self, projected: Tensor, run: StateRun, states: Sequence[States], *, by_token: bool) -> Tensor:
        b, c, x = projected.chunk(3, -1)
        tensors = self._tensors
        return c * self._conv(b * x, tensors.conv, states[0], run.cu_seqlens, bias=tensors.conv_bias, silu=False)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """Returns x [num_tokens, num_heads * size] as [num_tokens, num_heads, size]."""
    return x.reshape(x.shape[0], num_heads, -1)
