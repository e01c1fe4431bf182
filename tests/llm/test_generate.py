"""LLM.generate and LLM.chat: the tokens of Transformers, every parameter's effect, and vLLM's fields."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from baton.llm import LLM, InvalidParameter, SamplingParams, StructuredOutputsParams
from baton.rpc.errors import InvalidRequest

PROMPTS = ["Once upon a time", "The big dog", "Lily and her mom went", "One day a cat saw"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def greedy_tokens(oracle, prompt_token_ids, count):
    prompt = torch.tensor([prompt_token_ids])
    found = oracle.generate(prompt, do_sample=False, max_new_tokens=count, attention_mask=torch.ones_like(prompt))
    return found[0, len(prompt_token_ids) :].tolist()


def test_greedy_tokens_are_those_of_transformers(llm, oracle):
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        (one,) = output.outputs
        assert (output.prompt, output.finished, one.finish_reason, one.index) == (prompt, True, "length", 0)
        assert list(one.token_ids) == greedy_tokens(oracle, output.prompt_token_ids, 24)
        assert output.metrics.num_generation_tokens == 24


def test_a_prompt_may_be_tokens_or_a_mapping(llm):
    (plain,) = llm.generate("The big dog", GREEDY, use_tqdm=False)
    ids = plain.prompt_token_ids
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": "The big dog", "cache_salt": "s"}, [ids]):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.prompt_token_ids == ids
    (bare,) = llm.generate("The big dog", GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert bare.prompt_token_ids == ids[1:]


def test_logprobs_are_those_of_transformers(llm, oracle):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    (one,) = output.outputs
    whole = [*output.prompt_token_ids, *one.token_ids]
    with torch.inference_mode():
        expected = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
    start = len(output.prompt_token_ids)
    for place, (token_id, entries) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
        row = expected[start + place - 1]
        top = row.topk(3)
        assert list(entries) == top.indices.tolist()
        assert [entry.rank for entry in entries.values()] == [1, 2, 3]
        assert [entry.logprob for entry in entries.values()] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert entries[token_id].decoded_token is not None
    assert one.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(one.token_ids, one.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    for place, entries in enumerate(output.prompt_logprobs[1:], 1):
        own = entries[whole[place]]
        assert own.logprob == pytest.approx(expected[place - 1, whole[place]].item(), abs=1e-4)
        assert own.rank == 1 + int((expected[place - 1] > expected[place - 1, whole[place]]).sum())


def test_without_logprobs_there_are_none(llm):
    (output,) = llm.generate("A", SamplingParams(max_tokens=2, seed=1), use_tqdm=False)
    one = output.outputs[0]
    assert (one.logprobs, one.cumulative_logprob, output.prompt_logprobs) == (None, None, None)


def test_named_tokens_replace_the_most_likely_ones(llm):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, logprob_token_ids=[100, 200])
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    entries = output.outputs[0].logprobs[0]
    assert set(entries) == {output.outputs[0].token_ids[0], 100, 200}
    assert entries[100].rank is None


def test_a_seed_repeats_an_output_in_any_batch(llm):
    params = SamplingParams(temperature=1.2, max_tokens=12, seed=7)
    (alone,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    together = llm.generate(PROMPTS * 3, params, use_tqdm=False)
    assert together[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert together[4].outputs[0].token_ids == alone.outputs[0].token_ids


def test_choices_differ_and_are_returned_in_order(llm):
    params = SamplingParams(n=4, temperature=1.2, max_tokens=12, seed=7)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len({one.text for one in output.outputs}) > 1
    (single,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1.2, max_tokens=12, seed=7), use_tqdm=False)
    assert single.outputs[0].text == output.outputs[0].text


def test_the_engines_seed_repeats_a_whole_run():
    def run(seed):
        with LLM("models/storyteller-7m", threads=1, num_blocks=64, max_model_len=256, seed=seed) as one:
            return texts(one.generate(PROMPTS, SamplingParams(max_tokens=8), use_tqdm=False))

    first = run(5)
    assert len(set(first)) > 1
    assert run(5) == first
    assert run(6) != first


def test_stops_are_reported_as_vllm_reports_them(llm):
    (plain,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    word = re.findall(r" \w+", plain.outputs[0].text)[4]
    kept = SamplingParams(temperature=0, max_tokens=24, stop=[word], include_stop_str_in_output=True)
    cut, whole = llm.generate(
        ["Once upon a time"] * 2, [SamplingParams(temperature=0, max_tokens=24, stop=word), kept], use_tqdm=False
    )
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", word)
    assert cut.outputs[0].text == plain.outputs[0].text.split(word)[0]
    assert whole.outputs[0].text == cut.outputs[0].text + word
    token = plain.outputs[0].token_ids[5]
    (ended,) = llm.generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[token]), use_tqdm=False
    )
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", token)
    assert ended.outputs[0].token_ids[-1] == token


def test_an_end_of_sequence_has_no_stop_reason(llm):
    (output,) = llm.generate("The end.", SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    ignoring = SamplingParams(temperature=0, max_tokens=len(output.outputs[0].token_ids) + 3, ignore_eos=True)
    (longer,) = llm.generate("The end.", ignoring, use_tqdm=False)
    assert longer.outputs[0].finish_reason == "length"
    least = SamplingParams(temperature=0, max_tokens=400, min_tokens=len(output.outputs[0].token_ids) + 3)
    (more,) = llm.generate("The end.", least, use_tqdm=False)
    assert len(more.outputs[0].token_ids) > len(output.outputs[0].token_ids)


def test_tokens_and_words_can_be_forbidden_forced_and_preferred(llm):
    (plain,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    first, word = plain.outputs[0].token_ids[0], re.findall(r"\w+", plain.outputs[0].text)[3]
    shown = [
        SamplingParams(temperature=0, max_tokens=8, allowed_token_ids=[300, 301]),
        SamplingParams(temperature=0, max_tokens=1, logit_bias={first: -100}),
        SamplingParams(temperature=0, max_tokens=24, bad_words=[word]),
    ]
    allowed, biased, clean = llm.generate(["Once upon a time"] * 3, shown, use_tqdm=False)
    assert set(allowed.outputs[0].token_ids) <= {300, 301}
    assert biased.outputs[0].token_ids[0] != first
    assert word in plain.outputs[0].text
    assert not re.search(rf"\b{word}\b", clean.outputs[0].text)


def test_structured_outputs_are_obeyed(llm):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    forms = [
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(json=json.dumps(schema)),
        StructuredOutputsParams(regex=r"[0-9]{3}-[a-c]{2}"),
        StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
    ]
    params = [SamplingParams(seed=3, max_tokens=120, structured_outputs=form) for form in forms]
    found = texts(llm.generate(["A child:"] * 4, params, use_tqdm=False))
    for text in found[:2]:
        value = json.loads(text)
        assert list(value) == ["name", "age"]
        assert value["age"] <= 99
    assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", found[2])
    assert found[3] in ("yes", "no", "perhaps")


def test_tokens_only_have_no_text(llm):
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 8)


def test_a_cached_prefix_is_reported(llm):
    prompt = "Tom had a red ball and a blue car. " * 8
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= len(second.prompt_token_ids) - 17
    (salted,) = llm.generate({"prompt": prompt, "cache_salt": "mine"}, GREEDY, use_tqdm=False)
    assert salted.num_cached_tokens == 0
    assert salted.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_chat_is_rendered_by_the_models_template(llm):
    chat = [{"role": "user", "content": "Tell me a story about a dog."}]
    single, first, second = (*llm.chat(chat, GREEDY, use_tqdm=False), *llm.chat([chat, chat], GREEDY, use_tqdm=False))
    assert "user\nTell me a story about a dog." in single.prompt
    assert single.outputs[0].text == first.outputs[0].text == second.outputs[0].text
    (named,) = llm.chat(chat, GREEDY, use_tqdm=False, chat_template="{{ messages[0]['content'] }}")
    assert named.prompt.endswith("Tell me a story about a dog.")
    (tail,) = llm.chat(
        [*chat, {"role": "assistant", "content": "Once there"}],
        GREEDY,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert tail.prompt.endswith("Once there")


def test_the_tokenizer_encodes_as_requests_do(llm):
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("Lily's dog", GREEDY, use_tqdm=False)
    assert tokenizer.encode("Lily's dog") == output.prompt_token_ids
    assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
    chat = [{"role": "user", "content": "Hello."}]
    (answer,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True) == answer.prompt_token_ids
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == answer.prompt
    assert len(tokenizer) == tokenizer.vocab_size == 4096


def test_without_parameters_the_models_own_defaults_hold(llm):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.7, 0.9, 50, 16)
    (output,) = llm.generate("Once", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


def test_high_priority_runs_first(llm):
    outputs = llm.generate(["Once upon a time"] * 40, GREEDY, use_tqdm=False, priority=[1] * 39 + [0])
    firsts = [output.metrics.first_token_ts for output in outputs]
    assert firsts[-1] < sorted(firsts)[30]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (3, None, "prompts is of type int"),
        ([{"text": "a"}], None, "a prompt has no parameter text; there are cache_salt, prompt, prompt_token_ids"),
        ([{"promt": "a"}], None, "a prompt has no parameter promt; did you mean prompt"),
        ([{"prompt": 3}], None, "prompt is of type int; give a text"),
        ([{"prompt": "a", "multi_modal_data": {"image": 1}}], None, "multi_modal_data is not supported"),
        ([[1, "a"]], None, "prompt: Expected `int`, got `str`"),
        ([[10**9]], None, "token id 1000000000"),
        (["a", "b"], [SamplingParams()], "sampling_params has 1 entries and prompts has 2"),
        (["a"], {"temperature": 0}, "sampling_params is of type dict"),
        (["a", "b " * 600], SamplingParams(), r"prompts\[1\]: This model's maximum context length is 512 tokens"),
        ([""], SamplingParams(logprobs=21), "logprobs is 21; at most 20"),
        (["a"], SamplingParams(max_tokens=2, min_tokens=3), "min_tokens is 3"),
        (["a"], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "regex"),
    ],
)
def test_a_wrong_call_is_refused_and_names_what_is_wrong(llm, prompts, params, message):
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert len(llm.generate("still here", GREEDY, use_tqdm=False)) == 1


def test_wrong_chats_are_refused(llm):
    with pytest.raises(InvalidParameter, match="messages"):
        llm.chat("hello", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat([[{"content": "no role"}]], use_tqdm=False)
    with pytest.raises(InvalidParameter, match="cannot both be True"):
        llm.chat([{"role": "user", "content": "a"}], continue_final_message=True, use_tqdm=False)


def test_perplexity_of_a_text_is_finite(llm):
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), use_tqdm=False)
    own = [
        entries[token] for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert math.isfinite(math.exp(-sum(entry.logprob for entry in own) / len(own)))
