"""`baton eval`: its figures are those of Transformers' models, also of one that Baton serves quantized."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.engine.packed.unpacked import UNPACK
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from baton.services import cli
from baton.services.evaluation.tasks import last_words, next_sentences, sentences_of
from baton.worker.weights.quantizing.quantize import quantize
from baton.worker.weights.quantizing.scheme import scheme_of

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
ENGINE = ("--threads", "1", "--num-blocks", "64", "--dtype", "float32")
WINDOW = 48
STORY = """
Once upon a time there was a little dog named Max. Max liked to play in the park with his friends. One day, Max saw a
big red ball under a tree. He wanted to play with it. But the ball was stuck in the mud.

Max tried to pull the ball, but it was too hard. Then his friend, a little cat, came to help. "I can help you," said
the cat. They pulled and pulled. At last, the ball came out of the mud. Max was very happy.
"""


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    return path


@pytest.fixture
def ask(capsys):
    def run(*words):
        code = cli.main(["eval", *map(str, words), *ENGINE], {})
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def oracle():
    return AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32).eval()


def encode(text):
    return Tokenizer.from_file(str(SAMPLE / "tokenizer.json")).encode(text).ids


def logprobs_of(model, ids, window=WINDOW):
    """Returns the log-probabilities of each token behind the first of a window, and those tokens."""
    found, tokens = [], []
    with torch.no_grad():
        for start in range(0, len(ids), window):
            piece = torch.tensor(ids[start : start + window])
            if len(piece) > 1:
                found.append(model(piece[None]).logits[0, :-1].log_softmax(-1))
                tokens.append(piece[1:])
    return torch.cat(found), torch.cat(tokens)


def perplexity_of(logprobs, tokens):
    return float((-logprobs.gather(1, tokens[:, None])).mean().exp())


def test_the_perplexity_is_that_of_transformers(ask, story, oracle, tmp_path):
    code, printed, _ = ask("--text", story, "--window", WINDOW, "--json", tmp_path / "found.json")
    assert code == 0
    expected, tokens = logprobs_of(oracle, encode(STORY))
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["tokens"] == len(tokens) > 2 * WINDOW
    assert figures["perplexity"] == pytest.approx(perplexity_of(expected, tokens), rel=1e-4)
    assert f"perplexity    {figures['perplexity']:.4f}\n" in printed


def test_a_quantized_model_differs_from_its_reference_as_its_weights_do(ask, story, oracle, tmp_path):
    out = tmp_path / "w4"
    quantize(SAMPLE, out, scheme_of("w4a16", 64))
    part = STORY[:240]  # all alternatives of a token are 4,096 objects
    story.write_text(part)
    words = ("--text", story, "--model", out, "--reference", SAMPLE, "--window", WINDOW, "--json")
    code, printed, _ = ask(*words, tmp_path / "all.json", "--alternatives", 4096)
    assert code == 0
    assert "by the 4096 likeliest tokens" in printed
    figures = json.loads((tmp_path / "all.json").read_text())
    packed, meant = load_file(out / "model.safetensors"), AutoModelForCausalLM.from_pretrained(SAMPLE)
    meant = meant.float().eval()
    for name, parameter in meant.named_parameters():
        stem = name.removesuffix(".weight")
        if f"{stem}.weight_packed" in packed:
            own = {key.removeprefix(stem): one for key, one in packed.items() if key.startswith(f"{stem}.")}
            parameter.data = torch.from_numpy(UNPACK["w4a16"](own).weight).float()
    before, tokens = logprobs_of(oracle, encode(part))
    after, _ = logprobs_of(meant, encode(part))
    assert figures["reference"]["perplexity"] == pytest.approx(perplexity_of(before, tokens), rel=1e-4)
    assert figures["perplexity"] == pytest.approx(perplexity_of(after, tokens), rel=1e-4)
    divergences = (before.exp() * (before - after)).sum(1)
    found = figures["comparison"]
    assert found["mean_kl"] == pytest.approx(float(divergences.mean()), rel=1e-2)
    assert found["max_kl"] == pytest.approx(float(divergences.max()), rel=1e-2)
    agreed = (before.argmax(1) == after.argmax(1)).float().mean()
    assert found["agreement"] == pytest.approx(float(agreed), abs=1.5 / len(tokens))
    assert 0.7 < found["agreement"] < 1
    assert ask(*words, tmp_path / "some.json")[0] == 0
    of_some = json.loads((tmp_path / "some.json").read_text())["comparison"]
    assert of_some["agreement"] == found["agreement"]
    assert 0.5 * found["mean_kl"] < of_some["mean_kl"] <= found["mean_kl"] * 1.001


def test_the_reference_of_weights_that_are_rounded_at_load_is_not(ask, story):
    code, printed, _ = ask("--text", story, "--quantization", "fp8", "--reference", SAMPLE)
    assert code == 0
    assert "KL            0.00000 " not in printed
    assert "agreement     100" not in ask("--text", story, "--reference", SAMPLE, "--quantization", "fp8")[1]
    assert "KL            0.00000 " in ask("--text", story, "--reference", SAMPLE)[1]


@pytest.mark.filterwarnings("ignore")
def test_tasks_of_the_text_are_scored_as_transformers_scores_them(ask, story, oracle, tmp_path):
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"text": STORY.strip()}) + "\n")
    (folder / "rolling.yaml").write_text(
        f"task: rolling\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder}}}\n"
        'output_type: loglikelihood_rolling\ntest_split: test\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}]\n"
    )
    words = ("--tasks", "last-word,next-sentence,rolling", "--task-folder", folder, "--json", tmp_path / "found.json")
    assert ask("--text", story, *words)[0] == 0
    found = json.loads((tmp_path / "found.json").read_text())["tasks"]
    sentences = sentences_of(STORY)

    def score(context, continuation):
        ids, skipped = encode(context + continuation), len(encode(context))
        logprobs, tokens = logprobs_of(oracle, ids, 2048)
        own = logprobs[skipped - 1 :].gather(1, tokens[skipped - 1 :, None])
        return float(own.sum()), bool((logprobs[skipped - 1 :].argmax(1) == tokens[skipped - 1 :]).all())

    of_words = [score(doc["context"], f" {doc['word']}") for doc in last_words(sentences)]
    assert found["last-word"]["acc"] == pytest.approx(sum(right for _, right in of_words) / len(of_words))
    mean = sum(one for one, _ in of_words) / len(of_words)
    assert found["last-word"]["perplexity"] == pytest.approx(float(torch.tensor(-mean).exp()), rel=1e-3)
    right = []
    for doc in next_sentences(sentences):
        of_choices = [score(doc["context"], f" {choice}")[0] for choice in doc["choices"]]
        right.append(of_choices.index(max(of_choices)) == doc["gold"])
    assert found["next-sentence"]["acc"] == pytest.approx(sum(right) / len(right))
    whole, tokens = logprobs_of(oracle, encode(STORY.strip()), 2048)
    in_all = float(whole.gather(1, tokens[:, None]).sum())
    expected = float(torch.tensor(-in_all / len(STORY.split())).exp())
    assert found["rolling"]["word_perplexity"] == pytest.approx(expected, rel=1e-3)


def test_sentences_of_a_text_become_examples():
    sentences = sentences_of(STORY)
    assert sentences[2] == "One day, Max saw a big red ball under a tree."
    assert '"I can help you," said the cat.' in sentences
    docs = next_sentences(sentences)
    assert len(docs) == len(sentences) - 3
    for place, doc in enumerate(docs):
        assert doc["choices"][doc["gold"]] == sentences[place + 3]
        assert len(set(doc["choices"])) == 4
        assert not any(choice in doc["context"] for choice in doc["choices"])
    assert last_words(sentences)[0] == {"context": f"{' '.join(sentences[:3])[: -len(' tree.')]}", "word": "tree"}


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, (), r"--text=.*story.txt: No such file"),
        (b"", (), r"--text=.*story.txt: the file is empty"),
        (b"a\xff", (), r"--text=.*story.txt: byte 1 is not UTF-8"),
        (b"Short.", ("--tasks", "last-word"), r"--tasks=last-word: the text has 0 sentences of at least 3 words"),
        (b"Short.", ("--tasks", "word"), r"--tasks=word: it must be one of last-word, next-sentence"),
        (b"Short.", ("--task-folder", "/none"), r"--task-folder=/none: there is no such folder"),
        (b"Short.", ("--alternatives", "0"), r"--alternatives: '0' is not allowed"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_is_named(ask, story, content, words, message):
    if content is None:
        story.unlink()
    else:
        story.write_bytes(content)
    code, printed, errors = ask("--text", story, *words)
    assert (code, printed) == (2, "")
    assert re.search(f"baton eval: {message}", errors), errors


def test_a_reference_with_another_tokenizer_is_named(ask, story, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(SAMPLE, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:1000]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, _, errors = ask("--text", story, "--reference", other)
    assert code == 2
    assert "baton eval: --reference=" in errors
    assert "its tokenizer makes other tokens of the text" in errors
