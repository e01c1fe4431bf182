"""Sleep, pause, caches, metrics, profiles and reloads of an offline engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.llm import LLM, AsyncLLM, InvalidParameter, SamplingParams
from baton.rpc.errors import ServiceError, Unavailable

MODEL = Path("models/storyteller-7m")
ARGUMENTS = {"threads": 1, "max_num_seqs": 8, "max_model_len": 512, "num_blocks": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0)
PROMPT = "Tom had a red ball and a blue car. " * 4


def text(llm, prompt=PROMPT):
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_engine_that_slept_answers_as_before(llm, level):
    before = text(llm)
    llm.sleep(level)
    assert llm.is_sleeping()
    with pytest.raises(Unavailable, match="asleep, paused or closed"):
        text(llm)
    llm.wake_up()
    assert not llm.is_sleeping()
    assert text(llm) == before


def test_an_engine_wakes_up_in_parts(llm):
    before = text(llm)
    llm.sleep(2)
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping()
    with pytest.raises(Unavailable, match="asleep, paused or closed"):
        text(llm)
    llm.reload_weights(str(MODEL))
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping()
    assert text(llm) == before


def test_a_reset_cache_is_empty(llm):
    text(llm)
    (warm,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert warm.num_cached_tokens
    epoch = llm.get_stats().state.epoch
    assert llm.reset_prefix_cache()
    assert llm.get_stats().state.epoch > epoch
    (cold,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert cold.num_cached_tokens == 0


def test_a_reset_of_running_requests_changes_no_token(llm):
    (expected,) = llm.generate(PROMPT, LONG, use_tqdm=False)
    found = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPT, LONG, use_tqdm=False)))
    thread.start()
    epochs = set()
    while thread.is_alive():
        assert llm.reset_prefix_cache(reset_running_requests=True)
        epochs.add(llm.get_stats(audit=True).state.epoch)
    thread.join()
    assert found[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(epochs) > 1


def test_an_engine_without_a_prefix_cache_finds_nothing():
    with LLM(str(MODEL), enable_prefix_caching=False, **ARGUMENTS) as llm:
        assert [llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)] == [0, 0]
        (info,) = [metric for metric in llm.get_metrics() if metric.name == "vllm:cache_config_info"]
        assert info.labels["enable_prefix_caching"] == "False"
        assert llm.get_stats().num_cached_blocks == 0


def test_metrics_count_what_ran(llm):
    def of(name):
        return [metric for metric in llm.get_metrics() if metric.name == name]

    (before,) = of("vllm:time_to_first_token_seconds")
    (tokens,) = of("vllm:generation_tokens")
    llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
    (after,) = of("vllm:time_to_first_token_seconds")
    assert after.count == before.count + 3
    assert after.buckets["+Inf"] == after.count
    assert after.sum > before.sum
    assert of("vllm:generation_tokens")[0].value == tokens.value + 36
    (running,) = of("vllm:num_requests_running")
    assert (running.value, running.labels["model_name"]) == (0, "storyteller-7m")


def test_a_profile_holds_steps(tmp_path):
    with LLM(str(MODEL), profile_dir=str(tmp_path), **ARGUMENTS) as llm:
        llm.start_profile()
        text(llm)
        path = llm.stop_profile()
        assert len(json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]) > 100


def test_other_weights_are_read_from_a_folder(llm, tmp_path):
    before, digest = text(llm), llm.get_stats().state.model.digest
    folder = shutil.copytree(MODEL, tmp_path / "changed")
    weights = load_file(folder / "model.safetensors")
    save_file({name: -tensor if "o_proj" in name else tensor for name, tensor in weights.items()},
              folder / "model.safetensors")  # fmt: skip
    llm.reload_weights(str(folder))
    assert text(llm) != before
    assert llm.get_stats().state.model.digest != digest
    llm.reload_weights(str(MODEL))
    assert text(llm) == before
    assert llm.get_stats().state.model.digest == digest


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.sleep(3), "level is 3; give 0, 1 or 2"),
        (lambda llm: llm.sleep(1, "gently"), "mode is 'gently'; give abort, wait, keep"),
        (lambda llm: llm.wake_up(["scheduling"]), "tags has 'scheduling'; give weights and kv_cache"),
        (lambda llm: llm.start_profile(), r"give LLM\(profile_dir=FOLDER\)"),
        (lambda llm: llm.start_profile("a"), "profile_prefix is not supported"),
        (lambda llm: llm.stop_profile(), "no profile was started"),
        (lambda llm: llm.reload_weights("nowhere"), "nowhere"),
    ],
)
def test_wrong_operations_are_refused_and_change_nothing(llm, call, message):
    with pytest.raises(ServiceError, match=message):
        call(llm)
    assert text(llm)


def test_a_model_that_is_missing_is_named():
    with pytest.raises(ServiceError, match="models/nowhere"):
        LLM("models/nowhere", threads=1)
    with pytest.raises(InvalidParameter, match="model is 3"):
        LLM(3)


def test_an_engine_ends_once():
    before = set(threading.enumerate())
    llm = LLM(str(MODEL), **ARGUMENTS)
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"baton llm", "engine"}
    llm.shutdown()
    llm.shutdown()
    assert not {thread.name for thread in set(threading.enumerate()) - before} & {"baton llm", "engine"}


async def test_running_outputs_end_wait_or_continue():
    async with AsyncLLM(str(MODEL), **ARGUMENTS) as llm:

        async def last(params):
            return [output async for output in llm.generate(PROMPT, params)][-1].outputs[0]

        whole = await last(LONG)
        for mode, reason in (("abort", "abort"), ("wait", "length"), ("keep", "length")):
            running = asyncio.create_task(last(LONG))
            await asyncio.sleep(0.05)
            await llm.sleep(1, mode)
            assert await llm.is_sleeping()
            await llm.wake_up()
            one = await running
            assert one.finish_reason == reason
            assert whole.token_ids[: len(one.token_ids)] == one.token_ids
        running = asyncio.create_task(last(LONG))
        await asyncio.sleep(0.05)
        await llm.pause_generation(mode="keep", clear_cache=False)
        assert await llm.is_paused()
        await llm.resume_generation()
        assert (await running).token_ids == whole.token_ids
        assert (await llm.get_metrics())[0].name
