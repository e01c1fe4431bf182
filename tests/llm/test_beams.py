"""LLM.beam_search: the beams of Transformers, best first."""

from __future__ import annotations

import pytest
import torch

from baton.llm import BeamSearchParams, InvalidParameter
from baton.rpc.errors import InvalidRequest

PROMPTS = ["Once upon a time", "The big dog", "Tom was sad. He"]


def beams_of(oracle, prompt_token_ids, width, count, eos):
    """The continuations of Transformers' beam search, and their scores."""
    prompt = torch.tensor([prompt_token_ids])
    found = oracle.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=count,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        length_penalty=1.0,
        early_stopping=False,
        eos_token_id=eos,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = [row[len(prompt_token_ids) :].tolist() for row in found.sequences]
    return [cut(row, eos or []) for row in rows], found.sequences_scores.tolist()


def cut(row, eos):
    """Cuts off what pads a row behind its end."""
    ends = [place for place, token in enumerate(row, 1) if token in eos]
    return row[: ends[0]] if ends else row


@pytest.mark.parametrize("width", [1, 3, 5])
def test_beams_are_those_of_transformers(llm, oracle, width):
    params = BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        expected, scores = beams_of(oracle, ids, width, 12, None) if width > 1 else (None, None)
        assert len(output.sequences) == width
        for place, beam in enumerate(output.sequences):
            assert beam.tokens[: len(ids)] == ids
            assert beam.finish_reason == "length"
            assert beam.cum_logprob == pytest.approx(sum(beam.logprobs))
            assert beam.text.startswith(f"<|bos|>{prompt}")
            if expected is not None:
                assert beam.tokens[len(ids) :] == expected[place]
                assert beam.cum_logprob / 12 == pytest.approx(scores[place], abs=1e-4)


def test_beams_that_end_are_those_of_transformers(llm, oracle):
    prompts = ["They all went home. The end", "Mom said, good night. They slept. The end"]
    params = BeamSearchParams(beam_width=4, max_tokens=10, include_stop_str_in_output=True)
    ended = 0
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        expected, scores = beams_of(oracle, ids, 4, 10, [4, 2])
        assert [beam.tokens[len(ids) :] for beam in output.sequences] == expected
        ended += sum(beam.finish_reason == "stop" for beam in output.sequences)
        for beam, score in zip(output.sequences, scores, strict=True):
            assert beam.cum_logprob / (len(beam.tokens) - len(ids)) == pytest.approx(score, abs=1e-4)
    assert ended


def test_a_beam_leaves_out_the_token_that_ended_it(llm):
    prompt = "They all went home. The end"
    with_stop = llm.beam_search(prompt, BeamSearchParams(4, 10, include_stop_str_in_output=True))[0].sequences
    without = llm.beam_search(prompt, BeamSearchParams(4, 10))[0].sequences
    for kept, cut in zip(with_stop, without, strict=True):
        assert kept.cum_logprob == pytest.approx(cut.cum_logprob, abs=1e-5)
        assert (kept.tokens[:-1] if kept.finish_reason == "stop" else kept.tokens) == cut.tokens


def test_wide_searches_and_limited_concurrency(llm):
    params = BeamSearchParams(beam_width=16, max_tokens=3, ignore_eos=True)
    wide = llm.beam_search(PROMPTS, params)
    assert [len({tuple(beam.tokens) for beam in output.sequences}) for output in wide] == [16] * 3
    assert llm.beam_search(PROMPTS, params, concurrency_limit=1) == wide
    assert llm.get_stats().num_held_blocks == 0


def test_wrong_searches_are_refused(llm):
    with pytest.raises(InvalidParameter, match="params is of type dict"):
        llm.beam_search("a", {"beam_width": 2})
    with pytest.raises(InvalidParameter, match="concurrency_limit is 0"):
        llm.beam_search("a", BeamSearchParams(2, 2), concurrency_limit=0)
    with pytest.raises(InvalidRequest, match="maximum context length"):
        llm.beam_search("b " * 600, BeamSearchParams(2, 2))
