"""The CPU executor's sampling in NumPy against the references in PyTorch: the same bits, and so the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.sampling.sampling_rig import random_inits, random_masks
from torch import Tensor

from baton.kernels import reference
from baton.kernels.reference.sampling import logits as edits
from baton.kernels.reference.sampling.noise import gumbel_noise as reference_gumbel
from baton.kernels.reference.sampling.noise import vocabulary_noise_words as reference_words
from baton.worker.core import Row, RowInit, SamplingParams, TokenMasks
from baton.worker.sampling.candidates import Draws
from baton.worker.sampling.draw import draw_tokens
from baton.worker.sampling.noise import gumbel_noise, noise_bounds, noise_words, vocabulary_noise_words
from baton.worker.sampling.output_rules import OutputRules
from baton.worker.sampling.sampler import Sampler, drawn_temperature

Bits = NDArray[np.uint64]
LIMITS = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)


def random_seeds(generator: np.random.Generator, count: int) -> Bits:
    return generator.integers(0, 2**64, count, np.uint64)


def reference_tokens(logits: NDArray[np.float32], draws: Draws, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    columns = (logits, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.seeds.view(np.int64), positions)
    tokens: NDArray[np.int64] = reference.sample(*(torch.from_numpy(column) for column in columns)).numpy()
    return tokens


def random_draws(generator: np.random.Generator, num_rows: int, vocab_size: int) -> Draws:
    def of(values: Sequence[float]) -> NDArray[np.float32]:
        return generator.choice(np.array(values, np.float32), num_rows)

    top_k = generator.choice([0, 0, 1, 5, 20, 63, 64, 300, vocab_size], num_rows)
    return Draws(
        of((0.0, 0.7, 1.0, 1.3, 0.01, 1e-5)),
        np.minimum(top_k, vocab_size),
        of((1.0, 1.0, 0.95, 0.8, 0.3, 0.01)),
        of((0.0, 0.0, 0.05, 0.3)),
        random_seeds(generator, num_rows),
    )


def random_logits(generator: np.random.Generator, num_rows: int, vocab_size: int) -> NDArray[np.float32]:
    logits = (generator.standard_normal((num_rows, vocab_size)) * generator.choice([0.01, 1, 3, 10])).astype(np.float32)
    kind = generator.integers(4)
    if kind == 0:  # as bf16 has them: many are equal
        logits = np.round(logits * 4) / 4
    if kind == 1:
        logits[generator.random(logits.shape) < 0.6] = -np.inf
    if kind == 2:
        logits[generator.integers(num_rows)] = -np.inf
    return logits


def test_noise_has_the_references_bits() -> None:
    generator = np.random.default_rng(0)
    seeds, positions = random_seeds(generator, 40), generator.integers(0, 1 << 20, 40)
    expected = reference_words(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions), 400)
    words = vocabulary_noise_words(seeds, positions, 398)
    np.testing.assert_array_equal(words, expected.numpy())
    np.testing.assert_array_equal(gumbel_noise(words), reference_gumbel(expected).numpy())
    rows, token_ids = generator.integers(0, 40, 1000), generator.integers(0, 400, 1000)
    some = noise_words(seeds[rows], positions[rows], token_ids)
    np.testing.assert_array_equal(some, words[rows, token_ids])


def test_noise_stays_below_its_bounds() -> None:
    words = np.concatenate((np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, np.uint32), LIMITS))
    noise, bounds = gumbel_noise(words), noise_bounds(words)
    assert (noise < bounds).all()
    assert (bounds - noise)[(noise > 5) & (noise < 15)].max() < 0.07


@pytest.mark.parametrize("vocab_size", [5, 37, 300, 4096, 5001])
def test_tokens_are_the_references(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    for _ in range(40):
        num_rows = int(generator.integers(1, 40))
        logits = random_logits(generator, num_rows, vocab_size)
        draws = random_draws(generator, num_rows, vocab_size)
        positions = generator.integers(0, 1000, num_rows)
        tokens = draw_tokens(logits, draws, positions)
        np.testing.assert_array_equal(tokens, reference_tokens(logits, draws, positions))
        for row in range(min(num_rows, 4)):
            own = np.array([row])
            assert draw_tokens(logits[own], draws.of(own), positions[own]) == tokens[row]


@pytest.mark.parametrize("shared", [0, 500], ids=["alone", "beside a wide row"])
def test_all_that_tie_with_the_kth_count_for_top_p(shared: int) -> None:
    """Of 1 and 399 of equal weight, top_k passes 400, of which the first has a fifth: less than top_p."""
    logits = np.full((2, 1000), -9.0, np.float32)
    logits[:, 1:400] = 0.0
    logits[:, 0] = np.log(100.0)
    draws = Draws(
        np.ones(2, np.float32),
        np.array([3, shared]),
        np.array([0.22, 1.0], np.float32),
        np.zeros(2, np.float32),
        np.arange(2, dtype=np.uint64),
    )
    rows = np.array([0, 1])[: 2 if shared else 1]
    found = set()
    for position in range(40):
        positions = np.full(len(rows), position)
        tokens = draw_tokens(logits[rows], draws.of(rows), positions)
        np.testing.assert_array_equal(tokens, reference_tokens(logits[rows], draws.of(rows), positions))
        found.add(int(tokens[0]))
    assert len(found) > 10


def test_rows_with_few_possible_tokens_draw_as_the_reference() -> None:
    generator = np.random.default_rng(0)
    for share in (0.0, 0.0005, 0.01, 0.02):
        logits = (generator.standard_normal((60, 4096)) * 3).astype(np.float32)
        logits[generator.random(logits.shape) >= share] = -np.inf
        draws, positions = random_draws(generator, 60, 4096), generator.integers(0, 1000, 60)
        tokens = draw_tokens(logits, draws, positions)
        np.testing.assert_array_equal(tokens, reference_tokens(logits, draws, positions))


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_top_p_at_the_very_mass_of_some_tokens_cuts_as_in_the_reference(spread: float) -> None:
    generator = np.random.default_rng(1)
    logits = torch.from_numpy((generator.standard_normal((200, 4096)) * spread).astype(np.float32))
    values = logits.topk(30, dim=1).values
    before = torch.exp(values - values[:, :1]).cumsum(1)[:, -1]
    total = torch.exp(torch.logsumexp(logits, 1) - values[:, 0])
    exact = (before / total).numpy()
    for top_p in (exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(1))):
        zeros = np.zeros(200, np.int64)
        seeds = random_seeds(generator, 200)
        draws = Draws(np.ones(200, np.float32), zeros, top_p, np.zeros(200, np.float32), seeds)
        expected = reference_tokens(logits.numpy(), draws, zeros)
        np.testing.assert_array_equal(draw_tokens(logits.numpy(), draws, zeros), expected)


class TorchRows:
    """Samples requests with the references, row by row."""

    def __init__(self, inits: Sequence[RowInit], vocab_size: int) -> None:
        self._inits = inits
        self._vocab_size = vocab_size
        self._outputs = [init.token_ids[init.num_prompt_tokens :].tolist() for init in inits]

    @property
    def num_outputs(self) -> NDArray[np.int64]:
        return np.array([len(output) for output in self._outputs])

    def draw(self, logits: Tensor, masks: TokenMasks | None) -> list[int]:
        edited = torch.cat([self._edited(each[None], row) for row, each in enumerate(logits.float())])
        if masks is not None:
            reference.apply_token_masks(edited, torch.from_numpy(masks.indices), torch.from_numpy(masks.bits))
        sampling = [init.sampling for init in self._inits]
        seeds = np.array([each.seed for each in sampling], np.uint64)
        tokens: list[int] = reference.sample(
            edited,
            torch.tensor([drawn_temperature(each) for each in sampling]),
            torch.tensor([min(each.top_k, self._vocab_size) for each in sampling]),
            torch.tensor([each.top_p for each in sampling]),
            torch.tensor([each.min_p for each in sampling]),
            torch.from_numpy(seeds.view(np.int64)),
            torch.from_numpy(self.num_outputs),
        ).tolist()
        for output, token in zip(self._outputs, tokens, strict=True):
            output.append(token)
        return tokens

    def _edited(self, logits: Tensor, row: int) -> Tensor:
        init, output = self._inits[row], self._outputs[row]
        sampling = init.sampling
        logits = logits.clone()
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            reference.add_bias(logits, *columns(tokens), torch.tensor(biases))
        self._penalize(logits, init, output)
        if sampling.allowed_token_ids:
            reference.allow_only(logits, *columns(sampling.allowed_token_ids))
        if len(output) < sampling.min_tokens:
            reference.suppress(logits, *columns(sampling.suppressed_token_ids))
        rules = OutputRules(sampling, output)
        reference.suppress(logits, *columns(rules.forbidden()))
        forced = rules.forced()
        if forced is not None:
            edits.force(logits, *columns([forced]))
        return logits

    def _penalize(self, logits: Tensor, init: RowInit, output: list[int]) -> None:
        sampling = init.sampling
        prompt = init.token_ids[: init.num_prompt_tokens].tolist() if sampling.repetition_penalty != 1.0 else []
        used = sorted({*prompt, *output})
        factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        counts = torch.tensor([output.count(token) for token in used], dtype=torch.int64)
        reference.apply_penalties(
            logits, *columns(used), counts, *(torch.full((len(used),), each, dtype=torch.float32) for each in factors)
        )


def columns(tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(tokens), dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(4096, 300), (301, 1000)])
def test_requests_with_any_wishes_get_the_references_tokens(vocab_size: int, num_rows: int, dtype: torch.dtype) -> None:
    inits = random_inits(num_rows, vocab_size, seed=num_rows)
    sampler, oracle = Sampler(num_rows, vocab_size), TorchRows(inits, vocab_size)
    for init in inits:
        sampler.admit(init)
    generator = np.random.default_rng(vocab_size)
    rows = np.arange(num_rows)
    for _ in range(4):
        logits = torch.from_numpy(generator.standard_normal((num_rows, vocab_size)) * 3).to(dtype)
        masks = random_masks(num_rows, vocab_size, generator)
        num_outputs = oracle.num_outputs
        expected = oracle.draw(logits, masks)
        drawn, _ = sampler.sample(logits, rows, num_outputs, masks)
        assert drawn.tolist() == expected


def test_long_outputs_are_penalized_as_by_the_references_when_rows_are_used_again() -> None:
    vocab_size, num_rows = 700, 6
    sampler, generator = Sampler(num_rows, vocab_size), np.random.default_rng(0)
    for seed in range(3):
        inits = [
            RowInit(
                Row(row),
                generator.integers(0, vocab_size, 90).astype(np.int32),
                40 + 10 * (row % 3),
                SamplingParams(
                    seed=seed * num_rows + row,
                    repetition_penalty=1.0 if (row + seed) % 3 else 1.3,
                    frequency_penalty=0.3 * (row % 2),
                    presence_penalty=0.2 * (seed % 2),
                ),
            )
            for row in range(num_rows)
        ]
        oracle = TorchRows(inits, vocab_size)
        for init in inits:
            sampler.free(init.row)
            sampler.admit(init)
        for _ in range(120):
            logits = torch.from_numpy(generator.standard_normal((num_rows, vocab_size))).float()
            num_outputs = oracle.num_outputs
            expected = oracle.draw(logits, None)
            drawn, _ = sampler.sample(logits, np.arange(num_rows), num_outputs)
            assert drawn.tolist() == expected
