"""Trains the model further within a given time. See README.md beside this file.

python -m train --before FOLDER --start FOLDER --out FOLDER [--minutes 7.5]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from train.measures.exam import Exam, Marks, choose
from train.measures.report import Reporter, table
from train.networks.averages import blended, copied
from train.networks.network import Kernels, Network, compiled_kernels, load, read_shape, save
from train.options import parse
from train.text import gather
from train.training import Losses, Plan, check_compiles, compiled_losses, train

_BLENDS = (0.1, 0.2, 0.3)  # shares of the earlier model's weights in today's, before training
_NUM_TRAINED = 5  # candidates that a training returns


class _Clock:
    """Seconds since the program's start, before every line."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def log(self, text: str) -> None:
        print(f"[{self.elapsed:.0f} s] {text}", flush=True)


class _Candidates:
    """The networks to choose from, and their marks."""

    def __init__(self, exam: Exam, clock: _Clock) -> None:
        self._exam, self._clock = exam, clock
        self._networks: dict[str, Network] = {}
        self.marks: dict[str, Marks] = {}
        self.seconds = 0.0  # that the last one's exam took

    def add(self, name: str, network: Network) -> None:
        begun = self._clock.elapsed
        self._networks[name], self.marks[name] = network, self._exam.marks(network)
        self.seconds = self._clock.elapsed - begun
        lost = self.marks[name].lost(self.marks["start"])
        figures = {**self.marks[name].perplexity, **{one: s.share for one, s in self.marks[name].skills.items()}}
        shown = ", ".join(f"{one} {value:.3f}" for one, value in figures.items())
        self._clock.log(f"{name}: {shown}" + (f"; worse than the start in: {', '.join(lost)}" if lost else ""))

    def best(self) -> tuple[str, Network]:
        name = choose(self.marks, "start")
        return name, self._networks[name]


def main(arguments: list[str] | None = None) -> None:
    """Samples the text, trains, chooses a checkpoint, and measures it beside the earlier model and the start."""
    options = parse(arguments, __doc__)
    clock = _Clock()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    kernels, losses = (compiled_kernels(), compiled_losses()) if device.type == "cuda" else (Kernels(), Losses())
    teacher = load(options.before, read_shape(options.before), kernels).to(device).requires_grad_(False)
    network = load(options.start, read_shape(options.start), kernels).to(device)
    tokenizer_file = str(options.start / "tokenizer.json")
    check_compiles(network, teacher, _plan(options, 1.0), losses)
    clock.log("kernels are compiled")
    text = gather(teacher, tokenizer_file, options, clock.log)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reporter = Reporter(text.exam, text.held_out, Tokenizer.from_file(tokenizer_file))
    columns = {"earlier": reporter.figures(teacher)}
    clock.log("the earlier model is measured")
    begun = clock.elapsed
    columns["start"] = reporter.figures(copied(network))
    reporting = clock.elapsed - begun
    clock.log("the start is measured")
    candidates = _Candidates(text.choosing, clock)
    candidates.add("start", copied(network))
    for share in _BLENDS:
        candidates.add(f"start with {share:.0%} of the earlier weights", blended(network, teacher, share))
    name, first = candidates.best()
    clock.log(f"the training starts from: {name}")
    _take_weights(network, first)
    # The start's figures took longer than the last will, because kernels were compiled; the rest is for a slow moment.
    reserve = reporting + _NUM_TRAINED * candidates.seconds + 0.01 * options.minutes * 60
    plan = _plan(options, max(1.0, options.minutes * 60 - clock.elapsed - reserve))
    clock.log(f"training for {plan.seconds:.0f} s, {reserve:.0f} s are kept for the figures")
    for trained, one in train(network, teacher, text.documents, text.pools, plan, losses).items():
        candidates.add(trained, one)
    chosen, best = candidates.best()
    save(best, options.out / "model.safetensors")
    clock.log(f"saved: {chosen}")
    saved = load(options.out, read_shape(options.start), kernels).to(device).requires_grad_(False)
    columns["after"] = reporter.figures(saved)
    _write(options, columns, chosen, candidates.marks)
    print(table(columns), flush=True)
    clock.log("done")


def _plan(options: argparse.Namespace, seconds: float) -> Plan:
    return Plan(
        seconds,
        options.length,
        options.peak,
        5,
        options.out,
        options.story_rows,
        options.story_weight,
        options.teacher_temperature,
        options.steps,
    )


@torch.no_grad()
def _take_weights(network: Network, other: Network) -> None:
    for own, taken in zip(network.parameters(), other.parameters(), strict=True):
        own.copy_(taken)


def _write(
    options: argparse.Namespace, columns: dict[str, dict[str, float]], chosen: str, marks: dict[str, Marks]
) -> None:
    report = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "chosen": chosen,
        **columns,
        "candidates": {
            name: {**one.perplexity, **{skill: score.share for skill, score in one.skills.items()}}
            for name, one in marks.items()
        },
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
