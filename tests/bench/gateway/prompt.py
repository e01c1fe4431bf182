"""Measures what a long prompt costs the control plane of a tandem: gateway, router and kvstore."""

from __future__ import annotations

import http.client
import json
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from bench.gateway.rig import SAMPLE, cpu_seconds
from support.processes.stack import Stack, start_stack
from tokenizers import Tokenizer

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.report import render_table

SERVICES = ("gateway", "router", "kvstore")
SHARED = 0.95
_PAUSE_SECONDS = 0.3  # for work after an answer, such as events of blocks and reports
_REQUEST_SECONDS = 120.0


def measure_prompts(num_tokens: int, count: int, markdown: bool) -> str:
    """Returns the table: CPU of each service per chat, for new prompts, and for prompts of which 95 % are cached."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        length = str(2 * num_tokens)
        # The pool has enough blocks of 16 tokens for all prompts.
        blocks = str((count + 2) * num_tokens // 16)
        extra = {"worker": ("--max-model-len", length, "--num-blocks", blocks, "--sim-slowness", "0")}
        stack = start_stack(Path(folder), cleanup, executor="sim", prefill_workers=0, extra=extra)
        words = _Words(num_tokens)
        others = [words.chat(-number, shares=False) for number in range(1, count + 1)]
        cold = _costs(stack, others)
        _ask(stack, words.chat(0))
        warm = _costs(stack, [words.chat(number) for number in range(1, count + 1)])
    lines = [[name, f"{cold[name]:.1f}", f"{warm[name]:.1f}"] for name in SERVICES]
    lines.append(["all three", f"{sum(cold.values()):.1f}", f"{sum(warm.values()):.1f}"])
    header = (f"ms of CPU, a chat of {words.num_prompt_tokens:,} tokens", "nothing shared", "95 % shared")
    return (
        f"{render_table(header, lines, markdown)}\nwanted: <= 30 in all where 95 % are shared; means of {count} chats"
    )


class _Words:
    """Chats with a shared long text and different ends."""

    def __init__(self, num_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(SAMPLE / "tokenizer.json"))
        vocabulary = [word for word in self._tokenizer.get_vocab() if word.isascii() and word.isalpha()]
        self._vocabulary = sorted(vocabulary)
        self._num_tokens = num_tokens
        self._shared = self._text(random.Random(0), int(SHARED * num_tokens))
        self.num_prompt_tokens = 0

    def chat(self, number: int, shares: bool = True) -> bytes:
        """Returns the body of one chat."""
        generator = random.Random(number + 1)
        num_shared = int(SHARED * self._num_tokens)
        begin = self._shared if shares else self._text(generator, num_shared)
        end = self._text(generator, self._num_tokens - num_shared)
        self.num_prompt_tokens = len(self._tokenizer.encode(begin + end).ids)
        messages = [{"role": "system", "content": begin}, {"role": "user", "content": end}]
        return json.dumps({"messages": messages, "max_tokens": 1, "ignore_eos": True}).encode()

    def _text(self, generator: random.Random, num_tokens: int) -> str:
        pieces: list[str] = []
        for _ in range(num_tokens // 16):
            sentence = " ".join(generator.choice(self._vocabulary) for _ in range(12))
            pieces.append(sentence + ".\n")
        text = "".join(pieces)
        # Sentences have different numbers of tokens: cut or repeat to the requested length.
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return (text * (1 + num_tokens // len(ids)))[: len(text) * num_tokens // len(ids)]


def _costs(stack: Stack, bodies: list[bytes]) -> dict[str, float]:
    """Returns the CPU milliseconds of each service for one chat, minus its idle CPU."""
    idle = _idle_shares(stack)
    begin, before = time.perf_counter(), _cpu(stack)
    for body in bodies:
        _ask(stack, body)
        time.sleep(_PAUSE_SECONDS)
    elapsed = time.perf_counter() - begin
    return {
        name: 1000 * (after - before[name] - idle[name] * elapsed) / len(bodies) for name, after in _cpu(stack).items()
    }


def _idle_shares(stack: Stack, seconds: float = 5.0) -> dict[str, float]:
    before = _cpu(stack)
    time.sleep(seconds)
    return {name: (after - before[name]) / seconds for name, after in _cpu(stack).items()}


def _cpu(stack: Stack) -> dict[str, float]:
    found = {}
    for name in SERVICES:
        process = stack[name].process
        assert process is not None
        found[name] = cpu_seconds(psutil.Process(process.pid))
    return found


def _ask(stack: Stack, body: bytes) -> None:
    connection = http.client.HTTPConnection(stack.rest, timeout=_REQUEST_SECONDS)
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise BenchFailed(f"a long chat was answered with {answer.status}: {text[:300]!r}")
