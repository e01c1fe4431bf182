"""A stream with an adapter goes on with the same adapter when its worker is killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.engine.tiny_adapters import save_adapter
from support.engine.tiny_models import load_transformers
from support.processes.stack import MODEL, MODEL_NAME, Stack, metric, start_stack

COUNT = 200
NAME = "poet"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Stack]:
    save_adapter(load_transformers(MODEL), tmp_path / NAME, rank=4, lora_alpha=1)
    flags = ("--enable-lora", "--lora-folders", str(tmp_path))
    (tmp_path / "stack").mkdir()
    with ExitStack() as cleanup:
        yield start_stack(tmp_path / "stack", cleanup, {"worker": flags}, decode_workers=2, prefill_workers=0)


def body(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story about a dog and a river."}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": COUNT,
    }


def text(chunks: Iterable[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.timeout(240)
def test_the_adapter_goes_to_the_next_worker(fleet: Stack, tmp_path: Path) -> None:
    status, _ = fleet.post("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": str(tmp_path / NAME)})
    assert status == 200
    expected = text(fleet.stream("/v1/chat/completions", body(NAME)))
    assert expected != text(fleet.stream("/v1/chat/completions", body(MODEL_NAME)))
    chunks = []
    for chunk in fleet.stream("/v1/chat/completions", body(NAME)):
        chunks.append(chunk)
        if len(chunks) == 10:
            (busy,) = [worker for worker in fleet.workers if fleet.stats(worker).num_held_blocks > 0]
            busy.kill()
    assert text(chunks) == expected
    _, metrics = fleet.get("/metrics")
    assert metric(metrics, "baton_gateway_failovers_total") > 0
