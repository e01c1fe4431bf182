"""Whole texts on several threads: the vectors are those of Transformers, whatever part of a step a text is in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.encoder_models import ENCODERS
from support.engine.pooled_runs import normalized, pooling_engine_over, run_pooled
from support.engine.pooling_models import make_embedder
from support.engine.tiny_models import prompts

from baton.kernels.reference.attention.whole_attention import runs_of
from baton.worker.config import WorkerConfig
from baton.worker.core import PoolingParams, PoolingTask
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.cpu.lanes import LEAST_TOKENS, Lanes
from baton.worker.layers.cpu.step import WholeInputs

_EMBED = PoolingParams(PoolingTask.EMBED, reads_all=True)


@contextmanager
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs_of(lengths: list[int]) -> WholeInputs:
    positions = np.concatenate([np.arange(length) for length in lengths])
    numbers = torch.arange(sum(lengths))
    return WholeInputs(numbers, torch.from_numpy(positions), numbers % 2, runs_of(lengths))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_parts_are_whole_texts_in_order(lengths: list[int], least: int) -> None:
    inputs = inputs_of(lengths)
    parts = inputs.split(least)
    found: list[int] = []
    for part in parts:
        own = [run.seq_len for run in part.runs for _ in range(run.num_seqs)]
        assert part.runs == runs_of(own)
        assert sum(own) == len(part.token_ids) == len(part.positions)
        found += own
    assert found == lengths
    for name in ("token_ids", "positions", "token_types"):
        assert torch.cat([getattr(part, name) for part in parts]).equal(getattr(inputs, name))
    assert all(len(part.token_ids) >= least for part in parts[:-1])


@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic_bert"])
@torch.inference_mode()
def test_vectors_of_texts_in_lanes_equal_transformers(tmp_path: Path, name: str) -> None:
    model = make_embedder(ENCODERS[name].make(), tmp_path, ["mean_tokens"])
    texts = [[max(4, token) for token in text] for text in prompts(24, 80)]
    num_tokens = sum(map(len, texts))
    assert num_tokens >= 2 * LEAST_TOKENS
    with threads_kept():
        executor = CpuExecutor(WorkerConfig(model=str(tmp_path), threads=2, max_num_requests=32))
        engine = pooling_engine_over(executor, budget=num_tokens, rows=32)
        found = run_pooled(engine, texts, _EMBED)
        assert sum(thread.name.startswith("lane") for thread in threading.enumerate()) >= 2
        assert torch.get_num_threads() == 2
        executor.close()
    assert engine.counters().num_steps == 1
    for text, vectors in zip(texts, found, strict=True):
        states = model(torch.tensor([text]), attention_mask=torch.ones(1, len(text))).last_hidden_state[0]
        assert (vectors[0] * normalized(states.mean(0))).sum() > 0.999999


def test_an_error_in_a_lane_is_raised_and_the_next_step_runs() -> None:
    lanes, inputs = Lanes(2), inputs_of([8] * 128)

    def fail(part: WholeInputs) -> torch.Tensor:
        raise ValueError("no memory")

    with threads_kept():
        with pytest.raises(ValueError, match="no memory"):
            lanes.forward(fail, inputs)
        found = lanes.forward(lambda part: part.token_ids, inputs)
        lanes.close()
    assert found.equal(inputs.token_ids)


def test_few_tokens_stay_on_the_callers_thread() -> None:
    found = Lanes(2).forward(lambda part: torch.tensor([threading.get_ident()]), inputs_of([LEAST_TOKENS]))
    assert found.tolist() == [threading.get_ident()]


def test_the_ops_of_a_lane_use_one_thread() -> None:
    def number(part: WholeInputs) -> torch.Tensor:
        return torch.ones(1 << 20).sum() * 0 + torch.tensor([torch.get_num_threads()])

    with threads_kept():
        torch.set_num_threads(2)
        lanes = Lanes(2)
        found = lanes.forward(number, inputs_of([LEAST_TOKENS] * 2))
        lanes.close()
        assert torch.get_num_threads() == 2
    assert found.tolist() == [1, 1]
