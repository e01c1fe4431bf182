"""Fields of many APIs, sent to each route: honored, refused by name, or listed in x-baton-ignored. None is dropped."""

import pytest
from support.gateway.rest_harness import rest_side, say

CHAT, COMPLETION, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
BASES = {
    CHAT: HI,
    COMPLETION: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {**HI, "max_tokens": 8, "model": "storyteller-7m"},
}
FIELDS = {
    # OpenAI, Anthropic
    "audio": {"voice": "x"}, "modalities": ["audio"], "prediction": {"type": "content", "content": "x"},
    "service_tier": "flex", "store": True, "metadata": {"a": "b"}, "reasoning_effort": "low", "verbosity": "high",
    "web_search_options": {"a": 1}, "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "moderation": {"a": 1}, "suffix": "x", "max_completion_tokens": 3, "max_output_tokens": 17, "n": 2, "best_of": 2,
    "response_format": {"type": "json_object"}, "stop": ["x"], "stop_sequences": ["x"], "system": "Be brief.",
    "instructions": "Be brief.", "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
    "container": "c", "truncation": "auto", "previous_response_id": "resp_1", "conversation": "conv_1",
    "background": True, "include": ["web_search_call.results"], "top_logprobs": 2, "presence_penalty": 0.5,
    "logit_bias": {"5": 1.0}, "seed": 5, "user": "me", "text": {"verbosity": "low"}, "functions": [{"name": "f"}],
    # vLLM, SGLang
    "guided_choice": ["a", "b"], "structured_outputs": {"regex": "a+"}, "min_tokens": 2, "ignore_eos": True,
    "truncate_prompt_tokens": 1, "documents": [{"text": "x"}], "echo": True,
    "mm_processor_kwargs": {"a": 1}, "kv_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "bad_words": ["x"],
    "ebnf": 'root ::= "a"', "min_new_tokens": 2, "return_hidden_states": True, "session_params": {"id": 1},
    "separate_reasoning": False, "custom_logit_processor": "x", "stop_regex": "a+", "lora_path": "x", "rid": "r",
    "input_ids": [5], "return_logprob": True, "data_parallel_rank": 1,
    # llama.cpp, TGI, Ollama, Mistral
    "n_predict": 3, "repeat_penalty": 1.5, "repeat_last_n": 8, "n_probs": 3, "samplers": ["top_k"], "mirostat": 2,
    "dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.5, "cache_prompt": False, "id_slot": 1, "n_keep": 4,
    "t_max_predict_ms": 9, "reasoning_format": "none", "parse_tool_calls": False, "do_sample": False,
    "watermark": True, "return_full_text": True, "truncate": 2, "top_n_tokens": 2, "decoder_input_details": True,
    "options": {"num_ctx": 9}, "keep_alive": "5m", "format": "json", "think": False, "raw": True, "template": "x",
    "images": ["x"], "num_predict": 3, "random_seed": 5, "safe_prompt": True, "prompt_mode": "reasoning",
}  # fmt: skip
# They say how the answer is delivered or stored, which is seen elsewhere.
OTHER_EFFECTS = {
    "store",
    "metadata",
    "user",
    "prompt_cache_key",
    "safety_identifier",
    "background",
    "truncation",
    "echo",
}


@pytest.mark.parametrize("path", BASES)
async def test_no_field_is_dropped_silently(path):
    async with rest_side(say("ok")) as rest:
        rendered = []
        (model,) = rest.catalog.models()
        encode = model.encode_chat

        async def encode_chat(*args, **kwargs):
            rendered.append((args, kwargs))
            return await encode(*args, **kwargs)

        model.encode_chat = encode_chat
        model.for_owner = lambda owner: model

        async def seen(fields):
            rest.generator.started.clear()
            rendered.clear()
            answer = await rest.post(path, BASES[path] | fields)
            started = [one.request for one in rest.generator.started]
            effects = [(one.prompt_token_ids, one.sampling, one.stop, one.n, one.constraint) for one in started]
            return answer, (effects, rendered[:])

        _, plain = await seen({"seed": 1} if path != MESSAGES else {})
        dropped = []
        for name, value in FIELDS.items():
            fields = {name: value} | ({"seed": 1} if path != MESSAGES and name not in ("seed", "random_seed") else {})
            answer, effects = await seen(fields)
            named = answer.status in (400, 404) and name in str(answer.error)
            listed = name in answer.headers.get("x-baton-ignored", "")
            if not (named or listed or (answer.status == 200 and (effects != plain or name in OTHER_EFFECTS))):
                dropped.append((name, answer.status))
    assert dropped == []


@pytest.mark.parametrize("name", ["max_tokens", "n", "tools", "response_format"])
async def test_a_setting_of_another_api_is_refused_where_it_would_change_the_answer(name):
    values = {"max_tokens": 5, "n": 2, "tools": [], "response_format": {"type": "json_object"}}
    async with rest_side(say("ok")) as rest:
        path, body = (RESPONSES, {"input": "Hi"}) if name != "tools" else (COMPLETION, {"prompt": "Hi"})
        given = [{"type": "function"}] if name == "tools" else values[name]
        answer = await rest.post(path, body | {name: given})
        assert (answer.status, answer.error["param"]) == (400, name)
        assert not rest.generator.started


async def test_neutral_settings_of_another_api_are_accepted():
    neutral = {"n": 1, "raw": False, "n_probs": 0, "echo": False, "best_of": 1, "images": [], "options": {}}
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(RESPONSES, {"input": "Hi"} | neutral)
    assert answer.status == 200
    assert "images" not in answer.headers.get("x-baton-ignored", "")
