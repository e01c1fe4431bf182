"""Generations over a scripted router and scripted workers: text, stops, choices, failover, limits."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.gateway.scripted_services import MODEL, ScriptedRouter, ScriptedWorker, until

from baton.gateway.core import GenerationRequest
from baton.gateway.generation.generator import WorkerGenerator
from baton.gateway.generation.retry_budget import PoisonousRequest
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.routers.client import RouterClient, RouterTimes
from baton.rpc.block_hash import cache_namespace, hash_blocks
from baton.rpc.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoCapacity,
    NotFound,
    Unavailable,
    Unsupported,
)
from baton.v1 import types_pb2

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
STORY = "Once upon a time, naïve 你好 😀 there was a ### little END girl."
EOS = 4
TIMES = RouterTimes(attempt=0.5, total=1.0, no_worker=0.2, first_delay=0.02, report_interval=0.01)


class ListSink:
    def __init__(self):
        self.writable = True
        self.deltas = []
        self.usage = None
        self.error = None
        self.ended = asyncio.Event()

    def on_delta(self, delta):
        assert not self.ended.is_set()
        self.deltas.append(delta)

    def on_done(self, usage):
        assert not self.ended.is_set()
        self.usage = usage
        self.ended.set()

    def on_error(self, error):
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()

    async def wait(self):
        async with asyncio.timeout(10):
            await self.ended.wait()
        return self

    def text(self, index=0):
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def token_ids(self, index=0):
        return [token_id for delta in self.deltas if delta.index == index for token_id in delta.token_ids]

    def finish(self, index=0):
        (last,) = (delta for delta in self.deltas if delta.index == index and delta.finish_reason)
        return last.finish_reason, last.stop_reason


@pytest.fixture(scope="module")
def model():
    return load_served_model(str(SAMPLE))


@pytest.fixture
def story(model):
    return model.tokenizer.encode(STORY, add_special_tokens=False)


class Fleet:
    def __init__(self, workers, router, generator, counters, catalog):
        self.workers = workers
        self.router = router
        self.generator = generator
        self.counters = counters
        self.catalog = catalog

    async def run(self, sink=None, **fields):
        sink = sink or ListSink()
        await self.generator.start(request(**fields), sink)
        return await sink.wait()


def request(prompt=range(10, 60), sampling=None, stop=None, **fields):
    return GenerationRequest(
        request_id="r1",
        model="storyteller-7m",
        prompt_token_ids=list(prompt),
        sampling=types_pb2.SamplingParams(**(sampling or {})),
        stop=types_pb2.StopConditions(**(stop or {})),
        **fields,
    )


@pytest.fixture
async def fleet(model, story):
    counters = GenerationCounters()
    catalog = ModelCatalog([model])
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(ScriptedWorker(f"w{at}", lambda submit: [*story, EOS])) for at in range(4)
        ]
        router = await stack.enter_async_context(ScriptedRouter(workers))
        client = await stack.enter_async_context(RouterClient([router.address], catalog.update, counters, TIMES))
        streams = await stack.enter_async_context(WorkerStreams(counters))
        await until(lambda: catalog.ready)
        yield Fleet(workers, router, WorkerGenerator(catalog, client, streams, counters), counters, catalog)


async def test_tokens_become_text_and_usage(fleet, story):
    fleet.workers[0].cached_tokens = 16
    sink = await fleet.run()
    assert sink.text() == STORY
    assert sink.token_ids() == [*story, EOS]
    assert sink.finish() == ("stop", None)
    assert (sink.usage.prompt_tokens, sink.usage.completion_tokens, sink.usage.cached_tokens) == (
        50,
        len(story) + 1,
        16,
    )


async def test_the_worker_and_router_get_everything_resolved(fleet):
    await fleet.run(priority=-3, cache_salt="salt", tenant="t", sampling={"min_p": 0.25})
    (submit,) = fleet.workers[0].submits
    (place,) = fleet.router.places
    values = submit.sampling
    # generation_config.json of the sample model, then neutral values.
    assert (round(values.temperature, 3), round(values.top_p, 3), values.top_k, values.min_p) == (0.7, 0.9, 50, 0.25)
    assert all(
        values.HasField(name) for name in ("seed", "presence_penalty", "frequency_penalty", "repetition_penalty")
    )
    assert submit.stop.max_tokens == 512 == place.max_tokens
    namespace = cache_namespace(MODEL.digest, 16, "", "1:tsalt")
    assert submit.cache_namespace == namespace
    assert place.block_hashes == hash_blocks(namespace, list(range(10, 60)), 16)
    assert (place.num_prompt_tokens, place.priority, submit.priority, submit.tenant) == (50, -3, -3, "t")
    await until(lambda: fleet.router.outcomes)
    assert fleet.router.outcomes[0].placement_id == 1


async def test_no_salt_means_the_shared_namespace(fleet):
    await fleet.run()
    assert fleet.workers[0].submits[0].cache_namespace == cache_namespace(MODEL.digest, 16)


@pytest.mark.parametrize("tokens_a_step", [1, 7])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_text_tokens_and_counts(fleet, model, story, tokens_a_step, include):
    worker = fleet.workers[0]
    worker.script = lambda submit: story * 60  # never done before the abort comes
    worker.tokens_a_step = tokens_a_step
    worker.cached_tokens = 32
    sink = await fleet.run(stop={"stop": ["END", "###"], "include_stop_str_in_output": include})
    assert sink.text() == STORY[: STORY.index("###") + (3 if include else 0)]
    assert sink.finish() == ("stop", "###")
    text = model.tokenizer.decode(sink.token_ids())
    assert text.rstrip().endswith("###")
    assert sink.usage.completion_tokens == len(sink.token_ids())
    assert sink.usage.cached_tokens == 32
    await until(lambda: worker.aborts == [0])


async def test_held_back_text_is_sent_at_the_end(fleet):
    sink = await fleet.run(stop={"stop": ["girl.!"]})
    assert sink.text() == STORY


async def test_a_stop_token_ends_without_its_text(fleet, story, model):
    token_id = model.tokenizer.encode(" girl", add_special_tokens=False)[0]
    fleet.workers[0].script = lambda submit: story[: story.index(token_id) + 1]
    sink = await fleet.run(stop={"stop_token_ids": [token_id]})
    assert sink.finish() == ("stop", token_id)
    assert sink.token_ids()[-1] == token_id
    assert sink.text() == STORY[: STORY.index(" girl")]
    sink = await fleet.run(stop={"stop_token_ids": [token_id], "include_stop_str_in_output": True})
    assert sink.text().endswith(" girl")


async def test_special_tokens_show_only_where_asked_for(fleet, story):
    fleet.workers[0].script = lambda submit: [3, *story[:2]]
    plain = await fleet.run(stop={"max_tokens": 3})
    shown = await fleet.run(stop={"max_tokens": 3}, skip_special_tokens=False)
    assert shown.text() == "<|im_start|>" + plain.text()
    assert plain.finish() == ("length", None)


async def test_an_unfinished_character_shows_at_the_end(fleet, model):
    token_ids = model.tokenizer.encode("😀", add_special_tokens=False)[:-1]
    fleet.workers[0].script = lambda submit: token_ids
    sink = await fleet.run(stop={"max_tokens": len(token_ids)})
    assert sink.text() == "\ufffd"


async def test_without_detokenizing_there_is_no_text(fleet, story):
    sink = await fleet.run(detokenize=False)
    assert sink.text() == ""
    assert sink.token_ids() == [*story, EOS]


async def test_logprobs_come_with_the_tokens_text(fleet, model):
    sink = await fleet.run(sampling={"logprobs": 2})
    entries = [entry for delta in sink.deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in entries] == sink.token_ids()
    assert b"".join(entry.token_bytes for entry in entries[:-1]).decode() == STORY
    assert all(entry.logprob == -0.5 and entry.rank == 1 and len(entry.top) == 2 for entry in entries)
    top = entries[0].top[1]
    assert (top.token_id, top.token) == (entries[0].token_id + 1, model.tokenizer.decode([top.token_id]))


async def test_choices_share_a_worker_and_differ_in_seed(fleet):
    sink = await fleet.run(n=3, sampling={"seed": 7})
    assert [sink.text(index) for index in range(3)] == [STORY] * 3
    seeds = [submit.sampling.seed for submit in fleet.workers[0].submits]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert len(fleet.router.places) == 1
    await fleet.run(n=3, sampling={"seed": 7})
    assert [submit.sampling.seed for submit in fleet.workers[0].submits[3:]] == seeds
    assert sink.usage.prompt_tokens == 50
    await until(lambda: len(fleet.router.outcomes) == 2)
    assert fleet.router.outcomes[0].num_output_tokens == sink.usage.completion_tokens
    assert fleet.router.outcomes[0].first_token_us > 0
    times = fleet.router.outcomes[0].times
    assert times.decode_us >= times.mean_itl_us > 0
    assert times.place_us > 0


async def test_an_abort_silences_the_sink_and_frees_the_worker(fleet):
    fleet.workers[0].step_seconds = 0.02
    sink = ListSink()
    generation = await fleet.generator.start(request(n=2), sink)
    await until(lambda: sink.deltas)
    generation.abort()
    num_deltas = len(sink.deltas)
    await until(lambda: sorted(fleet.workers[0].aborts) == [0, 1])
    generation.abort()
    await until(lambda: fleet.router.outcomes)
    assert len(sink.deltas) == num_deltas
    assert not sink.ended.is_set()


async def test_a_slow_sink_gets_merged_deltas(fleet, story):
    class SlowSink(ListSink):
        def on_delta(self, delta):
            super().on_delta(delta)
            self.writable = len(self.deltas) > 3

    sink = SlowSink()
    generation = await fleet.generator.start(request(stop={"stop": ["nothing"]}, sampling={"logprobs": 1}), sink)
    await until(lambda: fleet.workers[0].submits)
    await asyncio.sleep(0.4)
    assert len(sink.deltas) == 1
    for _ in range(3):
        sink.writable = True
        generation.resume()
    await sink.wait()
    assert sink.text() == STORY
    assert sink.token_ids() == [*story, EOS]
    assert sum(len(delta.logprobs or ()) for delta in sink.deltas) == len(story) + 1
    assert sink.finish() == ("stop", None)


@pytest.mark.parametrize("after_tokens", [1, 2, 9, 17])
@pytest.mark.parametrize("tokens_a_step", [1, 3])
async def test_a_lost_worker_loses_and_repeats_nothing(fleet, story, after_tokens, tokens_a_step):
    first, second = fleet.workers[:2]
    first.break_after_tokens = after_tokens
    first.tokens_a_step = tokens_a_step
    second.refusal = Unavailable("it drains")
    sink = await fleet.run(n=2, stop={"stop": ["### nothing"]})
    for index in range(2):
        assert sink.text(index) == STORY
        assert sink.token_ids(index) == [*story, EOS]
        assert sink.finish(index) == ("stop", None)
    assert list(fleet.router.places[-1].excluded_worker_ids) == ["w0", "w1"]
    seeds = {submit.request_id: submit.sampling.seed for submit in first.submits}
    assert {submit.request_id: submit.sampling.seed for submit in fleet.workers[2].submits} == seeds
    assert fleet.counters.failovers == 4
    await until(lambda: len(fleet.router.outcomes) == 3)
    assert [outcome.worker_failed for outcome in fleet.router.outcomes] == [True, True, False]


async def test_a_worker_lost_after_the_last_token_is_not_needed_again(fleet, story):
    fleet.workers[0].break_after_tokens = len(story) + 1

    def advance(active, frame):
        for slot, (_, left) in active.items():
            frame.slots.append(slot)
            frame.token_ids.append(left.pop(0))
            if not left:
                fleet.workers[0].silent = True

    fleet.workers[0]._advance = advance
    sink = ListSink()
    await fleet.generator.start(request(), sink)
    await until(lambda: len(sink.token_ids()) == len(story) + 1)
    await fleet.workers[0].__aexit__()
    await sink.wait()
    assert sink.finish() == ("stop", None)
    assert len(fleet.router.places) == 1


async def test_a_full_worker_passes_the_request_on(fleet):
    fleet.workers[0].refusal = NoCapacity("queue full")
    assert (await fleet.run()).text() == STORY
    assert len(fleet.workers[1].submits) == 1


async def test_a_third_failure_is_the_clients(fleet):
    for worker in fleet.workers:
        worker.refusal = NoCapacity("queue full")
    sink = await fleet.run()
    assert isinstance(sink.error, NoCapacity)
    assert [len(worker.submits) for worker in fleet.workers] == [1, 1, 1, 0]


async def test_a_failure_that_no_worker_could_help_is_not_retried(fleet):
    fleet.workers[0].refusal = Unsupported("no such adapter")
    sink = await fleet.run(n=2)
    assert isinstance(sink.error, Unsupported)
    assert sink.error.worker_id == "w0"
    assert len(fleet.router.places) == 1


async def test_a_request_that_kills_two_workers_is_not_given_to_a_third(fleet):
    for worker in fleet.workers:
        worker.break_after_tokens = 5
    sink = await fleet.run(n=2)
    assert isinstance(sink.error, PoisonousRequest)
    assert "2 workers died" in sink.error.message
    assert [bool(worker.submits) for worker in fleet.workers] == [True, True, False, False]
    assert fleet.counters.poisonous_requests == 1


async def test_a_request_that_was_only_queued_at_dead_workers_continues(fleet):
    for worker in fleet.workers[:3]:
        worker.dies_in_queue = 2
    sink = await fleet.run(n=2)
    assert sink.error is None
    assert sink.text(0) == sink.text(1) == STORY
    assert all(worker.submits for worker in fleet.workers)
    assert fleet.counters.poisonous_requests == 0


async def test_a_failed_step_is_tried_elsewhere_once(fleet):
    fleet.workers[0].refusal = InternalError("step failed")
    sink = await fleet.run()
    assert sink.text() == STORY
    fleet.workers[1].refusal = InternalError("step failed")
    sink = await fleet.run()
    assert isinstance(sink.error, PoisonousRequest)
    assert not fleet.workers[2].submits


async def test_a_silent_worker_is_left_and_avoided_by_the_next_request(fleet, story):
    fleet.workers[0].silent = True
    sink = await fleet.run()
    assert sink.text() == STORY
    assert not fleet.router.places[0].excluded_worker_ids
    sink = await fleet.run()
    assert fleet.router.places[-1].excluded_worker_ids == ["w0"]
    assert sink.text() == STORY


async def test_a_silent_worker_is_better_than_none(fleet, story):
    del fleet.router.workers[1:]
    fleet.workers[0].silent = True
    running = asyncio.create_task(fleet.run())
    await until(lambda: fleet.counters.silent_workers)
    fleet.workers[0].silent = False
    assert (await running).text() == STORY


async def test_the_time_limit_ends_the_request_and_stops_the_worker(fleet):
    fleet.workers[0].step_seconds = 0.05
    begin = time.monotonic()
    sink = await fleet.run(timeout_ms=300)
    assert isinstance(sink.error, DeadlineExceeded)
    assert time.monotonic() - begin < 5
    await until(lambda: fleet.workers[0].aborts == [0])
    assert 0 < fleet.workers[0].submits[0].timeout_ms <= 300


async def test_a_time_limit_holds_while_placing(fleet):
    fleet.router.hangs = True
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await fleet.generator.start(request(timeout_ms=100), ListSink())


BAD = {
    "temperature": {"sampling": {"temperature": 2.5}},
    "top_p": {"sampling": {"top_p": 0}},
    "min_p": {"sampling": {"min_p": float("nan")}},
    "presence_penalty": {"sampling": {"presence_penalty": -3}},
    "frequency_penalty": {"sampling": {"frequency_penalty": 3}},
    "repetition_penalty": {"sampling": {"repetition_penalty": 0}},
    "logprobs": {"sampling": {"logprobs": 21}},
    "logit_bias": {"sampling": {"logit_bias_token_ids": [4096], "logit_bias_values": [1]}},
    "allowed_token_ids": {"sampling": {"allowed_token_ids": [4096]}},
    "stop_token_ids": {"stop": {"stop_token_ids": [5000]}},
    "stop": {"stop": {"stop": [""]}},
    "max_tokens": {"stop": {"max_tokens": 0}},
    "min_tokens": {"stop": {"min_tokens": 9, "max_tokens": 8}},
    "n": {"n": 1000},
    "prompt": {"prompt": [4096]},
}


@pytest.mark.parametrize("field", BAD)
async def test_a_bad_value_names_its_field(fleet, field):
    with pytest.raises(InvalidRequest) as caught:
        await fleet.generator.start(request(**BAD[field]), ListSink())
    assert caught.value.field == field
    assert field in caught.value.message or field == "stop"
    assert not fleet.router.places


@pytest.mark.parametrize("num_tokens", [2048, 5000])
async def test_a_prompt_beyond_the_context_is_refused(fleet, num_tokens):
    with pytest.raises(InvalidRequest, match="maximum context length is 2048 tokens") as caught:
        await fleet.generator.start(request(prompt=[5] * num_tokens), ListSink())
    assert caught.value.field == "prompt"


async def test_max_tokens_ends_where_the_context_does(fleet):
    await fleet.run(prompt=[5] * 2040, stop={"max_tokens": 100})
    assert fleet.workers[0].submits[0].stop.max_tokens == 8


async def test_an_unknown_model_is_not_found(fleet):
    with pytest.raises(NotFound, match="The model `x` does not exist"):
        fleet.catalog.get("x")


async def test_a_model_without_any_worker_yet_is_unavailable(model, monkeypatch):
    monkeypatch.setattr(model, "info", None)
    catalog = ModelCatalog([model])
    assert not catalog.ready
    with pytest.raises(Unavailable, match="no worker serves the model storyteller-7m yet"):
        catalog.get("").require_info()


async def test_readiness_outlives_a_short_absence_of_workers(model):
    now = [0.0]
    catalog = ModelCatalog([model], clock=lambda: now[0])
    catalog.update([MODEL])
    catalog.update([])
    now[0] += 5
    assert catalog.ready
    now[0] += 10
    assert not catalog.ready
    assert catalog.get("storyteller-7m").info == MODEL
    catalog.update([MODEL])
    assert catalog.ready


@pytest.mark.parametrize(
    ("sampling", "stop"),
    [
        ({"allowed_token_ids": [EOS]}, {"min_tokens": 2, "max_tokens": 4}),
        ({"allowed_token_ids": [7, EOS]}, {"min_tokens": 2, "max_tokens": 4, "stop_token_ids": [7]}),
        ({}, {"min_tokens": 2, "max_tokens": 4, "stop_token_ids": range(4096)}),
    ],
)
async def test_min_tokens_needs_a_token_that_does_not_end_the_output(fleet, sampling, stop):
    with pytest.raises(InvalidRequest) as caught:
        await fleet.run(sampling=sampling, stop=stop)
    assert caught.value.field == "min_tokens"
