"""Requests over time: seeded synthetic workloads."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.requests.text import Text, Texts


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload."""

    time: float
    prompt: Text
    num_output_tokens: int  # that the model will generate
    max_tokens: int  # that the client asked for at most
    output_content: int
    tenant: str = ""
    namespace: bytes = b""  # that its prompt is hashed in; empty: the run's
    adapter: str = ""  # empty: the model itself


@dataclass(frozen=True, slots=True)
class Workload:
    """A named source of arrivals; `sessions` yields the turns of one session after the other, for ever."""

    name: str
    summary: str
    sessions: Callable[[random.Random, Texts], Iterator[list[Turn]]]
    turns_per_session: float  # on average
    past_seconds: float = 60.0  # how long ago sessions began whose turns still come
    burstiness: float = 1.0  # squared coefficient of variation of the gaps between sessions; 1: Poisson


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, at a time after the session's start."""

    offset: float
    prompt: Text
    num_output_tokens: int
    output_content: int
    adapter: str = ""


def generate(workload: Workload, texts: Texts, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Returns arrivals at `rate` requests per second on average, sorted by time. Equal seeds give equal arrivals."""
    if rate <= 0 or seconds <= 0:
        raise InvalidRequest(f"rate is {rate:g} and seconds {seconds:g}; both must be above 0", field="rate")
    draws = random.Random(f"{workload.name} {seed}")
    sessions = workload.sessions(draws, texts)
    shape = 1.0 / workload.burstiness
    gap = workload.turns_per_session / rate
    arrivals: list[Arrival] = []
    # Sessions that began before the start have turns left: as long ago as the longest ones are.
    start = -workload.past_seconds if workload.turns_per_session > 1 else 0.0
    while (start := start + draws.gammavariate(shape, gap / shape)) < seconds:
        for turn in next(sessions):
            time = start + turn.offset
            if 0 <= time < seconds:
                arrivals.append(_arrival(time, turn))
    arrivals.sort(key=lambda arrival: (arrival.time, arrival.output_content))
    return arrivals


_FIXED = re.compile(r"fixed-(\d+)-(\d+)-(\d(?:\.\d+)?)")


def _arrival(time: float, turn: Turn) -> Arrival:
    return Arrival(
        time,
        turn.prompt,
        turn.num_output_tokens,
        2 * turn.num_output_tokens + 64,
        turn.output_content,
        adapter=turn.adapter,
    )


def _length(draws: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return min(max(round(median * draws.lognormvariate(0.0, sigma)), low), high)


def _plain(
    median_prompt: float, median_output: float, sigma: float = 0.8
) -> Callable[[random.Random, Texts], Iterator[list[Turn]]]:
    def sessions(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
        while True:
            prompt = texts.start(texts.new_content(), _length(draws, median_prompt, sigma, 16, 32_000))
            yield [Turn(0.0, prompt, _length(draws, median_output, sigma, 4, 4000), texts.new_content())]

    return sessions


def _chat(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
    """Returns growing conversations behind a few system prompts. Users read and type between turns."""
    systems = [texts.start(texts.new_content(), _length(draws, 800, 0.5, 100, 4000)) for _ in range(8)]
    while True:
        text = draws.choices(systems, weights=[1 / (n + 1) for n in range(len(systems))])[0]
        turns: list[Turn] = []
        offset = 0.0
        for _ in range(min(1 + int(draws.expovariate(1 / 4.5)), 12)):
            text = texts.extend(text, texts.new_content(), _length(draws, 120, 1.0, 8, 4000))
            num_output, output = _length(draws, 220, 0.7, 4, 2000), texts.new_content()
            turns.append(Turn(offset, text, num_output, output))
            text = texts.extend(text, output, num_output)
            offset += 0.02 * num_output + draws.expovariate(1 / 4.0) + 1.0
        yield turns


def _agents(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
    """Returns programs that call tools: long shared instructions, many short turns in quick succession."""
    kinds = [texts.start(texts.new_content(), _length(draws, 5000, 0.4, 2000, 12_000)) for _ in range(12)]
    while True:
        text = draws.choices(kinds, weights=[1 / (n + 1) for n in range(len(kinds))])[0]
        text = texts.extend(text, texts.new_content(), _length(draws, 300, 0.8, 16, 4000))
        turns: list[Turn] = []
        offset = 0.0
        for _ in range(min(1 + int(draws.expovariate(1 / 7.5)), 40)):
            num_output, output = _length(draws, 90, 0.7, 4, 1000), texts.new_content()
            turns.append(Turn(offset, text, num_output, output))
            text = texts.extend(text, output, num_output)
            text = texts.extend(text, texts.new_content(), _length(draws, 500, 0.9, 8, 8000))
            offset += 0.02 * num_output + draws.expovariate(1 / 1.5) + 0.3
        yield turns


def _rag(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
    """Returns questions over documents: instructions, two documents of which some are popular, a short question."""
    system = texts.start(texts.new_content(), 400)
    documents = [(texts.new_content(), _length(draws, 3000, 0.5, 500, 10_000)) for _ in range(600)]
    weights = [1 / (n + 1) ** 0.9 for n in range(len(documents))]
    while True:
        text = system
        for content, length in draws.choices(documents, weights=weights, k=2):
            text = texts.extend(text, content, length)
        text = texts.extend(text, texts.new_content(), _length(draws, 60, 0.5, 8, 500))
        yield [Turn(0.0, text, _length(draws, 180, 0.6, 4, 1000), texts.new_content())]


def _adapters(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
    """Returns short independent requests of 1,000 LoRA adapters, some of them popular by Zipf's law."""
    names = [f"adapter-{number:04d}" for number in range(1000)]
    weights = [1 / (number + 1) for number in range(len(names))]
    plain = _plain(400, 120, 0.6)(draws, texts)
    while True:
        (turn,) = next(plain)
        yield [replace(turn, adapter=draws.choices(names, weights=weights)[0])]


def _mixed(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
    """Returns short questions with long answers beside long documents with short ones."""
    short, long = _plain(300, 300, 0.6)(draws, texts), _plain(9000, 60, 0.4)(draws, texts)
    while True:
        yield next(long if draws.random() < 0.2 else short)


def fixed(prompt: int, output: int, hit: float) -> Workload:
    """Returns prompts and answers of one length each, Poisson arrivals. The share `hit` has one of 32 prefixes."""
    num_shared = round(prompt * hit)

    def sessions(draws: random.Random, texts: Texts) -> Iterator[list[Turn]]:
        prefixes = [texts.start(texts.new_content(), num_shared) for _ in range(32)] if num_shared else []
        while True:
            content, rest = texts.new_content(), max(1, prompt - num_shared)
            text = texts.extend(draws.choice(prefixes), content, rest) if prefixes else texts.start(content, rest)
            yield [Turn(0.0, text, output, texts.new_content())]

    return Workload(f"fixed-{prompt}-{output}-{hit:g}", "requests of one shape", sessions, 1.0)


def workload_named(name: str) -> Workload | None:
    """Returns a workload of WORKLOADS, or fixed-PROMPT-OUTPUT-HIT, or None for an unknown name."""
    shape = _FIXED.fullmatch(name)
    if shape is not None and int(shape[1]) and int(shape[2]) and float(shape[3]) < 1:
        return fixed(int(shape[1]), int(shape[2]), float(shape[3]))
    return WORKLOADS.get(name)


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("poisson", "independent prompts, Poisson arrivals", _plain(1200, 250), 1.0),
        Workload("bursty", "independent prompts, arrivals in bursts", _plain(1200, 250), 1.0, burstiness=12.0),
        Workload("chat", "conversations of several turns", _chat, 5.0),
        Workload("agents", "tool-calling programs with shared instructions", _agents, 8.0),
        Workload("mixed", "short questions beside long documents", _mixed, 1.0),
        Workload("adapters", "1,000 LoRA adapters, some of them popular", _adapters, 1.0),
        Workload("rag", "questions over documents, some of them popular", _rag, 1.0),
    )
}
