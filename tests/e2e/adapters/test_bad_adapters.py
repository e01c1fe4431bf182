"""Real workers refuse bad adapters: the error names the field, nothing is loaded, and running streams go on."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.tiny_adapters import PREFIX, save_adapter
from support.engine.tiny_models import load_transformers
from support.processes.stack import MODEL, MODEL_NAME, Stack, metric, start_stack, wait_until

NAME = "good"
WEIGHTS = "adapter_model.safetensors"
ATTENTION = "model.layers.0.self_attn"


def pickled(folder: Path) -> None:
    """Leaves a pickle that would create a file if it was read."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (folder / "exploded",))

    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))


def renamed_pickle(folder: Path) -> None:
    pickled(folder)
    (folder / "adapter_model.bin").rename(folder / WEIGHTS)


def cut(num_bytes: Callable[[int], int]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: num_bytes(len(data))])

    return change


def configured(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def with_tensor(name: str, *shape: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, f"{PREFIX}{name}": torch.zeros(shape)}, folder / WEIGHTS)

    return change


def no_json(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


CASES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "pickle": (pickled, 400, "adapter_model.bin is a pickle, which can run code"),
    "renamed-pickle": (renamed_pickle, 400, WEIGHTS),
    "empty": (cut(lambda size: 0), 400, WEIGHTS),
    "cut-header": (cut(lambda size: 100), 400, WEIGHTS),
    "cut-weights": (cut(lambda size: size - 100), 400, WEIGHTS),
    "no-json": (no_json, 400, "adapter_config.json"),
    "other-rank": (configured(r=8), 400, "the rank or the base model differs"),
    "wide": (configured(r=128), 400, "rank 128 is above max_lora_rank=64"),
    "other-width": (with_tensor(f"{ATTENTION}.q_proj.lora_A.weight", 4, 999), 400, "the base model differs"),
    "other-architecture": (with_tensor("transformer.h.0.attn.c_attn.lora_A.weight", 4, 8), 400, "has no lora_B"),
    "slow-pattern": (configured(rank_pattern={r"(\w+\.?)+!": 8}), 400, "which repeats a group"),
    "other-tuner": (configured(peft_type="IA3"), 400, "workers compute LORA alone"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good adapter, and one for each case."""
    folder = tmp_path_factory.mktemp("adapters")
    model = load_transformers(MODEL)
    save_adapter(model, folder / NAME, ["q_proj"], lora_alpha=1)
    for name, (change, _, _) in CASES.items():
        shutil.copytree(folder / NAME, folder / name)
        change(folder / name)
    vocab, hidden = model.get_input_embeddings().weight.shape
    other = save_adapter(model, folder / "other-vocabulary", ["q_proj"], embedding=True)
    tensors = load_file(other / WEIGHTS)
    (name,) = [one for one in tensors if one.endswith("lora_embedding_A")]
    save_file({**tensors, name: torch.zeros(4, vocab + 8)}, other / WEIGHTS)
    assert tensors[name].shape == (4, vocab)
    assert hidden != vocab
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Stack]:
    flags = (
        *("--enable-lora", "--lora-folders", str(folder)),
        *("--lora-resolvers", "folder", "--lora-resolver-names", "*"),
    )
    with ExitStack() as cleanup:
        stack = start_stack(tmp_path_factory.mktemp("stack"), cleanup, {"worker": flags})
        body = {"lora_name": NAME, "lora_path": str(folder / NAME), "load_inplace": True}

        def loaded() -> bool:  # on both workers, of which the router may not know the second one at once
            assert stack.post("/v1/load_lora_adapter", body)[0] == 200
            return all(stack.stats(worker).counters.adapters.num_served == 1 for worker in stack.workers)

        wait_until(loaded, "both workers serve the adapter", 30)
        yield stack


def story(stack: Stack, model: str, count: int) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story about a dog."}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": count,
    }
    chunks = stack.stream("/v1/chat/completions", body)
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


EVERY = [*CASES, "other-vocabulary"]


def expected(name: str) -> tuple[int, str]:
    return (400, "the vocabulary or the width differs") if name == "other-vocabulary" else CASES[name][1:]


@pytest.mark.timeout(240)
def test_streams_go_on_while_bad_adapters_are_refused(stack: Stack, folder: Path) -> None:
    names = (NAME, MODEL_NAME)
    undisturbed = [story(stack, name, 300) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        streams = [pool.submit(story, stack, name, 300) for name in names]
        for name in EVERY:
            status, words = expected(name)
            found, answer = stack.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder / name)})
            assert (found, answer["error"]["param"]) == (status, "lora_path"), (name, answer)
            assert words in answer["error"]["message"], (name, answer)
        assert [one.result() for one in streams] == undisturbed
    _, served = stack.get("/v1/models")
    assert {card["id"] for card in served["data"]} == set(names)
    assert not list(folder.rglob("exploded")), "no pickle was read"
    for worker in stack.workers:
        stats = stack.stats(worker)
        assert stats.counters.num_failed == 0
        assert stats.counters.adapters.num_in_host_memory == 1
    stack.wait_all_blocks_back()


@pytest.mark.parametrize("name", ["pickle", "cut-weights", "wide"])
def test_a_bad_adapter_that_is_found_on_first_use_is_the_requests_error(stack: Stack, name: str) -> None:
    status, words = expected(name)
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for _ in range(2):
        found, answer = stack.post("/v1/chat/completions", body)
        assert (found, answer["error"]["param"]) == (status, "model"), answer
        assert words in answer["error"]["message"]
    assert stack.chat("Hi", max_tokens=2)
    _, metrics = stack.get("/metrics")
    assert metric(metrics, "baton_gateway_resolved_adapters_total", outcome="failed") > 0
    assert metric(metrics, "baton_gateway_resolved_adapters_total", outcome="remembered") > 0
