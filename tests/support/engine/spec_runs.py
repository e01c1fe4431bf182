"""Engines of the sample model with and without speculation on a CPU, random requests, and what each gets."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from baton.plugins.kinds import PROPOSERS
from baton.plugins.plugins import NO_PLUGINS, Plugins
from baton.worker.config import WorkerConfig
from baton.worker.core import (
    Constraint,
    ConstraintForm,
    FinishReason,
    ReasoningLimit,
    Request,
    SamplingParams,
    StopConditions,
    TokenLogprobs,
)
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.scheduling.settings import EngineSettings

_log = logging.getLogger(__name__)

MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
VOCAB_SIZE = 4096
BLOCK_SIZE = 16
_MOST_LIVE = 200
_MOST_STEPS = 1_000_000
STORY = (
    "Once upon a time, there was a little boat. The little boat was red. Tom saw the little boat and said, "
    '"What a nice little boat!" Tom and the little boat went down the river. The little boat was happy. '
)

CONSTRAINTS = (
    Constraint(ConstraintForm.REGEX, "(little |red |boat ){3,12}"),
    Constraint(ConstraintForm.CHOICES, choices=("the little boat was red", "the little boat was happy")),
    Constraint(ConstraintForm.JSON_SCHEMA, json.dumps({"type": "array", "items": {"enum": ["boat", "river"]}})),
)


@dataclass
class Answer:
    """All that a client gets of a request."""

    tokens: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)
    prompt: list[object] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token_id: int | None = None


def make_executor(
    method: str = "",
    most: int = 6,
    num_blocks: int = 600,
    dtype: str = "float32",
    plugins: Plugins = NO_PLUGINS,
    model: Path = MODEL,
    model_folder: Path | None = None,  # of the draft model
) -> CpuExecutor:
    """Returns an executor with speculation by a method; empty: without, and with the same sums."""
    given = {} if model_folder is None else {"model": str(model_folder)}
    text = json.dumps({"method": method, "num_speculative_tokens": most, **given}) if method else ""
    config = WorkerConfig(
        executor="cpu",
        model=str(model),
        dtype=dtype,
        threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_requests=24,
        batch_invariant=True,
        speculative_config=text,
        plugins=tuple(plugin.name for plugin in plugins.of(PROPOSERS)),
    )
    config.validate()
    return CpuExecutor(config, plugins)


def always(executor: CpuExecutor) -> CpuExecutor:
    """Has all drafts verified, whatever they cost."""
    speculator = executor._drafts._speculator
    assert speculator is not None
    speculator.lengths.choose = lambda rows, available, least_gain=1.0: available  # type: ignore[method-assign]
    return executor


def make_engine(executor: CpuExecutor, budget: int = 512, grammars: Grammars | None = None) -> Engine:
    settings = EngineSettings(max_num_requests=24, max_num_batched_tokens=budget, cache_outputs=False)
    return Engine(executor, settings, epoch=1, grammars=grammars)


def new_grammars(executor: CpuExecutor) -> Grammars:
    """Returns grammars over the sample model's tokens."""
    return Grammars(lambda: MODEL, executor.model, 1)


def run(engine: Engine, requests: list[Request], seed: int = 0) -> dict[str, Answer]:
    """Submits requests at random steps, as long as fewer than the engine's queue takes are unfinished."""
    counters = engine.counters()
    before = np.array((counters.num_draft_tokens, counters.num_accepted_tokens))
    arrivals, waiting = random.Random(seed), deque(requests)
    num_finished, num_drafts = 0, np.zeros(2, np.int64)
    found = {request.request_id: Answer() for request in requests}
    for _ in range(_MOST_STEPS):
        while waiting and arrivals.random() < 0.6 and len(requests) - len(waiting) - num_finished < _MOST_LIVE:
            engine.submit(waiting.popleft())
        if not waiting and not engine.has_work():
            engine.audit()
            after = engine.counters()
            counted = np.array((after.num_draft_tokens, after.num_accepted_tokens)) - before
            assert (counted == num_drafts).all(), "the drafts counted for requests add up to those of the worker"
            return found
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        for request, token_id, logprobs in outputs.tokens():
            found[request.request_id].tokens.append((token_id, logprobs))
        for request, first, entries in outputs.prompt_logprobs:
            answer = found[request.request_id]
            assert 1 <= first <= 1 + len(answer.prompt)
            again = answer.prompt[first - 1 : first - 1 + len(entries)]  # a preempted prompt is computed once more
            assert again == entries[: len(again)]
            answer.prompt += entries[len(again) :]
        for finish in outputs.finishes:
            answer = found[finish.request_id]
            answer.reason, answer.stop_token_id = finish.reason, finish.stop_token_id
            num_drafts += np.array((finish.num_draft_tokens, finish.num_accepted_tokens))
            num_finished += 1
            if num_finished % 1000 == 0:
                _log.info("%d of %d requests", num_finished, len(requests))
    raise AssertionError("the engine does not finish")


def random_sampling(rng: random.Random) -> SamplingParams:
    """Returns parameters of which each is at its default in most cases."""

    def some(value: object, default: object, chance: float = 0.25) -> object:
        return value if rng.random() < chance else default

    tokens = [rng.randrange(5, VOCAB_SIZE) for _ in range(8)]
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5]),
        top_p=some(rng.uniform(0.5, 1.0), 1.0),  # type: ignore[arg-type]
        top_k=some(rng.randint(1, 50), 0),  # type: ignore[arg-type]
        min_p=some(rng.uniform(0.0, 0.2), 0.0),  # type: ignore[arg-type]
        seed=rng.getrandbits(63),
        presence_penalty=some(rng.uniform(-1, 1), 0.0),  # type: ignore[arg-type]
        frequency_penalty=some(rng.uniform(-1, 1), 0.0),  # type: ignore[arg-type]
        repetition_penalty=some(rng.uniform(0.8, 1.3), 1.0),  # type: ignore[arg-type]
        logit_bias=some(tuple((token, rng.uniform(-5, 5)) for token in tokens[:3]), ()),  # type: ignore[arg-type]
        allowed_token_ids=some(tuple(range(5, 2000)), (), 0.1),  # type: ignore[arg-type]
        logprobs=some(rng.randint(0, 3), None, 0.4),  # type: ignore[arg-type]
        prompt_logprobs=some(1, None, 0.1),  # type: ignore[arg-type]
        min_tokens=some(6, 0),  # type: ignore[arg-type]
        suppressed_token_ids=(2, 4),
        forbidden_sequences=some(((tokens[0],), (260, tokens[1])), (), 0.2),  # type: ignore[arg-type]
        reasoning_limit=some(ReasoningLimit(5, (tokens[2], tokens[3])), None, 0.1),  # type: ignore[arg-type]
    )


def random_requests(count: int, seed: int) -> list[Request]:
    """Returns requests of mixed parameters, each with a prompt of its own."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    story = tokenizer.encode(STORY, add_special_tokens=False).ids
    requests = []
    for index in range(count):
        start = rng.randrange(len(story))
        prompt = [1, *(rng.randrange(5, VOCAB_SIZE) for _ in range(2)), *(story[start:] + story)[: rng.randint(1, 90)]]
        ends = frozenset((2, 4)) if rng.random() < 0.7 else frozenset()
        sampling = random_sampling(rng)
        most = rng.randint(1, 48)
        stop = StopConditions(most, min(sampling.min_tokens, most), ends, frozenset(rng.sample(range(5, 400), 3)))
        requests.append(Request(f"r{index}", prompt, len(prompt), sampling, stop, bytes(16)))
    return requests


def constrained(request: Request, index: int) -> None:
    """Gives a request a constraint, and parameters that no constraint contradicts."""
    request.constraint = CONSTRAINTS[index % len(CONSTRAINTS)]
    request.sampling = SamplingParams(
        temperature=0.9 * (index % 2), seed=index, logprobs=2, frequency_penalty=0.3, repetition_penalty=1.1
    )
    request.stop = StopConditions(40, eos_token_ids=frozenset((2, 4)))


def mix_of(requests: Iterable[Request]) -> Counter[str]:
    """Counts requests by the parameters that they have."""
    found: Counter[str] = Counter()
    for request in requests:
        found["requests"] += 1
        found["constraint"] += request.constraint is not None
        found["temperature above 0"] += request.sampling.temperature > 0
        for item in fields(SamplingParams):
            if item.name not in ("temperature", "seed", "suppressed_token_ids"):
                found[item.name] += getattr(request.sampling, item.name) != item.default
        found["stop tokens of their own"] += bool(request.stop.stop_token_ids)
        found["ends of sequence"] += bool(request.stop.eos_token_ids)
    return found
