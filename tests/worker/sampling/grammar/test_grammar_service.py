"""Constrained requests through worker services: across a hand-over, a failover, and with invalid constraints."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import grpc
import psutil
import pytest
from support.processes import ports
from support.processes.stack import wait_until
from support.processes.worker_harness import Slot, running_worker, sampling, submit
from tokenizers import Tokenizer

from baton.v1 import types_pb2, worker_pb2

MODEL = Path(__file__).resolve().parents[4] / "models" / "storyteller-7m"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = types_pb2.Constraint(json_schema=json.dumps(SCHEMA), no_whitespace=True)
CPU = {"executor": "cpu", "model": str(MODEL), "engine_process": True, "threads": 1, "num_blocks": 400}
SIM = {"model": str(MODEL)}
PROMPT = list(range(100, 300))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def ask(slot: int, constraint: types_pb2.Constraint = JSON, **fields: object) -> worker_pb2.SubmitRequest:
    drawn = sampling(temperature=1.0, seed=slot)
    stop = types_pb2.StopConditions(max_tokens=120)
    return submit(slot, [*PROMPT, 300 + slot], sampling=drawn, stop=stop, constraint=constraint, **fields)


def check(slot: Slot, tokenizer: Tokenizer, before: tuple[int, ...] = ()) -> None:
    assert slot.failure is None
    assert slot.finish is not None
    assert slot.finish.reason == types_pb2.FINISH_REASON_STOP
    person = json.loads(tokenizer.decode([*before, *slot.tokens]))
    assert set(person) == {"name", "age"}


async def test_a_worker_prepares_for_constraints_when_it_is_ready() -> None:
    async with running_worker(*ports.free_ports(1), **CPU):
        await asyncio.to_thread(wait_until, trial_processes, "a trial process", 60.0)


def trial_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "baton.worker.sampling.grammar.trial.process" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.parametrize("fields", [SIM, CPU], ids=["sim", "cpu"])
async def test_both_sides_of_a_hand_over_keep_to_the_grammar(fields: dict[str, object], tokenizer: Tokenizer) -> None:
    first, second, third = ports.free_ports(3)
    async with running_worker(third, **fields) as both:
        alone = await both.stream().generate(*(ask(slot) for slot in range(6)))
    async with (
        running_worker(first, role="prefill", worker_id="p", **fields) as prefill,
        running_worker(second, role="decode", worker_id="d", **fields) as decode,
    ):
        endpoint = types_pb2.Endpoint(worker_id="p", epoch=1, address=prefill.address)
        pair = await decode.stream().generate(*(ask(slot, prefill=endpoint) for slot in range(6)))
        assert any(slot.finish is not None and slot.finish.num_transferred_tokens > 0 for slot in pair)
        for together, single in zip(pair, alone, strict=True):
            check(together, tokenizer)
            assert together.tokens == single.tokens
        stats = await decode.until_idle()
        assert stats.counters.num_local_fallbacks == 0
        await prefill.until_idle()


async def test_an_answer_continues_midway_on_another_worker(tokenizer: Tokenizer) -> None:
    first, second = ports.free_ports(2)
    async with running_worker(first, **SIM) as one:
        (whole,) = await one.stream().generate(ask(1))
    async with running_worker(second, **SIM) as other:
        stream = other.stream()
        for cut in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
            resume = worker_pb2.ResumeState(output_token_ids=whole.tokens[:cut])
            (rest,) = await stream.generate(ask(1, resume=resume))
            assert whole.tokens[:cut] + rest.tokens == whole.tokens
            check(rest, tokenizer, tuple(whole.tokens[:cut]))
        wrong = worker_pb2.ResumeState(output_token_ids=[50, 51])
        (failed,) = await stream.generate(ask(1, resume=wrong))
        assert failed.failure is not None
        assert failed.failure.detail.field == "resume.output_token_ids"


async def test_an_uncompilable_constraint_fails_only_its_slot(free_port: int) -> None:
    async with running_worker(free_port, **SIM) as worker:
        stream = worker.stream()
        bad = [
            types_pb2.Constraint(regex="("),
            types_pb2.Constraint(json_schema="{"),
            types_pb2.Constraint(grammar="start: x"),
            types_pb2.Constraint(structural_tag="{}"),
            types_pb2.Constraint(choices=types_pb2.Constraint.Choices()),
            types_pb2.Constraint(),
        ]
        submits = [ask(index, constraint) for index, constraint in enumerate(bad)]
        others = [submit(10 + index, [400 + index], max_tokens=30) for index in range(4)]
        slots = await stream.generate(*submits, *others)
        for constraint, slot in zip(bad, slots, strict=False):
            form = constraint.WhichOneof("form")
            assert slot.failure is not None
            assert slot.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert slot.failure.detail.field == (f"constraint.{form}" if form else "constraint")
            assert not slot.failure.detail.retryable
        assert all(len(slot.tokens) == 30 for slot in slots[len(bad) :])
        await worker.until_idle()


async def test_an_idle_worker_wakes_for_a_finished_compilation(free_port: int, tokenizer: Tokenizer) -> None:
    async with running_worker(free_port, **SIM) as worker:
        stream = worker.stream()
        for slot in range(5):
            constraint = types_pb2.Constraint(regex=f"{slot}[0-9]{{3}}")
            (answer,) = await stream.generate(ask(slot, constraint))
            assert len(tokenizer.decode(answer.tokens)) == 4
