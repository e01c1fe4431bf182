"""Parameters: vLLM's are known, wrong ones are refused with the nearest name or the allowed value."""

from __future__ import annotations

import dataclasses

import pytest

from baton.llm import (
    BeamSearchParams,
    InvalidParameter,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    UnknownParameter,
)
from baton.llm.engine.arguments import engine_arguments
from baton.llm.engine.compute_threads import sleep_between_steps
from baton.rpc.errors import ServiceError

# The fields of vLLM 0.26's SamplingParams that scripts may set.
VLLM_FIELDS = {
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "skip_clone", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args", "bad_words",
    "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection", "routed_experts_prompt_start",
    "trace_decode_token_ids",
}  # fmt: skip


def test_all_of_vllms_fields_are_known():
    assert {field.name for field in dataclasses.fields(SamplingParams)} >= VLLM_FIELDS


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"temprature": 1}, "temprature", "SamplingParams has no parameter temprature; did you mean temperature?"),
        ({"max_new_tokens": 1}, "max_new_tokens", "did you mean max_tokens"),
        ({"guided_json": {}}, "guided_json", "SamplingParams has no parameter guided_json"),
        ({"temperature": -1}, "temperature", "temperature: expected float >= 0"),
        ({"temperature": "hot"}, "temperature", r"temperature: expected float \| null, got str"),
        ({"top_p": 0}, "top_p", "top_p: expected float > 0"),
        ({"n": 0}, "n", "n: expected int >= 1"),
        ({"n": 1.5}, "n", "n: expected int"),
        ({"max_tokens": 0}, "max_tokens", "give at least 1, or None"),
        ({"stop": [""]}, "stop.0", "stop.0: expected str of length >= 1"),
        ({"logprobs": -2}, "logprobs", "logprobs: expected int >= -1"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "expected int"),
        ({"bad_words": "no"}, "bad_words", "expected array"),
        ({"output_kind": 1}, "output_kind", "give a RequestOutputKind"),
        ({"detokenize": 1}, "detokenize", "give True or False"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "-1 for no limit"),
        ({"flat_logprobs": True}, "flat_logprobs", "flat_logprobs=True is not supported; leave it out, or give False"),
        ({"extra_args": {"a": {}}}, "extra_args", "extra_args"),
        ({"logits_processors": [print]}, "logits_processors", "is not supported"),
    ],
)
def test_a_wrong_parameter_is_refused_at_once(values, field, message):
    with pytest.raises(InvalidParameter, match=message) as caught:
        SamplingParams(**values)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_an_unknown_name_is_a_type_error_too():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)
    with pytest.raises(UnknownParameter, match="did you mean regex"):
        StructuredOutputsParams(regexp="a")
    with pytest.raises(UnknownParameter, match="did you mean beam_width"):
        BeamSearchParams(width=2, max_tokens=2)


def test_a_constraint_has_exactly_one_form():
    with pytest.raises(InvalidParameter, match="none is set"):
        StructuredOutputsParams()
    with pytest.raises(InvalidParameter, match="regex and choice are set"):
        StructuredOutputsParams(regex="a", choice=["b"])


def test_a_beam_search_has_beams_and_tokens():
    with pytest.raises(InvalidParameter, match="beam_width is 0"):
        BeamSearchParams(beam_width=0, max_tokens=2)
    with pytest.raises(InvalidParameter, match="temperature"):
        BeamSearchParams(beam_width=2, max_tokens=2, temperature=0.5)


def test_a_changed_parameter_is_read_when_it_is_used():
    params = SamplingParams()
    params.max_tokens = 7
    assert params.request_fields().max_tokens == 7
    params.max_tokens = -1
    with pytest.raises(InvalidParameter, match="max_tokens"):
        params.request_fields()


def test_copies_and_optional_values():
    params = SamplingParams(stop=["a"], repetition_detection=RepetitionDetectionParams(4, 1, 3))
    copy = params.clone()
    copy.stop.append("b")
    assert params.stop == ["a"]
    assert SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None) == SamplingParams(
        top_p=0.5, max_tokens=None
    )
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def arguments(**values):
    return engine_arguments("some/folder", values, has_cuda=lambda: False)


def test_arguments_of_vllm_become_the_workers_settings():
    config = arguments(max_num_seqs=4, num_gpu_blocks_override=32, dtype="bfloat16", max_model_len=None).config
    assert (config.max_num_requests, config.num_blocks, config.dtype, config.executor) == (4, 32, "bfloat16", "cpu")
    assert (config.transports, config.engine_process) == ("none", False)
    cuda = engine_arguments("m", {"enforce_eager": True}, has_cuda=lambda: True).config
    assert (cuda.executor, cuda.cuda_graphs) == ("cuda", False)
    assert arguments(trust_remote_code=True, enable_sleep_mode=True, seed=None, max_logprobs=5).limits.max_logprobs == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seq": 4}, "LLM has no parameter max_num_seq; did you mean max_num_seqs?"),
        ({"gpu_memory_utilisation": 0.5}, "did you mean gpu_memory_utilization"),
        ({"listen": "0.0.0.0:1"}, "LLM has no parameter listen"),
        ({"quantization": "hqq"}, "quantization is .hqq.; it must be one of auto, fp8"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; it must be at least 1 and at most 1"),
        ({"dtype": "int4"}, "dtype is 'int4'; it must be one of auto, float32, bfloat16, float16"),
        ({"max_num_seqs": "4"}, "max_num_requests is '4'; it must be int"),
        ({"max_num_seqs": 4, "max_num_requests": 5}, "are one setting"),
        ({"gpu_memory_utilization": 2}, "at least 0.05 and at most 1.0"),
        ({"tokenizer": "other"}, "another tokenizer"),
        ({"seed": "x"}, "seed is 'x'; give a number"),
        ({"num_blocks": 4, "kv_cache_memory": 5}, "exclude each other"),
        ({"host_cache_min_uses": 2}, "host_cache_min_uses=2 needs host memory: set host_cache_gb too"),
        ({"host_cache_eviction_policy": "arc"}, "eviction_policy=arc needs host memory: set host_cache_gb too"),
        ({"host_cache_eviction_policy": "fifo"}, "lru"),
        ({"dummy_kv": True}, "dummy_kv=true needs prefix_caching=false and role=both"),
        ({"enable_prefix_caching": "no"}, "prefix_caching is 'no'; it must be bool"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(values, message):
    with pytest.raises(ServiceError, match=message):
        arguments(**values)


def test_compute_threads_sleep_unless_the_user_chose_or_torch_is_loaded():
    environ: dict[str, str] = {}
    assert sleep_between_steps(environ, ())
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
    chosen = {"OMP_WAIT_POLICY": "ACTIVE"}
    assert sleep_between_steps(chosen, ())
    assert chosen == {"OMP_WAIT_POLICY": "ACTIVE"}
    untouched: dict[str, str] = {}
    assert not sleep_between_steps(untouched, ("torch",))
    assert untouched == {}
