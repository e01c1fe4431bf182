"""Measures verification with guesses of a given acceptance, on a CPU or a GPU, of a folder or a known shape.

Engines run one after the other, because a GPU may not hold two models. Prompts are random; guesses are the tokens that
`exact` has written, each right with the given chance.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bench.engine.forced_drafts import Answers, force

from baton.services.bench.report import facts_line, machine_facts, render_table
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.factory import make_executor
from baton.worker.executors.ranks import RankGroup
from baton.worker.models.presets import PRESETS
from baton.worker.scheduling.settings import EngineSettings

_PROMPT_TOKENS = 128
_FIRST_TOKEN_ID = 5  # lower ones are special in most vocabularies
_TITLES = ["batch", "kind", "tokens/s", "x exact", "x plain", "tokens a decode", "accepted", "ms a step", "same tokens"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to generate, and the engine that does."""

    name: str
    speculation: str = ""
    invariant: bool = True
    acceptance: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run generated, and how long it took."""

    tokens_per_second: float
    tokens_per_decode: float
    accepted: float  # share of the guesses; 0 without any
    answers: Answers


def run_forced(options: argparse.Namespace) -> int:
    """Prints a table. Returns 1 if any tokens differ."""
    kinds, batches = _kinds(options), [int(batch) for batch in options.batches.split(",")]
    runs = _measure(options, kinds, batches)
    rows, differ = [], False
    for batch in batches:
        best = {kind.name: max(runs[batch, kind.name], key=lambda run: run.tokens_per_second) for kind in kinds}
        for name, run in best.items():
            same = all(one.answers == best["exact"].answers for one in runs[batch, name])
            differ |= not same and name != "plain"
            rows.append(
                [
                    str(batch),
                    name,
                    f"{run.tokens_per_second:.0f}",
                    f"{run.tokens_per_second / best['exact'].tokens_per_second:.3f}",
                    f"{run.tokens_per_second / best['plain'].tokens_per_second:.3f}",
                    f"{run.tokens_per_decode:.2f}",
                    f"{100 * run.accepted:.0f} %",
                    f"{1000 * batch * run.tokens_per_decode / run.tokens_per_second:.3f}",
                    "yes" if same else "no",
                ]
            )
    print(facts_line(machine_facts(("torch",))))
    print(render_table(_TITLES, rows))
    return int(differ)


def _kinds(options: argparse.Namespace) -> list[Kind]:
    kinds = [Kind("plain", invariant=False), Kind("exact")]
    for count in map(int, options.drafts.split(",")):
        text = json.dumps({"num_speculative_tokens": count})
        kinds += [Kind(f"{given} x {count}", text, acceptance=float(given)) for given in options.acceptance.split(",")]
    return kinds


def _measure(
    options: argparse.Namespace, kinds: Sequence[Kind], batches: Sequence[int]
) -> dict[tuple[int, str], list[Measured]]:
    runs: dict[tuple[int, str], list[Measured]] = defaultdict(list)
    answers: dict[bytes, list[int]] = {}
    for speculation, invariant in dict.fromkeys((kind.speculation, kind.invariant) for kind in kinds):
        own = [kind for kind in kinds if (kind.speculation, kind.invariant) == (speculation, invariant)]
        group, engine = _engine(options, max(batches), own[0])
        prompts = _prompts(group.model.vocab_size, max(batches))
        for batch in batches:
            _run(engine, prompts[:batch], 8)
            for kind in own * options.repeat:
                if kind.acceptance is not None:
                    force(group.leader, answers, kind.acceptance)
                runs[batch, kind.name].append(_run(engine, prompts[:batch], options.tokens))
                if kind.name == "exact":
                    answers |= runs[batch, kind.name][-1].answers
        group.close()
        del group, engine
        gc.collect()
        if options.executor == "cuda":
            torch.cuda.empty_cache()
    return runs


def _prompts(vocab_size: int, count: int) -> list[list[int]]:
    prompts: list[list[int]] = (
        np.random.default_rng(0).integers(_FIRST_TOKEN_ID, vocab_size, (count, _PROMPT_TOKENS)).tolist()
    )
    return prompts


def _engine(options: argparse.Namespace, most: int, kind: Kind) -> tuple[RankGroup, Engine]:
    config = WorkerConfig(
        executor=options.executor,
        model=options.model,
        load_format="dummy" if options.model in PRESETS else "auto",
        num_blocks=most * ((_PROMPT_TOKENS + options.tokens) // 16 + 3) + 64,
        max_num_requests=most,
        max_num_batched_tokens=8192,
        max_model_len=4096 if options.executor == "cuda" else 0,
        batch_invariant=kind.invariant,
        speculative_config=kind.speculation,
    )
    config.validate()
    group = make_executor(config)
    settings = EngineSettings(
        max_num_requests=most, max_num_batched_tokens=8192, max_queue_depth=1 << 20, cache_outputs=not kind.invariant
    )
    return group, Engine(group, settings, epoch=1)


def _run(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> Measured:
    """Generates so many tokens of each prompt. Times the steps after the first token of the last one."""
    started = time.monotonic_ns()
    greedy, stop = SamplingParams(temperature=0.0), StopConditions(num_tokens)
    requests = [
        Request(f"{started}-{index}", list(prompt), len(prompt), greedy, stop, bytes(16))
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.submit(request)
    while min(len(request.token_ids.generated) for request in requests) == 0:
        engine.step()
    first, began = engine.counters(), time.perf_counter()
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - began
    after = engine.counters()
    guessed = after.num_draft_tokens - first.num_draft_tokens
    accepted = after.num_accepted_tokens - first.num_accepted_tokens
    produced = after.num_output_tokens - first.num_output_tokens
    return Measured(
        produced / seconds,
        produced / max(1, produced - accepted),
        accepted / guessed if guessed else 0.0,
        {request.token_ids.given.tobytes(): request.token_ids.generated for request in requests},
    )
