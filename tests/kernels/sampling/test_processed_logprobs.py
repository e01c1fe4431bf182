"""Log-probabilities in every mode on the device equal those of the CPU executor's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernels.harness import cases
from support.sampling.sampling_rig import CLOSE, TINY, DeviceRows, Oracle, random_inits, random_masks
from transformers import TopPLogitsWarper

from baton.kernels.sampling import MOST_LIKELY, Sizes
from baton.kernels.sampling.needs import NEEDS_TRIAL
from baton.worker.core import Row, RowInit, SamplingParams
from baton.worker.sampling.logprobs_mode import MODES, LogprobsMode

PROCESSED = [LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS]
SIZES = Sizes(part=1024, capacity=512, few=64, sample=512, scan=1024)


def equal(found: torch.Tensor, wanted: object, named: bool) -> bool:
    """Returns whether a row of results has the oracle's values."""
    count = len(wanted.top_token_ids)  # type: ignore[attr-defined]
    first = 2 + 2 * MOST_LIKELY if named else 2 + MOST_LIKELY
    top = found[first : first + count].contiguous().view(torch.float32).tolist()
    ours = [found[:1].view(torch.float32).item(), *top]
    theirs = [wanted.logprob, *wanted.top_logprobs]  # type: ignore[attr-defined]
    # Of equal logits at the end of a nucleus, the device keeps all and the CPU some: their sums differ. A random mask
    # may exclude the token that ends reasoning: nothing is left, and both say NaN.
    return ours == pytest.approx(theirs, rel=1e-3, abs=1e-3, nan_ok=True) and found[1] == wanted.rank  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", LogprobsMode, ids=MODES)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "dtype", "sizes", "device"),
    [
        pytest.param(12, 1500, torch.float32, SIZES, "cpu", marks=pytest.mark.interpreted),
        *(
            pytest.param(rows, vocab, dtype, Sizes(), "cuda", marks=pytest.mark.gpu)
            for rows, vocab, dtype in ((200, 151_936, torch.bfloat16), (500, 32_000, torch.float32))
        ),
    ],
)
def test_values_and_tokens_are_those_of_the_cpu_executor(
    mode: LogprobsMode, num_rows: int, vocab_size: int, dtype: torch.dtype, sizes: Sizes, device: str
) -> None:
    inits = random_inits(num_rows, vocab_size, seed=num_rows + 1)
    ours = DeviceRows(num_rows, vocab_size, device, sizes, mode=mode)
    theirs = Oracle(inits, vocab_size, mode)
    ours.admit(inits)
    generator = np.random.default_rng(num_rows)
    drawn = torch.Generator(device).manual_seed(num_rows)
    rows, unequal, num_scored = np.arange(num_rows), [], 0
    for step in range(2):
        logits = (3 * torch.randn(num_rows, vocab_size, device=device, generator=drawn)).to(dtype)
        masks = random_masks(num_rows, vocab_size, generator) if step else None
        expected, logprobs = theirs.draw(logits.float().cpu().clone(), rows, masks)
        on_device = torch.from_numpy(rows).int().to(device)
        found = ours.draw(logits, on_device, masks)
        wanted = torch.from_numpy(expected).int().to(device)
        same = (found == wanted).cpu().numpy()
        scores = ours.score(logits, on_device, wanted).cpu()
        ours.settle(on_device.long(), found, wanted)
        for index, entry in logprobs.items():
            num_scored += 1
            named = bool(inits[index].sampling.logprob_token_ids)
            if not (same[index] and equal(scores[index], entry, named)):
                ours_are = scores[index][:1].view(torch.float32).item(), int(scores[index][1])
                unequal.append((step, index, bool(same[index]), ours_are, (entry.logprob, entry.rank)))
    assert num_scored >= num_rows // 2
    # The nucleus of a row may be cut at a rounding error.
    assert len(unequal) <= num_scored // 100, unequal


@pytest.mark.parametrize("mode", PROCESSED, ids=lambda mode: mode.value)
@pytest.mark.parametrize(("vocab_size", "device"), cases([3000], [151_936]))
def test_tokens_that_cannot_be_drawn_come_last_and_each_once(mode: LogprobsMode, vocab_size: int, device: str) -> None:
    sampling = SamplingParams(temperature=0.5, top_k=3, logprobs=8, seed=4)
    init = RowInit(Row(0), np.array([1, 2], np.int32), 2, sampling)
    rows = DeviceRows(1, vocab_size, device, TINY if device == "cpu" else Sizes(), mode=mode)
    rows.admit([init])
    logits = torch.randn(1, vocab_size, device=device)
    on_device = torch.zeros(1, dtype=torch.int32, device=device)
    drawn = rows.draw(logits, on_device)
    found = rows.score(logits, on_device, drawn).cpu()[0]
    tokens = found[2:10].tolist()
    values = found[2 + MOST_LIKELY : 10 + MOST_LIKELY].contiguous().view(torch.float32)
    best, kept = logits[0].float().cpu().topk(3)
    expected = best / 0.5 if mode is LogprobsMode.PROCESSED_LOGITS else (best / 0.5).log_softmax(-1)
    assert tokens[:3] == kept.tolist()
    torch.testing.assert_close(values[:3], expected, rtol=1e-4, atol=CLOSE)
    assert torch.isneginf(values[3:]).all()
    assert len(set(tokens)) == 8
    assert int(drawn) in kept.tolist()


@pytest.mark.parametrize(
    ("vocab_size", "sizes", "device"),
    [
        pytest.param(5000, Sizes(1024, 1024, 128, 2048, 2048), "cpu", marks=pytest.mark.interpreted),
        pytest.param(151_936, Sizes(), "cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_wide_nucleus_is_kept_exactly(vocab_size: int, sizes: Sizes, device: str) -> None:
    """Without log-probabilities, such a row's token is found without the bound of its nucleus."""
    rows = DeviceRows(2, vocab_size, device, sizes, mode=LogprobsMode.PROCESSED_LOGITS)
    prompt = np.array([1, 2], np.int32)
    sampling = [SamplingParams(temperature=1.0, top_p=0.7, logprobs=logprobs, seed=3) for logprobs in (None, 0)]
    rows.admit([RowInit(Row(row), prompt, 2, params) for row, params in enumerate(sampling)])
    logits = torch.randn(1, vocab_size, device=device).expand(2, -1).contiguous()
    drawn = rows.draw(logits, torch.arange(2, dtype=torch.int32, device=device))
    assert drawn[0] == drawn[1]
    assert rows.state.needs[0] & NEEDS_TRIAL.value
    assert rows.state.processed is not None
    expected = TopPLogitsWarper(0.7)(None, logits[1:].cpu())[0]
    kept = torch.isfinite(rows.state.processed[1].cpu())
    assert int((kept != torch.isfinite(expected)).sum()) <= 3  # at a rounding error
    assert torch.equal(rows.state.processed[1].cpu()[kept], logits[1].cpu()[kept])
