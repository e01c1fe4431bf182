"""A byte-level tokenizer, models that use it, and engines with constraints."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from baton.worker.config import WorkerConfig
from baton.worker.core import Constraint, ConstraintForm, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.sim.executor import SimExecutor, SimSettings, SimSpeed
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.matching.match import GrammarMatch
from baton.worker.scheduling.settings import EngineSettings

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
EOS = 2
THINK_END = 3
VOCAB_SIZE = 300
_NUMBERS = itertools.count()


def write_byte_tokenizer(folder: Path) -> Tokenizer:
    """Writes a tokenizer.json with special tokens, all bytes and some words, VOCAB_SIZE - 4 tokens in total."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<unk>", "<s>", "</s>", "</think>", *letters]
    merges = [("t", "r"), ("tr", "u"), ("tru", "e"), ("f", "a"), ("fa", "l"), ("fal", "s"), ("fals", "e"), ('"', ":")]
    pieces += [left + right for left, right in merges]
    pieces += [f"<extra{number}>" for number in range(VOCAB_SIZE - 4 - len(pieces))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_tiny_model(folder: Path) -> Tokenizer:
    """Writes a random Llama with the byte-level tokenizer."""
    import torch

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return write_byte_tokenizer(folder)


def make_cpu_executor(folder: Path, num_blocks: int = 400, rows: int = 32) -> CpuExecutor:
    return CpuExecutor(
        WorkerConfig(model=str(folder), threads=1, block_size=8, num_blocks=num_blocks, max_num_requests=rows)
    )


def make_sim_executor(**values: object) -> SimExecutor:
    defaults: dict[str, object] = {
        "num_blocks": 512,
        "block_size": 8,
        "max_num_requests": 32,
        "max_model_len": 1024,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "speed": SimSpeed(factor=0.0),
    }
    return SimExecutor(SimSettings(**{**defaults, **values}))  # type: ignore[arg-type]


def make_grammars(executor: Executor, folder: Path, limits: GrammarLimits | None = None) -> Grammars:
    return Grammars(lambda: folder, executor.model, 2, limits)


def make_engine(
    executor: Executor,
    folder: Path,
    limits: GrammarLimits | None = None,
    rows: int = 32,
    budget: int = 512,
    grammars: Grammars | None = None,
    **settings: object,
) -> tuple[Engine, Grammars]:
    grammars = grammars or make_grammars(executor, folder, limits)
    made = EngineSettings(max_num_requests=rows, max_num_batched_tokens=budget, **settings)  # type: ignore[arg-type]
    return Engine(executor, made, epoch=1, grammars=grammars), grammars


def json_schema(schema: object, **options: object) -> Constraint:
    return Constraint(ConstraintForm.JSON_SCHEMA, json.dumps(schema), **options)  # type: ignore[arg-type]


def regex(pattern: str, **options: object) -> Constraint:
    return Constraint(ConstraintForm.REGEX, pattern, **options)  # type: ignore[arg-type]


def choices(*texts: str) -> Constraint:
    return Constraint(ConstraintForm.CHOICES, choices=texts)


def make_request(
    prompt: Sequence[int] = (40, 41, 42),
    constraint: Constraint | None = None,
    max_tokens: int = 200,
    seed: int | None = None,
    eos: frozenset[int] = frozenset({EOS}),
    stop_token_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    sampling: SamplingParams | None = None,
    output: Sequence[int] = (),
    **values: object,
) -> Request:
    plain = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed or 0)
    return Request(
        request_id=f"g{next(_NUMBERS)}",
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        sampling=sampling or plain,
        stop=StopConditions(max_tokens, min_tokens, eos, stop_token_ids),
        cache_namespace=bytes(16),
        constraint=constraint,
        **values,  # type: ignore[arg-type]
    )


class Run:
    """The output of an engine: tokens, finish reasons and failures by request id."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.failures: dict[str, Exception] = {}
        self.first_tokens: dict[str, int] = {}
        self.logprobs: dict[str, list[object]] = {}

    def step(self) -> None:
        outputs = self.engine.step()
        for request, token_id, logprobs in outputs.tokens():
            self.tokens.setdefault(request.request_id, []).append(token_id)
            if logprobs is not None:
                self.logprobs.setdefault(request.request_id, []).append(logprobs)
        for finish in outputs.finishes:
            self.reasons[finish.request_id] = finish.reason.value
        for failure in outputs.failures:
            self.failures[failure.request.request_id] = failure.error
        for first in outputs.first_tokens:
            self.first_tokens[first.request.request_id] = first.token_id

    def drain(self, limit: int = 20_000, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(limit):
            if until() or not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still work after {limit} steps: {self.engine.load()}")

    def run(self, *requests: Request) -> list[list[int]]:
        for request in requests:
            self.engine.submit(request)
        self.drain()
        return [self.tokens.get(request.request_id, []) for request in requests]


def wait_for(grammars: Grammars, match: GrammarMatch) -> GrammarMatch:
    """Waits up to 60 s until a match's constraint is compiled or rejected. Returns the match."""
    until = time.monotonic() + 60
    while not match.ready:
        assert time.monotonic() < until
        grammars.settle(0.05)
    return match
