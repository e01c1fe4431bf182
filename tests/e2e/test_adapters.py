"""The official openai client with adapters that are loaded at run time, over a prefill and a decode worker."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import openai
import pytest
from support.engine.tiny_adapters import merged, save_adapter
from support.engine.tiny_models import generate_greedily, load_transformers
from support.processes.load import story_prompts
from support.processes.stack import MODEL, MODEL_NAME, Stack, start_stack, wait_until

from baton.v1 import inference_pb2, inference_pb2_grpc

COUNT = 24
NAMES = ("pirate", "poet", "judge")
ALPHAS = {"pirate": 8, "poet": 1, "judge": 2}  # large enough to change the story
TARGETS = {"pirate": ["q_proj", "v_proj"], "poet": [], "judge": ["gate_proj", "up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters, of which each changes the sample model a little."""
    folder = tmp_path_factory.mktemp("adapters")
    model = load_transformers(MODEL)
    for seed, name in enumerate(NAMES):
        save_adapter(model, folder / name, TARGETS[name], rank=4 + 4 * seed, seed=seed, lora_alpha=ALPHAS[name])
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Stack]:
    flags = ("--enable-lora", "--max-loras", "2", "--lora-folders", str(folder))
    with ExitStack() as cleanup:
        yield start_stack(tmp_path_factory.mktemp("stack"), cleanup, {"worker": flags})


@pytest.fixture(scope="module")
def client(stack: Stack, folder: Path) -> Iterator[openai.OpenAI]:
    """A client of a gateway at which all adapters are loaded."""
    for name in NAMES:
        status, answer = stack.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder / name)})
        assert (status, answer) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        yield client


def chat(client: openai.OpenAI, model: str, content: str) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=COUNT,
        extra_body={"ignore_eos": True},
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


def test_chats_equal_those_of_the_merged_models(stack: Stack, client: openai.OpenAI, folder: Path) -> None:
    model = load_transformers(MODEL)
    texts = set()
    content = story_prompts(1)[0]
    _, tokens = stack.post("/tokenize", {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}]})
    for name in (MODEL_NAME, *NAMES):
        oracle = model if name == MODEL_NAME else merged(model, folder / name)
        expected = generate_greedily(oracle, tokens["tokens"], COUNT)
        _, text = stack.post("/detokenize", {"model": MODEL_NAME, "tokens": expected})
        assert chat(client, name, content).strip() == text["prompt"].strip(), name
        texts.add(text["prompt"])
    assert len(texts) == 4, "every adapter changes the story"


def test_adapters_are_models_with_a_parent(client: openai.OpenAI, folder: Path) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {MODEL_NAME, *NAMES}
    assert cards["poet"].model_dump()["parent"] == MODEL_NAME
    assert cards["poet"].model_dump()["root"] == str(folder / "poet")
    assert client.models.retrieve("judge").id == "judge"


def test_kv_with_an_adapter_comes_from_the_prefill_worker(stack: Stack, client: openai.OpenAI, folder: Path) -> None:
    decode = next(worker for worker in stack.workers if "decode" in worker.plan.name)
    before = stack.stats(decode).counters.num_transfers
    numbers = itertools.count()

    def handed_over() -> bool:
        """Asks for eight stories at once: a router hands over where it expects a gain, as beside busy decodes.

        A name of its own each time: where the decode worker has the adapter and the other has not, there is no gain.
        """
        name = f"fresh-{next(numbers)}"
        status, _ = stack.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder / "pirate")})
        assert status == 200
        try:
            stories = [" ".join(f"{time.monotonic_ns()} dogs" for _ in range(20)) for _ in range(8)]
            with ThreadPoolExecutor(len(stories)) as pool:
                list(pool.map(partial(chat, client, name), stories))
        finally:
            assert stack.post("/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
        return stack.stats(decode).counters.num_transfers > before

    wait_until(handed_over, "a prompt of an adapter comes from the prefill worker", 90)
    stack.wait_all_blocks_back()


def test_more_adapters_than_slots_take_turns(stack: Stack, client: openai.OpenAI) -> None:
    prompts = story_prompts(6)
    alone = [chat(client, NAMES[index % 3], prompt) for index, prompt in enumerate(prompts)]
    again = [chat(client, NAMES[index % 3], prompt) for index, prompt in enumerate(prompts)]
    assert again == alone
    decode = next(worker for worker in stack.workers if "decode" in worker.plan.name)
    counters = stack.stats(decode).counters.adapters
    assert counters.num_on_device == counters.max_on_device == 2
    assert counters.num_device_evictions > 0
    assert counters.num_served == 3


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"lora_name": "pirate", "lora_path": "x"}, 400, "lora_name", "has already been loaded"),
        ({"lora_name": MODEL_NAME, "lora_path": "x"}, 400, "lora_name", "is the name of a model"),
        ({"lora_name": "new", "lora_path": ""}, 400, "lora_path", "must be provided"),
        ({"lora_name": "new", "lora_path": "/etc"}, 403, "lora_path", "is outside the folders of adapters"),
        ({"lora_name": "new", "lora_path": "{folder}/nowhere"}, 404, "lora_path", "no such folder"),
        ({"lora_name": "new", "lora_path": "{folder}/wide"}, 400, "lora_path", "rank 128 is above max_lora_rank=64"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_changes_nothing(
    stack: Stack, client: openai.OpenAI, folder: Path, body: dict[str, str], status: int, param: str, words: str
) -> None:
    (folder / "wide").mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 128, "lora_alpha": 1}
    (folder / "wide" / "adapter_config.json").write_text(json.dumps(config))
    weights = folder / "pirate" / "adapter_model.safetensors"
    (folder / "wide" / "adapter_model.safetensors").write_bytes(weights.read_bytes())
    body = {key: value.replace("{folder}", str(folder)) for key, value in body.items()}
    found, answer = stack.post("/v1/load_lora_adapter", body)
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert words in answer["error"]["message"]
    assert {card.id for card in client.models.list()} == {MODEL_NAME, *NAMES}
    assert chat(client, "pirate", "A dog.")


def test_grpc_adds_and_removes_adapters(stack: Stack, client: openai.OpenAI, folder: Path) -> None:
    with grpc.insecure_channel(stack.config.grpc_listen) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        path = str(folder / "poet")
        stub.AddAdapter(inference_pb2.AddAdapterRequest(name="bard", path=path), timeout=60)
        assert chat(client, "bard", "Tell me of a bird.") == chat(client, "poet", "Tell me of a bird.")
        with pytest.raises(grpc.RpcError, match="has already been loaded") as raised:
            stub.AddAdapter(inference_pb2.AddAdapterRequest(name="bard", path=path), timeout=60)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError, match="outside the folders of adapters") as raised:
            stub.AddAdapter(inference_pb2.AddAdapterRequest(name="thief", path="/etc"), timeout=60)
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        stub.RemoveAdapter(inference_pb2.RemoveAdapterRequest(name="bard"), timeout=60)
        with pytest.raises(grpc.RpcError, match="cannot be found") as raised:
            stub.RemoveAdapter(inference_pb2.RemoveAdapterRequest(name="bard"), timeout=60)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert "bard" not in {model.id for model in client.models.list()}


def test_an_adapter_is_replaced_and_unloaded(stack: Stack, client: openai.OpenAI, folder: Path) -> None:
    content = "Once upon a time " * 20
    body = {"lora_name": "changing", "lora_path": str(folder / "poet")}
    assert stack.post("/v1/load_lora_adapter", body)[0] == 200
    assert chat(client, "changing", content) == chat(client, "poet", content)
    body |= {"lora_path": str(folder / "judge"), "load_inplace": True}
    assert stack.post("/v1/load_lora_adapter", body)[0] == 200
    assert chat(client, "changing", content) == chat(client, "judge", content), "with none of the old one's KV"
    assert stack.post("/v1/unload_lora_adapter", {"lora_name": "changing"})[0] == 200
    with pytest.raises(openai.NotFoundError):
        chat(client, "changing", content)
    status, answer = stack.post("/v1/unload_lora_adapter", {"lora_name": "changing"})
    assert (status, answer["error"]["param"]) == (404, "lora_name")
