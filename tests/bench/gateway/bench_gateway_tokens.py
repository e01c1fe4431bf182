"""Measures the gateway's CPU per token for frame decoding, dispatch, text and stop strings. Prints one table.

baton bench gateway_tokens [--slots 256] [--steps 200] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from baton.gateway.core import Delta, Usage
from baton.gateway.generation.output.choice import Choice
from baton.gateway.generation.output.delta_buffer import DeltaBuffer
from baton.gateway.generation.output.stop_strings import StopStrings
from baton.gateway.generation.workers.stream import WorkerStream
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import ServiceError
from baton.v1 import types_pb2, worker_pb2

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
WORDS = "Once upon a time there was a little girl who liked stars, tea and naïve 你好 dogs 😀.\n"


class NullReceiver:
    """Drops tokens."""

    def on_tokens(self, token_ids: object, logprobs: object) -> None:
        pass

    def on_finish(self, finish: worker_pb2.SlotFinish) -> None:
        pass

    def on_failure(self, error: ServiceError) -> None:
        pass


class CountingSink:
    """Counts characters."""

    writable = True

    def __init__(self) -> None:
        self.num_chars = 0

    def on_delta(self, delta: Delta) -> None:
        self.num_chars += len(delta.text)

    def on_done(self, usage: Usage) -> None:
        pass

    def on_error(self, error: ServiceError) -> None:
        pass


class TextReceiver(NullReceiver):
    """Turns tokens into deltas as the gateway does."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str]) -> None:
        detokenizer = tokenizer.detokenizer([1], skip_special_tokens=True)
        matcher = StopStrings(stops) if stops else None
        self._choice = Choice(0, detokenizer, matcher, frozenset((2, 4)), False, None)
        self._outlet = DeltaBuffer(CountingSink())

    def on_tokens(self, token_ids, logprobs):
        choice = self._choice
        if not choice.finished:
            self._outlet.emit(choice.take(token_ids, logprobs))


def make_frames(tokenizer: Tokenizer, num_slots: int, num_steps: int) -> list[bytes]:
    """Returns frames of tokens from random positions of a real text, which cut characters as models do."""
    text = tokenizer.encode(WORDS * 50, add_special_tokens=False)
    begins = [random.randrange(len(text)) for _ in range(num_slots)]
    return [
        worker_pb2.GenerateStreamResponse(
            step=step,
            slots=range(num_slots),
            token_ids=[text[(begin + step) % len(text)] for begin in begins],
        ).SerializeToString()
        for step in range(num_steps)
    ]


async def measure(frames: list[bytes], num_slots: int, make: Callable[[], NullReceiver]) -> float:
    """Returns the microseconds of CPU per token."""
    stream = WorkerStream("w", "127.0.0.1:1", lambda stream: None, GenerationCounters())
    for _ in range(num_slots):
        stream.submit(worker_pb2.SubmitRequest(stop=types_pb2.StopConditions(max_tokens=1)), make())
    begin = time.process_time()
    for frame in frames:
        stream.dispatch(worker_pb2.GenerateStreamResponse.FromString(frame))
    seconds = time.process_time() - begin
    await stream.close()
    return seconds / (len(frames) * num_slots) * 1e6


async def run(num_slots: int, num_steps: int, num_rounds: int) -> dict[str, list[float]]:
    """Returns the microseconds per token of every case. The cases take turns."""
    tokenizer = Tokenizer(SAMPLE / "tokenizer.json")
    frames = make_frames(tokenizer, num_slots, num_steps)
    cases: dict[str, Callable[[], NullReceiver]] = {
        "decode and dispatch": NullReceiver,
        "+ text": lambda: TextReceiver(tokenizer, []),
        "+ text and 1 stop string": lambda: TextReceiver(tokenizer, ["\n\nUser:"]),
        "+ text and 4 stop strings": lambda: TextReceiver(tokenizer, ["\n\nUser:", "###", "END", "the end"]),
    }
    results: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(num_rounds):
        for name, make in cases.items():
            results[name].append(await measure(frames, num_slots, make))
    tokenizer.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    results = asyncio.run(run(options.slots, options.steps, options.rounds))
    print(f"CPU us a token, {options.slots} slots a frame, {options.steps} frames, {options.rounds} interleaved rounds")
    print(f"{'':28}{'median':>8}{'min':>8}{'max':>8}")
    for name, values in results.items():
        print(f"{name:28}{statistics.median(values):8.2f}{min(values):8.2f}{max(values):8.2f}")
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
