"""Samples from the same logits with the device's kernels and with the oracle, the CPU executor's sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton.kernels.sampling import SamplingState, Sizes, sample_special, sample_tokens, score_tokens
from baton.kernels.sampling.columns import FLAGS, PENALIZED
from baton.worker.core import ReasoningLimit, Row, RowInit, SamplingParams, TokenLogprobs, TokenMasks
from baton.worker.executors.cuda.sampling.row_parameters import column_words, row_lists
from baton.worker.sampling.logprobs_mode import LogprobsMode
from baton.worker.sampling.penalties import is_penalized
from baton.worker.sampling.sampler import Sampler

TINY = Sizes(part=1024, capacity=512, few=128, sample=1024, scan=2048)
CLOSE = 1e-3  # distance of two tokens' noisy scores whose order depends on the rounding of exp and log
_MAX_MODEL_LEN = 600


@dataclass
class DeviceRows:
    """The device state of the CUDA executor's sampler, without its uploads, so that it also runs in the interpreter."""

    num_rows: int
    vocab_size: int
    device: str
    sizes: Sizes = field(default_factory=Sizes)
    max_model_len: int = _MAX_MODEL_LEN
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS

    def __post_init__(self) -> None:
        device = torch.device(self.device)
        self.state = SamplingState(
            self.num_rows, self.vocab_size, self.max_model_len, device, self.sizes, self.mode.is_processed
        )
        self.token_ids = torch.full((self.num_rows, self.max_model_len), -7, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(self.num_rows, dtype=torch.int32, device=device)
        self._lists: list[Tensor] = []

    def admit(self, inits: Sequence[RowInit]) -> None:
        lists = [row_lists(init.sampling, self.vocab_size) for init in inits]
        ups = [torch.from_numpy(each.words).to(self.device) for each in lists]
        self._lists += ups
        addresses = [up.data_ptr() for up in ups]
        words = column_words(inits, lists, addresses, self.vocab_size, self.mode.is_processed)
        columns = self.state.columns
        for init, row in zip(inits, words, strict=True):
            columns.words[init.row :: columns.stride][: len(row)] = torch.from_numpy(row).to(self.device)
            known = torch.from_numpy(init.token_ids).to(self.device)
            self.token_ids[init.row, : len(known)] = known
            self.seq_lens[init.row] = len(known)
        counting = [(init.row, len(init.token_ids)) for init in inits if is_penalized(init.sampling)]
        if counting:
            rows, lengths = torch.tensor(counting, dtype=torch.int32, device=self.device).t().contiguous()
            longest = max(length for _, length in counting)
            self.state.counts.restart(rows, lengths, longest, columns.words, columns.stride, self.token_ids)

    def draw(self, logits: Tensor, rows: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """Samples tokens [len(rows)] and appends them to the rows."""
        state = self.state
        state.mask_of.fill_(-1)
        if masks is not None:
            state.mask_of[torch.from_numpy(masks.indices).long()] = torch.arange(
                len(masks.indices), dtype=torch.int32, device=self.device
            )
            state.masks[: masks.bits.size] = torch.from_numpy(masks.bits.reshape(-1)).to(self.device)
        out = torch.full((len(rows),), -7, dtype=torch.int32, device=self.device)
        seq_lens = self.seq_lens[rows.long()]
        sample_tokens(logits, out, state, rows, seq_lens, self.token_ids)
        sample_special(logits, out, state, rows, seq_lens, self.token_ids)
        self.seq_lens[rows.long()] += 1
        return out

    def settle(self, rows: Tensor, drawn: Tensor, wanted: Tensor) -> None:
        """Replaces the drawn tokens of rows by `wanted`."""
        self.token_ids[rows, self.seq_lens[rows].long() - 1] = wanted
        penalized = (self.state.columns.numbers(FLAGS)[rows] & PENALIZED.value) != 0
        counts, own = self.state.counts.by_token, rows[penalized]
        for tokens, change in ((drawn, -1), (wanted, 1)):
            counts[own, tokens[penalized].long()] += change

    def score(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        scored, normalized = self.state.scored(logits), self.mode.is_normalized
        return score_tokens(scored, tokens, self.state, rows, normalized=normalized).clone()


def random_sampling(generator: random.Random, vocab_size: int) -> SamplingParams:
    """Returns random parameters of a request."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(vocab_size) for _ in range(count))

    def maybe(value: object, other: object, share: float = 0.3) -> object:
        return value if generator.random() < share else other

    few = tokens(6)
    sequences = tuple(few[at : at + generator.randint(1, 3)] for at in range(4))
    limit = ReasoningLimit(generator.randint(0, 4), tokens(2), None)
    return SamplingParams(
        temperature=generator.choice((0.0, 0.7, 1.0, 1.3)),
        top_k=int(maybe(generator.choice((1, 5, 20, 300, vocab_size)), 0)),  # type: ignore[call-overload]
        top_p=float(maybe(generator.choice((0.95, 0.8, 0.3, 0.01)), 1.0)),  # type: ignore[arg-type]
        min_p=float(maybe(generator.choice((0.05, 0.3)), 0.0)),  # type: ignore[arg-type]
        seed=generator.getrandbits(64),
        presence_penalty=float(maybe(0.7, 0.0)),  # type: ignore[arg-type]
        frequency_penalty=float(maybe(0.3, 0.0)),  # type: ignore[arg-type]
        repetition_penalty=float(maybe(generator.choice((1.05, 1.3, 0.9)), 1.0)),  # type: ignore[arg-type]
        logit_bias=tuple((token, generator.uniform(-9, 9)) for token in maybe(tokens(3) + few[:1] * 2, ())),  # type: ignore[attr-defined]
        allowed_token_ids=maybe(tokens(vocab_size // 4), (), 0.1),  # type: ignore[arg-type]
        min_tokens=3,
        suppressed_token_ids=maybe(tokens(vocab_size // 3), ()),  # type: ignore[arg-type]
        forbidden_sequences=maybe(sequences, (), 0.2),  # type: ignore[arg-type]
        reasoning_limit=maybe(limit, None, 0.15),  # type: ignore[arg-type]
        logprobs=maybe(generator.choice((0, 1, 5)), None, 0.4),  # type: ignore[arg-type]
        logprob_token_ids=maybe(tokens(3), (), 0.2),  # type: ignore[arg-type]
    )


def random_inits(num_rows: int, vocab_size: int, seed: int, narrow: int = 40) -> list[RowInit]:
    """Returns requests in rows 0 to num_rows. Their token ids are below `narrow`, so that some repeat."""
    generator = random.Random(seed)
    inits = []
    for row in range(num_rows):
        num_prompt, num_output = generator.randint(1, 60), generator.choice((0, 0, 1, 7))
        known = np.array(
            [generator.randrange(min(narrow, vocab_size)) for _ in range(num_prompt + num_output)], np.int32
        )
        inits.append(RowInit(Row(row), known, num_prompt, random_sampling(generator, vocab_size)))
    return inits


def random_masks(num_rows: int, vocab_size: int, generator: np.random.Generator) -> TokenMasks | None:
    """Returns masks for about a third of the rows."""
    indices = np.flatnonzero(generator.random(num_rows) < 0.3).astype(np.int32)
    if not len(indices):
        return None
    bits = generator.integers(-(2**31), 2**31, (len(indices), -(-vocab_size // 32)), np.int64).astype(np.int32)
    return TokenMasks(indices, bits)


class Oracle:
    """The CPU executor's sampler for the same rows."""

    def __init__(
        self, inits: Sequence[RowInit], vocab_size: int, mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    ) -> None:
        self._sampler = Sampler(len(inits), vocab_size, mode)
        self._num_outputs = np.zeros(len(inits), np.int64)
        self._inits = inits
        for init in inits:
            self._sampler.admit(init)
            self._num_outputs[init.row] = len(init.token_ids) - init.num_prompt_tokens

    def draw(
        self, logits: Tensor, rows: np.ndarray, masks: TokenMasks | None = None
    ) -> tuple[np.ndarray, dict[int, TokenLogprobs]]:
        found = self._sampler.sample(logits, rows, self._num_outputs[rows], masks)
        self._num_outputs[rows] += 1
        return found
