"""The front's reading of prompts: hashes equal the engine's, slice by slice."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.engine.engine_harness import BLOCK_SIZE, NAMESPACE, make_request, make_rig, prompt_of
from support.processes.worker_harness import submit

from baton.rpc import prompt_hashes
from baton.rpc.block_hash import HASH_BYTES, hash_blocks, hash_packed_blocks
from baton.v1 import worker_pb2
from baton.worker.core import TokenIds
from baton.worker.link.prompts import KnownPrompt, PromptReader, join_prompts, split_prompts

LONG = 3 * 128 * BLOCK_SIZE + 5  # tokens, of several slices and a rest


@pytest.fixture
def reader() -> PromptReader:
    return PromptReader(BLOCK_SIZE, LONG + 1)


def packed(token_ids: list[int]) -> bytes:
    return np.array(token_ids, "<u4").tobytes()


async def test_a_long_prompt_hashed_in_slices_has_the_hash_of_the_whole(reader: PromptReader) -> None:
    prompt = prompt_of(LONG)
    message = worker_pb2.GenerateStreamRequest(submits=[submit(1, prompt, cache_namespace=NAMESPACE)])
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    shortened, prompts = await reader.read_generate(message.SerializeToString())
    counting.cancel()
    assert prompts == [KnownPrompt(packed(prompt), hash_blocks(NAMESPACE, prompt, BLOCK_SIZE))]
    message.submits[0].ClearField("prompt_token_ids")
    assert shortened == message.SerializeToString()
    assert num_turns >= 3, "others had their turns meanwhile"


async def test_common_prefixes_are_hashed_once(reader: PromptReader, monkeypatch) -> None:
    hashed: list[int] = []

    def hash_and_count(parent: bytes, tokens: bytes, block_size: int) -> bytes:
        hashed.append(len(tokens) // 4)
        return hash_packed_blocks(parent, tokens, block_size)

    monkeypatch.setattr(prompt_hashes, "hash_packed_blocks", hash_and_count)
    shared = prompt_of(2 * 128 * BLOCK_SIZE)
    for salt in (1, 2):
        hashed.clear()
        prompt = packed([*shared, *prompt_of(20, salt)])
        wanted = worker_pb2.PrefillSubmit(packed_prompt=prompt, cache_namespace=NAMESPACE)
        _, (known,) = await reader.read_prefill(worker_pb2.PrefillStreamRequest(submit=wanted).SerializeToString())
        assert known.block_hashes == hash_packed_blocks(NAMESPACE, prompt, BLOCK_SIZE)
    assert sum(hashed) == 20


async def test_output_that_a_request_came_with_is_part_of_its_chain(reader: PromptReader) -> None:
    resume = worker_pb2.ResumeState(output_token_ids=[7, 8, 9])
    message = worker_pb2.GenerateStreamRequest(
        submits=[submit(1, prompt_of(10), cache_namespace=NAMESPACE, resume=resume)]
    )
    same, prompts = await reader.read_generate(message.SerializeToString())
    assert same == message.SerializeToString()
    assert prompts == [KnownPrompt(b"", hash_blocks(NAMESPACE, [*prompt_of(10), 7, 8, 9], BLOCK_SIZE))]


async def test_a_prefill_is_hashed_and_other_messages_are_not(reader: PromptReader) -> None:
    wanted = worker_pb2.PrefillSubmit(packed_prompt=packed(prompt_of(9)), cache_namespace=NAMESPACE)
    message = worker_pb2.PrefillStreamRequest(submit=wanted)
    payload = message.SerializeToString()
    hashes = hash_blocks(NAMESPACE, prompt_of(9), BLOCK_SIZE)
    assert await reader.read_prefill(payload) == (payload, [KnownPrompt(b"", hashes)])
    cancel = worker_pb2.PrefillStreamRequest(cancel=worker_pb2.PrefillCancel(prefill_id=1))
    assert await reader.read_prefill(cancel.SerializeToString()) == (cancel.SerializeToString(), [])


@pytest.mark.parametrize("payload", [b"\xff\xff\xff", b""])
async def test_unreadable_prompts_have_no_hashes(reader: PromptReader, payload: bytes) -> None:
    assert await reader.read_generate(payload) == (payload, [])
    assert await reader.read_prefill(payload) == (payload, [])


async def test_prompts_that_the_engine_will_refuse_are_not_hashed(reader: PromptReader) -> None:
    submits = [
        submit(1, prompt_of(LONG + 1), cache_namespace=NAMESPACE),
        submit(2, prompt_of(20), cache_namespace=b"short"),
        submit(3, prompt_of(BLOCK_SIZE), cache_namespace=NAMESPACE),
    ]
    message = worker_pb2.GenerateStreamRequest(submits=submits)
    _, prompts = await reader.read_generate(message.SerializeToString())
    assert [len(prompt.block_hashes) for prompt in prompts] == [0, 0, HASH_BYTES]


@pytest.mark.parametrize(
    "prompts", [[], [KnownPrompt()], [KnownPrompt(b"1234", bytes(16)), KnownPrompt(), KnownPrompt(b"", bytes(32))]]
)
def test_a_frame_is_taken_apart_as_it_was_put_together(prompts: list[KnownPrompt]) -> None:
    assert split_prompts(join_prompts(b"message", prompts)) == (b"message", prompts)


def test_packed_tokens_hash_like_lists() -> None:
    prompt = prompt_of(30)
    assert hash_packed_blocks(NAMESPACE, packed(prompt), BLOCK_SIZE) == hash_blocks(NAMESPACE, prompt, BLOCK_SIZE)


def test_the_engine_takes_the_hashes_that_it_is_given_and_makes_the_rest() -> None:
    prompt = prompt_of(40)
    whole = hash_blocks(NAMESPACE, prompt, BLOCK_SIZE)
    found = []
    for given in (b"", whole[: 3 * HASH_BYTES], whole):
        rig = make_rig()
        rig.run(make_request(prompt, 1, block_hashes=given))
        found.append(rig.engine.cached_hashes())
    assert found == [whole, whole, whole]


def test_tokens_are_a_sequence_that_grows() -> None:
    token_ids = TokenIds([5, 6, 7])
    token_ids.append(8)
    token_ids.extend([9])
    assert token_ids == [5, 6, 7, 8, 9]
    assert (len(token_ids), token_ids[0], token_ids[3], token_ids[-1], token_ids[-5]) == (5, 5, 8, 9, 5)
    assert (token_ids[1:4], token_ids[3:], token_ids[:-3], token_ids[::2]) == ([6, 7, 8], [8, 9], [5, 6], [5, 7, 9])
    assert token_ids.array().tolist() == [5, 6, 7, 8, 9]
    assert (token_ids.array(2).tolist(), token_ids.array(4).tolist()) == ([5, 6], [5, 6, 7, 8])
    for beyond in (5, -6):
        with pytest.raises(IndexError):
            token_ids[beyond]
