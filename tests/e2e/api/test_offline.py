"""The offline engine and a running tandem: the same prompts get the same tokens, greedy and seeded."""

import pytest
from support.processes.load import story_prompts
from support.processes.stack import MODEL, MODEL_NAME

from baton.llm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CASES = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalties": {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_k": 40},
    "choices": {"temperature": 1.1, "seed": 5, "n": 3},
    "constrained": {"temperature": 0.8, "seed": 2, "structured_outputs": {"json": SCHEMA}},
    "stops": {"temperature": 0, "stop": [" was", "."], "min_tokens": 3},
}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(MODEL), threads=1, num_blocks=512) as one:
        yield one


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_a_tandem(llm, tandem_stack, case):
    prompts, fields = story_prompts(6), CASES[case]
    body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 24, "return_token_ids": True, **fields}
    status, answer = tandem_stack.post("/v1/completions", body)
    assert status == 200, answer
    form = fields.get("structured_outputs")
    given = {**fields, "structured_outputs": StructuredOutputsParams(**form) if form else None}
    # Fields that the client leaves out have the model's defaults in a completion, and neutral values in vLLM.
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
    outputs = llm.generate(prompts, SamplingParams(**{**defaults, **given}, max_tokens=24), use_tqdm=False)
    found = [choice for output in outputs for choice in output.outputs]
    assert len(found) == len(answer["choices"]) == len(prompts) * fields.get("n", 1)
    for ours, theirs in zip(found, answer["choices"], strict=True):
        assert list(ours.token_ids) == theirs["token_ids"]
        assert (ours.text, ours.finish_reason) == (theirs["text"], theirs["finish_reason"])
        assert ours.stop_reason == theirs["stop_reason"]


def test_chats_are_those_of_a_tandem(llm, tandem_stack):
    for prompt in story_prompts(3):
        answer = tandem_stack.chat(prompt, temperature=0, max_tokens=24)
        (output,) = llm.chat(
            [{"role": "user", "content": prompt}], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False
        )
        assert output.outputs[0].text == answer["choices"][0]["message"]["content"]
