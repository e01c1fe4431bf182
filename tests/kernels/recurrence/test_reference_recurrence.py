"""The reference recurrences against token-by-token loops in fp64, against Transformers and their own splits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.kernels.harness import relative_error
from support.kernels.recurrence import (
    WILD,
    bounds_of,
    make_states,
    naive_conv,
    naive_delta,
    naive_state_space,
    part_of,
    random_delta,
    random_state_space,
    states_after,
    written,
)
from torch import Tensor
from torch.nn import functional
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from baton.kernels.recurrent_states import CHUNK, DeltaGates, States
from baton.kernels.reference.recurrence.causal_conv import causal_conv
from baton.kernels.reference.recurrence.gated_delta import gated_delta_chunks, gated_delta_step
from baton.kernels.reference.recurrence.gated_norm import gated_rms_norm
from baton.kernels.reference.recurrence.state_access import read_states
from baton.kernels.reference.recurrence.state_space import state_space_chunks, state_space_step

LENGTHS = (1, 0, 63, 64, 65, 5, 130)
BOUND = 2e-6  # of fp32 against fp64, and of one split of a sequence into chunks against another
THEIRS = 1e-5  # of two implementations in fp32
PAIRS = [
    pytest.param("delta", gated_delta_step, id="delta-step"),
    pytest.param("delta", gated_delta_chunks, id="delta-chunks"),
    pytest.param("channel", gated_delta_step, id="channel-step"),
    pytest.param("channel", gated_delta_chunks, id="channel-chunks"),
    pytest.param("space", state_space_step, id="space-step"),
    pytest.param("space", state_space_chunks, id="space-chunks"),
]
HEADS, ROWS, COLUMNS = 4, 16, 24


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def make_inputs(kind: str, num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    if kind == "space":
        return random_state_space(num_tokens, 2, HEADS, ROWS, COLUMNS, limits=(0.05, 2.0), dtype=dtype)
    return random_delta(num_tokens, 2, HEADS, ROWS, COLUMNS, per_channel=kind == "channel", dtype=dtype)


def naive(kind: str, inputs: tuple[Any, ...], initial: Tensor, bounds: Tensor) -> tuple[Tensor, list[Tensor]]:
    return (naive_state_space if kind == "space" else naive_delta)(*inputs, initial, bounds)


def head_part(kind: str, inputs: tuple[Any, ...], tokens: slice) -> tuple[Any, ...]:
    """Returns the inputs of some tokens; a skip has none."""
    split = inputs[:4]
    return *(part_of(value, tokens) for value in split), *inputs[4:]


@pytest.mark.parametrize(("kind", "run"), PAIRS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_recurrences_equal_a_loop_over_tokens(kind: str, run: Callable[..., Tensor], pieces: int) -> None:
    inputs, bounds = make_inputs(kind, sum(LENGTHS)), bounds_of(LENGTHS)
    states = make_states(len(LENGTHS), HEADS, ROWS, COLUMNS, pieces=pieces, fresh=(2, 5), dropped=(4,))
    expected, histories = naive(kind, inputs, read_states(states, HEADS), bounds)
    out = run(*inputs, states, bounds)
    assert relative_error(out, expected) <= BOUND
    final = states_after(histories)
    final[4] = 0
    assert relative_error(written(states, HEADS), final) <= BOUND


@pytest.mark.parametrize(("kind", "run"), PAIRS)
@pytest.mark.parametrize("cut", [1, 37, 64, 100, 128, 199])
def test_a_split_sequence_gives_what_a_whole_one_gives(kind: str, run: Callable[..., Tensor], cut: int) -> None:
    inputs = make_inputs(kind, 200)
    whole = make_states(1, HEADS, ROWS, COLUMNS, fresh=(0,))
    expected = run(*inputs, whole, bounds_of([200]))
    split = make_states(1, HEADS, ROWS, COLUMNS, fresh=(0,))
    parts = [run(*head_part(kind, inputs, slice(0, cut)), split, bounds_of([cut]))]
    parts.append(
        run(
            *head_part(kind, inputs, slice(cut, 200)),
            States(split.pool, split.write, split.write),
            bounds_of([200 - cut]),
        )
    )
    if run in (gated_delta_step, state_space_step) or cut % CHUNK == 0:
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(written(split, HEADS), written(whole, HEADS))
    else:
        assert relative_error(torch.cat(parts), expected) <= BOUND
        assert relative_error(written(split, HEADS), written(whole, HEADS)) <= BOUND


@pytest.mark.parametrize(("kind", "run"), [pair for pair in PAIRS if "step" in str(pair.id)])
def test_kept_tokens_leave_the_state_that_they_alone_would(kind: str, run: Callable[..., Tensor]) -> None:
    lengths, kept = (5, 3, 4, 1), (2, 3, 0, 1)
    inputs, bounds = make_inputs(kind, sum(lengths)), bounds_of(lengths)
    states = make_states(len(lengths), HEADS, ROWS, COLUMNS)
    initial = read_states(states, HEADS)
    out = run(*inputs, states, bounds, keep=torch.tensor(kept, dtype=torch.int32))
    final = written(states, HEADS)
    for seq, (start, end) in enumerate(pairwise(bounds.tolist())):
        alone = make_states(1, HEADS, ROWS, COLUMNS, in_place=True)
        alone.pool[alone.read[0].long()] = initial[seq]
        for token in range(start, end):
            if token - start == kept[seq]:
                assert torch.equal(final[seq], read_states(alone, HEADS)[0])
            one = run(*head_part(kind, inputs, slice(token, token + 1)), alone, bounds_of([1]))
            assert torch.equal(out[token : token + 1], one)
        if kept[seq] == end - start:
            assert torch.equal(final[seq], read_states(alone, HEADS)[0])


@pytest.mark.parametrize(("kind", "run"), PAIRS)
def test_only_written_pieces_change(kind: str, run: Callable[..., Tensor]) -> None:
    inputs, bounds = make_inputs(kind, 12), bounds_of([9, 3])
    states = make_states(2, HEADS, ROWS, COLUMNS, pieces=2, dropped=(0,))
    before = states.pool.clone()
    run(*inputs, states, bounds)
    changed = (states.pool != before).flatten(1).any(1).nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(states.write[1].tolist())


def test_overlapping_pieces_count_smaller_units() -> None:
    unit = ROWS * COLUMNS // 4
    arena = torch.full((100 * unit,), WILD)
    pool = arena.as_strided((90, ROWS, COLUMNS), (unit, COLUMNS, 1))
    ids = torch.tensor([[3, 9, 50, 80]], dtype=torch.int32)
    inputs, bounds = make_inputs("delta", 20), bounds_of([20])
    plain = make_states(1, HEADS, ROWS, COLUMNS, fresh=(0,))
    expected = gated_delta_chunks(*inputs, plain, bounds)
    out = gated_delta_chunks(*inputs, States(pool, torch.full_like(ids, -1), ids), bounds)
    assert torch.equal(out, expected)
    assert torch.equal(written(States(pool, ids, ids), HEADS), written(plain, HEADS))
    assert int((arena == WILD).sum()) == arena.numel() - 4 * ROWS * COLUMNS


@pytest.mark.parametrize("seq_len", [1, 64, 150])
def test_the_delta_rule_equals_qwens(seq_len: int) -> None:
    query, key, value, gates = random_delta(seq_len, 2, HEADS, ROWS, COLUMNS, per_channel=False)
    states = make_states(1, HEADS, ROWS, COLUMNS)
    log_decay = -gates.log_rate.exp() * functional.softplus(gates.decay + gates.bias)
    expected, final = qwen.torch_chunk_gated_delta_rule(
        query[None],
        key[None],
        value[None],
        g=log_decay[None],
        beta=gates.beta.sigmoid()[None],
        initial_state=read_states(states, HEADS),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for run in (gated_delta_step, gated_delta_chunks):
        assert relative_error(run(query, key, value, gates, states, bounds_of([seq_len])), expected[0]) <= THEIRS
        assert relative_error(written(states, HEADS), final) <= THEIRS


@pytest.mark.parametrize("seq_len", [1, 64, 150])
def test_the_delta_rule_of_channels_equals_kimis(seq_len: int) -> None:
    query, key, value, gates = random_delta(seq_len, HEADS, HEADS, ROWS, COLUMNS, per_channel=True)
    states = make_states(1, HEADS, ROWS, COLUMNS)
    log_decay = -gates.log_rate.exp()[:, None] * functional.softplus(gates.decay + gates.bias)
    expected, final = kimi.chunk_kimi_delta_attention(
        query[None],
        key[None],
        value[None],
        g=log_decay[None],
        beta=gates.beta.sigmoid()[None],
        initial_state=read_states(states, HEADS),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for run in (gated_delta_step, gated_delta_chunks):
        assert relative_error(run(query, key, value, gates, states, bounds_of([seq_len])), expected[0]) <= THEIRS
        assert relative_error(written(states, HEADS), final) <= THEIRS


def test_unnormalized_queries_and_keys_have_their_own_scale() -> None:
    query, key, value, gates = random_delta(70, 2, HEADS, ROWS, COLUMNS, per_channel=False)
    key = functional.normalize(key, dim=-1)
    expected, _ = qwen.torch_chunk_gated_delta_rule(
        query[None],
        key[None],
        value[None],
        g=(-gates.log_rate.exp() * functional.softplus(gates.decay + gates.bias))[None],
        beta=gates.beta.sigmoid()[None],
    )
    for run in (gated_delta_step, gated_delta_chunks):
        states = make_states(1, HEADS, ROWS, COLUMNS, fresh=(0,))
        out = run(query, key, value, gates, states, bounds_of([70]), normalize=False, scale=0.5)
        assert relative_error(out, expected[0] * ROWS**0.5 * 0.5) <= THEIRS


@pytest.mark.parametrize("seq_len", [1, 64, 150])
@pytest.mark.parametrize("skipping", [False, True])
def test_the_state_space_equals_nemotrons(seq_len: int, skipping: bool) -> None:
    limits = (0.1, 1.5)
    x, b, c, sizes, skip = random_state_space(seq_len, 2, HEADS, ROWS, COLUMNS, limits=limits)
    states = make_states(1, HEADS, ROWS, COLUMNS)
    expected, final = nemotron.mamba2_chunk_scan(
        x[None],
        sizes.step[None],
        -sizes.log_rate.exp(),
        b[None],
        c[None],
        chunk_size=32,
        D=skip if skipping else None,
        dt_bias=sizes.bias,
        dt_softplus=True,
        dt_limit=limits,
        initial_states=read_states(states, HEADS).transpose(2, 3),
        return_final_states=True,
    )
    for run in (state_space_step, state_space_chunks):
        out = run(x, b, c, sizes, skip if skipping else None, states, bounds_of([seq_len]))
        assert relative_error(out, expected[0]) <= THEIRS
        assert relative_error(written(states, HEADS).transpose(2, 3), final) <= THEIRS


def test_a_strong_decay_neither_overflows_nor_gives_nan() -> None:
    query, key, value, gates = random_delta(200, 2, HEADS, ROWS, COLUMNS, per_channel=True)
    steep = DeltaGates(gates.decay + 60, gates.beta, gates.log_rate, gates.bias)
    states = make_states(1, HEADS, ROWS, COLUMNS)
    expected, histories = naive_delta(query, key, value, steep, read_states(states, HEADS), bounds_of([200]))
    out = gated_delta_chunks(query, key, value, steep, states, bounds_of([200]))
    assert relative_error(out, expected) <= BOUND
    assert relative_error(written(states, HEADS), states_after(histories)) <= BOUND


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("num_taps", [3, 4])
def test_convolutions_equal_a_loop_over_tokens(biased: bool, silu: bool, num_taps: int) -> None:
    lengths = (1, 0, 2, 3, 50, 1)
    x, bounds = torch.randn(sum(lengths), 24), bounds_of(lengths)
    weight, bias = torch.randn(24, num_taps), torch.randn(24) if biased else None
    kept = (1, 0, 1, 0, 48, 1)
    for keep in (None, torch.tensor(kept, dtype=torch.int32)):
        states = make_states(len(lengths), 1, num_taps - 1, 24, pieces=2, fresh=(2, 4))
        initial = read_states(states, 1)[:, 0]
        expected, histories = naive_conv(x, weight, bias, silu, initial, bounds)
        out = causal_conv(x, weight, states, bounds, bias=bias, silu=silu, keep=keep)
        assert relative_error(out, expected) <= BOUND
        after = states_after(histories, None if keep is None else kept).float()
        assert torch.equal(written(states, 1)[:, 0], after)


def test_convolutions_equal_transformers() -> None:
    x, weight, bias = torch.randn(30, 24), torch.randn(24, 4), torch.randn(24)
    expected = qwen.causal_conv1d_fn(x.T[None], weight, bias, "silu")[0].T
    for cut in range(31):
        states = make_states(1, 1, 3, 24, fresh=(0,))
        first = causal_conv(x[:cut], weight, states, bounds_of([cut]), bias=bias)
        later = States(states.pool, states.write, states.write)
        out = torch.cat((first, causal_conv(x[cut:], weight, later, bounds_of([30 - cut]), bias=bias)))
        assert relative_error(out, expected) <= THEIRS
        assert torch.equal(written(states, 1)[0, 0], x[-3:])


def test_gated_norms_equal_transformers() -> None:
    x, gate, weight = torch.randn(5, 32), torch.randn(5, 32), torch.rand(32)

    def fill(module: Any, values: Tensor) -> Any:
        module.weight.data.copy_(values)
        return module

    with torch.no_grad():
        per_head = fill(qwen.Qwen3NextRMSNormGated(8, eps=1e-6), weight[:8])
        expected = per_head(x.view(-1, 8), gate.view(-1, 8)).view(5, 32)
        out = gated_rms_norm(x, gate, weight[:8], 1e-6, group_size=8, norm_first=True)
        assert relative_error(out, expected) <= THEIRS
        per_head = fill(kimi.KimiLinearRMSNormGated(8, eps=1e-5), weight[:8])
        expected = per_head(x.view(-1, 8), gate.view(-1, 8)).view(5, 32)
        out = gated_rms_norm(x, gate, weight[:8], 1e-5, group_size=8, norm_first=True, activation="sigmoid")
        assert relative_error(out, expected) <= THEIRS
        expected = fill(nemotron.NemotronHRMSNormGated(32, group_size=16, eps=1e-5), weight)(x, gate)
        out = gated_rms_norm(x, gate, weight, 1e-5, group_size=16, norm_first=False)
        assert relative_error(out, expected) <= THEIRS
        for norm_first in (False, True):
            module = FalconH1RMSNormGated(32, eps=1e-5, n_groups=4, norm_before_gate=norm_first)
            expected = fill(module, weight)(x[None], gate[None])[0]
            out = gated_rms_norm(x, gate, weight, 1e-5, group_size=8, norm_first=norm_first)
            assert relative_error(out, expected) <= THEIRS


def test_states_of_other_shapes_are_refused() -> None:
    inputs, bounds = make_inputs("delta", 4), bounds_of([4])
    with pytest.raises(ValueError, match=r"states of 4 heads \[16, 24\] do not fit 4 pieces \[16, 20\]"):
        gated_delta_step(*inputs, make_states(1, HEADS, ROWS, 20), bounds)
    with pytest.raises(ValueError, match="do not fit"):
        causal_conv(torch.zeros(4, 8), torch.zeros(8, 4), make_states(1, 1, 2, 8), bounds)
    pool = torch.zeros(4, ROWS, 2 * COLUMNS)[..., :COLUMNS]
    ids = torch.zeros(1, HEADS, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be contiguous"):
        States(pool, ids, ids)
    with pytest.raises(ValueError, match="must be contiguous int32"):
        States(pool.contiguous(), ids.long(), ids)
