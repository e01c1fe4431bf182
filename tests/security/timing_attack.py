"""Does another tenant's prompt come back faster? Asked of real services, as an attacker with a key of their own would.

In each trial a victim sends a text; then the attacker sends that text, and one that nobody ever sent, and the victim
does the same as a control, all four in random order. AUC is the chance that a sent text is answered sooner than a fresh
one: 0.5 is chance. `python tests/security/timing_attack.py` tries three ways and prints it with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).resolve().parents[1]))

from support.gateway.access_rig import key_file
from support.processes.stack import MODEL_NAME, Stack, start_stack

NO_BETTER_THAN = 0.55  # of the attack
AT_LEAST = 0.9  # of the control
VICTIM, ATTACKER = "victim", "attacker"
TEXT = "the dog ran over a hill and saw her red kite fly up into blue sky while old tree sang to small happy bird"
WORDS = TEXT.split(" ")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that was looked at."""

    tenant: str
    sent: bool  # the victim had sent its text before
    seconds: float  # to the first token, which is the only one
    cached_tokens: int
    computed_tokens: int  # that the worker computed for it


@dataclass(frozen=True, slots=True)
class Auc:
    """How well a number separates sent texts from new ones."""

    value: float
    low: float  # of the 95 % interval
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def auc(samples: Sequence[Sample], tenant: str, number: Callable[[Sample], float]) -> Auc:
    """The chance that `number` is smaller where the text was sent; ties count half. Interval by Hanley and McNeil."""
    sent = [number(one) for one in samples if one.tenant == tenant and one.sent]
    fresh = sorted(number(one) for one in samples if one.tenant == tenant and not one.sent)
    n, m = len(sent), len(fresh)
    wins = sum(2 * m - bisect_left(fresh, one) - bisect_right(fresh, one) for one in sent)
    value = wins / (2 * n * m)
    squares = value * (1 - value)
    squares += (n - 1) * (value / (2 - value) - value**2) + (m - 1) * (2 * value**2 / (1 + value) - value**2)
    half = 1.96 * math.sqrt(max(0.0, squares) / (n * m))
    return Auc(value, max(0.0, value - half), min(1.0, value + half))


class Unanswered(Exception):
    """The fleet was too busy for a request."""


class Attack:
    """Two tenants' keys, and one way to ask."""

    def __init__(self, stack: Stack, keys: dict[str, str], ask: Callable[[str], tuple[str, object]], seed: int) -> None:
        self._stack = stack
        self._keys = keys
        self._ask = ask
        self._draws = random.Random(seed)

    def run(self, trials: int, num_words: int) -> list[Sample]:
        """Returns four samples per trial. Repeats a trial with other texts if the fleet was too busy."""
        samples: list[Sample] = []
        failures = 0
        while len(samples) < 4 * trials:
            try:
                samples += self._trial(num_words)
            except Unanswered:
                failures += 1
                if failures > trials:
                    raise
        return samples

    def _trial(self, num_words: int) -> list[Sample]:
        text = self._text(num_words)
        # All texts are made before any is sent: what comes just before a request is the same for all.
        probes = [(tenant, True, text) for tenant in (VICTIM, ATTACKER)]
        probes += [(tenant, False, self._text(num_words)) for tenant in (VICTIM, ATTACKER)]
        self._draws.shuffle(probes)
        self._send(VICTIM, text)
        return [self._look(*probe) for probe in probes]

    def _text(self, num_words: int) -> str:
        return " ".join(self._draws.choices(WORDS, k=num_words))

    def _look(self, tenant: str, sent: bool, text: str) -> Sample:
        before = self._computed()
        seconds, usage = self._send(tenant, text)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Sample(tenant, sent, seconds, cached, self._computed() - before)

    def _computed(self) -> int:
        counters = [self._stack.stats(worker).counters for worker in self._stack.workers]
        return sum(one.num_prompt_tokens - one.num_cached_tokens for one in counters)

    def _send(self, tenant: str, text: str) -> tuple[float, dict[str, object]]:
        """Seconds from the request's last byte to the answer's last, and its usage."""
        path, body = self._ask(text)
        connection = HTTPConnection(self._stack.rest, timeout=120)
        try:
            connection.connect()
            data = json.dumps(body).encode()
            began = time.perf_counter()
            connection.request("POST", path, data, {"authorization": f"Bearer {self._keys[tenant]}"})
            response = connection.getresponse()
            answer = response.read()
            seconds = time.perf_counter() - began
        finally:
            connection.close()
        if response.status in (429, 503):
            raise Unanswered(answer)
        assert response.status == 200, answer
        return seconds, json.loads(answer).get("usage") or {}


def chat(text: str) -> tuple[str, object]:
    """One token for a text."""
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", {"model": MODEL_NAME, "max_tokens": 1, "messages": messages}


def tokenize(text: str) -> tuple[str, object]:
    """Only the gateway's part."""
    return "/tokenize", {"model": MODEL_NAME, "prompt": text}


def start(folder: Path, cleanup: ExitStack, executor: str, salts: bool = True) -> tuple[Stack, dict[str, str]]:
    """A stack of one worker, and a key for each tenant. Without `salts` the operator gave both tenants one."""
    tenants = {name: {} if salts else {"salt": "shared"} for name in (VICTIM, ATTACKER)}
    path, made = key_file(folder, [{"tenant": name} for name in tenants], tenants)
    stack = start_stack(
        folder, cleanup, {"gateway": ("--api-keys", str(path))}, executor=executor, prefill_workers=0, threads=1
    )
    return stack, dict(zip(tenants, made, strict=True))


# The services' executor, what is asked of them, and how long the texts are in words.
WAYS = {
    "cpu": ("cpu", chat, 900),  # a model on the CPU
    "sim": ("sim", chat, 1400),  # a simulated engine
    "tokenizer": ("sim", tokenize, 25_000),  # texts of 100 kB, which no worker sees
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    arguments = parser.parse_args(words)
    is_bad = False
    for name in arguments.ways:
        executor, ask, num_words = WAYS[name]
        with TemporaryDirectory() as folder, ExitStack() as cleanup:
            stack, keys = start(Path(folder), cleanup, executor)
            samples = Attack(stack, keys, ask, arguments.seed).run(arguments.trials, num_words)
        attack, control = (auc(samples, tenant, lambda one: one.seconds) for tenant in (ATTACKER, VICTIM))
        fails = attack.value > NO_BETTER_THAN or control.value < AT_LEAST
        is_bad = is_bad or fails
        print(
            f"{name}: {arguments.trials} trials; AUC of the attack {attack} (at most {NO_BETTER_THAN}),"
            f" within one tenant {control} (at least {AT_LEAST}){': FAILED' if fails else ''}",
            flush=True,
        )
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
