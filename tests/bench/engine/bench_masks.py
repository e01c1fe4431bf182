"""Measures how much constrained requests delay others: time between tokens, with and without masks in the batch.

baton bench masks --executor sim
baton bench masks --executor cpu --model models/storyteller-7m --plain 8
baton bench masks --executor cuda --model llama-3.1-8b --set load_format=dummy --plain 64

Both batches have the same rows. In one of them, some rows are constrained by a JSON schema. A model without a tokenizer
gets one of made-up words that fills its vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.worker.config import WorkerConfig
from baton.worker.core import Constraint, ConstraintForm, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.factory import make_executor, sim_settings
from baton.worker.executors.host.resources import usable_cores
from baton.worker.executors.sim.executor import SimExecutor
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.scheduling.settings import EngineSettings

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Longer than any answer, so that every row stays in the batch to the end.
_SCHEMA = json.dumps({"type": "array", "items": _ITEM, "minItems": 100_000})


@dataclass
class Sample:
    step_ms: float  # between tokens of the plain requests
    masked_rate: float  # tokens of a constrained request per token of a plain one; 1 without constrained ones


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes JSON. Returns an exit code."""
    options = _parser().parse_args(argv)
    values: dict[str, Any] = dict(_setting(text) for text in options.set)
    rows = options.plain + options.constrained
    config = WorkerConfig(
        model=options.model, executor=options.executor, max_num_requests=rows, max_num_batched_tokens=2048, **values
    )
    # As with a GPU, the next step is prepared while one runs.
    sim = options.executor == "sim"
    executor = SimExecutor(replace(sim_settings(config), depth=2)) if sim else make_executor(config)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.model)
        if not (folder / "tokenizer.json").exists():
            folder = Path(made)
            write_tokenizer(folder / "tokenizer.json", executor.model.vocab_size)
        samples: dict[int, list[Sample]] = {0: [], options.constrained: []}
        for number in range(options.repeat + 1):
            for count in samples:
                sample = measure(executor, folder, options, count)
                if number:  # the first pass warms up
                    samples[count].append(sample)
    show(options, samples)
    return 0


def measure(executor: Executor, folder: Path, options: argparse.Namespace, num_constrained: int) -> Sample:
    """Runs one batch to its end."""
    threads = max(1, min(8, usable_cores() // 2))
    grammars = Grammars(lambda: folder, executor.model, threads)
    rows = options.plain + options.constrained
    engine = Engine(executor, EngineSettings(rows, 2048), epoch=1, grammars=grammars)
    plain = [_request(index, options, None, executor) for index in range(options.plain)]
    constraint = Constraint(ConstraintForm.JSON_SCHEMA, _SCHEMA)
    others = [
        _request(options.plain + index, options, constraint if index < num_constrained else None, executor)
        for index in range(options.constrained)
    ]
    for request in [*plain, *others]:
        engine.submit(request)
    times: list[float] = []
    watched = plain[0]
    while len(watched.token_ids) < watched.num_prompt_tokens + options.tokens:
        before = len(watched.token_ids)
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        if len(watched.token_ids) > before:
            times.append(time.perf_counter())
    produced = sum(len(request.token_ids) - request.num_prompt_tokens for request in others) / len(others)
    rate = produced / (len(watched.token_ids) - watched.num_prompt_tokens)
    for request in [*plain, *others]:
        engine.abort(request.request_id)
    while engine.has_work():
        engine.step()
    grammars.close()
    settled = times[len(times) // 4 :]
    return Sample(1000 * (settled[-1] - settled[0]) / (len(settled) - 1), rate)


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Writes a byte-level tokenizer whose other tokens are made-up words."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = [byte for byte in range(256) if byte not in kept]
    letters = [chr(byte) for byte in kept] + [chr(256 + index) for index in range(len(extra))]
    words = dict.fromkeys(["<unk>", "<s>", "</s>", *letters])
    generator = random.Random(0)
    while len(words) < vocab_size:
        word = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9)))
        words[generator.choice(["", "\u0120", "\u0120", '"']) + word] = None
    vocabulary = {word: index for index, word in enumerate(list(words)[:vocab_size])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    specials = [
        {"id": index, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for index, text in enumerate(["<unk>", "<s>", "</s>"])
    ]  # fmt: skip
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": specials, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    path.write_text(json.dumps(document), encoding="utf-8")


def show(options: argparse.Namespace, samples: dict[int, list[Sample]]) -> None:
    """Prints medians and their ratio."""
    steps = {count: statistics.median(sample.step_ms for sample in found) for count, found in samples.items()}
    rates = {count: statistics.median(sample.masked_rate for sample in found) for count, found in samples.items()}
    lines = [
        [f"{options.plain} plain + {options.constrained}, {count} constrained", f"{steps[count]:.3f}",
         f"{steps[count] / steps[0]:.3f}", f"{rates[count]:.2f}"] for count in samples
    ]  # fmt: skip
    facts = machine_facts(("torch", "llguidance"))
    print(render_table([options.executor, "ms a token", "ratio", "others' tokens"], lines, options.markdown))
    print(facts_line(facts))
    write_json(options.json, {"facts": facts, "step_ms": steps, "rates": rates})


def _request(index: int, options: argparse.Namespace, constraint: Constraint | None, executor: Executor) -> Request:
    generator = random.Random(index)
    prompt = [generator.randrange(5, executor.model.vocab_size) for _ in range(options.prompt)]
    return Request(
        request_id=f"r{index}",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=1.0, seed=index),
        stop=StopConditions(max_tokens=4 * options.tokens),
        cache_namespace=bytes(16),
        constraint=constraint,
    )


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench masks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=("sim", "cpu", "cuda"), default="sim")
    parser.add_argument("--model", default="models/storyteller-7m")
    parser.add_argument("--plain", type=int, default=48, help="requests without a constraint")
    parser.add_argument("--constrained", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each plain request")
    parser.add_argument("--repeat", type=int, default=5, help="pairs of runs, of which medians are reported")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any setting of a worker")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
