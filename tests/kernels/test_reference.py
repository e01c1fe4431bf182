"""The reference ops against formulas written out, and against Transformers' processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.kernels import reference
from baton.kernels.reference.attention.whole_attention import runs_of, whole_attention
from baton.kernels.reference.sampling.noise import noise_words, vocabulary_noise_words

HEAD_DIM = 16
BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def random_pool(num_blocks: int = 40, num_kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM).to(dtype)


def naive_attention(
    query: Tensor,
    cache: Tensor,
    blocks: Tensor,
    seq_len: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query [num_q_heads, head_dim] over a sequence's first seq_len tokens, a token and a head at a time."""
    out = torch.zeros_like(query)
    group = query.shape[0] // cache.shape[2]
    first = max(0, seq_len - window) if window else 0
    for head in range(query.shape[0]):
        places = [(int(blocks[token // BLOCK_SIZE]), token % BLOCK_SIZE) for token in range(first, seq_len)]
        keys = torch.stack([cache[block, 0, head // group, offset] for block, offset in places])
        values = torch.stack([cache[block, 1, head // group, offset] for block, offset in places])
        scores = keys @ query[head] * scale
        rest = scores.new_empty(0) if sinks is None else sinks[head : head + 1]
        out[head] = torch.softmax(torch.cat((scores, rest)), 0)[: len(scores)] @ values
    return out


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 2.0, 5.0])], ids=["", "sinks"])
def test_decode_attention_equals_the_written_out_sum(window: int, sinks: Tensor | None) -> None:
    cache, query = random_pool(), torch.randn(3, 4, HEAD_DIM)
    block_table = torch.randperm(40)[:15].view(3, 5).int()
    seq_lens = torch.tensor([1, 20, 7], dtype=torch.int32)
    out = reference.decode_attention(query, cache, block_table, seq_lens, 0.3, window=window, sinks=sinks)
    for seq in range(3):
        expected = naive_attention(query[seq], cache, block_table[seq], int(seq_lens[seq]), 0.3, window, sinks)
        torch.testing.assert_close(out[seq], expected)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 2.0, 5.0])], ids=["", "sinks"])
def test_prefill_attention_sees_the_cached_prefix_and_not_the_future(window: int, sinks: Tensor | None) -> None:
    cache, query = random_pool(), torch.randn(13, 4, HEAD_DIM)
    block_table = torch.randperm(40)[:15].view(3, 5)
    seq_lens, starts = torch.tensor([9, 20, 3]), torch.tensor([0, 4, 10, 13])
    out = reference.prefill_attention(query, cache, block_table, seq_lens, starts, 0.3, window=window, sinks=sinks)
    for seq in range(3):
        start, stop = int(starts[seq]), int(starts[seq + 1])
        for token in range(start, stop):
            seen = int(seq_lens[seq]) - (stop - 1 - token)
            expected = naive_attention(query[token], cache, block_table[seq], seen, 0.3, window, sinks)
            torch.testing.assert_close(out[token], expected)


def test_prefill_attention_in_tiles_equals_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, query = random_pool(), torch.randn(11, 4, HEAD_DIM)
    arguments = (query, cache, torch.randperm(40)[:5].view(1, 5), torch.tensor([18]), torch.tensor([0, 11]), 0.3)
    whole = reference.prefill_attention(*arguments)
    monkeypatch.setattr("baton.kernels.reference.attention.paged_attention.MASK_ELEMENTS", 18 * 4)
    torch.testing.assert_close(reference.prefill_attention(*arguments), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_its_formula(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 32), (5, 32), (32,)))
    summed = x + residual
    wide = summed.double()
    expected = (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype).double() * weight.double()
    out = reference.rms_norm(x, weight, 1e-5, residual=residual)
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(residual, summed)


def test_silu_mul_gates_the_second_half() -> None:
    gate_up = torch.randn(3, 10)
    expected = gate_up[:, :5] * torch.sigmoid(gate_up[:, :5]) * gate_up[:, 5:]
    torch.testing.assert_close(reference.silu_mul(gate_up), expected)


@pytest.mark.parametrize("normed", [False, True])
def test_rope_rotates_pairs_of_halves_and_writes_to_the_slots(normed: bool) -> None:
    num_q_heads, num_kv_heads, num_tokens = 4, 2, 3
    cache = torch.zeros(6, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM)
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * HEAD_DIM)
    heads = qkv.clone().view(num_tokens, -1, HEAD_DIM)
    positions = torch.tensor([0, 5, 11], dtype=torch.int32)
    slots = torch.tensor([9, -1, 22], dtype=torch.int32)
    angles = torch.arange(12.0).unsqueeze(1) / torch.arange(1.0, HEAD_DIM // 2 + 1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    weights = {"q_norm": torch.rand(HEAD_DIM), "k_norm": torch.rand(HEAD_DIM)} if normed else {}
    reference.rope_and_cache(qkv, cache, positions, slots, cos_sin, num_q_heads, **weights)
    for token in range(num_tokens):
        for head in range(num_q_heads + num_kv_heads):
            vector = heads[token, head].double()
            if normed:
                vector = vector / torch.sqrt(vector.square().mean() + 1e-6)
                vector = vector * weights["q_norm" if head < num_q_heads else "k_norm"]
            plane = torch.complex(vector[: HEAD_DIM // 2], vector[HEAD_DIM // 2 :])
            turned = plane * torch.exp(1j * angles[positions[token]].double())
            expected = torch.cat((turned.real, turned.imag)).float()
            if head < num_q_heads:
                actual = qkv.view(num_tokens, -1, HEAD_DIM)[token, head]
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
            elif slots[token] >= 0:
                block, offset = divmod(int(slots[token]), BLOCK_SIZE)
                side = head - num_q_heads
                torch.testing.assert_close(cache[block, 0, side, offset], expected, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(cache[block, 1, side, offset], heads[token, head + num_kv_heads])
    assert int((cache != 0).any(-1).sum()) == 2 * 2 * num_kv_heads


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


# Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in (*counter, *key))
    assert philox_by_hand(counter, key) == expected
    assert reference.philox4x32((c0, c1, c2, c3), (k0, k1)).tolist() == [expected]


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds = torch.tensor([5, -1, 2**40 + 3])
    positions = torch.tensor([0, 7, 7])
    everywhere = vocabulary_noise_words(seeds, positions, 103)
    token_ids = torch.stack([torch.randperm(103)[:11] for _ in range(3)])
    assert torch.equal(noise_words(seeds, positions, token_ids), everywhere.gather(1, token_ids))
    assert torch.equal(vocabulary_noise_words(seeds[1:2], positions[1:2], 103)[0], everywhere[1])
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        unsigned = seed & (2**64 - 1)
        words = philox_by_hand([102 // 4, position, 0, 0], [unsigned & 0xFFFFFFFF, unsigned >> 32])
        assert everywhere[row, 102] == words[102 % 4]


def test_gumbel_noise_is_finite_at_both_ends_and_has_gumbels_mean() -> None:
    ends = reference.gumbel_noise(torch.tensor([0, 2**32 - 1]))
    assert torch.isfinite(ends).all()
    assert ends[0] > 22
    noise = reference.gumbel_noise(vocabulary_noise_words(torch.arange(50), torch.arange(50), 4000)).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def draw(
    logits: Tensor, count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """`count` draws at consecutive positions of one seed."""
    return reference.sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        torch.full((count,), 42),
        torch.arange(count),
    )


def chi_square_z(drawn: Tensor, probabilities: Tensor) -> float:
    """How many standard deviations the statistic is above its mean."""
    expected = probabilities.double() * len(drawn)
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    degrees = int(some.sum()) - 1
    statistic = ((counts[some] - expected[some]) ** 2 / expected[some]).sum().item()
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.7, "temperature": 1.4},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
    ],
)
def test_draws_have_the_distribution_that_transformers_filters_make(filters: dict[str, float]) -> None:
    logits = torch.randn(1, 40) * 1.5
    scores = logits / filters.get("temperature", 1.0)
    nothing = torch.zeros(1, 1, dtype=torch.long)
    if "top_k" in filters:
        scores = TopKLogitsWarper(int(filters["top_k"]))(nothing, scores)
    if "top_p" in filters:
        scores = TopPLogitsWarper(filters["top_p"])(nothing, scores)
    if "min_p" in filters:
        scores = MinPLogitsWarper(filters["min_p"])(nothing, scores)
    drawn = draw(logits, 8000, **filters)  # type: ignore[arg-type]
    assert abs(chi_square_z(drawn, torch.softmax(scores[0], 0))) < 4.5


def test_draws_of_a_large_vocabulary_have_its_distribution() -> None:
    logits = torch.randn(1, 5000)
    probabilities = torch.softmax(logits[0], 0)
    drawn = draw(logits, 2000)
    order = probabilities.argsort()
    bins = torch.empty(5000, dtype=torch.long)
    bins[order] = torch.arange(5000) // 250
    binned = torch.zeros(20).index_add_(0, bins, probabilities)
    assert abs(chi_square_z(bins[drawn], binned)) < 4.5


def test_wide_nuclei_are_searched_beyond_the_first_candidates() -> None:
    logits = torch.randn(1, 3000) * 0.1
    drawn = draw(logits, 500, top_p=0.9)
    scores = TopPLogitsWarper(0.9)(torch.zeros(1, 1, dtype=torch.long), logits)
    allowed = set(torch.isfinite(scores[0]).nonzero().squeeze(1).tolist())
    assert len(allowed) > 2000
    assert set(drawn.tolist()) <= allowed
    assert len(set(drawn.tolist())) > 350


def test_a_rows_draw_does_not_depend_on_the_others() -> None:
    logits = torch.randn(8, 700)
    columns = (
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.2, 0.8, 1.0, 1.0]),
        torch.tensor([0, 0, 40, 0, 300, 5, 0, 0]),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 0.99, 1.0, 1.0, 0.999]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.2, 0.0]),
        torch.arange(8) * 977,
        torch.arange(8) + 3,
    )
    together = reference.sample(logits, *columns)
    for row in range(8):
        alone = reference.sample(logits[row : row + 1], *(column[row : row + 1] for column in columns))
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()


def test_tied_tokens_pass_top_k_together() -> None:
    logits = torch.tensor([[1.0] * 90 + [0.0] * 10])
    drawn = draw(logits, 3000, top_k=3)
    assert set(drawn.tolist()) == set(range(90))


def test_penalties_follow_their_formula() -> None:
    logits = torch.randn(2, 12)
    expected = logits.clone()
    prompt, output = [1, 2, 3], [3, 4, 4]
    expected[1] = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits[1:2].clone())[0]
    counts = torch.bincount(torch.tensor(output), minlength=12)
    expected[1] -= 0.5 * counts + 0.25 * (counts > 0)
    token_ids = torch.tensor([1, 2, 3, 4])
    reference.apply_penalties(
        logits,
        torch.ones(4, dtype=torch.long),
        token_ids,
        counts[token_ids],
        torch.full((4,), 1.7),
        torch.full((4,), 0.5),
        torch.full((4,), 0.25),
    )
    torch.testing.assert_close(logits, expected)


def test_edits_touch_only_the_named() -> None:
    logits = torch.zeros(3, 6)
    reference.add_bias(logits, torch.tensor([0, 0, 0]), torch.tensor([1, 1, 2]), torch.tensor([1.0, 2.0, -4.0]))
    reference.allow_only(logits, torch.tensor([1, 1]), torch.tensor([0, 5]))
    reference.suppress(logits, torch.tensor([2]), torch.tensor([3]))
    never = -math.inf
    expected = [[0, 3, -4, 0, 0, 0], [0, never, never, never, never, 0], [0, 0, 0, never, 0, 0]]
    np.testing.assert_array_equal(logits.numpy(), np.array(expected, np.float32))


def test_row_logprobs_are_natural_and_ranked() -> None:
    logits = torch.randn(4, 30).bfloat16()
    drawn = torch.tensor([3, 9, 29, 0])
    found = reference.row_logprobs(logits, drawn, 5)
    expected = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(found.logprobs, expected.gather(1, drawn.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(found.top_logprobs, expected.topk(5).values)
    for row in range(4):
        better = int((logits[row] > logits[row, drawn[row]]).sum())
        assert found.ranks[row] == better + 1


@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_whole_attention_sees_its_own_sequence_on_both_sides(window: int, num_kv_heads: int) -> None:
    seq_lens = [7, 7, 1, 20]
    qkv = torch.randn(sum(seq_lens), 4 + 2 * num_kv_heads, 8)
    out = whole_attention(qkv, runs_of(seq_lens), num_kv_heads, 0.3, window)
    for rows, heads in zip(out.split(seq_lens), qkv.split(seq_lens), strict=True):
        query, keys, values = heads.transpose(0, 1).split((4, num_kv_heads, num_kv_heads))
        keys, values = (each.repeat_interleave(4 // num_kv_heads, 0) for each in (keys, values))
        distance = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
        hidden = distance.abs() >= (window or len(rows))
        weights = (query @ keys.transpose(1, 2) * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
        torch.testing.assert_close(rows, (weights @ values).transpose(0, 1).flatten(1), rtol=1e-4, atol=1e-5)
