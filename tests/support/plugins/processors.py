"""A package with logits processors for tests, and the same changes for Transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from support.plugins.packages import install
from transformers import LogitsProcessor, LogitsProcessorList

from baton.plugins.kinds import LOGITS_PROCESSORS

NAMES = ("no-echo", "waves", "faulty")
_SOURCE = '''
import torch
from baton.worker.sampling.processors.interface import LogitsProcessor

class NoEcho(LogitsProcessor):
    """On the host: forbids the last tokens of the output."""

    arguments = ("no_echo",)

    def new_row(self, arguments, prompt_token_ids):
        if not isinstance(arguments["no_echo"], int) or arguments["no_echo"] < 1:
            raise ValueError("give a number of tokens")
        return arguments["no_echo"]

    def apply(self, logits, rows):
        assert logits.device.type == "cpu" and logits.dtype == torch.float32
        for row, (count, output) in enumerate(zip(rows.states, rows.outputs(), strict=True)):
            logits[row, output[-count:]] = float("-inf")

class Waves(LogitsProcessor):
    """On the device: adds something to every logit that depends on the last token."""

    arguments = ("wave_height", "wave_name")
    on_device = True

    def new_row(self, arguments, prompt_token_ids):
        return float(arguments["wave_height"])

    def apply(self, logits, rows):
        ends = torch.tensor(rows.num_tokens, device=logits.device)[:, None] - 1
        last = rows.token_ids.gather(1, ends)
        heights = torch.tensor(rows.states, device=logits.device)[:, None]
        logits += heights * ((torch.arange(logits.shape[1], device=logits.device) * (last % 5 + 1)) % 7)

class Faulty(LogitsProcessor):
    """Raises after some tokens, or at once."""

    arguments = ("fail_after",)

    def new_row(self, arguments, prompt_token_ids):
        if arguments["fail_after"] == "submit":
            raise RuntimeError("secret detail")
        return arguments["fail_after"]

    def apply(self, logits, rows):
        logits[:] = float("nan")
        for after, count in zip(rows.states, rows.num_output_tokens, strict=True):
            if count == after:
                raise RuntimeError("secret detail")
        logits[:] = 0
        logits[:, 7] = 1
'''


def install_processors(folder: Path) -> None:
    """Installs the processors of NAMES."""
    objects = {"no-echo": "NoEcho", "waves": "Waves", "faulty": "Faulty"}
    install(folder, "test-processors", _SOURCE, {LOGITS_PROCESSORS.group: objects})


class _NoEcho(LogitsProcessor):
    def __init__(self, num_prompt_tokens: int, count: int) -> None:
        self._prompt, self._count = num_prompt_tokens, count

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, input_ids[0, self._prompt :][-self._count :]] = float("-inf")
        return scores


class _Waves(LogitsProcessor):
    def __init__(self, height: float) -> None:
        self._height = height

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(scores.shape[1]) * (input_ids[0, -1] % 5 + 1)
        return scores + self._height * (steps % 7)


def expected_tokens(oracle, prompt_token_ids, count, no_echo=0, wave_height=0.0):
    """Returns the greedy tokens of Transformers with its own processors that do the same."""
    prompt = torch.tensor([prompt_token_ids])
    processors = LogitsProcessorList()
    if no_echo:
        processors.append(_NoEcho(len(prompt_token_ids), no_echo))
    if wave_height:
        processors.append(_Waves(wave_height))
    found = oracle.generate(
        prompt,
        do_sample=False,
        eos_token_id=None,
        max_new_tokens=count,
        attention_mask=torch.ones_like(prompt),
        logits_processor=processors,
    )
    return found[0, len(prompt_token_ids) :].tolist()
