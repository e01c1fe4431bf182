"""`baton run-batch` against LLM: the same tokens, in the input's order, and errors that name their lines."""

import json

import numpy as np
import pytest
import torch
from support.engine.tiny_models import load_transformers
from support.processes.stack import MODEL, MODEL_NAME
from transformers import AutoTokenizer

from baton.llm import LLM, SamplingParams
from baton.services.cli import main

FLAGS = ("--model", str(MODEL), "--executor", "cpu", "--threads", "1", "--num-blocks", "256")


def line(number, url="/v1/completions", **body):
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": {"model": MODEL_NAME, **body}}


@pytest.fixture
def run(tmp_path, capsys):
    def run(lines, *flags):
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
        code = main(["run-batch", "-i", str(source), "-o", str(output), *FLAGS, *flags], {})
        found = [json.loads(one) for one in output.read_text().splitlines()] if output.exists() else []
        return code, found, capsys.readouterr()

    return run


def test_every_target_is_answered_in_the_inputs_order_with_the_tokens_of_the_engine(run):
    prompts = [f"Story {number}: once upon a time" for number in range(12)]
    chat = [{"role": "user", "content": "Tell me a story."}]
    lines = [line(n, prompt=prompt, max_tokens=4 + n, temperature=0) for n, prompt in enumerate(prompts)]
    lines += [
        line(12, "/v1/chat/completions", messages=chat, max_tokens=8, temperature=0),
        line(13, "/v1/responses", input="Tell me a story.", max_output_tokens=8, temperature=0),
    ]
    code, found, printed = run(lines)
    assert code == 0, printed
    assert [one["custom_id"] for one in found] == [f"id-{number}" for number in range(14)]
    assert {one["response"]["status_code"] for one in found} == {200}
    with LLM(str(MODEL), executor="cpu", threads=1, num_blocks=256) as llm:
        wanted = llm.generate(
            prompts, [SamplingParams(temperature=0, max_tokens=4 + n) for n in range(12)], use_tqdm=False
        )
        answered = llm.chat(chat, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    bodies = [one["response"]["body"] for one in found]
    assert [body["choices"][0]["text"] for body in bodies[:12]] == [one.outputs[0].text for one in wanted]
    assert bodies[12]["choices"][0]["message"]["content"] == answered[0].outputs[0].text
    assert bodies[13]["output"][0]["content"][0]["text"] == answered[0].outputs[0].text
    assert "14 requests in" in printed.out


def test_an_embedder_answers_the_routes_for_vectors_as_transformers_computes_them(run):
    texts = ["Once upon a time there was a fox.", "The fox ran home."]
    lines = [
        line(0, "/v1/embeddings", input=texts),
        line(1, "/v1/score", text_1=texts[0], text_2=texts[1]),
        line(2, "/v1/rerank", query=texts[0], documents=[texts[1], texts[0]]),
        line(3, "/pooling", input=texts[0]),
        line(4, "/classify", input=texts[0]),
        line(5, prompt="Hi"),
    ]
    code, found, printed = run(lines, "--convert", "embed")
    assert code == 1
    codes = [one["error"]["code"] if one["error"] else one["response"]["status_code"] for one in found]
    assert codes == [200, 200, 200, 200, 400, "url_mismatch"], printed
    model, tokenizer = load_transformers(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with torch.inference_mode():
        ends = [model.model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1] for text in texts]
    wanted = torch.nn.functional.normalize(torch.stack(ends), dim=-1).numpy()
    bodies = [one["response"]["body"] for one in found[:4]]
    np.testing.assert_allclose([one["embedding"] for one in bodies[0]["data"]], wanted, atol=1e-4)
    cosine = float(wanted[0] @ wanted[1])
    assert bodies[1]["data"][0]["score"] == pytest.approx(cosine, abs=1e-4)
    assert [one["index"] for one in bodies[2]["results"]] == [1, 0]
    np.testing.assert_allclose(bodies[3]["data"][0]["data"], wanted[0], atol=1e-4)


def test_lines_that_are_wrong_are_named_and_the_rest_goes_on(run):
    lines = [
        line(0, prompt="Hi", max_tokens=2),
        "{not json",
        "",
        line(1, "/v1/embeddings", input="Hi"),
        line(0, prompt="Hi"),
        line(2, prompt="Hi", max_tokens=-1),
        line(3, prompt="Hi", max_tokens=2) | {"body": {"model": "other", "prompt": "Hi"}},
        line(4, prompt="Hi", max_tokens=2),
    ]
    code, found, printed = run(lines)
    assert code == 1
    assert [one["custom_id"] for one in found] == ["id-0", None, None, "id-0", "id-2", "id-3", "id-4"]
    codes = [one["error"]["code"] if one["error"] else one["response"]["status_code"] for one in found]
    assert codes == [200, "invalid_json_line", "url_mismatch", "duplicate_custom_id", 400, 404, 200]
    assert found[1]["error"]["message"] == "line 2: This line is not parseable as valid JSON."
    assert "in.jsonl:4: url_mismatch: url is '/v1/embeddings'" in printed.err
    assert "7 requests in" in printed.out
    assert "2 completed, 2 failed, 3 could not be read" in printed.out


def test_wrong_settings_are_errors_that_name_the_flag(run, tmp_path, capsys):
    for flags, message in (
        (("--max-num-request", "3"), "--max-num-request"),
        (("--block-size", "0"), "--block-size"),
        (("--tool-call-parser", "nothing"), "tool_call_parser"),
    ):
        code, _, printed = run([line(0, prompt="Hi")], *flags)
        assert code == 2, printed
        assert message in printed.err
    missing = str(tmp_path / "none.jsonl")
    assert main(["run-batch", "-i", missing, "-o", str(tmp_path / "out"), *FLAGS], {}) == 2
    assert f"--input-file {missing}: No such file" in capsys.readouterr().err
    same = str(tmp_path / "in.jsonl")
    assert main(["run-batch", "-i", same, "-o", same, *FLAGS], {}) == 2
    assert "give two files" in capsys.readouterr().err
    assert main(["run-batch", "-i", same, *FLAGS], {}) == 2
    assert "--output-file" in capsys.readouterr().err
