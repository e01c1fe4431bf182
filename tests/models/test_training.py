"""What trains the sample model: its chats are the template's, its masks keep documents apart, its sampler is exact."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from support.engine.tiny_models import generate_greedily, load_transformers
from tokenizers import Tokenizer
from train.chats.chat import Chat, Turn, encode, pieces
from train.chats.json_answers import json_chat
from train.chats.long import long_document, make_parts, needle_document
from train.chats.short import short_document, thinking_chat
from train.chats.tool_calls import tool_chat
from train.networks.network import Kernels, load, read_shape
from train.networks.sampling import Sampling, sample
from train.packing import block_mask, make_row

from baton.gateway.models.prompts.chat_template import ChatTemplate

MODEL = Path(__file__).resolve().parents[2] / "models" / "storyteller-7m"
STORY = ("Tell me a story.", "Once upon a time, there was a dog named Rex. He was happy.")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def template():
    source = json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
    return ChatTemplate({"default": source}, {"bos_token": "<|bos|>"}, "the sample model")


def messages_of(chat):
    for turn in chat.turns:
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.calls
        ]
        yield {"role": turn.role, "content": turn.text} | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("make", [lambda rng: tool_chat(rng, STORY), json_chat], ids=["tools", "json"])
def test_a_chat_is_rendered_by_the_template(template, make):
    rng = Random(5)
    for _ in range(100):
        made = make(rng)
        # Templates leave earlier thoughts out.
        chat = Chat(tuple(Turn(turn.role, turn.text, turn.calls) for turn in made.turns), made.tools)
        tools = [{"type": "function", "function": tool} for tool in chat.tools] or None
        rendered = template.render(list(messages_of(chat)), tools=tools, add_generation_prompt=False)
        assert "".join(piece.text for piece in pieces(chat)) == rendered


def test_a_thought_follows_the_prompt_that_opens_it(template):
    chat = thinking_chat(Random(1), STORY)
    prompt = template.render([{"role": "user", "content": STORY[0]}], variables={"enable_thinking": True})
    whole = "".join(piece.text for piece in pieces(chat))
    assert whole.startswith(prompt)
    assert whole.endswith(f"\n</think>\n\n{STORY[1]}<|im_end|>\n")


def test_tokens_are_those_of_the_whole_text(tokenizer):
    rng = Random(3)
    documents = [short_document(rng, STORY) for _ in range(50)]
    for document, tokens in zip(documents, encode(tokenizer, documents), strict=True):
        text = "".join(piece.text for piece in document)
        assert tokens.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_same_seed_makes_the_same_documents():
    first, second = ([short_document(Random(seed), STORY) for seed in range(30)] for _ in range(2))
    assert first == second


def test_long_documents_fill_their_length_and_ask_at_the_end(tokenizer):
    parts = make_parts(Random(1), tokenizer, [STORY] * 20, 500, 50)
    for length in (2000, 9000):
        document = long_document(Random(length), parts, length)
        assert 0.9 * length < len(document) <= length
        assert document.trained[-length // 10 :].any()
        needle = needle_document(Random(length), parts, length)
        assert 0.8 * length < len(needle) <= length
        assert not needle.trained[: length // 2].any()


@pytest.mark.parametrize("window", [0, 100, 128, 512])
def test_block_masks_have_the_visible_blocks(window):
    rng = Random(window)
    length, at = 2048, 0
    starts = torch.zeros(length, dtype=torch.long)
    while at < length:
        size = rng.choice([5, 100, 128, 700])
        starts[at : at + size] = at
        at += size
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (key <= query) & (key >= starts[:, None])
    if window:
        seen &= query - key < window
    blocks = seen.view(16, 128, 16, 128).permute(0, 2, 1, 3).reshape(16, 16, -1)
    mask = block_mask(starts, window)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(mask.mask_mod(None, None, query, key), seen)
    assert torch.equal(partial | whole, blocks.any(-1))
    assert not (whole & ~blocks.all(-1)).any()
    assert not (whole & partial).any()


def listed(counts, columns):
    flags = torch.zeros(columns.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        flags[row, columns[0, 0, row, :count].long()] = True
    return flags


def test_targets_stay_within_their_document(tokenizer):
    documents = encode(tokenizer, [short_document(Random(seed), STORY) for seed in range(4)])
    row = make_row(documents, 4096)
    at = 0
    for document in documents:
        assert row.weights[at + len(document) - 1] == 0
        assert row.positions[at] == 0
        assert row.targets[at : at + len(document) - 1].tolist() == document.ids[1:].tolist()
        at += len(document)


def test_the_network_writes_transformers_format(tokenizer):
    """Beyond the window too: the last prompt is longer."""
    network = load(MODEL, read_shape(MODEL), Kernels())
    reference = load_transformers(MODEL)
    for text, size in (("<|bos|>Once upon a time", 64), ("<|bos|>" + STORY[1] * 36, 640)):
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        count = min(20, size - len(prompt))
        written = sample(network, [prompt], Sampling(1.0, 1.0, 1, size, ends=()), seed=0)[0][:count]
        assert written == generate_greedily(reference, prompt, count)
