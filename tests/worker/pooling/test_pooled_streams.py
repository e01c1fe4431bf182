"""Requests for vectors over a worker's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.engine.encoder_models import ENCODERS
from support.engine.pooling_models import hidden_of, make_classifier, make_embedder, shape_with
from support.processes.ports import free_ports
from support.processes.worker_harness import NAMESPACE, Worker, running_worker, submit
from transformers import Qwen3Config

from baton.v1 import control_pb2, types_pb2, worker_pb2

EMBED = types_pb2.POOLING_TASK_EMBED
CPU = {"executor": "cpu", "engine_process": True, "threads": 1}
CONFIG = Qwen3Config(**shape_with(id2label={0: "bad", 1: "good"}))


def pooled(slot: int, prompt: list[int], **params: object) -> worker_pb2.SubmitRequest:
    pooling = types_pb2.PoolingParams(**{"task": EMBED, **params})
    return worker_pb2.SubmitRequest(
        slot=slot, request_id=f"r{slot}", prompt_token_ids=prompt, cache_namespace=NAMESPACE, pooling=pooling
    )


async def test_a_worker_states_its_pooler_and_sends_vectors(tmp_path: Path) -> None:
    model = make_embedder(CONFIG, tmp_path)
    prompts = [[5, 6, 7], [9] * 40, [11]]
    async with running_worker(*free_ports(1), **CPU, model=str(tmp_path)) as worker:
        pooler = (await worker.state()).model.pooler
        assert (list(pooler.tasks), pooler.width, pooler.normalized) == (
            [EMBED, types_pb2.POOLING_TASK_TOKEN_EMBED],
            64,
            True,
        )
        slots = await worker.stream().generate(*(pooled(slot, prompt) for slot, prompt in enumerate(prompts)))
        for prompt, slot in zip(prompts, slots, strict=True):
            assert slot.finish is not None
            assert slot.finish.reason == types_pb2.FINISH_REASON_STOP
            assert slot.pooled is not None
            assert not slot.tokens
            expected = hidden_of(model, prompt)[-1].numpy()
            np.testing.assert_allclose(slot.pooled[0], expected / np.linalg.norm(expected), atol=1e-4)
        await worker.until_idle()


async def test_a_classifier_names_its_classes(tmp_path: Path) -> None:
    make_classifier(CONFIG, tmp_path)
    async with running_worker(*free_ports(1), **CPU, model=str(tmp_path)) as worker:
        assert list((await worker.state()).model.pooler.labels) == ["bad", "good"]
        (slot,) = await worker.stream().generate(pooled(0, [5, 6], task=types_pb2.POOLING_TASK_CLASSIFY))
        assert slot.pooled is not None
        assert slot.pooled.shape == (1, 2)
        assert slot.pooled.sum() == pytest.approx(1)


@pytest.mark.parametrize(("encoder", "leaves"), [(True, "closes the stream"), (False, "aborts")])
async def test_texts_of_a_client_that_left_are_not_computed(tmp_path: Path, encoder: bool, leaves: str) -> None:
    make_embedder(ENCODERS["bert"].make() if encoder else CONFIG, tmp_path, ["mean_tokens" if encoder else "lasttoken"])
    fields = {"model": str(tmp_path), "max_num_batched_tokens": 64, "max_num_requests": 4}
    async with running_worker(*free_ports(1), **CPU, **fields) as worker:
        stream, other, slots = worker.stream(), worker.stream(), range(1000)
        await stream.send(*(pooled(slot, [slot % 90 + 1] * 60) for slot in slots))
        await other.send(pooled(0, [7] * 3))
        await _until(worker, lambda stats: stats.state.load.queue_depth > 1)
        await worker.control.Pause(control_pb2.PauseRequest(running_requests=control_pb2.RUNNING_REQUESTS_KEEP))
        before = await worker.stats()
        assert before.state.load.queue_depth > 1, "all texts were computed before the pause"
        if leaves == "aborts":
            await stream.send(aborts=tuple(slots))
            ended = await stream.until_ended(*slots)
            assert sum(one.pooled is None for one in ended) > 0
            assert all(one.finish is not None for one in ended)
        else:
            stream.call.cancel()
        stats = await _until(worker, lambda stats: stats.counters.num_aborted + stats.counters.num_finished == 1000)
        assert stats.counters.num_aborted > 0
        assert (stats.state.load.queue_depth, stats.num_held_blocks) == (1, 0)
        await worker.control.Resume(control_pb2.ResumeRequest())
        (slot,) = await other.until_ended(0)
        assert slot.pooled is not None
        assert (await worker.until_idle()).counters.num_steps == before.counters.num_steps + 1


async def _until(
    worker: Worker, condition: Callable[[control_pb2.GetStatsResponse], bool]
) -> control_pb2.GetStatsResponse:
    async with asyncio.timeout(20):
        while True:
            stats = await worker.stats()
            if condition(stats):
                return stats
            await asyncio.sleep(0.02)


async def test_what_a_model_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    make_embedder(CONFIG, tmp_path)
    submits = [
        pooled(0, [5], task=types_pb2.POOLING_TASK_CLASSIFY),
        pooled(1, [5], task=types_pb2.POOLING_TASK_UNSPECIFIED),
        pooled(2, [5], dimensions=32),
        pooled(3, [5, 6], second_text_start=1),
        pooled(4, [5] * 600),
        submit(5, [5]),
        pooled(6, []),
    ]
    async with running_worker(*free_ports(1), **CPU, model=str(tmp_path)) as worker:
        slots = await worker.stream().generate(*submits)
        failures = [slot.failure for slot in slots]
        assert all(failures)
        texts = [failure.message for failure in failures if failure is not None]
        expected = [
            "no task classify; its tasks: embed, token_embed",
            "pooling.task must be set",
            "pooling.dimensions is 32; it must be 64, or 0: this model's embeddings cannot be cut",
            "this model takes no pairs",
            "this worker takes at most 512",
            "no head generate; its heads: pool",
            "it needs at least 1",
        ]
        for text, part in zip(texts, expected, strict=True):
            assert part in text, text
        assert failures[0] is not None
        assert failures[0].code == grpc.StatusCode.UNIMPLEMENTED.value[0]


async def test_a_model_that_generates_refuses_requests_for_vectors() -> None:
    async with running_worker(*free_ports(1), executor="sim") as worker:
        (slot,) = await worker.stream().generate(pooled(0, [5, 6]))
        assert slot.failure is not None
        assert "this model generates tokens" in slot.failure.message
