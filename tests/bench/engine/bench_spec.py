"""Measures speculation on a CPU: tokens a second with and without, and the share of right guesses.

baton bench spec --model models/storyteller-7m
baton bench spec --batches 1,4,16 --drafts 4,8 --methods ngram
baton bench spec --text copied --methods ngram --tokens 150
baton bench spec --executor cuda --model llama-3.1-8b --acceptance 0.5,0.7,0.8,0.9 --drafts 4 --batches 1,16,256

`--text stories`: greedy stories of the sample model. Each run asks for the same ones again, which `suffix` remembers;
`ngram` does not. `--text copied`: the prompt is such a story and its beginning, and the output is the story again, as
in retrieval or edits of code. The sample model does not copy; one with weights that are written down does, in its
shape, with as many weights and as much KV.

`--acceptance`: random prompts, and guesses that are right with this chance; also on a GPU, and with random weights of a
known shape (forced_spec.py).

On a CPU all kinds take turns step by step. Tokens a second are those of the fastest run. Ratios are of the medians, by
CPU time, which other processes of the machine change least. `exact` is batch_invariant, whose tokens must be the same;
`plain` has neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

from bench.engine.forced_spec import run_forced
from support.engine.copying_model import write_copying_model

from baton.services.bench.report import facts_line, machine_facts, render_table
from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

_STARTS = ("Once upon a time, there was a", "One day, a little girl", "Tom and his dog", "The queen had a golden")
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run generated, and how long it took."""

    tokens_per_second: float
    tokens_per_cpu_second: float
    tokens_per_decode: float
    accepted: float  # share of the guesses; 0 without any
    token_ids: list[list[int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table. Returns 1 if any tokens differ."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.acceptance:
        return run_forced(options)
    if options.executor != "cpu":
        parser.error("--executor cuda needs --acceptance")
    if options.text == "stories":
        return _measure(options, options.model, _prompts(options.model))
    prompts = _copied(options.model, options.tokens)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "copying"
        write_copying_model(folder)
        return _measure(options, str(folder), prompts)


def _measure(options: argparse.Namespace, model: str, prompts: list[list[int]]) -> int:
    kinds = {"plain": ("", False), "exact": ("", True)}
    for method in options.methods.split(","):
        for count in map(int, options.drafts.split(",")):
            given = json.dumps({"method": method, "num_speculative_tokens": count})
            kinds[f"{method} {count}"] = (given, True)
    engines = {name: _engine(model, *kind) for name, kind in kinds.items()}
    rows, differ = [], False
    for batch in map(int, options.batches.split(",")):
        runs: dict[str, list[Measured]] = {name: [] for name in engines}
        for _ in range(options.repeat):
            turn = {name: _Run(engine, prompts, batch, options.tokens) for name, engine in engines.items()}
            _take_turns(list(turn.values()), by_step=options.executor == "cpu")
            for name, taken in turn.items():
                runs[name].append(taken.measured())
        best = {name: max(each, key=lambda run: run.tokens_per_second) for name, each in runs.items()}
        speed = {name: statistics.median(run.tokens_per_cpu_second for run in each) for name, each in runs.items()}
        for name, run in best.items():
            same = all(one.token_ids == best["exact"].token_ids for one in runs[name])
            differ |= not same and name != "plain"
            rows.append(
                [
                    str(batch),
                    name,
                    f"{run.tokens_per_second:.0f}",
                    f"{speed[name] / speed['exact']:.2f}",
                    f"{speed[name] / speed['plain']:.2f}",
                    f"{run.tokens_per_decode:.2f}",
                    f"{100 * run.accepted:.0f} %",
                    "yes" if same else "no",
                ]
            )
    print(facts_line(machine_facts(("torch",))))
    titles = ["batch", "kind", "tokens/s", "x exact", "x plain", "tokens a decode", "accepted", "same tokens"]
    print(render_table(titles, rows))
    return int(differ)


def _prompts(model: str) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    return [[1, *tokenizer.encode(text, add_special_tokens=False).ids] for text in _STARTS]


def _copied(model: str, num_tokens: int) -> list[list[int]]:
    """Returns prompts of a story and its first tokens, after which the whole story follows."""
    prompts = _prompts(model)
    greedy, stop = SamplingParams(temperature=0.0), StopConditions(num_tokens)
    engine, requests = _engine(model, "", invariant=True), []
    for index, prompt in enumerate(prompts):
        requests.append(Request(f"story-{index}", prompt, len(prompt), greedy, stop, bytes(16)))
        engine.submit(requests[-1])
    while engine.has_work():
        engine.step()
    return [[*request.token_ids, *prompt[1:]] for request, prompt in zip(requests, prompts, strict=True)]


def _engine(model: str, speculation: str, invariant: bool) -> Engine:
    config = WorkerConfig(
        executor="cpu",
        model=model,
        num_blocks=16_384,
        max_num_requests=_MOST_ROWS,
        batch_invariant=invariant,
        speculative_config=speculation,
    )
    config.validate()
    settings = EngineSettings(max_num_requests=_MOST_ROWS, cache_outputs=not invariant)
    return Engine(CpuExecutor(config), settings, epoch=1)


class _Run:
    """One engine's run of the same requests."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], batch: int, num_tokens: int) -> None:
        self._engine = engine
        self._before = before = engine.counters()
        self._seconds = self._cpu_seconds = 0.0
        self._requests: list[Request] = []
        for index in range(batch):
            # Each request has a prompt of its own: the second token is any.
            first, *rest = prompts[index % len(prompts)]
            prompt = [first, 5 + index % 200, *rest]
            greedy, stop = SamplingParams(temperature=0.0), StopConditions(num_tokens)
            request = Request(f"{before.num_finished}-{index}", prompt, len(prompt), greedy, stop, bytes(16))
            self._requests.append(request)
            engine.submit(request)

    def step(self) -> bool:
        """Takes and times one step. Returns whether there is another one."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self._engine.step()
        self._seconds += time.perf_counter() - began
        self._cpu_seconds += time.process_time() - cpu_began
        return self._engine.has_work()

    def measured(self) -> Measured:
        before, after = self._before, self._engine.counters()
        guessed = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        produced = after.num_output_tokens - before.num_output_tokens
        return Measured(
            produced / self._seconds,
            produced / self._cpu_seconds,
            produced / max(1, produced - accepted),
            accepted / guessed if guessed else 0.0,
            [request.token_ids.generated for request in self._requests],
        )


def _take_turns(runs: Sequence[_Run], *, by_step: bool) -> None:
    """Runs them step by step in turns, so that what else the machine does slows all; or one after another."""
    if not by_step:
        for run in runs:
            while run.step():
                pass
        return
    going = list(runs)
    while going:
        going = [run for run in going if run.step()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench spec", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--acceptance", default="", help="chances that a guess is right; empty: methods guess")
    parser.add_argument("--model", default="models/storyteller-7m")
    parser.add_argument("--text", choices=("stories", "copied"), default="stories")
    parser.add_argument("--batches", default="1,4,16,64,256", help="requests at a time")
    parser.add_argument("--drafts", default="4,8", help="most guesses of a request in a step")
    parser.add_argument("--methods", default="ngram,suffix")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each request")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    return parser


if __name__ == "__main__":
    sys.exit(main())
